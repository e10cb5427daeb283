"""config.json of a Clover-2 head, in the official form and in ours.

Both are a Hugging Face config of the augmenting block's layers with a section `clover`. The
official code does not read all of it: whatever config.json says, its rotary base is 10000, its
block's heads are hidden_size / num_attention_heads wide and have no biases, and tokens are embedded
by rows of the LM head. Our form means every field as it stands, which the further section
`clover_jax` tells.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.rope import Rope
from clover_jax.weights.source import CheckpointError

SECTION = "clover_jax"

_LARGEST_BIAS = 1e6  # in logits; also what rules out infinity and NaN

_EXTRAS = ("qkv_bias", "out_bias", "qk_norm", "post_norms", "attention_softcap", "query_scale")
_NOT_READ_OFFICIALLY = ("rope_theta", "head_dim", "attention_bias", "mlp_bias")
_OFFICIAL_ROPES = ("default", "linear", "dynamic")


def section(where: Path, fields: Mapping[str, Any], name: str) -> dict[str, Any]:
    """One of the two sections.

    Raises:
      CheckpointError: config.json has no such section.
    """
    found = fields.get(name)
    if not isinstance(found, dict):
        raise CheckpointError(f"{where}: config.json has no section {name!r}, so this is no head")
    return found


def parse_config(where: Path, fields: Mapping[str, Any]) -> DraftConfig:
    """Reads a head's config.json.

    Args:
      where: the head's folder, for messages.
      fields: its config.json.

    Raises:
      CheckpointError: a section or a number that is missing.
      ValueError: a block that is not supported.
    """
    steps, layers = (_count(where, fields, "clover", key) for key in ("num_heads", "num_layers"))
    if SECTION in fields:
        block = dataclasses.replace(TargetConfig.from_hf(fields), num_layers=layers)
        block = dataclasses.replace(block, **_block_extras(where, section(where, fields, SECTION)))
        return DraftConfig(
            block=block,
            num_heads=_count(where, fields, SECTION, "num_decoder_heads"),
            draft_vocab_size=_count(where, fields, SECTION, "draft_vocab_size"),
            num_steps=steps,
            embedding=section(where, fields, SECTION).get("embedding", ""),
            copy_bias=_copy_bias(where, section(where, fields, SECTION)),
        )

    read = {key: value for key, value in fields.items() if key not in _NOT_READ_OFFICIALLY}
    read["rope_parameters"] = {
        key: value
        for key, value in (fields.get("rope_parameters") or {}).items()
        if key != "rope_theta"
    }
    block = dataclasses.replace(TargetConfig.from_hf(read), num_layers=layers)
    if block.rope.kind not in _OFFICIAL_ROPES:
        raise CheckpointError(
            f"{where}: an official head has no rope_type {block.rope.kind!r}; it can have "
            f"{', '.join(_OFFICIAL_ROPES)}"
        )
    return DraftConfig(
        block=block,
        num_heads=block.num_heads,
        draft_vocab_size=block.vocab_size,
        num_steps=steps,
        embedding="lm_head",
    )


def config_json(config: DraftConfig, official: bool) -> dict[str, Any]:
    """The inverse of `parse_config`.

    Raises:
      CheckpointError: a value that the form cannot express, by name.
    """
    block = config.block
    fields: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": block.vocab_size,
        "hidden_size": block.hidden_size,
        "intermediate_size": block.intermediate_size,
        "num_hidden_layers": block.num_layers,
        "num_attention_heads": block.num_heads,
        "num_key_value_heads": block.num_kv_heads,
        "head_dim": block.head_dim,
        "hidden_act": block.hidden_act,
        "max_position_embeddings": block.max_position_embeddings,
        "rms_norm_eps": block.rms_norm_eps,
        "tie_word_embeddings": block.tie_word_embeddings,
        "attention_bias": block.qkv_bias and block.out_bias,
        "mlp_bias": block.mlp_bias,
        "rope_theta": block.rope.theta,
        "rope_scaling": _rope_scaling(block.rope),
        "clover": {"num_heads": config.num_steps, "num_layers": block.num_layers},
    }
    if not official:
        fields[SECTION] = {
            "embedding": config.embedding,
            "num_decoder_heads": config.num_heads,
            "draft_vocab_size": config.draft_vocab_size,
            "copy_bias": list(config.copy_bias),
        }
        read = dataclasses.asdict(TargetConfig.from_hf(fields))
        more = {
            name: getattr(block, name) for name in _EXTRAS if getattr(block, name) != read[name]
        }
        if more:  # what other families have, and a Llama config.json cannot say
            fields[SECTION]["block"] = more
    _check_expressed(config, fields, official)
    return fields


def _check_expressed(config: DraftConfig, fields: Mapping[str, Any], official: bool) -> None:
    again = parse_config(Path("config.json"), fields)
    form = "the official form" if official else "config.json"
    for written, wanted in (
        (again.block.rope, config.block.rope),
        (again.block, config.block),
        (again, config),
    ):
        for field in dataclasses.fields(wanted):
            ours, its = getattr(wanted, field.name), getattr(written, field.name)
            if ours != its:
                raise CheckpointError(
                    f"{form} cannot express a head with {field.name} {ours!r}: it would be read as "
                    f"{its!r}"
                )


def _rope_scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    scaling: dict[str, Any] = {"type": rope.kind, "factor": rope.factor}
    if rope.kind in ("llama3", "yarn"):
        scaling["original_max_position_embeddings"] = rope.original_context
    if rope.kind == "llama3":
        scaling["low_freq_factor"] = rope.low_freq_factor
        scaling["high_freq_factor"] = rope.high_freq_factor
    if rope.kind == "yarn":
        scaling["attention_factor"] = rope.attention_factor
        scaling["beta_fast"] = rope.beta_fast
        scaling["beta_slow"] = rope.beta_slow
        scaling["truncate"] = rope.truncate
    return scaling


def _block_extras(where: Path, ours: Mapping[str, Any]) -> dict[str, Any]:
    more = ours.get("block", {})
    unknown = sorted(set(more) - set(_EXTRAS))
    if unknown:
        raise CheckpointError(f"{where}: {unknown[0]!r} is no field of a head's block")
    return dict(more)


def _copy_bias(where: Path, ours: Mapping[str, Any]) -> tuple[float, ...]:
    values = ours.get("copy_bias", [])
    if not isinstance(values, list) or not all(
        type(value) in (int, float) and abs(value) < _LARGEST_BIAS for value in values
    ):
        raise CheckpointError(f"{where}: copy_bias is {values!r}, not a list of numbers")
    return tuple(float(value) for value in values)


def _count(where: Path, fields: Mapping[str, Any], name: str, key: str) -> int:
    value = section(where, fields, name).get(key)
    if not isinstance(value, int) or value < 1:
        raise CheckpointError(f"{where}: {key} of section {name!r} is {value!r}, not a count")
    return value
