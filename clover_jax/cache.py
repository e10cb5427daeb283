"""The key/value cache: one pair of arrays per layer, so that no step copies it.

Axes: B batch, K kv heads, S slots, T new tokens, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clover_jax.config import TargetConfig
from clover_jax.layers import LayerKV

KVCache = tuple[LayerKV, ...]


def init(config: TargetConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: per layer two arrays [B, K, S, H] of zeros."""
    shape = (batch, config.num_kv_heads, slots, config.head_dim)
    return tuple(
        LayerKV(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(config.num_layers)
    )


def commit(cache: KVCache, new: KVCache, slots: jax.Array) -> KVCache:
    """Writes new keys and values into their slots.

    Args:
      cache: arrays [B, K, S, H].
      new: arrays [B, K, T, H].
      slots: int32 [B, T]; a token whose slot is S is dropped, nothing is ever clamped.
    """

    def write(held: jax.Array, fresh: jax.Array, slot: jax.Array) -> jax.Array:
        return held.at[:, slot].set(fresh.astype(held.dtype), mode="drop")

    return jax.tree.map(lambda held, fresh: jax.vmap(write)(held, fresh, slots), cache, new)
