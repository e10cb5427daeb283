"""`make demo`: a chat model answers through its Clover-2 head, then both ways are measured."""

from __future__ import annotations

import contextlib
import functools
import sys
import textwrap
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import Literal, NamedTuple

from clover_jax.chat import encode_prompt
from infer import cli
from infer.agreement import first_difference
from infer.bench import own_systems
from infer.bench_report import PLAIN, SPECULATIVE, describe
from infer.counts import Counts, ratio, total
from infer.engine import stream
from infer.load import Model, load
from infer.timing import fastest_dtype, machine, steady

MODEL = "smollm2-135m"
NAME = "SmolLM2-135M-Instruct"
PROMPTS = (
    "Explain in a few sentences why the sky is blue.",
    "Write a short story about a fox who learns to swim.",
    "What should I think of before I adopt a dog?",
)
NEW_TOKENS = 96
REPETITIONS = 3
WIDTH = 78


class Comparison(NamedTuple):
    """All prompts together.

    Attributes:
      plain, speculative: the median run of each prompt, added up.
      differences: one line per prompt whose texts are not the same.
    """

    plain: Counts
    speculative: Counts
    differences: list[str]


def main(argv: Sequence[str] | None = None) -> None:
    """Answers the first prompt, then measures all of them."""
    cli.Parser(prog="python -m infer.demo", description=main.__doc__ or "").parse_args(argv)
    dtype = fastest_dtype()
    what = f"{NAME} with its Clover-2 head, in {dtype} on {machine()}"
    print(textwrap.fill(what, WIDTH) + "\n")
    with _step("Loading"):
        model = load(MODEL, dtype=dtype)
    head = model.draft is not None
    if not head:
        print("The head is not part of this installation: what follows is plain generation.")
    prompts = [encode_prompt(model.tokenizer, [{"role": "user", "content": p}]) for p in PROMPTS]

    with _step("Compiling, once per start"):
        _compile(model, prompts[0], "auto" if head else None)
    print(f"\n> {PROMPTS[0]}\n")
    pieces = (
        piece.text for piece in stream(model, prompts[0], NEW_TOKENS, tree="auto" if head else None)
    )
    for piece in wrapped(pieces, WIDTH):
        print(piece, end="", flush=True)
    print("\n")
    if not head:
        return

    with _step("Compiling plain generation, to compare with"):
        _compile(model, prompts[0], None)
    with _step(f"Measuring {len(PROMPTS)} prompts, {REPETITIONS} times each, in turns"):
        comparison = compare(model, prompts)
    print(f"\n{table(comparison)}")


def compare(model: Model, prompts: Sequence[list[int]]) -> Comparison:
    """Runs each prompt REPETITIONS times, plain and with the head in turns."""
    systems = own_systems(model, "auto", NEW_TOKENS, temperature=0.0)
    medians: dict[str, list[Counts]] = {PLAIN: [], SPECULATIVE: []}
    differences = []
    for text, prompt in zip(PROMPTS, prompts, strict=True):
        runs = [
            {name: steady(functools.partial(systems[name], prompt)) for name in medians}
            for _ in range(REPETITIONS)
        ]
        for name, median in medians.items():
            by_time = sorted((run[name][1] for run in runs), key=lambda counts: counts.seconds)
            median.append(by_time[len(by_time) // 2])
        for run in runs:
            difference = first_difference(model, prompt, run[PLAIN][0], run[SPECULATIVE][0])
            if difference is not None:
                told = describe(difference, functools.partial(_shown, model))
                differences.append(f"{text!r}: {told}.")
                break
    return Comparison(total(medians[PLAIN]), total(medians[SPECULATIVE]), differences)


def table(comparison: Comparison) -> str:
    """What was measured, in a few lines."""
    plain, head, differences = comparison
    same = len(PROMPTS) - len(differences)
    faster = ratio(head.tokens_per_second, plain.tokens_per_second)
    lines = [
        f"{'':26}{'plain':>9}{'with head':>12}",
        f"{'tokens per second':26}{plain.tokens_per_second:9.1f}{head.tokens_per_second:12.1f}"
        f"    {faster:.2f} times as fast",
        f"{'tokens per target pass':26}{plain.tokens_per_pass:9.2f}{head.tokens_per_pass:12.2f}",
        f"{'same text':26}{'':9}{f'{same} of {len(PROMPTS)}':>12}",
        *(textwrap.fill(line, WIDTH, subsequent_indent="  ") for line in differences),
    ]
    return "\n".join(lines)


def wrapped(pieces: Iterable[str], width: int) -> Iterator[str]:
    """Breaks streamed text between words; a word is yielded when the next character has come."""
    column, pending = 0, ""  # pending: spaces and the word after them

    def placed() -> str:
        nonlocal column
        text = pending
        if column and column + len(text) > width:
            text, column = "\n" + text.lstrip(" "), -1
        column += len(text)
        return text

    for character in (c for piece in pieces for c in piece):
        if character == "\n":
            yield placed() + "\n"
            column, pending = 0, ""
        elif character == " " and pending.strip(" "):
            yield placed()
            pending = " "
        else:
            pending += character
    yield placed()


def _shown(model: Model, token: int) -> str:
    return repr(model.tokenizer.decode([token])) if model.tokenizer is not None else str(token)


def _compile(model: Model, prompt: list[int], tree: Literal["auto"] | None) -> None:
    """The first piece of a stream compiles the prefill, the second the decode loop."""
    for _ in islice(stream(model, prompt, NEW_TOKENS, tree=tree), 2):
        pass


@contextlib.contextmanager
def _step(what: str) -> Iterator[None]:
    """Says what is being done, and then how long it took."""
    print(f"{what} ... ", end="", flush=True)
    started = time.perf_counter()
    yield
    print(f"{time.perf_counter() - started:.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(cli.run(main))
