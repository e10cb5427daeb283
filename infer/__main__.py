"""Text on the command line: `python -m infer "Why is the sky blue?"`, `--help` for the rest."""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO

from infer import cli
from infer.conversation import converse
from infer.counts import Counts, total
from infer.engine import generate, speculative_generate, stream
from infer.prompt_file import Entry, of_text, read_prompts, results
from infer.session import Generation
from infer.stream import Stream
from infer.timing import compile_seconds, steady

_ROWS = 8  # that are generated together


def main(argv: Sequence[str] | None = None) -> None:
    """Answers prompts: one as a stream, several in order, or a conversation."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    _check(parser, arguments)
    typed = None if arguments.interactive or arguments.file else _typed(parser, arguments)
    model = cli.load_model(parser, arguments)
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer; from Python it takes prompts of token ids")
    if model.draft is None and not arguments.plain:
        raise ValueError("this model has no draft head: name one with --draft, or use --plain")
    template = model.tokenizer.chat_template is not None
    chat = arguments.chat or (template and not arguments.raw)
    settings = cli.sampling_settings(arguments)
    drafting = {"tree": arguments.tree, "acceptance": arguments.acceptance}
    streamed: Callable[..., Stream] = functools.partial(
        stream, model, **settings, **({"tree": None} if arguments.plain else drafting)
    )

    compiling = compile_seconds()
    if arguments.interactive:
        if not template:
            raise ValueError("this model has no chat template, so there is no conversation")
        counts = [
            Counts.of(s.generation) for s in converse(model, streamed, arguments.max_new_tokens)
        ]
    else:
        entries = (
            read_prompts(arguments.file, chat)
            if typed is None
            else [of_text(text, chat) for text in typed]
        )
        if len(entries) == 1 and arguments.num_samples == 1 and arguments.output is None:
            counts = [_stream_one(functools.partial(streamed, entries[0].prompt), arguments.stats)]
        else:
            answer: Callable[..., Generation] = (
                functools.partial(generate, model, **settings)
                if arguments.plain
                else functools.partial(speculative_generate, model, **settings, **drafting)
            )
            counts = _answer_all(answer, entries, arguments)
    if arguments.stats and counts:
        print(_statistics(total(counts)), file=sys.stderr)
        if arguments.interactive:
            spent = compile_seconds() - compiling
            print(f"of these seconds {spent:.2f} were spent in compiling", file=sys.stderr)


def _stream_one(start: Callable[[], Stream], warm_up: bool) -> Counts:
    """Prints an answer as it comes."""
    if warm_up:  # the second piece comes from the loop: all is compiled then
        with start() as first:
            list(itertools.islice(first, 2))
    pieces = start()
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print(flush=True)
    return Counts.of(pieces.generation)


def _answer_all(
    answer: Callable[..., Generation],
    entries: Sequence[Entry],
    arguments: argparse.Namespace,
) -> list[Counts]:
    """Answers in batches; prints the texts, or writes them to a file."""
    samples, counts = arguments.num_samples, []
    at_once = max(_ROWS // samples, 1)
    with ExitStack() as stack:
        output: TextIO | None = None
        if arguments.output is not None:
            output = stack.enter_context(arguments.output.open("w", encoding="utf-8"))
        for first in range(0, len(entries), at_once):
            batch = entries[first : first + at_once]
            # Row i of a call draws with its seed + i.
            call = functools.partial(
                answer, [e.prompt for e in batch], seed=arguments.seed + first * samples
            )
            generation = steady(call) if arguments.stats else call()
            counts.append(Counts.of(generation))
            for index, entry in enumerate(batch, start=first):
                rows = range((index - first) * samples, (index - first + 1) * samples)
                if output is not None:
                    for line in results(entry, index, generation, rows):
                        print(line, file=output, flush=True)
                    continue
                gap = "\n" if index else ""
                print(f"{gap}[{index + 1}/{len(entries)}] {_one_line(entry.shown)}")
                print("\n---\n".join(generation.texts[row] for row in rows), flush=True)
    return counts


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m infer",
        description="Generates text with a target model and its draft head. The text is the "
        "target's own; the head makes it come faster.",
    )
    prompts = parser.add_argument_group("prompts and results")
    prompts.add_argument(
        "prompt", nargs="*", help="each argument is one; without any, standard input is one"
    )
    prompts.add_argument(
        "--file",
        type=Path,
        metavar="PATH",
        help='one prompt per line; in a file *.jsonl each line is {"prompt": text} or '
        '{"messages": [...]}',
    )
    prompts.add_argument(
        "--interactive",
        action="store_true",
        help="a conversation: each line of standard input is a message",
    )
    prompts.add_argument(
        "--output", type=Path, metavar="PATH", help="write results as JSON lines here"
    )
    form = prompts.add_mutually_exclusive_group()
    form.add_argument(
        "--chat",
        action="store_true",
        help="prompts are messages of a user (default if the tokenizer has a chat template)",
    )
    form.add_argument("--raw", action="store_true", help="prompts are texts to continue")

    cli.add_model_options(parser)
    generation = parser.add_argument_group("generation")
    cli.add_sampling_options(generation)
    how = generation.add_mutually_exclusive_group()
    cli.add_tree_option(how)
    how.add_argument("--plain", action="store_true", help="generate without the head")
    generation.add_argument(
        "--acceptance",
        choices=("shared", "rejection"),
        default="shared",
        help="rejection: the paper's rule, for comparison (default %(default)s)",
    )
    generation.add_argument(
        "--stats",
        action="store_true",
        help="report the speed on standard error; what must be compiled is run before it counts",
    )
    return parser


def _check(parser: cli.Parser, arguments: argparse.Namespace) -> None:
    """Refuses options that do not go together."""
    if arguments.prompt and arguments.file is not None:
        parser.error("prompts come as arguments or from --file, not both")
    if arguments.interactive:
        for name in ("prompt", "file", "output", "raw"):
            if getattr(arguments, name):
                parser.error(f"--interactive reads standard input, so it takes no {name}")
        if arguments.num_samples > 1:
            parser.error("a conversation goes on from one answer, so --num_samples is 1")
    if arguments.logprobs and arguments.output is None:
        parser.error("--logprobs are written with the results: name a file with --output")
    if arguments.acceptance != "shared" and arguments.plain:
        parser.error("--acceptance is for generation with the head, not for --plain")


def _typed(parser: cli.Parser, arguments: argparse.Namespace) -> list[str]:
    """Prompts from the command line or standard input."""
    if not arguments.prompt and sys.stdin.isatty():
        parser.error("there is no prompt")
    texts: list[str] = arguments.prompt or [sys.stdin.read().removesuffix("\n")]
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            raise ValueError(f"prompt {number} of {len(texts)} is empty")
    return texts


def _one_line(text: str, width: int = 68) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else line[: width - 3] + "..."


def _statistics(counts: Counts) -> str:
    lines = [
        f"{counts.tokens} tokens in {counts.passes} target passes: "
        f"{counts.tokens_per_pass:.2f} tokens per pass",
        f"prefill {counts.prefill_seconds:.2f} s, decoding {counts.decode_seconds:.2f} s: "
        f"{counts.decoded_per_second:.1f} tokens per second",
    ]
    if counts.accepted:
        shares = ", ".join(f"{share:.0%}" for share in counts.acceptance)
        lines.append(f"passes that kept a draft token at depth 1, 2, ...: {shares}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(cli.run(main))
