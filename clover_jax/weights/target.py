"""From a checkpoint's tensors to the target's parameters, one tensor at a time."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import TargetConfig
from clover_jax.target import Target, causal_mask
from clover_jax.weights.source import CheckpointError, TensorSource

Params = dict[str, Any]
Path = tuple[str, ...]

# Buffers that old checkpoints carry and that follow from the config.
_IGNORED = re.compile(r"(model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq)")


def abstract_params(config: TargetConfig) -> dict[Path, jax.ShapeDtypeStruct]:
    """Path -> shape of every parameter of the target, f32, without allocating any."""

    def touch_all(target: Target, tokens: jax.Array) -> jax.Array:
        return target.logits(target(tokens, tokens, causal_mask(1))[0])

    init = functools.partial(Target(config).init, method=touch_all)
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    shapes = jax.eval_shape(init, jax.random.key(0), tokens)
    return flax.traverse_util.flatten_dict(shapes["params"])


def layer_tensor(path: Path) -> str:
    """('self_attn', 'q_proj', 'weight') -> 'self_attn.q_proj.weight'."""
    *modules, leaf = path
    return ".".join([*modules, "weight" if leaf == "scale" else leaf])


def tensor_name(path: Path) -> str:
    """The Hugging Face name of a target parameter."""
    if path == ("embed_tokens",):
        return "model.embed_tokens.weight"
    if path == ("lm_head",):
        return "lm_head.weight"
    if path == ("norm", "scale"):
        return "model.norm.weight"
    layer = re.fullmatch(r"layers_(\d+)", path[0])
    if layer is None:
        raise KeyError(path)
    return f"model.layers.{layer[1]}.{layer_tensor(path[1:])}"


def load_target(
    source: TensorSource,
    dtype: jnp.dtype,
    place: Callable[[Path, np.ndarray], jax.Array] | None = None,
) -> tuple[TargetConfig, Params]:
    """Reads a target; every tensor of the source is accounted for.

    Args:
      source: the checkpoint.
      dtype: dtype of the parameters.
      place: puts one parameter on its devices; by default on the default device.

    Returns:
      The config, and the parameters as a nested dict.

    Raises:
      CheckpointError: a tensor that is unknown, missing or of the wrong shape, by name.
      ValueError: a config that is not supported.
    """
    config = TargetConfig.from_hf(source.config)
    expected = abstract_params(config)
    wanted = {tensor_name(path): path for path in expected}
    present = {n for n in source.names() if not _IGNORED.fullmatch(n)}
    if config.tie_word_embeddings and "lm_head.weight" in present:
        # A second copy of the embedding, which some exporters write; it must be one.
        _check_tied_copy(source)
        present.remove("lm_head.weight")
    check_names(source, set(wanted), present)

    flat = {}
    for name, path in wanted.items():
        parameter = read_parameter(source, name, expected[path].shape)
        if path[-1] == "scale":  # norms are small and computed in f32
            parameter = parameter.astype(np.float32) + np.float32(config.unit_offset_norms)
        else:
            parameter = parameter.astype(dtype)
        flat[path] = place(path, parameter) if place else jnp.asarray(parameter)
    return config, flax.traverse_util.unflatten_dict(flat)


def read_parameter(source: TensorSource, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor `name`, of this shape, in the file's dtype.

    Raises:
      CheckpointError: another shape, or no floats.
    """
    if source.shape(name) != shape:
        raise CheckpointError(
            f"{source.path}: tensor {name} has shape {source.shape(name)}; the config asks for "
            f"{shape}"
        )
    tensor = source.read(name)
    if not jnp.issubdtype(tensor.dtype, jnp.floating):
        raise CheckpointError(f"{source.path}: tensor {name} holds {tensor.dtype}, not floats")
    return tensor


def check_names(source: TensorSource, wanted: set[str], present: set[str]) -> None:
    """Raises CheckpointError, by name, unless the tensors present are those wanted."""
    missing = sorted(wanted - present)
    unknown = sorted(present - wanted)
    if missing:
        raise CheckpointError(f"{source.path}: missing {_listing(missing)}")
    if unknown:
        raise CheckpointError(
            f"{source.path}: {_listing(unknown)} not used by this architecture with this config"
        )


def _listing(names: list[str]) -> str:
    shown = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
    return f"{len(names)} tensor{'s' if len(names) > 1 else ''} ({shown})"


def _check_tied_copy(source: TensorSource) -> None:
    head, embedding = (source.read(n) for n in ("lm_head.weight", "model.embed_tokens.weight"))
    if head.shape != embedding.shape or not np.array_equal(head, embedding):
        raise CheckpointError(
            f"{source.path}: tie_word_embeddings is true, but lm_head.weight differs from "
            "model.embed_tokens.weight"
        )
