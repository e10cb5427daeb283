"""The decode loop: propose, verify, accept, commit; as one compiled `while_loop`.

Plain decoding is the same loop with a tree that is only its root. One step of a row that has
`length` tokens in its caches and the last emitted token as root of the tree:

    propose   the head fills the tree                            tokens, parents [B, N]
    verify    the target reads cache + tree in one pass          logits [B, N, V], hidden [B, N, D]
    accept    follow the target's choices                        path [B, L], count [B]
    commit    keys and values of the path enter the cache        length += count
    advance   the head reads the accepted tokens                 state [B, D]

Axes: B batch, N tree nodes, L = depth of the tree + 1, S cache slots, C prompt chunk, D model,
V vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import flax.struct
import jax
import jax.numpy as jnp

from clover_jax import cache as kv
from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.target import Target, causal_mask
from clover_jax.tree import PLAIN, AnyTree, DynamicTree
from infer.accept import Accepted, accept
from infer.adjust import history
from infer.drafter import Draft, Drafter, read
from infer.propose import Proposal, propose, root_alone
from infer.rejection import DRAFT_STREAM, accept_by_rejection
from infer.sampling import Sampling, gumbel_noise

Acceptance = Literal["shared", "rejection"]


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a compiled loop is specialised to, besides the sizes of its arrays.

    Attributes:
      target: the target's config.
      draft: the head's, or None for plain decoding.
      tree: the draft tree; PLAIN for plain decoding.
      acceptance: "shared" noise, or "rejection" (see rejection.py).
    """

    target: TargetConfig
    draft: DraftConfig | None
    tree: AnyTree
    acceptance: Acceptance = "shared"

    def __post_init__(self) -> None:
        if (self.draft is None) != (self.tree == PLAIN):
            raise ValueError("a draft head needs a tree with paths, and plain decoding has neither")
        if self.acceptance not in ("shared", "rejection"):
            raise ValueError(f"acceptance {self.acceptance!r} is neither 'shared' nor 'rejection'")
        if self.acceptance == "rejection" and isinstance(self.tree, DynamicTree):
            raise ValueError("acceptance by rejection draws its tree, so it takes no dynamic one")


class Weights(NamedTuple):
    """Parameters of the target, and the head made ready for drafting (or None)."""

    target: Any
    draft: Draft | None


class Request(NamedTuple):
    """What was asked for; all of it traced, so that nothing of it recompiles.

    Attributes:
      sampling: settings of each row.
      budget: int32 [B], the most tokens to emit.
      logprobs: bool, log-probabilities of the emitted tokens are wanted.
    """

    sampling: Sampling
    budget: jax.Array
    logprobs: jax.Array

    @property
    def ends(self) -> jax.Array:
        """bool [B, V]: tokens that end a row."""
        return self.sampling.adjustments.ends


@flax.struct.dataclass
class DecodeState:
    """Everything that changes from step to step.

    Attributes:
      tokens: int32 [B, S], the prompt and after it the new tokens.
      logprobs: f32 [B, S], of the new tokens under the target's own distribution, if wanted.
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
    logprobs: jax.Array
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
    samples: int = 1,
) -> DecodeState:
    """Reads the prompts in chunks and emits each row's first token.

    The tree plays no part, so that one compiled prefill serves them all: the state's `accepted`
    still has L = 0.

    Args:
      prompt: int32 [B / samples, P], left-aligned, P a multiple of `chunk`; ids beyond a row's
        length are ignored.
      prompt_length: int32 [B / samples], at least 1.
      slots: S.
      chunk: C; no score matrix is larger than [C, S + C].
      samples: rows that each prompt is continued in, side by side.
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

    tokens = prompt[:, :slots]
    if samples > 1:
        read_once = (tokens, prompt_length, target_cache, draft_cache, last_hidden, logits)
        repeated = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), read_once)
        tokens, prompt_length, target_cache, draft_cache, last_hidden, logits = repeated
    batch = len(tokens)
    rows, none = jnp.arange(batch), jnp.zeros((batch,), jnp.int32)
    sampling = request.sampling
    past = history(sampling.adjustments, tokens, prompt_length, none)
    noise = gumbel_noise(sampling, prompt_length, target_config.vocab_size)
    first = accept(root_alone(tokens[:, :1]), logits[:, None], [noise], sampling, past).tokens
    wanted = request.budget > 0
    logprobs = _logprobs(request, logits[:, None], none[:, None], first)[:, 0]
    state = DecodeState(
        tokens=tokens.at[rows, prompt_length].set(first[:, 0], mode="drop"),
        logprobs=jnp.zeros(tokens.shape).at[rows, prompt_length].set(logprobs, mode="drop"),
        emitted=wanted.astype(jnp.int32),
        ended=wanted & request.ends[rows, first[:, 0]],
        length=prompt_length - 1,
        target_cache=target_cache,
        draft_cache=draft_cache,
        draft_state=jnp.zeros_like(last_hidden),
        passes=jnp.ones((batch,), jnp.int32),
        accepted=jnp.zeros((batch, 0), jnp.int32),
    )
    one = jnp.ones((batch,), jnp.int32)
    return _advance(draft_config, weights, state, last_hidden[:, None], first, one)


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
    slots = kv.num_slots(state.target_cache)
    path, hidden, new, logits = _draft_and_verify(shape, weights, request, state)

    active = running(state, request)
    room_left = request.budget - state.emitted
    rows = jnp.arange(len(state.tokens))[:, None]
    is_end = request.ends[rows, path.tokens]
    never = shape.tree.depth + 2  # beyond any count
    until_end = jnp.where(jnp.any(is_end, axis=1), jnp.argmax(is_end, axis=1) + 1, never)
    count = jnp.where(active, jnp.minimum(jnp.minimum(path.length, until_end), room_left), 0)

    steps = jnp.arange(shape.tree.depth + 1)
    emitted_here = steps < count[:, None]  # [B, L]
    where = jnp.where(emitted_here, state.length[:, None] + 1 + steps, slots)
    # Of the keys and values the path's alone, since on a TPU each is a write of its own.
    written = jnp.where(emitted_here, state.length[:, None] + steps, slots)
    path_hidden = jnp.take_along_axis(hidden, path.nodes[..., None], axis=1)
    logprobs = _logprobs(request, logits, path.nodes, path.tokens)
    state = dataclasses.replace(
        state,
        tokens=state.tokens.at[rows, where].set(path.tokens, mode="drop"),
        logprobs=state.logprobs.at[rows, where].set(logprobs, mode="drop"),
        emitted=state.emitted + count,
        ended=state.ended | (active & (until_end <= count)),
        target_cache=kv.commit(state.target_cache, kv.take(new, path.nodes), written, path_hidden),
        passes=state.passes + active,
        accepted=state.accepted + emitted_here,
    )
    return _advance(shape.draft, weights, state, path_hidden, path.tokens, count)


def _draft_and_verify(
    shape: Shape, weights: Weights, request: Request, state: DecodeState
) -> tuple[Accepted, jax.Array, kv.KVCache, jax.Array]:
    """The path through a new tree, and what the target computed at the tree's nodes: hidden
    [B, N, D], keys and values, logits [B, N, V]."""
    sampling, vocab_size = request.sampling, shape.target.vocab_size
    depths = range(shape.tree.depth + 1)
    following = [state.length + 1 + depth for depth in depths]  # positions after nodes, by depth
    past = history(sampling.adjustments, state.tokens, state.length + 1, state.emitted)
    noise = [gumbel_noise(sampling, at, vocab_size) for at in following]
    head = _head(shape.draft, weights)
    if head is None:
        root = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
        proposal = root_alone(root)
    else:
        draft_noise = noise
        if shape.acceptance == "rejection":
            draft_noise = [gumbel_noise(sampling, at, vocab_size, DRAFT_STREAM) for at in following]
        drafter = Drafter(*head, state.tokens, state.length, draft_noise, sampling, past)
        proposal = propose(drafter, shape.tree, state.draft_state)

    hidden, new, logits = _verify(shape, weights, state, proposal)
    if shape.acceptance == "rejection":
        assert not isinstance(shape.tree, DynamicTree)  # as Shape has checked
        path = accept_by_rejection(shape.tree, proposal, logits, following[0], sampling, past)
    else:
        path = accept(proposal, logits, noise, sampling, past)
    return path, hidden, new, logits


@jax.named_scope("verify")
def _verify(
    shape: Shape, weights: Weights, state: DecodeState, proposal: Proposal
) -> tuple[jax.Array, kv.KVCache, jax.Array]:
    """The target over cache and tree: hidden [B, N, D], new keys and values, logits [B, N, V]."""
    target, variables = Target(shape.target), {"params": weights.target}
    positions = state.length[:, None] + proposal.depths
    hidden, new = target.apply(
        variables,
        jnp.maximum(proposal.tokens, 0),
        positions,
        proposal.ancestors,
        state.target_cache,
        state.length,
        positions + 1,
    )
    return hidden, new, target.apply(variables, hidden, method="logits")


def _logprobs(
    request: Request, logits: jax.Array, nodes: jax.Array, tokens: jax.Array
) -> jax.Array:
    """f32 [B, L]: log-probability of each token of [B, L] after its node; zeros if not wanted.

    Args:
      logits: f32 [B, N, V].
    """

    def look_up() -> jax.Array:
        rows = jnp.arange(len(tokens))[:, None]
        after = jax.nn.log_softmax(logits[rows, nodes], axis=-1)  # [B, L, V]
        return jnp.take_along_axis(after, tokens[..., None], axis=2)[..., 0]

    return jax.lax.cond(request.logprobs, look_up, lambda: jnp.zeros(tokens.shape))


@jax.named_scope("advance")
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
