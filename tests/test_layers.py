"""The attention core, where shapes or dtypes take it another way."""

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.layers import Context, LayerKV, attend


def test_one_row_in_bf16_is_padded_without_a_trace():
    batch, kv_heads, head_dim, slots = 2, 4, 16, 32
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (
        (batch, 1, kv_heads, head_dim),  # one query for each kv head
        (batch, kv_heads, head_dim, 1),
        (batch, kv_heads, 1, head_dim),
        (batch, kv_heads, head_dim, slots),
        (batch, kv_heads, slots, head_dim),
    )
    arrays = [jax.random.normal(k, s) for k, s in zip(keys, shapes, strict=True)]
    seen = jnp.arange(slots) < jnp.array([[[5]], [[20]]])
    nothing = jnp.zeros((batch, 1, 0))
    context = Context(nothing, nothing, jnp.ones((1, 1, 1), bool), seen)

    def attended(dtype: jnp.dtype) -> np.ndarray:
        q, new_k, new_v, k, v = (a.astype(dtype) for a in arrays)
        return np.asarray(attend(q, LayerKV(new_k, new_v), LayerKV(k, v), context, 0.25))

    exact = attended(jnp.float32)
    assert exact.shape == (batch, 1, kv_heads * head_dim)
    np.testing.assert_allclose(attended(jnp.bfloat16), exact, atol=0.02)
