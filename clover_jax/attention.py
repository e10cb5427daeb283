"""Attention of the tokens of one pass over each other and over a cache.

Axes: B batch, T query, S slots or new tokens, K kv heads, G query heads per kv head, M = T * G
queries that share a kv head, H head dim.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax import splash
from clover_jax.matmul import LEAST_ROWS

# From so many queries on, the cache is read block by block, which bounds the scores and leaves out
# empty slots; fewer are faster in one go.
_MANY_QUERIES = 128
_BLOCK = 512  # slots

_MASKED = float(jnp.finfo(jnp.float32).min)  # finite, so that a block may be masked as a whole


class LayerKV(NamedTuple):
    """Keys [B, K, H, S] and values [B, K, S, H] of one layer, S slots or new tokens.

    Keys lie transposed, so that both products of the attention read their operand as it lies.
    """

    k: jax.Array
    v: jax.Array


class Context(NamedTuple):
    """What the tokens of one forward pass share in every layer of a kind.

    Attributes:
      cos, sin: f32 [B, T, H/2].
      block_mask: bool [B or 1, T, T], which new token sees which; each sees itself.
      cache_mask: bool [B, T or 1, S], which cache slots each of them sees.
      cache_range: int32 scalars, the first slot that any of them sees, and the one after the last.
    """

    cos: jax.Array
    sin: jax.Array
    block_mask: jax.Array
    cache_mask: jax.Array
    cache_range: tuple[jax.Array, jax.Array]


class Sums(NamedTuple):
    """A softmax over some keys, before it is divided by its total.

    Attributes:
      maximum: f32 [B, K, M, 1], of the scores.
      total: f32 [B, K, M, 1], sum of exp(score - maximum).
      out: f32 [B, K, M, H], sum of exp(score - maximum) * value.
    """

    maximum: jax.Array
    total: jax.Array
    out: jax.Array


def attend(
    q: jax.Array,
    new: LayerKV,
    cache: LayerKV | None,
    context: Context,
    scale: float,
    softcap: float | None = None,
) -> jax.Array:
    """Attention over the cache and over the new tokens, without joining the two.

    This is where the way to read the cache is chosen, by the number of queries and the platform.

    Args:
      q: [B, T, K*G, H], rotated.
      new: keys and values of the T tokens.
      cache: keys and values of earlier tokens, or None.
      scale, softcap: scores are multiplied by the one, and bent to stay within the other.

    Returns:
      [B, T, K*G*H], f32.
    """
    batch, queries, heads, head_dim = q.shape
    kv_heads = new.v.shape[1]
    groups = heads // kv_heads
    q = (q * scale).reshape(batch, queries, kv_heads, groups, head_dim)
    if queries * groups == 1 and q.dtype.itemsize == 2:
        # A single row would not use the matrix unit of a TPU.
        q = jnp.pad(q, [(0, 0)] * 3 + [(0, LEAST_ROWS - 1), (0, 0)])
    # The queries that share a kv head become the rows of one product per kv head.
    rows = jnp.moveaxis(q, 2, 1).reshape(batch, kv_heads, -1, head_dim)  # [B, K, M, H]
    sums = over_keys(rows, new, _by_row(context.block_mask, rows), softcap)
    if cache is not None:
        sums = merge(sums, _over_cache(rows, queries, cache, context, softcap))
    out = (sums.out / sums.total).reshape(batch, kv_heads, queries, -1, head_dim)
    out = out[:, :, :, :groups]  # without the padding
    return jnp.moveaxis(out, 1, 2).reshape(batch, queries, heads * head_dim)


def _over_cache(
    rows: jax.Array, queries: int, cache: LayerKV, context: Context, softcap: float | None
) -> Sums:
    if queries < _MANY_QUERIES:
        return over_keys(rows, cache, _by_row(context.cache_mask, rows), softcap)
    by_blocks = functools.partial(over_blocks, context=context, softcap=softcap)
    all_alike = context.cache_mask.shape[1] == 1  # the queries of a row see the same slots
    if not (all_alike and splash.fits(queries, cache.v.shape[2], rows.shape[-1])):
        return by_blocks(rows, cache)

    def by_kernel(rows: jax.Array, cache: LayerKV) -> Sums:
        q = rows.reshape(*rows.shape[:2], queries, -1, rows.shape[-1])
        out, log_total = splash.over_slots(q, *cache, context.cache_mask[:, 0], softcap)
        log_total = log_total.reshape(*rows.shape[:-1], 1)
        return Sums(log_total, jnp.ones_like(log_total), out.reshape(rows.shape))

    sums: Sums = jax.lax.platform_dependent(rows, cache, tpu=by_kernel, default=by_blocks)
    return sums


def _by_row(mask: jax.Array, rows: jax.Array) -> jax.Array:
    """A mask of queries [B or 1, T or 1, S] as one of rows, [B or 1, M or 1, S]."""
    queries = mask.shape[1]
    return mask if queries == 1 else jnp.repeat(mask, rows.shape[2] // queries, axis=1)


def over_keys(rows: jax.Array, kv: LayerKV, mask: jax.Array, softcap: float | None) -> Sums:
    """All keys at once: rows [B, K, M, H], mask bool [B or 1, M or 1, S]."""
    scores = jnp.einsum("bkmh,bkhs->bkms", rows, kv.k, preferred_element_type=jnp.float32)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    scores = jnp.where(mask[:, None], scores, _MASKED)
    maximum = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - maximum)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights.astype(kv.v.dtype)
    out = jnp.einsum("bkms,bksh->bkmh", weights, kv.v, preferred_element_type=jnp.float32)
    return Sums(maximum, total, out)


def merge(one: Sums, other: Sums) -> Sums:
    """The softmax over the keys of both."""
    maximum = jnp.maximum(one.maximum, other.maximum)
    a, b = jnp.exp(one.maximum - maximum), jnp.exp(other.maximum - maximum)
    return Sums(maximum, a * one.total + b * other.total, a * one.out + b * other.out)


def over_blocks(rows: jax.Array, cache: LayerKV, context: Context, softcap: float | None) -> Sums:
    """A cache block by block, those that no query sees left out."""
    slots = cache.v.shape[2]
    size = min(_BLOCK, slots)

    def add(index: jax.Array, sums: Sums) -> Sums:
        first = index * size
        start = jnp.minimum(first, slots - size)  # the last block reaches back to be a whole one
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, start_index=start, slice_size=size)
        kv = LayerKV(cut(cache.k, axis=3), cut(cache.v, axis=2))
        fresh = start + jnp.arange(size) >= first
        mask = _by_row(cut(context.cache_mask, axis=2) & fresh, rows)
        return merge(sums, over_keys(rows, kv, mask, softcap))

    lead = rows.shape[:-1]
    nothing = Sums(
        jnp.full((*lead, 1), _MASKED), jnp.zeros((*lead, 1)), jnp.zeros(rows.shape, jnp.float32)
    )
    first, end = context.cache_range
    return jax.lax.fori_loop(first // size, -(-end // size), add, nothing)
