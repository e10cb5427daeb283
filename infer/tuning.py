"""What was measured on which machine, stored beside a head, and the tree that follows from it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from clover_jax.tree import PLAIN, AnyTree, Tree, parse_tree
from clover_jax.weights.source import CheckpointError
from infer.timing import machine

FILE = "tuning.json"

# Without a measurement. A CPU pays for every node that the target checks, and with a few rows it is
# busy without any (docs/decoding.md has figures).
_ON_CPU = parse_tree([[0], [1], [0, 0], [0, 0, 0]])
_ROWS_ON_CPU = 2
_ELSEWHERE = parse_tree("paper")


@dataclasses.dataclass(frozen=True)
class Choice:
    """The fastest way found for one batch size.

    Attributes:
      batch_size: rows decoded together.
      tree: PLAIN where plain decoding was fastest.
      predicted, measured, plain: tokens per second of decoding: as the model of times has it from
        the speed of plain decoding, as it was, and of plain decoding in the same run.
      tokens_per_pass: verify passes alone, over all rows.
      pass_milliseconds: of a step by the nodes of its tree, root included, one level deep; of plain
        decoding for one node.
      level_milliseconds: what each level more costs, by the nodes that propose on it.
    """

    batch_size: int
    tree: Tree
    predicted: float
    measured: float
    plain: float
    tokens_per_pass: float
    pass_milliseconds: dict[int, float]
    level_milliseconds: dict[int, float]


@dataclasses.dataclass(frozen=True)
class Tuning:
    """One run of `python -m infer.tune`.

    Attributes:
      machine, dtype: what it holds for.
      temperature, draft_vocab_size, prompts, new_tokens: what was run.
      acceptance: by depth and rank: the share of roots, of those whose true tokens had been
        proposed so far, whose next was of that rank.
      choices: by batch size.
    """

    machine: str
    dtype: str
    temperature: float
    draft_vocab_size: int
    prompts: int
    new_tokens: int
    acceptance: list[list[float]]
    choices: list[Choice]


def read_tunings(folder: Path) -> list[Tuning]:
    """All that lie beside a head; [] if there are none.

    Raises:
      CheckpointError: a file that is something else.
    """
    path = folder / FILE
    if not path.exists():
        return []
    try:
        return [_from_json(fields) for fields in json.loads(path.read_text(encoding="utf-8"))]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not what python -m infer.tune writes: {type(error).__name__}: {error}"
        ) from error


def write_tuning(folder: Path, tuning: Tuning) -> Path:
    """Stores a tuning; it takes the place of an earlier one of the same machine and dtype."""
    place = (tuning.machine, tuning.dtype)
    kept = [t for t in read_tunings(folder) if (t.machine, t.dtype) != place]
    path = folder / FILE
    text = json.dumps([_to_json(t) for t in [*kept, tuning]], indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def auto_tree(tunings: Sequence[Tuning], dtype: str, rows: int) -> AnyTree:
    """The tree for `rows` rows on this machine, PLAIN if speculation is slower there.

    What was measured holds for half to twice as many rows, and plain decoding for any more. Beyond
    that: on a CPU a tree of four nodes for one or two rows and PLAIN for more, else the paper's.
    """
    here = [t for t in tunings if (t.machine, t.dtype) == (machine(), dtype)]
    for choice in sorted(here[0].choices if here else [], key=lambda c: abs(c.batch_size - rows)):
        smaller, larger = sorted((choice.batch_size, rows))
        if larger <= 2 * smaller or (choice.tree == PLAIN and choice.batch_size <= rows):
            return choice.tree
    if jax.default_backend() != "cpu":
        return _ELSEWHERE
    return _ON_CPU if rows <= _ROWS_ON_CPU else PLAIN


def _to_json(tuning: Tuning) -> dict[str, Any]:
    fields = dataclasses.asdict(tuning)
    for choice, stored in zip(tuning.choices, fields["choices"], strict=True):
        stored["tree"] = [list(path) for path in choice.tree.paths]
    return fields


def _from_json(fields: dict[str, Any]) -> Tuning:
    return Tuning(**{**fields, "choices": [_choice(**c) for c in fields["choices"]]})


def _choice(
    *,
    tree: list[list[int]],
    pass_milliseconds: dict[str, float],
    level_milliseconds: dict[str, float],
    **others: Any,
) -> Choice:
    return Choice(
        **others,
        tree=Tree(tuple(map(tuple, tree))) if tree else PLAIN,
        pass_milliseconds={int(k): float(v) for k, v in pass_milliseconds.items()},
        level_milliseconds={int(k): float(v) for k, v in level_milliseconds.items()},
    )
