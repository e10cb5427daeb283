"""The product of activations and weights: values, slopes, and what a CPU runs for few rows."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.matmul import matmul

IN, OUT = 24, 40
DTYPES = [jnp.float32, jnp.bfloat16]


def arrays(rows: int, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(size=(rows, IN)), rng.normal(size=(OUT, IN))
    return jnp.asarray(x, jnp.float32), jnp.asarray(weight, dtype)


def exact(x: jax.Array, weight: jax.Array) -> np.ndarray:
    """The product of the rounded operands, f64."""
    rounded = np.asarray(x.astype(weight.dtype), np.float64)
    return rounded @ np.asarray(weight, np.float64).T


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64, 65])
def test_values(rows: int, dtype: jnp.dtype) -> None:
    x, weight = arrays(rows, dtype)
    y = matmul(x, weight)
    assert (y.shape, y.dtype) == ((rows, OUT), jnp.float32)
    np.testing.assert_allclose(y, exact(x, weight), atol=1e-5)


def test_leading_axes() -> None:
    x, weight = arrays(12, jnp.float32)
    np.testing.assert_array_equal(
        matmul(x.reshape(3, 2, 2, IN), weight), matmul(x, weight).reshape(3, 2, 2, OUT)
    )
    np.testing.assert_allclose(matmul(x[0], weight), exact(x[0], weight), atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [3, 70])
def test_slopes(rows: int, dtype: jnp.dtype) -> None:
    x, weight = arrays(rows, dtype)
    cotangent = jnp.asarray(np.random.default_rng(1).normal(size=(rows, OUT)), jnp.float32)
    _, pull = jax.vjp(matmul, x, weight)
    dx, dweight = pull(cotangent)
    assert (dx.dtype, dweight.dtype) == (x.dtype, weight.dtype)
    g = np.asarray(cotangent.astype(dtype), np.float64)
    rounding = 0.05 if dtype == jnp.bfloat16 else 1e-4
    np.testing.assert_allclose(dx, g @ np.asarray(weight, np.float64), atol=1e-4)
    wanted = g.T @ np.asarray(x.astype(dtype), np.float64)
    np.testing.assert_allclose(np.asarray(dweight, np.float64), wanted, atol=rounding, rtol=0.01)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "weight_first"), [(5, True), (64, True), (65, False)])
def test_few_rows_have_the_weight_on_the_left(
    rows: int, weight_first: bool, dtype: jnp.dtype
) -> None:
    """And nothing transposes or copies a weight."""
    if jax.default_backend() != "cpu":
        pytest.skip("the program of other platforms is another")
    x, weight = arrays(rows, dtype)
    program = jax.jit(matmul).lower(x, weight).compile().as_text()
    (product,) = re.findall(r"= f32\[(\d+),(\d+)\]\S* dot\(", program)
    assert (product[0] == str(OUT)) == weight_first
    assert not re.search(rf"\[{IN},{OUT}\]", program)
    assert "conditional" not in program
