"""The way that TPUs take, against the one of all others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.top_k import by_rounds, top_k


@pytest.mark.parametrize("count", [1, 4, 9])
def test_rounds_find_what_sorting_finds(count):
    x = np.random.default_rng(count).normal(size=(2, 3, 9)).astype(np.float32)
    x[0, 0, :] = 1.0  # ties: the left one comes first
    x[0, 1, 2:] = -np.inf  # fewer than `count` that are not ruled out: no twins among the rest
    x[0, 2, [1, 5]] = np.inf
    x[1, 0, :] = -np.inf
    x[1, 1, ::2] = 0.5
    expected = jax.lax.top_k(jnp.asarray(x), count)[1]
    np.testing.assert_array_equal(by_rounds(jnp.asarray(x), count), expected)
    np.testing.assert_array_equal(top_k(jnp.asarray(x), count), expected)
    assert top_k(jnp.asarray(x), count).dtype == jnp.int32


def test_tpu_programs_do_not_sort():
    x = jax.ShapeDtypeStruct((1, 4, 1000), jnp.float32)
    lowered = jax.jit(lambda x: top_k(x, 4)).trace(x).lower(lowering_platforms=("tpu",)).as_text()
    assert "top_k" not in lowered
    assert "sort" not in lowered
