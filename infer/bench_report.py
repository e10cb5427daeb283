"""The benchmark's numbers as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.agreement import Difference
from infer.counts import Counts, ratio, total

PLAIN, SPECULATIVE, TRANSFORMERS = "plain", "speculative", "transformers"
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was measured, and on what.

    Attributes:
      model: name or place of the target.
      dtype: of the matrix products.
      tree: child-rank paths of the draft tree.
      max_new_tokens, temperature: of every call.
      machine: what it ran on.
      jax: version of JAX.
    """

    model: str
    dtype: str
    tree: tuple[tuple[int, ...], ...]
    max_new_tokens: int
    temperature: float
    machine: str
    jax: str


@dataclasses.dataclass(frozen=True)
class Record:
    """One prompt, by every system.

    Attributes:
      name, task: of the prompt.
      prompt_tokens: its length.
      token_ids, counts: by system.
      differences: by system, what differs from plain decoding; None where nothing does. Systems
        that cannot be compared are left out.
    """

    name: str
    task: str
    prompt_tokens: int
    token_ids: Mapping[str, list[int]]
    counts: Mapping[str, Counts]
    differences: Mapping[str, Difference | None]


def markdown(settings: Settings, records: Sequence[Record]) -> str:
    """The report, ending without a newline."""
    groups = by_task(records)
    systems = systems_of(records)
    parts = [
        f"# {settings.model} on {settings.machine}",
        f"First turns, one at a time; at most {settings.max_new_tokens} new tokens, temperature "
        f"{settings.temperature:g}, {settings.dtype}, JAX {settings.jax}.  \n"
        f"Draft tree of {len(settings.tree)} nodes: {[list(path) for path in settings.tree]}."
        + ("  \ntransformers runs in torch, float32." if TRANSFORMERS in systems else ""),
        "## Speed",
        _table(
            [
                "task",
                "prompts",
                "tokens",
                *(f"{name} tok/s" for name in systems),
                *(f"over {name}" for name in systems if name != SPECULATIVE),
                "tokens/pass",
                "same text",
            ],
            [_speed_row(task, group) for task, group in groups.items()],
        ),
        "Tokens are the new ones of speculative generation, the end-of-sequence token included. "
        "tok/s: new tokens per second of prefill and decoding together. over: how many times "
        "faster speculative generation is. tokens/pass: new tokens per forward pass of the target, "
        "the prefill counted as one. same text: as plain decoding's, token for token.",
        "## Prefill and decoding apart",
        "Prefill: prompt tokens per second. Decoding: new tokens per second, the first, which the "
        "prefill emits, left out.",
        _table(
            [
                "task",
                "prompt tokens",
                *(f"{name} prefill" for name in systems),
                *(f"{name} decoding" for name in systems),
            ],
            [_phase_row(task, group) for task, group in groups.items()],
        ),
        "## Accepted draft tokens",
        "The share of verify passes that kept a draft token at each depth of the tree.",
        _table(
            ["task", *(f"depth {d}" for d in range(1, _depth(records) + 1))],
            [
                [task, *(f"{share:.3f}" for share in total_of(group, SPECULATIVE).acceptance)]
                for task, group in groups.items()
            ],
        ),
        "## Texts that differ from plain decoding's",
        _differences(records),
    ]
    return "\n\n".join(parts)


def as_json(settings: Settings, records: Sequence[Record]) -> dict[str, Any]:
    """All numbers: settings, sums by task and system, and every prompt."""
    return {
        "settings": dataclasses.asdict(settings),
        "tasks": {task: _task_json(group) for task, group in by_task(records).items()},
        "prompts": [
            {
                "question_id": record.name,
                "task": record.task,
                "prompt_tokens": record.prompt_tokens,
                "systems": {
                    name: dataclasses.asdict(counts) | {"token_ids": record.token_ids[name]}
                    for name, counts in record.counts.items()
                },
                "differences": {
                    name: dataclasses.asdict(difference) if difference else None
                    for name, difference in record.differences.items()
                },
            }
            for record in records
        ],
    }


def _task_json(records: Sequence[Record]) -> dict[str, Any]:
    systems = {}
    for name in records[0].counts:
        counts = total_of(records, name)
        systems[name] = dataclasses.asdict(counts) | {
            "tokens_per_second": counts.tokens_per_second,
            "decoded_per_second": counts.decoded_per_second,
            "prompt_tokens_per_second": _prefill_speed(records, name),
            "tokens_per_pass": counts.tokens_per_pass,
            "acceptance": counts.acceptance,
            "speculative_speed_up": ratio(
                total_of(records, SPECULATIVE).tokens_per_second, counts.tokens_per_second
            ),
        }
    agreement = {
        name: dict(zip(("same", "near_ties", "compared"), _agreement(records, name), strict=True))
        for name in records[0].differences
    }
    return {"prompts": len(records), "systems": systems, "agreement": agreement}


def by_task(records: Sequence[Record]) -> dict[str, list[Record]]:
    """The records of each task, in order of appearance, and of all."""
    groups: dict[str, list[Record]] = {}
    for record in records:
        groups.setdefault(record.task, []).append(record)
    return {**groups, ALL: list(records)}


def systems_of(records: Sequence[Record]) -> list[str]:
    """The names of the systems measured, plain decoding first."""
    return list(records[0].counts)


def total_of(records: Sequence[Record], system: str) -> Counts:
    """What a system's runs cost together."""
    return total(record.counts[system] for record in records)


def _prefill_speed(records: Sequence[Record], system: str) -> float:
    tokens = sum(record.prompt_tokens for record in records)
    return ratio(tokens, total_of(records, system).prefill_seconds)


def _agreement(records: Sequence[Record], system: str) -> tuple[int, int, int]:
    """How many texts are plain decoding's, how many part at a near-tie, and how many there are."""
    found = [record.differences[system] for record in records]
    same = sum(difference is None for difference in found)
    near = sum(difference is not None and difference.near_tie for difference in found)
    return same, near, len(found)


def _depth(records: Sequence[Record]) -> int:
    return len(total_of(records, SPECULATIVE).accepted)


def _speed_row(task: str, records: Sequence[Record]) -> list[str]:
    sums = {name: total_of(records, name) for name in records[0].counts}
    mine = sums[SPECULATIVE]
    same, near, compared = _agreement(records, SPECULATIVE)
    ties = f", {near} near-tie{'s' if near > 1 else ''}" if near else ""
    return [
        task,
        str(len(records)),
        str(mine.tokens),
        *(f"{counts.tokens_per_second:.1f}" for counts in sums.values()),
        *(
            f"{ratio(mine.tokens_per_second, counts.tokens_per_second):.2f}"
            for name, counts in sums.items()
            if name != SPECULATIVE
        ),
        f"{mine.tokens_per_pass:.2f}",
        f"{same} of {compared}{ties}",
    ]


def _phase_row(task: str, records: Sequence[Record]) -> list[str]:
    systems = systems_of(records)
    return [
        task,
        str(sum(record.prompt_tokens for record in records)),
        *(f"{_prefill_speed(records, name):.0f}" for name in systems),
        *(f"{total_of(records, name).decoded_per_second:.1f}" for name in systems),
    ]


def _differences(records: Sequence[Record]) -> str:
    lines = []
    for record in records:
        for name, difference in record.differences.items():
            if difference is not None:
                lines.append(f"- {record.task} {record.name}, {name}: {describe(difference)}")
    return "\n".join(lines) or "None."


def describe(difference: Difference, show: Callable[[int], str] = str) -> str:
    """One sentence on where two texts part and why; `show` makes a token readable."""
    expected, found = (
        "the end" if token is None else show(token)
        for token in (difference.expected, difference.found)
    )
    where = f"new token {difference.position} is {found}, in plain decoding {expected}"
    if difference.gap is None:
        return f"{where}; rounding does not explain it"
    verdict = "a near-tie" if difference.near_tie else "no near-tie: rounding does not explain it"
    return f"{where}; their logits are {difference.gap:.2g} apart, {verdict}"


def _table(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: list[str]) -> str:
        first, *others = zip(cells, widths, strict=True)
        padded = [first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in others)]
        return f"| {' | '.join(padded)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join(line(cells) for cells in [header, rule, *rows])
