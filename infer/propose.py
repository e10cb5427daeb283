"""Drafting: the head reads what was accepted, and fills the tree level by level.

Axes: B batch, S tokens of the text, T tokens, N tree nodes, F nodes of one level, M tokens that are
compared to copy, D model, W draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax import cache as kv
from clover_jax.config import DraftConfig
from clover_jax.copying import last_tokens, longest_match
from clover_jax.draft import DraftHead
from clover_jax.matmul import matmul
from clover_jax.target import causal_mask
from clover_jax.tree import Tree
from infer.sampling import Sampling, process


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


def propose(
    config: DraftConfig,
    draft: Draft,
    tree: Tree,
    state: jax.Array,
    text: jax.Array,
    root: jax.Array,
    noise: Sequence[jax.Array],
    sampling: Sampling,
) -> jax.Array:
    """Fills the tree.

    The children of a node are the tokens with the largest processed draft logit plus noise, the
    noise being the one the target will choose with.

    Args:
      state: [B, D], s_0 at the root.
      text: int32 [B, S], the tokens so far.
      root: int32 [B], where the last of them, the root, lies.
      noise: per depth 1.. of the tree, f32 [B, V].

    Returns:
      int32 [B, N] tokens in node order; -1, which nothing matches, where the draft vocabulary has
      fewer tokens than the tree asks for.
    """
    head = DraftHead(config)
    variables = {"params": draft.params}
    tokens = jnp.take_along_axis(text, root[:, None], axis=1)
    ending = last_tokens(text, root[:, None], len(config.copy_bias))  # [B, F, M]
    states, features = state[:, None], head.apply(variables, state, method="first_features")
    features = features[:, None]  # [B, F, D], F = 1
    frontier = np.zeros(1, np.int32)  # the nodes whose children come next
    for depth in range(1, tree.depth + 1):
        level = tree.level(depth)
        wanted = int(tree.ranks[level].max()) + 1
        copies = _copies(config, text, root, ending) if config.copy_bias else None
        children = _children(draft, features, copies, noise[depth - 1], sampling, wanted)
        parent = np.searchsorted(frontier, tree.parents[level])
        level_tokens = children[:, parent, tree.ranks[level]]  # [B, nodes of the level]
        tokens = jnp.concatenate([tokens, level_tokens], axis=1)

        inner = np.isin(level, tree.parents)
        if not inner.any():
            break
        embeddings = draft.embedding[jnp.maximum(level_tokens[:, inner], 0)]
        states, features = head.apply(
            variables, states[:, parent[inner]], embeddings, method="extend"
        )
        own = level_tokens[:, inner, None]
        ending = jnp.concatenate([own, ending[:, parent[inner]]], axis=2)[..., : ending.shape[2]]
        frontier = level[inner]
    return tokens


class Copies(NamedTuple):
    """What each node copies from the text.

    Attributes:
      tokens: int32 [B, F].
      bias: f32 [B, F], what their logits gain; -inf where nothing is copied.
    """

    tokens: jax.Array
    bias: jax.Array


def _copies(config: DraftConfig, text: jax.Array, root: jax.Array, ending: jax.Array) -> Copies:
    """The copies for nodes in which the tokens `ending` [B, F, M] end."""
    match = longest_match(text, root[:, None], ending)
    return Copies(
        tokens=jnp.take_along_axis(text, match.place, axis=1),
        bias=jnp.asarray((-jnp.inf, *config.copy_bias))[match.length],
    )


def _children(
    draft: Draft,
    features: jax.Array,
    copies: Copies | None,
    noise: jax.Array,
    sampling: Sampling,
    wanted: int,
) -> jax.Array:
    """The best tokens after each node, best first, int32 [B, F, wanted].

    Args:
      features: [B, F, D], what the LM head reads.
      copies: one more candidate for each node, which takes the place of its own among the others.
      noise: f32 [B, V], of the children's depth.
    """
    features = features.astype(draft.lm_rows.dtype)
    logits = matmul(features, draft.lm_rows)  # [B, F, W]
    size = logits.shape[-1]
    level_noise = jnp.broadcast_to(jnp.take(noise, draft.token_ids, axis=1)[:, None], logits.shape)
    if copies is not None:
        row = draft.lm_head[copies.tokens].astype(jnp.float32)
        logit = jnp.sum(features.astype(jnp.float32) * row, axis=-1) + copies.bias
        copied = copies.tokens[..., None]
        found = (copies.bias > -jnp.inf)[..., None]
        logits = jnp.where(found & (draft.token_ids == copied), -jnp.inf, logits)
        logits = jnp.concatenate([logits, logit[..., None]], axis=-1)
        its_noise = jnp.take_along_axis(noise, copies.tokens, axis=1)
        level_noise = jnp.concatenate([level_noise, its_noise[..., None]], axis=-1)
    scores = jax.vmap(process, in_axes=(1, None), out_axes=1)(logits, sampling) + level_noise
    _, best = jax.lax.top_k(scores, min(wanted, scores.shape[-1]))
    children = draft.token_ids[jnp.minimum(best, size - 1)]
    if copies is not None:
        # A copy of nothing is no token, and what stands beside its own copy is none a second time.
        is_copy = best == size
        beside = found & jnp.any(is_copy, axis=-1, keepdims=True) & (children == copied)
        ruled_out = jnp.where(is_copy, ~found, beside)
        children = jnp.where(ruled_out, -1, jnp.where(is_copy, copied, children))
    missing = wanted - best.shape[-1]
    return jnp.pad(children, ((0, 0), (0, 0), (0, missing)), constant_values=-1)
