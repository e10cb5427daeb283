"""The benchmark's numbers as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from infer.bench_report import ALL, PLAIN, SPECULATIVE, Run, Settings, by_task, total_of
from infer.counts import ratio
from infer.timing import machine
from infer.tuning import Choice, Tuning

FORMATS = (".png", ".svg")
_COLOURS = ("#2f855a", "#90cdaf", "#2b6cb0", "#90b4d9")


def draw(
    path: Path, settings: Settings, runs: Sequence[Run], tunings: Sequence[Tuning] = ()
) -> None:
    """Speed-up by task and acceptance by depth; and the time of a step by nodes, where a tuning of
    this machine has measured it.

    Raises:
      ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError(
            "pictures are drawn by matplotlib, which is not installed: "
            "pip install 'clover-jax[plots]'"
        ) from None
    here = [t for t in tunings if (t.machine, t.dtype) == (machine(), settings.dtype)]
    tuned = [choice for tuning in here for choice in tuning.choices]
    panels = 2 + bool(tuned)
    figure = Figure(figsize=(5.2 * panels, 4.2), layout="constrained")
    axes = figure.subplots(1, panels)
    _speed_up(axes[0], runs)
    _acceptance(axes[1], runs)
    if tuned:
        _step_time(axes[2], tuned)
    figure.suptitle(f"{settings.model}, {settings.dtype}, {settings.machine}", fontsize=11)
    figure.savefig(path, dpi=130)


def _speed_up(axis: Any, runs: Sequence[Run]) -> None:
    groups = [by_task(run.records) for run in runs]
    tasks = list(groups[0])
    width = 0.8 / len(runs)
    for index, (run, group) in enumerate(zip(runs, groups, strict=True)):
        found = [
            ratio(
                total_of(group[task], SPECULATIVE).tokens_per_second,
                total_of(group[task], PLAIN).tokens_per_second,
            )
            for task in tasks
        ]
        at = [place + (index - (len(runs) - 1) / 2) * width for place in range(len(tasks))]
        bars = axis.bar(at, found, width, color=_COLOURS[index % 4], label=_label(run))
        axis.bar_label(bars, fmt="%.2f", fontsize=8)
    axis.axhline(1.0, color="#4a5568", linewidth=0.8)
    names = ["all tasks" if task == ALL else task for task in tasks]
    axis.set_xticks(range(len(tasks)), names, rotation=30, ha="right")
    axis.set_title("times as fast as plain decoding")
    axis.legend(frameon=False)


def _acceptance(axis: Any, runs: Sequence[Run]) -> None:
    for index, run in enumerate(runs):
        shares = total_of(run.records, SPECULATIVE).acceptance
        axis.plot(
            range(1, len(shares) + 1), shares, "o-", color=_COLOURS[index % 4], label=_label(run)
        )
    axis.set_ylim(0, 1)
    axis.set_xlabel("depth in the draft tree")
    axis.xaxis.get_major_locator().set_params(integer=True)
    axis.set_title("passes that kept a draft token")
    axis.legend(frameon=False)


def _step_time(axis: Any, choices: Sequence[Choice]) -> None:
    for index, choice in enumerate(choices):
        nodes = sorted(choice.pass_milliseconds)
        axis.plot(
            nodes,
            [choice.pass_milliseconds[n] for n in nodes],
            "o-",
            color=_COLOURS[index % 4],
            label=f"{choice.batch_size} row{'s' * (choice.batch_size > 1)}",
        )
    axis.set_ylim(bottom=0)
    axis.set_xlabel("nodes that the target checks")
    axis.set_title("milliseconds of a step, one level deep")
    axis.legend(frameon=False)


def _label(run: Run) -> str:
    return f"temperature {run.temperature:g}"
