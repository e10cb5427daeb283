"""The Clover-2 head on disk: the official layout, in and out, and our additions to it.

Both are a folder of config.json (clover_config.py) and model.safetensors with the same tensor
names. An official head also carries two copies of its target's LM head, which are checked and
dropped on reading and written again on export. A head of ours has none; if it proposes from a part
of the vocabulary, the tensor `draft_vocab` lists it.
"""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.draft import DraftHead
from clover_jax.weights.clover_config import SECTION, config_json, parse_config, section
from clover_jax.weights.fingerprint import fingerprint
from clover_jax.weights.huggingface import HuggingFaceSource
from clover_jax.weights.source import CheckpointError, TensorSource
from clover_jax.weights.target import (
    Params,
    check_names,
    layer_tensor,
    read_parameter,
)
from clover_jax.weights.target import Path as ParameterPath

COPIES = ("lm_head.weight", "clover_embed_tokens.weight")
DRAFT_VOCAB = "draft_vocab"

_MODULES = {
    "block_norm": "clover_norm",
    "head_norm": "clover_head_norm",
    "fc1": "clover_head_mlp",
    "fc2": "clover_head_mlp2",
    "ad1": "clover_head_mlp_rnn",
    "ad2": "clover_head_mlp_rnn2",
}


@dataclasses.dataclass(frozen=True, eq=False)
class Head:
    """A draft head and what is known of it.

    Attributes:
      config: its shape.
      params: parameters of DraftHead, a nested dict.
      draft_ids: int32 [config.draft_vocab_size], the token ids it proposes from, most frequent
        first; None for the whole vocabulary.
      target_fingerprint: `fingerprint` of the target it was trained for, if it is known.
      metadata: how it was made, as JSON values.
      heads_coefficient, decay_coefficient: the loss of step i was weighted by
        heads_coefficient * decay_coefficient ** i.

    Raises:
      CheckpointError: draft ids that do not fit the config.
    """

    config: DraftConfig
    params: Params
    draft_ids: np.ndarray | None = None
    target_fingerprint: str | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    heads_coefficient: float = 1.0
    decay_coefficient: float = 0.7

    def __post_init__(self) -> None:
        size, vocabulary = self.config.draft_vocab_size, self.config.block.vocab_size
        ids = self.draft_ids
        if (ids is None) != (size == vocabulary):
            raise CheckpointError(
                f"a head that proposes from {size} of {vocabulary} tokens "
                f"{'needs' if ids is None else 'has no'} draft ids"
            )
        if ids is None:
            return
        if ids.shape != (size,) or ids.dtype != np.int32:
            raise CheckpointError(
                f"draft ids are {ids.dtype} {ids.shape}; the config asks for int32 {(size,)}"
            )
        if ids.min() < 0 or ids.max() >= vocabulary or len(np.unique(ids)) < size:
            raise CheckpointError(
                f"draft ids must be different ids in 0..{vocabulary - 1}; these are "
                f"{len(np.unique(ids))} different ids in {ids.min()}..{ids.max()}"
            )


def load_head(
    folder: str | Path,
    target: TargetConfig,
    dtype: jnp.dtype,
    lm_head: np.ndarray | jax.Array | None = None,
) -> Head:
    """Reads a head, official or ours; every tensor of the file is accounted for.

    Args:
      folder: the head's folder.
      target: the config of the target it is to draft for.
      dtype: dtype of the parameters.
      lm_head: the target's LM head [V, D]; if it is given, the copies in an official head must
        equal it (`check_copies`).

    Raises:
      CheckpointError: no head, a head of another width or vocabulary, a tensor that is unknown,
        missing or of the wrong shape, or a copy that differs.
      ValueError: a config that is not supported.
    """
    source = HuggingFaceSource(folder)
    config = parse_config(source.path, source.config)
    for field in ("hidden_size", "vocab_size"):
        mine, its = getattr(config.block, field), getattr(target, field)
        if mine != its:
            raise CheckpointError(f"{source.path}: the head has {field} {mine}, its target {its}")

    expected = abstract_head(config)
    wanted = {tensor_name(path): path for path in expected}
    present = set(source.names())
    official = SECTION not in source.config
    if official:
        _check_copy_shapes(source, target)
        if lm_head is not None:
            check_copies(source, lm_head)
        present -= set(COPIES)
    partial = config.draft_vocab_size < config.block.vocab_size
    check_names(source, wanted.keys() | ({DRAFT_VOCAB} if partial else set()), present)

    flat = {
        path: jnp.asarray(read_parameter(source, name, expected[path].shape).astype(dtype))
        for name, path in wanted.items()
    }
    ours = {} if official else section(source.path, source.config, SECTION)
    clover = section(source.path, source.config, "clover")
    return Head(
        config=config,
        params=flax.traverse_util.unflatten_dict(flat),
        draft_ids=source.read(DRAFT_VOCAB) if partial else None,
        target_fingerprint=ours.get("target_fingerprint"),
        metadata=ours.get("metadata", {}),
        heads_coefficient=clover.get("heads_coefficient", Head.heads_coefficient),
        decay_coefficient=clover.get("decay_coefficient", Head.decay_coefficient),
    )


def save_head(
    folder: str | Path,
    head: Head,
    dtype: jnp.dtype,
    lm_head: np.ndarray | jax.Array | None = None,
) -> None:
    """Writes a head: in the official form if `lm_head` is given, else in ours.

    The official form has no place for `target_fingerprint` and `metadata`.

    Args:
      folder: made if it does not exist; a head in it is replaced.
      head: the head.
      dtype: dtype of the file's float tensors.
      lm_head: the target's LM head [V, D], in the target's own dtype or a finer one.

    Raises:
      CheckpointError: a head that the form cannot express, or arrays that do not fit the config.
    """
    official = lm_head is not None
    fields = config_json(head.config, official)
    fields["torch_dtype"] = jnp.dtype(dtype).name
    fields["clover"] |= {
        "heads_coefficient": head.heads_coefficient,
        "decay_coefficient": head.decay_coefficient,
    }
    if not official:
        fields[SECTION] |= {
            "target_fingerprint": head.target_fingerprint,
            "metadata": head.metadata,
        }
    parameters = flax.traverse_util.flatten_dict(head.params)
    _check_shapes(head.config, parameters)
    tensors = {tensor_name(path): np.asarray(value) for path, value in parameters.items()}
    if lm_head is not None:
        shape = (head.config.block.vocab_size, head.config.block.hidden_size)
        if lm_head.shape != shape:
            raise CheckpointError(f"the LM head has shape {lm_head.shape}, the head needs {shape}")
        tensors |= dict.fromkeys(COPIES, np.asarray(lm_head))
    tensors = {name: np.ascontiguousarray(t.astype(dtype)) for name, t in tensors.items()}
    if head.draft_ids is not None:
        tensors[DRAFT_VOCAB] = head.draft_ids

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    # Written aside and renamed, so that no file is ever half there.
    weights, config = folder / "model.safetensors", folder / "config.json"
    save_file(tensors, f"{weights}.part", metadata={"format": "pt"})
    Path(f"{config}.part").write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    os.replace(f"{weights}.part", weights)
    os.replace(f"{config}.part", config)


def check_copies(source: TensorSource, lm_head: np.ndarray | jax.Array) -> None:
    """Compares the copies of the LM head in an official head with its target's, [V, D].

    They are equal if rounding one to the dtype of the other makes them so.

    Raises:
      CheckpointError: a copy that differs, by name.
    """
    its = np.asarray(lm_head)
    for name in sorted(set(source.names()).intersection(COPIES)):
        copy = source.read(name)
        if not (
            np.array_equal(copy, its.astype(copy.dtype))
            or np.array_equal(copy.astype(its.dtype), its)
        ):
            raise CheckpointError(
                f"{source.path}: {name} differs from the target's LM head, so this head belongs to "
                "another target"
            )


def check_target(head: Head, config: TargetConfig, target: Params | TensorSource) -> None:
    """Refuses a head on a target that it was not trained for.

    A head without a fingerprint passes; an official one is told by `check_copies`.

    Raises:
      CheckpointError: the fingerprints differ.
    """
    if head.target_fingerprint is None:
        return
    found = fingerprint(config, target)
    if found != head.target_fingerprint:
        raise CheckpointError(
            f"this head was trained for the target {head.target_fingerprint}; "
            f"this target is {found}"
        )


def abstract_head(config: DraftConfig) -> dict[ParameterPath, jax.ShapeDtypeStruct]:
    """Path -> shape of every parameter of the head, f32, without allocating any."""
    x = jax.ShapeDtypeStruct((1, 1, config.block.hidden_size), jnp.float32)
    shapes = jax.eval_shape(DraftHead(config).init, jax.random.key(0), x, x)
    return flax.traverse_util.flatten_dict(shapes["params"])


def tensor_name(path: ParameterPath) -> str:
    """The official name of a head parameter."""
    module, *rest = path
    name = _MODULES.get(module) or module.replace("block_", "layers.")
    return f"{name}.{layer_tensor(tuple(rest))}"


def _check_copy_shapes(source: TensorSource, target: TargetConfig) -> None:
    shape = (target.vocab_size, target.hidden_size)
    for name in sorted(set(source.names()).intersection(COPIES)):
        if source.shape(name) != shape:
            raise CheckpointError(
                f"{source.path}: tensor {name} has shape {source.shape(name)}; the target's LM "
                f"head has {shape}"
            )


def _check_shapes(config: DraftConfig, parameters: dict[ParameterPath, Any]) -> None:
    wanted = {path: leaf.shape for path, leaf in abstract_head(config).items()}
    found = {path: leaf.shape for path, leaf in parameters.items()}
    for path in sorted(wanted.keys() | found.keys()):
        if found.get(path) != wanted.get(path):
            raise CheckpointError(
                f"parameter {'/'.join(path)} has shape {found.get(path, 'none')}; the head's "
                f"config asks for {wanted.get(path, 'no such parameter')}"
            )
