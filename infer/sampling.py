"""From logits to a token: temperature, top-k, top-p, and noise that plain and draft share.

The token at position t of a row is argmax(processed logits + g_t), with g_t Gumbel noise drawn
from fold_in(row key, t): a sample of the softmax (the Gumbel-max trick). Whoever asks for the token
at t, the plain loop, the draft or the verification, meets the same noise; so a draft that is close
to the target proposes what the target will say, and the text depends on the target and the seed
alone (drafter-invariant coupling, arXiv 2408.07978).

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Probabilities are sums of rounded numbers: a prefix that misses top_p by less has reached it.
_MASS_TOLERANCE = 1e-6

# Named, because the same seed must give the same text whatever JAX's default is set to.
_GENERATOR = "threefry2x32"


class Sampling(NamedTuple):
    """Settings of each row.

    Attributes:
      temperature: f32 [B]; 0 is greedy.
      top_k: int32 [B]; 0 is off.
      top_p: f32 [B]; 1 is off.
      keys: uint32 [B, 2], raw key data; noise depends on it and on the position alone.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    keys: jax.Array


def row_keys(seed: int | Sequence[int], rows: int) -> jax.Array:
    """Key data of each row, uint32 [rows, 2]: one seed per row, or seed + i for row i.

    Raises:
      ValueError: seeds that are not whole numbers, or not one per row.
    """
    seeds = np.asarray(seed)
    if not np.issubdtype(seeds.dtype, np.integer):
        raise ValueError(f"seed must be a whole number, got {seed!r}")
    if seeds.ndim > 1 or (seeds.ndim == 1 and len(seeds) != rows):
        raise ValueError(f"seed holds {seeds.size} values for {rows} prompts")
    each = [int(seeds) + i for i in range(rows)] if seeds.ndim == 0 else [int(s) for s in seeds]
    # Both halves of the seed enter the key, whatever the width of integers in use.
    return jnp.asarray([[(s >> 32) & 0xFFFFFFFF, s & 0xFFFFFFFF] for s in each], jnp.uint32)


def gumbel_noise(sampling: Sampling, positions: jax.Array, vocab_size: int) -> jax.Array:
    """Noise for the tokens at `positions` (int32 [B]): f32 [B, V]; zeros for greedy rows."""

    def draw(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_GENERATOR), position)
        return jax.random.gumbel(key, (vocab_size,), jnp.float32)

    shape = (positions.shape[0], vocab_size)
    warm = sampling.temperature > 0
    noise = jax.lax.cond(
        jnp.any(warm),
        lambda: jax.vmap(draw)(sampling.keys, positions),
        lambda: jnp.zeros(shape, jnp.float32),
    )
    return jnp.where(warm[:, None], noise, 0.0)


def process(logits: jax.Array, sampling: Sampling) -> jax.Array:
    """Temperature, then top-k, then top-p: [B, V] -> f32 [B, V] with -inf where ruled out.

    The largest logit always stays. Greedy rows keep their logits.
    """
    warm = sampling.temperature > 0
    logits = logits.astype(jnp.float32)
    logits = logits / jnp.where(warm, sampling.temperature, 1.0)[:, None]

    def top_k(x: jax.Array) -> jax.Array:
        goal = jnp.where(sampling.top_k > 0, sampling.top_k, x.shape[-1]).astype(jnp.float32)
        kept = _shortest_prefix(x, jnp.ones_like(x), goal)
        return jnp.where(kept | ~warm[:, None], x, -jnp.inf)

    def top_p(x: jax.Array) -> jax.Array:
        kept = _shortest_prefix(x, jax.nn.softmax(x, axis=-1), sampling.top_p - _MASS_TOLERANCE)
        off = ~warm | (sampling.top_p >= 1.0)
        return jnp.where(kept | off[:, None], x, -jnp.inf)

    logits = jax.lax.cond(jnp.any(warm & (sampling.top_k > 0)), top_k, lambda x: x, logits)
    return jax.lax.cond(jnp.any(warm & (sampling.top_p < 1.0)), top_p, lambda x: x, logits)


def choose(logits: jax.Array, noise: jax.Array, sampling: Sampling) -> jax.Array:
    """The token each row emits: logits [B, V], noise [B, V] -> int32 [B]."""
    return jnp.argmax(process(logits, sampling) + noise, axis=-1).astype(jnp.int32)


def _shortest_prefix(x: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Marks the fewest largest entries whose weights sum to at least goal, and at least one.

    Bisects on the value that divides kept from dropped, over the 2^32 floats in their order: exact,
    and cheaper than sorting a vocabulary. Equal values are kept from the left.

    Args:
      x: f32 [B, V].
      weights: f32 [B, V], not negative.
      goal: f32 [B].

    Returns:
      bool [B, V].
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0 equals 0
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # int32 that compares like the float

    def mass(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # between them: the largest value that still reaches the goal
        middle = (low | high) - ((low ^ high) >> 1)  # their mean rounded up, without overflow
        reached = mass(order >= middle[:, None]) >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low, high = jnp.min(order, axis=-1), jnp.max(order, axis=-1)
    cut, _ = jax.lax.fori_loop(0, 32, narrow, (low, high))
    above = order > cut[:, None]
    ties = order == cut[:, None]
    each = jnp.max(jnp.where(ties, weights, 0.0), axis=-1)  # equal values weigh the same
    count = jnp.maximum(jnp.ceil((goal - mass(above)) / each), 1.0)
    return above | (ties & (jnp.cumsum(ties, axis=-1) <= count[:, None]))
