"""The product of activations and weights, the operation that decides the speed of a pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# With fewer 16-bit rows TPUs and CPUs leave their matrix units for a slower path.
LEAST_ROWS = 8


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T, weight [O, I] -> f32 [..., O].

    Numbers are multiplied in the weight's dtype and summed in f32. An f32 x meets a bf16 weight in
    two parts, which together keep 16 bits of its mantissa: rounded to the 8 of bf16, the last bits
    of x would decide over whole units of the next product, and a token that is read alone would
    come out otherwise than among others.

    Both products of the backward pass multiply in the weight's dtype too: without this rule the f32
    cotangent would turn each of them into a product in f32.
    """
    rows = x.reshape(-1, x.shape[-1])
    count = len(rows)
    in_two_parts = (x.dtype, weight.dtype) == (jnp.float32, jnp.bfloat16)
    if in_two_parts:
        # reduce_precision, because XLA may leave out a cast to bf16 and back.
        high = jax.lax.reduce_precision(rows, exponent_bits=8, mantissa_bits=7)
        rows = jnp.concatenate([high, rows - high])
    rows = rows.astype(weight.dtype)
    if len(rows) < LEAST_ROWS and weight.dtype.itemsize == 2:
        rows = jnp.pad(rows, ((0, LEAST_ROWS - len(rows)), (0, 0)))
    y = jax.lax.dot_general(
        rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    if in_two_parts:
        y = y[:count] + y[count : 2 * count]
    return y[:count].reshape(*x.shape[:-1], len(weight))


def _matmul_forward(
    x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    # The empty array carries x's dtype to the backward pass.
    return matmul(x, weight), (x.astype(weight.dtype), weight, jnp.empty((0,), x.dtype))


def _matmul_backward(
    saved: tuple[jax.Array, jax.Array, jax.Array], cotangent: jax.Array
) -> tuple[jax.Array, jax.Array]:
    x, weight, like_x = saved
    g = cotangent.astype(weight.dtype)
    dx = jnp.dot(g, weight, preferred_element_type=jnp.float32)
    leading = tuple(range(x.ndim - 1))
    dweight = jax.lax.dot_general(
        g, x, ((leading, leading), ((), ())), preferred_element_type=jnp.float32
    )
    return dx.astype(like_x.dtype), dweight.astype(weight.dtype)


matmul.defvjp(_matmul_forward, _matmul_backward)
