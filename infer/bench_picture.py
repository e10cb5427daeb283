"""The benchmark's speeds as a bar chart, in SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from infer.bench_report import ALL, Record, Settings, by_task, systems_of, total_of

_COLOURS = ("#9aa5b1", "#2f855a", "#cbd5e0")  # plain, speculative, what they are compared with
_LEFT, _TOP, _WIDTH, _BAR, _GAP = 130, 64, 720, 14, 14


def svg(settings: Settings, records: Sequence[Record]) -> str:
    """New tokens per second of each system, by task: a complete SVG document."""
    tasks, systems = by_task(records), systems_of(records)
    speeds = {
        task: [total_of(group, name).tokens_per_second for name in systems]
        for task, group in tasks.items()
    }
    longest = max(max(row) for row in speeds.values()) or 1.0
    per_token = (_WIDTH - _LEFT - 60) / longest
    body, y = [], _TOP
    for task, row in speeds.items():
        height = _BAR * len(row)
        name = "all tasks" if task == ALL else task
        body.append(_text(_LEFT - 10, y + height / 2 + 4, name, "end"))
        for colour, speed in zip(_COLOURS, row, strict=False):
            width = speed * per_token
            body.append(
                f'<rect x="{_LEFT}" y="{y}" width="{width:.1f}" height="{_BAR - 2}" rx="2" '
                f'fill="{colour}"/>'
            )
            body.append(_text(_LEFT + width + 6, y + _BAR - 4, f"{speed:.0f}"))
            y += _BAR
        y += _GAP
    legend, x = [], _LEFT
    for colour, name in zip(_COLOURS, systems, strict=False):
        legend.append(f'<rect x="{x}" y="38" width="12" height="12" rx="2" fill="{colour}"/>')
        legend.append(_text(x + 18, 48, name))
        x += 40 + 8 * len(name)
    title = f"{settings.model}: new tokens per second on {settings.machine}, {settings.dtype}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{y}" '
            f'viewBox="0 0 {_WIDTH} {y}" font-family="sans-serif" font-size="12">',
            f'<rect width="{_WIDTH}" height="{y}" fill="#ffffff"/>',
            f'<text x="{_LEFT}" y="22" font-size="14" fill="#1a202c">{escape(title)}</text>',
            *legend,
            *body,
            "</svg>\n",
        ]
    )


def _text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="#1a202c">'
        f"{escape(words)}</text>"
    )
