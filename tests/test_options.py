"""Command lines: every field of a config can be set, and nothing else is accepted."""

import dataclasses
import re
from pathlib import Path

import pytest

from train import distill, synthesize
from train.config import DistillConfig
from train.options import build, load_config, option, options_parser
from train.synthesize import SynthesizeConfig

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Kinds:
    """One field of each kind."""

    flag: bool = option(True, "a switch")
    count: int = option(3, "a whole number, 100 % of them")
    rate: float = option(0.5, "a number")
    name: str = option("x", "a text")
    names: tuple[str, ...] = option(("a",), "some texts")
    rates: tuple[float, ...] = option((0.5,), "some numbers")
    maybe: str | None = option(None, "a text or none")
    limit: int | None = option(7, "a number or none")


def read(*argv: str, defaults: Kinds | None = None) -> Kinds:
    return build(Kinds, options_parser("Tests.", Kinds, defaults).parse_args(argv))


def refused(capsys: pytest.CaptureFixture[str], message: str, *argv: str) -> None:
    with pytest.raises(SystemExit) as exit:
        read(*argv)
    assert exit.value.code == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.match(f"error: .*{message}", error)


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        (["--flag", "false"], {"flag": False}),
        (["--flag", "False"], {"flag": False}),
        (["--flag", "no"], {"flag": False}),
        (["--flag", "0"], {"flag": False}),
        (["--flag", "yes"], {"flag": True}),
        (["--count", "-4"], {"count": -4}),
        (["--rate", "1e-3"], {"rate": 1e-3}),
        (["--rate=2"], {"rate": 2.0}),
        (["--name", ""], {"name": ""}),
        (["--names", "b", "c d"], {"names": ("b", "c d")}),
        (["--names"], {"names": ()}),
        (["--rates", "0", "1.5", "--count", "1"], {"rates": (0.0, 1.5), "count": 1}),
        (["--maybe", "y"], {"maybe": "y"}),
        (["--limit", ""], {"limit": None}),
        (["--limit", "0"], {"limit": 0}),
        ([], {}),
    ],
)
def test_values(argv: list[str], changed: dict) -> None:
    assert read(*argv) == dataclasses.replace(Kinds(), **changed)


def test_defaults_of_a_config_hold_where_the_command_line_is_silent() -> None:
    defaults = Kinds(flag=False, count=9, names=("p", "q"), maybe="z")
    assert read("--rate", "2", defaults=defaults) == dataclasses.replace(defaults, rate=2.0)


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--flag", "maybe"], "--flag: 'maybe' is neither true nor false"),
        (["--flag"], "--flag: expected one argument"),
        (["--count", "1.5"], "--count: invalid int value: '1.5'"),
        (["--limit", "x"], "--limit: invalid int value: 'x'"),
        (["--rates", "0.5", "x"], "--rates: invalid float value: 'x'"),
        (["--cuont", "1"], "unrecognized arguments: --cuont 1"),
        (["--coun", "1"], "unrecognized arguments: --coun 1"),  # an abbreviation
        (["--Count", "1"], "unrecognized arguments: --Count 1"),
        (["stray"], "unrecognized arguments: stray"),
    ],
)
def test_what_does_not_fit_is_refused(argv: list[str], message: str, capsys) -> None:
    refused(capsys, message, *argv)


@pytest.mark.parametrize(
    ("script", "config"), [(distill, DistillConfig), (synthesize, SynthesizeConfig)]
)
def test_help_explains_every_field(script, config, capsys) -> None:
    with pytest.raises(SystemExit) as exit:
        script.main(["--help"])
    assert exit.value.code == 0
    shown = " ".join(capsys.readouterr().out.split())
    for field in dataclasses.fields(config):
        line = f"--{field.name} .*?{re.escape(field.metadata['help'])} "
        assert re.search(line + re.escape(f"(default: {field.default})"), shown), field.name


OTHER = {
    "target": "folder",
    "init": "a head",
    "data": ("a.jsonl", "b/*.jsonl"),
    "output": "elsewhere",
    "max_length": 12,
    "join": True,
    "features": "cached",
    "eval_fraction": 0.25,
    "batch_size": 2,
    "epochs": 0.5,
    "num_layers": 1,
    "num_steps": 3,
    "draft_vocab": 9,
    "draft_vocab_file": "ids.txt",
    "learning_rate": 0.125,
    "copy_length": 3,
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "clip_norm": 2.0,
    "head_decay": 1.0,
    "hidden_weight": 0.0,
    "ce_weight": 4.0,
    "dtype": "float32",
    "seed": 5,
    "log_every": 6,
    "eval_every": 7,
    "save_every": 8,
    "keep": 9,
}


@pytest.fixture
def received(monkeypatch) -> list[DistillConfig]:
    """What the script hands to `distill`."""
    configs: list[DistillConfig] = []
    monkeypatch.setattr(distill, "distill", configs.append)
    return configs


def test_every_setting_of_distill_is_an_option(received, tmp_path) -> None:
    base = tmp_path / "base.py"
    base.write_text(
        "from train.config import DistillConfig\nconfig = DistillConfig(target='mine', epochs=3)\n"
    )
    assert OTHER.keys() == {field.name for field in dataclasses.fields(DistillConfig)}
    for name, value in OTHER.items():
        values = value if isinstance(value, tuple) else (value,)
        distill.main(["--config", str(base), f"--{name}", *map(str, values)])
        wanted = DistillConfig(target="mine", epochs=3)
        assert getattr(wanted, name) != value
        assert received.pop() == dataclasses.replace(wanted, **{name: value})


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("[!_]*.py")), ids=lambda p: p.stem)
def test_the_recipes_load(path: Path, received) -> None:
    distill.main([f"--config={path}"])
    assert received == [load_config(path, DistillConfig)]
    assert received[0] != DistillConfig()


def test_there_are_recipes() -> None:
    assert list((ROOT / "configs").glob("[!_]*.py"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "config .*recipe.py does not exist"),
        ("", "recipe.py defines no `config` of class DistillConfig"),
        ("config = {'epochs': 3}", "recipe.py defines no `config` of class DistillConfig"),
        (
            "from train.config import DistillConfig\nconfig = DistillConfig(epoch=3)",
            "recipe.py: TypeError: .*unexpected keyword argument 'epoch'",
        ),
        ("config = (", "recipe.py: SyntaxError: "),
    ],
)
def test_a_config_file_that_is_none(source: str | None, message: str, tmp_path, received) -> None:
    path = tmp_path / "recipe.py"
    if source is not None:
        path.write_text(source)
    with pytest.raises(ValueError, match=message):
        distill.main(["--config", str(path)])
    assert not received


@pytest.mark.parametrize("argv", [["--config"], ["--conf", "x.py"], ["--epoch", "3"]])
def test_distill_refuses_what_it_does_not_know(argv: list[str], capsys, received) -> None:
    with pytest.raises(SystemExit) as exit:
        distill.main(argv)
    assert exit.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not received


@pytest.mark.parametrize(
    ("name", "value", "bound"),
    [
        ("batch_size", 0, "at least 1"),
        ("num_steps", 0, "at least 1"),
        ("save_every", 0, "at least 1"),
        ("log_every", -1, "at least 1"),
        ("epochs", 0.0, "above 0"),
        ("learning_rate", float("nan"), "above 0"),
        ("draft_vocab", -1, "at least 0"),
        ("ce_weight", float("nan"), "at least 0"),
    ],
)
def test_numbers_that_are_too_small(name: str, value: float, bound: str) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be {bound}, got {value}$"):
        DistillConfig(**{name: value})


def test_features_are_one_of_two() -> None:
    with pytest.raises(ValueError, match=r"^features must be 'online' or 'cached', got 'wrong'$"):
        DistillConfig(features="wrong")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--turns", "0"], "^turns must be at least 1, got 0$"),
        (["--batch_size", "0"], "^batch_size must be at least 1, got 0$"),
        (["--answer_temperatures"], "^answer_temperatures holds no temperature$"),
    ],
)
def test_settings_of_synthesize_that_cannot_be(argv: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        synthesize.main(argv)
