"""Estimates what decoding costs on TPUs, with the TPU's compiler and without a TPU.

    python -m infer.cost --machines v6e-1 --models llama-3-8b --json cost.json

Needs libtpu (the extra "tpu"), and one such process at a time. docs/tpu.md says what the figures
mean.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from clover_jax.tree import PLAIN, AnyTree, Tree, parse_tree
from infer import cli, cost_report
from infer.cost_figures import Roof, decode_figures, measure_roof, prefill_figures
from infer.cost_programs import MACHINES, MODELS, Programs, chips, head_for, streaming_product
from infer.cost_report import Case


def main(argv: Sequence[str] | None = None) -> None:
    """Compiles and reports."""
    arguments = _parser().parse_args(argv)
    if arguments.json is not None and not arguments.json.absolute().parent.is_dir():
        raise ValueError(f"{arguments.json}: there is no folder for it")
    jax.config.update("jax_platforms", "cpu")  # the programs are for a TPU that is not here
    cases = []
    for machine in arguments.machines:
        mesh = chips(MACHINES[machine])
        roof = measure_roof(*streaming_product(mesh))
        rate = 1 / roof.cycles_per_byte
        print(f"{machine}: the best streaming product reads {rate:.0f} bytes a cycle and chip\n")
        for name, batch in itertools.product(arguments.models, arguments.batch):
            target = MODELS[name]
            head = head_for(target, arguments.draft_vocab)
            programs = Programs(mesh, target, head, batch, arguments.slots, arguments.chunk)
            case = _case(machine, name, programs, dict(arguments.trees), roof)
            print(cost_report.text(case, arguments.tokens_per_pass), flush=True)
            cases.append(case)
    if arguments.json is not None:
        settings = {k: getattr(arguments, k) for k in ("slots", "chunk", "draft_vocab")}
        found = json.dumps(cost_report.as_json(cases, settings), allow_nan=False)
        arguments.json.write_text(found + "\n", encoding="utf-8")


def _case(
    machine: str,
    model: str,
    programs: Programs,
    trees: dict[str, AnyTree],
    roof: Roof,
) -> Case:
    def say(what: str) -> None:
        print(f"compiling {model} for {machine}: {what}", file=sys.stderr, flush=True)

    decode = {}
    for name, tree in {cost_report.PLAIN: PLAIN, **trees}.items():
        say(name)
        decode[name] = decode_figures(programs, tree, roof)
    say("prefill")
    return Case(machine, model, programs.batch, decode, prefill_figures(programs, roof))


def even_tree(depth: int) -> Tree:
    """2 ** depth nodes, the root included: the paths that are worth at least 2 ** -depth.

    Each rank is worth half of the one before it: rank 0 is right every other time, and a path as
    often as all its tokens are.
    """
    paths: list[tuple[int, ...]] = [()]
    for path in paths:  # it grows meanwhile
        left = depth - sum(rank + 1 for rank in path)
        paths += [(*path, rank) for rank in range(left)]
    return Tree(tuple(sorted(paths[1:], key=lambda path: (len(path), path))))


TREES: dict[str, AnyTree] = {"paper": parse_tree("paper"), "even-64": even_tree(6)}


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m infer.cost",
        description="Estimates what decoding costs on TPUs, with the TPU's compiler.",
    )
    add = functools.partial(parser.add_argument, nargs="+", metavar="NAME")
    add("--machines", choices=tuple(MACHINES), default=list(MACHINES), help=", ".join(MACHINES))
    add("--models", choices=tuple(MODELS), default=list(MODELS), help=", ".join(MODELS))
    add(
        "--trees",
        type=_named_tree,
        default=list(TREES.items()),
        help=f"{', '.join(TREES)}, chain-3, dynamic-25 (default: {' '.join(TREES)})",
    )
    number = functools.partial(parser.add_argument, type=cli.whole_number(1), metavar="N")
    number("--batch", nargs="+", default=[1], help="rows (default 1); several make a table each")
    number("--slots", default=2048, help="cache slots of a row (default %(default)s)")
    number(
        "--chunk",
        default=512,
        help="prompt tokens a step of prefill reads at most (default %(default)s)",
    )
    number("--draft_vocab", default=32768, help="tokens the head proposes (default %(default)s)")
    parser.add_argument(
        "--tokens_per_pass",
        nargs="+",
        type=cli.number(1.0),
        default=[2.0, 3.0, 4.0],
        metavar="X",
        help="at which to state the speed-up (default 2 3 4)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures here")
    return parser


def _named_tree(name: str) -> tuple[str, AnyTree]:
    try:
        return name, TREES[name] if name in TREES else parse_tree(name)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


if __name__ == "__main__":
    sys.exit(cli.run(main))
