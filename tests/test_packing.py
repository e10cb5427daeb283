"""Samples in rows, and the order of the batches."""

import numpy as np
import pytest

from train import packing
from train.data import Corpus
from train.packing import Batch, Batches, Rows, batches_in_order, pack
from train.records import DataError


def corpus_of(lengths) -> Corpus:
    """Random tokens, half of them supervised; no two samples are alike."""
    rng = np.random.default_rng(0)
    return Corpus.from_samples(
        [(rng.integers(1, 10**6, n).astype(np.int32), rng.random(n) < 0.5) for n in lengths]
    )


def random_lengths(seed: int, count: int, low: int, high: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(low, high, count, endpoint=True)


def numbered(size: int) -> Rows:
    """Row i holds the token i in one sample of 4 tokens, and two tokens of padding."""
    real = np.broadcast_to(np.arange(6) < 4, (size, 6))
    tokens = np.where(real, np.arange(size)[:, None], 0).astype(np.int32)
    return Rows(tokens, real & (np.arange(6) > 0), real.astype(np.int32))


def stream(batches: Batches, steps) -> list[int]:
    return [int(i) for step in steps for i in batches.batch_at(step).row_ids]


# --- packing

LENGTHS = {
    "one short": [5],
    "one that fills a row": [64],
    "one a token too long for 64": [65],
    "equal": [30] * 7,
    "short": random_lengths(1, 50, 2, 40),
    "long": random_lengths(2, 40, 100, 700),
    "a long one among short": [300, *random_lengths(3, 60, 5, 30)],
}
each_lengths = pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS.keys())


@each_lengths
def test_every_sample_lies_whole_in_one_row(lengths):
    corpus = corpus_of(lengths)
    rows = pack(corpus)
    assert rows.tokens.shape == rows.mask.shape == rows.segments.shape == (len(rows), rows.length)
    assert (rows.tokens.dtype, rows.mask.dtype, rows.segments.dtype) == (np.int32, bool, np.int32)
    found = []
    for tokens, mask, segments in zip(rows.tokens, rows.mask, rows.segments, strict=True):
        # Samples are numbered from 1 and stand one behind the other, the padding behind them.
        samples, real = int(segments.max()), np.count_nonzero(segments)
        assert np.diff(segments[:real], prepend=0).tolist().count(1) == samples > 0
        assert set(np.diff(segments[:real], prepend=0)) <= {0, 1}
        assert not tokens[real:].any()
        assert not mask[real:].any()
        assert not segments[real:].any()
        found += [
            (tokens[segments == n].tolist(), mask[segments == n].tolist())
            for n in range(1, samples + 1)
        ]
    wanted = [[x.tolist() for x in corpus.sample(i)] for i in range(len(corpus))]
    assert sorted(map(list, found)) == sorted(wanted)


@each_lengths
def test_the_rows_have_the_length_that_leaves_the_least_padding(lengths):
    rows, total, longest = pack(corpus_of(lengths)), sum(lengths), max(lengths)
    choices = [t for t in range(64, 2048, 64) if longest <= t <= max(2 * longest, longest + 63)]
    padding = {t: len(packing._best_fit(np.array(lengths), t)) * t - total for t in choices}
    assert rows.length in choices
    assert padding[rows.length] == min(padding.values())
    assert np.count_nonzero(rows.segments == 0) == padding[rows.length]
    assert rows.padding() == pytest.approx(1 - total / (len(rows) * rows.length))


def test_little_padding_on_a_usual_spread_of_lengths():
    assert pack(corpus_of(random_lengths(0, 1000, 60, 245))).padding() < 0.05


def naive_best_fit(lengths, row_length: int) -> list[int]:
    """How full each row gets when the longest is placed first, each where it fits best."""
    full: list[int] = []
    for size in sorted(lengths, reverse=True):
        fitting = [row for row, used in enumerate(full) if used + size <= row_length]
        if fitting:
            full[max(fitting, key=full.__getitem__)] += size
        else:
            full.append(size)
    return full


@pytest.mark.parametrize("row_length", [40, 64, 100])
def test_each_sample_goes_where_the_least_room_is_left(row_length):
    lengths = random_lengths(4, 200, 1, 40)
    rows = packing._best_fit(lengths, row_length)
    assert sorted(i for row in rows for i in row) == list(range(200))
    used = [int(lengths[row].sum()) for row in rows]
    assert max(used) <= row_length
    assert sorted(used) == sorted(naive_best_fit(lengths, row_length))
    # No two rows would have fitted into one.
    assert sum(sorted(used)[:2]) > row_length


def test_packing_is_the_same_every_time():
    lengths = random_lengths(5, 100, 5, 60)
    one, other = pack(corpus_of(lengths)), pack(corpus_of(lengths))
    np.testing.assert_array_equal(one.tokens, other.tokens)
    np.testing.assert_array_equal(one.mask, other.mask)
    np.testing.assert_array_equal(one.segments, other.segments)


def test_packing_stays_what_it_was():
    """Runs begun with an earlier version, or on another machine, must find the same rows."""
    assert packing._best_fit(np.array([3, 9, 4, 7, 5, 6, 4, 8, 3, 7]), 16) == [
        [1, 3],
        [7, 9],
        [5, 4, 2],
        [6, 0, 8],
    ]


def test_nothing_to_pack():
    rows = pack(Corpus.from_samples([]))
    assert (len(rows), rows.length, rows.padding()) == (0, 64, 0.0)


# --- batches


def test_resume_gives_the_same_batches():
    straight = [Batches(numbered(64), 6, 3).batch_at(step) for step in range(20)]
    first = stream(Batches(numbered(64), 6, 3), range(10))
    packing._epoch_order.cache_clear()  # as in a new process
    resumed = Batches(numbered(64), 6, 3)
    second = stream(resumed, range(10, 20))
    assert [int(i) for batch in straight for i in batch.row_ids] == first + second
    for one, other in zip(straight[13].samples, resumed.batch_at(13).samples, strict=True):
        np.testing.assert_array_equal(one, other)


def test_order_stays_what_it_was():
    """Runs begun with an earlier version, or on another machine, must resume in the same order."""
    assert stream(Batches(numbered(64), 4, 3), [0, 16]) == [21, 58, 38, 0, 16, 49, 25, 10]


@pytest.mark.parametrize("batch_size", [1, 6, 16, 64])
def test_each_row_once_per_epoch_in_another_order(batch_size):
    batches = Batches(numbered(64), batch_size, 0)
    epochs = np.array(stream(batches, range(64 * 3))[: 64 * 3]).reshape(3, 64)
    for epoch in epochs:
        assert sorted(epoch) == list(range(64))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(epochs[0]) != tuple(range(64))


def test_seeds_give_different_orders():
    orders = {tuple(stream(Batches(numbered(64), 64, seed), [0])) for seed in range(5)}
    assert len(orders) == 5


def test_batch_straddles_epochs():
    batches = Batches(numbered(10), 4, 0)
    ids = stream(batches, range(5))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))


def check_batch(batch: Batch, rows: Rows, size: int) -> None:
    """`size` rows as they are packed; those with id -1 are all padding."""
    assert batch.row_ids.dtype == np.int32
    assert batch.row_ids.shape == (size,)
    for name in ("tokens", "mask", "segments"):
        ours, theirs = getattr(batch.samples, name), getattr(rows, name)
        assert ours.dtype == theirs.dtype
        assert ours.shape == (size, rows.length)
        for row, i in zip(ours, batch.row_ids, strict=True):
            np.testing.assert_array_equal(row, theirs[i] if i >= 0 else np.zeros_like(row))
    assert batch.real_tokens() == np.count_nonzero(batch.samples.segments)


def test_batches_hold_the_rows():
    rows = pack(corpus_of(random_lengths(6, 40, 20, 60)))
    for step in range(5):
        check_batch(Batches(rows, 4, 0).batch_at(step), rows, 4)
    assert Batches(numbered(10), 3, 0).batch_at(0).real_tokens() == 3 * 4


def test_in_order_covers_all_once():
    rows = numbered(10)
    batches = list(batches_in_order(rows, 4))
    assert [batch.row_ids.tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, -1, -1],
    ]
    for batch in batches:
        check_batch(batch, rows, 4)
    assert [batch.real_tokens() for batch in batches] == [16, 16, 8]
    counts = [len(list(batches_in_order(rows, size))) for size in (1, 5, 10, 16)]
    assert counts == [10, 2, 1, 1]


def test_too_few_rows_for_a_batch():
    message = "^the training samples fill 3 rows of 6 tokens, fewer than one batch of 4$"
    with pytest.raises(DataError, match=message):
        Batches(numbered(3), 4, 0)
    (batch,) = batches_in_order(numbered(3), 4)
    assert batch.row_ids.tolist() == [0, 1, 2, -1]
    with pytest.raises(DataError, match="there are 0 samples to read"):
        batches_in_order(numbered(0), 4)


def test_numbers_that_cannot_be_are_errors():
    for make in (
        lambda size: Batches(numbered(9), size, 0),
        lambda size: batches_in_order(numbered(9), size),
    ):
        with pytest.raises(DataError, match="batch size must be at least 1, got 0"):
            make(0)
    with pytest.raises(DataError, match="must not be negative, got -1"):
        Batches(numbered(9), 4, -1)
    with pytest.raises(DataError, match="count from 0, got -1"):
        Batches(numbered(9), 4, 0).batch_at(-1)


def test_joined_rows_are_one_sample_each() -> None:
    corpus = Corpus.from_samples(
        [(np.full(n, n, np.int32), np.arange(n) > 0) for n in (5, 3, 9, 2, 7, 4)]
    )
    rows = pack(corpus, 12)
    joined = rows.joined()
    assert rows.length == 12
    assert rows.segments.max() > 1
    np.testing.assert_array_equal(joined.segments, rows.tokens > 0)
    np.testing.assert_array_equal(joined.tokens, rows.tokens)
    np.testing.assert_array_equal(joined.mask, rows.mask)
