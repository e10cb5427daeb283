"""Hidden states on the disk: computed once, and never taken for what they are not."""

import json
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train import features
from train.features import cached_hidden
from train.packing import Batches, Rows
from train.records import DataError
from train.segments import Samples

N, T, D, B = 23, 4, 3, 2
IDENTITY = {"corpus": "c0ffee", "row_length": T}
ROWS = Rows(
    np.arange(N * T, dtype=np.int32).reshape(N, T),
    np.ones((N, T), bool),
    np.ones((N, T), np.int32),
)
# Token x has the states x/4, x/4 + 1, x/4 + 2: bf16 holds them all, and none is 0 but one.
STATES = ROWS.tokens[:, :, None] / 4 + np.arange(D)


class Target:
    """Gives the states of the tokens, and remembers which rows it was asked for."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.asked: list[list[int]] = []
        self._stop_after = stop_after

    def __call__(self, samples: Samples) -> jax.Array:
        if len(self.asked) == self._stop_after:
            raise KeyboardInterrupt
        self.asked.append((samples.tokens[:, 0] // T).tolist())
        return jnp.asarray(samples.tokens[:, :, None] / 4 + np.arange(D), jnp.float32)


@pytest.fixture(autouse=True)
def saved_every_third_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(features, "_SAVE_EVERY", 3)


def compute(folder: Path, target: Target, size: int = B, **identity: Any) -> np.ndarray:
    return cached_hidden(folder, IDENTITY | identity, ROWS, D, size, target)


def interrupt(folder: Path) -> None:
    """After seven batches, six of which are saved."""
    with pytest.raises(KeyboardInterrupt):
        compute(folder, Target(stop_after=7))


def test_all_states_in_order(tmp_path: Path) -> None:
    """The last batch is filled up with a row that is not kept."""
    target = Target()
    states = compute(tmp_path / "new" / "folder", target)
    assert states.dtype == jnp.bfloat16
    assert states.shape == (N, T, D)
    np.testing.assert_array_equal(states.astype(np.float32), STATES)
    assert target.asked == [[i, i + 1] for i in range(0, N - 1, 2)] + [[N - 1, 0]]
    assert (tmp_path / "new/folder/states.bfloat16").stat().st_size == N * T * D * 2


def test_what_is_there_is_not_computed_again(tmp_path: Path) -> None:
    compute(tmp_path, Target())
    before = (tmp_path / "states.bfloat16").stat()
    states = compute(tmp_path, Target(stop_after=0))
    np.testing.assert_array_equal(states.astype(np.float32), STATES)
    after = (tmp_path / "states.bfloat16").stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)


@pytest.mark.parametrize("size", [B, 5, 100])
def test_an_interrupted_computation_goes_on(tmp_path: Path, size: int) -> None:
    """Also in batches of another size."""
    interrupt(tmp_path)
    target = Target()
    states = compute(tmp_path, target, size)
    np.testing.assert_array_equal(states.astype(np.float32), STATES)
    saved = 6 * B
    assert target.asked[0][0] == saved // size * size
    if size == B:
        assert len(target.asked) == -(-N // B) - 6
    assert compute(tmp_path, Target(stop_after=0)).tobytes() == states.tobytes()


@pytest.mark.parametrize("complete", [True, False])
def test_states_of_something_else_start_again(tmp_path: Path, complete: bool) -> None:
    if complete:
        compute(tmp_path, Target())
    else:
        interrupt(tmp_path)
    target = Target()
    compute(tmp_path, target, corpus="other")
    assert len(target.asked) == -(-N // B)
    compute(tmp_path, Target(stop_after=0), corpus="other")
    with pytest.raises(KeyboardInterrupt):  # what was there before is gone
        compute(tmp_path, Target(stop_after=0))


@pytest.mark.parametrize("broken", ["", '{"identity": {"corp'])
def test_progress_that_cannot_be_read_is_none(tmp_path: Path, broken: str) -> None:
    compute(tmp_path, Target())
    (tmp_path / "progress.json").write_text(broken)
    target = Target()
    compute(tmp_path, target)
    assert len(target.asked) == -(-N // B)


@pytest.mark.parametrize("begun", ["after they were deleted", "for another corpus"])
def test_progress_of_earlier_states_says_nothing_of_later_ones(tmp_path: Path, begun: str) -> None:
    """The later ones were cut short before they were saved for the first time."""
    compute(tmp_path, Target())
    identity = {"corpus": "other"} if begun == "for another corpus" else {}
    if not identity:
        (tmp_path / "states.bfloat16").unlink()
    with pytest.raises(KeyboardInterrupt):
        compute(tmp_path, Target(stop_after=2), **identity)
    np.testing.assert_array_equal(compute(tmp_path, Target()).astype(np.float32), STATES)


def test_progress_is_json(tmp_path: Path) -> None:
    interrupt(tmp_path)
    progress = json.loads((tmp_path / "progress.json").read_text())
    assert progress == {"identity": IDENTITY, "rows": 6 * B}


def test_a_full_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is computed; states that are there already need no room."""
    complete, other = tmp_path / "complete", tmp_path / "other"
    compute(complete, Target())
    usage = types.SimpleNamespace(free=5_500_000_000)
    monkeypatch.setattr(features.shutil, "disk_usage", lambda _: usage)
    compute(complete, Target(stop_after=0))
    width = 10**8
    size = N * T * width * 2 / 1e9
    message = (
        f"the target's hidden states take {size:.1f} GB, and {other} has 5.5 GB left; "
        "train with --features online"
    )
    with pytest.raises(DataError) as refused:
        cached_hidden(other, IDENTITY, ROWS, width, B, Target(stop_after=0))
    assert str(refused.value) == message
    assert list(other.iterdir()) == []


def test_the_states_of_a_batch(tmp_path: Path) -> None:
    states = compute(tmp_path, Target())
    batch = Batches(ROWS, 4, seed=0).batch_at(3)
    ours = states[batch.row_ids]
    assert ours.dtype == jnp.bfloat16
    assert not isinstance(ours, np.memmap)
    np.testing.assert_array_equal(
        ours.astype(np.float32), batch.samples.tokens[:, :, None] / 4 + np.arange(D)
    )
