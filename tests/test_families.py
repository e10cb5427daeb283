"""Families beside Llama: what their configs say, trees under sliding windows, heads for them.

Parity with transformers is in test_target_parity.py.
"""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
import rigs
from rigs import CONFIG, PROMPTS, SEED, TREES

from clover_jax import cache as kv_cache
from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.families import DEFAULTS
from clover_jax.target import Target, causal_mask
from clover_jax.tree import parse_tree
from clover_jax.weights.clover_config import config_json, parse_config
from infer import generate, speculative_generate

SLIDING = dataclasses.replace(CONFIG, windows=(5,) * CONFIG.num_layers)
MIXED = dataclasses.replace(
    CONFIG,
    windows=(5, None, 3, None)[: CONFIG.num_layers],
    qk_norm=True,
    post_norms=True,
    attention_softcap=20.0,
    logit_softcap=25.0,
    query_scale=0.3,
    embed_scale=1.5,
)


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_defaults_are_those_of_transformers(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoConfig.for_model(model_type)
    ours = TargetConfig.from_hf({"model_type": model_type})
    assert ours == TargetConfig.from_hf(
        {k: v for k, v in theirs.to_dict().items() if k != "architectures"}
    )
    assert ours.vocab_size == theirs.vocab_size
    assert ours.num_kv_heads == theirs.num_key_value_heads


def test_old_gemma3_config() -> None:
    """As the first checkpoints had it: a pattern, and two bases side by side."""
    config = TargetConfig.from_hf(
        {
            "model_type": "gemma3_text",
            "architectures": ["Gemma3ForCausalLM"],
            "num_hidden_layers": 7,
            "sliding_window": 512,
            "sliding_window_pattern": 6,
            "rope_theta": 1_000_000,
            "rope_local_base_freq": 10_000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        }
    )
    assert config.windows == (512,) * 5 + (None, 512)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (1e6, "linear", 8.0)
    assert (config.local_rope.theta, config.local_rope.kind) == (1e4, "default")


def test_a_window_counts_tokens_not_nodes() -> None:
    """A tree pass over a cache equals one pass over each path: siblings do not fill a window."""
    model = rigs.rig_r(SLIDING)
    target, weights = Target(SLIDING), {"params": model.params}
    tree = parse_tree([[0], [1], [2], [0, 0], [1, 0], [0, 0, 0], [0, 0, 0, 0]])
    text = np.random.default_rng(0).integers(0, 32, 9)
    drafted = np.random.default_rng(1).integers(0, 32, tree.size)
    cache = kv_cache.init(SLIDING, 1, 16, jnp.dtype(jnp.float32))
    places = jnp.arange(9)[None]
    hidden, new = target.apply(weights, jnp.asarray(text)[None], places, causal_mask(9))
    cache = kv_cache.commit(cache, new, places, hidden)
    found, _ = target.apply(
        weights,
        jnp.asarray(drafted)[None],
        9 + jnp.asarray(tree.depths)[None],
        jnp.asarray(tree.ancestors),
        cache,
        jnp.asarray([9]),
    )
    for node in range(tree.size):
        path = [*text, *drafted[np.flatnonzero(tree.ancestors[node])]]
        alone, _ = target.apply(
            weights, jnp.asarray([path]), jnp.arange(len(path))[None], causal_mask(len(path))
        )
        np.testing.assert_allclose(found[0, node], alone[0, -1], atol=1e-4)


def test_what_lies_before_the_window_does_not_matter() -> None:
    config = dataclasses.replace(SLIDING, num_layers=1, windows=(5,))
    params = dict(rigs.rig_r(SLIDING).params)
    for layer in range(1, SLIDING.num_layers):
        del params[f"layers_{layer}"]
    text = np.random.default_rng(0).integers(0, 32, 9)
    changed = np.concatenate([(text[:4] + 1) % 32, text[4:]])

    def hidden(tokens: np.ndarray) -> np.ndarray:
        ids, places = jnp.asarray(tokens)[None], jnp.arange(9)[None]
        return np.asarray(Target(config).apply({"params": params}, ids, places, causal_mask(9))[0])

    a, b = hidden(text), hidden(changed)
    np.testing.assert_array_equal(a[0, 8], b[0, 8])  # sees tokens 4 to 8
    assert np.abs(a - b)[0, 7].max() > 1e-3  # sees token 3


@pytest.mark.parametrize("windows", [(40,), (600, 40), (None, 40)])
def test_a_long_chunk_reads_all_that_its_windows_hold(windows: tuple[int | None, ...]) -> None:
    """Chunks of 128 read the cache in blocks of 512 slots, from the first that a window reaches."""
    layers = CONFIG.num_layers
    config = dataclasses.replace(CONFIG, windows=(windows * layers)[:layers])
    target, weights = Target(config), {"params": rigs.rig_r(config).params}
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 32, (1, 896)))
    whole, new = target.apply(weights, tokens, jnp.arange(896)[None], causal_mask(896))
    cache = kv_cache.init(config, 1, 900, jnp.dtype(jnp.float32))
    cache = kv_cache.commit(cache, new, jnp.arange(896)[None], whole)
    for start in (0, 513, 548, 768):  # nothing before; a slot of the second block; both; it alone
        part = slice(start, start + 128)
        found, _ = target.apply(
            weights,
            tokens[:, part],
            jnp.arange(896)[None, part],
            causal_mask(128),
            cache,
            jnp.asarray([start]),
        )
        np.testing.assert_allclose(found, whole[:, part], atol=1e-4)


@pytest.mark.parametrize("config", [SLIDING, MIXED], ids=["sliding", "mixed"])
def test_speculative_equals_plain(config: TargetConfig) -> None:
    model = rigs.rig_r(config)
    for settings in ({}, {"temperature": 0.8, "top_p": 0.9}):
        plain = generate(model, PROMPTS, 40, seed=SEED, **settings)
        assert (
            plain.token_ids != generate(rigs.rig_r(), PROMPTS, 40, seed=SEED, **settings).token_ids
        )
        for tree in ("wide", "dynamic"):
            fast = speculative_generate(model, PROMPTS, 40, seed=SEED, tree=TREES[tree], **settings)
            assert fast.token_ids == plain.token_ids
        assert fast.stats.tokens_per_pass > 1


@pytest.mark.parametrize("model_type", DEFAULTS)
def test_a_head_for_every_family_reads_back(model_type: str) -> None:
    target = TargetConfig.from_hf({"model_type": model_type, "attention_bias": True})
    config = DraftConfig.for_target(target, 2, 1000)
    assert config.block.windows == ()
    assert parse_config(Path("head"), config_json(config, official=False)) == config
