"""Conversations that a model writes itself: filters, openings, and runs that were cut short."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_chat

from infer.load import Model, load
from train import synthesize
from train.data import load_corpus
from train.synthesize import SynthesizeConfig, read_openings, resume, user_turn_prefix

BATCH = 6


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    """Letters at random, each followed by the end of the turn with a chance of one in six."""
    table = np.random.default_rng(0).normal(size=(tiny_chat.V, tiny_chat.V))
    table[:, : tiny_chat.END] = -30.0
    others = np.log(np.exp(table[:, tiny_chat.END + 1 :]).sum(axis=1))
    table[:, tiny_chat.END] = others - np.log(5)
    return tiny_chat.chain_model(tmp_path_factory.mktemp("chain") / "target", table)


@pytest.fixture(scope="module")
def model(target: Path) -> Model:
    return load(target=target)


def config(**fields: Any) -> SynthesizeConfig:
    base = SynthesizeConfig(
        batch_size=BATCH,
        user_tokens=12,
        answer_tokens=12,
        user_temperature=1.0,
        user_top_p=1.0,
        answer_temperatures=(1.0, 0.8),
    )
    return dataclasses.replace(base, **fields)


def write_batch(model: Model, settings: SynthesizeConfig, index: int = 0) -> Any:
    return synthesize.write_batch(model, settings, read_openings(settings), index)


def argv(target: Path, output: Path, **fields: Any) -> list[str]:
    words = ["--target", str(target), "--output", str(output), "--user_temperature", "1"]
    words += ["--user_top_p", "1", "--answer_temperatures", "1", "0.8"]
    fields = {"batch_size": BATCH, "user_tokens": 12, "answer_tokens": 12} | fields
    return [*words, *(str(w) for name, value in fields.items() for w in (f"--{name}", value))]


@pytest.fixture(scope="module")
def written(target: Path, tmp_path_factory) -> Path:
    """Four batches in one go."""
    output = tmp_path_factory.mktemp("straight") / "new" / "chats.jsonl"
    synthesize.main(argv(target, output, conversations=4 * BATCH - 1))
    return output


def records(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_every_record_is_a_training_sample(written: Path) -> None:
    corpus, report = load_corpus(written, tiny_chat.tokenizer(), 128)
    assert not report.skipped
    assert report.kept == len(corpus) == len(records(written)) > BATCH
    for record in records(written):
        assert [m["role"] for m in record["messages"]] == ["user", "assistant"]
        assert all(m["content"].strip() for m in record["messages"])
    assert {record["batch"] for record in records(written)} == {0, 1, 2, 3}


def test_the_samples_are_what_the_target_would_read(written: Path, model: Model) -> None:
    """The tokens of the answer stand where the target wrote them."""
    corpus, _ = load_corpus(written, tiny_chat.tokenizer(), 128)
    for record, i in zip(records(written), range(len(corpus)), strict=True):
        ids, mask = corpus.sample(i)
        user, answer = (m["content"] for m in record["messages"])
        assert model.tokenizer.decode(ids) == f"<user>{user}<end><bot>{answer}<end>"
        assert model.tokenizer.decode(ids[mask]) == f"{answer}<end>"


def cuts(text: bytes) -> list[int]:
    """Lengths to cut to: around line ends, and some in between."""
    ends = [i + 1 for i, byte in enumerate(text) if byte == ord("\n")]
    around = {end + d for end in ends for d in (-1, 0, 1)} - {len(text) + 1}
    return sorted(around | set(range(0, len(text), 97)))


def test_resume_cuts_off_the_last_batch_unless_it_is_whole(written: Path, tmp_path: Path) -> None:
    text = written.read_bytes()
    lines = text.splitlines(keepends=True)
    batches = [json.loads(line)["batch"] for line in lines]
    # The file as it was after 0, 1, ... batches.
    after = [b"".join(lines[: np.searchsorted(batches, k)]) for k in range(5)]
    assert after[0] == b""
    assert after[4] == text
    cut, settings = tmp_path / "cut.jsonl", json.loads(lines[0])["settings"]
    for size in cuts(text):
        cut.write_bytes(text[:size])
        following, kept = resume(cut, settings)
        assert cut.read_bytes() == after[following]
        assert kept == after[following].count(b"\n")
        assert following == max(k for k in range(5) if len(after[k]) <= size)
    assert resume(tmp_path / "none.jsonl", settings) == (0, 0)


def test_a_cut_run_ends_like_one_that_was_not(written: Path, target: Path, tmp_path: Path) -> None:
    text, output = written.read_bytes(), tmp_path / "chats.jsonl"
    second = next(i for i, r in enumerate(records(written)) if r["batch"] == 2)
    boundary = sum(len(line) for line in text.splitlines(keepends=True)[: second + 1])
    for size in (boundary, boundary + 20):
        output.write_bytes(text[:size])
        synthesize.main(argv(target, output, conversations=4 * BATCH - 1))
        assert output.read_bytes() == text


def test_a_finished_run_stays_and_can_be_made_longer(
    written: Path, target: Path, tmp_path: Path, capsys
) -> None:
    text, output = written.read_bytes(), tmp_path / "chats.jsonl"
    output.write_bytes(text)
    synthesize.main(argv(target, output, conversations=4 * BATCH))
    assert output.read_bytes() == text
    kept = len(records(written))
    assert capsys.readouterr().out == f"{output}: {kept} conversations\n"
    synthesize.main(argv(target, output, conversations=4 * BATCH + 1))
    assert output.read_bytes().startswith(text)
    assert records(output)[-1]["batch"] == 4


def test_a_file_of_someone_else_is_left_alone(target: Path, tmp_path: Path) -> None:
    output = tmp_path / "chats.jsonl"
    for content in ('{"messages": []}\n', "[1, 2]\n", "text\n", "3\n"):
        output.write_text(content)
        with pytest.raises(ValueError, match="has lines that this script did not write"):
            synthesize.main(argv(target, output))
        assert output.read_text() == content


def test_other_settings_are_refused(written: Path, target: Path, tmp_path: Path) -> None:
    output = tmp_path / "chats.jsonl"
    output.write_bytes(written.read_bytes())
    openings = tmp_path / "openings.txt"
    openings.write_text("why ")
    for other in ({"answer_tokens": 13}, {"openings": openings}):
        with pytest.raises(ValueError, match="was written with other settings"):
            synthesize.main(argv(target, output, conversations=5 * BATCH, **other))
        assert output.read_bytes() == written.read_bytes()


def test_batches_depend_on_the_seed_and_on_their_number(model: Model) -> None:
    first = write_batch(model, config(), 0)
    assert write_batch(model, config(), 0) == first
    assert write_batch(model, config(), 1) != first
    assert write_batch(model, config(seed=1), 0) != first


# What the model says is given here, to see what becomes of it.


@dataclasses.dataclass
class Script:
    """Stands for `generate`: gives the next texts and remembers what it was asked."""

    turns: list[list[tuple[str, str]]]  # per call: text and finish reason of each row
    batch_size: int
    calls: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)

    def __call__(
        self,
        model: Model,
        prompts: Any,
        budget: list[int],
        temperature: float,
        top_p: float = 1.0,
        *,
        seed: int,
    ) -> Any:
        said = self.turns[len(self.calls)]
        asked = [prompt for prompt, tokens in zip(prompts, budget, strict=True) if tokens]
        assert len(asked) == len(said)
        # Filled up, so that nothing is compiled anew: user turns have half as many rows more.
        rows = self.batch_size if len(self.calls) % 2 else self.batch_size * 3 // 2
        assert len(prompts) == rows
        self.calls.append((asked, max(budget), temperature, top_p))
        self.seeds.append(seed)
        texts, reasons = zip(*said, *[("", "length")] * (len(prompts) - len(said)), strict=True)

        class Said:
            pass

        answer = Said()
        answer.texts, answer.finish_reasons = list(texts), list(reasons)
        return answer


def scripted(monkeypatch, batch_size: int, *turns: list[tuple[str, str]]) -> Script:
    script = Script(list(turns), batch_size)
    monkeypatch.setattr(synthesize, "generate", script)
    return script


def chat(*texts: str) -> list[dict[str, str]]:
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


def test_filters(model: Model, monkeypatch) -> None:
    script = scripted(
        monkeypatch,
        4,
        [
            ("one ", "eos"),
            ("too long", "length"),
            (" ", "eos"),
            ("two", "eos"),
            ("three", "eos"),
            ("four", "eos"),
        ],
        [("cut", "length"), (" \n", "eos"), ("", "eos"), ("fine", "eos")],
    )
    found = write_batch(model, config(batch_size=4))
    assert found == [chat("one", "cut"), chat("four", "fine")]
    (asked, *settings), (answered, *others) = script.calls
    assert settings == [12, 1.0, 1.0]
    assert asked == [[tiny_chat.USER]] * 6
    assert answered == [chat("one"), chat("two"), chat("three"), chat("four")]
    assert others == [12, 1.0, 1.0]
    # Rows use seed, seed + 1, ...: no two rows of a batch share one.
    assert script.seeds[1] - script.seeds[0] >= 6


def test_user_turns_beyond_the_batch_are_left(model: Model, monkeypatch) -> None:
    script = scripted(monkeypatch, 3, [(text, "eos") for text in "abcd"], [("x", "eos")] * 3)
    assert write_batch(model, config(batch_size=3)) == [chat(text, "x") for text in "abc"]
    assert len(script.calls) == 2


def test_temperatures_take_turns(model: Model, monkeypatch) -> None:
    said = [[("u", "eos")] * 9, [("a", "eos")] * BATCH]
    for index, temperature in enumerate((1.0, 0.8, 1.0)):
        script = scripted(monkeypatch, BATCH, *said)
        write_batch(model, config(), index)
        assert script.calls[1][2] == temperature


def test_several_turns(model: Model, monkeypatch) -> None:
    """A cut answer ends its conversation; the others go on to the last turn."""
    script = scripted(
        monkeypatch,
        3,
        [("u", "eos")] * 4,
        [("a", "eos"), ("cut", "length"), ("b", "eos")],
        [("v", "eos"), ("w", "eos")],
        [("c", "eos"), ("d", "length")],
    )
    found = write_batch(model, config(batch_size=3, turns=2))
    # Those that were cut come first.
    assert found == [chat("u", "cut"), chat("u", "b", "w", "d"), chat("u", "a", "v", "c")]
    assert script.calls[2][0] == [
        model.tokenizer.encode(f"<user>u<end><bot>{answer}<end><user>") for answer in "ab"
    ]
    assert all(b - a >= 4 for a, b in zip(script.seeds, script.seeds[1:], strict=False))


def test_a_turn_that_fails_leaves_the_turns_before_it(model: Model, monkeypatch) -> None:
    scripted(
        monkeypatch,
        3,
        [("u", "eos")] * 4,
        [("a", "eos"), ("b", "eos"), ("c", "eos")],
        [("too long", "length"), ("v", "eos"), ("w", "eos")],
        [(" ", "eos"), ("d", "eos")],
    )
    found = write_batch(model, config(batch_size=3, turns=2))
    assert found == [chat("u", "a"), chat("u", "b"), chat("u", "c", "w", "d")]


def test_openings(model: Model, monkeypatch, tmp_path: Path) -> None:
    """One per line; an empty line is none, and a space at the end belongs to it."""
    path = tmp_path / "openings.txt"
    path.write_text("one:\\n\\ntwo\n")
    settings = config(batch_size=64, openings=str(path))
    assert read_openings(settings).lines == ("one:\n\ntwo",)
    assert read_openings(config()).lines == ("",)
    path.write_text("what is \n\nwhy\n")

    script = scripted(monkeypatch, 64, [(" x", "eos")] * 96, [("a", "eos")] * 64)
    found = write_batch(model, settings)
    starts = [model.tokenizer.decode(ids).removeprefix("<user>") for ids in script.calls[0][0]]
    assert set(starts) == {"what is ", "", "why"}
    assert [messages[0]["content"] for messages in found] == [
        f"{start} x".strip() for start in starts[:64]
    ]

    # An opening to which nothing was added is no question.
    scripted(monkeypatch, 2, [("", "eos"), (" ", "eos"), ("cut", "length")])
    path.write_text("why ")
    assert write_batch(model, config(batch_size=2, openings=str(path))) == []


def test_openings_around_texts(model: Model, monkeypatch, tmp_path: Path, capsys) -> None:
    """{text} is one of the answers of other conversations; user_tokens 0 adds nothing to it."""
    texts, path = tmp_path / "texts.jsonl", tmp_path / "openings.txt"
    records = [{"messages": chat("q", "one", "r", " two ")}, {"no": "record"}]
    texts.write_text("".join(json.dumps(record) + "\n" for record in records))
    path.write_text("sum up {text} and {text}.\n{text}\n\n")
    plain = tmp_path / "plain.txt"
    plain.write_text("why\n")
    settings = config(batch_size=64, user_tokens=0, openings=str(path), texts=str(texts))
    opening = [f"sum up {a} and {b}." for a in ("one", "two") for b in ("one", "two")]

    answered = []
    monkeypatch.setattr(
        synthesize, "_write", lambda model, size, asked, **_: answered.extend(asked)
    )
    with pytest.raises(TypeError):  # nothing came back
        write_batch(model, settings)
    # The empty line is no user turn.
    assert {messages[0]["content"] for messages in answered} == {"one", "two", *opening}
    assert 20 < len(answered) < 64
    assert "1 of 2 records left out; the first: " in capsys.readouterr().out

    for other, message in (
        ({"texts": ""}, "an opening holds {text}, but there are no texts"),
        ({"texts": str(path)}, "holds no answers"),
        ({"openings": ""}, "give --openings"),
        ({"turns": 2}, "one user turn, not the 2 of turns"),
        ({"openings": str(plain)}, "no opening holds {text}"),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            read_openings(dataclasses.replace(settings, **other))


def test_user_turn_prefix(model: Model) -> None:
    assert user_turn_prefix(model.tokenizer, []) == "<user>"
    assert user_turn_prefix(model.tokenizer, chat("q", "a")) == "<user>q<end><bot>a<end><user>"


def test_a_missing_openings_file(target: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape("none.txt")):
        synthesize.main(argv(target, tmp_path / "chats.jsonl", openings="none.txt"))


def test_a_target_without_a_chat_template(tmp_path: Path) -> None:
    target = tiny_chat.random_model(tmp_path / "target")
    (target / "chat_template.jinja").unlink()
    with pytest.raises(ValueError, match="has no tokenizer with a chat template"):
        synthesize.main(argv(target, tmp_path / "chats.jsonl"))
