"""Acceptance: follow the target's own choices through the verified tree.

Axes: B batch, N tree nodes, L = depth of the tree + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.tree import Tree
from infer.sampling import Sampling, choose


class Accepted(NamedTuple):
    """One verified path per row.

    Attributes:
      tokens: int32 [B, L], what the target emits after each node of the path.
      nodes: int32 [B, L], the path; its first node is the root.
      length: int32 [B], how many of the L are valid, at least 1: the accepted draft tokens and the
        one the target adds.
    """

    tokens: jax.Array
    nodes: jax.Array
    length: jax.Array


def accept(
    tree: Tree,
    drafted: jax.Array,
    logits: jax.Array,
    noise: Sequence[jax.Array],
    sampling: Sampling,
) -> Accepted:
    """Walks from the root along the tokens the target chooses.

    Args:
      drafted: int32 [B, N], the tree's tokens.
      logits: f32 [B, N, V], the target's at every node.
      noise: L arrays f32 [B, V], for the tokens after nodes of depth 0, 1, ...
    """
    children = jnp.asarray(tree.children)  # [N, W]
    rows = jnp.arange(drafted.shape[0])
    node = jnp.zeros_like(rows)
    alive = jnp.ones_like(rows, dtype=bool)
    tokens, nodes, valid = [], [], []
    for depth_noise in noise:
        token = choose(logits[rows, node], depth_noise, sampling)
        tokens.append(token)
        nodes.append(node)
        valid.append(alive)
        candidates = children[node]  # [B, W]
        drafted_there = drafted[rows[:, None], jnp.maximum(candidates, 0)]
        match = (candidates >= 0) & (drafted_there == token[:, None])
        alive = alive & jnp.any(match, axis=1)
        step = candidates[rows, jnp.argmax(match, axis=1)]
        node = jnp.where(alive, step, node)
    return Accepted(
        tokens=jnp.stack(tokens, axis=1),
        nodes=jnp.stack(nodes, axis=1),
        length=jnp.sum(jnp.stack(valid, axis=1), axis=1, dtype=jnp.int32),
    )
