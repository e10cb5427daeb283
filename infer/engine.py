"""Generation from Python: prompts in, texts out, one compiled program per bucket.

A bucket is (batch size, cache slots, prompt chunk, tree). Cache slots are the smallest power of two
that holds the longest prompt with its budget, at least 64 and at most the model's context; the
prompt chunk is a power of two from 16 to 256. Sampling settings, seeds, budgets, prompt lengths and
end-of-sequence tokens are arguments of the program and never recompile it.
"""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.chat import encode_prompt
from clover_jax.tree import PLAIN, Tree, parse_tree
from infer.decode import DecodeState, Request, Shape, Weights, decode, prefill
from infer.load import Model
from infer.sampling import Sampling, row_keys

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

_EOS_SLOTS = 8  # ids beyond it go into the next multiple
_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_STREAM_STEPS = 4  # target passes between two pieces of a stream


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call cost.

    Attributes:
      target_passes: per row, forward passes of the target while the row was unfinished, the
        prefill included, which emits one token too.
      tokens_per_pass: tokens emitted per target pass, over all rows.
      accepted_by_depth: for depth 1, 2, ... of the tree, the share of verify passes that kept a
        draft token there; empty for plain decoding.
      prefill_seconds, decode_seconds: wall time; the first call in a bucket includes compilation.
      tokens_per_second: tokens of all rows after each row's first, per decode_seconds.
    """

    target_passes: list[int]
    tokens_per_pass: float
    accepted_by_depth: list[float]
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of a call, one entry per prompt.

    Attributes:
      texts: decoded without special tokens; empty strings for a model without a tokenizer.
      token_ids: new tokens only, with the end-of-sequence token where it ended the row.
      finish_reasons: "eos" or "length".
      stats: what the call cost.
    """

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    stats: Stats


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
) -> Generation:
    """Generates with the target alone.

    Args:
      model: from `load`.
      prompts: one prompt or a list of them. A prompt is a string, which is tokenised as it stands;
        a list of token ids; or a list of {role, content} messages, which goes through the
        tokenizer's chat template.
      max_new_tokens: at most this many tokens; prompt and budget must fit the model's context.
      temperature: 0 is greedy.
      top_p: keeps the fewest most likely tokens whose probability reaches it; 1 is off.
      top_k: keeps this many; 0 is off.
      seed: one per row, or one for all: row i then uses seed + i.
      All settings but the model are scalars or hold one value per prompt.

    Returns:
      A Generation.

    Raises:
      ValueError: a prompt or a setting that cannot be used, with the numbers.
    """
    call = _prepare(model, prompts, max_new_tokens, temperature, top_p, top_k, seed, PLAIN)
    return _finish(model, call, *_run(call))


def speculative_generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    tree: str | Tree | Sequence[Sequence[int]] = "paper",
) -> Generation:
    """Generates the same text as `generate` with the same arguments, in fewer target passes.

    Args:
      tree: what the head proposes: "paper" (the 25 nodes of Clover-2), "chain-N", or a list of
        child-rank paths such as [[0], [1], [0, 0]]. Everything else is as in `generate`.

    Raises:
      ValueError: also if the model has no head or the paths form no tree.
    """
    parsed = _speculative_tree(model, tree)
    call = _prepare(model, prompts, max_new_tokens, temperature, top_p, top_k, seed, parsed)
    return _finish(model, call, *_run(call))


def stream(
    model: Model,
    prompt: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    tree: str | Tree | Sequence[Sequence[int]] | None = "paper",
) -> Iterator[str]:
    """Yields the text of one prompt piece by piece; joined, the pieces are the whole text.

    Args:
      tree: as in `speculative_generate`, or None to stream plainly.
    """
    if model.tokenizer is None:
        raise ValueError("streaming yields text, and this model has no tokenizer")
    parsed = PLAIN if tree is None else _speculative_tree(model, tree)
    call = _prepare(model, [prompt], max_new_tokens, temperature, top_p, top_k, seed, parsed)
    state, sent = _start(call), ""
    while True:
        count = int(state.emitted[0])
        done = bool(state.ended[0]) or count >= int(call.request.budget[0])
        tokens = np.asarray(state.output)[0, :count].tolist()  # on the host: a slice compiles
        text = _text(model, tokens) if done else _settled_text(model, tokens)
        if len(text) > len(sent):
            yield text[len(sent) :]
            sent = text
        if done:
            return
        state = _decode(call.shape, call.weights, call.request, state, jnp.int32(_STREAM_STEPS))


class _Call(NamedTuple):
    """A checked request as arrays, and the bucket it falls in."""

    shape: Shape
    weights: Weights
    request: Request
    prompt: jax.Array
    prompt_length: jax.Array
    slots: int
    chunk: int


_prefill = jax.jit(prefill, static_argnums=(0, 1), static_argnames=("slots", "chunk"))
_decode = jax.jit(decode, static_argnums=0, donate_argnums=3)


def _speculative_tree(model: Model, tree: str | Tree | Sequence[Sequence[int]]) -> Tree:
    if model.draft is None:
        raise ValueError("this model has no draft head; use generate(), or load one with draft=...")
    return parse_tree(tree)


def _prepare(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float],
    top_p: float | Sequence[float],
    top_k: int | Sequence[int],
    seed: int | Sequence[int],
    tree: Tree,
) -> _Call:
    ids = [encode_prompt(model.tokenizer, p) for p in _as_list(prompts)]
    rows = len(ids)
    budget = _per_row("max_new_tokens", max_new_tokens, rows, np.int32, 0, 2**31 - 1)
    sampling = Sampling(
        temperature=jnp.asarray(_per_row("temperature", temperature, rows, np.float32, 0.0)),
        top_k=jnp.asarray(_per_row("top_k", top_k, rows, np.int32, 0, 2**31 - 1)),
        top_p=jnp.asarray(_per_row("top_p", top_p, rows, np.float32, 0.0, 1.0)),
        keys=row_keys(seed, rows),
    )
    context = model.config.max_position_embeddings
    for row, (prompt, new) in enumerate(zip(ids, budget.tolist(), strict=True)):
        _check_prompt(row, prompt, new, model.config.vocab_size, context)

    longest = max(len(p) for p in ids)
    need = max(len(p) + n for p, n in zip(ids, budget.tolist(), strict=True))
    slots = min(max(_power_of_two(need), 64), context)
    chunk = min(max(_power_of_two(longest), 16), 256)
    padded = np.zeros((rows, -(-slots // chunk) * chunk), np.int32)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    ends = np.full(-(-max(len(model.eos_ids), 1) // _EOS_SLOTS) * _EOS_SLOTS, -1, np.int32)
    ends[: len(model.eos_ids)] = model.eos_ids
    plain = tree.depth == 0
    return _Call(
        shape=Shape(model.config, None if plain else model.draft_config, tree),
        weights=Weights(model.params, None if plain else model.draft),
        request=Request(sampling, jnp.asarray(budget), jnp.asarray(ends)),
        prompt=jnp.asarray(padded),
        prompt_length=jnp.asarray([len(p) for p in ids], jnp.int32),
        slots=slots,
        chunk=chunk,
    )


def _start(call: _Call) -> DecodeState:
    state = _prefill(
        call.shape.target,
        call.shape.draft,
        call.weights,
        call.request,
        call.prompt,
        call.prompt_length,
        slots=call.slots,
        chunk=call.chunk,
    )
    rows, levels = len(call.prompt), call.shape.tree.depth + 1
    return dataclasses.replace(state, accepted=jnp.zeros((rows, levels), jnp.int32))


def _run(call: _Call) -> tuple[DecodeState, float, float]:
    started = time.perf_counter()
    state = jax.block_until_ready(_start(call))
    prefilled = time.perf_counter()
    state = _decode(call.shape, call.weights, call.request, state, jnp.int32(2**31 - 1))
    state = jax.block_until_ready(state)
    return state, prefilled - started, time.perf_counter() - prefilled


def _finish(
    model: Model, call: _Call, state: DecodeState, prefill_seconds: float, decode_seconds: float
) -> Generation:
    output, emitted, ended, passes, accepted = jax.device_get(
        (state.output, state.emitted, state.ended, state.passes, state.accepted)
    )
    tokens = [row[:count].tolist() for row, count in zip(output, emitted, strict=True)]
    verified = int(np.sum(passes - 1))
    by_depth = accepted.sum(axis=0)[1:] / max(verified, 1)
    later = int(np.sum(np.maximum(emitted - 1, 0)))
    return Generation(
        texts=[_text(model, row) for row in tokens],
        token_ids=tokens,
        finish_reasons=["eos" if e else "length" for e in ended],
        stats=Stats(
            target_passes=passes.tolist(),
            tokens_per_pass=float(emitted.sum() / passes.sum()),
            accepted_by_depth=by_depth.tolist(),
            prefill_seconds=prefill_seconds,
            decode_seconds=decode_seconds,
            tokens_per_second=later / decode_seconds,
        ),
    )


def _text(model: Model, tokens: list[int]) -> str:
    if model.tokenizer is None:
        return ""
    return str(
        model.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    )


def _settled_text(model: Model, tokens: list[int]) -> str:
    """The part of the text that no later token changes.

    A character may end in a later token: until then it decodes to U+FFFD. And a run of byte tokens
    (Llama 2, Vicuna) decodes as a whole: an invalid byte turns all of it into U+FFFD.
    """
    tokenizer = model.tokenizer
    assert tokenizer is not None  # as stream has checked
    names = tokenizer.convert_ids_to_tokens(tokens)
    skipped = set(tokenizer.all_special_ids)
    end = len(tokens)
    while end and (tokens[end - 1] in skipped or _BYTE_TOKEN.fullmatch(names[end - 1] or "")):
        end -= 1
    return _text(model, tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tells one prompt from a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(
            "prompts are a string, token ids, messages or a list of those, not "
            f"{type(prompts).__name__}"
        )
    listed: list[Any] = list(prompts)
    if not listed:
        raise ValueError("the prompt is empty")
    if all(isinstance(x, dict) for x in listed):
        return [listed]
    if all(isinstance(x, int | np.integer) for x in listed):
        return [[int(x) for x in listed]]
    return listed


def _per_row(
    name: str,
    value: Any,
    rows: int,
    dtype: type[np.generic],
    low: float,
    high: float = float("inf"),
) -> np.ndarray:
    values = np.asarray(value)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        raise ValueError(f"{name} holds {values.size} values for {rows} prompts")
    whole = np.issubdtype(dtype, np.integer)
    if not np.issubdtype(values.dtype, np.integer if whole else np.number):
        raise ValueError(f"{name} must be {'whole numbers' if whole else 'numbers'}, got {value!r}")
    bad = values[~((values >= low) & (values <= high) & np.isfinite(values))]
    if bad.size:
        bounds = f"between {low} and {high}" if np.isfinite(high) else f"at least {low}"
        raise ValueError(f"{name} must be {bounds}, got {bad.flat[0]}")
    return np.broadcast_to(values, (rows,)).astype(dtype)


def _check_prompt(row: int, prompt: list[int], budget: int, vocab_size: int, context: int) -> None:
    if not prompt:
        raise ValueError(f"prompt {row} is empty")
    outside = [t for t in prompt if not 0 <= t < vocab_size]
    if outside:
        raise ValueError(
            f"prompt {row} holds token id {outside[0]}, outside the vocabulary of {vocab_size}"
        )
    if len(prompt) + budget > context:
        raise ValueError(
            f"prompt {row} has {len(prompt)} tokens; with max_new_tokens {budget} it needs "
            f"{len(prompt) + budget} of a context of {context}"
        )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
