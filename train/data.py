"""Conversations on disk to training batches, the same at every run.

    files -> records -> rendered chats -> Corpus (ids, mask) -> split -> Batches.batch_at(step)

Nothing is dropped in silence: each record that cannot be used is counted under a reason in the
`Report`, with the first lines of each reason. The batch of a step depends on the corpus, the seed
and the step number alone: a run that resumes at step n sees what an uninterrupted one would see.

Legend: B batch rows, T tokens of a padded row, V vocabulary.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from clover_jax.chat import (
    ChatError,
    Message,
    RenderedChat,
    check_messages,
    render_conversation,
    tokenize_conversations,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

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

MIN_SUPERVISED = 2  # a sample with fewer supervised tokens teaches the later draft steps nothing
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
}
_OPENAI_ROLES = ("system", "user", "assistant")
_LINES_PER_REASON = 5
_TOKENIZED_AT_ONCE = 256
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


@dataclass(frozen=True)
class Report:
    """What became of the records that were read.

    Attributes:
        read: records found, usable or not.
        kept: samples in the corpus.
        truncated: samples among them that were cut to the maximum length.
        skipped: reason -> number of records left out for it.
        first: reason -> the first few of these records.
    """

    read: int
    kept: int
    truncated: int
    skipped: Mapping[str, int]
    first: Mapping[str, tuple[Skip, ...]]

    def __str__(self) -> str:
        lines = [f"{self.read} records read, {self.kept} kept ({self.truncated} of them truncated)"]
        for reason, count in self.skipped.items():
            lines.append(f"  {count} skipped: {reason}")
            lines += [f"    {skip}" for skip in self.first[reason]]
            if count > len(self.first[reason]):
                lines.append(f"    and {count - len(self.first[reason])} more")
        return "\n".join(lines)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Samples of unequal length in flat arrays.

    Attributes:
        ids: int32 [total tokens].
        mask: bool [total tokens], True where the token is supervised.
        offsets: int64 [samples + 1]; sample i is `ids[offsets[i] : offsets[i + 1]]`.
    """

    ids: np.ndarray
    mask: np.ndarray
    offsets: np.ndarray

    @staticmethod
    def from_samples(samples: Sequence[tuple[np.ndarray, np.ndarray]]) -> Corpus:
        """From (ids, mask) pairs of equal length each."""
        lengths = [len(ids) for ids, _ in samples]
        return Corpus(
            ids=np.concatenate(
                [np.empty(0, np.int32), *(ids for ids, _ in samples)], dtype=np.int32
            ),
            mask=np.concatenate([np.empty(0, bool), *(mask for _, mask in samples)], dtype=bool),
            offsets=np.cumsum([0, *lengths], dtype=np.int64),
        )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def sample(self, i: int) -> tuple[np.ndarray, np.ndarray]:
        """ids, int32 [t], and mask, bool [t], of sample i."""
        part = slice(self.offsets[i], self.offsets[i + 1])
        return self.ids[part], self.mask[part]

    def longest(self) -> int:
        """Tokens of the longest sample, 0 if there is none."""
        return int(np.diff(self.offsets).max(initial=0))

    def digest(self) -> str:
        """16 hexadecimal digits that tell these samples, in this order, from others."""
        digest = hashlib.blake2b(digest_size=8)
        for array, kind in ((self.ids, "<i4"), (self.mask, "?"), (self.offsets, "<i8")):
            digest.update(array.astype(kind).tobytes())
        return digest.hexdigest()


class Batch(NamedTuple):
    """Rows of one step, padded at the end. Rows that only fill the batch have length 0 and id -1.

    Attributes:
        tokens: int32 [B, T], 0 beyond `lengths`.
        mask: bool [B, T], True where the token is supervised; False beyond `lengths`.
        lengths: int32 [B].
        sample_ids: int32 [B], index in the corpus.
    """

    tokens: np.ndarray
    mask: np.ndarray
    lengths: np.ndarray
    sample_ids: np.ndarray


@dataclass(frozen=True)
class Batches:
    """The endless stream of training batches: a pure function of (corpus, seed, step).

    The samples come in one order per epoch, drawn from (seed, epoch), each sample once. The epochs'
    orders stand one after the other and batches are cut from the result, so a batch may hold the
    end of one epoch and the start of the next.

    Attributes:
        corpus: the samples.
        batch_size: B.
        seed: any non-negative integer.
        length: T; no sample may be longer.

    Raises:
        DataError: fewer samples than B, a sample longer than T, B < 1, or a negative seed.
    """

    corpus: Corpus
    batch_size: int
    seed: int
    length: int

    def __post_init__(self) -> None:
        _check_batch_shape(self.corpus, self.batch_size, self.length)
        if self.seed < 0:
            raise DataError(f"the seed of the data order must not be negative, got {self.seed}")
        if len(self.corpus) < self.batch_size:
            raise DataError(
                f"{len(self.corpus)} training samples do not fill one batch of {self.batch_size}"
            )

    def batch_at(self, step: int) -> Batch:
        """The batch of step 0, 1, 2, ..."""
        if step < 0:
            raise DataError(f"steps count from 0, got {step}")
        size = len(self.corpus)
        first = step * self.batch_size
        sample_ids = [
            _epoch_order(self.seed, position // size, size)[position % size]
            for position in range(first, first + self.batch_size)
        ]
        return _gather(self.corpus, np.array(sample_ids), self.batch_size, self.length)


def evaluation_batches(corpus: Corpus, batch_size: int, length: int) -> Iterator[Batch]:
    """Each sample once, in the corpus' order; the last batch is filled up with rows of mask False.

    Raises:
        DataError: no samples, a sample longer than `length` (T), or batch_size (B) < 1.
    """
    _check_batch_shape(corpus, batch_size, length)
    if not len(corpus):
        raise DataError("there are 0 samples to evaluate on")
    return (
        _gather(corpus, np.arange(first, min(first + batch_size, len(corpus))), batch_size, length)
        for first in range(0, len(corpus), batch_size)
    )


def load_corpus(
    paths: str | Path | Sequence[str | Path],
    tokenizer: PreTrainedTokenizerFast | None,
    max_length: int,
) -> tuple[Corpus, Report]:
    """Read, render and tokenise conversations; each sample is cut after `max_length` tokens.

    Args:
        paths: as `read_conversations`.
        tokenizer: a fast tokenizer.
        max_length: at least 1.

    Returns:
        The samples in the order of the files, and the report of what was left out and why.

    Raises:
        DataError: a path that names no file, a broken JSON array, or no usable record at all.
        ChatError: no tokenizer, or a slow one.
    """
    if tokenizer is None:
        raise ChatError(
            "conversations can only be tokenised with a tokenizer, and the model has none"
        )
    if max_length < 1:
        raise DataError(f"max_length must be at least 1, got {max_length}")
    samples: list[tuple[np.ndarray, np.ndarray]] = []
    counts: Counter[str] = Counter()
    first: dict[str, tuple[Skip, ...]] = {}
    waiting: list[tuple[str, RenderedChat]] = []
    read = truncated = 0

    def leave_out(skip: Skip) -> None:
        counts[skip.reason] += 1
        if counts[skip.reason] <= _LINES_PER_REASON:
            first[skip.reason] = (*first.get(skip.reason, ()), skip)

    def tokenize_waiting() -> None:
        nonlocal truncated
        encoded = tokenize_conversations(tokenizer, [chat for _, chat in waiting])
        for (where, _), (ids, mask) in zip(waiting, encoded, strict=True):
            supervised = int(mask[:max_length].sum())
            if supervised < MIN_SUPERVISED:
                detail = (
                    f"{supervised} in the first {min(len(ids), max_length)} of {len(ids)} tokens"
                )
                leave_out(Skip(where, TOO_SHORT, detail))
                continue
            truncated += len(ids) > max_length
            samples.append((ids[:max_length].copy(), mask[:max_length].copy()))
        waiting.clear()

    for item in read_conversations(paths):
        read += 1
        if isinstance(item, Skip):
            leave_out(item)
            continue
        try:
            waiting.append((item.where, render_conversation(tokenizer, item.messages)))
        except ChatError as error:
            leave_out(Skip(item.where, TEMPLATE, str(error)))
        if len(waiting) == _TOKENIZED_AT_ONCE:
            tokenize_waiting()
    tokenize_waiting()

    report = Report(read, len(samples), truncated, dict(counts), first)
    if not samples:
        raise DataError(f"no usable conversation in the training data: {report}")
    return Corpus.from_samples(samples), report


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


def split(corpus: Corpus, eval_fraction: float) -> tuple[Corpus, Corpus]:
    """(training samples, held-back samples), by a hash of each sample's ids.

    A sample's side depends on nothing else, neither on the order nor on the other samples, and
    copies of a sample are on one side. So the held-back part is only about `eval_fraction` of them.

    Raises:
        DataError: eval_fraction outside [0, 1).
    """
    if not 0 <= eval_fraction < 1:
        raise DataError(f"eval_fraction must be at least 0 and below 1, got {eval_fraction}")
    bound = int(eval_fraction * 2**64)
    samples = [corpus.sample(i) for i in range(len(corpus))]
    held = [_hash64(ids) < bound for ids, _ in samples]
    return (
        Corpus.from_samples([s for s, h in zip(samples, held, strict=True) if not h]),
        Corpus.from_samples([s for s, h in zip(samples, held, strict=True) if h]),
    )


def token_frequencies(corpus: Corpus, vocab_size: int) -> np.ndarray:
    """int64 [V]: how often each token id is supervised.

    Raises:
        DataError: a supervised id outside the vocabulary.
    """
    supervised = corpus.ids[corpus.mask]
    if supervised.size and not 0 <= supervised.min() <= supervised.max() < vocab_size:
        raise DataError(
            f"the data has token ids from {supervised.min()} to {supervised.max()}, "
            f"the vocabulary 0 to {vocab_size - 1}"
        )
    return np.bincount(supervised, minlength=vocab_size).astype(np.int64)


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


def _check_batch_shape(corpus: Corpus, batch_size: int, length: int) -> None:
    if batch_size < 1:
        raise DataError(f"the batch size must be at least 1, got {batch_size}")
    if corpus.longest() > length:
        raise DataError(
            f"the longest sample has {corpus.longest()} tokens, a batch row only {length}"
        )


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """int64 [size]: the order of the samples in an epoch.

    Sorted by raw Philox output, which numpy keeps stable between versions; its permutations it does
    not, and a run must be resumable after an update.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False  # shared by all callers
    return order


def _gather(corpus: Corpus, sample_ids: np.ndarray, batch_size: int, length: int) -> Batch:
    tokens = np.zeros((batch_size, length), np.int32)
    mask = np.zeros((batch_size, length), bool)
    lengths = np.zeros(batch_size, np.int32)
    for row, sample in enumerate(sample_ids):
        ids, supervised = corpus.sample(sample)
        tokens[row, : len(ids)] = ids
        mask[row, : len(ids)] = supervised
        lengths[row] = len(ids)
    padded_ids = np.full(batch_size, -1, np.int32)
    padded_ids[: len(sample_ids)] = sample_ids
    return Batch(tokens, mask, lengths, padded_ids)


def _hash64(ids: np.ndarray) -> int:
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _skip_space(text: str, position: int) -> int:
    match = _JSON_SPACE.match(text, position)
    return match.end() if match else position


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
