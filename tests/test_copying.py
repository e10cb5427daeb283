"""Copying from the text: the longest match, what the draft makes of it, and the fitted bias."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rigs

from clover_jax.config import DraftConfig
from clover_jax.copying import last_tokens, longest_match
from clover_jax.tree import parse_tree
from infer import generate, speculative_generate
from infer.sampling import gumbel_noise
from train.copy_bias import copied_tokens, copy_cases, fit_bias
from train.initialize import initialize_head
from train.loss import Vocabulary, head_features, read_samples
from train.segments import Samples


def brute_force(text: list[int], ending: list[int], longest: int) -> tuple[int, int]:
    """(place, length) of the longest occurrence of the ending before the end of the text."""
    best = (0, 0)
    for place in range(1, len(text)):
        before = text[:place][::-1]
        length = 0
        while length < min(longest, len(before), len(ending)) and before[length] == ending[length]:
            length += 1
        if length and length >= best[1]:
            best = (place, length)
    return best


@pytest.mark.parametrize("longest", [1, 3, 8])
def test_the_longest_and_latest_match(longest: int) -> None:
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 3, (64, 24))
    known = rng.integers(0, 24, (64, 1))
    ending = last_tokens(jnp.asarray(tokens), jnp.asarray(known), longest)
    match = longest_match(jnp.asarray(tokens), jnp.asarray(known), ending)
    lengths = set()
    for row in range(64):
        text = tokens[row, : known[row, 0] + 1].tolist()
        place, length = brute_force(text, text[::-1], longest)
        assert match.length[row, 0] == length
        if length:
            assert match.place[row, 0] == place
        lengths.add(length)
    assert lengths >= set(range(min(longest, 4) + 1))


def test_nothing_matches_beyond_the_beginning() -> None:
    """A text of zeros: what lies before it is no zero, and no -1 either."""
    tokens = jnp.zeros((1, 6), jnp.int32)
    for known, length in ((0, 0), (1, 1), (3, 3), (5, 4)):
        ending = last_tokens(tokens, jnp.asarray([[known]]), 4)
        match = longest_match(tokens, jnp.asarray([[known]]), ending)
        assert match.length[0, 0] == length
        assert not length or match.place[0, 0] == known


def proposals(text: list[int], tree: Any, temperature: float = 0.0, **changes: Any) -> list[int]:
    """What rig R's head proposes after a text, slots to spare, without the root."""
    model = rigs.rig_r()
    if ids := changes.pop("ids", None):
        model = rigs.with_draft_vocabulary(model, ids)
    config = dataclasses.replace(model.draft_config, **changes)
    tree = parse_tree(tree)
    sampling = rigs.row_sampling(1, 0, temperature=temperature)
    length = jnp.asarray([len(text) - 1])
    noise = [gumbel_noise(sampling, length + 1 + d, 32) for d in range(tree.depth)]
    slots = jnp.asarray([text + [7] * (40 - len(text))])
    state = jnp.asarray(np.random.default_rng(5).normal(size=(1, 32)), jnp.float32)
    found = rigs.proposal(config, model.draft, tree, state, slots, length, noise, sampling)
    return np.asarray(found.tokens)[0, 1:].tolist()


def test_a_phrase_is_copied_node_by_node() -> None:
    text = [4, 1, 2, 3, 9, 11, 4, 1]
    assert proposals(text, "chain-4", copy_bias=(50.0, 60.0)) == [2, 3, 9, 11]
    # What was copied is part of the text for the nodes after it: the loop closes.
    assert proposals([8, 5, 6, 8], "chain-7", copy_bias=(50.0,)) == [5, 6, 8, 5, 6, 8, 5]


def test_every_branch_copies_by_its_own_path() -> None:
    """Node [1, 0] comes after node [1], and not after its neighbour, which is followed by 28."""
    (own,) = proposals([10], [[0]], copy_bias=())
    text = [own, 25, 26, 30, 25, 28, 10, 30, 31, 32, 10]
    assert len(set(text)) == 8
    tree = [[0], [1], [0, 0], [1, 0], [1, 1], [1, 0, 0], [1, 1, 0]]
    found = proposals(text, tree, copy_bias=(50.0, 60.0, 70.0))
    assert found[:4] == [30, own, 31, 25]
    assert found[5] == 26


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_the_copied_token_takes_the_place_of_its_own(temperature: float) -> None:
    """With its logit raised and the noise that is its own; no token is proposed twice."""
    text = [4, 1, 2, 3, 4, 1]

    def ranking(*bias: float) -> list[int]:
        return proposals(text, [[i] for i in range(32)], temperature, copy_bias=bias)

    without = ranking()
    assert sorted(without) == list(range(32))
    others = [token for token in without if token != 2]
    assert without not in ([2, *others], [*others, 2])
    assert ranking(0.0, 0.0) == without
    assert ranking(0.0, 99.0) == [2, *others]
    assert ranking(99.0, -99.0) == [*others, 2]


def test_nothing_to_copy() -> None:
    text = [4, 1, 2, 3, 5]
    assert proposals(text, "paper", copy_bias=(50.0,)) != []
    assert proposals(text, [[0], [1]], copy_bias=(50.0,)) == proposals(
        text, [[0], [1]], copy_bias=()
    )


def test_a_token_outside_the_draft_vocabulary_is_copied() -> None:
    text, ids = [4, 30, 2, 4], [0, 1, 3]
    assert proposals(text, [[0], [1]], ids=ids, copy_bias=(50.0,))[0] == 30
    assert set(proposals(text, [[0], [1]], ids=ids, copy_bias=())) <= set(ids)
    # Nothing matches: three tokens are left for five children.
    alone = proposals([4, 30], [[i] for i in range(5)], ids=ids, copy_bias=(50.0,))
    assert sorted(alone) == [-1, -1, *ids]


def test_copying_finds_what_a_bad_head_does_not() -> None:
    """Rig M goes round in a circle; a head that knows nothing then copies every token."""
    model = rigs.rig_m()
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), model.draft.params
    )
    model = dataclasses.replace(model, draft=model.draft._replace(params=params))
    copying = dataclasses.replace(model.draft_config, copy_bias=(90.0,))
    prompt = [*range(28, 32), *range(32), *range(4)]
    plain = generate(model, prompt, 24)
    bad = speculative_generate(model, prompt, 24, tree="chain-3")
    good = speculative_generate(
        dataclasses.replace(model, draft_config=copying), prompt, 24, tree="chain-3"
    )
    assert plain.token_ids == bad.token_ids == good.token_ids == [[*range(4, 28)]]
    assert bad.stats.target_passes[0] > 16
    assert good.stats.target_passes == [7]  # the first token, then 23 in steps of 4


# The fit.


def packed(rng: np.random.Generator) -> Samples:
    """Two rows of two samples and padding, from few tokens, so that much repeats."""
    segments = np.repeat([[1, 2, 0], [1, 2, 0]], [13, 14, 3], axis=1)
    tokens = np.where(segments, rng.integers(0, 4, segments.shape), 0).astype(np.int32)
    return Samples(tokens, (segments > 0) & (rng.random(segments.shape) < 0.8), segments)


def test_copied_tokens_stay_in_their_sample() -> None:
    samples = packed(np.random.default_rng(1))
    token, length = copied_tokens(samples, 5, 32)
    for row in range(2):
        for start, end in ((0, 13), (13, 27)):
            for at in range(start, end):
                text = samples.tokens[row, start : at + 1].tolist()
                place, expected = brute_force(text, text[::-1], 5)
                assert length[row, at] == expected
                if expected:
                    assert token[row, at] == text[place]


def test_cases_are_those_the_draft_meets() -> None:
    """Against the same numbers, written out position by position."""
    target = rigs.rig_r()
    config = dataclasses.replace(
        DraftConfig.for_target(rigs.CONFIG, num_layers=1), num_steps=3, draft_vocab_size=3
    )
    params = initialize_head(config, target.params, jax.random.key(0), hidden_rms=6.5)
    rng = np.random.default_rng(2)
    samples = packed(rng)
    hidden = jnp.asarray(rng.normal(size=(2, 30, 32)), jnp.float32)
    row_of = np.full(32, -1, np.int32)
    row_of[[0, 2, 5]] = [0, 1, 2]
    head = target.params["lm_head"]
    vocabulary = Vocabulary(
        head[jnp.asarray([0, 2, 5])], jnp.asarray(row_of), target.params["embed_tokens"]
    )
    lead, right, length = map(
        np.asarray, copy_cases(config, 4, params, hidden, vocabulary, head, samples)
    )
    state = read_samples(config, params, hidden, vocabulary.embedding, samples)
    copied, matched = map(np.asarray, copied_tokens(samples, 4, 32))
    seen = 0
    for row in range(2):
        for t in range(30):
            for i in range(3):
                goal = t + 2 + i
                inside = goal < 30 and samples.segments[row, goal] == samples.segments[row, t] > 0
                if not (inside and samples.mask[row, goal] and matched[row, goal - 1]):
                    assert length[i, row, t] == 0
                    continue
                drafted = vocabulary.embedding[samples.tokens[row, t + 2 : t + 4]][:, None]
                features = head_features(config, params, state[row, t][None], drafted)[i, 0]
                logits = head @ features
                token = int(copied[row, goal - 1])
                others = [float(logits[j]) for j in (0, 2, 5) if j != token]
                expected = float(logits[token]) - np.log(np.sum(np.exp(others)))
                np.testing.assert_allclose(lead[i, row, t], expected, rtol=1e-4, atol=1e-4)
                assert length[i, row, t] == matched[row, goal - 1]
                assert right[i, row, t] == (token == samples.tokens[row, goal])
                seen += 1
    assert seen > 50


def test_the_fit_finds_the_bias() -> None:
    rng = np.random.default_rng(3)
    truth = np.array([0.0, -1.0, 2.0, 4.0])
    length = rng.integers(0, 4, 40_000)
    lead = rng.normal(-3.0, 2.0, length.shape)
    right = rng.random(length.shape) < 1 / (1 + np.exp(-(lead + truth[length])))
    np.testing.assert_allclose(fit_bias(lead, right, length, 3), truth[1:], atol=0.15)
    # Never seen; and seen twice, which is no certainty.
    few = fit_bias(np.array([-3.0, -3.0]), np.array([True, True]), np.array([2, 2]), 2)
    assert few[0] == 0.0
    assert 1.0 < few[1] < 8.0
