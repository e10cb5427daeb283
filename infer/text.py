"""From tokens to text: what later tokens cannot change, and where a stop string ends it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from infer.load import Model

_BYTE_TOKEN = re.compile("<0x[0-9A-F]{2}>")
_MARGIN = 8  # tokens decoded before a possible stop string: the first may lose its space


class Cut(NamedTuple):
    """Where a stop string ends a text.

    Attributes:
      tokens: how many are kept; the last of them completed the stop string.
      text: what comes before it.
    """

    tokens: int
    text: str


def decoded(model: Model, tokens: Sequence[int]) -> str:
    """The text of tokens without special ones; empty for a model without a tokenizer."""
    if model.tokenizer is None:
        return ""
    return str(
        model.tokenizer.decode(
            list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    )


def settled(model: Model, tokens: list[int], stops: Sequence[str] = ()) -> str:
    """The part of the text that no later token changes, and that is not the beginning of a stop.

    A character may end in a later token: until then it decodes to U+FFFD. And a run of byte tokens
    (Llama 2, Vicuna) decodes as a whole: an invalid byte turns all of it into U+FFFD.
    """
    if model.tokenizer is None:
        return ""
    names = model.tokenizer.convert_ids_to_tokens(tokens)
    skipped = set(model.tokenizer.all_special_ids)
    end = len(tokens)
    while end and (tokens[end - 1] in skipped or _BYTE_TOKEN.fullmatch(names[end - 1] or "")):
        end -= 1
    text = decoded(model, tokens[:end]).rstrip("\N{REPLACEMENT CHARACTER}")
    return text[: len(text) - max((_begun(text, stop) for stop in stops), default=0)]


def find_stop(model: Model, tokens: list[int], known: int, stops: Sequence[str]) -> Cut | None:
    """The first token after which the text contains a stop string.

    Args:
      known: so many tokens are known not to complete one.
    """
    if not stops:
        return None
    longest = max(map(len, stops))
    for count in range(known + 1, len(tokens) + 1):
        back = longest + _MARGIN
        tail = decoded(model, tokens[max(count - back, 0) : count])
        while len(tail) < longest + _MARGIN and back < count:  # special tokens have no text
            back *= 2
            tail = decoded(model, tokens[max(count - back, 0) : count])
        if any(stop in tail for stop in stops):
            text = decoded(model, tokens[:count])
            starts = [at for stop in stops if (at := text.find(stop)) >= 0]
            if starts:
                return Cut(count, text[: min(starts)])
    return None


def _begun(text: str, stop: str) -> int:
    """The length of the longest end of `text` that begins `stop`."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
