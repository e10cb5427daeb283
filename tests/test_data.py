"""The corpus, the report of what was left out of it, and the split."""

import numpy as np
import pytest
from chat_records import openai, sharegpt, write_lines
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from clover_jax.chat import ChatError, encode_conversation
from train import records
from train.data import Corpus, load_corpus, split, token_frequencies
from train.records import DataError

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


def numbered(size: int, length: int = 4) -> Corpus:
    """Sample i holds the token i, `length + i % 3` times, all but the first supervised."""
    return Corpus.from_samples(
        [(np.full(length + i % 3, i, np.int32), np.arange(length + i % 3) > 0) for i in range(size)]
    )


# --- what is left out


@pytest.mark.parametrize(
    ("record", "reason", "detail"),
    [
        ("{nonsense", records.NOT_JSON, "Expecting property name"),
        (sharegpt(("human", "q")), records.NO_ASSISTANT, "1 turns"),
        (
            sharegpt(("human", "q"), ("system", "s"), ("gpt", "a")),
            records.TEMPLATE,
            "must come first",
        ),
        (openai("q" * 1000, "a"), records.TOO_SHORT, "0 in the first 64 of"),
    ],
)
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


def test_report_counts_all_and_shows_the_first(tmp_path, tokenizer):
    path = write_lines(tmp_path / "a.jsonl", openai("q", "a" * 99), *["{"] * 9, *["[]"] * 2)
    _, report = load_corpus(path, tokenizer, max_length=40)
    assert report.skipped == {records.NOT_JSON: 9, records.NOT_A_CONVERSATION: 2}
    assert [skip.where for skip in report.first[records.NOT_JSON]] == [
        f"{path}:{line}" for line in (2, 3, 4, 5, 6)
    ]
    text = str(report)
    assert "12 records read, 1 kept (1 of them truncated)" in text
    assert f"9 skipped: {records.NOT_JSON}" in text
    assert "and 4 more" in text


# --- corpus


def test_corpus_holds_what_the_chat_code_makes(tmp_path, tokenizer):
    chats = [openai(f"q{i}", "a" * i, "more", "😀") for i in range(300)]  # two chunks
    corpus, report = load_corpus(write_lines(tmp_path / "a.jsonl", *chats), tokenizer, 200)
    assert report.kept == len(corpus) == 300
    assert (corpus.ids.dtype, corpus.mask.dtype, corpus.offsets.dtype) == (np.int32, bool, np.int64)
    for i in (0, 1, 130, 255, 256, 299):
        ids, mask = encode_conversation(tokenizer, chats[i]["messages"], 200)
        np.testing.assert_array_equal(corpus.sample(i)[0], ids)
        np.testing.assert_array_equal(corpus.sample(i)[1], mask)
    assert corpus.longest() == 200
    assert report.truncated == sum(
        len(encode_conversation(tokenizer, r["messages"])[0]) > 200 for r in chats
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
