"""From logits to a token: adjustments, temperature, top-k, top-p, min-p, and shared noise.

The token at position t of a row is argmax(processed logits + g_t), with g_t Gumbel noise drawn
from fold_in(row key, t): a sample of the softmax (the Gumbel-max trick). A draft that is close to
the target and ranks with the same noise proposes what the target will say; and the text depends on
the target and the seed alone.

Axes: B rows, C candidates, V vocabulary; `...` axes between rows and candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from infer.adjust import Adjustments
from infer.noise import gumbel

# Probabilities are sums of rounded numbers: a prefix that misses top_p by less has reached it.
_MASS_TOLERANCE = 1e-6


class Sampling(NamedTuple):
    """Settings of each row.

    Attributes:
      temperature: f32 [B]; 0 is greedy.
      top_k: int32 [B]; 0 is off.
      top_p: f32 [B]; 1 is off.
      min_p: f32 [B]; 0 is off.
      adjustments: what is done to the logits before.
      keys: uint32 [B, 2], raw key data; noise depends on it and on the position alone.
    """

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    min_p: jax.Array
    adjustments: Adjustments
    keys: jax.Array

    @classmethod
    def of(
        cls,
        keys: jax.Array,
        vocab_size: int,
        *,
        temperature: Any = 0.0,
        top_k: Any = 0,
        top_p: Any = 1.0,
        min_p: Any = 0.0,
    ) -> Sampling:
        """Settings for the rows of `keys`, each one value or one per row; no adjustments."""
        rows = len(keys)

        def each(value: Any, dtype: Any = jnp.float32) -> jax.Array:
            return jnp.broadcast_to(jnp.asarray(value, dtype), (rows,))

        off = Adjustments(
            active=each(False, bool),
            repetition=each(1.0),
            presence=each(0.0),
            frequency=each(0.0),
            min_new_tokens=each(0, jnp.int32),
            bias=jnp.zeros((rows, vocab_size), jnp.float32),
            ends=jnp.zeros((rows, vocab_size), bool),
            bad_words=jnp.zeros((rows, 0, 1), jnp.int32),
        )
        return cls(each(temperature), each(top_k, jnp.int32), each(top_p), each(min_p), off, keys)


def gumbel_noise(
    sampling: Sampling, positions: jax.Array, vocab_size: int, stream: int = 0
) -> jax.Array:
    """Noise for the tokens at `positions` (int32 [B]): f32 [B, V]; zeros for greedy rows."""
    warm = sampling.temperature > 0
    noise = jax.lax.cond(
        jnp.any(warm),
        lambda: gumbel(sampling.keys, positions, vocab_size, stream),
        lambda: jnp.zeros((positions.shape[0], vocab_size), jnp.float32),
    )
    return jnp.where(warm[:, None], noise, 0.0)


def process(
    logits: jax.Array,
    sampling: Sampling,
    adjusted: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> jax.Array:
    """Adjustments, temperature, top-k, top-p, min-p: [B, ..., C] -> f32, -inf where ruled out.

    The largest adjusted logit always stays. Greedy rows are adjusted and nothing more.

    Args:
      adjusted: logits -> adjusted logits; not called unless some row is adjusted.
    """
    inner = (1,) * (logits.ndim - 1)

    def per_row(x: jax.Array) -> jax.Array:
        return x.reshape(-1, *inner)

    warm = per_row(sampling.temperature > 0)
    by_k = warm & per_row(sampling.top_k > 0)
    by_p = warm & per_row(sampling.top_p < 1.0)

    def top_k(x: jax.Array) -> jax.Array:
        kept = _shortest_prefix(x, jnp.ones_like(x), per_row(sampling.top_k).astype(jnp.float32))
        return jnp.where(kept | ~by_k, x, -jnp.inf)

    def top_p(x: jax.Array) -> jax.Array:
        mass = jax.nn.softmax(x, axis=-1)
        kept = _shortest_prefix(x, mass, per_row(sampling.top_p) - _MASS_TOLERANCE)
        return jnp.where(kept | ~by_p, x, -jnp.inf)

    def shaped(x: jax.Array) -> jax.Array:
        x = jax.lax.cond(jnp.any(sampling.adjustments.active), adjusted, lambda x: x, x)
        x = x / jnp.where(warm, per_row(sampling.temperature), 1.0)
        x = jax.lax.cond(jnp.any(by_k), top_k, lambda x: x, x)
        x = jax.lax.cond(jnp.any(by_p), top_p, lambda x: x, x)
        least = jnp.max(x, axis=-1, keepdims=True) + jnp.log(per_row(sampling.min_p))
        return jnp.where(warm & (x < least), -jnp.inf, x)

    as_they_are = ~jnp.any(warm) & ~jnp.any(sampling.adjustments.active)
    return jax.lax.cond(as_they_are, lambda x: x, shaped, logits.astype(jnp.float32))


def choose(
    logits: jax.Array,
    noise: jax.Array,
    sampling: Sampling,
    adjusted: Callable[[jax.Array], jax.Array] = lambda logits: logits,
) -> jax.Array:
    """The token each row emits: logits [B, V], noise [B, V] -> int32 [B]."""

    def as_asked() -> jax.Array:
        return jnp.argmax(process(logits, sampling, adjusted) + noise, axis=-1)

    # With all rows greedy and none adjusted, the logits are all there is to look at.
    plain = ~jnp.any(sampling.temperature > 0) & ~jnp.any(sampling.adjustments.active)
    token = jax.lax.cond(plain, lambda: jnp.argmax(logits, axis=-1), as_asked)
    return token.astype(jnp.int32)


def _shortest_prefix(x: jax.Array, weights: jax.Array, goal: jax.Array) -> jax.Array:
    """Marks the fewest largest entries whose weights sum to at least goal, and at least one.

    Bisects on the value that divides kept from dropped, over the 2^32 floats in their order: exact,
    and cheaper than sorting a vocabulary. Equal values are kept from the left.

    Args:
      x: f32 [B, ..., C].
      weights: f32 [B, ..., C], not negative.
      goal: f32 [B, ..., 1], or fewer entries that broadcast.

    Returns:
      bool [B, ..., C].
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.int32)  # -0 equals 0
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # int32 that compares like the float

    def mass(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(kept, weights, 0.0), axis=-1, keepdims=True)

    folded_order, folded_weights = _folded(order), _folded(weights)

    def narrow(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds  # between them: the largest value that still reaches the goal
        middle = (low | high) - ((low ^ high) >> 1)  # their mean rounded up, without overflow
        kept = jnp.where(folded_order >= middle[..., None], folded_weights, 0.0)
        reached = jnp.sum(kept, axis=(-2, -1))[..., None] >= goal
        return jnp.where(reached, middle, low), jnp.where(reached, high, middle - 1)

    low = jnp.min(order, axis=-1, keepdims=True)
    high = jnp.max(order, axis=-1, keepdims=True)
    cut, _ = jax.lax.fori_loop(0, 32, narrow, (low, high))
    above = order > cut
    ties = order == cut
    each = jnp.max(
        jnp.where(ties, weights, 0.0), axis=-1, keepdims=True
    )  # the same for all of them
    count = jnp.maximum(jnp.ceil((goal - mass(above)) / each), 1.0)
    return above | (ties & (jnp.cumsum(ties, axis=-1) <= count))


def _folded(x: jax.Array) -> jax.Array:
    """[..., C] -> [..., C / 128, 128], zeros in what is missing.

    A TPU works on 8 x 128 numbers at a time, and with a few long vectors on a fraction of that.
    """
    missing = -x.shape[-1] % 128
    x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-1], -1, 128)
