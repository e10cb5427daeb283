"""What the commands share: options of the model, and errors as one line without a traceback."""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NoReturn

from clover_jax.tree import AnyTree, parse_tree
from infer.compile_cache import use_compile_cache
from infer.load import Model, load
from infer.options import Options

DEFAULT_MODEL = "smollm2-135m"

TreeOption = AnyTree | Literal["auto"]


class Parser(argparse.ArgumentParser):
    """Takes options as they are spelt in full, and reports a wrong one in one line."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def run(command: Callable[[Sequence[str] | None], None], argv: Sequence[str] | None = None) -> int:
    """Runs a command and returns its exit status: 1 after an error the user can put right."""
    use_compile_cache()
    try:
        command(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader has gone, as in `... | head`; nothing more may be written when Python exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
    except (ValueError, OSError) as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def add_model_options(parser: Parser) -> None:
    """--model, --target, --draft and --dtype; `load_model` reads them."""
    group = parser.add_argument_group("model")
    which = group.add_mutually_exclusive_group()
    which.add_argument(
        "--model",
        metavar="NAME",
        help=f"a built-in model with its head ({DEFAULT_MODEL}, unless --target is given)",
    )
    which.add_argument(
        "--target", metavar="PLACE", help="a Hugging Face folder, a GGUF file or a hub name"
    )
    group.add_argument(
        "--draft", metavar="PLACE", help="the head for --target: a folder or a hub name"
    )
    group.add_argument(
        "--draft_vocab",
        type=_size_or_path,
        metavar="N",
        help="how many tokens the head may propose, or a file of token ids (as it was trained)",
    )
    group.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        help="of the matrix products (float32 on a CPU, bfloat16 elsewhere)",
    )


def load_model(parser: Parser, arguments: argparse.Namespace) -> Model:
    """The model that the options of `add_model_options` name."""
    if arguments.draft is not None and arguments.target is None:
        parser.error("--draft goes with --target; a built-in model brings its own head")
    name = arguments.model
    if arguments.target is None and name is None:
        name = DEFAULT_MODEL
    return load(
        name,
        target=arguments.target,
        draft=arguments.draft,
        dtype=arguments.dtype,
        draft_vocab=arguments.draft_vocab,
    )


def _size_or_path(text: str) -> int | Path:
    return int(text) if text.isdecimal() else Path(text)


def add_length(group: argparse._ActionsContainer) -> None:
    """--max_new_tokens."""
    group.add_argument(
        "--max_new_tokens",
        type=whole_number(1),
        default=128,
        metavar="N",
        help="tokens at most (default %(default)s)",
    )


def add_length_and_temperature(group: argparse._ActionsContainer) -> None:
    """--max_new_tokens and --temperature."""
    add_length(group)
    group.add_argument(
        "--temperature",
        type=number(0.0),
        default=0.0,
        metavar="T",
        help="0 is greedy (default %(default)g)",
    )


def add_sampling_options(group: argparse._ActionsContainer) -> None:
    """All settings of a call, by the names that they have in Python; `sampling_settings` reads
    them."""
    add_length_and_temperature(group)

    def add(name: str, reader: Callable[[str], Any], default: Any, meaning: str) -> None:
        metavar = "N" if isinstance(default, int) else "X"
        group.add_argument(
            f"--{name}",
            type=reader,
            default=default,
            metavar=metavar,
            help=f"{meaning} (default %(default)s)",
        )

    add("top_p", number(0.0, 1.0), 1.0, "keep the fewest likely tokens that reach this; 1 is off")
    add("top_k", whole_number(0), 0, "keep so many of the most likely tokens; 0 is off")
    add("min_p", number(0.0, 1.0), 0.0, "drop tokens below this share of the likeliest; 0 is off")
    add("repetition_penalty", number(1e-3, 1e3), 1.0, "on tokens of prompt and text; 1 is off")
    add("presence_penalty", number(-1e3, 1e3), 0.0, "on tokens that are in the text; 0 is off")
    add("frequency_penalty", number(-1e3, 1e3), 0.0, "on each time a token is there; 0 is off")
    add("min_new_tokens", whole_number(0), 0, "no end before so many tokens")
    add("num_samples", whole_number(1), 1, "texts per prompt")
    add("seed", whole_number(0), 0, "of the first text; each next one has one more")
    group.add_argument(
        "--logit_bias",
        type=_bias,
        action="append",
        default=[],
        metavar="ID=X",
        help="what the logit of a token gains; may be repeated",
    )
    for name, meaning in (
        ("bad_words", "a text that must not come; may be repeated"),
        ("stop", "a text that ends the answer, and is not part of it; may be repeated"),
    ):
        group.add_argument(f"--{name}", action="append", default=[], metavar="TEXT", help=meaning)
    group.add_argument(
        "--stop_token_ids",
        type=whole_number(0),
        action="append",
        default=[],
        metavar="ID",
        help="a token that ends the answer; may be repeated",
    )
    group.add_argument(
        "--logprobs",
        action="store_true",
        help="write the log-probability of each token beside it",
    )


def sampling_settings(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_sampling_options` as arguments of `infer.generate`."""
    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", *Options.__annotations__)
    settings = {name: getattr(arguments, name) for name in names}
    return settings | {"logit_bias": dict(arguments.logit_bias)}


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not TOKEN_ID=NUMBER") from None


def add_tree_option(group: argparse._ActionsContainer) -> None:
    """--tree, a tree or "auto"."""
    group.add_argument(
        "--tree",
        type=_tree,
        default="auto",
        help="what the head proposes: auto (the fastest that was found on this machine), paper, "
        "chain-3, dynamic-8 or child-rank paths such as "
        "[[0],[1],[0,0]] "
        "(default %(default)s)",
    )


def _tree(text: str) -> TreeOption:
    if text == "auto":
        return "auto"
    paths = text
    if text.lstrip().startswith("["):
        try:
            paths = json.loads(text)
        except json.JSONDecodeError as error:
            raise argparse.ArgumentTypeError(f"{text} is not JSON: {error}") from None
    try:
        return parse_tree(paths)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def whole_number(low: int) -> Callable[[str], int]:
    """An option's value: a whole number of at least `low`."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"must be at least {low}, not {text}")
        return value

    return read


def number(low: float, high: float = math.inf) -> Callable[[str], float]:
    """An option's value: a finite number between `low` and `high`."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not (math.isfinite(value) and low <= value <= high):
            bounds = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            raise argparse.ArgumentTypeError(f"must be {bounds}, not {text}")
        return value

    return read


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises:
      ValueError: another encoding.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from None
