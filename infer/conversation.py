"""A chat of several turns on the terminal or from a pipe: a line is a message."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from clover_jax.chat import Message, encode_prompt
from infer.load import Model
from infer.stream import Stream


def converse(
    model: Model, answer: Callable[[list[Message]], Stream], max_new_tokens: int
) -> Iterator[Stream]:
    """Reads messages from standard input and prints the answers as they come, until the input ends.

    What no longer fits the context with its answer is left out, the oldest turns first, and said on
    standard error.

    Yields:
      Each answer's stream, after its last piece.
    """
    messages: list[Message] = []
    while (line := _line()) is not None:
        if not line.strip():
            continue
        messages = _fitting(model, [*messages, {"role": "user", "content": line}], max_new_tokens)
        if not messages:
            continue
        stream, text = answer(messages), ""
        for piece in stream:
            print(piece.text, end="", flush=True)
            text += piece.text
        print(flush=True)
        messages.append({"role": "assistant", "content": text})
        yield stream


def _line() -> str | None:
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    line = sys.stdin.readline()
    return line.rstrip("\n") if line else None


def _fitting(model: Model, messages: list[Message], max_new_tokens: int) -> list[Message]:
    """The messages from the earliest turn on that fits; [] if the last alone does not."""
    context = model.config.max_position_embeddings
    for first in range(0, len(messages), 2):
        size = len(encode_prompt(model.tokenizer, messages[first:])) + max_new_tokens
        if size <= context:
            if first:
                print(f"[the first {first} messages no longer fit the context]", file=sys.stderr)
            return messages[first:]
    print(
        f"[this message and {max_new_tokens} new tokens need {size} of a context of {context}]",
        file=sys.stderr,
    )
    return []
