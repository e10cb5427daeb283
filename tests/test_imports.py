"""Imports run one way, torch stays optional, and clover_jax neither prints nor parses arguments.

The rules are read off the syntax tree, so an import inside a function counts too, and a file that
nothing imports yet is checked like any other.
"""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# Package -> top-level modules that it must not import, wherever the import stands.
FORBIDDEN = {
    "clover_jax": {"infer", "train", "configs", "argparse"},
    "infer": {"train", "configs"},
    "train": set[str](),
    "configs": set[str](),
}


def imported(node: ast.AST) -> list[str]:
    """Returns the top-level names of the modules that `node` itself imports."""
    match node:
        case ast.Import(names=names):
            return [alias.name.partition(".")[0] for alias in names]
        case ast.ImportFrom(module=str(module), level=0):
            return [module.partition(".")[0]]
        case ast.Call(
            func=ast.Name(id="__import__" | "import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(module)), *_],
        ):
            return [module.partition(".")[0]]
    return []


def run_at_import(node: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes below `node` that are not inside a function."""
    for child in ast.iter_child_nodes(node):
        yield child
        if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from run_at_import(child)


def prints(node: ast.AST) -> bool:
    match node:
        case ast.Name(id="print") | ast.Attribute(attr="print"):
            return True
    return False


def violations(root: Path) -> list[str]:
    """Returns one line for each broken rule in the packages under `root`."""
    found = []
    for package, forbidden in FORBIDDEN.items():
        for path in sorted((root / package).rglob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            name = path.relative_to(root).as_posix()
            for node in ast.walk(tree):
                for module in sorted(forbidden.intersection(imported(node))):
                    found.append(f"{name}:{node.lineno} imports {module}")
                if package == "clover_jax" and prints(node):
                    found.append(f"{name}:{node.lineno} prints")
            for node in run_at_import(tree):
                if "torch" in imported(node):
                    found.append(f"{name}:{node.lineno} imports torch at module level")
    return found


def write(path: Path, source: str) -> None:
    path.parent.mkdir(parents=True)
    path.write_text(source)


def test_imports_run_one_way() -> None:
    assert violations(ROOT) == []


def test_every_package_is_checked() -> None:
    assert [p for p in FORBIDDEN if not list((ROOT / p).rglob("*.py"))] == []


TORCH = "imports torch at module level"


@pytest.mark.parametrize(
    ("file", "source", "fault"),
    [
        ("clover_jax/a.py", "import infer", "1 imports infer"),
        ("clover_jax/a.py", "import os, train.loss as t", "1 imports train"),
        ("clover_jax/a.py", "from configs import x", "1 imports configs"),
        ("clover_jax/weights/a.py", "def f():\n  from train.a import b", "2 imports train"),
        ("clover_jax/a.py", "import argparse", "1 imports argparse"),
        ("clover_jax/a.py", "def f(x):\n  print(x)", "2 prints"),
        ("clover_jax/a.py", "jax.debug.print('{}', x)", "1 prints"),
        ("infer/a.py", "import_module('train.loss')", "1 imports train"),
        ("infer/a.py", "if x:\n  import train", "2 imports train"),
        ("infer/a.py", "import torch.nn", f"1 {TORCH}"),
        ("train/a.py", "try:\n  from torch import nn\nexcept ImportError: ...", f"2 {TORCH}"),
        ("configs/a.py", "class A:\n  import torch", f"2 {TORCH}"),
    ],
)
def test_a_broken_rule_is_found(tmp_path: Path, file: str, source: str, fault: str) -> None:
    write(tmp_path / file, source)
    assert violations(tmp_path) == [f"{file}:{fault}"]


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("clover_jax/a.py", "from . import infer\nfrom .train import x\nimport inference"),
        ("infer/a.py", "import clover_jax.tree, argparse\nprint('text')"),
        ("infer/a.py", "def f():\n  import torch"),
        ("train/a.py", "from infer import generate\nimport configs"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, file: str, source: str) -> None:
    write(tmp_path / file, source)
    assert violations(tmp_path) == []
