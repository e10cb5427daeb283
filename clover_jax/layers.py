"""Layers shared by the target and the draft head.

Axes: B batch, T query, S cache, K kv heads, H head dim, D model, F MLP.

Activations keep the dtype they come in, products are computed in the dtype of their weights (see
matmul.py); norms, rotary embedding and softmax in f32.
"""

from __future__ import annotations

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax import rope
from clover_jax.attention import Context, LayerKV, attend
from clover_jax.config import TargetConfig
from clover_jax.matmul import matmul
from clover_jax.sharding import whole_width

_ACTIVATIONS = {
    "silu": nn.silu,
    "gelu": functools.partial(nn.gelu, approximate=False),
    "gelu_pytorch_tanh": functools.partial(nn.gelu, approximate=True),
    "relu": nn.relu,
}


class Dense(nn.Module):
    """y = x @ weight.T + bias, f32 [..., features]."""

    features: int
    use_bias: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.initializers.lecun_normal(in_axis=-1, out_axis=-2)
        weight = self.param("weight", init, (self.features, x.shape[-1]), jnp.float32)
        y = matmul(x, weight)
        if self.use_bias:
            y += self.param("bias", nn.initializers.zeros, (self.features,), jnp.float32)
        return y


class RMSNorm(nn.Module):
    """x / rms(x) * scale over the last axis, computed in f32, in x's dtype."""

    epsilon: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],), jnp.float32)
        wide = x.astype(jnp.float32)
        mean_square = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean_square + self.epsilon) * scale.astype(jnp.float32)
        return wide.astype(x.dtype)


class Attention(nn.Module):
    """Grouped-query self-attention with rotary positions."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: LayerKV | None, context: Context, dtype: jnp.dtype
    ) -> tuple[jax.Array, LayerKV]:
        c = self.config

        def project(name: str, heads: int) -> jax.Array:
            y = Dense(heads * c.head_dim, c.qkv_bias, name=name)(x)
            return y.reshape(*x.shape[:2], heads, c.head_dim)

        q, k = project("q_proj", c.num_heads), project("k_proj", c.num_kv_heads)
        v = project("v_proj", c.num_kv_heads)
        if c.qk_norm:
            q = RMSNorm(c.rms_norm_eps, name="q_norm")(q)
            k = RMSNorm(c.rms_norm_eps, name="k_norm")(k)
        q, k = (rope.apply(x, context.cos, context.sin) for x in (q, k))
        new = LayerKV(
            k=jnp.transpose(k.astype(dtype), (0, 2, 3, 1)),  # [B, K, H, T]
            v=jnp.transpose(v.astype(dtype), (0, 2, 1, 3)),  # [B, K, T, H]
        )
        scale = c.head_dim**-0.5 if c.query_scale is None else c.query_scale
        out = attend(q.astype(dtype), new, cache, context, scale, c.attention_softcap)
        return Dense(c.hidden_size, c.out_bias, name="o_proj")(out.astype(dtype)), new


class MLP(nn.Module):
    """down(act(gate(x)) * up(x))."""

    config: TargetConfig

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        c = self.config
        gate = Dense(c.intermediate_size, c.mlp_bias, name="gate_proj")(x)
        up = Dense(c.intermediate_size, c.mlp_bias, name="up_proj")(x)
        inner = (_ACTIVATIONS[c.hidden_act](gate) * up).astype(x.dtype)
        # Without it the TPU compiler draws one of the products above into the one below, and both
        # together then take 1.3 times as long as one after the other.
        inner = jax.lax.optimization_barrier(inner)
        return Dense(c.hidden_size, c.mlp_bias, name="down_proj")(inner)


class DecoderLayer(nn.Module):
    """Pre-norm decoder layer, with norms behind too if so configured; the residual stream keeps its
    dtype."""

    config: TargetConfig

    @nn.compact
    def __call__(
        self, x: jax.Array, cache: LayerKV | None, context: Context
    ) -> tuple[jax.Array, LayerKV]:
        """x [B, T, D] -> ([B, T, D], keys and values of the T tokens)."""
        c = self.config

        def norm(name: str, y: jax.Array) -> jax.Array:
            return RMSNorm(c.rms_norm_eps, name=name)(y)

        normed = norm("input_layernorm", x)
        attended, new = Attention(c, name="self_attn")(normed, cache, context, x.dtype)
        if c.post_norms:
            attended = norm("post_attention_layernorm", attended)
        x = whole_width(x + attended.astype(x.dtype))
        before = "pre_feedforward_layernorm" if c.post_norms else "post_attention_layernorm"
        out = MLP(c, name="mlp")(norm(before, x))
        if c.post_norms:
            out = norm("post_feedforward_layernorm", out)
        return whole_width(x + out.astype(x.dtype)), new
