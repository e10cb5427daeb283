"""Generation from Python: prompts in, texts out, one compiled program per bucket (see call.py)."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Iterator, Sequence
from typing import Unpack

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.tree import PLAIN, AnyTree, parse_tree
from infer.call import Call, Prompt, prepare
from infer.decode import Acceptance, DecodeState, decode, prefill
from infer.load import Model
from infer.options import Options

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
    **options: Unpack[Options],
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
    call = prepare(
        model, prompts, PLAIN, max_new_tokens, temperature, top_p, top_k, seed, **options
    )
    return _finish(model, call, *_run(call))


def speculative_generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    tree: str | AnyTree | Sequence[Sequence[int]] = "paper",
    acceptance: Acceptance = "shared",
    **options: Unpack[Options],
) -> Generation:
    """Generates the same text as `generate` with the same arguments, in fewer target passes.

    Args:
      tree: what the head proposes: "paper" (the 25 nodes of Clover-2), "chain-N", or a list of
        child-rank paths such as [[0], [1], [0, 0]]. Everything else is as in `generate`.

    Raises:
      ValueError: also if the model has no head or the paths form no tree.
    """
    parsed = _speculative_tree(model, tree)
    call = prepare(
        model,
        prompts,
        parsed,
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        acceptance,
        **options,
    )
    return _finish(model, call, *_run(call))


def stream(
    model: Model,
    prompt: Prompt,
    max_new_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int = 0,
    seed: int = 0,
    tree: str | AnyTree | Sequence[Sequence[int]] | None = "paper",
) -> Iterator[str]:
    """The text of one prompt piece by piece; joined, the pieces are the whole text.

    Args:
      tree: as in `speculative_generate`, or None to stream plainly.

    Raises:
      ValueError: as `speculative_generate`, or a model without a tokenizer; at once, not with the
        first piece.
    """
    if model.tokenizer is None:
        raise ValueError("streaming yields text, and this model has no tokenizer")
    parsed = PLAIN if tree is None else _speculative_tree(model, tree)
    return _pieces(
        model, prepare(model, [prompt], parsed, max_new_tokens, temperature, top_p, top_k, seed)
    )


def _pieces(model: Model, call: Call) -> Iterator[str]:
    state, sent = _start(call), ""
    first = int(call.prompt_length[0])
    while True:
        count = int(state.emitted[0])
        done = bool(state.ended[0]) or count >= int(call.request.budget[0])
        written = np.asarray(state.tokens)  # on the host: a slice compiles
        tokens = written[0, first : first + count].tolist()
        text = _text(model, tokens) if done else _settled_text(model, tokens)
        if len(text) > len(sent):
            yield text[len(sent) :]
            sent = text
        if done:
            return
        state = _decode(call.shape, call.weights, call.request, state, jnp.int32(_STREAM_STEPS))


_prefill = jax.jit(prefill, static_argnums=(0, 1), static_argnames=("slots", "chunk", "samples"))
_decode = jax.jit(decode, static_argnums=0, donate_argnums=3)


def _speculative_tree(model: Model, tree: str | AnyTree | Sequence[Sequence[int]]) -> AnyTree:
    if model.draft is None:
        raise ValueError("this model has no draft head; use generate(), or load one with draft=...")
    return parse_tree(tree)


def _start(call: Call) -> DecodeState:
    state = _prefill(
        call.shape.target,
        call.shape.draft,
        call.weights,
        call.request,
        call.prompt,
        call.prompt_length,
        slots=call.slots,
        chunk=call.chunk,
        samples=call.samples,
    )
    rows, levels = len(state.tokens), call.shape.tree.depth + 1
    return dataclasses.replace(state, accepted=jnp.zeros((rows, levels), jnp.int32))


def _run(call: Call) -> tuple[DecodeState, float, float]:
    started = time.perf_counter()
    state = jax.block_until_ready(_start(call))
    prefilled = time.perf_counter()
    state = _decode(call.shape, call.weights, call.request, state, jnp.int32(2**31 - 1))
    state = jax.block_until_ready(state)
    return state, prefilled - started, time.perf_counter() - prefilled


def _finish(
    model: Model, call: Call, state: DecodeState, prefill_seconds: float, decode_seconds: float
) -> Generation:
    written, prompts, emitted, ended, passes, accepted = jax.device_get(
        (state.tokens, call.prompt_length, state.emitted, state.ended, state.passes, state.accepted)
    )
    tokens = [
        row[start : start + count].tolist()
        for row, start, count in zip(written, prompts, emitted, strict=True)
    ]
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
