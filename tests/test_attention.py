"""The attention core, where shapes, dtypes or the platform take it another way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import splash
from clover_jax.attention import Context, LayerKV, Sums, attend, merge, over_keys


def _arrays(batch, queries, kv_heads, groups, head_dim, slots):
    """q, the new tokens' keys and values, the cache's."""
    shapes = (
        (batch, queries, kv_heads * groups, head_dim),
        (batch, kv_heads, head_dim, queries),
        (batch, kv_heads, queries, head_dim),
        (batch, kv_heads, head_dim, slots),
        (batch, kv_heads, slots, head_dim),
    )
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]


def _context(lengths, queries, slots, window=None):
    """Queries behind caches of these lengths, causal among themselves."""
    nothing = jnp.zeros((len(lengths), queries, 0))
    block = jnp.tril(jnp.ones((1, queries, queries), bool))
    length = jnp.asarray(lengths)[:, None, None]
    seen, end = jnp.arange(slots) < length, max(lengths)
    start = 0
    if window is not None:
        at = length + jnp.arange(queries)[:, None]
        seen &= jnp.arange(slots) > at - window
        block &= jnp.tri(queries, queries, -window, dtype=bool) == 0
        start = max(min(lengths) - window + 1, 0)
    return Context(nothing, nothing, block, seen, (jnp.int32(start), jnp.int32(end)))


def _plainly(arrays, context, scale, softcap=None):
    """One softmax over the cache and the new tokens, in float64."""
    q, new_k, new_v, k, v = (np.asarray(a, np.float64) for a in arrays)
    batch, queries, heads, head_dim = q.shape
    groups = heads // k.shape[1]
    keys, values = np.concatenate([k, new_k], axis=3), np.concatenate([v, new_v], axis=2)
    shape = (batch, queries, k.shape[3])
    mask = np.concatenate(
        [
            np.broadcast_to(context.cache_mask, shape),
            np.broadcast_to(context.block_mask, (batch, queries, queries)),
        ],
        axis=2,
    )
    out = np.empty(q.shape)
    for head in range(heads):
        scores = scale * q[:, :, head] @ keys[:, head // groups]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores) * mask
        out[:, :, head] = weights / weights.sum(-1, keepdims=True) @ values[:, head // groups]
    return out.reshape(batch, queries, heads * head_dim)


@pytest.mark.parametrize(
    ("lengths", "slots", "window"),
    [
        ((0, 0), 700, None),  # a first chunk
        ((5, 690), 700, None),  # the last block is not a whole one
        ((512, 1024), 1024, None),
        ((60,), 64, None),  # fewer slots than a block
        ((1300, 1300), 1400, 40),  # only the last block is in the window
        ((0, 30), 600, 8),
    ],
)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_many_queries_read_the_cache_by_blocks(lengths, slots, window, softcap):
    queries = 128
    arrays = _arrays(len(lengths), queries, 2, 3, 16, slots)
    context = _context(lengths, queries, slots, window)
    q, new_k, new_v, k, v = arrays
    found = attend(q, LayerKV(new_k, new_v), LayerKV(k, v), context, 0.25, softcap)
    expected = _plainly(arrays, context, 0.25, softcap)
    np.testing.assert_allclose(found, expected, atol=2e-5)
    # The same in one go, as fewer queries have it.
    few = [
        attend(
            q[:, at : at + 1],
            LayerKV(new_k, new_v),
            LayerKV(k, v),
            context._replace(
                block_mask=context.block_mask[:, at : at + 1],
                cache_mask=context.cache_mask[:, min(at, context.cache_mask.shape[1] - 1)][:, None],
            ),
            0.25,
            softcap,
        )
        for at in (0, 77)
    ]
    at_once = jnp.concatenate(few, axis=1)
    found = found[:, (0, 77), :]
    np.testing.assert_allclose(found, at_once, atol=2e-5)


def test_blocks_that_nobody_sees_are_left_out():
    """NaN in them would show."""
    queries, slots = 128, 2048
    q, new_k, new_v, k, v = _arrays(1, queries, 1, 1, 8, slots)
    v = v.at[:, :, 512:].set(jnp.nan)
    found = attend(q, LayerKV(new_k, new_v), LayerKV(k, v), _context((500,), queries, slots), 0.25)
    assert np.isfinite(found).all()


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("slots", [128, 640])
def test_the_kernel_of_tpus_says_the_same(softcap, slots):
    batch, kv_heads, queries, groups, head_dim = 3, 2, 128, 2, 128
    q, _, _, k, v = _arrays(batch, queries, kv_heads, groups, head_dim, slots)
    q = jnp.moveaxis((0.1 * q).reshape(batch, queries, kv_heads, groups, head_dim), 2, 1)
    seen = jnp.arange(slots) < jnp.asarray([0, 100, slots])[:, None]
    out, log_total = splash.over_slots(q, k, v, seen, softcap, interpret=True)
    rows = q.reshape(batch, kv_heads, queries * groups, head_dim)
    expected = over_keys(rows, LayerKV(k, v), seen[:, None], softcap)
    out, log_total = out.reshape(rows.shape), log_total.reshape(rows.shape[:-1])
    np.testing.assert_allclose(out[1:], (expected.out / expected.total)[1:], atol=1e-5)
    expected_log = (expected.maximum + jnp.log(expected.total))[..., 0]
    np.testing.assert_allclose(log_total[1:], expected_log[1:], atol=1e-5)
    # Where nothing is seen it weighs nothing beside other keys.
    some = over_keys(rows, LayerKV(k, v), jnp.ones((1, 1, slots), bool), softcap)
    past = Sums(log_total[..., None], jnp.ones((*log_total.shape, 1)), out)
    np.testing.assert_array_equal(merge(some, past).out[0], some.out[0])


def _lowered(platform, head_dim=128, window=None, queries=128):
    def run(q, new_k, new_v, k, v, context):
        return attend(q, LayerKV(new_k, new_v), LayerKV(k, v), context, 0.1)

    arguments = (*_arrays(1, queries, 1, 2, head_dim, 256), _context((9,), queries, 256, window))
    return jax.jit(run).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_the_kernel_is_for_tpus_and_for_shapes_that_it_takes():
    assert "tpu_custom_call" in _lowered("tpu")
    for other in (
        functools.partial(_lowered, "cpu"),
        functools.partial(_lowered, "cuda"),
        functools.partial(_lowered, "tpu", head_dim=64),
        functools.partial(_lowered, "tpu", window=8),
        functools.partial(_lowered, "tpu", queries=64),
    ):
        assert "tpu_custom_call" not in other()


def test_one_row_in_bf16_is_padded_without_a_trace():
    batch, kv_heads, head_dim, slots = 2, 4, 16, 32
    arrays = _arrays(batch, 1, kv_heads, 1, head_dim, slots)
    context = _context((5, 20), 1, slots)

    def attended(dtype: jnp.dtype) -> np.ndarray:
        q, new_k, new_v, k, v = (a.astype(dtype) for a in arrays)
        return np.asarray(attend(q, LayerKV(new_k, new_v), LayerKV(k, v), context, 0.25))

    exact = attended(jnp.float32)
    assert exact.shape == (batch, 1, kv_heads * head_dim)
    np.testing.assert_allclose(attended(jnp.bfloat16), exact, atol=0.02)
