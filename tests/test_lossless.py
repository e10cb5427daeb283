"""Speculative decoding emits what plain decoding emits, whatever the draft, tree and settings.

The rigs are those of rigs.py. In f32 the two may part only where two scores are equal up to
rounding; such places are counted, and there must be next to none.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import rigs
from rigs import CONTEXT, NEW, PROMPTS, SEED, TREES, rig_m, rig_o, rig_r

from clover_jax.rope import Rope
from clover_jax.tree import parse_tree
from infer import Generation, Stats, generate, session, speculative_generate
from infer.call import Call, prepare
from infer.load import Model
from infer.sampling import gumbel_noise
from train.step import cast_weights

RIGS: dict[str, Callable[[], Model]] = {
    "M": rig_m,
    "M, draft misled": functools.partial(rig_m, noise=0.5),
    "R": rig_r,
    "O": rig_o,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "nucleus": {"temperature": 0.7, "top_p": 0.9},
    "hot": {"temperature": 1.3},
    "top-k": {"temperature": 1.0, "top_k": 4, "top_p": 0.95},
}
near_ties: list[int] = []


@functools.cache
def plainly(rig: str, setting: str) -> Generation:
    return generate(RIGS[rig](), PROMPTS, NEW, seed=SEED, **SETTINGS[setting])


def check_same(
    model: Model, prompts: Sequence[Sequence[int]], plain: Generation, fast: Generation, **settings
) -> None:
    """Equal texts, but for near-ties, which are counted."""
    sampling = rigs.row_sampling(len(prompts), SEED, **settings)
    ties = rigs.near_ties(model, prompts, plain.token_ids, fast.token_ids, sampling)
    near_ties.append(ties)
    if not ties:
        assert fast.finish_reasons == plain.finish_reasons


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("rig", ["M", "R"])
def test_plain_decoding_emits_the_targets_choices(rig, setting):
    said = plainly(rig, setting).token_ids
    sampling = rigs.row_sampling(len(PROMPTS), SEED, **SETTINGS[setting])
    forced = rigs.teacher_forced(RIGS[rig](), PROMPTS, said, sampling)
    clear = forced.margins > rigs.NEAR
    assert clear.mean() > 0.99
    assert np.array_equal(forced.choices[clear], np.array(said)[clear])


@pytest.mark.parametrize("rig", RIGS)
@pytest.mark.parametrize("tree", TREES)
def test_speculative_equals_plain(rig, tree):
    model = RIGS[rig]()
    for name, settings in SETTINGS.items():
        fast = speculative_generate(model, PROMPTS, NEW, seed=SEED, tree=TREES[tree], **settings)
        check_same(model, PROMPTS, plainly(rig, name), fast, **settings)


@pytest.mark.parametrize("rig", ["R", "O"])
def test_bfloat16_weights_under_float32_activations(rig):
    """As `load` gives them on a CPU."""
    model = RIGS[rig]()
    params = cast_weights(model.params, jnp.bfloat16)
    params["lm_head"] = params["lm_head"].astype(jnp.bfloat16)
    draft = model.draft._replace(
        params=cast_weights(model.draft.params, jnp.bfloat16), lm_rows=params["lm_head"]
    )
    model = dataclasses.replace(model, params=params, draft=draft)
    for name in ("greedy", "nucleus"):
        plain = generate(model, PROMPTS, NEW, seed=SEED, **SETTINGS[name])
        assert plain.token_ids != plainly(rig, name).token_ids  # so the weights did change
        fast = speculative_generate(
            model, PROMPTS, NEW, seed=SEED, tree="chain-3", **SETTINGS[name]
        )
        assert fast.token_ids == plain.token_ids


def test_the_rigs_accept_what_they_should():
    """Otherwise the tests around this one would see little."""

    def run(model: Model, tree: str, **settings) -> Stats:
        return speculative_generate(
            model, PROMPTS, NEW, seed=SEED, tree=TREES[tree], **settings
        ).stats

    for settings in SETTINGS.values():
        exact = run(rig_m(), "chain-7", **settings)
        # The first token comes from the prefill; the 63 others take 7 passes of 8, and one of 7.
        assert exact.target_passes == [9] * 4
        assert exact.accepted_by_depth == [1.0] * 6 + [pytest.approx(7 / 8)]
        misled = run(rig_m(noise=0.5), "paper", **settings).accepted_by_depth
        assert misled[0] > 0.6
        assert misled[1] < 0.99
        assert run(rig_r(), "wide", **settings).accepted_by_depth[0] > 0.95
    assert run(rig_o(), "paper").tokens_per_pass > 3
    assert run(rig_o(), "paper").accepted_by_depth[4] > 0.1
    assert run(rig_o(), "paper", **SETTINGS["nucleus"]).tokens_per_pass > 3


@pytest.mark.parametrize("rig", ["R", "O"])
@pytest.mark.parametrize("setting", ["greedy", "nucleus"])
def test_rows_are_as_if_alone(rig, setting):
    model, settings = RIGS[rig](), SETTINGS[setting]
    together = speculative_generate(model, PROMPTS, NEW, seed=SEED, tree="paper", **settings)
    for row, prompt in enumerate(PROMPTS):
        seed = SEED + row  # what a scalar seed means for this row
        alone = speculative_generate(model, prompt, NEW, seed=seed, tree="paper", **settings)
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.stats.target_passes == [together.stats.target_passes[row]]
        plain = generate(model, prompt, NEW, seed=seed, **settings)
        assert plain.token_ids == alone.token_ids


def test_mixed_batch_of_temperatures():
    model = rig_o()
    settings = {"temperature": [0.0, 1.0, 0.5, 0.0], "top_k": 6, "top_p": 0.4}
    plain = generate(model, PROMPTS, NEW, seed=SEED, **settings)
    fast = speculative_generate(model, PROMPTS, NEW, seed=SEED, tree="paper", **settings)
    check_same(model, PROMPTS, plain, fast, **settings)
    greedy = speculative_generate(model, PROMPTS, NEW, tree="paper")
    for row in (0, 3):
        assert plain.token_ids[row] == plainly("O", "greedy").token_ids[row]
        # Their drafts, too, are those of greedy decoding.
        assert fast.stats.target_passes[row] == greedy.stats.target_passes[row]
    assert fast.token_ids[1] != greedy.token_ids[1]


@pytest.mark.parametrize(
    ("rig", "tree", "setting"),
    [("M", "chain-7", "greedy"), ("O", "paper", "greedy"), ("O", "paper", "nucleus")],
)
def test_eos_at_every_place_of_a_pass(rig, tree, setting):
    """The first token comes from the prefill, rig M's tokens 1 to 7 from accepted drafts, 8 from
    the target after them, and so on; each in turn is declared to end the text."""
    settings = SETTINGS[setting]
    full = plainly(rig, setting).token_ids
    for place in range(18):
        eos = full[0][place]
        model = rigs.with_eos(RIGS[rig](), eos)
        expected = [row[: row.index(eos) + 1] if eos in row else row for row in full]
        plain = generate(model, PROMPTS, NEW, seed=SEED, **settings)
        assert plain.token_ids == expected
        fast = speculative_generate(model, PROMPTS, NEW, seed=SEED, tree=TREES[tree], **settings)
        check_same(model, PROMPTS, plain, fast, **settings)
        ended = ["eos" if eos in row else "length" for row in full]
        assert plain.finish_reasons == ended


def test_any_of_several_eos_tokens_ends_a_row():
    full = plainly("M", "greedy").token_ids[0]  # a cycle: every token appears once
    model = rigs.with_eos(rig_m(), full[20], full[3], full[9])
    out = speculative_generate(model, PROMPTS, NEW, tree="chain-7")
    assert out.token_ids[0] == full[:4]
    assert out.finish_reasons[0] == "eos"


def test_budgets_are_exact():
    model = rigs.with_eos(rig_m(), 31)
    prompts, seed = [PROMPTS[0]] * 4, [SEED] * 4  # 11, 12, ...: token 20 ends it
    for settings in ({}, SETTINGS["nucleus"]):
        full = generate(model, prompts, NEW, seed=seed, **settings).token_ids[0]
        end = len(full)
        for budgets in ([NEW, 0, 1, 2], [NEW, 3, 5, 6], [NEW, 7, 8, 9], [NEW, end - 1, end, 50]):
            for out in (
                generate(model, prompts, budgets, seed=seed, **settings),
                speculative_generate(
                    model, prompts, budgets, seed=seed, tree="chain-7", **settings
                ),
            ):
                assert out.token_ids == [full[:n] for n in budgets]
                assert out.finish_reasons == ["eos" if n >= end else "length" for n in budgets]


def test_finished_rows_neither_change_nor_count():
    # Passes of 8 tokens after the first token: 0, 1, 2 and 8 of them, the last one cut to 7.
    out = speculative_generate(rig_m(), PROMPTS, [1, 9, 17, NEW], tree="chain-7")
    full = plainly("M", "greedy").token_ids
    assert out.token_ids == [row[:n] for row, n in zip(full, [1, 9, 17, NEW], strict=True)]
    assert out.stats.target_passes == [1, 2, 3, 9]
    assert out.stats.tokens_per_pass == pytest.approx((1 + 9 + 17 + NEW) / 15)
    assert out.stats.accepted_by_depth == pytest.approx([1.0] * 6 + [10 / 11])

    for budgets in ([NEW, 1, 3, 20], [5, 30, NEW, 2]):
        together = speculative_generate(rig_o(), PROMPTS, budgets, tree="paper")
        for row, budget in enumerate(budgets):
            only = [NEW if r == (row + 1) % 4 else 0 for r in range(4)]  # keeps the bucket
            only[row] = budget
            alone = speculative_generate(rig_o(), PROMPTS, only, tree="paper")
            assert alone.token_ids[row] == together.token_ids[row]
            assert alone.stats.target_passes[row] == together.stats.target_passes[row]


def test_draft_vocabulary_is_lossless():
    """Four tokens, fewer than the tree asks for: they alone are ever proposed."""
    ids = [6, 5, 3, 4]
    for rig in ("M", "R"):
        model = rigs.with_draft_vocabulary(RIGS[rig](), ids)
        for name, settings in SETTINGS.items():
            fast = speculative_generate(
                model, PROMPTS, NEW, seed=SEED, tree=TREES["bushy"], **settings
            )
            check_same(model, PROMPTS, plainly(rig, name), fast, **settings)
            if rig == "M":
                depth = parse_tree(TREES["bushy"]).depth
                expected = [1 + passes_of_a_right_head(row, ids, depth) for row in fast.token_ids]
                passes = fast.stats.target_passes
                # A nucleus of the four alone may leave out one that the target's own holds.
                slack = 2 if name in ("nucleus", "top-k") else 0
                assert all(0 <= p - e <= slack for p, e in zip(passes, expected, strict=True))
                assert 0 < fast.stats.accepted_by_depth[0] < 1


def passes_of_a_right_head(tokens: Sequence[int], ids: Sequence[int], depth: int) -> int:
    """Verify passes if the head knows what comes next wherever it is one of the ids."""
    passes, at = 0, 1  # the first token comes with the prefill
    while at < len(tokens):
        kept = 0
        while kept < depth and at + kept < len(tokens) and tokens[at + kept] in ids:
            kept += 1
        passes, at = passes + 1, at + kept + 1
    return passes


def long_prompts(*lengths: int) -> list[list[int]]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, rigs.CONFIG.vocab_size, n).tolist() for n in lengths]


@pytest.mark.parametrize("lengths", [(860, 5), (859, 1), (255, 257), (256, 512), (513, 700)])
def test_long_prompts_and_the_end_of_the_context(lengths):
    """Prompts are read in chunks of 128; the context of 900 is no power of two."""
    model, prompts = rig_o(), long_prompts(*lengths)
    full = {860: CONTEXT, 859: CONTEXT - 1}.get(lengths[0], max(max(lengths) + 60, 520))
    budgets = [full - max(lengths), 40]
    for settings in ({}, SETTINGS["nucleus"]):
        plain = generate(model, prompts, budgets, seed=SEED, **settings)
        fast = speculative_generate(model, prompts, budgets, seed=SEED, tree="chain-5", **settings)
        check_same(model, prompts, plain, fast, **settings)
        assert [len(t) for t in plain.token_ids] == budgets
        forced = rigs.teacher_forced(
            model, prompts, plain.token_ids, rigs.row_sampling(2, SEED, **settings)
        )
        for row, said in enumerate(plain.token_ids):
            clear = forced.margins[row, : len(said)] > rigs.NEAR
            assert clear.mean() > 0.98
            assert np.array_equal(forced.choices[row, : len(said)][clear], np.array(said)[clear])


def test_acceptance_does_not_decay():
    prompts = long_prompts(300, 300)

    def passes(*budgets: int) -> list[int]:
        return speculative_generate(
            rig_m(), prompts, budgets, temperature=0.7, tree="chain-5"
        ).stats.target_passes

    # Six tokens a pass, after the first token.
    assert passes(1, 501) + passes(101, 401) == [1, 1 + 84, 1 + 17, 1 + 67]


@pytest.mark.parametrize("setting", ["greedy", "nucleus"])
def test_a_restart_proposes_the_same_drafts(setting):
    """Decoding leaves what a prefill of prompt and new tokens would have made."""
    model, tree, settings = rig_o(), parse_tree("paper"), SETTINGS[setting]

    def call_for(prompts: Sequence[Sequence[int]], budget: int) -> Call:
        return prepare(
            model,
            prompts,
            tree,
            budget,
            settings.get("temperature", 0.0),
            settings.get("top_p", 1.0),
            0,
            SEED,
        )

    def more(call: Call, state: Any) -> tuple[np.ndarray, np.ndarray]:
        before = np.asarray(state.accepted)
        call = call._replace(request=call.request._replace(budget=state.emitted + 20))
        state = session.proceed(call, state, session.UNTIL_DONE)
        said = [
            row[p:] for row, p in zip(np.asarray(state.tokens), call.prompt_length, strict=True)
        ]
        return said, np.asarray(state.accepted) - before

    first = call_for(PROMPTS, 56)
    state = session.proceed(first, session.start(first), session.UNTIL_DONE)
    assert state.accepted[:, 4].sum() > 9  # passes that emitted five tokens at once
    written = np.asarray(state.tokens)
    second = call_for([written[i, : len(p) + 55].tolist() for i, p in enumerate(PROMPTS)], 40)
    again = session.start(second)

    assert again.length.tolist() == state.length.tolist() == [len(p) + 55 for p in PROMPTS]
    for a, b, length in zip(again.tokens, state.tokens, state.length, strict=True):
        assert a[: length + 1].tolist() == b[: length + 1].tolist()
    np.testing.assert_allclose(again.draft_state, state.draft_state, atol=1e-4)
    for a, b in zip(
        again.target_cache + again.draft_cache, state.target_cache + state.draft_cache, strict=True
    ):
        for row, length in enumerate(state.length):
            np.testing.assert_allclose(a.k[row, :, :, :length], b.k[row, :, :, :length], atol=1e-4)
            np.testing.assert_allclose(a.v[row, :, :length], b.v[row, :, :length], atol=1e-4)
    drafts = [
        rigs.proposal(
            model.draft_config,
            model.draft,
            tree,
            s.draft_state,
            s.tokens,
            s.length,
            [
                gumbel_noise(c.request.sampling, s.length + 1 + d, rigs.CONFIG.vocab_size)
                for d in range(tree.depth)
            ],
            c.request.sampling,
        ).tokens
        for c, s in ((first, state), (second, again))
    ]
    assert np.array_equal(*drafts)
    continued, accepted = more(first, state)
    restarted, accepted_again = more(second, again)
    for a, b in zip(continued, restarted, strict=True):
        assert a[55:76].tolist() == b[:21].tolist()
    assert np.array_equal(accepted, accepted_again)


@pytest.mark.parametrize("setting", SETTINGS)
def test_dynamic_rope_that_crosses_its_original_context(setting):
    """The frequencies then change from token to token, also between the nodes of one tree."""
    rope = Rope(head_dim=8, kind="dynamic", factor=4.0, original_context=24)
    model = rig_r(dataclasses.replace(rigs.CONFIG, rope=rope))
    settings = SETTINGS[setting]
    plain = generate(model, PROMPTS, NEW, seed=SEED, **settings)
    assert plain.token_ids != plainly("R", setting).token_ids
    fast = speculative_generate(model, PROMPTS, NEW, seed=SEED, tree=TREES["wide"], **settings)
    assert fast.token_ids == plain.token_ids
    assert fast.stats.accepted_by_depth[0] > 0.95


def test_near_ties_are_rare():
    """Last in this file: of all the texts compared above."""
    assert sum(near_ties) <= 2
