"""Arguments, errors, texts, streaming and statistics of the Python interface."""

import dataclasses
import gc
import math
from collections.abc import Callable
from typing import Any

import byte_tokenizers
import jax
import numpy as np
import pytest
from byte_tokenizers import BOT, BYTES, END, USER
from rigs import CONTEXT, NEW, PROMPTS, SEED, rig_m, rig_o, rig_r, with_eos

from clover_jax.tree import PLAIN, parse_tree
from infer import Model, Stream, generate, speculative_generate, stream
from infer.call import prepare


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback"])
def any_tokenizer(request):
    return getattr(byte_tokenizers, request.param)()


@pytest.fixture(scope="module")
def speaking() -> Model:
    """Rig M, whose text is BYTES over and over."""
    return with_tokenizer(rig_m(), byte_tokenizers.byte_level())


def with_tokenizer(model: Model, tokenizer: Any) -> Model:
    return dataclasses.replace(model, tokenizer=tokenizer)


def test_one_prompt_in_every_form(speaking):
    ids = [1, 2, 0, 1]
    expected = generate(speaking, [ids], NEW)
    assert expected.token_ids == [[t % 32 for t in range(2, 2 + NEW)]]
    for prompt in ("ab a", ["ab a"], ids, tuple(ids), np.array(ids), [ids], [tuple(ids)]):
        assert generate(speaking, prompt, NEW).token_ids == expected.token_ids
    chat = [{"role": "user", "content": "ab"}]
    asked = generate(with_tokenizer(rig_r(), speaking.tokenizer), chat, NEW)
    by_ids = generate(rig_r(), [USER, 1, 2, END, BOT], NEW)
    assert asked.token_ids == by_ids.token_ids


def test_prompts_of_all_forms_in_one_batch(speaking):
    model = with_tokenizer(rig_r(), speaking.tokenizer)
    chat = [
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "c"}]},
    ]
    mixed = generate(model, ["ab", chat, [5, 6], "d"], NEW, seed=SEED, temperature=0.8)
    c, d = BYTES.index(b"c"), BYTES.index(b"d")
    ids = [[1, 2], [USER, 2, END, BOT, 1, END, USER, c, END, BOT], [5, 6], [d]]
    assert mixed.token_ids == generate(model, ids, NEW, seed=SEED, temperature=0.8).token_ids


def test_settings_are_scalars_or_one_per_row():
    model = rig_r()
    scalar = generate(model, PROMPTS, NEW, temperature=0.8, top_p=0.9, top_k=9, seed=SEED)
    per_row = generate(
        model,
        PROMPTS,
        [NEW] * 4,
        temperature=np.full(4, 0.8),
        top_p=(0.9,) * 4,
        top_k=[9] * 4,
        seed=[SEED + row for row in range(4)],
    )
    assert scalar.token_ids == per_row.token_ids
    same = generate(model, [PROMPTS[0]] * 4, NEW, temperature=0.8, seed=[3, 4, 3, 2**40 + 3])
    assert same.token_ids[0] == same.token_ids[2]
    assert len({tuple(row) for row in same.token_ids}) == 3


def test_generation_is_made_of_plain_python_values():
    model = with_eos(rig_m(), 20)
    out = speculative_generate(model, PROMPTS, [0, 1, NEW, NEW], tree="paper")
    assert out.texts == [""] * 4  # there is no tokenizer
    assert out.token_ids[:2] == [[], [2]]
    assert out.token_ids[2][-1] == 20
    assert out.finish_reasons == ["length", "length", "eos", "eos"]
    assert type(out.token_ids[1][0]) is int
    stats = dataclasses.asdict(out.stats)
    assert stats.pop("tree")["paths"] == parse_tree("paper").paths
    assert stats["target_passes"][:2] == [1, 1]
    for value in stats.values():
        for number in value if isinstance(value, list) else [value]:
            assert type(number) in (int, float)
            assert math.isfinite(number)


def test_statistics_of_plain_decoding():
    budgets = [1, 3, 20, NEW]
    stats = generate(rig_r(), PROMPTS, budgets).stats
    assert stats.target_passes == budgets
    assert stats.tokens_per_pass == 1.0
    assert stats.accepted_by_depth == []
    assert stats.prefill_seconds > 0
    assert stats.tokens_per_second == pytest.approx((sum(budgets) - 4) / stats.decode_seconds)


def test_statistics_of_speculative_decoding():
    out = speculative_generate(rig_o(), PROMPTS, NEW, seed=SEED, tree="paper")
    passes = out.stats.target_passes
    assert out.stats.tokens_per_pass == pytest.approx(4 * NEW / sum(passes))
    # Each pass after the first emits one token, and one more for every depth it reaches.
    kept = sum(out.stats.accepted_by_depth) * (sum(passes) - 4)
    assert kept == pytest.approx(4 * NEW - sum(passes))
    assert sorted(out.stats.accepted_by_depth, reverse=True) == out.stats.accepted_by_depth


def refusals() -> dict[str, tuple[Callable[[Model], Any], str]]:
    four = [[1], [2], [3], [4]]
    return {
        "no prompt": (lambda m: generate(m, []), "prompt is empty"),
        "no token": (lambda m: generate(m, [[]]), "prompt 0 is empty"),
        "no text": (lambda m: generate(m, ["ab", ""]), "prompt 1 is empty"),
        "long prompt": (
            lambda m: generate(m, [[1], [1] * 861], 40),
            r"prompt 1 has 861 tokens.* 40 .* 901 .* 900$",
        ),
        "very long prompt": (lambda m: generate(m, [1] * 9000), "9000 tokens.* 9128 .* 900$"),
        "large budget": (lambda m: generate(m, [1], 10**9), r"1000000001 of a context of 900"),
        "id beyond": (lambda m: generate(m, [[1], [3, 32]]), "prompt 1.* 32,.* vocabulary of 32"),
        "negative id": (lambda m: generate(m, [5, -1]), "prompt 0.* -1,"),
        "cold": (lambda m: generate(m, four, temperature=-0.5), "temperature.* 0.*-0.5"),
        "one row cold": (lambda m: generate(m, four, temperature=[0, 1, -2, 0]), "temperature.*-2"),
        "nan": (lambda m: generate(m, four, temperature=float("nan")), "temperature.*nan"),
        "hot": (lambda m: generate(m, four, temperature=float("inf")), "temperature.*inf"),
        "words": (lambda m: generate(m, four, temperature="warm"), "temperature.*'warm'"),
        "top_p above": (lambda m: generate(m, four, top_p=1.5), "top_p.* 0.* 1.*1.5"),
        "top_p below": (lambda m: generate(m, four, top_p=[1, 1, -0.1, 1]), "top_p.*-0.1"),
        "top_k below": (lambda m: generate(m, four, top_k=-1), "top_k.*-1"),
        "top_k broken": (lambda m: generate(m, four, top_k=2.5), "top_k.*whole numbers.*2.5"),
        "budget below": (lambda m: generate(m, four, -3), "max_new_tokens.*-3"),
        "budget broken": (lambda m: generate(m, four, 1.5), "max_new_tokens.*whole numbers"),
        "budget beyond": (lambda m: generate(m, four, 2**40), "max_new_tokens"),
        "few values": (
            lambda m: generate(m, four, temperature=[0.0] * 3),
            "temperature holds 3 values for 4 prompts",
        ),
        "many values": (
            lambda m: generate(m, four, [1] * 5),
            "max_new_tokens holds 5 values for 4 prompts",
        ),
        "few seeds": (lambda m: generate(m, four, seed=[1, 2]), "seed holds 2 values for 4"),
        "broken seed": (lambda m: generate(m, four, seed=0.5), "seed.*whole number.*0.5"),
        "one message": (lambda m: generate(m, {"role": "user", "content": "a"}), "dict"),
        "a number": (lambda m: generate(m, 7), "int"),
        "no role": (lambda m: generate(m, [{"content": "a"}]), "role of message 0"),
        "tree": (lambda m: speculative_generate(m, four, tree=[[0], [1, 0]]), r"no parent \[1\]"),
        "tree name": (lambda m: speculative_generate(m, four, tree="bushy"), "'bushy'"),
        "no head": (
            lambda m: speculative_generate(
                dataclasses.replace(m, draft=None, draft_config=None), four
            ),
            "no draft head",
        ),
        "no tokenizer": (lambda m: generate(with_tokenizer(m, None), "ab"), "no tokenizer"),
        "no chat": (
            lambda m: generate(with_tokenizer(m, None), [{"role": "user", "content": "a"}]),
            "no tokenizer",
        ),
        "stream without head": (
            lambda m: stream(dataclasses.replace(m, draft=None, draft_config=None), [1]),
            "no draft head",
        ),
    }


@pytest.mark.parametrize("name", refusals())
def test_bad_arguments_are_refused_in_one_line(speaking, name):
    call, says = refusals()[name]
    with pytest.raises(ValueError, match=says) as error:
        call(speaking)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 200


def test_the_last_legal_request_is_not_refused():
    call = prepare(rig_m(), [[1] * 860], PLAIN, 40, 0.0, 1.0, 0, 0)
    assert call.slots == CONTEXT


def test_texts_are_the_bytes_without_special_tokens(speaking):
    out = generate(speaking, [END], NEW)
    twice = (BYTES * 2).decode(errors="replace")
    assert out.texts == [twice]
    ended = speculative_generate(with_eos(speaking, END), [END], NEW, tree="paper")
    assert ended.token_ids == [list(range(32))]
    assert ended.texts == [BYTES.decode(errors="replace")]


@pytest.mark.parametrize("tree", [None, "paper"])
def test_pieces_of_a_stream_join_to_the_text(any_tokenizer, tree):
    """Rig M returns after 32 tokens, so the text ends with the token it started after: also in the
    middle of an emoji."""
    model = with_tokenizer(rig_m(noise=0.5), any_tokenizer)
    split = 0
    for start in range(32):
        text = generate(model, [start], NEW).texts[0]
        pieces = [piece.text for piece in stream(model, [start], NEW, tree=tree)]
        assert "".join(pieces) == text
        split += len(pieces)
    assert split > 32 * 4  # in pieces indeed


@pytest.mark.parametrize("tree", [None, "paper"])
def test_a_batch_streams_row_by_row(any_tokenizer, tree):
    model = with_eos(with_tokenizer(rig_m(noise=0.5), any_tokenizer), 20)
    budgets = [0, 9, NEW, NEW]
    whole = generate(model, PROMPTS, budgets)
    pieces = stream(model, PROMPTS, budgets, tree=tree)
    with pytest.raises(RuntimeError, match="before its last piece"):
        _ = pieces.generation
    texts, tokens, order = [""] * 4, [[] for _ in PROMPTS], []
    for piece in pieces:
        texts[piece.row] += piece.text
        tokens[piece.row] += piece.token_ids
        order.append(piece.row)
    assert texts == whole.texts == pieces.generation.texts
    assert tokens == whole.token_ids == pieces.generation.token_ids
    assert pieces.generation.finish_reasons == whole.finish_reasons
    assert order[:3] == [1, 2, 3]  # the first tokens come together
    assert 2 in order[order.index(3) + 1 :]


def test_without_a_tokenizer_a_stream_yields_tokens():
    pieces = list(stream(rig_m(), [3], NEW, tree="chain-3"))
    assert [t for piece in pieces for t in piece.token_ids] == [t % 32 for t in range(4, 4 + NEW)]
    assert {piece.text for piece in pieces} == {""}
    assert len(pieces) > 3


def test_a_stream_that_ends_early_frees_what_lies_on_the_device(speaking):
    def state_arrays() -> int:
        gc.collect()
        return sum(x.shape == (1, 2, 8, 128) for x in jax.live_arrays())  # keys of a layer

    assert state_arrays() == 0
    pieces = stream(speaking, [1] * 70, NEW - 8, tree="chain-3")
    next(pieces)
    assert state_arrays() > 0
    pieces.close()
    assert state_arrays() == 0
    assert list(pieces) == []
    with stream(speaking, [1] * 70, NEW - 8, tree="chain-3") as held:
        next(held)
        assert state_arrays() > 0
    assert state_arrays() == 0
    for _ in stream(speaking, [1] * 70, NEW - 8, tree="chain-3"):
        break
    assert state_arrays() == 0


# " ab😀\xffc한d...": what is written from token 1 on starts with "b".
STOPS = {
    "inside": "ef",
    "one token": "g",
    "across tokens": "\N{GRINNING FACE}",
    "hangul and what is before it": "c한",
    "never": "zz",
    "begins and does not end": "ghijX",
}


@pytest.mark.parametrize("name", STOPS)
def test_stop_strings(any_tokenizer, name):
    """Found by decoding every prefix; the same for plain, every tree, streams, and statistics."""
    model, stop = with_tokenizer(rig_m(noise=0.5), any_tokenizer), STOPS[name]
    prompts = [[1], [9], [17], [30]]
    whole = generate(model, prompts, NEW)
    plain = generate(model, prompts, NEW, stop=stop)
    for row, tokens in enumerate(whole.token_ids):
        texts = [
            model.tokenizer.decode(tokens[:n], skip_special_tokens=True) for n in range(NEW + 1)
        ]
        end = next((n for n, text in enumerate(texts) if stop in text), None)
        assert plain.token_ids[row] == tokens[:end]
        assert plain.texts[row] == (texts[NEW] if end is None else texts[end].split(stop)[0])
        assert plain.finish_reasons[row] == ("length" if end is None else "stop")
        assert plain.stats.target_passes[row] == (NEW if end is None else end)
    assert ("stop" in plain.finish_reasons) == (name not in ("never", "begins and does not end"))
    for tree in ("paper", "chain-7"):
        fast = speculative_generate(model, prompts, NEW, stop=stop, tree=tree)
        assert fast.token_ids == plain.token_ids
        assert fast.texts == plain.texts
        assert fast.finish_reasons == plain.finish_reasons
        passes, kept = sum(fast.stats.target_passes), sum(fast.stats.accepted_by_depth)
        assert sum(map(len, fast.token_ids)) == pytest.approx(passes + kept * (passes - 4))
        pieces = stream(model, prompts, NEW, stop=stop, tree=tree)
        texts = [""] * 4
        for piece in pieces:
            texts[piece.row] += piece.text
            assert plain.texts[piece.row].startswith(texts[piece.row])
        assert texts == plain.texts
        assert pieces.generation.stats.target_passes == fast.stats.target_passes


def test_of_several_stop_strings_the_first_completed_counts(speaking):
    settings = {"stop": [["hij", "ghijk"], ["ij", "hij"], [], ["i"]], "tree": "chain-7"}
    found = speculative_generate(speaking, [[14]] * 4, 20, **settings)
    whole = generate(speaking, [14], 20).texts[0]
    before = whole[: whole.index("g")]
    # "hij" is complete before "ghijk"; "ij" and "hij" end together, and "hij" begins first.
    assert found.texts == [f"{before}g", f"{before}g", whole, f"{before}gh"]
    assert found.finish_reasons == ["stop", "stop", "length", "stop"]


def test_an_end_before_a_stop_string_wins(speaking):
    model = with_eos(speaking, BYTES.index(b"h"))
    out = speculative_generate(model, [14], 20, stop="gh", tree="paper")
    assert out.finish_reasons == ["stop"]  # the token that ends the row completes it too
    out = speculative_generate(model, [14], 20, stop="ghi", tree="paper")
    assert out.finish_reasons == ["eos"]


def test_a_stop_string_in_the_first_token(speaking):
    out = speculative_generate(speaking, [BYTES.index(b"g") - 1], 20, stop="g", tree="paper")
    assert out.texts == [""]
    assert out.token_ids == [[BYTES.index(b"g")]]
    assert out.stats.target_passes == [1]


def joined(pieces: Stream) -> str:
    return "".join(piece.text for piece in pieces)


def test_a_stream_obeys_sampling_and_eos(speaking):
    model = with_eos(with_tokenizer(rig_o(), speaking.tokenizer), 20)
    settings = {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "seed": SEED + 2}
    out = speculative_generate(model, PROMPTS[2], NEW, **settings)
    assert joined(stream(model, PROMPTS[2], NEW, **settings)) == out.texts[0]
    chat = [{"role": "user", "content": "ab"}]
    said = generate(model, chat, NEW)
    assert joined(stream(model, chat, NEW)) == said.texts[0]
    assert joined(stream(model, chat, NEW, tree=None)) == said.texts[0]
