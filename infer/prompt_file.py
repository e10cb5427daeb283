"""Prompts from a file, and results into one.

A text file holds one prompt per line. JSON lines hold {"prompt": text} or {"messages": [{"role",
"content"}]}, and what else they hold is handed on to the results.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from clover_jax.chat import check_messages
from infer import cli
from infer.call import Prompt
from infer.session import Generation


class Entry(NamedTuple):
    """One prompt.

    Attributes:
      prompt: for `generate`.
      shown: in one line, for people.
      fields: what goes into its results.
    """

    prompt: Prompt
    shown: str
    fields: dict[str, Any]


def of_text(text: str, chat: bool) -> Entry:
    """A text, as a user's message or to be continued."""
    prompt: Prompt = [{"role": "user", "content": text}] if chat else text
    return Entry(prompt, text, {"prompt": text})


def read_prompts(path: Path, chat: bool) -> list[Entry]:
    """The prompts of a file; of JSON lines if its name ends in .jsonl. Blank lines are skipped.

    Raises:
      ValueError: a line that is something else, by its number; no prompt at all.
    """
    lines = enumerate(cli.read_text(path).splitlines(), start=1)
    filled = [(number, line) for number, line in lines if line.strip()]
    if not filled:
        raise ValueError(f"{path} holds no prompt")
    if path.suffix != ".jsonl":
        return [of_text(line, chat) for _, line in filled]
    return [_entry(line, chat, f"{path}:{number}") for number, line in filled]


def results(entry: Entry, index: int, generation: Generation, rows: range) -> Iterator[str]:
    """JSON lines of a prompt's rows."""
    for sample, row in enumerate(rows):
        fields = entry.fields | {
            "index": index,
            "sample": sample,
            "text": generation.texts[row],
            "token_ids": generation.token_ids[row],
            "finish_reason": generation.finish_reasons[row],
        }
        if generation.logprobs is not None:
            fields["logprobs"] = generation.logprobs[row]
        yield json.dumps(fields, ensure_ascii=False)


def _entry(line: str, chat: bool, place: str) -> Entry:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict) or ("prompt" in fields) == ("messages" in fields):
        raise ValueError(f'{place} is no object with either "prompt" or "messages"')
    if "prompt" in fields:
        text = fields["prompt"]
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{place}: the prompt is no text, or it is empty")
        return of_text(text, chat)._replace(fields=fields)
    try:
        messages = check_messages(fields["messages"])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from None
    return Entry(messages, messages[-1]["content"], fields)
