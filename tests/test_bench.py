"""`python -m infer.bench`: exact counts, honest times, and a report that machines can read."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tiny_chat import BOT, END, chain_model, cycle_table, ids, random_model
from tiny_head import perfect_head

from clover_jax.chat import encode_prompt
from clover_jax.tree import PLAIN as PLAIN_TREE
from infer import bench, bench_plots, cli, generate, load
from infer.agreement import first_difference, forced_scores
from infer.bench_report import LOOKUP, PLAIN, SPECULATIVE, TRANSFORMERS, Record, Run
from infer.counts import Counts, total
from infer.load import Model
from infer.questions import Question, read_questions
from infer.session import Generation, Stats
from infer.timing import steady

SAID = "abcdefghij"  # what the target answers to any message: eleven tokens with <end>
QUESTIONS = [
    {"question_id": 1, "category": "chat", "turns": ["hello"]},
    {"question_id": "b", "task": "math", "category": "ignored", "turns": ["1 2"]},
    {"question_id": 3, "task": "chat", "turns": ["a b c d"]},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench")
    perfect_head(chain_model(folder / "target", cycle_table(SAID)), folder / "head")
    write(folder / "questions.jsonl", QUESTIONS)
    return folder


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return load(target=random_model(tmp_path_factory.mktemp("random") / "target"))


def write(path: Path, questions: list[Any]) -> Path:
    path.write_text("\n".join(json.dumps(q) for q in questions) + "\n", encoding="utf-8")
    return path


def options(folder: Path, *more: str) -> list[str]:
    return [
        *("--target", str(folder / "target"), "--draft", str(folder / "head")),
        *("--tree", "chain-3", "--max_new_tokens", "20", *more),
    ]


def report(
    capsys: pytest.CaptureFixture[str], folder: Path, *more: str
) -> tuple[str, dict[str, Any]]:
    """The Markdown and the JSON, of the first temperature, of a run over QUESTIONS."""
    path = folder / "result.json"
    status = cli.run(
        bench.main,
        options(folder, "--prompts", str(folder / "questions.jsonl"), "--json", str(path), *more),
    )
    output, errors = capsys.readouterr()
    assert (status, errors) == (0, "")
    return output, json.loads(path.read_text())["runs"][0]


def tables(text: str) -> list[list[list[str]]]:
    """Cells of every row of every table, headers included and rules left out."""
    found: list[list[list[str]]] = [[]]
    for line in text.splitlines():
        if not line.startswith("|"):
            found += [[]] if found[-1] else []
            continue
        assert line.endswith("|")
        cells = [cell.strip() for cell in line[1:-1].split("|")]
        if all(set(cell) <= {"-", ":"} for cell in cells):
            assert len(found[-1]) == 1
            assert len(cells) == len(found[-1][0])
        else:
            found[-1].append(cells)
    return [table for table in found if table]


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    status = cli.run(bench.main, argv)
    output, errors = capsys.readouterr()
    assert (status, output, errors.count("\n")) == (1, "", 1)
    return errors


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_shows_what_was_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], suffix: str
) -> None:
    path = folder / f"speed{suffix}"
    report(capsys, folder, "--plot", str(path), "--per_task", "1")
    head = path.read_bytes()[:400]
    assert head.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in head


def test_the_panels_of_the_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure()
    speed, depth = figure.subplots(1, 2)
    counts = {
        PLAIN: Counts(tokens=30, decode_seconds=3.0),
        SPECULATIVE: Counts(tokens=30, verified=10, accepted=(8, 4), decode_seconds=1.5),
    }
    records = [Record("1", "chat", 3, {}, counts, {})]
    runs = [Run(t, records, [], []) for t in (0.0, 1.0)]
    bench_plots._speed_up(speed, runs)
    assert [bar.get_height() for bar in speed.patches] == [2.0] * 4  # a task and all, twice
    assert [text.get_text() for text in speed.get_xticklabels()] == ["chat", "all tasks"]
    bench_plots._acceptance(depth, runs)
    assert list(depth.lines[0].get_ydata()) == [0.8, 0.4]


# Counts


def test_counts_are_exact(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each text comes as a, bcde, fghi, j<end>: four passes, three of which verify drafts."""
    _, result = report(capsys, folder)
    for prompt in result["turns"]:
        plain, speculative = (prompt["systems"][name] for name in (PLAIN, SPECULATIVE))
        assert plain["token_ids"] == speculative["token_ids"] == [*ids(SAID), END]
        assert (plain["tokens"], plain["passes"], plain["accepted"]) == (11, 11, [])
        assert (speculative["tokens"], speculative["passes"]) == (11, 4)
        assert speculative["decoded"] == plain["decoded"] == 10
        assert speculative["accepted"] == [3, 2, 2]
    every = result["tasks"]["all"]["systems"][SPECULATIVE]
    assert (every["tokens"], every["passes"], every["verified"]) == (33, 12, 9)
    assert every["tokens_per_pass"] == 2.75
    assert every["acceptance"] == [1.0, 6 / 9, 6 / 9]


def test_budget_inside_a_path(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With four tokens left out of a path of four, only what is emitted is counted."""
    _, result = report(capsys, folder, "--max_new_tokens", "7", "--per_task", "1")
    (counts,) = [p["systems"][SPECULATIVE] for p in result["turns"] if p["name"] == "b"]
    assert counts["token_ids"] == ids(SAID[:7])  # a, bcde, fg
    assert (counts["tokens"], counts["passes"], counts["accepted"]) == (7, 3, [2, 1, 1])


def test_counts_add_up() -> None:
    def counts(tokens: list[list[int]], passes: list[int], accepted: list[float]) -> Counts:
        stats = Stats(
            PLAIN_TREE,
            passes,
            0.0,
            accepted,
            prefill_seconds=1.0,
            decode_seconds=3.0,
            tokens_per_second=0.0,
        )
        return Counts.of(Generation([""] * len(tokens), tokens, ["eos"] * len(tokens), stats))

    one = counts([[1] * 9], [4], [1.0, 2 / 3])
    two = counts([[1], []], [1, 1], [0.0, 0.0, 0.0])
    assert (two.tokens, two.decoded, two.verified) == (1, 0, 0)
    both = total([one, two])
    assert both == Counts(10, 8, 6, 3, (3, 2, 0), 2.0, 6.0)
    assert both.tokens_per_pass == 10 / 6
    assert both.tokens_per_second == 10 / 8
    assert both.decoded_per_second == 8 / 6
    assert both.acceptance == (1.0, 2 / 3, 0.0)
    assert total([]).tokens_per_pass == total([]).tokens_per_second == 0.0


# The report


def test_markdown(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, result = report(capsys, folder)
    speed, phases, depths = tables(text)
    assert [row[0] for row in speed] == ["task", "chat", "math", "all"]
    for table in (speed, phases, depths):
        assert {len(row) for row in table} == {len(table[0])}
    row = dict(zip(speed[0], speed[-1], strict=True))
    assert (row["turns"], row["tokens"], row["tokens/pass"]) == ("3", "33", "2.75")
    assert row["same text"] == "3 of 3"
    sums = result["tasks"]["all"]["systems"]
    assert row["plain tok/s"] == f"{sums[PLAIN]['tokens_per_second']:.1f}"
    assert row["over plain"] == f"{sums[PLAIN]['speculative_speed_up']:.2f}"
    assert depths[-1] == ["all", "1.000", "0.667", "0.667"]
    assert text.rstrip().endswith("None.")


def test_speed_up_is_the_ratio_of_total_times(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, result = report(capsys, folder)
    for task in result["tasks"].values():
        seconds = {
            name: sums["prefill_seconds"] + sums["decode_seconds"]
            for name, sums in task["systems"].items()
        }
        speed_up = task["systems"][PLAIN]["speculative_speed_up"]
        assert speed_up == pytest.approx(seconds[PLAIN] / seconds[SPECULATIVE])


def test_a_difference_is_shown(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    own_systems = bench.own_systems

    def faulty(*arguments: Any) -> dict[str, bench.System]:
        systems = own_systems(*arguments)
        speculative = systems[SPECULATIVE]

        def changed(prompt: list[int]) -> tuple[list[int], Counts]:
            tokens, counts = speculative(prompt)
            return [*tokens[:4], *ids("z"), *tokens[5:]], counts

        return systems | {SPECULATIVE: changed}

    monkeypatch.setattr(bench, "own_systems", faulty)
    text, result = report(capsys, folder, "--per_task", "1")
    assert tables(text)[0][-1][-1] == "0 of 2"
    z, e = ids("ze")
    assert f"- math b, {SPECULATIVE}: new token 4 is {z}, in plain decoding {e}; " in text
    assert text.count("no near-tie") == 2
    assert result["tasks"]["all"]["agreement"][SPECULATIVE] == {
        "same": 0,
        "near_ties": 0,
        "compared": 2,
    }


# Agreement


def test_forced_scores_are_what_decoding_chose_from(random: Model) -> None:
    prompt = ids("hello")
    for temperature in (0.0, 0.8):
        new = generate(random, prompt, 24, temperature=temperature, seed=5).token_ids[0]
        for position in (0, 1, 7, len(new) - 1):
            scores = forced_scores(random, prompt, new[:position], temperature, seed=5)
            assert int(scores.argmax()) == new[position]


def test_first_difference(random: Model) -> None:
    prompt, new = ids("hello"), ids("abc")
    assert first_difference(random, prompt, new, new) is None
    scores = forced_scores(random, prompt, new[:1], 0.0, 0)
    best, second, *_, worst = (int(token) for token in np.argsort(-scores))
    found = first_difference(random, prompt, [new[0], best, 3], [new[0], worst, 3])
    assert (found.position, found.expected, found.found) == (1, best, worst)
    assert found.gap == pytest.approx(float(scores[best] - scores[worst]))
    assert not found.near_tie
    # Two tokens that are close to each other and far from the best are no tie of the argmax.
    found = first_difference(random, prompt, [new[0], worst], [new[0], second])
    assert found.gap == pytest.approx(float(scores[best] - scores[worst]))


def test_an_early_end_is_no_near_tie(random: Model) -> None:
    found = first_difference(random, ids("hello"), ids("abc"), ids("ab"))
    assert (found.position, found.expected, found.found) == (2, *ids("c"), None)
    assert found.gap is None
    assert not found.near_tie


def test_a_near_tie(tmp_path: Path) -> None:
    table = cycle_table(SAID)
    a, z = ids("az")
    table[BOT, z] = table[BOT, a] - 1e-4
    model = load(target=chain_model(tmp_path / "target", table))
    found = first_difference(model, [BOT], [a], [z])
    assert found.near_tie
    assert found.gap == pytest.approx(1e-4, rel=0.05)


def test_a_near_tie_of_another_dtype(tmp_path: Path) -> None:
    """What one text was computed in, and the other was not, is what may be rounded away."""
    table = cycle_table(SAID)
    a, z = ids("az")
    table[BOT, z] = table[BOT, a] - 0.1
    model = load(target=chain_model(tmp_path / "target", table))
    assert not first_difference(model, [BOT], [a], [z]).near_tie
    assert first_difference(model, [BOT], [a], [z], dtype="bfloat16").near_tie


# Measuring


def test_a_run_that_compiles_is_made_again() -> None:
    def compiling(times: int) -> Callable[[], int]:
        calls = 0

        def call() -> int:
            nonlocal calls
            calls += 1
            if calls <= times:
                jax.jit(lambda x: x + calls)(np.float32(1))
            return calls

        return call

    assert steady(compiling(0)) == 1
    assert steady(compiling(1)) == 2
    with pytest.raises(RuntimeError, match="compiled twice"):
        steady(compiling(2))


def test_every_system_has_its_turn_at_being_first(random: Model) -> None:
    calls: list[str] = []

    def system(name: str) -> bench.System:
        def run(prompt: list[int]) -> tuple[list[int], Counts]:
            calls.append(f"{name}{prompt.count(ids('a')[0])}")
            return [1], Counts(tokens=1, passes=1)

        return run

    systems = {name: system(name) for name in (PLAIN, SPECULATIVE, TRANSFORMERS)}
    questions = [Question(str(i), "task", ("b" + "a" * i,)) for i in range(4)]
    bench.measure(random, systems, questions, 4, temperature=0.0)
    p, s, t = systems
    assert calls[3:] == [
        *(f"{p}0", f"{s}0", f"{t}0"),
        *(f"{s}1", f"{t}1", f"{p}1"),
        *(f"{t}2", f"{p}2", f"{s}2"),
        *(f"{p}3", f"{s}3", f"{t}3"),
    ]


@pytest.mark.parametrize("temperature", ["0", "0.8"])
def test_transformers_beside_it(
    folder: Path, capsys: pytest.CaptureFixture[str], temperature: str
) -> None:
    pytest.importorskip("torch")
    text, result = report(capsys, folder, "--transformers", "--temperatures", temperature)
    header, *_, row = tables(text)[0]
    assert "transformers tok/s" in header
    assert "over transformers" in header
    every = result["tasks"]["all"]
    assert every["agreement"].keys() == (
        {SPECULATIVE, TRANSFORMERS} if temperature == "0" else {SPECULATIVE}
    )
    assert every["agreement"][SPECULATIVE]["same"] == 3
    theirs = every["systems"][TRANSFORMERS]
    assert theirs["prefill_seconds"] > 0
    assert theirs["decode_seconds"] > 0
    if temperature == "0":
        assert every["agreement"][TRANSFORMERS]["same"] == 3
        assert (theirs["tokens"], theirs["passes"], theirs["decoded"]) == (33, 33, 30)
    assert dict(zip(header, row, strict=True))["same text"] == "3 of 3"


def test_transformers_without_torch(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    questions = str(folder / "questions.jsonl")
    line = refused(capsys, options(folder, "--transformers", "--prompts", questions))
    assert "torch, which is not installed" in line


# Prompts


def test_built_in_prompts() -> None:
    questions = read_questions(None)
    tasks = [question.task for question in questions]
    assert len(questions) == 12
    assert {tasks.count(task) for task in tasks} == {2}
    assert len(set(tasks)) == 6
    assert len({question.name for question in questions}) == 12
    assert [q.task for q in read_questions(None, per_task=1)] == list(dict.fromkeys(tasks))


def test_questions_are_read(folder: Path) -> None:
    assert read_questions(folder / "questions.jsonl") == [
        Question("1", "chat", ("hello",)),
        Question("b", "math", ("1 2",)),
        Question("3", "chat", ("a b c d",)),
    ]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("{", "is not JSON"),
        ("[]", "holds a list, not an object"),
        ('{"task": "a", "turns": ["b"]}', "lacks a question_id"),
        ('{"question_id": 1, "turns": ["b"]}', "lacks a question_id, or a task or category"),
        ('{"question_id": 1, "task": "a"}', "has no turns"),
        ('{"question_id": 1, "task": "a", "turns": []}', "has no turns"),
        ('{"question_id": 1, "task": "a", "turns": "b"}', "has no turns"),
        ('{"question_id": 1, "task": "a", "turns": [" "]}', ": turn 1 is empty"),
    ],
)
def test_bad_lines_are_refused_by_number(tmp_path: Path, line: str, fault: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps(QUESTIONS[0]) + "\n\n" + line + "\n")
    with pytest.raises(ValueError, match=rf"prompts\.jsonl:3.*{fault}"):
        read_questions(path)


def test_what_cannot_be_measured(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "none.jsonl").write_text("\n")
    argv = options(folder, "--prompts", str(tmp_path / "none.jsonl"))
    assert "holds no prompt" in refused(capsys, argv)
    long = [*QUESTIONS, {"question_id": 9, "task": "long", "turns": ["a" * 120]}]
    argv = options(folder, "--prompts", str(write(tmp_path / "long.jsonl", long)))
    assert "question 9 has 123 tokens; with max_new_tokens 20 it needs 143" in refused(capsys, argv)
    argv = options(folder, "--json", str(tmp_path / "nowhere" / "result.json"))
    assert "there is no folder for it" in refused(capsys, argv)
    argv = ["--target", str(folder / "target")]
    assert "no draft head" in refused(capsys, argv)


# Turns, temperatures, batches


def test_later_turns_follow_on_plain_answers(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    turns = ["a b", "c", "d" * 90, "e"]
    path = write(tmp_path / "turns.jsonl", [{"question_id": 5, "task": "t", "turns": turns}])
    argv = options(folder, "--prompts", str(path), "--json", str(tmp_path / "result.json"))
    assert cli.run(bench.main, argv) == 0
    assert "Turns that did not fit the context: 5, turn 3." in capsys.readouterr()[0]
    (run,) = json.loads((tmp_path / "result.json").read_text())["runs"]
    assert [turn["name"] for turn in run["turns"]] == ["5", "5, turn 2"]
    model = load(target=folder / "target")
    chat = [{"role": "user", "content": "a b"}]
    chat.append({"role": "assistant", "content": generate(model, chat, 20).texts[0]})
    chat.append({"role": "user", "content": "c"})
    lengths = [len(encode_prompt(model.tokenizer, chat[:n])) for n in (1, 3)]
    assert [turn["prompt_tokens"] for turn in run["turns"]] == lengths


def test_temperatures_and_batches(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "result.json"
    argv = options(folder, "--prompts", str(folder / "questions.jsonl"), "--json", str(path))
    argv += ["--temperatures", "0", "0.8", "--batch_sizes", "2", "--repeat", "2"]
    assert cli.run(bench.main, argv) == 0
    text = capsys.readouterr()[0]
    assert "the median of 2 runs" in text
    assert text.count("## Temperature") == 2
    runs = json.loads(path.read_text())["runs"]
    assert [run["temperature"] for run in runs] == [0.0, 0.8]
    for run in runs:
        (batch,) = run["batches"]
        # Three prompts fill one batch of two.
        assert (batch["size"], batch["prompts"], batch["same"]) == (2, 2, 2)
        assert batch["counts"][SPECULATIVE]["tokens"] == 22
        assert batch["counts"][SPECULATIVE]["passes"] == 8
        low, high = run["tasks"]["all"]["middle_half_of_speed_ups"]
        assert 0 < low <= high
    argv += ["--batch_sizes", "4"]
    assert "a batch of 4 needs as many prompts, and there are 3" in refused(capsys, argv)


def test_prompt_lookup_beside_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    _, result = report(capsys, folder, "--prompt_lookup")
    every = result["tasks"]["all"]
    assert every["agreement"][LOOKUP]["same"] == 3
    assert every["systems"][LOOKUP]["tokens"] == 33
    assert every["systems"][LOOKUP]["passes"] <= 33


def test_what_cannot_be_drawn(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = options(folder, "--plot", str(folder / "speed.gif"))
    assert "a picture is one of .png, .svg" in refused(capsys, argv)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"matplotlib, which is not installed.*\[plots\]"):
        bench_plots.draw(folder / "speed.png", None, [])
