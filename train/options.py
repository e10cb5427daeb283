"""Command-line options from a frozen dataclass: every field is one, nothing else is accepted."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from infer.cli import Parser

T = TypeVar("T")


def option(default: Any, help: str) -> Any:
    """A dataclass field with a default and the line that --help shows."""
    return dataclasses.field(default=default, metadata={"help": help})


def options_parser(description: str, cls: type[Any], defaults: Any = None) -> Parser:
    """A parser with one option per field of `cls`, a dataclass of `option` fields.

    Tuple fields take any number of values; booleans take true/false, yes/no, 1/0.

    Args:
      description: shown by --help, with the defaults.
      defaults: an instance that the options start from; by default the class's own values.
    """
    parser = Parser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        kind = hints[field.name]
        many = typing.get_origin(kind) is tuple
        value = field.default if defaults is None else getattr(defaults, field.name)
        parser.add_argument(
            f"--{field.name}",
            type=_reader(typing.get_args(kind)[0] if many else kind),
            nargs="*" if many else None,
            default=value,
            metavar=field.name.upper(),
            help=field.metadata["help"].replace("%", "%%"),
        )
    return parser


def build(cls: type[T], arguments: argparse.Namespace) -> T:
    """The `cls` that parsed arguments describe."""
    values = {f.name: getattr(arguments, f.name) for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def load_config(path: str | Path, cls: type[T]) -> T:
    """The `config` that a Python file defines.

    Raises:
      ValueError: no such file, a file that fails, or no `config` of this class in it.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"config {path} does not exist")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ValueError(f"{path}: {type(error).__name__}: {error}") from error
    config = getattr(module, "config", None)
    if not isinstance(config, cls):
        raise ValueError(f"{path} defines no `config` of class {cls.__name__}")
    return config


def _reader(kind: Any) -> Any:
    if isinstance(kind, types.UnionType):  # X | None: the empty string is None
        inner = _reader(next(a for a in typing.get_args(kind) if a is not type(None)))

        def optional(text: str) -> Any:
            return None if text == "" else inner(text)

        optional.__name__ = getattr(inner, "__name__", "value")
        return optional
    return _boolean if kind is bool else kind


def _boolean(text: str) -> bool:
    known = {"true": True, "yes": True, "1": True, "false": False, "no": False, "0": False}
    if text.lower() not in known:
        raise argparse.ArgumentTypeError(f"{text!r} is neither true nor false")
    return known[text.lower()]
