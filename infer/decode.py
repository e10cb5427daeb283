"""The decode loop: propose, verify, accept, commit; as one compiled `while_loop`.

Plain decoding is the same loop with a tree that is only its root. One step of a row that has
`length` tokens in its caches and the last emitted token as root of the tree:

    propose   the head fills the tree                            tokens  [B, N]
    verify    the target reads cache + tree in one pass          logits  [B, N, V], hidden [B, N, D]
    accept    follow the target's choices                        path    [B, L], count [B]
    commit    keys and values of the path enter the cache        length += count
    advance   the head reads the accepted tokens                 state   [B, D]

Axes: B batch, N tree nodes, L = depth of the tree + 1, S cache slots, C prompt chunk,
E end-of-sequence ids, D model, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from clover_jax import cache as kv
from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.target import Target, causal_mask
from clover_jax.tree import Tree
from infer.accept import Accepted, accept
from infer.propose import Draft, propose, read
from infer.sampling import Sampling, choose, gumbel_noise


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a compiled loop is specialised to, besides the sizes of its arrays.

    Attributes:
      target: the target's config.
      draft: the head's, or None for plain decoding.
      tree: the draft tree; without paths for plain decoding.
    """

    target: TargetConfig
    draft: DraftConfig | None
    tree: Tree

    def __post_init__(self) -> None:
        if (self.draft is None) != (self.tree.depth == 0):
            raise ValueError("a draft head needs a tree with paths, and plain decoding has neither")


class Weights(NamedTuple):
    """Parameters of the target, and the head made ready for drafting (or None)."""

    target: Any
    draft: Draft | None


class Request(NamedTuple):
    """What was asked for; all of it traced, so that nothing of it recompiles.

    Attributes:
      sampling: settings of each row.
      budget: int32 [B], the most tokens to emit.
      eos_ids: int32 [E], tokens that end a row; padded with -1.
    """

    sampling: Sampling
    budget: jax.Array
    eos_ids: jax.Array


@flax.struct.dataclass
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
      tokens: int32 [B, S], the prompt and after it the new tokens.
      emitted: int32 [B], how many of them are new.
      ended: bool [B], the last one is an end-of-sequence token.
      length: int32 [B], tokens in the caches: all but the last one, the root of the next tree.
      target_cache: keys and values of every layer.
      draft_cache: the head's, alike; () without a head.
      draft_state: [B, D], s_0 at the root; without a head it stays 0.
      passes: int32 [B], target passes the row took part in while unfinished, prefill included.
      accepted: int32 [B, L], verify passes that emitted at least 1, 2, ... tokens.
    """

    tokens: jax.Array
    emitted: jax.Array
    ended: jax.Array
    length: jax.Array
    target_cache: kv.KVCache
    draft_cache: kv.KVCache
    draft_state: jax.Array
    passes: jax.Array
    accepted: jax.Array


def running(state: DecodeState, request: Request) -> jax.Array:
    """bool [B]: rows that still emit."""
    return ~state.ended & (state.emitted < request.budget)


def prefill(
    target_config: TargetConfig,
    draft_config: DraftConfig | None,
    weights: Weights,
    request: Request,
    prompt: jax.Array,
    prompt_length: jax.Array,
    slots: int,
    chunk: int,
) -> DecodeState:
    """Reads the prompts in chunks and emits each row's first token.

    The tree plays no part, so that one compiled prefill serves them all: the state's `accepted`
    still has L = 0.

    Args:
      prompt: int32 [B, P], left-aligned, P a multiple of `chunk`; ids beyond a row's length are
        ignored.
      prompt_length: int32 [B], at least 1.
      slots: S.
      chunk: C; no score matrix is larger than [C, S + C].
    """
    batch = prompt.shape[0]
    target = Target(target_config)
    target_vars = {"params": weights.target}
    dtype = weights.target["embed_tokens"].dtype
    head = _head(draft_config, weights)
    mask = causal_mask(chunk)

    def read_chunk(index: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        target_cache, draft_cache, last_hidden = carry
        start = index * chunk
        columns = start + jnp.arange(chunk)
        positions = jnp.broadcast_to(columns, (batch, chunk))
        tokens = jax.lax.dynamic_slice_in_dim(prompt, start, chunk, axis=1)
        span = jnp.broadcast_to(prompt_length[:, None], positions.shape)
        before = jnp.minimum(prompt_length, start)
        hidden, new = target.apply(target_vars, tokens, positions, mask, target_cache, before, span)
        inside = positions < prompt_length[:, None]
        written = jnp.where(inside, positions, slots)
        target_cache = kv.commit(target_cache, new, written, hidden)
        is_last = positions == prompt_length[:, None] - 1
        last_hidden = jnp.where(
            jnp.any(is_last, axis=1)[:, None],
            hidden[jnp.arange(batch), jnp.argmax(is_last, axis=1)],
            last_hidden,
        )
        if head is not None:
            # The head reads (h_t, x_{t+1}); the last position waits for the first new token.
            following = jnp.take(prompt, columns + 1, axis=1, mode="fill", fill_value=0)
            known = positions < prompt_length[:, None] - 1
            _, draft_cache = read(
                *head, draft_cache, before, hidden, following, positions, known, span
            )
        return target_cache, draft_cache, last_hidden

    carry = (
        kv.init(target_config, batch, slots, dtype),
        kv.init(head[0].block, batch, slots, dtype) if head is not None else (),
        jnp.zeros((batch, target_config.hidden_size), dtype),
    )
    chunks = (jnp.max(prompt_length) + chunk - 1) // chunk
    target_cache, draft_cache, last_hidden = jax.lax.fori_loop(0, chunks, read_chunk, carry)

    logits = target.apply(target_vars, last_hidden, method="logits")
    noise = gumbel_noise(request.sampling, prompt_length, target_config.vocab_size)
    first = choose(logits, noise, request.sampling)
    wanted = request.budget > 0
    rows = jnp.arange(batch)
    state = DecodeState(
        tokens=prompt[:, :slots].at[rows, prompt_length].set(first, mode="drop"),
        emitted=wanted.astype(jnp.int32),
        ended=wanted & jnp.isin(first, request.eos_ids),
        length=prompt_length - 1,
        target_cache=target_cache,
        draft_cache=draft_cache,
        draft_state=jnp.zeros_like(last_hidden),
        passes=jnp.ones((batch,), jnp.int32),
        accepted=jnp.zeros((batch, 0), jnp.int32),
    )
    one = jnp.ones((batch,), jnp.int32)
    return _advance(draft_config, weights, state, last_hidden[:, None], first[:, None], one)


def decode(
    shape: Shape, weights: Weights, request: Request, state: DecodeState, max_steps: jax.Array
) -> DecodeState:
    """Runs until every row has finished, or for `max_steps` (int32 scalar) steps."""

    def go_on(carry: tuple[jax.Array, DecodeState]) -> jax.Array:
        step, state = carry
        return (step < max_steps) & jnp.any(running(state, request))

    def body(carry: tuple[jax.Array, DecodeState]) -> tuple[jax.Array, DecodeState]:
        step, state = carry
        return step + 1, decode_step(shape, weights, request, state)

    return jax.lax.while_loop(go_on, body, (jnp.int32(0), state))[1]


def decode_step(
    shape: Shape, weights: Weights, request: Request, state: DecodeState
) -> DecodeState:
    """One pass of the target: every unfinished row emits between 1 and L tokens."""
    tree, sampling = shape.tree, request.sampling
    slots = kv.num_slots(state.target_cache)
    noise = [
        gumbel_noise(sampling, state.length + 1 + depth, shape.target.vocab_size)
        for depth in range(tree.depth + 1)
    ]
    head = _head(shape.draft, weights)
    if head is None:
        drafted = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
    else:
        drafted = propose(
            *head, tree, state.draft_state, state.tokens, state.length, noise, sampling
        )

    positions = state.length[:, None] + tree.depths
    hidden, new, logits = _verify(shape, weights, state, jnp.maximum(drafted, 0), positions)
    path = accept(tree, drafted, logits, noise, sampling)

    active = running(state, request)
    room_left = request.budget - state.emitted
    is_eos = jnp.isin(path.tokens, request.eos_ids)
    never = tree.depth + 2  # beyond any count
    until_eos = jnp.where(jnp.any(is_eos, axis=1), jnp.argmax(is_eos, axis=1) + 1, never)
    count = jnp.where(active, jnp.minimum(jnp.minimum(path.length, until_eos), room_left), 0)

    steps = jnp.arange(tree.depth + 1)
    emitted_here = steps < count[:, None]  # [B, L]
    rows = jnp.arange(drafted.shape[0])[:, None]
    where = jnp.where(emitted_here, state.length[:, None] + 1 + steps, slots)
    written = _slots_of_path(tree, path, emitted_here, positions, slots)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(path.tokens, mode="drop"),
        emitted=state.emitted + count,
        ended=state.ended | (active & (until_eos <= count)),
        target_cache=kv.commit(state.target_cache, new, written, hidden),
        passes=state.passes + active,
        accepted=state.accepted + emitted_here,
    )
    path_hidden = jnp.take_along_axis(hidden, path.nodes[..., None], axis=1)
    return _advance(shape.draft, weights, state, path_hidden, path.tokens, count)


def _verify(
    shape: Shape, weights: Weights, state: DecodeState, tokens: jax.Array, positions: jax.Array
) -> tuple[jax.Array, kv.KVCache, jax.Array]:
    """The target over cache and tree: hidden [B, N, D], new keys and values, logits [B, N, V]."""
    target, variables = Target(shape.target), {"params": weights.target}
    hidden, new = target.apply(
        variables,
        tokens,
        positions,
        jnp.asarray(shape.tree.ancestors),
        state.target_cache,
        state.length,
        positions + 1,
    )
    return hidden, new, target.apply(variables, hidden, method="logits")


def _slots_of_path(
    tree: Tree, path: Accepted, emitted: jax.Array, positions: jax.Array, slots: int
) -> jax.Array:
    """int32 [B, N]: the cache slot of each emitted node; `slots`, out of range, for the rest."""
    on_path = path.nodes[:, :, None] == jnp.arange(tree.size)  # [B, L, N]
    kept = jnp.any(on_path & emitted[:, :, None], axis=1)
    return jnp.where(kept, positions, slots)


def _advance(
    draft_config: DraftConfig | None,
    weights: Weights,
    state: DecodeState,
    path_hidden: jax.Array,
    path_tokens: jax.Array,
    count: jax.Array,
) -> DecodeState:
    """Moves `length` over `count` [B] tokens, and lets the head read them.

    Args:
      path_hidden: [B, T, D], h of the tokens that enter the caches.
      path_tokens: int32 [B, T], the token after each.
    """
    length = state.length + count
    head = _head(draft_config, weights)
    if head is None:
        return dataclasses.replace(state, length=length)
    steps = jnp.arange(path_tokens.shape[1])
    positions = state.length[:, None] + steps
    states, draft_cache = read(
        *head,
        state.draft_cache,
        state.length,
        path_hidden,
        path_tokens,
        positions,
        steps < count[:, None],
        positions + 1,
    )
    last = jnp.maximum(count - 1, 0)[:, None, None]
    fresh = jnp.take_along_axis(states, last, axis=1)[:, 0]
    draft_state = jnp.where((count > 0)[:, None], fresh, state.draft_state)
    return dataclasses.replace(
        state, length=length, draft_cache=draft_cache, draft_state=draft_state
    )


def _head(config: DraftConfig | None, weights: Weights) -> tuple[DraftConfig, Draft] | None:
    if config is None or weights.draft is None:
        return None
    return config, weights.draft
