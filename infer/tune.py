"""Finds the static tree that is fastest on this machine, and stores it beside the head.

    python -m infer.tune --model smollm2-135m --dtype bfloat16

Calibration prompts are answered plainly; how the head would have ranked every token of the answers
gives, exactly, the passes that any tree would have taken. With the time of a step by its tree,
pieced together from what is measured here, that tells which few trees are worth a closer look.
Theirs is measured, which predicts tokens per second; they are run and compared with plain decoding,
in turns, and the fastest of all is stored.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from tqdm import tqdm

from clover_jax.tree import PLAIN, Tree
from infer import cli
from infer.calibrate import count_passes, token_ranks
from infer.call import prepare
from infer.counts import Counts, total
from infer.engine import generate, speculative_generate
from infer.load import Model
from infer.questions import first_prompts, read_questions
from infer.session import Generation
from infer.step_times import Setting, StepTimes, measure, with_trees
from infer.timing import machine, steady
from infer.tree_search import acceptance, candidates, likely_paths
from infer.tuning import Choice, Tuning, write_tuning

_DEPTH, _WIDTH = 7, 8  # of the ranks that are looked at
_SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 25, 32, 40, 48, 64, 96, 128, 192, 255)
_FINALISTS = 3


class Calibration(NamedTuple):
    """Texts, and how the head ranked their tokens.

    Attributes:
      prompts, texts: token ids.
      ranks: of each text, int [R, D].
    """

    prompts: list[list[int]]
    texts: list[list[int]]
    ranks: list[np.ndarray]

    def middle(self) -> list[int]:
        """The prompt of middling length, for the time of a step."""
        return sorted(self.prompts, key=len)[len(self.prompts) // 2]


def main(argv: Sequence[str] | None = None) -> None:
    """Measures, searches and stores."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    questions = read_questions(arguments.prompts, arguments.per_task)
    model = cli.load_model(parser, arguments)
    if model.draft is None or model.draft_config is None or model.head_folder is None:
        raise ValueError("this model has no draft head to tune for: name one with --draft")
    folder: Path = arguments.output or model.head_folder
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder")
    prompts = first_prompts(model, questions, arguments.max_new_tokens)

    calibration = calibrate(model, prompts, arguments.max_new_tokens, arguments.temperature)
    trees = list(candidates(likely_paths(calibration.ranks), _SIZES))
    trees = [tree for tree in trees if tree.size <= arguments.max_nodes]
    tuning = Tuning(
        machine=machine(),
        dtype=model.weight_dtype,
        temperature=arguments.temperature,
        draft_vocab_size=model.draft_config.draft_vocab_size,
        prompts=len(prompts),
        new_tokens=sum(map(len, calibration.texts)),
        acceptance=acceptance(calibration.ranks, _WIDTH).round(4).tolist(),
        choices=[],
    )
    for size in arguments.batch_sizes:
        settings = (arguments.temperature, arguments.max_new_tokens)
        setting = Setting(model, calibration.middle(), size, *settings)
        times = measure(setting, arguments.max_nodes - 1)
        choice = choose(calibration, trees, times, setting)
        print(_line(choice), flush=True)
        tuning = dataclasses.replace(tuning, choices=[*tuning.choices, choice])
        path = write_tuning(folder, tuning)  # at once: the next may take long
    print(f"written to {path}")


def calibrate(
    model: Model, prompts: Sequence[list[int]], max_new_tokens: int, temperature: float
) -> Calibration:
    """Answers the prompts plainly, prompt i with seed i, and ranks the tokens."""
    texts, ranks = [], []
    for seed, prompt in enumerate(tqdm(prompts, desc="calibrating", unit="prompt", disable=None)):
        said = generate(model, prompt, max_new_tokens, temperature, seed=seed).token_ids[0]
        call = prepare(model, prompt, Tree(((0,),)), max_new_tokens, temperature, 1.0, 0, seed)
        texts.append(said)
        ranks.append(token_ranks(call, said, _DEPTH, _WIDTH))
    return Calibration(list(prompts), texts, ranks)


def predicted(
    calibration: Calibration, tree: Tree, times: StepTimes, batch_size: int
) -> tuple[float, float]:
    """How many times faster than plain decoding a tree is, and tokens per verify pass.

    Prompts are taken in order, so many at a time; a batch ends with its last row. The times count
    as ratios to plain decoding's alone, since a machine's speed drifts.
    """
    plain = [len(ranks) for ranks in calibration.ranks]
    passes = plain
    if tree != PLAIN:
        paths = frozenset(tree.paths)
        passes = [count_passes(ranks, paths) for ranks in calibration.ranks]

    def steps(of_rows: Sequence[int]) -> int:
        return sum(max(of_rows[at : at + batch_size]) for at in range(0, len(plain), batch_size))

    gain = steps(plain) * times.of(PLAIN) / (steps(passes) * times.of(tree))
    return gain, sum(plain) / sum(passes)


def choose(
    calibration: Calibration, trees: Sequence[Tree], times: StepTimes, setting: Setting
) -> Choice:
    """Predicts all trees, measures and runs the best few and plain decoding in turns, and takes the
    fastest."""
    rows = setting.rows
    forecasts = {tree: predicted(calibration, tree, times, rows) for tree in trees}
    finalists = sorted(trees, key=lambda tree: -forecasts[tree][0])[:_FINALISTS]
    times = with_trees(times, setting, finalists)
    runs = _run(calibration, [PLAIN, *finalists], setting)
    best = max(runs, key=lambda tree: runs[tree].decoded_per_second)
    gain, per_pass = predicted(calibration, best, times, rows)
    return Choice(
        batch_size=rows,
        tree=best,
        predicted=round(gain * runs[PLAIN].decoded_per_second, 2),
        measured=round(runs[best].decoded_per_second, 2),
        plain=round(runs[PLAIN].decoded_per_second, 2),
        tokens_per_pass=round(per_pass, 4),
        pass_milliseconds={n: round(1e3 * s, 3) for n, s in times.passes.items()},
        level_milliseconds={n: round(1e3 * s, 3) for n, s in times.levels.items()},
    )


def _run(calibration: Calibration, trees: Sequence[Tree], setting: Setting) -> dict[Tree, Counts]:
    """All calibration prompts with each tree, tree by tree within each batch."""
    found: dict[Tree, list[Counts]] = {tree: [] for tree in trees}
    model, prompts = setting.model, calibration.prompts
    settings = (setting.new_tokens, setting.temperature)
    starts = range(0, len(prompts), setting.rows)
    for at in tqdm(starts, desc="running", unit="batch", disable=None):
        rows = range(at, min(at + setting.rows, len(prompts)))
        batch, seeds = [prompts[row] for row in rows], list(rows)
        for tree in trees:
            answer: Callable[..., Generation] = (
                functools.partial(generate, model)
                if tree == PLAIN
                else functools.partial(speculative_generate, model, tree=tree)
            )
            run = steady(functools.partial(answer, batch, *settings, seed=seeds))
            found[tree].append(Counts.of(run))
    return {tree: total(counts) for tree, counts in found.items()}


def _line(choice: Choice) -> str:
    if choice.tree == PLAIN:
        return (
            f"batch of {choice.batch_size}: plain decoding is fastest here, {choice.plain:.1f} "
            f"tokens/s (predicted {choice.predicted:.1f})"
        )
    return (
        f"batch of {choice.batch_size}: {choice.measured:.1f} tokens/s (predicted "
        f"{choice.predicted:.1f}), {choice.measured / choice.plain:.2f} times plain decoding, "
        f"{choice.tokens_per_pass:.2f} tokens per verify pass, "
        f"{choice.tree}"
    )


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m infer.tune",
        description="Finds the draft tree that is fastest on this machine, and stores it beside "
        "the head, where tree='auto' finds it.",
    )
    parser.add_argument(
        "--prompts",
        type=Path,
        metavar="PATH",
        help="calibration prompts, JSON lines in the format of Spec-Bench (default: twelve prompts "
        "that come with the package)",
    )
    parser.add_argument(
        "--per_task", type=cli.whole_number(1), metavar="N", help="the first N of each task alone"
    )
    cli.add_length_and_temperature(parser)
    parser.add_argument(
        "--batch_sizes",
        type=cli.whole_number(1),
        nargs="+",
        default=[1],
        metavar="B",
        help="rows that are decoded together (default 1)",
    )
    parser.add_argument(
        "--max_nodes",
        type=cli.whole_number(8),
        default=64,
        metavar="N",
        help="of a tree, its root included (default %(default)s)",
    )
    parser.add_argument(
        "--output", type=Path, metavar="FOLDER", help="instead of the head's folder"
    )
    cli.add_model_options(parser)
    return parser


if __name__ == "__main__":
    sys.exit(cli.run(main))
