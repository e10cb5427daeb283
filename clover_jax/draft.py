"""The Clover-2 draft head (arXiv 2408.00264, section 3).

With h_t the target's last hidden state before its final norm, and x_{t+1} the token chosen there:

    z_t      = AD1(h_t, e(x_{t+1}))                       information extraction
    s_0      = RMSNorm(decoder layers(z_0 .. z_t))        augmenting block, once per verification
    logits_0 = LMHead(head_norm(FC1 s_0))
    s_i      = AD2(s_{i-1}, e(x))                         for a draft token x
    logits_i = LMHead(head_norm(FC2 [s_i ; e(x)]))

LMHead and e are the target's and frozen; the head holds everything else.

Axes: B batch, T tokens, D model, n attention-decoder heads; `...` any leading axes.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.cache import KVCache
from clover_jax.config import DraftConfig
from clover_jax.layers import DecoderLayer, Dense, RMSNorm
from clover_jax.sharding import whole_width
from clover_jax.target import pass_contexts


class AttentionDecoder(nn.Module):
    """AD(x, e) = x + concat over heads of cosine(q, k) * v (section 3.1).

    q comes from the normalised state, k and v from the token; there is no softmax, no output
    projection and no activation.
    """

    num_heads: int
    epsilon: float

    @nn.compact
    def __call__(self, state: jax.Array, embedding: jax.Array) -> jax.Array:
        """state [..., D], embedding [..., D] -> [..., D] in the state's dtype."""
        width = state.shape[-1]

        def heads(name: str, x: jax.Array) -> jax.Array:
            y = Dense(width, use_bias=True, name=name)(x)
            return y.reshape(*y.shape[:-1], self.num_heads, width // self.num_heads)

        def unit(x: jax.Array) -> jax.Array:
            # sqrt has no finite slope at 0, so the floor goes under the root.
            square = jnp.sum(jnp.square(x), axis=-1, keepdims=True)
            return x * jax.lax.rsqrt(jnp.maximum(square, self.epsilon**2))

        q = heads("q", RMSNorm(self.epsilon, name="input_layernorm")(state))
        k, v = heads("k", embedding), heads("v", embedding)
        gate = jnp.sum(unit(q) * unit(k), axis=-1, keepdims=True)
        return whole_width(state + (gate * v).reshape(state.shape).astype(state.dtype))


class DraftHead(nn.Module):
    """The trainable part of Clover-2."""

    config: DraftConfig

    def setup(self) -> None:
        c = self.config
        epsilon, width = c.block.rms_norm_eps, c.block.hidden_size
        self.ad1 = AttentionDecoder(c.num_heads, epsilon)
        self.block = [DecoderLayer(c.block, name=f"block_{i}") for i in range(c.block.num_layers)]
        self.block_norm = RMSNorm(epsilon)
        self.fc1 = Dense(width, use_bias=True)
        self.ad2 = AttentionDecoder(c.num_heads, epsilon)
        self.fc2 = Dense(width, use_bias=True)
        self.head_norm = RMSNorm(epsilon)

    def __call__(self, hidden: jax.Array, embeddings: jax.Array) -> jax.Array:
        """Touches every parameter, for init: [B, T, D] twice -> [B, T, D]."""
        positions = jnp.broadcast_to(jnp.arange(hidden.shape[1]), hidden.shape[:2])
        mask = jnp.tril(jnp.ones((hidden.shape[1], hidden.shape[1]), bool))
        state, _ = self.advance(hidden, embeddings, positions, mask)
        return self.first_features(state) + self.extend(state, embeddings)[1]

    def advance(
        self,
        hidden: jax.Array,
        embeddings: jax.Array,
        positions: jax.Array,
        block_mask: jax.Array,
        cache: KVCache | None = None,
        cache_length: jax.Array | None = None,
        span: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """Reads tokens that the target has accepted; the cache is read, never written.

        Args:
          hidden: [B, T, D], h_t for each of T positions.
          embeddings: [B, T, D], e(x_{t+1}).
          positions: int32 [B, T], t.
          block_mask, cache, cache_length, span: as for Target.

        Returns:
          s_0 at each position, [B, T, D] in hidden's dtype, and the block's new keys and values.
        """
        block = self.config.block
        context = pass_contexts(block, positions, block_mask, cache, cache_length, span)[None]
        x = self.ad1(hidden, embeddings)
        new = []
        for i, layer in enumerate(self.block):
            x, layer_kv = layer(x, cache[i] if cache is not None else None, context)
            new.append(layer_kv)
        return self.block_norm(x), tuple(new)

    def first_features(self, state: jax.Array) -> jax.Array:
        """s_0 [..., D] -> what the LM head reads to propose the first draft token, f32 [..., D]."""
        return self.head_norm(self.fc1(state))

    def extend(self, parent: jax.Array, embedding: jax.Array) -> tuple[jax.Array, jax.Array]:
        """One draft token further: parent state and e(token), each [..., D].

        Returns:
          The token's state [..., D] in the parent's dtype, and what the LM head reads to propose
          its children, f32 [..., D].
        """
        state = self.ad2(parent, embedding)
        joined = jnp.concatenate([state, embedding.astype(state.dtype)], axis=-1)
        return state, self.head_norm(self.fc2(joined))
