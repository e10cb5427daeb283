"""Conversations in JSON and JSONL files."""

import json
import re
from collections import Counter

import pytest
from chat_records import openai, sharegpt, write_lines

from train import records
from train.records import DataError, Record, Skip, read_conversations


def messages_of(paths) -> list[list[tuple[str, str]]]:
    items = list(read_conversations(paths))
    assert all(isinstance(item, Record) for item in items), items
    return [[(m["role"], m["content"]) for m in item.messages] for item in items]


def test_both_forms(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        openai("q", "a", "q2", "a2"),
        sharegpt(("system", "s"), ("human", "q"), ("gpt", "a")),
        sharegpt(("user", "q"), ("assistant", "a")),
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "parts"}]},
                {"role": "assistant", "content": "a"},
            ]
        },
    )
    assert messages_of(path) == [
        [("user", "q"), ("assistant", "a"), ("user", "q2"), ("assistant", "a2")],
        [("system", "s"), ("user", "q"), ("assistant", "a")],
        [("user", "q"), ("assistant", "a")],
        [("user", "parts"), ("assistant", "a")],
    ]


def test_leading_answer_is_dropped(tmp_path):
    path = write_lines(
        tmp_path / "a.jsonl",
        sharegpt(("gpt", "go on"), ("human", "q"), ("gpt", "a")),
        sharegpt(("system", "s"), ("gpt", "go on"), ("human", "q"), ("gpt", "a")),
    )
    assert messages_of(path) == [
        [("user", "q"), ("assistant", "a")],
        [("system", "s"), ("user", "q"), ("assistant", "a")],
    ]


@pytest.mark.parametrize("indent", [None, 1])
@pytest.mark.parametrize("name", ["a.json", "a.txt"])
def test_array_file(tmp_path, name, indent):
    path = tmp_path / name
    path.write_text("\n " + json.dumps([openai("1", "a"), openai("2", "b"), 7], indent=indent))
    items = list(read_conversations(path))
    assert [m["content"] for item in items[:2] for m in item.messages] == ["1", "a", "2", "b"]
    lines = path.read_text().splitlines()
    number = {
        text: 1 + next(i for i, line in enumerate(lines) if f'"{text}"' in line) for text in "12"
    }
    inside = 4 if indent else 0  # the record opens four lines above its first text
    assert [item.where for item in items[:2]] == [f"{path}:{number[t] - inside}" for t in "12"]
    assert items[2].reason == records.NOT_A_CONVERSATION
    assert items[2].where == f"{path}:{len(lines) - (1 if indent else 0)}"


def test_file_of_one_record_or_of_lines(tmp_path):
    one, lines, empty = tmp_path / "one.json", tmp_path / "lines.json", tmp_path / "empty.json"
    one.write_text("\ufeff" + json.dumps(openai("q", "a"), indent=2))
    write_lines(lines, openai("1", "a"), "", openai("2", "b"))
    marked = tmp_path / "marked.jsonl"  # with a byte order mark, as some editors write
    marked.write_bytes(b"\xef\xbb\xbf" + lines.read_bytes())
    empty.write_text("[ ]")
    assert messages_of(one) == [[("user", "q"), ("assistant", "a")]]
    assert [record[0][1] for record in messages_of(lines)] == ["1", "2"]
    assert [r.where for r in read_conversations(lines)] == [f"{lines}:1", f"{lines}:3"]
    assert messages_of(marked) == messages_of(lines)
    assert messages_of(empty) == []


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        ('[\n{"messages": []},\n{"messages": [}\n]', 3, "Expecting value"),
        ('[\n{"messages": []}\n{"messages": []}]', 3, "expected , or ]"),
        ('[{"messages": []}', 1, "expected , or ]"),
        ("[1,]", 1, "Expecting value"),
        ("[]\n\n{}", 1, "there is text after the array"),
    ],
)
def test_broken_array_is_an_error(tmp_path, text, line, why):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(DataError, match=rf"a\.json:{line}: the JSON array cannot be read .*{why}"):
        list(read_conversations(tmp_path / "a.json"))


def test_paths_and_globs(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("b.jsonl", "a.jsonl", "sub/c.jsonl", "[x].jsonl"):
        write_lines(tmp_path / name, openai(name, "a"))
    assert [m[0][1] for m in messages_of(f"{tmp_path}/[ab].jsonl")] == ["a.jsonl", "b.jsonl"]
    assert [m[0][1] for m in messages_of(str(tmp_path / "[x].jsonl"))] == ["[x].jsonl"]
    several = [tmp_path / "b.jsonl", f"{tmp_path}/**/*.jsonl"]
    assert Counter(m[0][1] for m in messages_of(several)) == dict.fromkeys(
        ["b.jsonl", "a.jsonl", "sub/c.jsonl", "[x].jsonl"], 1
    )
    assert messages_of(several)[0][0][1] == "b.jsonl"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none.jsonl", "no training data at .*none.jsonl"),
        ("*.none", "no file matches it"),
        ("", "is a folder: name its files"),
    ],
)
def test_missing_files_are_errors(tmp_path, name, message):
    with pytest.raises(DataError, match=message):
        list(read_conversations(tmp_path / name))
    with pytest.raises(DataError, match="the list of paths is empty"):
        list(read_conversations([]))


def test_bytes_that_are_no_utf8_lose_one_line(tmp_path):
    line = json.dumps(openai("q", "a")).encode()
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(line + b'\n{"messages": "\xff"}\n' + line + b"\n")
        kinds = [type(item) for item in read_conversations(tmp_path / name)]
        assert kinds == [Record, Skip, Record]


BAD = [
    ("{nonsense", records.NOT_JSON, "Expecting property name"),
    ("[" * 100_000, records.NOT_JSON, "recursion"),
    ("[1, 2]", records.NOT_A_CONVERSATION, "a list, not an object"),
    ('{"text": "x"}', records.NOT_A_CONVERSATION, r"among its keys \('text'\)"),
    ('{"messages": null}', records.BAD_MESSAGE, "a NoneType, not a list"),
    ('{"messages": []}', records.EMPTY, "no turns"),
    ('{"messages": ["hi"]}', records.BAD_MESSAGE, "turn 0 is a str"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', records.UNKNOWN_ROLE, "'tool' in turn 0"),
    (sharegpt(("human", "q"), ("bing", "a")), records.UNKNOWN_ROLE, "'bing' in turn 1"),
    (sharegpt(("human", "q"), ("human", "q"), ("gpt", "a")), records.ROLE_ORDER, "turns 0 and 1"),
    (sharegpt(("gpt", "a"), ("gpt", "a"), ("human", "q")), records.ROLE_ORDER, "both assistant"),
    (sharegpt(("human", "q")), records.NO_ASSISTANT, "1 turns"),
    (sharegpt(("gpt", "a"), ("human", "q")), records.NO_ASSISTANT, "2 turns"),
    (sharegpt(("system", "s")), records.NO_ASSISTANT, "1 turns"),
    (openai("q", None), records.BAD_MESSAGE, "content of message 1 is missing"),
    (openai("q", [{"type": "image_url"}]), records.BAD_MESSAGE, "not text"),
    (openai("q", "\ud83d"), records.BAD_MESSAGE, "lone surrogate"),
]


@pytest.mark.parametrize(("record", "reason", "detail"), BAD)
def test_bad_record_is_skipped(tmp_path, record, reason, detail):
    good = openai("q", "a")
    path = write_lines(tmp_path / "a.jsonl", good, record, good)
    before, bad, after = read_conversations(path)
    assert before == Record(f"{path}:1", good["messages"])
    assert after == Record(f"{path}:3", good["messages"])
    assert isinstance(bad, Skip)
    assert (bad.where, bad.reason) == (f"{path}:2", reason)
    assert re.search(detail, bad.detail)
    assert str(bad) == f"{path}:2: {reason}: {bad.detail}"
