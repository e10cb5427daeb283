"""What sets the families of decoders apart: defaults, and fields of TargetConfig.

All of them are the one module of target.py. A family is a row here: what its config.json leaves
out, and how it says what differs from Llama. Defaults are those of transformers 5.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from clover_jax.rope import Rope

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
}

_COMMON: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
_QWEN: dict[str, Any] = _COMMON | {
    "vocab_size": 151936,
    "intermediate_size": 22016,
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
_GEMMA: dict[str, Any] = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON
    | {"vocab_size": 32000, "intermediate_size": 11008, "max_position_embeddings": 2048},
    "mistral": _COMMON
    | {
        "vocab_size": 32000,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,
    },
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128},
    "gemma2": _GEMMA
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
    },
    "gemma3_text": _GEMMA | {"vocab_size": 262208, "max_position_embeddings": 131072},
}

# Keys that would change the computation and are not implemented: each is refused unless it holds a
# value that switches it off.
_REFUSED = {
    "llama": ("sliding_window", "layer_types"),
    "mistral": ("layer_types",),
    "gemma2": ("use_bidirectional_attention",),
    "gemma3_text": ("use_bidirectional_attention",),
}
_REFUSED_BY_ALL = ("quantization_config",)

_LOCAL_THETA, _GLOBAL_THETA = 10_000.0, 1_000_000.0  # of Gemma 3


def check_supported(model_type: str, config: Mapping[str, Any]) -> None:
    """Raises ValueError, by name, for an architecture or a key that is not implemented."""
    architectures = config.get("architectures") or [ARCHITECTURES.get(model_type)]
    if model_type not in ARCHITECTURES or architectures != [ARCHITECTURES[model_type]]:
        known = ", ".join(f"{name!r} with [{ARCHITECTURES[name]!r}]" for name in ARCHITECTURES)
        raise ValueError(
            f"model_type {model_type!r} with architectures {architectures} is not supported; "
            f"supported: {known}"
        )
    for key in (*_REFUSED_BY_ALL, *_REFUSED.get(model_type, ())):
        if config.get(key):
            raise ValueError(f"{key} {config[key]!r} is not supported")


def biases(model_type: str, config: Mapping[str, Any]) -> dict[str, bool]:
    """Which projections carry a bias."""
    attention = bool(config.get("attention_bias"))
    return {
        "llama": {
            "qkv_bias": attention,
            "out_bias": attention,
            "mlp_bias": bool(config.get("mlp_bias")),
        },
        "mistral": {},
        "qwen2": {"qkv_bias": True},
    }.get(model_type, {"qkv_bias": attention, "out_bias": attention})


def windows(model_type: str, config: Mapping[str, Any]) -> tuple[int | None, ...]:
    """The sliding window of each layer, None for full attention; () if no layer has one.

    Raises:
      ValueError: a layer type that is not known, or not one for each layer.
    """
    layers, window = int(config["num_hidden_layers"]), config.get("sliding_window")
    if model_type == "llama" or window is None:
        return ()
    types = config.get("layer_types")
    if types is None:
        slides = {
            "mistral": lambda i: True,
            "gemma2": lambda i: i % 2 == 0,
            "gemma3_text": lambda i: (i + 1) % (config.get("sliding_window_pattern") or 6) != 0,
        }.get(model_type, lambda i: i >= int(config["max_window_layers"]))
        types = ["sliding_attention" if slides(i) else "full_attention" for i in range(layers)]
    if model_type.startswith("qwen") and not config.get("use_sliding_window"):
        return ()
    unknown = sorted(set(types) - {"sliding_attention", "full_attention"})
    if unknown:
        raise ValueError(f"layer type {unknown[0]!r} is not supported")
    if len(types) != layers:
        raise ValueError(f"layer_types holds {len(types)} entries for {layers} layers")
    found = tuple(int(window) if kind == "sliding_attention" else None for kind in types)
    return found if any(found) else ()


def ropes(
    model_type: str, config: Mapping[str, Any], head_dim: int, max_position: int
) -> tuple[Rope, Rope | None]:
    """The rotary embedding, and another one for layers with a window (Gemma 3) or None."""
    if model_type != "gemma3_text":
        return Rope.from_hf(config, head_dim, max_position), None
    given = dict(config)
    local = {"rope_theta": given.pop("rope_local_base_freq", None) or _LOCAL_THETA}
    by_type = given.get("rope_parameters") or {}
    if "full_attention" in by_type or "sliding_attention" in by_type:
        given["rope_parameters"] = by_type.get("full_attention") or {}
        local = {"rope_parameters": {**local, **(by_type.get("sliding_attention") or {})}}
    if given.get("rope_theta") is None and not (given.get("rope_parameters") or {}).get(
        "rope_theta"
    ):
        given["rope_theta"] = _GLOBAL_THETA
    return (
        Rope.from_hf(given, head_dim, max_position),
        Rope.from_hf(local, head_dim, max_position),
    )


def extras(model_type: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Further fields of TargetConfig that the family sets."""
    if model_type == "qwen3":
        return {"qk_norm": True}
    if not model_type.startswith("gemma"):
        return {}

    def cap(key: str) -> float | None:
        return None if config.get(key) is None else float(config[key])

    return {
        "qk_norm": model_type == "gemma3_text",
        "post_norms": True,
        "unit_offset_norms": True,
        "embed_scale": math.sqrt(int(config["hidden_size"])),
        "query_scale": float(config["query_pre_attn_scalar"]) ** -0.5,
        "attention_softcap": cap("attn_logit_softcapping"),
        "logit_softcap": cap("final_logit_softcapping"),
    }
