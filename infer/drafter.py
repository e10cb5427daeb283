"""The head at work on one text: reading accepted tokens, and proposing from nodes of a tree.

Axes: B batch, S tokens of the text, T tokens, F nodes of one level, M tokens that are compared to
copy, D model, W draft vocabulary, V vocabulary; C = W, and one more where the head copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax import cache as kv
from clover_jax.config import DraftConfig
from clover_jax.copying import last_tokens, longest_match
from clover_jax.draft import DraftHead
from clover_jax.matmul import matmul
from clover_jax.target import causal_mask
from infer.adjust import History, adjust
from infer.sampling import Sampling, process
from infer.top_k import top_k


class Draft(NamedTuple):
    """A head made ready for drafting.

    Attributes:
      params: the head's own parameters.
      lm_rows: [W, D], rows of the target's LM head for the tokens it may propose.
      token_ids: int32 [W], those tokens.
      embedding: [V, D], e: the target's token embedding or its LM head.
      lm_head: [V, D], the target's: any token may be copied from the text.
    """

    params: Any
    lm_rows: jax.Array
    token_ids: jax.Array
    embedding: jax.Array
    lm_head: jax.Array


def read(
    config: DraftConfig,
    draft: Draft,
    cache: kv.KVCache,
    length: jax.Array,
    hidden: jax.Array,
    following: jax.Array,
    positions: jax.Array,
    valid: jax.Array,
    span: jax.Array,
) -> tuple[jax.Array, kv.KVCache]:
    """Lets the head read accepted tokens.

    Args:
      cache: the head's, with `length` (int32 [B]) tokens in each row.
      hidden: [B, T, D], the target's state at each position.
      following: int32 [B, T], the token after each.
      positions: int32 [B, T].
      valid: bool [B, T], a prefix of each row; the rest leaves no trace.
      span: as for Target.

    Returns:
      s_0 at each position, [B, T, D], and the cache with the valid tokens in it.
    """
    states, new = DraftHead(config).apply(
        {"params": draft.params},
        hidden,
        draft.embedding[following],
        positions,
        causal_mask(positions.shape[1]),
        cache,
        length,
        span,
        method="advance",
    )
    slots = jnp.where(valid, positions, kv.num_slots(cache))
    return states, kv.commit(cache, new, slots, states)


class Frontier(NamedTuple):
    """Nodes of one depth d, ready to propose.

    Attributes:
      states: [B, F, D], s_d.
      features: f32 [B, F, D], what the LM head reads.
      path: int32 [B, F, d], the tokens from below the root to the node.
    """

    states: jax.Array
    features: jax.Array
    path: jax.Array


class Proposals(NamedTuple):
    """What each node of a frontier may be followed by.

    Attributes:
      tokens: int32 [B, F, C] or [1, 1, C].
      logits: f32 [B, F, C], processed; -inf where there is no token or it is ruled out.
      scores: f32 [B, F, C], logits plus noise, by which the proposals are ranked.
    """

    tokens: jax.Array
    logits: jax.Array
    scores: jax.Array

    def best(self, count: int) -> tuple[jax.Array, jax.Array]:
        """The best tokens of each node, best first, and their scores: [B, F, count] both.

        The token is -1, which nothing matches, where there is none.
        """
        available = min(count, self.scores.shape[-1])
        which = top_k(self.scores, available)
        scores = jnp.take_along_axis(self.scores, which, axis=-1)
        every = jnp.broadcast_to(self.tokens, self.scores.shape)
        tokens = jnp.take_along_axis(every, which, axis=-1)
        beyond = ((0, 0), (0, 0), (0, count - available))
        return (
            jnp.pad(tokens, beyond, constant_values=-1),
            jnp.pad(scores, beyond, constant_values=-jnp.inf),
        )


@dataclasses.dataclass(frozen=True)
class Drafter:
    """A head, and the text it drafts for.

    Attributes:
      config, draft: the head.
      text: int32 [B, S], the tokens so far.
      root: int32 [B], where the last of them, the root of the tree, lies.
      noise: f32 [B, V] for each depth 1, 2, ... of the tree.
      sampling, history: how logits are processed.
    """

    config: DraftConfig
    draft: Draft
    text: jax.Array
    root: jax.Array
    noise: list[jax.Array]
    sampling: Sampling
    history: History

    @property
    def root_token(self) -> jax.Array:
        """int32 [B, 1]."""
        return jnp.take_along_axis(self.text, self.root[:, None], axis=1)

    def start(self, state: jax.Array) -> Frontier:
        """The root alone; state [B, D] is its s_0."""
        features = self._apply(state[:, None], method="first_features")
        return Frontier(state[:, None], features, jnp.zeros((len(state), 1, 0), jnp.int32))

    def extend(self, states: jax.Array, path: jax.Array) -> Frontier:
        """One token further: states [B, F, D] of the parents, path int32 [B, F, d] to the nodes."""
        embeddings = self.draft.embedding[jnp.maximum(path[..., -1], 0)]
        states, features = self._apply(states, embeddings, method="extend")
        return Frontier(states, features, path)

    def propose(self, frontier: Frontier) -> Proposals:
        """Processed draft logits and scores of what may follow each node."""
        draft, noise = self.draft, self.noise[frontier.path.shape[-1]]
        features = frontier.features.astype(draft.lm_rows.dtype)
        logits = matmul(features, draft.lm_rows)  # [B, F, W]
        tokens = draft.token_ids[None, None]
        whole = self.config.draft_vocab_size == noise.shape[1]
        its_noise = noise[:, None] if whole else self._noise_of_vocabulary(noise)[:, None]
        if self.config.copy_bias:
            copied, bias = self._copies(frontier)  # [B, F, 1]
            found = bias > -jnp.inf
            twin = found & (tokens == copied)
            logits = jnp.where(twin, logits + bias, logits)
            if not whole:  # a copied token outside the draft vocabulary is one more candidate
                row = draft.lm_head[copied[..., 0]].astype(jnp.float32)
                logit = jnp.sum(features.astype(jnp.float32) * row, axis=-1, keepdims=True) + bias
                outside = found & ~jnp.any(twin, axis=-1, keepdims=True)
                logits = jnp.concatenate([logits, jnp.where(outside, logit, -jnp.inf)], axis=-1)
                tokens = _beside(tokens, jnp.where(outside, copied, -1))
                its_noise = _beside(its_noise, jnp.take_along_axis(noise[:, None], copied, axis=2))
        logits = process(logits, self.sampling, self._adjusted(frontier, tokens))
        return Proposals(tokens, logits, logits + its_noise)

    def _noise_of_vocabulary(self, noise: jax.Array) -> jax.Array:
        """f32 [B, W]; not gathered while all rows are greedy and it is 0."""
        ids = self.draft.token_ids
        return jax.lax.cond(
            jnp.any(self.sampling.temperature > 0),
            lambda: jnp.take(noise, ids, axis=1),
            lambda: jnp.zeros((len(noise), len(ids)), noise.dtype),
        )

    def _copies(self, frontier: Frontier) -> tuple[jax.Array, jax.Array]:
        """The token each node copies from the text, int32 [B, F, 1], and what its logit gains, f32
        [B, F, 1]: -inf where nothing is copied."""
        longest = len(self.config.copy_bias)
        before = last_tokens(self.text, self.root[:, None], longest)  # [B, 1, M]
        before = jnp.broadcast_to(before, (*frontier.path.shape[:2], longest))
        ending = jnp.concatenate([frontier.path[..., ::-1], before], axis=-1)[..., :longest]
        match = longest_match(self.text, self.root[:, None], ending)
        bias = jnp.asarray((-jnp.inf, *self.config.copy_bias))[match.length]
        return jnp.take_along_axis(self.text, match.place, axis=1)[..., None], bias[..., None]

    def _adjusted(
        self, frontier: Frontier, candidates: jax.Array
    ) -> Callable[[jax.Array], jax.Array]:
        """Adjustments of the logits of `candidates`, int32 [B, F, C] or [1, 1, C]."""

        def adjusted(logits: jax.Array) -> jax.Array:
            every = jnp.broadcast_to(jnp.maximum(candidates, 0), logits.shape)
            return adjust(logits, self.sampling.adjustments, self.history, frontier.path, every)

        return adjusted

    def _apply(self, *inputs: jax.Array, method: str) -> Any:
        return DraftHead(self.config).apply({"params": self.draft.params}, *inputs, method=method)


def _beside(wide: jax.Array, column: jax.Array) -> jax.Array:
    """[B or 1, F or 1, W] and [B, F, 1] -> [B, F, W + 1]."""
    return jnp.concatenate([jnp.broadcast_to(wide, (*column.shape[:2], wide.shape[2])), column], -1)
