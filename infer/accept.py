"""Acceptance: follow the target's own choices through the verified tree.

Axes: B batch, N tree nodes, L = depth of the tree + 1, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from infer.adjust import History, adjust
from infer.propose import Proposal
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


@jax.named_scope("accept")
def accept(
    proposal: Proposal,
    logits: jax.Array,
    noise: Sequence[jax.Array],
    sampling: Sampling,
    history: History,
) -> Accepted:
    """Walks from the root along the tokens the target chooses.

    Args:
      logits: f32 [B, N, V], the target's at every node.
      noise: L arrays f32 [B, V], for the tokens after nodes of depth 0, 1, ...
    """
    walk = Walk.at_root(proposal)
    for depth_noise in noise:
        adjusted = walk.adjusted(sampling, history)
        walk = walk.step(proposal, choose(walk.here(logits), depth_noise, sampling, adjusted))
    return walk.path()


class Walk(NamedTuple):
    """How far the rows have come. All lists have an entry per depth.

    Attributes:
      node: int32 [B], where each row stands.
      alive: bool [B], it got there by accepted tokens alone.
      tokens, nodes, valid: what was emitted, after which node, and whether it counts.
    """

    node: jax.Array
    alive: jax.Array
    tokens: tuple[jax.Array, ...] = ()
    nodes: tuple[jax.Array, ...] = ()
    valid: tuple[jax.Array, ...] = ()

    @classmethod
    def at_root(cls, proposal: Proposal) -> Walk:
        """Before the first token."""
        batch = len(proposal.tokens)
        return cls(jnp.zeros(batch, jnp.int32), jnp.ones(batch, bool))

    def here(self, of_nodes: jax.Array) -> jax.Array:
        """[B, N, ...] -> [B, ...], of the node where each row stands."""
        return of_nodes[jnp.arange(len(self.node)), self.node]

    def adjusted(self, sampling: Sampling, history: History) -> Callable[[jax.Array], jax.Array]:
        """logits [B, V] -> logits with the adjustments that hold here."""
        batch = len(self.node)
        path = jnp.stack(self.tokens, axis=1) if self.tokens else jnp.zeros((batch, 0), jnp.int32)

        def adjusted(logits: jax.Array) -> jax.Array:
            return adjust(logits[:, None], sampling.adjustments, history, path[:, None])[:, 0]

        return adjusted

    def step(self, proposal: Proposal, token: jax.Array) -> Walk:
        """Emits token, int32 [B], and goes to the child that holds it, if there is one."""
        match = (proposal.parents == self.node[:, None]) & (proposal.tokens == token[:, None])
        alive = self.alive & jnp.any(match, axis=1)
        return Walk(
            node=jnp.where(alive, jnp.argmax(match, axis=1), self.node).astype(jnp.int32),
            alive=alive,
            tokens=(*self.tokens, token),
            nodes=(*self.nodes, self.node),
            valid=(*self.valid, self.alive),
        )

    def path(self) -> Accepted:
        """What was emitted."""
        return Accepted(
            tokens=jnp.stack(self.tokens, axis=1),
            nodes=jnp.stack(self.nodes, axis=1),
            length=jnp.sum(jnp.stack(self.valid, axis=1), axis=1, dtype=jnp.int32),
        )
