"""Several samples in one row: who sees whom, at which position, and what is supervised.

Axes: B batch, T tokens, I heads (draft steps).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray


class Samples(NamedTuple):
    """The tokens of a batch.

    Attributes:
      tokens: int32 [B, T].
      mask: bool [B, T], tokens of assistant turns.
      segments: int32 [B, T], which sample of its row a token belongs to, 1, 2, ..; 0 is padding.
    """

    tokens: Array
    mask: Array
    segments: Array


def positions(segments: Array) -> jax.Array:
    """int32 [B, T]: the position of each token in its sample."""
    index = jnp.arange(segments.shape[1])
    starts = segments != jnp.pad(segments, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def block_mask(segments: Array) -> jax.Array:
    """bool [B, T, T]: a token sees itself and what stands before it in its sample."""
    length = segments.shape[1]
    same = segments[:, :, None] == segments[:, None, :]
    return same & jnp.tril(jnp.ones((length, length), bool))


def supervised(samples: Samples, num_steps: int) -> jax.Array:
    """bool [I, B, T]: head i counts at t when x_{t+2+i} is an assistant's and of t's sample."""

    def ahead(x: Array, offset: int) -> jax.Array:  # x_{t + offset}, 0 beyond the end
        return jnp.pad(x, ((0, 0), (0, offset)))[:, offset:]

    segments = samples.segments
    return jnp.stack(
        [
            ahead(samples.mask, 2 + i) & (ahead(segments, 2 + i) == segments)
            for i in range(num_steps)
        ]
    )
