"""Clover-2 heads on disk: the official form, ours, and which target a head belongs to."""

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.weights.clover import (
    COPIES,
    Head,
    abstract_head,
    check_target,
    load_head,
    save_head,
)
from clover_jax.weights.clover_config import config_json, parse_config
from clover_jax.weights.fingerprint import fingerprint
from clover_jax.weights.huggingface import HuggingFaceSource
from clover_jax.weights.source import CheckpointError
from clover_jax.weights.target import abstract_params, load_target, tensor_name

Tensors = dict[str, np.ndarray]
D, F, V, KV = 8, 20, 12, 4  # width, MLP width, vocabulary, kv heads * head dim
DTYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
F32 = jnp.dtype(jnp.float32)

# The key set of the official Llama-3 head, scaled down; its rope_theta is not what was computed.
OFFICIAL_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": D,
    "initializer_range": 0.02,
    "intermediate_size": F,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "num_attention_heads": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 1,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": V,
    "clover": {
        "num_heads": 5,
        "num_layers": 2,
        "heads_coefficient": 1.0,
        "decay_coefficient": 0.7,
    },
}
TARGET = TargetConfig.from_hf({**OFFICIAL_CONFIG, "num_hidden_layers": 3})

LAYER_SHAPES = {
    "self_attn.q_proj.weight": (D, D),
    "self_attn.k_proj.weight": (KV, D),
    "self_attn.v_proj.weight": (KV, D),
    "self_attn.o_proj.weight": (D, D),
    "mlp.gate_proj.weight": (F, D),
    "mlp.up_proj.weight": (F, D),
    "mlp.down_proj.weight": (D, F),
    "input_layernorm.weight": (D,),
    "post_attention_layernorm.weight": (D,),
}
DECODER_SHAPES = {"input_layernorm.weight": (D,)} | {
    f"{m}.{leaf}": shape for m in "qkv" for leaf, shape in {"weight": (D, D), "bias": (D,)}.items()
}
SHAPES = {
    **{f"layers.{i}.{name}": shape for i in range(2) for name, shape in LAYER_SHAPES.items()},
    **{f"clover_head_mlp_rnn.{name}": shape for name, shape in DECODER_SHAPES.items()},
    **{f"clover_head_mlp_rnn2.{name}": shape for name, shape in DECODER_SHAPES.items()},
    "clover_norm.weight": (D,),
    "clover_head_norm.weight": (D,),
    "clover_head_mlp.weight": (D, D),
    "clover_head_mlp.bias": (D,),
    "clover_head_mlp2.weight": (D, 2 * D),
    "clover_head_mlp2.bias": (D,),
}
PATHS = {
    "layers.0.self_attn.k_proj.weight": ("block_0", "self_attn", "k_proj", "weight"),
    "layers.1.mlp.down_proj.weight": ("block_1", "mlp", "down_proj", "weight"),
    "layers.1.input_layernorm.weight": ("block_1", "input_layernorm", "scale"),
    "clover_norm.weight": ("block_norm", "scale"),
    "clover_head_norm.weight": ("head_norm", "scale"),
    "clover_head_mlp.weight": ("fc1", "weight"),
    "clover_head_mlp.bias": ("fc1", "bias"),
    "clover_head_mlp2.weight": ("fc2", "weight"),
    "clover_head_mlp2.bias": ("fc2", "bias"),
    "clover_head_mlp_rnn.input_layernorm.weight": ("ad1", "input_layernorm", "scale"),
    "clover_head_mlp_rnn.q.weight": ("ad1", "q", "weight"),
    "clover_head_mlp_rnn2.k.bias": ("ad2", "k", "bias"),
    "clover_head_mlp_rnn2.v.weight": ("ad2", "v", "weight"),
}


def official_tensors(dtype: Any = np.float32) -> Tensors:
    rng = np.random.default_rng(0)
    shapes = {**SHAPES, "lm_head.weight": (V, D)}
    tensors = {n: rng.normal(size=shape).astype(dtype) for n, shape in shapes.items()}
    return {**tensors, "clover_embed_tokens.weight": tensors["lm_head.weight"].copy()}


def write(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**OFFICIAL_CONFIG, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def assert_bitwise(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert (ours[name].dtype, ours[name].shape) == (tensor.dtype, tensor.shape), name
        assert ours[name].tobytes() == tensor.tobytes(), name


def our_head(**fields: Any) -> Head:
    """A head of ours that differs from an official one in everything a head can differ in."""
    block = dataclasses.replace(TARGET, num_layers=1, hidden_act="gelu")
    config = DraftConfig(
        block=block, num_heads=4, draft_vocab_size=5, num_steps=3, copy_bias=(0.5, -1.25, 3.0)
    )
    rng = np.random.default_rng(1)
    params = flax.traverse_util.unflatten_dict(
        {p: rng.normal(size=s.shape).astype(np.float32) for p, s in abstract_head(config).items()}
    )
    head = Head(
        config=config,
        params=params,
        draft_ids=np.array([7, 0, 11, 3, 4], np.int32),
        target_fingerprint="00ff",
        metadata={"recipe": {"steps": 100, "rate": 1e-3}, "data": ["a", "b"]},
        decay_coefficient=0.8,
    )
    return dataclasses.replace(head, **fields)


# The official form


def test_an_official_head_loads(tmp_path: Path) -> None:
    tensors = official_tensors()
    head = load_head(write(tmp_path, tensors), TARGET, F32)
    assert head.config.embedding == "lm_head"
    assert (head.config.num_steps, head.config.num_heads, head.config.block.num_layers) == (5, 2, 2)
    assert head.config.block.rope.theta == 10_000.0
    assert TARGET.rope.theta == 500_000.0
    assert (head.draft_ids, head.target_fingerprint, head.metadata) == (None, None, {})
    assert (head.heads_coefficient, head.decay_coefficient) == (1.0, 0.7)
    flat = flax.traverse_util.flatten_dict(head.params)
    assert len(flat) == len(SHAPES)
    for name, path in PATHS.items():
        np.testing.assert_array_equal(flat[path], tensors[name], err_msg=name)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("loaded", ["same", "float32"])
def test_official_to_ours_to_official_is_bitwise(dtype: Any, loaded: str, tmp_path: Path) -> None:
    tensors = official_tensors(dtype)
    lm_head = tensors["lm_head.weight"]
    held = jnp.dtype(dtype if loaded == "same" else loaded)
    head = load_head(write(tmp_path / "official", tensors), TARGET, held, lm_head)
    save_head(tmp_path / "ours", head, jnp.dtype(dtype))
    ours = load_file(tmp_path / "ours" / "model.safetensors")
    assert_bitwise(ours, {n: t for n, t in tensors.items() if n not in COPIES})

    again = load_head(tmp_path / "ours", TARGET, held)
    assert again.config == head.config
    save_head(tmp_path / "back", again, jnp.dtype(dtype), lm_head)
    assert_bitwise(load_file(tmp_path / "back" / "model.safetensors"), tensors)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config["clover"] == OFFICIAL_CONFIG["clover"]
    assert "clover_jax" not in config
    assert config["torch_dtype"] == jnp.dtype(dtype).name
    assert load_head(tmp_path / "back", TARGET, held).config == head.config


@pytest.mark.parametrize("kind", ["linear", "dynamic"])
def test_official_rope_scaling_is_kept(kind: str, tmp_path: Path) -> None:
    scaling = {"type": kind, "factor": 2.0}
    tensors = official_tensors()
    head = load_head(write(tmp_path / "in", tensors, rope_scaling=scaling), TARGET, F32)
    rope = head.config.block.rope
    assert (rope.kind, rope.factor, rope.theta) == (kind, 2.0, 10_000.0)
    save_head(tmp_path / "out", head, F32, tensors["lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text())["rope_scaling"] == scaling


def test_official_config_of_newer_transformers(tmp_path: Path) -> None:
    fields = {"rope_type": "default", "rope_theta": 500_000.0}
    head = load_head(write(tmp_path, official_tensors(), rope_parameters=fields), TARGET, F32)
    assert head.config.block.rope.theta == 10_000.0


def test_an_official_head_for_llama31_scaling_is_refused(tmp_path: Path) -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1, "high_freq_factor": 4}
    write(tmp_path, official_tensors(), rope_scaling=scaling)
    with pytest.raises(CheckpointError, match="official head has no rope_type 'llama3'"):
        load_head(tmp_path, TARGET, F32)


# Its copies of the LM head


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("held", DTYPES)
def test_copies_equal_up_to_rounding_pass(stored: Any, held: Any, tmp_path: Path) -> None:
    original = np.random.default_rng(2).normal(size=(V, D)).astype(ml_dtypes.bfloat16)
    tensors = {**official_tensors(), **{name: original.astype(stored) for name in COPIES}}
    load_head(write(tmp_path, tensors), TARGET, F32, jnp.asarray(original.astype(held)))


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_differs_is_named(name: str, tmp_path: Path) -> None:
    tensors = official_tensors()
    lm_head = tensors[name].copy()
    tensors[name][3, 5] += 0.01
    with pytest.raises(CheckpointError, match=rf"{name} differs .* belongs to another target"):
        load_head(write(tmp_path, tensors), TARGET, F32, lm_head)


@pytest.mark.parametrize("name", COPIES)
def test_a_copy_of_another_shape_is_named(name: str, tmp_path: Path) -> None:
    tensors = {**official_tensors(), name: np.zeros((V + 1, D), np.float32)}
    with pytest.raises(CheckpointError, match=rf"{name} has shape \(13, 8\); .* has \(12, 8\)"):
        load_head(write(tmp_path, tensors), TARGET, F32)


def test_a_head_stripped_of_its_copies_loads(tmp_path: Path) -> None:
    tensors = {n: t for n, t in official_tensors().items() if n not in COPIES}
    load_head(write(tmp_path, tensors), TARGET, F32, np.zeros((V, D), np.float32))


# Our form


@pytest.mark.parametrize("dtype", DTYPES)
def test_our_form_round_trips(dtype: Any, tmp_path: Path) -> None:
    head = our_head()
    save_head(tmp_path, head, jnp.dtype(dtype))
    again = load_head(tmp_path, TARGET, jnp.dtype(dtype))
    for field in dataclasses.fields(Head):
        if field.name not in ("params", "draft_ids"):
            assert getattr(again, field.name) == getattr(head, field.name), field.name
    np.testing.assert_array_equal(again.draft_ids, head.draft_ids)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(a, b.astype(dtype)), again.params, head.params
    )
    stored = load_file(tmp_path / "model.safetensors")
    assert not stored.keys() & set(COPIES)
    assert stored.pop("draft_vocab").dtype == np.int32
    assert {t.dtype for t in stored.values()} == {np.dtype(dtype)}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_saving_over_a_head_replaces_it(tmp_path: Path) -> None:
    save_head(tmp_path, our_head(), F32)
    other = our_head(draft_ids=np.arange(5, dtype=np.int32), metadata={})
    save_head(tmp_path, other, F32)
    again = load_head(tmp_path, TARGET, F32)
    assert again.draft_ids is not None
    assert (again.draft_ids.tolist(), again.metadata) == ([0, 1, 2, 3, 4], {})


ROPES = {
    "default": {},
    "linear": {"factor": 2.0},
    "linear beside": {"factor": 2.0, "original_max_position_embeddings": 16},
    "dynamic": {"factor": 2.0},
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {
        "factor": 4.0,
        "original_max_position_embeddings": 16,
        "mscale": 0.7,
        "mscale_all_dim": 0.3,
        "beta_fast": 16,
        "truncate": False,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("biases", [True, False])
def test_every_target_s_block_can_be_written(name: str, biases: bool) -> None:
    target = TargetConfig.from_hf(
        {
            **OFFICIAL_CONFIG,
            "head_dim": 32,
            "attention_bias": biases,
            "mlp_bias": biases,
            "tie_word_embeddings": True,
            "rope_scaling": {"rope_type": name.split()[0], **ROPES[name]},
        }
    )
    config = DraftConfig.for_target(target)
    fields = json.loads(json.dumps(config_json(config, official=False)))
    assert parse_config(Path(), fields) == config


# What is refused


def edited(folder: Path, section: str | None = None, **fields: Any) -> Path:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config[section] if section else config).update(fields)
    path.write_text(json.dumps(config))
    return folder


def stored(folder: Path, **changes: np.ndarray | None) -> Path:
    """The head in this folder with tensors replaced, or removed where None."""
    tensors = {**load_file(folder / "model.safetensors"), **changes}
    save_file({n: t for n, t in tensors.items() if t is not None}, folder / "model.safetensors")
    return folder


def refused(folder: Path, message: str, target: TargetConfig = TARGET) -> None:
    with pytest.raises(ValueError, match=message):
        load_head(folder, target, F32)


@pytest.mark.parametrize("form", ["official", "ours"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"clover_norm.weight": None}, r"missing 1 tensor \(clover_norm\.weight\)"),
        ({"clover_head_mlp_rnn2.q.bias": None}, r"missing 1 tensor \(clover_head_mlp_rnn2\.q\.bi"),
        ({"layers.7.mlp.x": np.zeros(1, np.float32)}, r"1 tensor \(layers\.7\.mlp\.x\) not used"),
        (
            {"clover_head_mlp2.weight": np.zeros((2 * D, D), np.float32)},
            r"clover_head_mlp2\.weight has shape \(16, 8\); the config asks for \(8, 16\)",
        ),
        ({"clover_head_mlp.bias": np.zeros(D, np.int32)}, r"clover_head_mlp\.bias holds int32"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    form: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    if form == "official":
        write(tmp_path, official_tensors())
    else:
        save_head(tmp_path, our_head(), F32)
    refused(stored(tmp_path, **changes), message)


def test_a_head_of_ours_has_no_copies(tmp_path: Path) -> None:
    save_head(tmp_path, our_head(), F32)
    stored(tmp_path, **{"lm_head.weight": np.zeros((V, D), np.float32)})
    refused(tmp_path, r"1 tensor \(lm_head\.weight\) not used")


def test_an_official_head_has_no_draft_vocabulary(tmp_path: Path) -> None:
    write(tmp_path, {**official_tensors(), "draft_vocab": np.arange(5, dtype=np.int32)})
    refused(tmp_path, r"1 tensor \(draft_vocab\) not used")


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (None, r"missing 1 tensor \(draft_vocab\)"),
        (np.array([1, 2, 3], np.int32), r"int32 \(3,\); the config asks for int32 \(5,\)"),
        (np.array([1, 2, 3, 4, 12], np.int32), r"different ids in 0\.\.11; .* 5 .* in 1\.\.12"),
        (np.array([-1, 2, 3, 4, 5], np.int32), r"different ids in 0\.\.11; .* 5 .* in -1\.\.5"),
        (np.array([1, 2, 3, 3, 4], np.int32), r"these are 4 different ids in 1\.\.4"),
        (np.array([1, 2, 3, 4, 5], np.float32), r"float32 \(5,\); the config asks for int32"),
    ],
)
def test_draft_ids_that_do_not_fit(ids: np.ndarray | None, message: str, tmp_path: Path) -> None:
    save_head(tmp_path, our_head(), F32)
    refused(stored(tmp_path, draft_vocab=ids), message)


def test_draft_ids_go_with_a_partial_vocabulary() -> None:
    with pytest.raises(CheckpointError, match="proposes from 5 of 12 tokens needs draft ids"):
        our_head(draft_ids=None)
    whole = dataclasses.replace(our_head().config, draft_vocab_size=V)
    with pytest.raises(CheckpointError, match="proposes from 12 of 12 tokens has no draft ids"):
        our_head(config=whole)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hidden_size": 16}, "the head has hidden_size 8, its target 16"),
        ({"vocab_size": 13}, "the head has vocab_size 12, its target 13"),
    ],
)
def test_a_target_of_another_shape_is_refused(
    fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    write(tmp_path, official_tensors())
    refused(tmp_path, message, TargetConfig.from_hf({**OFFICIAL_CONFIG, **fields}))


def test_configs_that_are_no_head(tmp_path: Path) -> None:
    write(tmp_path, official_tensors())
    refused(edited(tmp_path, clover=None), "no section 'clover', so this is no head")
    refused(edited(tmp_path, clover={"num_heads": 5}), "num_layers of section 'clover' is None")
    refused(edited(tmp_path, clover={"num_heads": "5", "num_layers": 2}), "num_heads .* is '5'")
    save_head(tmp_path, our_head(), F32)
    refused(edited(tmp_path, "clover_jax", embedding="rows"), "embedding 'rows' is neither")
    refused(edited(tmp_path, "clover_jax", num_decoder_heads=3), "hidden_size 8 into 3 heads")
    for bias in (1.5, ["1"], [1.0, float("inf")], [float("nan")], [10**400], [True], None):
        refused(edited(tmp_path, "clover_jax", copy_bias=bias), "copy_bias is .* list of numbers")


def test_a_target_s_folder_is_no_head(tmp_path: Path) -> None:
    save_file({"a": np.zeros(1, np.float32)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    refused(tmp_path, f"{re.escape(str(tmp_path))}.* no section 'clover'")


@pytest.mark.parametrize(
    ("block", "config", "message"),
    [
        ({}, {"draft_vocab_size": 5}, "draft_vocab_size 5: it would be read as 12"),
        (
            {"head_dim": 8, "rope": dataclasses.replace(TARGET.rope, head_dim=8)},
            {},
            "head_dim 8: it would be read as 4",
        ),
        ({}, {"embedding": "embed_tokens"}, "embedding 'embed_tokens': it would be read as 'lm_h"),
        ({}, {"num_heads": 4}, "num_heads 4: it would be read as 2"),
        ({"rope": TARGET.rope}, {}, r"theta 500000\.0: it would be read as 10000\.0"),
        ({"qkv_bias": True, "out_bias": True}, {}, "qkv_bias True: it would be read as False"),
        ({"mlp_bias": True}, {}, "mlp_bias True: it would be read as False"),
        ({}, {"copy_bias": (1.0,)}, r"copy_bias \(1\.0,\): it would be read as \(\)"),
    ],
)
def test_what_the_official_form_cannot_express(
    block: dict[str, Any], config: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head = load_head(write(tmp_path / "in", official_tensors()), TARGET, F32)
    shape = dataclasses.replace(head.config.block, **block)
    head = dataclasses.replace(
        head,
        config=dataclasses.replace(head.config, block=shape, **config),
        draft_ids=np.arange(5, dtype=np.int32) if "draft_vocab_size" in config else None,
    )
    lm_head = np.zeros((V, D), np.float32)
    with pytest.raises(CheckpointError, match=f"the official form cannot express .* {message}"):
        save_head(tmp_path / "out", head, F32, lm_head)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fc1": {"weight": np.zeros((D, D))}}, r"fc1/bias has shape none; .* asks for \(8,\)"),
        ({"fc2": {"weight": np.zeros(3), "bias": np.zeros(D)}}, r"fc2/weight has shape \(3,\); "),
        ({"fc3": {"weight": np.zeros(3)}}, "fc3/weight has .* asks for no such parameter"),
    ],
)
def test_parameters_that_do_not_fit_are_not_written(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    head = our_head()
    with pytest.raises(CheckpointError, match=f"parameter {message}"):
        save_head(tmp_path / "out", dataclasses.replace(head, params=head.params | change), F32)
    assert not (tmp_path / "out").exists()


# Which target


def write_target(folder: Path, tensors: Tensors, **fields: Any) -> HuggingFaceSource:
    folder.mkdir(exist_ok=True)
    config = {k: v for k, v in OFFICIAL_CONFIG.items() if k != "clover"}
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 3, **fields}))
    save_file(tensors, folder / "model.safetensors")
    return HuggingFaceSource(folder)


def target_tensors(dtype: Any = np.float32) -> Tensors:
    tensors = {}
    for path, leaf in abstract_params(TARGET).items():
        rng = np.random.default_rng(len(tensors))
        tensors[tensor_name(path)] = rng.normal(size=leaf.shape).astype(dtype)
    return tensors


@pytest.mark.parametrize("stored_dtype", [np.float32, ml_dtypes.bfloat16])
def test_the_fingerprint_does_not_depend_on_the_dtype(stored_dtype: Any, tmp_path: Path) -> None:
    source = write_target(tmp_path, target_tensors(stored_dtype))
    found = {fingerprint(TARGET, source)}
    for dtype in (jnp.float32, jnp.bfloat16):
        config, params = load_target(source, jnp.dtype(dtype))
        found.add(fingerprint(config, params))
    assert len(found) == 1


def test_the_fingerprint_stays_what_it_was() -> None:
    """Heads in use carry fingerprints: a change here would have them refused."""
    params = flax.traverse_util.unflatten_dict(
        {
            path: np.arange(np.prod(leaf.shape), dtype=np.float32).reshape(leaf.shape) / 7
            for path, leaf in abstract_params(TARGET).items()
        }
    )
    assert fingerprint(TARGET, params) == "8de6a43205a7f41773f195751b4f2086"


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens.weight",
        "model.norm.weight",
        "model.layers.2.self_attn.q_proj.weight",
        "model.layers.2.mlp.down_proj.weight",
    ],
)
def test_a_head_is_refused_on_a_target_with_other_weights(name: str, tmp_path: Path) -> None:
    tensors = target_tensors()
    head = our_head(target_fingerprint=fingerprint(TARGET, write_target(tmp_path / "a", tensors)))
    save_head(tmp_path / "head", head, F32)
    head = load_head(tmp_path / "head", TARGET, F32)
    check_target(head, TARGET, write_target(tmp_path / "a", tensors))
    tensors[name] = tensors[name] * 1.02  # tuned a little
    with pytest.raises(CheckpointError, match=f"trained for the target {head.target_fingerprint};"):
        check_target(head, TARGET, write_target(tmp_path / "b", tensors))


@pytest.mark.parametrize(
    "change",
    [
        {"num_layers": 4},
        {"num_heads": 4},
        {"intermediate_size": 21},
        {"rope": dataclasses.replace(TARGET.rope, theta=1e4)},
    ],
    ids=str,
)
def test_the_fingerprint_sees_the_shape(change: dict[str, Any], tmp_path: Path) -> None:
    tensors = target_tensors()
    for name in list(tensors):  # a layer more, equal to the last one
        tensors[name.replace("layers.2", "layers.3")] = tensors[name].copy()
    source = write_target(tmp_path, tensors)
    other = dataclasses.replace(TARGET, **change)
    assert fingerprint(other, source) != fingerprint(TARGET, source)


def test_a_head_without_a_fingerprint_passes(tmp_path: Path) -> None:
    source = write_target(tmp_path, target_tensors())
    check_target(our_head(target_fingerprint=None), TARGET, source)
