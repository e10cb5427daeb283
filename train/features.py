"""The target's hidden states of a corpus, computed once and kept on disk.

A run of several epochs asks the frozen target the same questions in each of them; with the answers
on disk only the head is left to compute. `states.bfloat16` is a raw array [N, T, D];
`progress.json` says which corpus and target it belongs to, and how many of its rows are written.

Axes: N rows, T tokens, D model.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

from train.packing import Rows, batches_in_order
from train.records import DataError
from train.segments import Samples

_SAVE_EVERY = 16  # batches


def cached_hidden(
    folder: Path,
    identity: Mapping[str, Any],
    rows: Rows,
    width: int,
    batch_size: int,
    hidden_of: Callable[[Samples], jax.Array],
) -> np.ndarray:
    """The hidden states of all rows, computed as far as they are not in `folder` yet.

    Args:
        identity: JSON values that the states depend on; others than the folder's start it again.
        width: D.
        batch_size: rows computed at a time.
        hidden_of: the target, samples [B, T] -> [B, T, D].

    Returns:
        bfloat16 [N, T, D], mapped from the disk.

    Raises:
        DataError: a disk without the room.
    """
    folder.mkdir(parents=True, exist_ok=True)
    states, progress = folder / "states.bfloat16", folder / "progress.json"
    shape = (len(rows), rows.length, width)
    size = int(np.prod(shape)) * jnp.bfloat16.dtype.itemsize
    complete = states.exists() and states.stat().st_size == size
    done = _rows_done(progress, identity) if complete else 0
    if not done:
        progress.unlink(missing_ok=True)  # it would vouch for the new states
        states.unlink(missing_ok=True)
        free = shutil.disk_usage(folder).free
        if size > free:
            raise DataError(
                f"the target's hidden states take {size / 1e9:.1f} GB, and {folder} has "
                f"{free / 1e9:.1f} GB left; train with --features online"
            )
        print(f"hidden states of the target: {size / 1e9:.1f} GB in {folder}")
    array = np.memmap(states, jnp.bfloat16.dtype, "r+" if done else "w+", shape=shape)

    def save(done: int) -> None:
        array.flush()
        progress.write_text(json.dumps({"identity": identity, "rows": done}))

    with tqdm(total=len(rows), initial=done, unit="row", desc="hidden states") as bar:
        for index, batch in enumerate(batches_in_order(rows, batch_size)):
            first = index * batch_size
            count = min(batch_size, len(rows) - first)
            if first + count <= done:
                continue
            array[first : first + count] = np.asarray(
                hidden_of(batch.samples).astype(jnp.bfloat16)
            )[:count]
            bar.update(count)
            if (index + 1) % _SAVE_EVERY == 0:
                save(first + count)
    if done < len(rows):
        save(len(rows))
    return array


def _rows_done(progress: Path, identity: Mapping[str, Any]) -> int:
    try:
        held = json.loads(progress.read_text())
    except (OSError, ValueError):
        return 0
    return int(held["rows"]) if held.get("identity") == identity else 0
