"""The benchmark's numbers as Markdown and as JSON."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from infer.agreement import Difference
from infer.counts import Counts, ratio, total

PLAIN, SPECULATIVE, TRANSFORMERS, LOOKUP = (
    "plain",
    "with head",
    "transformers",
    "transformers with lookup",
)
ALL = "all"


@dataclasses.dataclass(frozen=True)
class Settings:
    """What was measured, and on what.

    Attributes:
      model: name or place of the target.
      dtype: of the matrix products.
      tree: what the head proposed.
      max_new_tokens, repeat: of every turn.
      machine: what it ran on.
      jax: version of JAX.
      compile_seconds: spent in compiling, before and between what was timed.
    """

    model: str
    dtype: str
    tree: str
    max_new_tokens: int
    repeat: int
    machine: str
    jax: str
    compile_seconds: float


@dataclasses.dataclass(frozen=True)
class Record:
    """One turn, by every system.

    Attributes:
      name, task: of the turn.
      prompt_tokens: the length of all that was said before.
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


@dataclasses.dataclass(frozen=True)
class Batch:
    """Prompts generated together.

    Attributes:
      size: rows.
      prompts: of all batches.
      same: rows with plain decoding's text.
      tree: what the head proposed.
      counts: by system.
    """

    size: int
    prompts: int
    same: int
    tree: str
    counts: Mapping[str, Counts]


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything at one temperature.

    Attributes:
      records: of single rows.
      left_out: turns that did not fit the context.
      batches: of first turns, by size.
    """

    temperature: float
    records: list[Record]
    left_out: list[str]
    batches: list[Batch]


def markdown(settings: Settings, runs: Sequence[Run]) -> str:
    """The report, ending without a newline."""
    repeated = f", the median of {settings.repeat} runs" if settings.repeat > 1 else ""
    head = (
        f"# {settings.model} on {settings.machine}\n\n"
        f"One turn at a time{repeated}; at most {settings.max_new_tokens} new tokens, "
        f"{settings.dtype}, JAX {settings.jax}; {settings.compile_seconds:.0f} s of compilation "
        f"are in none of the figures.  \nDraft tree: {settings.tree}."
    )
    if any(name in systems_of(run.records) for run in runs for name in (TRANSFORMERS, LOOKUP)):
        head += "  \ntransformers runs in torch, float32."
    return "\n\n".join([head, *(_one_temperature(run) for run in runs)])


def _one_temperature(run: Run) -> str:
    groups, systems = by_task(run.records), systems_of(run.records)
    others = [name for name in systems if name != SPECULATIVE]
    parts = [
        f"## Temperature {run.temperature:g}",
        "### Speed",
        _table(
            [
                "task",
                "turns",
                "tokens",
                *(f"{name} tok/s" for name in systems),
                *(f"over {name}" for name in others),
                "middle half",
                "tokens/pass",
                "same text",
            ],
            [_speed_row(task, group) for task, group in groups.items()],
        ),
        "Tokens are the new ones of speculative generation, the end-of-sequence token included. "
        "tok/s: new tokens per second of prefill and decoding together. over: how many times "
        "faster speculative generation is. middle half: between which ratios over plain decoding "
        "the middle half of the turns lies. tokens/pass: new tokens per forward pass of the "
        "target, the prefill counted as one. same text: as plain decoding's, token for token.",
        "### Prefill and decoding apart",
        "First token: milliseconds until it is there. Decoding: new tokens per second, the first, "
        "which the prefill emits, left out.",
        _table(
            [
                "task",
                "prompt tokens",
                *(f"{name} first token" for name in systems),
                *(f"{name} decoding" for name in systems),
            ],
            [_phase_row(task, group) for task, group in groups.items()],
        ),
        "### Accepted draft tokens",
        "The share of verify passes that kept a draft token at each depth of the tree.",
        _table(
            ["task", *(f"depth {d}" for d in range(1, _depth(run.records) + 1))],
            [
                [task, *(f"{share:.3f}" for share in total_of(group, SPECULATIVE).acceptance)]
                for task, group in groups.items()
            ],
        ),
    ]
    if run.batches:
        parts += [
            "### Batches",
            "First turns, so many at a time; new tokens per second of decoding, all rows together.",
            _table(
                [
                    "rows",
                    "prompts",
                    PLAIN,
                    SPECULATIVE,
                    "ratio",
                    "tokens/pass",
                    "same text",
                    "tree",
                ],
                [_batch_row(batch) for batch in run.batches],
            ),
        ]
    parts += ["### Texts that differ from plain decoding's", _differences(run.records)]
    if run.left_out:
        parts.append(f"Turns that did not fit the context: {'; '.join(run.left_out)}.")
    return "\n\n".join(parts)


def as_json(settings: Settings, runs: Sequence[Run]) -> dict[str, Any]:
    """All numbers: settings, and for each temperature sums by task and system, and every turn."""
    return {
        "settings": dataclasses.asdict(settings),
        "runs": [
            {
                "temperature": run.temperature,
                "tasks": {task: _task_json(group) for task, group in by_task(run.records).items()},
                "batches": [dataclasses.asdict(batch) for batch in run.batches],
                "left_out": run.left_out,
                "turns": [_turn_json(record) for record in run.records],
            }
            for run in runs
        ],
    }


def _turn_json(record: Record) -> dict[str, Any]:
    return {
        "name": record.name,
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


def _task_json(records: Sequence[Record]) -> dict[str, Any]:
    systems = {}
    for name in records[0].counts:
        counts = total_of(records, name)
        systems[name] = dataclasses.asdict(counts) | {
            "tokens_per_second": counts.tokens_per_second,
            "decoded_per_second": counts.decoded_per_second,
            "first_token_seconds": _first_token(records, name),
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
    spread = _middle_half(records)
    return {
        "turns": len(records),
        "systems": systems,
        "agreement": agreement,
        "middle_half_of_speed_ups": spread,
    }


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


def _first_token(records: Sequence[Record], system: str) -> float:
    """Seconds, the mean over the turns."""
    return ratio(total_of(records, system).prefill_seconds, len(records))


def _middle_half(records: Sequence[Record]) -> list[float]:
    """First and third quartile of the turns' speed-ups over plain decoding."""
    found = [
        ratio(r.counts[SPECULATIVE].tokens_per_second, r.counts[PLAIN].tokens_per_second)
        for r in records
    ]
    if len(found) < 2:
        return [*found, *found]
    first, _, third = statistics.quantiles(found, n=4, method="inclusive")
    return [first, third]


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
        "{:.2f} to {:.2f}".format(*_middle_half(records)),
        f"{mine.tokens_per_pass:.2f}",
        f"{same} of {compared}{ties}",
    ]


def _phase_row(task: str, records: Sequence[Record]) -> list[str]:
    systems = systems_of(records)
    return [
        task,
        str(sum(record.prompt_tokens for record in records)),
        *(f"{1e3 * _first_token(records, name):.0f}" for name in systems),
        *(f"{total_of(records, name).decoded_per_second:.1f}" for name in systems),
    ]


def _batch_row(batch: Batch) -> list[str]:
    plain, mine = batch.counts[PLAIN], batch.counts[SPECULATIVE]
    return [
        str(batch.size),
        str(batch.prompts),
        f"{plain.decoded_per_second:.1f}",
        f"{mine.decoded_per_second:.1f}",
        f"{ratio(mine.decoded_per_second, plain.decoded_per_second):.2f}",
        f"{mine.tokens_per_pass:.2f}",
        f"{batch.same} of {batch.prompts}",
        batch.tree,
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
