"""GGUF files of Llama models, as llama.cpp's converter writes them.

A file says in its own words what a Hugging Face folder says in config.json and tokenizer.json;
here it is put back into Hugging Face's: config keys, tensor names, and the rotary layout of Q and
K. The container is in gguf_file.py, the tokenizer in gguf_tokenizer.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np

from clover_jax.rope import Rope
from clover_jax.weights.gguf_file import GgufFile, open_gguf
from clover_jax.weights.gguf_tokenizer import special_token_id, tokenizer
from clover_jax.weights.source import CheckpointError

__all__ = ["GgufSource", "tokenizer"]

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BLOCK_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_DIVISORS = "rope_freqs.weight"

# Keys below 'llama.' that are read here, or that change nothing in what is computed. Any other may
# change it, so it is refused.
_KNOWN_KEYS = {
    "attention.causal",
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "expert_count",
    "expert_used_count",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scale_linear",
    "rope.scaling.attn_factor",
    "rope.scaling.factor",
    "rope.scaling.finetuned",
    "rope.scaling.original_context_length",
    "rope.scaling.type",
    "rope.scaling.yarn_attn_factor",
    "rope.scaling.yarn_beta_fast",
    "rope.scaling.yarn_beta_slow",
    "rope.scaling.yarn_ext_factor",
    "tensor_data_layout",
    "vocab_size",
}


class GgufSource:
    """A GGUF file as a TensorSource (clover_jax/weights/source.py).

    Tensors that Llama does not have keep their GGUF names, so that whoever accounts for all names
    finds them.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointError: not a whole GGUF file of architecture 'llama', or one with a setting that is
        not supported, by name.
    """

    path: Path
    config: dict[str, Any]

    def __init__(self, path: Path | str) -> None:
        self._file = open_gguf(path)
        self.path = self._file.path
        self.config = _config(self._file)
        self._gguf_names = {
            _huggingface_name(name): name for name in self._file.tensors if name != _ROPE_DIVISORS
        }

    def names(self) -> list[str]:
        """Hugging Face tensor names, in file order."""
        return list(self._gguf_names)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor: [out, in] for projections."""
        return self._file.tensors[self._gguf_names[name]].shape

    def read(self, name: str) -> np.ndarray:
        """One tensor: f32, f16 or bf16 as in the file, f32 if it was quantised."""
        tensor = self._file.read(self._gguf_names[name])
        if ".self_attn.q_proj." in name:
            return _half_split(tensor, self.config["num_attention_heads"])
        if ".self_attn.k_proj." in name:
            return _half_split(tensor, self.config["num_key_value_heads"])
        return tensor


def _huggingface_name(name: str) -> str:
    block = _BLOCK_TENSOR.fullmatch(name)
    if block and block[2] in _BLOCK_TENSORS:
        return f"model.layers.{block[1]}.{_BLOCK_TENSORS[block[2]]}.{block[3]}"
    return _TENSORS.get(name, name)


def _half_split(tensor: np.ndarray, num_heads: int) -> np.ndarray:
    """Rows of a Q or K weight [n*H, D] or bias [n*H], from rotary pairs side by side to halves.

    GGUF rotates row 2i of a head with row 2i+1, Hugging Face row i with row i + H/2.
    """
    pairs = tensor.reshape(num_heads, -1, 2, *tensor.shape[1:])  # [n, H/2, 2, ...]
    return pairs.swapaxes(1, 2).reshape(tensor.shape)


def _config(file: GgufFile) -> dict[str, Any]:
    """The file's metadata in the form of a LlamaForCausalLM config.json."""
    metadata = file.metadata
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise CheckpointError(
            f"{file.path}: general.architecture is {architecture!r}; supported: 'llama'"
        )
    if metadata.get("split.count", 1) > 1:
        raise CheckpointError(
            f"{file.path}: one of {metadata['split.count']} parts of a split model (split.count); "
            "merge them with llama.cpp's gguf-split first"
        )
    _check_keys(file)

    hidden = _integer(file, "embedding_length")
    heads = _integer(file, "attention.head_count")
    context = _integer(file, "context_length")
    head_dim = _head_dim(file, hidden // heads)
    theta = float(metadata.get("llama.rope.freq_base", 10_000.0))
    biased = {name.split(".")[2] for name in file.tensors if re.fullmatch(r"blk\..*\.bias", name)}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _integer(file, "feed_forward_length"),
        "num_hidden_layers": _integer(file, "block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _integer(file, "attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": float(_value(file, "attention.layer_norm_rms_epsilon")),
        "rope_theta": theta,
        "rope_scaling": _rope_scaling(file, head_dim, theta, context),
        "max_position_embeddings": context,
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": bool(biased & {"attn_q", "attn_k", "attn_v", "attn_output"}),
        "mlp_bias": bool(biased & {"ffn_gate", "ffn_up", "ffn_down"}),
        "bos_token_id": special_token_id(file, "bos"),
        "eos_token_id": _eos_token_id(file),
        "pad_token_id": special_token_id(file, "padding"),
    }


def _check_keys(file: GgufFile) -> None:
    """Refuses keys that mean something this architecture does not compute."""
    keys = [k.removeprefix("llama.") for k in file.metadata if k.startswith("llama.")]
    unknown = sorted(set(keys) - _KNOWN_KEYS)
    if unknown:
        raise CheckpointError(f"{file.path}: not supported: {', '.join(unknown)} (below 'llama.')")
    off = {"expert_count": 0, "expert_used_count": 0, "attention.causal": True}
    for key, value in off.items():
        if file.metadata.get(f"llama.{key}", value) != value:
            raise CheckpointError(
                f"{file.path}: llama.{key} is {file.metadata[f'llama.{key}']}; supported: {value}"
            )


def _value(file: GgufFile, key: str, default: Any = None) -> Any:
    value = file.metadata.get(f"llama.{key}", default)
    if value is None:
        raise CheckpointError(f"{file.path}: the key llama.{key} is missing")
    return value


def _integer(file: GgufFile, key: str, default: int | None = None) -> int:
    """A size, which may be stated once or, if it is the same everywhere, for each layer."""
    values = np.unique(_value(file, key, default))
    if len(values) != 1:
        raise CheckpointError(
            f"{file.path}: llama.{key} differs between layers ({values.tolist()}), which is not "
            "supported"
        )
    if values[0] < 1:
        raise CheckpointError(f"{file.path}: llama.{key} is {values[0]}")
    return int(values[0])


def _head_dim(file: GgufFile, default: int) -> int:
    rotated = file.metadata.get("llama.rope.dimension_count", default)
    head_dim = int(file.metadata.get("llama.attention.key_length", rotated))
    for key in ("attention.value_length", "rope.dimension_count"):
        value = file.metadata.get(f"llama.{key}", head_dim)
        if value != head_dim:
            raise CheckpointError(
                f"{file.path}: llama.{key} is {value}, but the heads have {head_dim} dimensions; "
                "supported: equal"
            )
    return head_dim


def _vocab_size(file: GgufFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise CheckpointError(f"{file.path}: the tensor token_embd.weight is missing")
    return _integer(file, "vocab_size", file.tensors["token_embd.weight"].shape[0])


def _eos_token_id(file: GgufFile) -> int | list[int] | None:
    """Every id the file declares to end a text (eos), a turn (eot) or a message (eom)."""
    declared = [special_token_id(file, role) for role in ("eos", "eot", "eom")]
    ids = list(dict.fromkeys(i for i in declared if i is not None))
    if len(ids) > 1:
        return ids
    return ids[0] if ids else None


def _rope_scaling(
    file: GgufFile, head_dim: int, theta: float, context: int
) -> dict[str, Any] | None:
    """The `rope_scaling` of a config.json, from keys (linear, yarn) or a tensor (llama3)."""

    def number(key: str, default: float) -> float:
        return float(file.metadata.get(f"llama.rope.scaling.{key}", default))

    # A factor without a type is linear, under its present name or the older one; 0 means none.
    kind = file.metadata.get("llama.rope.scaling.type", "linear")
    factor = number("factor", file.metadata.get("llama.rope.scale_linear", 1.0)) or 1.0
    if kind not in ("none", "linear", "yarn"):
        raise CheckpointError(
            f"{file.path}: llama.rope.scaling.type {kind!r} is not supported; supported: 'none', "
            "'linear', 'yarn', and llama3's frequencies as a tensor"
        )
    magnitude = number("attn_factor", 1.0) * number("yarn_attn_factor", 1.0)
    if kind != "yarn" and magnitude != 1.0:
        raise CheckpointError(
            f"{file.path}: llama.rope.scaling.attn_factor is {magnitude} with scaling {kind!r}; "
            "supported with 'yarn' only"
        )
    banded = _llama3_scaling(file, head_dim, theta)
    if kind == "yarn":
        if banded:
            raise CheckpointError(f"{file.path}: {_ROPE_DIVISORS} on top of yarn is not supported")
        if number("yarn_ext_factor", 1.0) != 1.0:
            raise CheckpointError(
                f"{file.path}: llama.rope.scaling.yarn_ext_factor is "
                f"{number('yarn_ext_factor', 1.0)}; supported: 1"
            )
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": int(number("original_context_length", context)),
            # llama.cpp multiplies the paper's magnitude; Hugging Face's key replaces it.
            "attention_factor": magnitude * (0.1 * math.log(max(factor, 1.0)) + 1.0),
            "beta_fast": number("yarn_beta_fast", 32.0),
            "beta_slow": number("yarn_beta_slow", 1.0),
        }
    if kind == "none" or factor == 1.0:
        return banded
    if banded:
        raise CheckpointError(
            f"{file.path}: {_ROPE_DIVISORS} on top of linear scaling is not supported"
        )
    return {"rope_type": "linear", "factor": factor}


def _llama3_scaling(file: GgufFile, head_dim: int, theta: float) -> dict[str, Any] | None:
    """Llama 3.1's scaling, which a GGUF file holds only in its result.

    That is a tensor of one divisor for each frequency. The largest is the factor; the band limits
    are those of every Llama 3.1, 3.2 and 3.3, and the tensor must be what they give.
    """
    if _ROPE_DIVISORS not in file.tensors:
        return None
    stored = file.read(_ROPE_DIVISORS).astype(np.float32)
    if np.all(stored == 1):
        return None
    scaling = {
        "rope_type": "llama3",
        "factor": float(stored.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    plain = Rope(head_dim, theta)
    banded = Rope.from_hf({"rope_theta": theta, "rope_scaling": scaling}, head_dim, 8192)
    expected = plain.inverse_frequencies() / banded.inverse_frequencies()
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-4):
        raise CheckpointError(
            f"{file.path}: {_ROPE_DIVISORS} {stored.shape} is not the llama3 scaling of factor "
            f"{scaling['factor']:g} from 8192 tokens with band limits 1 and 4, the only one "
            "supported as a tensor"
        )
    return scaling
