"""Samples packed into rows of one length, and the batches of a run.

    Corpus -> pack -> Rows -> Batches.batch_at(step)

The batch of a step depends on the rows, the seed and the step number alone: a run that resumes at
step n sees what an uninterrupted one would see.

Axes: N rows, B rows of a batch, T tokens.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from train.data import Corpus
from train.records import DataError
from train.segments import Samples

_MULTIPLE = 64  # of tokens in a row


@dataclass(frozen=True, eq=False)
class Rows:
    """Whole samples side by side, each in one row.

    Attributes:
        tokens: int32 [N, T], 0 in the padding at the end.
        mask: bool [N, T], True where the token is supervised.
        segments: int32 [N, T], which sample of its row a token belongs to, 1, 2, ..; 0 is padding.
    """

    tokens: np.ndarray
    mask: np.ndarray
    segments: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def length(self) -> int:
        """T."""
        return int(self.tokens.shape[1])

    def joined(self) -> Rows:
        """The same rows, each a single sample: what stands later reads all that stands before."""
        return dataclasses.replace(self, segments=(self.segments > 0).astype(np.int32))

    def padding(self) -> float:
        """Share of the tokens that are padding."""
        return float(np.mean(self.segments == 0)) if self.segments.size else 0.0


class Batch(NamedTuple):
    """Rows of one step; rows that only fill the batch are all padding, with id -1.

    Attributes:
        samples: the tokens, numpy arrays [B, T].
        row_ids: int32 [B], index among the rows.
    """

    samples: Samples
    row_ids: np.ndarray

    def real_tokens(self) -> int:
        """Tokens that are not padding."""
        return int(np.count_nonzero(self.samples.segments))


def pack(corpus: Corpus, length: int | None = None) -> Rows:
    """Packs whole samples into rows.

    Args:
        length: T, at least the longest sample; by default, of the multiples of 64 from the longest
            sample to twice that, the one that leaves the least padding.
    """
    lengths = np.diff(corpus.offsets)
    if length is None:
        shortest = -(-max(corpus.longest(), 1) // _MULTIPLE) * _MULTIPLE
        choices = range(shortest, max(2 * corpus.longest(), shortest) + 1, _MULTIPLE)
        length = min(choices, key=lambda length: length * len(_best_fit(lengths, length)))
    rows = _best_fit(lengths, length)

    shape = (len(rows), length)
    packed = Rows(np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32))
    for row, members in enumerate(rows):
        start = 0
        for segment, sample in enumerate(members, start=1):
            ids, supervised = corpus.sample(sample)
            part = slice(start, start := start + len(ids))
            packed.tokens[row, part] = ids
            packed.mask[row, part] = supervised
            packed.segments[row, part] = segment
    return packed


def _best_fit(lengths: np.ndarray, row_length: int) -> list[list[int]]:
    """The samples of each row: the longest first, each where the least room is left over."""
    rows: list[list[int]] = []
    with_room: defaultdict[int, list[int]] = defaultdict(list)  # tokens left -> rows
    rooms: list[int] = []  # the keys of with_room, in order
    for sample in np.argsort(-lengths, kind="stable"):
        size = int(lengths[sample])
        place = bisect.bisect_left(rooms, size)
        if place == len(rooms):
            row, room = len(rows), row_length
            rows.append([])
        else:
            room = rooms[place]
            row = with_room[room].pop()
            if not with_room[room]:
                del with_room[room], rooms[place]
        rows[row].append(int(sample))
        left = room - size
        if left not in with_room:
            bisect.insort(rooms, left)
        with_room[left].append(row)
    return rows


@dataclass(frozen=True)
class Batches:
    """The endless stream of training batches: a pure function of (rows, seed, step).

    The rows come in one order per epoch, drawn from (seed, epoch), each row once. The epochs'
    orders stand one after the other and batches are cut from the result, so a batch may hold the
    end of one epoch and the start of the next.

    Attributes:
        rows: the packed samples.
        batch_size: B.
        seed: any non-negative integer.

    Raises:
        DataError: fewer rows than B, B < 1, or a negative seed.
    """

    rows: Rows
    batch_size: int
    seed: int

    def __post_init__(self) -> None:
        _check_batch_size(self.batch_size)
        if self.seed < 0:
            raise DataError(f"the seed of the data order must not be negative, got {self.seed}")
        if len(self.rows) < self.batch_size:
            raise DataError(
                f"the training samples fill {len(self.rows)} rows of {self.rows.length} tokens, "
                f"fewer than one batch of {self.batch_size}"
            )

    def batch_at(self, step: int) -> Batch:
        """The batch of step 0, 1, 2, ..."""
        if step < 0:
            raise DataError(f"steps count from 0, got {step}")
        size = len(self.rows)
        first = step * self.batch_size
        chosen = [
            _epoch_order(self.seed, position // size, size)[position % size]
            for position in range(first, first + self.batch_size)
        ]
        return _gather(self.rows, np.array(chosen), self.batch_size)


def batches_in_order(rows: Rows, batch_size: int) -> Iterator[Batch]:
    """Each row once, in order; the last batch is filled up with padding.

    Raises:
        DataError: no rows, or batch_size (B) < 1.
    """
    _check_batch_size(batch_size)
    if not len(rows):
        raise DataError("there are 0 samples to read")
    return (
        _gather(rows, np.arange(first, min(first + batch_size, len(rows))), batch_size)
        for first in range(0, len(rows), batch_size)
    )


def _check_batch_size(batch_size: int) -> None:
    if batch_size < 1:
        raise DataError(f"the batch size must be at least 1, got {batch_size}")


@functools.lru_cache(maxsize=4)
def _epoch_order(seed: int, epoch: int, size: int) -> np.ndarray:
    """int64 [size]: the order of the rows in an epoch.

    Sorted by raw Philox output, which numpy keeps stable between versions; its permutations it does
    not, and a run must be resumable after an update.
    """
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(size)
    order = np.argsort(raw, kind="stable")
    order.flags.writeable = False  # shared by all callers
    return order


def _gather(rows: Rows, chosen: np.ndarray, batch_size: int) -> Batch:
    filling = batch_size - len(chosen)

    def take(x: np.ndarray) -> np.ndarray:
        return np.pad(x[chosen], ((0, filling), (0, 0)))

    row_ids = np.pad(chosen, (0, filling), constant_values=-1).astype(np.int32)
    return Batch(Samples(take(rows.tokens), take(rows.mask), take(rows.segments)), row_ids)
