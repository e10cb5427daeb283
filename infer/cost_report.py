"""What `python -m infer.cost` prints: tables of cycles, and the speed-ups that follow."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from infer.cost_figures import OTHER, PARTS, Figures

PLAIN = "plain"
PAPER_TREE = "paper"  # the tree that the paper's figures are for
TASKS = ("MT-bench", "WMT14", "CNN/DM", "NQ", "GSM8K", "DPR")


@dataclasses.dataclass(frozen=True)
class Paper:
    """What Clover-2's paper reports (arXiv 2408.00264, greedy), in the order of TASKS.

    Attributes:
      speedup: over plain decoding.
      extra_tokens: accepted draft tokens per pass; the target adds one more.
    """

    speedup: tuple[float, ...]
    extra_tokens: tuple[float, ...]


PAPER = {
    "vicuna-7b": Paper((3.00, 2.43, 2.55, 2.40, 3.09, 2.44), (2.95, 2.51, 2.57, 2.16, 3.16, 2.70)),
    "llama-3-8b": Paper((2.47, 2.24, 2.09, 2.08, 2.65, 2.14), (2.57, 2.25, 2.19, 2.07, 2.89, 2.47)),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One model on one machine at one batch size.

    Attributes:
      machine, model, batch: which.
      decode: by name, PLAIN and each tree, a step of the decode loop.
      prefill: a chunk, or None if it was not asked for.
    """

    machine: str
    model: str
    batch: int
    decode: dict[str, Figures]
    prefill: Figures | None

    def over_plain(self, tree: str) -> float:
        """A greedy speculative step over a plain one."""
        return self.decode[tree].greedy.total / self.decode[PLAIN].greedy.total


def text(case: Case, tokens_per_pass: list[float]) -> str:
    """All of a case, as lines to read."""
    lines = [f"{case.model} on {case.machine}, batch {case.batch}", ""]
    for name, figures in case.decode.items():
        lines += _step(name, figures, None if name == PLAIN else case.over_plain(name))
    if case.prefill is not None:
        lines += _step("prefill, one chunk", case.prefill, None)
    for tree in case.decode:
        if tree != PLAIN:
            lines += _speedups(case, tree, tokens_per_pass)
    return "\n".join(lines)


def _step(name: str, figures: Figures, over_plain: float | None) -> list[str]:
    found = figures.greedy
    lines = [f"  {name:<22}{'Mcycles':>10}{'roofline':>10}{'ratio':>8}"]
    for part in (*PARTS, OTHER):
        if part in found.cycles:
            cycles = found.cycles[part] + found.waiting.get(part, 0.0)
            lines.append(_row(part or "other", cycles, figures.roofline.get(part)))
    lines.append(_row("step", found.total, sum(figures.roofline.values())))
    if over_plain is not None:
        lines.append(f"    {'over plain':<20}{over_plain:>28.3f}")
    waiting = sum(found.waiting.values())
    lines += [
        f"    of it waiting for prefetches: {waiting / 1e6:.3f}",
        f"    a step with top-k and top-p: {figures.sampled / 1e6:.3f}",
        f"    outside the loop, once a call: {figures.outside / 1e6:.3f}",
        f"    HBM: {figures.hbm / 2**30:.2f} GiB a chip",
        f"    large copies in HBM: {_list(found.copies)}",
        f"    without an estimate: {_list(found.unknown)}",
    ]
    if found.collectives:
        sizes = (f"{kind} {size / 1e6:.2f} MB" for kind, size in found.collectives.items())
        lines.append("    collectives: " + ", ".join(sizes))
    return [*lines, ""]


def _row(name: str, cycles: float, roof: float | None) -> str:
    row = f"    {name:<20}{cycles / 1e6:>10.3f}"
    if roof:
        row += f"{roof / 1e6:>10.3f}{cycles / roof:>8.3f}"
    return row


def _list(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items()) or "none"


def _speedups(case: Case, tree: str, tokens_per_pass: list[float]) -> list[str]:
    cost = case.over_plain(tree)
    lines = [f"  speed-up, {tree}"]
    for tokens in tokens_per_pass:
        lines.append(f"    {tokens:.2f} tokens per pass: {tokens / cost:.2f}")
    paper = PAPER.get(case.model)
    if paper is not None and tree == PAPER_TREE:
        lines.append(f"    {'paper, greedy':<20}{'tokens/pass':>12}{'here':>7}{'paper':>7}{'':>7}")
        for task, extra, theirs in zip(TASKS, paper.extra_tokens, paper.speedup, strict=True):
            ours = (1 + extra) / cost
            gain = 100 * (ours / theirs - 1)
            lines.append(
                f"    {task:<20}{1 + extra:>12.2f}{ours:>7.2f}{theirs:>7.2f}{gain:>+6.0f}%"
            )
    return [*lines, ""]


def as_json(cases: list[Case], settings: dict[str, Any]) -> dict[str, Any]:
    """The same figures for programs to read."""
    return {"settings": settings, "cases": [_case_json(case) for case in cases]}


def _case_json(case: Case) -> dict[str, Any]:
    found = dataclasses.asdict(case)
    for name, figures in case.decode.items():
        more: dict[str, float] = {
            "cycles": figures.greedy.total,
            "over_roofline": figures.over_roofline,
            "over_plain": case.over_plain(name),
        }
        found["decode"][name] |= more
    return found
