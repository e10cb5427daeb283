"""The key/value cache: one pair of arrays per layer, so that no step copies it.

Axes: B batch, K kv heads, S slots, T new tokens, H head dim.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from clover_jax.attention import LayerKV
from clover_jax.config import TargetConfig

KVCache = tuple[LayerKV, ...]


def init(config: TargetConfig, batch: int, slots: int, dtype: jnp.dtype) -> KVCache:
    """An empty cache: per layer keys [B, K, H, S] and values [B, K, S, H] of zeros."""
    heads, width = config.num_kv_heads, config.head_dim
    return tuple(
        LayerKV(
            k=jnp.zeros((batch, heads, width, slots), dtype),
            v=jnp.zeros((batch, heads, slots, width), dtype),
        )
        for _ in range(config.num_layers)
    )


def num_slots(cache: KVCache) -> int:
    """S."""
    return cache[0].v.shape[2]


@jax.named_scope("commit")
def take(new: KVCache, nodes: jax.Array) -> KVCache:
    """The keys and values of some of the new tokens, `nodes` (int32 [B, L])."""
    at = nodes[:, None, :, None]  # [B, 1, L, 1]
    return tuple(
        LayerKV(
            k=jnp.take_along_axis(fresh.k, at.swapaxes(2, 3), axis=3),
            v=jnp.take_along_axis(fresh.v, at, axis=2),
        )
        for fresh in new
    )


@jax.named_scope("commit")
def commit(cache: KVCache, new: KVCache, slots: jax.Array, output: jax.Array) -> KVCache:
    """Writes the keys and values of T new tokens into their slots.

    Args:
      slots: int32 [B, T]; a token whose slot is S is dropped, nothing is ever clamped.
      output: [B, T, D], what came out of the pass that read the cache; a token that came out as NaN
        is dropped too. So the write has to wait for the reads. Keys and values alone would let the
        compiler write first, and for that it copies whole caches.
    """
    slots = jnp.where(jnp.isnan(output[..., 0]), num_slots(cache), slots)

    def write(held: LayerKV, fresh: LayerKV, slot: jax.Array) -> LayerKV:  # one row
        return LayerKV(
            k=held.k.at[:, :, slot].set(fresh.k.astype(held.k.dtype), mode="drop"),
            v=held.v.at[:, slot].set(fresh.v.astype(held.v.dtype), mode="drop"),
        )

    return tuple(
        jax.vmap(write)(held, fresh, slots) for held, fresh in zip(cache, new, strict=True)
    )
