"""Random numbers that depend on a row's seed and on a position alone.

Whoever asks for the token at a position, the plain loop, the draft or the verification, meets the
same noise (drafter-invariant coupling, arXiv 2408.07978).

Axes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

# Named, because the same seed must give the same text whatever JAX's default is set to.
_GENERATOR = "threefry2x32"


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


def gumbel(keys: jax.Array, positions: jax.Array, size: int, stream: int = 0) -> jax.Array:
    """Gumbel noise for `positions` (int32 [B]): f32 [B, size]."""
    return jax.vmap(lambda key: jax.random.gumbel(key, (size,), jnp.float32))(
        _keys_at(keys, positions, stream)
    )


def uniform(keys: jax.Array, positions: jax.Array, size: int, stream: int) -> jax.Array:
    """Uniform numbers in [0, 1) for `positions` (int32 [B]): f32 [B, size]."""
    return jax.vmap(lambda key: jax.random.uniform(key, (size,), jnp.float32))(
        _keys_at(keys, positions, stream)
    )


def _keys_at(keys: jax.Array, positions: jax.Array, stream: int) -> jax.Array:
    """One key per row; streams other than 0 are independent of it and of each other."""

    def key_at(key: jax.Array, position: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.wrap_key_data(key, impl=_GENERATOR), position)
        return jax.random.fold_in(key, stream) if stream else key

    return jax.vmap(key_at)(keys, positions)
