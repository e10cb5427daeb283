"""Conversations on disk to samples of token ids, the same at every run.

    files -> records -> rendered chats -> Corpus (ids, mask) -> split

Nothing is dropped in silence: each record that cannot be used is counted under a reason in the
`Report`, with the first lines of each reason.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from clover_jax.chat import (
    ChatError,
    RenderedChat,
    render_conversation,
    tokenize_conversations,
)
from train.records import TEMPLATE, TOO_SHORT, DataError, Skip, read_conversations

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

MIN_SUPERVISED = 2  # a sample with fewer supervised tokens teaches the later draft steps nothing
_LINES_PER_REASON = 5
_TOKENIZED_AT_ONCE = 256


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


def _hash64(ids: np.ndarray) -> int:
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
