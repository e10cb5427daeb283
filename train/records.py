"""Conversations in JSON and JSONL files, as records of messages.

Nothing is dropped in silence: what cannot be used comes out as a `Skip` with its line and reason.
"""

from __future__ import annotations

import glob
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clover_jax.chat import ChatError, Message, check_messages

# Why a record is left out: the keys of `Report.skipped`.
NOT_JSON = "not valid JSON"
NOT_A_CONVERSATION = "not a conversation record"
EMPTY = "empty conversation"
UNKNOWN_ROLE = "unknown role"
BAD_MESSAGE = "bad message"
ROLE_ORDER = "roles out of order"
NO_ASSISTANT = "no assistant turn"
TEMPLATE = "refused by the chat template"
TOO_SHORT = "too few supervised tokens"

_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
_OPENAI_ROLES = ("system", "user", "assistant")
_JSON_SPACE = re.compile(r"[ \t\r\n]*")


class DataError(ValueError):
    """Training data, or a request about it, that cannot be used; the message says which and why."""


@dataclass(frozen=True)
class Record:
    """A conversation and where it stands, `file:line`."""

    where: str
    messages: list[Message]


@dataclass(frozen=True)
class Skip:
    """A record that cannot be used: where it stands, one of the reasons above, and the detail."""

    where: str
    reason: str
    detail: str

    def __str__(self) -> str:
        return f"{self.where}: {self.reason}: {self.detail}"


def read_conversations(paths: str | Path | Sequence[str | Path]) -> Iterator[Record | Skip]:
    """The records of one or several files, in the order of the files and of the lines in them.

    A file holds one JSON record per line (JSONL), a JSON array of records, or a single record. A
    record is `{"conversations": [{"from", "value"}, ...]}` (ShareGPT) or `{"messages": [{"role",
    "content"}, ...]}` (OpenAI). From ShareGPT records an assistant turn before the first user turn
    is dropped, since its prompt is unknown, and two turns of one role in a row are refused.

    Args:
        paths: a path, a glob pattern (`**` included), or several of either. A file is read once.

    Raises:
        DataError: a path that names no file, or a JSON array that is broken somewhere.
    """
    for path in _files(paths):
        for where, value in _values(path):
            if isinstance(value, Skip):
                yield value
                continue
            try:
                yield Record(where, _messages(value))
            except _BadRecordError as bad:
                yield Skip(where, bad.reason, bad.detail)


class _BadRecordError(Exception):
    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def _files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    files: dict[Path, None] = {}  # as an ordered set
    for path in [paths] if isinstance(paths, str | Path) else paths:
        if Path(path).is_file():
            found = [Path(path)]
        elif Path(path).is_dir():
            raise DataError(f"{path} is a folder: name its files, for instance {path}/*.jsonl")
        else:
            matches = glob.glob(str(path), recursive=True)
            found = sorted(match for match in map(Path, matches) if match.is_file())
        if not found:
            raise DataError(f"no training data at {path}: no such file, and no file matches it")
        files.update(dict.fromkeys(found))
    if not files:
        raise DataError("no training data: the list of paths is empty")
    return list(files)


def _values(path: Path) -> Iterator[tuple[str, Any]]:
    """(file:line, JSON value, or a Skip for what cannot be decoded) for each record of a file."""
    if path.suffix != ".jsonl":
        try:
            text = path.read_text("utf-8-sig")
        except UnicodeDecodeError:
            text = ""  # by line, so that only the lines that are not UTF-8 are lost
        start = _skip_space(text, 0)
        if text.startswith("[", start):
            yield from _array_values(path, text, start)
            return
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            pass  # more than one record
        else:
            yield f"{path}:{text.count(chr(10), 0, start) + 1}", value
            return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            where = f"{path}:{number}"
            if not line.strip():
                continue
            try:
                yield where, json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            except (ValueError, RecursionError) as error:
                yield where, Skip(where, NOT_JSON, _one_line(error))


def _array_values(path: Path, text: str, start: int) -> Iterator[tuple[str, Any]]:
    """The elements of the JSON array at `start`, decoded one by one to know the line of each."""
    decoder = json.JSONDecoder()
    position, counted, line = start + 1, 0, 1
    expected = "a record or ]"
    try:
        while True:
            position = _skip_space(text, position)
            line, counted = line + text.count("\n", counted, position), position
            if expected != "a record" and text.startswith("]", position):
                break
            if expected == ", or ]":
                if not text.startswith(",", position):
                    raise ValueError(f"expected {expected}")
                position, expected = position + 1, "a record"
                continue
            value, position = decoder.raw_decode(text, position)
            yield f"{path}:{line}", value
            expected = ", or ]"
        if _skip_space(text, position + 1) != len(text):
            raise ValueError("there is text after the array")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path}:{line}: the JSON array cannot be read from here on: {_one_line(error)}"
        ) from error


def _messages(value: Any) -> list[Message]:
    """The messages of a ShareGPT or OpenAI record. Raises _BadRecordError."""
    if not isinstance(value, dict):
        raise _BadRecordError(NOT_A_CONVERSATION, f"a {type(value).__name__}, not an object")
    sharegpt = "conversations" in value
    if not sharegpt and "messages" not in value:
        keys = ", ".join(map(repr, list(value)[:5])) or "none"
        raise _BadRecordError(
            NOT_A_CONVERSATION, f"neither 'conversations' nor 'messages' among its keys ({keys})"
        )
    turns = value["conversations" if sharegpt else "messages"]
    if not isinstance(turns, list):
        raise _BadRecordError(BAD_MESSAGE, f"the turns are a {type(turns).__name__}, not a list")
    if not turns:
        raise _BadRecordError(EMPTY, "no turns")
    messages = [_message(turn, i, sharegpt) for i, turn in enumerate(turns)]
    if sharegpt:
        for i, (one, other) in enumerate(itertools.pairwise(messages), start=1):
            if one["role"] == other["role"]:
                raise _BadRecordError(ROLE_ORDER, f"turns {i - 1} and {i} are both {one['role']}")
        opening = int(messages[0]["role"] == "system")
        if messages[opening : opening + 1] and messages[opening]["role"] == "assistant":
            del messages[opening]
    if not any(message["role"] == "assistant" for message in messages):
        raise _BadRecordError(NO_ASSISTANT, f"{len(turns)} turns")
    try:
        return check_messages(messages)
    except ChatError as error:
        raise _BadRecordError(BAD_MESSAGE, str(error)) from error


def _message(turn: Any, i: int, sharegpt: bool) -> dict[str, Any]:
    role_key, text_key = ("from", "value") if sharegpt else ("role", "content")
    if not isinstance(turn, dict):
        raise _BadRecordError(BAD_MESSAGE, f"turn {i} is a {type(turn).__name__}, not an object")
    name = turn.get(role_key)
    roles = _SHAREGPT_ROLES if sharegpt else dict.fromkeys(_OPENAI_ROLES)
    if not isinstance(name, str) or name not in roles:
        raise _BadRecordError(UNKNOWN_ROLE, f"{name!r} in turn {i}, known: {', '.join(roles)}")
    return {"role": roles[name] or name, "content": turn.get(text_key)}


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    return match.end() if match else position


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
