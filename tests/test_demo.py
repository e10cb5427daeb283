"""What `make demo` shows, on a tiny model."""

from pathlib import Path

import pytest
from tiny_chat import chain_model, cycle_table
from tiny_head import perfect_head

from infer import cli, demo, load
from infer.load import Model
from infer.timing import fastest_dtype

SAID = "abcdefghij"


def test_the_demo(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def tiny(name: str, dtype: str) -> Model:
        assert (name, dtype) == ("smollm2-135m", fastest_dtype())
        target = chain_model(tmp_path / "target", cycle_table(SAID))
        head = perfect_head(target, tmp_path / "head")
        return load(target=target, draft=head, dtype=dtype)

    monkeypatch.setattr(demo, "load", tiny)
    monkeypatch.setattr(demo, "NEW_TOKENS", 20)
    monkeypatch.setattr(demo, "REPETITIONS", 2)
    assert cli.run(demo.main, []) == 0
    output, errors = capsys.readouterr()
    assert errors == ""
    assert max(len(line) for line in output.splitlines()) <= 80
    assert f"> {demo.PROMPTS[0]}\n\n{SAID}\n" in output
    *_, speed, passes, same = output.splitlines()
    assert speed.startswith("tokens per second")
    assert speed.endswith(" times as fast")
    # The tree is three deep along its best child: a, bcde, fghi, j<end>.
    assert passes.split()[-2:] == ["1.00", "2.75"]
    assert same.split()[-3:] == ["3", "of", "3"]


def test_without_a_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = chain_model(tmp_path / "target", cycle_table(SAID))
    monkeypatch.setattr(demo, "load", lambda _, dtype: load(target=target, dtype=dtype))
    monkeypatch.setattr(demo, "NEW_TOKENS", 20)
    assert cli.run(demo.main, []) == 0
    output, _ = capsys.readouterr()
    assert "what follows is plain generation" in output
    assert output.endswith(f"\n\n{SAID}\n\n")


def test_a_difference_is_shown() -> None:
    counts = demo.Counts(tokens=2, passes=1, decode_seconds=1.0)
    text = demo.table(demo.Comparison(counts, counts, ["'why': " + "other words " * 20]))
    assert "2 of 3" in text
    assert "1.00 times as fast" in text
    assert "'why': other words" in text
    assert max(len(line) for line in text.splitlines()) <= demo.WIDTH


def test_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        demo.main(["--fast"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.startswith("error: unrecognized arguments: --fast")


@pytest.mark.parametrize(
    ("pieces", "lines"),
    [
        (["one two", " three"], ["one two", "three"]),
        (["on", "e t", "wo"], ["one two"]),
        (["a", "bcdefghijkl", "mnop q"], ["abcdefghijklmnop", "q"]),
        (["one\n", "\n  two\nthree"], ["one", "", "  two", "three"]),
        (["exactly 10"], ["exactly 10"]),
        (["exactly 101"], ["exactly", "101"]),
        ([], [""]),
    ],
)
def test_streamed_text_is_broken_between_words(pieces: list[str], lines: list[str]) -> None:
    assert "".join(demo.wrapped(pieces, 10)).split("\n") == lines


def test_a_word_is_shown_when_it_is_complete() -> None:
    shown: list[str] = []

    def pieces():
        for piece in ("one ", "two", " three"):
            yield piece
            shown.append("|")

    for text in demo.wrapped(pieces(), 10):
        shown.append(text)
    assert "".join(shown) == "one|| two|\nthree"
