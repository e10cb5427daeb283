"""Temperature, top-k, top-p and noise, against a plain sort.

Axes: B rows, V vocabulary.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from infer import sampling
from infer.noise import row_keys
from infer.sampling import Sampling

process = jax.jit(sampling.process)
choose = jax.jit(sampling.choose)
gumbel_noise = jax.jit(sampling.gumbel_noise, static_argnums=2)

P = np.array([0.15, 0.5, 0.05, 0.3])


def settings(temperature, top_k=0, top_p=1.0, seeds=0) -> Sampling:
    values = np.broadcast_arrays(*map(np.atleast_1d, (temperature, top_k, top_p, seeds)))
    temperature, top_k, top_p, seeds = values
    keys = row_keys(seeds.tolist(), len(seeds))
    return Sampling.of(keys, len(P), temperature=temperature, top_k=top_k, top_p=top_p)


def by_sorting(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The tokens of one row that are kept, the likeliest first."""
    scaled = (logits.astype(np.float32) / np.float32(temperature)).astype(np.float64)
    order = np.argsort(-scaled, kind="stable")[: top_k or None]
    if top_p >= 1:
        return order
    mass = np.exp(scaled[order] - scaled.max())
    before = (np.cumsum(mass) - mass) / mass.sum()
    return order[: max(1, int((before < top_p - 1e-6).sum()))]


def kept(processed: jax.Array) -> list[int]:
    return np.flatnonzero(np.isfinite(processed)).tolist()


@pytest.mark.parametrize(
    ("top_p", "count"),
    [(0, 1), (1e-8, 1), (0.5, 1), (0.6, 2), (0.8, 2), (0.85, 3), (0.96, 4), (1, 4)],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, count):
    logits = np.log(P).astype(np.float32)
    out = process(logits[None], settings(1.0, 0, top_p))[0]
    assert kept(out) == sorted(np.argsort(-logits)[:count])
    assert np.array_equal(out[np.array(kept(out))], logits[kept(out)])


@pytest.mark.parametrize(("top_p", "count"), [(0.6, 1), (0.7, 2), (0.88, 2), (0.9, 3), (0.97, 4)])
def test_bf16_logits_are_processed_in_f32(top_p, count):
    logits = jnp.array([[-2, 0, -3, -1]], jnp.bfloat16)  # p = 0.087, 0.644, 0.032, 0.237
    out = process(logits, settings(1.0, 0, top_p))
    assert out.dtype == jnp.float32
    assert kept(out[0]) == sorted([1, 3, 0, 2][:count])


@pytest.mark.parametrize("size", [7, 128_256])
@pytest.mark.parametrize("kind", ["smooth", "ties", "bf16"])
def test_processing_equals_sorting(size, kind):
    rng = np.random.default_rng(size)
    rows = [
        (0.3, 0, 0.9),
        (1.0, 3, 1.0),
        (1.0, 5, 0.5),
        (2.0, 0, 0.31),
        (1.7, 200_000, 0.97),
        (1.0, 1, 0.0),
        (0.7, 0, 1.0),
    ]
    logits = rng.normal(0, 3, (len(rows), size)).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "bf16":
        logits = np.asarray(jnp.asarray(logits, jnp.bfloat16))
    out = np.asarray(process(jnp.asarray(logits), settings(*zip(*rows, strict=True))))
    for row, (temperature, top_k, top_p) in enumerate(rows):
        # In f32 a sum over the vocabulary is good to some 1e-7, which can be several tokens.
        fewest = by_sorting(logits[row], temperature, top_k, max(top_p - 1e-6, 0.0))
        most = by_sorting(logits[row], temperature, top_k, min(top_p + 1e-6, 1.0))
        got = kept(out[row])
        assert len(fewest) <= len(got) <= len(most)
        assert got == sorted(most[: len(got)])
        scaled = logits[row].astype(np.float32) / np.float32(temperature)
        np.testing.assert_allclose(out[row][got], scaled[got], rtol=1e-6)


def test_ties_are_kept_from_the_left():
    logits = jnp.array([[2.0, 2.0, 0.0, 2.0]])  # each of the three holds 0.318
    assert kept(process(logits, settings(1.0, 2))[0]) == [0, 1]
    assert kept(process(logits, settings(1.0, 0, 0.3))[0]) == [0]
    assert kept(process(logits, settings(1.0, 0, 0.7))[0]) == [0, 1, 3]


def test_order_is_temperature_then_top_k_then_top_p():
    logits = jnp.asarray(np.log(P))[None]
    # At temperature 2 the likeliest token holds 0.38, so top_p 0.5 needs two; at 1 it needs one.
    assert kept(process(logits, settings(2.0, 0, 0.5))[0]) == [1, 3]
    # Among two tokens the likeliest holds 0.625, among four 0.5.
    assert kept(process(logits, settings(1.0, 2, 0.6))[0]) == [1]


def test_ruled_out_logits_stay_ruled_out():
    logits = jnp.array([[-jnp.inf, 1.0, -jnp.inf, 0.0]])
    for row in (settings(0.5, 3), settings(0.5, 0, 0.99999), settings(0.5, 3, 0.1), settings(0.0)):
        out = np.asarray(process(logits, row))
        assert not np.isnan(out).any()
        assert np.isneginf(out[0, [0, 2]]).all()
        assert int(choose(logits, gumbel_noise(row, jnp.array([3]), 4), row)[0]) in (1, 3)


def test_greedy_rows_are_untouched_by_warm_ones():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(7, 7)), jnp.float32)
    mixed = settings([0, 1, 0, 1, 0, 1, 0], top_k=[2, 2, 0, 2, 0, 2, 0], top_p=0.3)
    out = process(logits, mixed)
    assert np.array_equal(out[0], logits[0])
    assert np.array_equal(out[2], logits[2])
    assert len(kept(out[1])) <= 2
    noise = gumbel_noise(mixed, jnp.full(7, 4), 7)
    assert not noise[0].any()
    assert not noise[2].any()
    assert noise[1].all()
    assert choose(logits, noise, mixed)[0] == jnp.argmax(logits[0])


def test_noise_depends_on_key_and_position_alone():
    positions = jnp.array([7, 7, 8, 1000])
    noise = gumbel_noise(settings([1.0, 0.3, 1.0, 1.0], seeds=[5, 6, 5, 5]), positions, 33)
    # Another temperature, row, batch and other processors.
    again = gumbel_noise(
        settings([2.0, 0.7], top_k=4, top_p=[0.1, 1.0], seeds=[6, 5]), jnp.array([7, 1000]), 33
    )
    assert np.array_equal(again[0], noise[1])
    assert np.array_equal(again[1], noise[3])
    for a in range(4):
        for b in range(a):
            assert not np.any(noise[a] == noise[b])


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"), [(1.0, 0, 1.0), (0.6, 0, 0.8), (1.5, 3, 1.0)]
)
def test_frequencies_are_the_softmax(temperature, top_k, top_p):
    draws = 8000
    row = settings(temperature, top_k, top_p, seeds=[9] * draws)
    logits = jnp.broadcast_to(jnp.asarray(np.log(P), jnp.float32), (draws, 4))
    tokens = choose(logits, gumbel_noise(row, jnp.arange(draws), 4), row)
    counts = np.bincount(tokens, minlength=4)
    nucleus = by_sorting(np.log(P), temperature, top_k, top_p)
    assert counts[nucleus].sum() == draws
    expected = P[nucleus] ** (1 / temperature)
    expected *= draws / expected.sum()
    assert stats.chisquare(counts[nucleus], expected).pvalue > 1e-3
