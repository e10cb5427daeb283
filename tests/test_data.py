"""Conversations on disk, the corpus, the split and the order of batches."""

import json
from collections import Counter

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clover_jax.chat import ChatError, encode_conversation
from train import data
from train.data import (
    Batches,
    Corpus,
    DataError,
    Record,
    Skip,
    evaluation_batches,
    load_corpus,
    read_conversations,
    split,
    token_frequencies,
)

CHATML = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('a system message must come first') }}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    """One token per byte, two special ones; padding is EOS."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
        chat_template=CHATML,
    )


def openai(*texts: str) -> dict:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(texts)]}


def sharegpt(*turns: tuple[str, str]) -> dict:
    return {"id": "x", "conversations": [{"from": who, "value": text} for who, text in turns]}


def write_lines(path, *records) -> str:
    lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


def messages_of(paths) -> list[list[tuple[str, str]]]:
    items = list(read_conversations(paths))
    assert all(isinstance(item, Record) for item in items), items
    return [[(m["role"], m["content"]) for m in item.messages] for item in items]


def numbered(size: int, length: int = 4) -> Corpus:
    """Sample i holds the token i, `length + i % 3` times, all but the first supervised."""
    return Corpus.from_samples(
        [(np.full(length + i % 3, i, np.int32), np.arange(length + i % 3) > 0) for i in range(size)]
    )


def stream(batches: Batches, steps) -> list[int]:
    return [int(i) for step in steps for i in batches.batch_at(step).sample_ids]


# --- reading


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
    assert items[2].reason == data.NOT_A_CONVERSATION
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


BAD = [
    ("{nonsense", data.NOT_JSON, "Expecting property name"),
    ("[" * 100_000, data.NOT_JSON, "recursion"),
    ("[1, 2]", data.NOT_A_CONVERSATION, "a list, not an object"),
    ('{"text": "x"}', data.NOT_A_CONVERSATION, r"among its keys \('text'\)"),
    ('{"messages": null}', data.BAD_MESSAGE, "a NoneType, not a list"),
    ('{"messages": []}', data.EMPTY, "no turns"),
    ('{"messages": ["hi"]}', data.BAD_MESSAGE, "turn 0 is a str"),
    ('{"messages": [{"role": "tool", "content": "x"}]}', data.UNKNOWN_ROLE, "'tool' in turn 0"),
    (sharegpt(("human", "q"), ("bing", "a")), data.UNKNOWN_ROLE, "'bing' in turn 1"),
    (sharegpt(("human", "q"), ("human", "q"), ("gpt", "a")), data.ROLE_ORDER, "turns 0 and 1"),
    (sharegpt(("gpt", "a"), ("gpt", "a"), ("human", "q")), data.ROLE_ORDER, "both assistant"),
    (sharegpt(("human", "q")), data.NO_ASSISTANT, "1 turns"),
    (sharegpt(("gpt", "a"), ("human", "q")), data.NO_ASSISTANT, "2 turns"),
    (sharegpt(("system", "s")), data.NO_ASSISTANT, "1 turns"),
    (openai("q", None), data.BAD_MESSAGE, "content of message 1 is missing"),
    (openai("q", [{"type": "image_url"}]), data.BAD_MESSAGE, "not text"),
    (openai("q", "\ud83d"), data.BAD_MESSAGE, "lone surrogate"),
    (sharegpt(("human", "q"), ("system", "s"), ("gpt", "a")), data.TEMPLATE, "must come first"),
    (openai("q" * 1000, "a"), data.TOO_SHORT, "0 in the first 64 of"),
]


@pytest.mark.parametrize(("record", "reason", "detail"), BAD)
def test_bad_record_is_skipped_and_reported(tmp_path, tokenizer, record, reason, detail):
    good = openai("q", "a")
    path = write_lines(tmp_path / "a.jsonl", good, record, good)
    corpus, report = load_corpus(path, tokenizer, max_length=64)
    assert (report.read, report.kept, len(corpus)) == (3, 2, 2)
    assert report.skipped == {reason: 1}
    with pytest.raises(DataError, match=detail):  # alone: nothing to train on, and it says why
        load_corpus(write_lines(tmp_path / "b.jsonl", record), tokenizer, max_length=64)
    assert str(report.first[reason][0]).startswith(f"{path}:2: {reason}: ")
    assert str(report.first[reason][0]) in str(report)


def test_bytes_that_are_no_utf8_lose_one_line(tmp_path):
    line = json.dumps(openai("q", "a")).encode()
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_bytes(line + b'\n{"messages": "\xff"}\n' + line + b"\n")
        kinds = [type(item) for item in read_conversations(tmp_path / name)]
        assert kinds == [Record, Skip, Record]


def test_report_counts_all_and_shows_the_first(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", openai("q", "a" * 99), *["{"] * 9, *["[]"] * 2)
    _, report = load_corpus(path, tokenizer, max_length=40)
    assert report.skipped == {data.NOT_JSON: 9, data.NOT_A_CONVERSATION: 2}
    assert [skip.where for skip in report.first[data.NOT_JSON]] == [
        f"{path}:{line}" for line in (2, 3, 4, 5, 6)
    ]
    text = str(report)
    assert "12 records read, 1 kept (1 of them truncated)" in text
    assert f"9 skipped: {data.NOT_JSON}" in text
    assert "and 4 more" in text


# --- corpus


def test_corpus_holds_what_the_chat_code_makes(tmp_path, tokenizer):
    records = [openai(f"q{i}", "a" * i, "more", "😀") for i in range(300)]  # two chunks
    corpus, report = load_corpus(write_lines(tmp_path / "a.jsonl", *records), tokenizer, 200)
    assert report.kept == len(corpus) == 300
    assert (corpus.ids.dtype, corpus.mask.dtype, corpus.offsets.dtype) == (np.int32, bool, np.int64)
    for i in (0, 1, 130, 255, 256, 299):
        ids, mask = encode_conversation(tokenizer, records[i]["messages"], 200)
        np.testing.assert_array_equal(corpus.sample(i)[0], ids)
        np.testing.assert_array_equal(corpus.sample(i)[1], mask)
    assert corpus.longest() == 200
    assert report.truncated == sum(
        len(encode_conversation(tokenizer, r["messages"])[0]) > 200 for r in records
    )
    assert report.truncated > 0


def test_fewer_than_two_supervised_tokens_are_skipped(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", openai("q", "abc"))
    ids, mask = encode_conversation(tokenizer, openai("q", "abc")["messages"])
    start = int(np.argmax(mask))
    with pytest.raises(DataError, match=f"1 in the first {start + 1} of {len(ids)} tokens"):
        load_corpus(path, tokenizer, start + 1)
    corpus, _ = load_corpus(path, tokenizer, start + 2)
    assert corpus.mask.sum() == 2


def test_real_eos_is_supervised_though_it_is_the_padding(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", openai("q", "a", "q", ""))
    corpus, _ = load_corpus(path, tokenizer, 64)
    eos = tokenizer.eos_token_id
    assert tokenizer.pad_token_id == eos
    assert np.flatnonzero(corpus.mask & (corpus.ids == eos)).size == 2
    assert token_frequencies(corpus, len(tokenizer))[eos] == 2


def test_load_refuses_what_cannot_work(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", openai("q", "a"))
    with pytest.raises(ChatError, match="tokenizer"):
        load_corpus(path, None, 64)
    with pytest.raises(DataError, match="max_length must be at least 1, got 0"):
        load_corpus(path, tokenizer, 0)


def test_token_frequencies():
    corpus = Corpus.from_samples(
        [
            (np.array([5, 1, 2]), np.array([False, True, True])),
            (np.array([2, 2]), np.array([False, True])),
        ]
    )
    counts = token_frequencies(corpus, 6)
    assert counts.dtype == np.int64
    assert counts.tolist() == [0, 1, 2, 0, 0, 0]
    with pytest.raises(DataError, match="token ids from 1 to 2, the vocabulary 0 to 1"):
        token_frequencies(corpus, 2)
    assert token_frequencies(Corpus.from_samples([]), 3).tolist() == [0, 0, 0]


# --- split


def contents(corpus: Corpus) -> set[bytes]:
    return {corpus.sample(i)[0].tobytes() for i in range(len(corpus))}


def test_split_depends_on_content_alone():
    corpus = numbered(1000)
    samples = [corpus.sample(i) for i in range(1000)]
    train, held = split(corpus, 0.1)
    assert len(train) + len(held) == 1000
    assert 60 < len(held) < 140
    assert contents(train) | contents(held) == contents(corpus)
    # Another order, copies, and new samples move nothing to the other side.
    more = Corpus.from_samples(
        samples[::-1]
        + samples[:50]
        + [(np.array([i, i]), np.ones(2, bool)) for i in range(5000, 5050)]
    )
    train2, held2 = split(more, 0.1)
    assert contents(train) <= contents(train2)
    assert contents(held) <= contents(held2)
    assert not contents(train2) & contents(held2)
    # A larger fraction only adds.
    assert contents(held) <= contents(split(corpus, 0.3)[1])


def test_split_keeps_order_and_masks():
    corpus = numbered(100)
    train, held = split(corpus, 0.5)
    for part in (train, held):
        firsts = [int(part.sample(i)[0][0]) for i in range(len(part))]
        assert firsts == sorted(firsts)
        for i, number in enumerate(firsts):
            np.testing.assert_array_equal(part.sample(i)[1], corpus.sample(number)[1])
    assert len(split(corpus, 0.0)[1]) == 0
    for wrong in (-0.1, 1.0, float("nan")):
        with pytest.raises(DataError, match="eval_fraction"):
            split(corpus, wrong)


# --- batches


def test_resume_gives_the_same_batches():
    straight = [Batches(numbered(64), 6, 3, 8).batch_at(step) for step in range(20)]
    first = stream(Batches(numbered(64), 6, 3, 8), range(10))
    data._epoch_order.cache_clear()  # as in a new process
    resumed = Batches(numbered(64), 6, 3, 8)
    second = stream(resumed, range(10, 20))
    assert [int(i) for batch in straight for i in batch.sample_ids] == first + second
    for one, other in zip(straight[13], resumed.batch_at(13), strict=True):
        np.testing.assert_array_equal(one, other)


def test_order_stays_what_it_was():
    """Runs begun with an earlier version, or on another machine, must resume in the same order."""
    assert stream(Batches(numbered(64), 4, 3, 8), [0, 16]) == [21, 58, 38, 0, 16, 49, 25, 10]


@pytest.mark.parametrize("batch_size", [1, 6, 16, 64])
def test_each_sample_once_per_epoch_in_another_order(batch_size):
    batches = Batches(numbered(64), batch_size, 0, 8)
    epochs = np.array(stream(batches, range(64 * 3))[: 64 * 3]).reshape(3, 64)
    for epoch in epochs:
        assert sorted(epoch) == list(range(64))
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert tuple(epochs[0]) != tuple(range(64))


def test_seeds_give_different_orders():
    orders = {tuple(stream(Batches(numbered(64), 64, seed, 8), [0])) for seed in range(5)}
    assert len(orders) == 5


def test_batch_straddles_epochs():
    batches = Batches(numbered(10), 4, 0, 8)
    ids = stream(batches, range(5))
    assert sorted(ids[:10]) == sorted(ids[10:]) == list(range(10))


def check_rows(batch, corpus: Corpus, length: int):
    assert batch.tokens.dtype == batch.lengths.dtype == batch.sample_ids.dtype == np.int32
    assert batch.mask.dtype == bool
    assert batch.tokens.shape == batch.mask.shape == (len(batch.sample_ids), length)
    for tokens, mask, size, sample in zip(*batch, strict=True):
        ids, supervised = corpus.sample(sample) if sample >= 0 else (np.empty(0), np.empty(0))
        assert size == len(ids)
        np.testing.assert_array_equal(tokens[:size], ids)
        np.testing.assert_array_equal(mask[:size], supervised)
        assert not tokens[size:].any()
        assert not mask[size:].any()


def test_rows_hold_the_samples_and_padding():
    corpus = numbered(10)
    for step in range(5):
        check_rows(Batches(corpus, 4, 0, 9).batch_at(step), corpus, 9)


def test_evaluation_covers_all_once():
    corpus = numbered(10)
    batches = list(evaluation_batches(corpus, 4, 8))
    assert [batch.sample_ids.tolist() for batch in batches] == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9, -1, -1],
    ]
    assert batches[2].lengths.tolist() == [6, 4, 0, 0]
    for batch in batches:
        check_rows(batch, corpus, 8)
    assert sum(batch.mask.sum() for batch in batches) == corpus.mask.sum()
    assert [len(list(evaluation_batches(corpus, size, 8))) for size in (1, 5, 10, 16)] == [
        10,
        2,
        1,
        1,
    ]


def test_too_few_samples_for_a_batch():
    with pytest.raises(DataError, match="3 training samples do not fill one batch of 4"):
        Batches(numbered(3), 4, 0, 8)
    (batch,) = evaluation_batches(numbered(3), 4, 8)
    assert batch.sample_ids.tolist() == [0, 1, 2, -1]
    with pytest.raises(DataError, match="0 samples to evaluate"):
        evaluation_batches(Corpus.from_samples([]), 4, 8)


def test_wrong_shapes_are_errors():
    for make in (
        lambda b, t: Batches(numbered(9), b, 0, t),
        lambda b, t: evaluation_batches(numbered(9), b, t),
    ):
        with pytest.raises(DataError, match="longest sample has 6 tokens, a batch row only 5"):
            make(4, 5)
        with pytest.raises(DataError, match="batch size must be at least 1, got 0"):
            make(0, 8)
    with pytest.raises(DataError, match="must not be negative, got -1"):
        Batches(numbered(9), 4, -1, 8)
    with pytest.raises(DataError, match="count from 0, got -1"):
        Batches(numbered(9), 4, 0, 8).batch_at(-1)
