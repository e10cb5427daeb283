"""Penalties, biases, bans and what else `Options` offers: by hand, by transformers, and lossless.

Axes: B rows, V vocabulary.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rigs
import torch
from rigs import CONFIG, PROMPTS, SEED, TREES, rig_o, rig_r, with_eos
from transformers.generation import logits_process

from clover_jax.target import Target, causal_mask
from infer import Generation, generate, speculative_generate
from infer.adjust import Adjustments, adjust, history
from infer.noise import gumbel, row_keys

V = CONFIG.vocab_size
NEW = 24
EOS = 20  # rows 0 and 3 come to it soon

# Every option, alone and together, with values per row where a row could be mixed up.
OPTIONS: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": [1.3, 1.0, 2.0, 0.7]},
    "presence": {"presence_penalty": [1.5, 0.0, -0.8, 3.0]},
    "frequency": {"frequency_penalty": [0.6, 0.0, 1.2, -0.3]},
    "bias": {"logit_bias": [{3: 4.0}, {}, {0: -9.0, 1: 2.0}, {EOS: float("-inf")}]},
    "bad tokens": {"bad_words": [[[25]], [], [[9], [0]], [[23]]]},
    "bad words": {"bad_words": [[[0, 1]], [], [[9, 2], [0, 0, 0, 0], [1, 1]], [[23, 31, 8]]]},
    "minimum": {"min_new_tokens": [9, 0, 17, 8]},
    "min-p": {"min_p": [0.2, 0.0, 0.05, 0.9], "temperature": 1.5},
    "stop tokens": {"stop_token_ids": [[1], [], [5, 8], [14]]},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.3,
        "logit_bias": {3: 2.0},
        "bad_words": [[5, 9], [2], [0, 0]],
        "min_new_tokens": 6,
        "stop_token_ids": [4],
        "min_p": 0.02,
        "temperature": 0.9,
        "top_p": 0.95,
        "top_k": 20,
    },
}


def model():
    return with_eos(rig_r(), EOS)


@functools.cache
def plainly(name: str) -> Generation:
    return generate(model(), PROMPTS, NEW, seed=SEED, **OPTIONS[name])


def row_of(options: dict[str, Any], row: int) -> dict[str, Any]:
    """What holds for one row, by what the values are lists of."""
    nested = {"bad_words": 3, "stop_token_ids": 2}

    def depth(value: Any) -> int:
        return 1 + max(map(depth, value), default=0) if isinstance(value, list) else 0

    per_row = {k: depth(v) >= nested.get(k, 1) for k, v in options.items()}
    return {k: v[row] if per_row[k] else v for k, v in options.items()}


def by_hand(prompt: list[int], seed: int, options: dict[str, Any]) -> list[int]:
    """Token by token, each from one pass over all tokens before it, with numpy alone after it."""
    target, weights = Target(CONFIG), {"params": model().params}
    text = list(prompt)
    keys = row_keys(seed, 1)
    temperature = options.get("temperature", 0.0)
    while len(text) - len(prompt) < NEW:
        padded = jnp.asarray([text + [0] * (64 - len(text))])
        logits = np.asarray(_logits(target, weights, padded))[len(text) - 1].astype(np.float64)
        new = text[len(prompt) :]
        for token in range(V):
            if token in text:
                penalty = options.get("repetition_penalty", 1.0)
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            if token in new:
                logits[token] -= options.get("presence_penalty", 0.0)
            logits[token] -= options.get("frequency_penalty", 0.0) * new.count(token)
            logits[token] += options.get("logit_bias", {}).get(token, 0.0)
        for word in options.get("bad_words", []):
            if text[len(text) - len(word) + 1 :] == word[:-1]:
                logits[word[-1]] = -np.inf
        ends = [EOS, *options.get("stop_token_ids", [])]
        if len(new) < options.get("min_new_tokens", 0):
            logits[ends] = -np.inf
        if temperature:
            logits /= temperature
            order = np.argsort(-logits)
            kept = order[: options.get("top_k", V) or V]
            mass = np.exp(logits[kept] - logits[order[0]])
            before = (np.cumsum(mass) - mass) / mass.sum()
            kept = kept[before < options.get("top_p", 1.0)]
            kept = kept[np.exp(logits[kept] - logits[order[0]]) >= options.get("min_p", 0.0)]
            out = np.setdiff1d(np.arange(V), kept)
            logits[out] = -np.inf
            logits += np.asarray(gumbel(keys, jnp.asarray([len(text)]), V))[0]
        text.append(int(np.argmax(logits)))
        if text[-1] in ends:
            break
    return text[len(prompt) :]


@functools.partial(jax.jit, static_argnums=0)
def _logits(target: Target, weights: Any, tokens: jax.Array) -> jax.Array:
    length = tokens.shape[1]
    hidden, _ = target.apply(weights, tokens, jnp.arange(length)[None], causal_mask(length))
    return target.apply(weights, hidden, method="logits")[0]


@pytest.mark.parametrize("name", OPTIONS)
def test_plain_decoding_does_what_is_asked(name):
    found = plainly(name).token_ids
    for row, prompt in enumerate(PROMPTS):
        assert found[row] == by_hand(prompt, SEED + row, row_of(OPTIONS[name], row))


@pytest.mark.parametrize("name", OPTIONS)
def test_every_option_matters(name):
    warm = {k: v for k, v in OPTIONS[name].items() if k in ("temperature", "top_p", "top_k")}
    without = generate(model(), PROMPTS, NEW, seed=SEED, **warm).token_ids
    differs = [a != b for a, b in zip(plainly(name).token_ids, without, strict=True)]
    assert sum(differs) >= 2


@pytest.mark.parametrize("tree", ["paper", "wide", "dynamic"])
def test_speculative_equals_plain_with_every_option(tree):
    """Tokens accepted together count for each other, so this fails if one is judged alone."""
    for name, options in OPTIONS.items():
        fast = speculative_generate(model(), PROMPTS, NEW, seed=SEED, tree=TREES[tree], **options)
        assert fast.token_ids == plainly(name).token_ids, name
        assert fast.finish_reasons == plainly(name).finish_reasons, name


def test_options_hold_inside_long_accepted_paths():
    """Rig O's head knows its texts by heart, so several tokens a pass meet the penalties."""
    known_by_heart = with_eos(rig_o(), EOS)
    known = generate(known_by_heart, PROMPTS, 40, seed=SEED)
    words = [[row[at : at + 3] for at in (4, 5, 6)] for row in known.token_ids]
    for options in (OPTIONS["frequency"], OPTIONS["minimum"], {"bad_words": words}):
        plain = generate(known_by_heart, PROMPTS, 40, seed=SEED, **options)
        fast = speculative_generate(known_by_heart, PROMPTS, 40, seed=SEED, tree="paper", **options)
        assert plain.token_ids != known.token_ids
        assert fast.token_ids == plain.token_ids
    assert known.stats.tokens_per_pass == 1
    assert fast.stats.tokens_per_pass > 1.5


def test_log_probabilities_are_the_targets_own():
    settings = {"temperature": 1.4, "top_k": 9, "repetition_penalty": 1.3, "seed": SEED}
    plain = generate(model(), PROMPTS, NEW, **settings, logprobs=True)
    fast = speculative_generate(model(), PROMPTS, NEW, tree="paper", **settings, logprobs=True)
    assert plain.logprobs is not None
    assert fast.logprobs is not None
    for row, prompt in enumerate(PROMPTS):
        new = plain.token_ids[row]
        text = jnp.asarray([prompt + new + [0] * (64 - len(prompt) - len(new))])
        rows = jax.nn.log_softmax(_logits(Target(CONFIG), {"params": model().params}, text))
        places = len(prompt) - 1 + np.arange(len(new))
        np.testing.assert_allclose(plain.logprobs[row], rows[places, np.array(new)], atol=1e-4)
        np.testing.assert_allclose(fast.logprobs[row], plain.logprobs[row], atol=1e-4)
    assert generate(model(), PROMPTS, 4).logprobs is None


def test_samples_of_a_prompt_are_rows_with_consecutive_seeds():
    settings = {"temperature": 1.0, "max_new_tokens": [8, 12]}
    for seed, seeds in ((5, [5, 6, 7, 8, 9, 10]), ([5, 50], [5, 6, 7, 50, 51, 52])):
        three = speculative_generate(
            model(), PROMPTS[:2], seed=seed, num_samples=3, tree="chain-3", **settings
        )
        apart = generate(
            model(),
            [PROMPTS[0]] * 3 + [PROMPTS[1]] * 3,
            [8] * 3 + [12] * 3,
            temperature=1.0,
            seed=seeds,
        )
        assert three.token_ids == apart.token_ids
    assert len({tuple(row) for row in three.token_ids[:3]}) == 3


def settings_of(**changes: Any) -> Adjustments:
    off = rigs.row_sampling(1, 0).adjustments
    return off._replace(active=jnp.ones(1, bool), **{k: jnp.asarray(v) for k, v in changes.items()})


def adjusted(settings: Adjustments, text: list[int], new: int, logits: np.ndarray) -> np.ndarray:
    length, emitted = jnp.asarray([len(text)]), jnp.asarray([new])
    past = history(settings, jnp.asarray([text + [0] * 4]), length, emitted)
    none = jnp.zeros((1, 1, 0), jnp.int32)
    return np.asarray(adjust(jnp.asarray(logits)[None, None], settings, past, none))[0, 0]


def test_transformers_agrees():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=V).astype(np.float32)
    text = [3, 5, 3, 9, 2, 2]
    ids, scores = torch.tensor([text]), torch.tensor(logits)[None]

    penalty = logits_process.RepetitionPenaltyLogitsProcessor(1.7)
    expected = penalty(ids, scores.clone())[0].numpy()
    found = adjusted(settings_of(repetition=[1.7]), text, 2, logits)
    np.testing.assert_allclose(found, expected, rtol=1e-6)

    words = [[9, 2, 2, 8], [2, 4], [1, 5]]
    ban = logits_process.NoBadWordsLogitsProcessor(words, eos_token_id=torch.tensor([V - 1]))
    expected = ban(ids, scores.clone())[0].numpy()
    table = [[[9, 2, 2, 8], [-1, -1, 2, 4], [-1, -1, 1, 5], [-1] * 4]]
    found = adjusted(settings_of(bad_words=table), text, 2, logits)
    assert np.flatnonzero(np.isneginf(found)).tolist() == [4, 8]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"repetition_penalty": 0.0}, "repetition_penalty must be between 0.001 and 1000.0"),
        ({"presence_penalty": float("nan")}, "presence_penalty must be between"),
        ({"min_p": 1.5}, "min_p must be between 0.0 and 1.0, got 1.5"),
        ({"min_new_tokens": -1}, "min_new_tokens must be between 0"),
        ({"logit_bias": {V: 1.0}}, f"logit_bias holds token id {V}, outside the vocabulary of {V}"),
        ({"logit_bias": {3: float("nan")}}, "logit_bias of token 3 must be a number"),
        ({"logit_bias": {"3": 1.0}}, "logit_bias maps token ids to numbers"),
        ({"logit_bias": [{}, {}]}, "logit_bias holds 2 values for 4 prompts"),
        ({"logit_bias": dict.fromkeys(range(V), float("-inf"))}, "leave no token to prompt 0"),
        ({"bad_words": [["x"]]}, "bad_words holds 1 values for 4 prompts"),
        ({"bad_words": ["x"]}, "need a tokenizer"),
        ({"bad_words": [[V, 2]]}, f"bad_words holds token id {V}"),
        ({"bad_words": 3}, "bad_words 3 is neither"),
        ({"stop": "x"}, "this model has no tokenizer"),
        ({"stop_token_ids": [-1]}, "stop_token_ids holds token id -1"),
        ({"num_samples": 0}, "num_samples must be a whole number of at least 1, got 0"),
        ({"temprature": 1.0}, "option 'temprature' is not known"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options, says):
    with pytest.raises(ValueError, match=says):
        generate(model(), PROMPTS, 4, **options)
