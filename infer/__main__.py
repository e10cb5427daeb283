"""Text on the command line: `python -m infer "Why is the sky blue?"`, `--help` for the rest."""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from infer import cli
from infer.call import Prompt
from infer.counts import Counts, total
from infer.engine import generate, speculative_generate, stream
from infer.session import Generation
from infer.timing import steady

_ROWS = 8  # prompts that are answered together


def main(argv: Sequence[str] | None = None) -> None:
    """Answers prompts: one as a stream, several in order."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    texts = _read_prompts(parser, arguments)
    model = cli.load_model(parser, arguments)
    if model.tokenizer is None:
        raise ValueError("this model has no tokenizer; from Python it takes prompts of token ids")
    if model.draft is None and not arguments.plain:
        raise ValueError("this model has no draft head: name one with --draft, or use --plain")

    chat = arguments.chat or (model.tokenizer.chat_template is not None and not arguments.raw)
    prompts: list[Prompt] = [[{"role": "user", "content": t}] if chat else t for t in texts]
    settings = {
        name: getattr(arguments, name)
        for name in ("max_new_tokens", "temperature", "top_p", "top_k")
    }
    tree = None if arguments.plain else arguments.tree
    answer: Callable[..., Generation] = (
        functools.partial(generate, model, **settings)
        if tree is None
        else functools.partial(speculative_generate, model, tree=tree, **settings)
    )

    if len(prompts) == 1:
        for piece in stream(model, prompts[0], seed=arguments.seed, tree=tree, **settings):
            print(piece, end="", flush=True)
        print(flush=True)
        if arguments.stats:
            again = steady(functools.partial(answer, prompts, seed=arguments.seed))
            print(_statistics(Counts.of(again)), file=sys.stderr)
        return

    counts = []
    for first in range(0, len(prompts), _ROWS):
        # Row i of a call draws with its seed + i.
        call = functools.partial(
            answer, prompts[first : first + _ROWS], seed=arguments.seed + first
        )
        generation = steady(call) if arguments.stats else call()
        for index, text in enumerate(generation.texts, start=first):
            gap = "\n" if index else ""
            print(f"{gap}[{index + 1}/{len(prompts)}] {_one_line(texts[index])}\n{text}")
        sys.stdout.flush()
        counts.append(Counts.of(generation))
    if arguments.stats:
        print(_statistics(total(counts)), file=sys.stderr)


def _parser() -> cli.Parser:
    parser = cli.Parser(
        prog="python -m infer",
        description="Generates text with a target model and its draft head. The text is the "
        "target's own; the head makes it come faster.",
    )
    prompts = parser.add_argument_group("prompts")
    prompts.add_argument(
        "prompt", nargs="*", help="each argument is one; without any, standard input is one"
    )
    prompts.add_argument(
        "--file", type=Path, metavar="PATH", help="one prompt per line; blank lines are skipped"
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
    cli.add_length_and_temperature(generation)
    generation.add_argument(
        "--top_p",
        type=cli.number(0.0, 1.0),
        default=1.0,
        metavar="P",
        help="keep the fewest most likely tokens whose probability reaches P; 1 is off "
        "(default %(default)g)",
    )
    generation.add_argument(
        "--top_k",
        type=cli.whole_number(0),
        default=0,
        metavar="K",
        help="keep the K most likely tokens; 0 is off (default %(default)s)",
    )
    generation.add_argument(
        "--seed",
        type=cli.whole_number(0),
        default=0,
        metavar="N",
        help="of the first prompt; each next one has one more (default %(default)s)",
    )
    how = generation.add_mutually_exclusive_group()
    cli.add_tree_option(how)
    how.add_argument("--plain", action="store_true", help="generate without the head")
    generation.add_argument(
        "--stats",
        action="store_true",
        help="generate a second time, when all is compiled, and report its speed on standard error",
    )
    return parser


def _read_prompts(parser: cli.Parser, arguments: argparse.Namespace) -> list[str]:
    if arguments.prompt and arguments.file is not None:
        parser.error("prompts come as arguments or from --file, not both")
    if arguments.file is not None:
        texts = [line for line in cli.read_text(arguments.file).splitlines() if line.strip()]
        if not texts:
            raise ValueError(f"{arguments.file} holds no prompt")
        return texts
    if not arguments.prompt and sys.stdin.isatty():
        parser.error("there is no prompt")
    texts = arguments.prompt or [sys.stdin.read().removesuffix("\n")]
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
