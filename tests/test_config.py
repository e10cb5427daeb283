"""What config.json may say, and what is refused by name."""

from typing import Any

import pytest

from clover_jax.config import TargetConfig

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_an_empty_config_has_the_defaults_of_llama() -> None:
    config = TargetConfig.from_hf({})
    assert (config.vocab_size, config.hidden_size, config.intermediate_size) == (32000, 4096, 11008)
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (32, 32, 32)
    assert (config.head_dim, config.max_position_embeddings) == (128, 2048)
    assert (config.rms_norm_eps, config.hidden_act) == (1e-6, "silu")
    assert (config.rope.kind, config.rope.theta) == ("default", 10_000.0)
    switches = config.tie_word_embeddings, config.qkv_bias, config.out_bias, config.mlp_bias
    assert switches == (False, False, False, False)


def test_null_is_like_absent() -> None:
    keys = ("num_key_value_heads", "head_dim", "rope_scaling", "rope_parameters", "sliding_window")
    assert TargetConfig.from_hf(dict.fromkeys(keys)) == TargetConfig.from_hf({})


@pytest.mark.parametrize(("hidden", "heads", "head_dim"), [(64, 4, 32), (48, 5, 16)])
def test_head_dim_is_independent_of_the_width(hidden: int, heads: int, head_dim: int) -> None:
    fields = {"hidden_size": hidden, "num_attention_heads": heads, "head_dim": head_dim}
    config = TargetConfig.from_hf(fields)
    assert (config.head_dim, config.rope.head_dim) == (head_dim, head_dim)


def linear(**fields: Any) -> dict[str, Any]:
    return {"rope_type": "linear", "factor": 2.0, **fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"rope_theta": 5e5, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
            r"two values for rope_theta: 500000.0 and, in rope_parameters, 10000.0",
        ),
        (
            {"rope_scaling": linear(), "rope_parameters": linear(factor=4.0)},
            "two values for factor: 2.0 and, in rope_parameters, 4.0",
        ),
        (
            {"rope_scaling": linear(), "rope_parameters": {"rope_type": "default"}},
            "two values for rope_type: 'linear' and, in rope_parameters, 'default'",
        ),
        ({"rope_scaling": linear(type="dynamic")}, "two values for rope_type"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope_type 'longrope' is not supp"),
        ({"rope_scaling": linear(beta=3)}, r"unknown keys for rope_type 'linear': \['beta'\]"),
        ({"rope_scaling": {"type": "linear"}}, "'linear' needs the key 'factor'"),
        ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs the keys.*low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        (
            {
                "original_max_position_embeddings": 4096,
                "rope_scaling": {
                    "type": "llama3",
                    **LLAMA3,
                    "original_max_position_embeddings": 8192,
                },
            },
            "two values for original_max_position_embeddings: 4096 and, in rope_scaling, 8192",
        ),
        ({"hidden_act": "gelu_new"}, "hidden_act 'gelu_new' is not supported"),
        ({"model_type": "gpt2"}, "model_type 'gpt2'"),
        ({"model_type": "mistral", "architectures": ["LlamaForCausalLM"]}, "model_type 'mistral'"),
        ({"model_type": "mistral", "layer_types": ["full_attention"]}, "layer_types .* is not sup"),
        (
            {
                "model_type": "qwen3",
                "use_sliding_window": True,
                "num_hidden_layers": 3,
                "layer_types": ["full_attention"],
            },
            "layer_types holds 1 entries for 3 layers",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["chunked_attention"] * 26},
            "layer type 'chunked_attention' is not supported",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "use_bidirectional_attention True is not supported",
        ),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"sliding_window": 4096}, "sliding_window 4096 is not supported"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config .*gptq.* is not"),
        ({"num_attention_heads": 6, "head_dim": 16, "num_key_value_heads": 4}, "6 is not a .* 4"),
        ({"hidden_size": 50, "num_attention_heads": 4}, "hidden_size 50 .*num_attention_heads 4"),
        ({"head_dim": 15}, "even head_dim >= 2, got 15"),
    ],
)
def test_refused_by_name(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TargetConfig.from_hf(fields)
