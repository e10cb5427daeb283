"""Telling one target from another without comparing them whole."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping

import flax.traverse_util
import jax
import ml_dtypes
import numpy as np

from clover_jax.config import TargetConfig
from clover_jax.weights.source import TensorSource
from clover_jax.weights.target import Params, Path, tensor_name

_ROWS = 16


def fingerprint(config: TargetConfig, target: Params | TensorSource) -> str:
    """Identifies a target by its shape and a few rows of its weights.

    The rows are hashed in bf16, so the dtype they were loaded in (f32 or bf16) makes no difference.

    Args:
      config: the target's config.
      target: its parameters, or the checkpoint that they come from.

    Returns:
      32 hexadecimal digits.
    """
    shape = {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_layers": config.num_layers,
        "num_heads": config.num_heads,
        "num_kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rope": [config.rope.kind, config.rope.theta, config.rope.factor],
    }
    digest = hashlib.sha256(json.dumps(shape).encode())
    # The last layer too: some fine-tuning leaves embeddings and norms as they are.
    last = f"layers_{config.num_layers - 1}"
    for path in (
        ("embed_tokens",),
        ("norm", "scale"),
        (last, "self_attn", "q_proj", "weight"),
        (last, "mlp", "down_proj", "weight"),
    ):
        parameter = _parameter(target, path)
        rows = np.arange(_ROWS) * (parameter.shape[0] - 1) // (_ROWS - 1)  # first to last
        digest.update(np.asarray(parameter[rows]).astype(ml_dtypes.bfloat16).tobytes())
    return digest.hexdigest()[:32]


def _parameter(target: Params | TensorSource, path: Path) -> np.ndarray | jax.Array:
    if isinstance(target, Mapping):
        return flax.traverse_util.flatten_dict(target)[path]
    return target.read(tensor_name(path))
