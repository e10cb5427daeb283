"""The target: a decoder as a pure function of parameters, tokens and cache.

Axes: B batch, T query tokens, S cache slots, D model, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from clover_jax.attention import Context
from clover_jax.cache import KVCache, num_slots
from clover_jax.config import TargetConfig
from clover_jax.layers import DecoderLayer, RMSNorm
from clover_jax.matmul import matmul


def lm_head(params: Any) -> jax.Array:
    """The rows that score the vocabulary, [V, D]: the embedding's where the two are tied."""
    head: jax.Array = params["lm_head" if "lm_head" in params else "embed_tokens"]
    return head


def causal_mask(length: int) -> jax.Array:
    """bool [T, T]: token i sees tokens 0..i."""
    return jnp.tril(jnp.ones((length, length), bool))


class Target(nn.Module):
    """Decoder of the families in families.py.

    Parameters carry Hugging Face's names and shapes: weights are [out, in].

    The layers are unrolled: a cache that passes through a scan is copied at every step.
    """

    config: TargetConfig

    def setup(self) -> None:
        c = self.config
        init = nn.initializers.normal(0.02)
        self.embed_tokens = self.param(
            "embed_tokens", init, (c.vocab_size, c.hidden_size), jnp.float32
        )
        self.layers = [DecoderLayer(c, name=f"layers_{i}") for i in range(c.num_layers)]
        self.norm = RMSNorm(c.rms_norm_eps)
        # A tied target may still carry an LM head of its own, the embedding in another dtype.
        self.tied = c.tie_word_embeddings and not self.has_variable("params", "lm_head")
        if not self.tied:
            self.lm_head = self.param("lm_head", init, (c.vocab_size, c.hidden_size), jnp.float32)

    def __call__(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        block_mask: jax.Array,
        cache: KVCache | None = None,
        cache_length: jax.Array | None = None,
        span: jax.Array | None = None,
    ) -> tuple[jax.Array, KVCache]:
        """One forward pass; the cache is read, never written.

        Args:
          tokens: int32 [B, T].
          positions: int32 [B, T].
          block_mask: bool [T, T] or [B, T, T], which of the T tokens sees which; each sees itself.
          cache: keys and values of earlier tokens, S slots, or None for none.
          cache_length: int32 [B]; slots below it are seen by every token.
          span: int32 [B, T], the sequence length each token is computed at, for `dynamic` rotary
            scaling; by default the longest position of the row in this pass, as in transformers.

        Returns:
          The last layer's output before the final norm, [B, T, D] in the dtype of the embedding,
          and the keys and values of the T tokens.
        """
        contexts = pass_contexts(self.config, positions, block_mask, cache, cache_length, span)
        x = self.embed(tokens)
        new = []
        for i, layer in enumerate(self.layers):
            context = contexts[self.config.window(i)]
            x, layer_kv = layer(x, cache[i] if cache is not None else None, context)
            new.append(layer_kv)
        return x, tuple(new)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """int32 [...] -> [..., D]."""
        rows = self.embed_tokens[tokens]
        scale = self.config.embed_scale
        return rows if scale == 1.0 else rows * jnp.asarray(scale, rows.dtype)

    def normalize(self, hidden: jax.Array) -> jax.Array:
        """The final norm: [..., D] -> [..., D] in the same dtype."""
        return self.norm(hidden)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Pre-norm hidden states [..., D] -> f32 logits [..., V]."""
        head = self.embed_tokens if self.tied else self.lm_head
        logits, cap = matmul(self.norm(hidden), head), self.config.logit_softcap
        return logits if cap is None else cap * jnp.tanh(logits / cap)


def pass_contexts(
    config: TargetConfig,
    positions: jax.Array,
    block_mask: jax.Array,
    cache: KVCache | None,
    cache_length: jax.Array | None,
    span: jax.Array | None = None,
) -> dict[int | None, Context]:
    """What one forward pass over [B, T] positions shares between its layers, by their window."""
    if span is None:
        span = jnp.max(positions, axis=1, keepdims=True) + 1
    batch = positions.shape[0]
    block = block_mask if block_mask.ndim == 3 else block_mask[None]
    slots = jnp.arange(num_slots(cache) if cache is not None else 0)
    length = jnp.zeros(batch, jnp.int32) if cache_length is None else cache_length
    seen = (slots < length[:, None])[:, None]  # [B, 1, S]
    end = jnp.max(length)
    found: dict[int | None, Context] = {}
    for window in dict.fromkeys(config.windows or (None,)):
        rope = config.rope if window is None or config.local_rope is None else config.local_rope
        cos, sin = rope.tables(positions, span)
        if window is None:
            found[window] = Context(cos, sin, block, seen, (jnp.int32(0), end))
        else:
            near = positions[:, :, None] - positions[:, None] < window  # [B, T, T]
            recent = slots > positions[..., None] - window  # [B, T, S]
            oldest = jnp.clip(jnp.min(positions) - window + 1, 0, end)
            found[window] = Context(cos, sin, block & near, seen & recent, (oldest, end))
    return found
