"""Acceptance by multi-round rejection without replacement, the paper's: for comparison.

The children of a node are drawn from the draft's distribution q without replacement. Each in turn
is accepted with probability min(1, p(c) / q(c)); after a refusal p becomes the normalised positive
part of p - q, and q loses the child (SpecInfer, arXiv 2305.09781, algorithm 2; without replacement:
Sequoia, arXiv 2402.12374, section 4). What comes out is distributed as the target says, but is not
the text that plain decoding draws with the same seed; at temperature 0 it is.

Axes: B batch, N tree nodes, F inner nodes of one depth, C candidates, V vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.tree import Tree
from infer.accept import Accepted, Walk
from infer.adjust import History
from infer.noise import gumbel, uniform
from infer.propose import Proposal
from infer.sampling import Sampling, process

# Streams of random numbers beside the shared noise, which is stream 0.
DRAFT_STREAM, _DECISION_STREAM, _RESIDUAL_STREAM = 1, 2, 3


def accept_by_rejection(
    tree: Tree,
    proposal: Proposal,
    logits: jax.Array,
    positions: jax.Array,
    sampling: Sampling,
    history: History,
) -> Accepted:
    """Walks from the root; see the module.

    Args:
      proposal: of `tree`, drawn with noise of DRAFT_STREAM.
      logits: f32 [B, N, V], the target's at every node.
      positions: int32 [B], of the token after the root.
    """
    walk = Walk.at_root(proposal)
    warm = (sampling.temperature > 0)[:, None]
    for depth in range(tree.depth + 1):
        scores = process(walk.here(logits), sampling, walk.adjusted(sampling, history))
        greedy = jax.nn.one_hot(jnp.argmax(scores, axis=-1), scores.shape[-1])
        p = jnp.where(warm, jax.nn.softmax(scores, axis=-1), greedy)
        token = jnp.full(len(p), -1, jnp.int32)
        if depth < tree.depth:
            draws = uniform(sampling.keys, positions + depth, tree.size, _DECISION_STREAM)
            p, token = _rounds(tree, proposal, walk, depth, p, draws)
        noise = gumbel(sampling.keys, positions + depth, p.shape[-1], _RESIDUAL_STREAM)
        residual = jnp.argmax(jnp.log(p) + jnp.where(warm, noise, 0.0), axis=-1)
        walk = walk.step(proposal, jnp.where(token >= 0, token, residual).astype(jnp.int32))
    return walk.path()


def _rounds(
    tree: Tree, proposal: Proposal, walk: Walk, depth: int, p: jax.Array, draws: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Offers the children of the node where each row stands, best first.

    Returns:
      What is left of p [B, V], and the accepted token, int32 [B], -1 where none was.
    """
    assert proposal.inner is not None  # static trees keep it
    level = tree.level(depth)
    inner = level[np.isin(level, tree.parents)]
    place = np.full(tree.size, -1, np.int32)
    place[inner] = np.arange(len(inner))
    here = jnp.asarray(place)[walk.node]  # [B], -1 on a leaf
    rows = jnp.arange(len(p))
    proposals = proposal.inner[depth]
    drafted = jnp.broadcast_to(proposals.tokens, proposals.logits.shape)[rows, here]  # [B, C]
    masses = jax.nn.softmax(proposals.logits[rows, here], axis=-1)
    q = jnp.zeros_like(p).at[rows[:, None], jnp.maximum(drafted, 0)].add(masses)

    children = np.full((tree.size, int(tree.ranks.max()) + 1), -1, np.int32)
    children[tree.parents[1:], tree.ranks[1:]] = np.arange(1, tree.size)
    taken = jnp.full(len(p), -1, jnp.int32)
    for rank in range(children.shape[1]):
        child = jnp.asarray(children)[walk.node, rank]
        token = proposal.tokens[rows, jnp.maximum(child, 0)]
        p_token, q_token = p[rows, token], q[rows, token]
        # Where the support of q is used up, top-k fills with tokens that were not drawn.
        offered = (child >= 0) & (token >= 0) & (q_token > 0) & (taken < 0)
        kept = draws[:, rank] * q_token < p_token
        taken = jnp.where(offered & kept, token, taken)
        refused = (offered & ~kept)[:, None]
        without = jnp.arange(p.shape[-1]) != token[:, None]
        left = jnp.maximum(p - q, 0.0)
        # Rounding alone can leave nothing: then the token was the only one, or p and q are equal.
        left = jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, jnp.where(without, p, 0))
        p = jnp.where(refused, _normalised(left), p)
        q = jnp.where(refused, _normalised(jnp.where(without, q, 0.0)), q)
    return p, taken


def _normalised(mass: jax.Array) -> jax.Array:
    """[B, V] with sum 1, or zeros where there is no mass."""
    total = jnp.sum(mass, axis=-1, keepdims=True)
    return mass / jnp.where(total > 0, total, 1.0)
