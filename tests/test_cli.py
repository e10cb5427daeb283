"""`python -m infer`: what it answers, and how it refuses what it cannot do."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from safetensors.numpy import load_file, save_file
from tiny_chat import chain_model, cycle_table, random_model
from tiny_head import perfect_head

from infer import __main__ as command
from infer import cli, generate, load

ROOT = Path(__file__).resolve().parent.parent
SAID = "abcdefghij"  # what the target answers to any message: eleven tokens with <end>


class Pair(NamedTuple):
    target: Path
    head: Path

    def options(self) -> list[str]:
        return ["--target", str(self.target), "--draft", str(self.head), "--max_new_tokens", "20"]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = chain_model(folder / "target", cycle_table(SAID))
    return Pair(target, perfect_head(target, folder / "head"))


@pytest.fixture(scope="module")
def random(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model(tmp_path_factory.mktemp("random") / "target")


def answer(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """Standard output and standard error of a command that succeeds."""
    status = cli.run(command.main, argv)
    output, errors = capsys.readouterr()
    assert status == 0, errors
    return output, errors


def refused(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str]:
    """Exit status and the one line of a command that fails."""
    try:
        status = cli.run(command.main, argv)
    except SystemExit as stop:
        status = stop.code
    output, errors = capsys.readouterr()
    assert output == ""
    assert errors.count("\n") == 1
    assert errors.startswith("error: ")
    return status, errors


# What it answers


def test_one_prompt(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *pair.options(), "--tree", "chain-3", "hello") == (f"{SAID}\n", "")


def test_one_prompt_is_streamed(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr("builtins.print", lambda text="", **_: shown.append(text))
    assert cli.run(command.main, [*pair.options(), "--tree", "chain-3", "hello"]) == 0
    assert "".join(shown) == SAID
    assert len(shown) > 2


def converse(
    pair: Pair,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    *options: str,
) -> tuple[list[str], str]:
    monkeypatch.setattr("sys.stdin", io.StringIO(said))
    output, errors = answer(capsys, *pair.options(), "--interactive", *options)
    return output.splitlines(), errors


def test_a_conversation_goes_on_from_what_was_said(
    random: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(target=random)
    chat: list[dict[str, str]] = []
    expected = []
    for text in ("abc", "hello"):
        chat.append({"role": "user", "content": text})
        expected.append(generate(model, chat, 6).texts[0])
        chat.append({"role": "assistant", "content": expected[-1]})
    monkeypatch.setattr("sys.stdin", io.StringIO("abc\n\nhello"))
    options = ["--target", str(random), "--plain", "--max_new_tokens", "6", "--interactive"]
    output, errors = answer(capsys, *options)
    assert output == "".join(f"{text}\n" for text in expected)
    assert errors == ""
    assert generate(model, chat[2:3], 6).texts[0] != expected[1]  # the history matters


def test_a_conversation_leaves_out_what_no_longer_fits(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    context = load(target=pair.target).config.max_position_embeddings
    long = "a" * (context - 40)
    said, errors = converse(
        pair, capsys, monkeypatch, f"{long}\nhello\n{'a' * context}\nhello\n", "--plain"
    )
    assert said == [SAID] * 3
    first, second = errors.splitlines()
    assert first == "[the first 2 messages no longer fit the context]"
    assert second.startswith("[this message and 20 new tokens need")


def test_statistics_of_a_conversation(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said, errors = converse(pair, capsys, monkeypatch, "a\nb\n", "--stats", "--tree", "chain-3")
    assert said == [SAID, SAID]
    assert errors.startswith("22 tokens in 8 target passes")
    assert errors.splitlines()[-1].endswith("were spent in compiling")


def test_json_lines_in_and_out(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    lines = [
        {"id": 7, "messages": [{"role": "user", "content": "hello"}]},
        {"prompt": "hi"},
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    options = ["--file", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    options += ["--num_samples", "2", "--logprobs", "--stop", "fg", "--tree", "chain-3"]
    assert answer(capsys, *pair.options(), *options) == ("", "")
    found = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [(r["index"], r["sample"]) for r in found] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [r.get("id") for r in found] == [7, 7, None, None]
    assert found[3]["prompt"] == "hi"
    for result in found:
        assert result["text"] == "abcde"
        assert result["finish_reason"] == "stop"
        assert len(result["logprobs"]) == len(result["token_ids"]) == 7


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "in.jsonl:2 is not JSON"),
        ("[]", 'in.jsonl:2 is no object with either "prompt" or "messages"'),
        ('{"prompt": "a", "messages": []}', "in.jsonl:2 is no object"),
        ('{"prompt": " "}', "in.jsonl:2: the prompt is no text, or it is empty"),
        ('{"messages": [{"content": "a"}]}', "in.jsonl:2: the role of message 0"),
    ],
)
def test_bad_json_lines(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path, line: str, says: str
) -> None:
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' + line)
    status, error = refused(capsys, *pair.options(), "--file", str(tmp_path / "in.jsonl"))
    assert status == 1
    assert says in error


def test_samples_are_shown_apart(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = answer(capsys, *pair.options(), "--plain", "--num_samples", "2", "hello")
    assert output == f"[1/1] hello\n{SAID}\n---\n{SAID}\n"


def test_penalties_and_bans_reach_the_model(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer(capsys, *pair.options(), "--bad_words", "def", "hello")[0][:5] == "abcde"
    assert answer(capsys, *pair.options(), "--bad_words", "def", "hello")[0][5] != "f"
    (a, b) = (load(target=pair.target).tokenizer.convert_tokens_to_ids(t) for t in "ab")
    assert answer(capsys, *pair.options(), "--logit_bias", f"{a}=-99", "hello")[0][0] != "a"
    assert answer(capsys, *pair.options(), "--stop_token_ids", str(b), "hello")[0] == "ab\n"


def test_several_prompts_in_order(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    output, _ = answer(capsys, *pair.options(), "--plain", "--raw", "<bot>a", "<bot>abcd")
    assert output == "[1/2] <bot>a\nbcdefghij\n\n[2/2] <bot>abcd\nefghij\n"


def test_prompts_from_a_file(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "prompts").write_text("\ufeff<bot>a\n\n<bot>abcd", encoding="utf-8")
    options = [*pair.options(), "--plain", "--raw", "--file", str(tmp_path / "prompts")]
    assert answer(capsys, *options) == answer(
        capsys, *pair.options(), "--plain", "--raw", "<bot>a", "<bot>abcd"
    )


def test_prompt_from_standard_input(
    pair: Pair, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("<bot>abcd\n"))
    output, _ = answer(capsys, *pair.options(), "--plain", "--raw")
    assert output == "efghij\n"


def test_chat_is_the_default_where_there_is_a_template(
    pair: Pair, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*pair.options(), "--plain", "abcd"]
    assert answer(capsys, *options)[0] == f"{SAID}\n"
    assert answer(capsys, *options, "--chat")[0] == f"{SAID}\n"
    assert answer(capsys, *options, "--raw")[0] == "efghij\n"


def test_settings_reach_the_model(
    random: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also that prompt i of several draws with seed + i, whatever is answered together."""
    monkeypatch.setattr(command, "_ROWS", 2)
    settings = {"max_new_tokens": 12, "temperature": 0.9, "top_p": 0.8, "top_k": 5}
    model = load(target=random)
    expected = [
        generate(model, prompt, seed=7 + i, **settings).texts[0]
        for i, prompt in enumerate(["abc", "x", "hello"])
    ]
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    options += ["--target", str(random), "--plain", "--raw", "--seed", "7"]
    output, _ = answer(capsys, *options, "abc", "x", "hello")
    assert [part.partition("\n")[2].rstrip("\n") for part in output.split("\n\n")] == expected
    assert answer(capsys, *options, "abc")[0].rstrip("\n") == expected[0]
    other_seed = [*options[:-1], "8"]
    assert answer(capsys, *other_seed, "abc")[0].rstrip("\n") != expected[0]


def test_statistics(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """a, bcde, fghi, j<end>: four passes, of which three verify drafts."""
    output, errors = answer(capsys, *pair.options(), "--tree", "chain-3", "--stats", "hello")
    assert output == f"{SAID}\n"
    first, second, third = errors.splitlines()
    assert first == "11 tokens in 4 target passes: 2.75 tokens per pass"
    assert second.startswith("prefill 0.")
    assert third == "passes that kept a draft token at depth 1, 2, ...: 100%, 67%, 67%"


def test_tree_as_paths(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    paths = "[[0, 0, 0], [0, 0], [0]]"
    _, errors = answer(capsys, *pair.options(), "--tree", paths, "--stats", "hello")
    assert errors.startswith("11 tokens in 4 target passes")


# What it refuses


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["--bogus", "hi"], "--bogus"),
        (["--temp", "1", "hi"], "--temp"),
        (["--temperature", "-1", "hi"], "--temperature: must be at least 0, not -1"),
        (["--temperature", "nan", "hi"], "--temperature: must be at least 0, not nan"),
        (["--top_p", "1.5", "hi"], "--top_p: must be between 0 and 1, not 1.5"),
        (["--top_k", "2.5", "hi"], "--top_k: '2.5' is not a whole number"),
        (["--max_new_tokens", "0", "hi"], "--max_new_tokens: must be at least 1, not 0"),
        (["--seed", "one", "hi"], "--seed: 'one' is not a whole number"),
        (["--tree", "bush", "hi"], "--tree: tree 'bush' is not known"),
        (["--tree", "[[0], [1, 1]]", "hi"], "--tree: tree path [1, 1] has no parent [1]"),
        (["--tree", "[[0], [1", "hi"], "--tree: [[0], [1 is not JSON"),
        (["--tree", "[]", "hi"], "--tree: the tree has no paths"),
        (["--tree", "paper", "--plain", "hi"], "--plain: not allowed with argument --tree"),
        (["--chat", "--raw", "hi"], "--raw: not allowed with argument --chat"),
        (["--model", "a", "--target", "b", "hi"], "--target: not allowed with argument --model"),
        (["--draft", "somewhere", "hi"], "--draft goes with --target"),
        (["--file", "somewhere", "hi"], "not both"),
        (["--dtype", "int8", "hi"], "--dtype: invalid choice: 'int8'"),
        (["--interactive", "hi"], "--interactive reads standard input, so it takes no prompt"),
        (["--interactive", "--num_samples", "2"], "so --num_samples is 1"),
        (["--logprobs", "hi"], "name a file with --output"),
        (["--plain", "--acceptance", "rejection", "hi"], "not for --plain"),
        (["--logit_bias", "3", "hi"], "--logit_bias: '3' is not TOKEN_ID=NUMBER"),
        (["--num_samples", "0", "hi"], "--num_samples: must be at least 1, not 0"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], argv: list[str], named: str) -> None:
    status, line = refused(capsys, *argv)
    assert status == 2
    assert named in line


def test_no_prompt(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.StringIO()
    monkeypatch.setattr(terminal, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", terminal)
    status, line = refused(capsys)
    assert status == 2
    assert "there is no prompt" in line


def test_empty_prompts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert refused(capsys, "one", " \n") == (1, "error: prompt 2 of 2 is empty\n")
    file = tmp_path / "prompts"
    file.write_text("\n \n")
    assert refused(capsys, "--file", str(file)) == (1, f"error: {file} holds no prompt\n")
    file.write_bytes(b"caf\xe9")
    assert "is not UTF-8 text" in refused(capsys, "--file", str(file))[1]
    assert "No such file" in refused(capsys, "--file", str(tmp_path / "none"))[1]


def test_models_that_cannot_be_used(
    pair: Pair, random: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def line(*argv: str) -> str:
        status, found = refused(capsys, *argv, "hi")
        assert status == 1
        return found

    assert "model 'gpt-5' is not known" in line("--model", "gpt-5")
    missing = str(tmp_path / "nowhere")
    assert f"{missing} does not exist" in line("--target", missing)
    assert "config.json does not exist" in line("--target", str(tmp_path))
    assert "head was trained for the target" in line(
        "--target", str(random), "--draft", str(pair.head)
    )
    assert "no draft head: name one with --draft, or use --plain" in line("--target", str(random))


def test_missing_tensor(pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for file in pair.target.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    status, line = refused(capsys, "--target", str(tmp_path), "--plain", "hi")
    assert status == 1
    assert "missing 1 tensor (model.norm.weight)" in line


def test_target_without_a_tokenizer(
    pair: Pair, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((pair.target / name).read_bytes())
    assert "no tokenizer" in refused(capsys, "--target", str(tmp_path), "--plain", "hi")[1]


def test_prompt_beyond_the_context(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    status, line = refused(capsys, *pair.options(), "a" * 120)
    assert status == 1
    assert "of a context of 128" in line


def test_interruption_has_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    assert cli.run(interrupted) == 130
    assert capsys.readouterr() == ("", "")


def test_an_error_of_many_lines_becomes_one(capsys: pytest.CaptureFixture[str]) -> None:
    def failing(_: object) -> None:
        raise ValueError("one\n  two\n")

    assert cli.run(failing) == 1
    assert capsys.readouterr() == ("", "error: one two\n")


# The process


def python(*arguments: str, stdout: int = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=stdout,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        text=True,
    )


def test_nothing_but_the_answer_is_printed(pair: Pair) -> None:
    """Without torch, where transformers has something to say; importing infer is silent too."""
    argv = json.dumps([*pair.options(), "--plain", "hello"])
    process = python(
        "-c",
        "import sys; sys.modules['torch'] = None\n"
        "import infer; print('imported')\n"
        "from infer import cli, __main__ as command\n"
        f"sys.exit(cli.run(command.main, {argv}))",
    )
    assert process.communicate(timeout=120) == (f"imported\n{SAID}\n", "")
    assert process.returncode == 0


def test_a_reader_that_leaves_early(pair: Pair) -> None:
    process = python("-m", "infer", *pair.options(), "--plain", "hello")
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=120) == 1
    process.stderr.close()


def test_wrong_option_of_the_process() -> None:
    process = python("-m", "infer", "--bogus", "hi")
    assert process.communicate(timeout=120) == (
        "",
        "error: unrecognized arguments: --bogus (see python -m infer --help)\n",
    )
    assert process.returncode == 2
