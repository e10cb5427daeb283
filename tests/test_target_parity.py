"""The target against transformers in torch, f32: logits and pre-norm hidden states."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import cache as kv_cache
from clover_jax.config import TargetConfig
from clover_jax.target import Target, causal_mask
from clover_jax.weights.huggingface import HuggingFaceSource
from clover_jax.weights.target import Params, load_target

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
CONTEXT = 64  # max_position_embeddings; the original context of the scaled ropes is half of it
LENGTH = 100  # beyond both
TOKENS = np.random.default_rng(0).integers(0, 128, (2, LENGTH)).astype(np.int32)  # [B, T]

BASE: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
    "rope_theta": 10_000.0,
}


def rope(kind: str, **fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10_000.0, **fields}}


def yarn(**fields: Any) -> dict[str, Any]:
    return rope("yarn", factor=4.0, original_max_position_embeddings=CONTEXT // 2, **fields)


BANDS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {**BANDS, "original_max_position_embeddings": CONTEXT // 2}

VARIANTS: dict[str, dict[str, Any]] = {
    "multi-head": {"num_key_value_heads": 4},
    "grouped": {},
    "one kv head": {"num_key_value_heads": 1},
    "explicit head_dim": {"head_dim": 32},
    "narrow head_dim": {"head_dim": 8},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "gelu": {"hidden_act": "gelu"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope("llama3", **LLAMA3),
    "yarn": yarn(),
    "yarn attention_factor": yarn(attention_factor=1.7),
}

WINDOW = {"sliding_window": 24}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 20, "initializer_range": 0.05, **WINDOW}
FAMILIES: dict[str, dict[str, Any]] = {
    "mistral": {"model_type": "mistral", **WINDOW},
    "mistral without window": {"model_type": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen2 with windows": {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "max_window_layers": 1,
        **WINDOW,
    },
    "qwen3": {"model_type": "qwen3", "head_dim": 32, "tie_word_embeddings": True},
    "qwen3 with biases and windows": {
        "model_type": "qwen3",
        "head_dim": 8,
        "attention_bias": True,
        "use_sliding_window": True,
        "layer_types": ["sliding_attention", "full_attention"],
        **WINDOW,
    },
    "gemma2": {"model_type": "gemma2", "tie_word_embeddings": True, **GEMMA},
    "gemma2 other caps": {
        "model_type": "gemma2",
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": None,
        "layer_types": ["full_attention", "sliding_attention"],
        **GEMMA,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        "tie_word_embeddings": True,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
            "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 90_000.0},
        },
        **GEMMA,
    },
}

# What config.json can say of the rotary embedding, in place of BASE's rope_theta.
ROPE_FIELDS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "nulls": {"rope_theta": 500_000, "rope_scaling": None, "head_dim": None},
    "rope_theta": {"rope_theta": 500_000.0},
    "rope_parameters": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "both halves": {"rope_theta": 500_000.0, "rope_parameters": {"rope_type": "default"}},
    "both agree": {"rope_theta": 500_000.0, "rope_parameters": {"rope_theta": 500_000.0}},
    "linear": rope("linear", factor=4.0),
    "dynamic": rope("dynamic", factor=2.0),
    "llama3": rope("llama3", **LLAMA3),
    "yarn": yarn(),
    "yarn attention_factor": yarn(attention_factor=1.7),
    "yarn mscale": yarn(mscale=1.0, mscale_all_dim=0.5),
    "yarn mscale alone": yarn(mscale=0.7),
    "yarn betas": yarn(beta_fast=16, beta_slow=2),
    "yarn untruncated": yarn(truncate=False),
    "yarn factor null": rope("yarn", factor=None, original_max_position_embeddings=CONTEXT // 2),
    "yarn one rotation": yarn(beta_fast=1.0, beta_slow=1.0, truncate=False),
    "old default": {"rope_scaling": {"type": "default"}},
    "old linear": {"rope_theta": 20_000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "old dynamic": {"rope_theta": 20_000.0, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "old both keys": {"rope_scaling": {"type": "dynamic", "rope_type": "dynamic", "factor": 2.0}},
    "old llama3": {"rope_theta": 500_000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "old yarn": {"rope_scaling": {"type": "yarn", "factor": 2.0, "finetuned": True}},
    "old yarn, original context beside it": {
        "rope_scaling": {"type": "yarn", "factor": 4.0},
        "original_max_position_embeddings": 16,
    },
    "llama3 without original context": {"rope_scaling": {"rope_type": "llama3", **BANDS}},
}


def write_checkpoint(folder: Path, model_type: str = "llama", **fields: Any) -> Path:
    """A random checkpoint, its biases and norms far from their initial 0 and 1."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **{**BASE, **fields})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 2.0)
            elif name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
                if model_type.startswith("gemma"):
                    parameter -= 1.0
    model.save_pretrained(folder)
    return folder


def reference(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """transformers' pre-norm hidden states [B, T, D] and logits [B, T, V] of TOKENS."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    hidden = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: hidden.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.from_numpy(TOKENS).long(), use_cache=False).logits
    return hidden[0].numpy(), logits.numpy()


def load(folder: Path) -> tuple[TargetConfig, Params]:
    return load_target(HuggingFaceSource(folder), jnp.dtype(jnp.float32))


def single_pass(config: TargetConfig, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Our pre-norm hidden states and logits of TOKENS, in one forward pass."""

    @jax.jit
    def forward(params: Params, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        target = Target(config).bind({"params": params})
        positions = jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape)
        hidden, _ = target(tokens, positions, causal_mask(LENGTH))
        return hidden, target.logits(hidden)

    hidden, logits = forward(params, TOKENS)
    return np.asarray(hidden), np.asarray(logits)


def chunked_pass(config: TargetConfig, params: Params) -> np.ndarray:
    """Our pre-norm hidden states: two chunks of a prompt, then one token at a time."""
    target = Target(config)
    batch, slots = len(TOKENS), LENGTH + 7  # more slots than tokens: the rest must not be seen
    cache = kv_cache.init(config, batch, slots, jnp.dtype(jnp.float32))
    cache = jax.tree.map(lambda a: a + 100.0, cache)  # as if another row had used it before

    @jax.jit
    def step(tokens: jax.Array, start: jax.Array, cache: kv_cache.KVCache) -> Any:
        count = tokens.shape[1]
        positions = jnp.broadcast_to(start + jnp.arange(count), (batch, count))
        hidden, new = target.apply(
            {"params": params},
            tokens,
            positions,
            causal_mask(count),
            cache,
            jnp.full(batch, start),
            jnp.full((batch, count), LENGTH),  # what the single pass has, for dynamic scaling
        )
        return hidden, kv_cache.commit(cache, new, positions, hidden)

    outputs, start = [], 0
    for count in [41, 41, *[1] * (LENGTH - 82)]:
        hidden, cache = step(TOKENS[:, start : start + count], jnp.int32(start), cache)
        outputs.append(np.asarray(hidden))
        start += count
    return np.concatenate(outputs, axis=1)


def assert_parity(folder: Path) -> None:
    ours, theirs = single_pass(*load(folder)), reference(folder)
    for name, a, b in zip(("hidden states", "logits"), ours, theirs, strict=True):
        assert a.shape == b.shape
        assert np.abs(b).max() > 1, f"{name} too small for an absolute tolerance"
        for position in (0, 1, 30, CONTEXT, LENGTH - 1):
            np.testing.assert_allclose(
                a[:, position], b[:, position], rtol=0, atol=TOLERANCE, err_msg=f"{name} {position}"
            )
        np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE, err_msg=name)


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_equals_transformers(name: str, tmp_path: Path) -> None:
    assert_parity(write_checkpoint(tmp_path, **VARIANTS[name]))


@pytest.mark.parametrize("name", FAMILIES)
def test_family_equals_transformers(name: str, tmp_path: Path) -> None:
    assert_parity(write_checkpoint(tmp_path, **FAMILIES[name]))


CHUNKED = {
    name: {**VARIANTS, **FAMILIES}[name]
    for name in ("one kv head", "explicit head_dim", "dynamic", "yarn", "mistral", "gemma3")
}


@pytest.mark.parametrize("name", CHUNKED)
def test_cached_chunks_equal_one_pass(name: str, tmp_path: Path) -> None:
    config, params = load(write_checkpoint(tmp_path, **CHUNKED[name]))
    once, _ = single_pass(config, params)
    np.testing.assert_allclose(chunked_pass(config, params), once, rtol=0, atol=TOLERANCE)


def rope_tables(fields: dict[str, Any], folder: Path) -> tuple[TargetConfig, np.ndarray]:
    """The config with these rope fields, and our (cos, sin) [2, T, H/2] for it."""
    config = {k: v for k, v in BASE.items() if k != "rope_theta"}
    (folder / "config.json").write_text(json.dumps({**config, "model_type": "llama", **fields}))
    parsed = TargetConfig.from_hf(json.loads((folder / "config.json").read_text()))
    tables = parsed.rope.tables(jnp.arange(LENGTH)[None], jnp.full((1, 1), LENGTH))
    return parsed, np.stack(tables)[:, 0]


@pytest.mark.parametrize("name", ROPE_FIELDS)
def test_rope_tables_equal_transformers(name: str, tmp_path: Path) -> None:
    config, ours = rope_tables(ROPE_FIELDS[name], tmp_path)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(
        transformers.AutoConfig.from_pretrained(tmp_path)
    )
    theirs = rotary(torch.zeros(1), torch.arange(LENGTH)[None])
    theirs = np.stack([t[0, :, : config.head_dim // 2].numpy() for t in theirs])
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


def test_rope_fields_matter(tmp_path: Path) -> None:
    """The cases above differ from plain rotary embedding by far more than the tolerance."""
    plain = rope_tables({}, tmp_path)[1]
    for name in ROPE_FIELDS.keys() - {"nothing", "old default"}:
        assert np.abs(rope_tables(ROPE_FIELDS[name], tmp_path)[1] - plain).max() > 0.1, name


# The key set of lmsys/vicuna-7b-v1.3's config.json, scaled down.
VICUNA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": CONTEXT,
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.28.1",
    "use_cache": True,
    "vocab_size": 128,
}


def test_vicuna_key_set(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, num_key_value_heads=4, rms_norm_eps=1e-6)
    (tmp_path / "config.json").write_text(json.dumps(VICUNA))
    config, _ = load(tmp_path)
    assert (config.num_kv_heads, config.head_dim, config.rope.theta) == (4, 16, 10_000.0)
    assert_parity(tmp_path)
