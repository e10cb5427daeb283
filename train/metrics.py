"""What a run shows while it goes: the progress bar, TensorBoard, and lines of evaluation."""

from __future__ import annotations

import time
from typing import Any

import jax
import numpy as np
from tensorboardX import SummaryWriter
from tqdm import tqdm

from train.packing import Batch


class Meter:
    """Progress bar and TensorBoard."""

    def __init__(self, bar: Any, writer: SummaryWriter, schedule: Any) -> None:
        self._bar, self._writer, self._schedule = bar, writer, schedule
        self.restart()

    def restart(self) -> None:
        """Starts the clock of the throughput again, after work that is not training."""
        self._tokens, self._since = 0, time.perf_counter()

    def count(self, batch: Batch) -> None:
        """Counts the real tokens of a batch."""
        self._tokens += batch.real_tokens()
        self._bar.update()

    def report(self, step: int, metrics: dict[str, jax.Array]) -> None:
        """Shows and writes the metrics of one step."""
        values = jax.device_get(metrics)
        speed = self._tokens / (time.perf_counter() - self._since)
        self._bar.set_postfix_str(
            f"loss {values['loss']:.3f}, accuracy {_percent(values['accuracy'])}, "
            f"{speed:,.0f} tokens/s"
        )
        write_scalars(self._writer, "train", values, step)
        self._writer.add_scalar("train/tokens_per_second", speed, step)
        self._writer.add_scalar("train/learning_rate", float(self._schedule(step - 1)), step)
        self.restart()


def report_evaluation(values: dict[str, Any], writer: SummaryWriter, step: int) -> None:
    """Shows and writes what `evaluation` found."""
    if not values:
        return
    write_scalars(writer, "eval", values, step)
    tqdm.write(
        f"step {step}: held-back loss {values['loss']:.3f}, "
        f"accuracy by head {_percent(values['accuracy'])}"
    )


def write_scalars(
    writer: SummaryWriter, group: str, values: dict[str, np.ndarray], step: int
) -> None:
    """Writes scalars as they are, and [I] arrays as one scalar per head."""
    for name, value in values.items():
        if np.ndim(value) == 0:
            writer.add_scalar(f"{group}/{name}", float(value), step)
        else:
            for head, part in enumerate(value):
                writer.add_scalar(f"{group}/{name}_{head}", float(part), step)


def _percent(values: np.ndarray) -> str:
    return " ".join(f"{100 * v:.0f}" for v in values) + " %"
