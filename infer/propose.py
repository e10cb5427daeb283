"""The draft tree: its tokens, and for dynamic trees its shape.

Axes: B batch, N tree nodes, F nodes of one level, K width of a dynamic tree, P its pool of
candidates, D model.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.tree import DynamicTree, Tree
from infer.drafter import Drafter, Proposals


class Proposal(NamedTuple):
    """A filled tree. Arrays of a static tree's shape have 1 instead of B.

    Attributes:
      tokens: int32 [B, N]; node 0 is the root; -1, which nothing matches, where there was nothing
        to propose.
      parents: int32 [B, N]; -1 for the root.
      depths: int32 [B, N].
      ancestors: bool [B, N, N], row i marks node i and the nodes on its way to the root.
      inner: the proposals that each inner node's children were drawn from, level by level; None for
        a dynamic tree.
    """

    tokens: jax.Array
    parents: jax.Array
    depths: jax.Array
    ancestors: jax.Array
    inner: tuple[Proposals, ...] | None


def root_alone(token: jax.Array) -> Proposal:
    """The tree of plain decoding; token int32 [B, 1]."""
    return _static(Tree(()), token, ())


@jax.named_scope("propose")
def propose(drafter: Drafter, tree: Tree | DynamicTree, state: jax.Array) -> Proposal:
    """Fills the tree.

    The children of a node are the tokens with the largest processed draft logit plus noise, the
    noise being the one that the target will choose with.

    Args:
      state: [B, D], s_0 at the root.
    """
    if isinstance(tree, DynamicTree):
        return _propose_dynamic(drafter, tree, state)
    tokens, frontier = drafter.root_token, drafter.start(state)
    nodes = np.zeros(1, np.int32)  # of the frontier
    inner = []
    for depth in range(1, tree.depth + 1):
        level = tree.level(depth)
        proposals = drafter.propose(frontier)
        inner.append(proposals)
        children, _ = proposals.best(int(tree.ranks[level].max()) + 1)
        parent = np.searchsorted(nodes, tree.parents[level])
        level_tokens = children[:, parent, tree.ranks[level]]  # [B, nodes of the level]
        tokens = jnp.concatenate([tokens, level_tokens], axis=1)
        kept = np.isin(level, tree.parents)
        if kept.any():
            path = _grown(frontier.path[:, parent[kept]], level_tokens[:, kept])
            frontier = drafter.extend(frontier.states[:, parent[kept]], path)
            nodes = level[kept]
    return _static(tree, tokens, tuple(inner))


def _static(tree: Tree, tokens: jax.Array, inner: tuple[Proposals, ...]) -> Proposal:
    parents, depths, ancestors = (
        jnp.asarray(x)[None] for x in (tree.parents, tree.depths, tree.ancestors)
    )
    return Proposal(tokens, parents, depths, ancestors, inner)


def _propose_dynamic(drafter: Drafter, tree: DynamicTree, state: jax.Array) -> Proposal:
    """Expands the K most likely nodes of each level, then keeps the N - 1 most likely of all
    (EAGLE-2, arXiv 2406.16858, section 4).

    A node's score is the log-probability that the target goes there, as the head sees it: the sum
    over its path of log softmax(logits + noise). The noise belongs in it, for the target chooses
    with the same.
    """
    frontier = drafter.start(state)
    batch, width = len(state), tree.width
    joint = jnp.zeros((batch, 1))  # of the frontier's nodes
    first = jnp.full((batch, 1), -1, jnp.int32)  # where in the pool the frontier's nodes are
    pool: list[tuple[jax.Array, jax.Array, jax.Array]] = []  # tokens, scores, parents: [B, F * K]
    size = 0
    for depth in range(1, tree.depth + 1):
        tokens, scores = _likely(drafter.propose(frontier), tree)  # [B, F, K]
        scores = (scores + joint[..., None]).reshape(batch, -1)
        tokens = tokens.reshape(batch, -1)
        parents = jnp.repeat(first, width, axis=1)
        pool.append((tokens, scores, parents))
        if depth < tree.depth:
            joint, best = jax.lax.top_k(scores, width)
            path = _grown(_take(frontier.path, best // width), _take(tokens, best))
            frontier = drafter.extend(_take(frontier.states, best // width), path)
            first = size + best.astype(jnp.int32)
        size += scores.shape[1]

    tokens, scores, parents = (jnp.concatenate(x, axis=1) for x in zip(*pool, strict=True))
    # Of equal scores top_k takes the first, so no node is kept without its parent.
    _, kept = jax.lax.top_k(scores, tree.size - 1)
    kept = jnp.sort(kept, axis=1)
    tokens = jnp.where(_take(scores, kept) > -jnp.inf, _take(tokens, kept), -1)
    parents = _take(parents, kept)
    # Node i + 1 of the tree is entry kept[i] of the pool; the root, -1 in the pool, is node 0.
    parents = jnp.sum(kept[:, None] <= parents[..., None], axis=2)
    parents = jnp.concatenate([jnp.full((batch, 1), -1), parents], axis=1).astype(jnp.int32)
    ancestors = _ancestors(parents, tree.depth)
    return Proposal(
        tokens=jnp.concatenate([drafter.root_token, tokens], axis=1),
        parents=parents,
        depths=jnp.sum(ancestors, axis=2, dtype=jnp.int32) - 1,
        ancestors=ancestors,
        inner=None,
    )


def _likely(proposals: Proposals, tree: DynamicTree) -> tuple[jax.Array, jax.Array]:
    """The K likeliest children of each node and their log-probabilities, [B, F, K] both; -inf for
    those that the tree's options leave out."""
    tokens, scores = proposals.best(tree.width)
    total = jax.nn.logsumexp(proposals.scores, axis=-1, keepdims=True)
    scores = jnp.where(tokens >= 0, scores - total, -jnp.inf)
    if tree.least_ratio > 0:
        scores = jnp.where(scores < scores[..., :1] + np.log(tree.least_ratio), -jnp.inf, scores)
    if tree.top_p < 1:
        mass = jnp.exp(scores)
        scores = jnp.where(jnp.cumsum(mass, axis=-1) - mass < tree.top_p, scores, -jnp.inf)
    return tokens, scores


def _ancestors(parents: jax.Array, depth: int) -> jax.Array:
    """bool [B, N, N] from parents int32 [B, N], by pointer jumping: each round joins a node's marks
    with those of a node twice as far up."""
    size = parents.shape[1]
    marks = jnp.broadcast_to(jnp.eye(size, dtype=bool), (len(parents), size, size))
    above = jnp.maximum(parents, 0)  # the root is above itself
    reach = 1
    while reach <= depth:
        marks = marks | _take(marks, above)
        above = _take(above, above)
        reach *= 2
    return marks


def _grown(path: jax.Array, tokens: jax.Array) -> jax.Array:
    """Paths [B, F, d] and one token more for each, [B, F]."""
    return jnp.concatenate([path, tokens[..., None]], axis=2)


@functools.partial(jax.vmap, in_axes=(0, 0))
def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """x [B, F, ...] at index int32 [B, G]: [B, G, ...]."""
    return x[index]
