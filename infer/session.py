"""One call as it runs: prefill, steps of the compiled loop, stop strings, and what it cost."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.tree import AnyTree
from infer.call import Call
from infer.decode import DecodeState, decode, prefill
from infer.load import Model
from infer.text import Cut, decoded, find_stop, settled

UNTIL_DONE = 2**31 - 1

_prefill = jax.jit(prefill, static_argnums=(0, 1), static_argnames=("slots", "chunk", "samples"))
_decode = jax.jit(decode, static_argnums=0, donate_argnums=3)


def start(call: Call) -> DecodeState:
    """Reads the prompts; every row then has its first token."""
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
    levels = call.shape.tree.depth + 1
    return dataclasses.replace(state, accepted=jnp.zeros((len(state.tokens), levels), jnp.int32))


def proceed(call: Call, state: DecodeState, passes: int) -> DecodeState:
    """Runs up to so many target passes; `state` is given away."""
    return _decode(call.shape, call.weights, call.request, state, jnp.int32(passes))


@dataclasses.dataclass(frozen=True)
class Stats:
    """What a call cost.

    Attributes:
      tree: that was drafted; PLAIN for plain decoding.
      target_passes: per row, forward passes of the target while the row was unfinished, the
        prefill included, which emits one token too.
      tokens_per_pass: tokens emitted per target pass, over all rows.
      accepted_by_depth: for depth 1, 2, ... of the tree, the share of verify passes that kept a
        draft token there; empty for plain decoding.
      prefill_seconds, decode_seconds: wall time; the first call in a bucket includes compilation.
        With the prefill comes the first token of every row.
      tokens_per_second: tokens of all rows after each row's first, per decode_seconds.
    """

    tree: AnyTree
    target_passes: list[int]
    tokens_per_pass: float
    accepted_by_depth: list[float]
    prefill_seconds: float
    decode_seconds: float
    tokens_per_second: float


@dataclasses.dataclass(frozen=True)
class Generation:
    """The result of a call, one entry per prompt; with `num_samples`, that many per prompt.

    Attributes:
      texts: decoded without special tokens, up to a stop string; empty strings for a model without
        a tokenizer.
      token_ids: new tokens only, with the end-of-sequence or stop token where it ended the row, and
        with the token that completed a stop string.
      finish_reasons: "eos" (also a stop token), "stop" (a stop string) or "length".
      stats: what the call cost.
      logprobs: of each new token under the model's own distribution, if asked for.
    """

    texts: list[str]
    token_ids: list[list[int]]
    finish_reasons: list[str]
    stats: Stats
    logprobs: list[list[float]] | None = None


class Session:
    """A call between its prefill and its end. What lies on the device goes with the object."""

    def __init__(self, model: Model, call: Call) -> None:
        """Starts the call."""
        self._model, self._call = model, call
        self._cuts: dict[int, Cut] = {}
        started = time.perf_counter()
        self._state: DecodeState = jax.block_until_ready(start(call))
        self._starts = np.repeat(np.asarray(call.prompt_length), call.samples)
        self._budgets = np.asarray(call.request.budget)
        self._prefill_seconds, self._decode_seconds = time.perf_counter() - started, 0.0
        self._cut(np.zeros(len(self._starts), np.int32))

    def advance(self, passes: int) -> None:
        """Runs up to so many target passes.

        While a row waits for a stop string they are made one by one, so that none is made in vain.
        """
        watched = any(
            stops and not end for stops, end in zip(self._call.stops, self.finished, strict=True)
        )
        before = np.asarray(self._state.emitted)
        started = time.perf_counter()
        state = proceed(self._call, self._state, 1 if watched else passes)
        self._state = jax.block_until_ready(state)
        self._decode_seconds += time.perf_counter() - started
        if watched:
            self._cut(before)

    def run(self) -> None:
        """Runs to the end."""
        while not all(self.finished):
            self.advance(UNTIL_DONE)

    @property
    def finished(self) -> list[bool]:
        """Of each row."""
        ended, emitted = np.asarray(self._state.ended), np.asarray(self._state.emitted)
        finished: list[bool] = (ended | (emitted >= self._budgets)).tolist()
        return finished

    @property
    def token_ids(self) -> list[list[int]]:
        """The new tokens of each row so far."""
        written = np.asarray(self._state.tokens)  # on the host: a slice compiles
        return self._new(written)

    @property
    def texts(self) -> list[str]:
        """Of each row, as far as nothing changes it any more."""
        return [
            self._text(row, tokens) if end else settled(self._model, tokens, stops)
            for row, (tokens, stops, end) in enumerate(
                zip(self.token_ids, self._call.stops, self.finished, strict=True)
            )
        ]

    def generation(self) -> Generation:
        """The result, once all rows have finished."""
        state = self._state
        emitted, ended, passes, accepted = jax.device_get(
            (state.emitted, state.ended, state.passes, state.accepted)
        )
        verified = int(np.sum(passes - 1))
        later = int(np.sum(np.maximum(emitted - 1, 0)))
        tokens = self.token_ids
        wanted = bool(self._call.request.logprobs)
        return Generation(
            texts=[self._text(row, new) for row, new in enumerate(tokens)],
            token_ids=tokens,
            finish_reasons=[
                "stop" if row in self._cuts else "eos" if end else "length"
                for row, end in enumerate(ended)
            ],
            stats=Stats(
                tree=self._call.shape.tree,
                target_passes=passes.tolist(),
                tokens_per_pass=float(emitted.sum() / passes.sum()),
                accepted_by_depth=(accepted.sum(axis=0)[1:] / max(verified, 1)).tolist(),
                prefill_seconds=self._prefill_seconds,
                decode_seconds=self._decode_seconds,
                tokens_per_second=later / self._decode_seconds if self._decode_seconds else 0.0,
            ),
            logprobs=self._new(np.asarray(state.logprobs)) if wanted else None,
        )

    def _text(self, row: int, tokens: list[int]) -> str:
        """All of a finished row's text."""
        return self._cuts[row].text if row in self._cuts else decoded(self._model, tokens)

    def _new(self, written: np.ndarray) -> list[list[Any]]:
        """What [B, S] holds of the new tokens."""
        emitted = np.asarray(self._state.emitted)
        return [
            row[start : start + count].tolist()
            for row, start, count in zip(written, self._starts, emitted, strict=True)
        ]

    def _cut(self, before: np.ndarray) -> None:
        """Ends the rows in which a stop string was completed; `before` [B]: tokens seen earlier."""
        emitted, ended, accepted = (
            np.array(x) for x in (self._state.emitted, self._state.ended, self._state.accepted)
        )
        found = False
        for row, (tokens, stops) in enumerate(zip(self.token_ids, self._call.stops, strict=True)):
            cut = find_stop(self._model, tokens, int(before[row]), stops)
            if cut is None:
                continue
            kept, made = cut.tokens - before[row], emitted[row] - before[row]
            if before[row]:  # the last pass then kept fewer tokens than it had accepted
                accepted[row, kept:made] -= 1
            self._cuts[row], emitted[row], ended[row], found = cut, cut.tokens, True, True
        if found:
            self._state = dataclasses.replace(
                self._state,
                emitted=jnp.asarray(emitted),
                ended=jnp.asarray(ended),
                accepted=jnp.asarray(accepted),
            )
