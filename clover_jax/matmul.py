"""The product of activations and weights, the one operation that decides the speed of a pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# A decode pass has at most as many rows as tokens in its trees; more come from prefill or training.
_FEW_ROWS = 64
# With fewer 16-bit rows TPUs and CPUs leave their matrix units for a slower path.
_LEAST_ROWS = 8


@jax.custom_vjp
def matmul(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [..., I] @ weight.T, weight [O, I] -> f32 [..., O], multiplied in the weight's dtype.

    Both products of the backward pass multiply in that dtype too: without this rule the f32
    cotangent would turn each of them into a product in f32.
    """
    x = x.astype(weight.dtype)
    rows = x.size // x.shape[-1]
    if rows > _FEW_ROWS:
        return _by_rows(x, weight)
    flat = x.reshape(rows, x.shape[-1])
    if rows < _LEAST_ROWS and weight.dtype.itemsize == 2:
        flat = jnp.pad(flat, ((0, _LEAST_ROWS - rows), (0, 0)))
    y = jax.lax.platform_dependent(flat, weight, cpu=_by_weights, default=_by_rows)
    return y[:rows].reshape(*x.shape[:-1], weight.shape[0])


def _by_rows(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
        x, weight, (((x.ndim - 1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )


def _by_weights(x: jax.Array, weight: jax.Array) -> jax.Array:
    """The same with the weight as left operand: XLA's CPU products repack the right one.

    The barrier keeps XLA from turning it back.
    """
    y = jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return jax.lax.optimization_barrier(y).T


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
