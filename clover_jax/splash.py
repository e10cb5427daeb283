"""A cache read by splash attention, the kernel that comes with JAX for TPUs.

Axes as in attention.py.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel as kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_mask as masks,
)

_LANES = 128  # of a TPU: queries, slots and head dim come in multiples of it
_BLOCK_QUERIES = 512
_BLOCKS_OF_SLOTS = (1024, 512, 256, 128)  # the largest that divides the slots is taken


def fits(queries: int, slots: int, head_dim: int) -> bool:
    """Whether the kernel takes these sizes: whole lanes, on a single device."""
    whole = all(size % _LANES == 0 for size in (queries, slots, head_dim))
    return whole and jax.sharding.get_abstract_mesh().size <= 1


@functools.partial(jax.jit, static_argnames=("softcap", "interpret"))
def over_slots(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    seen: jax.Array,
    softcap: float | None = None,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Attention over the slots that are seen, their scores never in HBM.

    Args:
      q: [B, K, T, G, H], scaled.
      keys, values: [B, K, H, S] and [B, K, S, H].
      seen: bool [B, S].
      interpret: runs the kernel without a TPU, slowly.

    Returns:
      f32 [B, K, T, G, H], and the logarithm of the softmax's total, f32 [B, K, T, G]. Where nothing
      is seen, the one is finite and the other so low that it weighs nothing.
    """
    queries, groups = q.shape[2:4]
    slots = values.shape[2]
    attention = kernel.make_splash_mqa_single_device(
        masks.MultiHeadMask([masks.FullMask((queries, slots))] * groups),
        block_sizes=kernel.BlockSizes(
            block_q=next(n for n in (_BLOCK_QUERIES, 256, _LANES) if queries % n == 0),
            block_kv=next(n for n in _BLOCKS_OF_SLOTS if slots % n == 0),
            k_layout=kernel.QKVLayout.SEQ_MINOR,  # as the cache has them
        ),
        save_residuals=True,
        attn_logits_soft_cap=softcap,
        interpret=interpret,
    )

    def of_kv_head(
        q: jax.Array, keys: jax.Array, values: jax.Array, seen: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        # What is not seen belongs to another segment than the queries.
        segments = kernel.SegmentIds(jnp.ones(queries, jnp.int32), seen.astype(jnp.int32))
        out, (log_total,) = attention(q.swapaxes(0, 1), keys.T, values, segments)
        return out.swapaxes(0, 1).astype(jnp.float32), log_total.T  # [T, G, H], [T, G]

    of_row = jax.vmap(of_kv_head, in_axes=(0, 0, 0, None))
    return jax.vmap(of_row)(q, keys, values, seen)
