"""The product of activations and weights: values, precision, slopes, and what is compiled."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.matmul import matmul

IN, OUT = 24, 40
F32, BF16 = jnp.float32, jnp.bfloat16
DTYPES = [(F32, F32), (BF16, BF16), (F32, BF16)]  # of activations and of weights


def arrays(rows: int, x_dtype: jnp.dtype, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(size=(rows, IN)), rng.normal(size=(OUT, IN))
    return jnp.asarray(x, x_dtype), jnp.asarray(weight, dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    return np.asarray(x, np.float64) @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 70])
def test_values(rows: int, dtypes: tuple[jnp.dtype, jnp.dtype]) -> None:
    """16 bits of an f32 x meet bf16 weights: an error of 2^-17 of each of 24 terms of about 1."""
    x, weight = arrays(rows, *dtypes)
    y = jax.jit(matmul)(x, weight)
    assert (y.shape, y.dtype) == ((rows, OUT), F32)
    np.testing.assert_allclose(y, exact(x, weight), atol=2e-4 if dtypes == (F32, BF16) else 1e-5)
    if dtypes == (F32, BF16):
        rounded = exact(x.astype(BF16), weight)
        error = np.abs(y - exact(x, weight)).max()
        assert error < np.abs(rounded - exact(x, weight)).max() / 50


def test_leading_axes() -> None:
    x, weight = arrays(12, F32, F32)
    np.testing.assert_array_equal(
        matmul(x.reshape(3, 2, 2, IN), weight), matmul(x, weight).reshape(3, 2, 2, OUT)
    )
    np.testing.assert_allclose(matmul(x[0], weight), exact(x[0], weight), atol=1e-5)


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("rows", [3, 70])
def test_slopes(rows: int, dtypes: tuple[jnp.dtype, jnp.dtype]) -> None:
    x, weight = arrays(rows, *dtypes)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(rows, OUT)), F32)
    _, pull = jax.vjp(matmul, x, weight)
    dx, dweight = pull(cotangent)
    assert (dx.dtype, dweight.dtype) == (x.dtype, weight.dtype)
    g = np.asarray(cotangent.astype(weight.dtype), np.float64)
    fine = {"atol": 1e-4} if dtypes == (F32, F32) else {"atol": 0.05, "rtol": 0.01}
    np.testing.assert_allclose(np.asarray(dx, np.float64), g @ np.asarray(weight, float), **fine)
    wanted = g.T @ np.asarray(x.astype(weight.dtype), np.float64)
    np.testing.assert_allclose(np.asarray(dweight, np.float64), wanted, **fine)


@pytest.mark.parametrize(
    ("dtypes", "rows", "multiplied"),
    [((F32, F32), 1, 1), ((BF16, BF16), 1, 8), ((F32, BF16), 1, 8), ((F32, BF16), 26, 52)],
)
def test_one_product_reads_the_weight_once(
    dtypes: tuple[jnp.dtype, jnp.dtype], rows: int, multiplied: int
) -> None:
    """And as it lies: nothing is as large as its transpose."""
    x, weight = arrays(rows, *dtypes)
    lowered = jax.jit(matmul).lower(x, weight)
    (product,) = re.findall(
        r"stablehlo\.dot_general.*-> tensor<(\d+)x(\d+)xf32>", lowered.as_text()
    )
    assert product == (str(multiplied), str(OUT))
    assert not re.search(rf"\[{IN},{OUT}\]", lowered.compile().as_text())
