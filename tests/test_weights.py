"""Checkpoints in Hugging Face folders: every tensor accounted for, every fault named."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from clover_jax.config import TargetConfig
from clover_jax.weights.huggingface import HuggingFaceSource, eos_ids
from clover_jax.weights.source import CheckpointError
from clover_jax.weights.target import abstract_params, load_target, tensor_name

Tensors = dict[str, np.ndarray]

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 12,
    "hidden_size": 8,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
Q0 = "model.layers.0.self_attn.q_proj.weight"
UP1 = "model.layers.1.mlp.up_proj.weight"
EMBED, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"


def random_tensors(**fields: Any) -> Tensors:
    """What a checkpoint of CONFIG with these fields holds, in HF's layout, f32."""
    rng = np.random.default_rng(0)
    config = TargetConfig.from_hf({**CONFIG, **fields})
    return {
        tensor_name(path): rng.normal(size=shape.shape).astype(np.float32)
        for path, shape in abstract_params(config).items()
    }


def write_config(folder: Path, **fields: Any) -> None:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, **fields}))


def write_single(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    write_config(folder, **fields)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_sharded(folder: Path, tensors: Tensors, **fields: Any) -> Path:
    write_config(folder, **fields)
    names = sorted(tensors)
    shards = {f"model-{i + 1:05}-of-00003.safetensors": names[i::3] for i in range(3)}
    for file, members in shards.items():
        save_file({n: tensors[n] for n in members}, folder / file, metadata={"format": "pt"})
    weight_map = {name: file for file, members in shards.items() for name in members}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


WRITERS = {"single": write_single, "sharded": write_sharded}


def load_flat(folder: Path, dtype: Any = jnp.float32) -> Tensors:
    _, params = load_target(HuggingFaceSource(folder), jnp.dtype(dtype))
    flat = flax.traverse_util.flatten_dict(params)
    return {tensor_name(path): np.asarray(v) for path, v in flat.items()}


def assert_same(ours: Tensors, theirs: Tensors) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, err_msg=name)


def refused(folder: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_flat(folder)


# Names and shapes


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("present", [True, False], ids=["lm_head", "no lm_head"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_tied_embeddings(tied: bool, present: bool, writer: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    if tied:
        tensors[LM_HEAD] = tensors[EMBED].copy()
    if not present:
        del tensors[LM_HEAD]
    folder = WRITERS[writer](tmp_path, tensors, tie_word_embeddings=tied)
    if not tied and not present:
        refused(folder, r"missing 1 tensor \(lm_head\.weight\)")
        return
    if tied:
        tensors.pop(LM_HEAD, None)  # no second copy
    assert_same(load_flat(folder), tensors)


def test_a_tied_lm_head_that_differs_is_refused(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors(), tie_word_embeddings=True)
    refused(tmp_path, r"tie_word_embeddings is true, but lm_head\.weight differs")


def test_a_tied_embedding_under_the_wrong_name_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[EMBED]
    refused(write_single(tmp_path, tensors, tie_word_embeddings=True), re.escape(EMBED))


@pytest.mark.parametrize("writer", WRITERS)
def test_missing_tensors_are_named(writer: str, tmp_path: Path) -> None:
    tensors = random_tensors()
    del tensors[Q0], tensors[UP1]
    refused(WRITERS[writer](tmp_path, tensors), rf"missing 2 tensors \({Q0}, {UP1}\)")


@pytest.mark.parametrize("writer", WRITERS)
def test_leftover_tensors_are_named(writer: str, tmp_path: Path) -> None:
    extra = "model.layers.2.mlp.up_proj.weight"  # num_hidden_layers too small
    tensors = {**random_tensors(), extra: np.zeros((20, 8), np.float32)}
    refused(WRITERS[writer](tmp_path, tensors), rf"1 tensor \({extra}\) not used by this")


@pytest.mark.parametrize("flag", ["attention_bias", "mlp_bias"])
def test_biases_are_used_or_refused(flag: str, tmp_path: Path) -> None:
    tensors = random_tensors(**{flag: True})
    biases = [name for name in tensors if name.endswith("bias")]
    assert len(biases) == {"attention_bias": 8, "mlp_bias": 6}[flag]
    assert_same(load_flat(write_single(tmp_path / "set", tensors, **{flag: True})), tensors)
    refused(write_single(tmp_path / "unset", tensors), rf"{len(biases)} tensors \(.*bias.*not used")
    refused(
        write_single(tmp_path / "absent", random_tensors(), **{flag: True}),
        rf"missing {len(biases)} tensors \(.*bias",
    )


def test_inverse_frequencies_are_ignored(tmp_path: Path) -> None:
    tensors = random_tensors()
    buffers = {
        f"model.layers.{i}.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32) for i in range(2)
    }
    assert_same(load_flat(write_single(tmp_path, {**tensors, **buffers})), tensors)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        (UP1, (8, 20), r"\(8, 20\); the config asks for \(20, 8\)"),
        (EMBED, (13, 8), r"\(13, 8\); the config asks for \(12, 8\)"),
        ("model.norm.weight", (8, 1), r"\(8, 1\); the config asks for \(8,\)"),
        ("model.layers.0.self_attn.k_proj.weight", (8, 8), r"asks for \(4, 8\)"),
    ],
)
def test_wrong_shapes_are_named(
    name: str, shape: tuple[int, ...], expected: str, tmp_path: Path
) -> None:
    tensors = {**random_tensors(), name: np.zeros(shape, np.float32)}
    refused(write_single(tmp_path, tensors), rf"{re.escape(name)} has shape .*{expected}")


# Dtypes


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
def test_stored_dtypes(dtype: Any, tmp_path: Path) -> None:
    tensors = {name: tensor.astype(dtype) for name, tensor in random_tensors().items()}
    write_single(tmp_path, tensors)
    assert HuggingFaceSource(tmp_path).read(Q0).dtype == dtype
    assert_same(load_flat(tmp_path), {n: t.astype(np.float32) for n, t in tensors.items()})
    half = load_flat(tmp_path, jnp.bfloat16)
    kinds = {n: np.float32 if "norm" in n else ml_dtypes.bfloat16 for n in tensors}
    assert {n: t.dtype for n, t in half.items()} == {n: np.dtype(k) for n, k in kinds.items()}
    assert_same(half, {n: t.astype(kinds[n]) for n, t in tensors.items()})


@pytest.mark.parametrize(
    ("dtype", "reason"),
    [(np.int8, "is stored as I8;"), (np.uint8, "is stored as U8;"), (np.int32, "holds int32")],
)
def test_integers_are_no_weights(dtype: Any, reason: str, tmp_path: Path) -> None:
    tensors = {**random_tensors(), Q0: np.ones((8, 8), dtype)}
    refused(write_single(tmp_path, tensors), rf"{tmp_path}.*: tensor {Q0} {reason}")


def test_eight_bit_floats_are_refused(tmp_path: Path) -> None:
    header = json.dumps({Q0: {"dtype": "F8_E4M3", "shape": [2, 2], "data_offsets": [0, 4]}})
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header.encode() + bytes(4)
    )
    with pytest.raises(CheckpointError, match=f"{Q0} is stored as F8_E4M3"):
        HuggingFaceSource(tmp_path).read(Q0)


def test_each_tensor_is_read_once_and_placed_by_path(tmp_path: Path) -> None:
    source = HuggingFaceSource(write_sharded(tmp_path, random_tensors()))
    reads, placed = [], []
    read = source.read
    source.read = lambda name: reads.append(name) or read(name)  # type: ignore[method-assign]

    def place(path: tuple[str, ...], value: np.ndarray) -> Any:
        placed.append(tensor_name(path))
        assert len(placed) == len(reads)  # one at a time
        return jnp.asarray(value)

    load_target(source, jnp.dtype(jnp.bfloat16), place)
    assert sorted(reads) == sorted(placed) == source.names()


# Folders


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "nowhere is not a folder")


def test_a_folder_without_weights_lists_what_was_looked_for(tmp_path: Path) -> None:
    write_config(tmp_path)
    refused(
        tmp_path,
        r"looked for model\.safetensors, model\.safetensors\.index\.json, "
        r"pytorch_model\.bin, pytorch_model\.bin\.index\.json",
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"config\.json does not exist"),
        (b"{", r"config\.json cannot be read"),
        (b"\xff\xfe\xfa", r"config\.json cannot be read"),
        (b"[]", r"config\.json holds a list, not an object"),
    ],
)
def test_a_bad_config_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    (tmp_path / "config.json").unlink()
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)
    refused(tmp_path, re.escape(str(tmp_path)) + ".*" + message)


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])  # a download that broke off
    refused(tmp_path, r"model\.safetensors cannot be opened")


def edit_index(folder: Path, edit: Any) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    edit(index["weight_map"])
    path.write_text(json.dumps(index))


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, random_tensors())
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    refused(tmp_path, r"names the file model-00002-of-00003\.safetensors, which does not exist")


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, random_tensors())
    edit_index(tmp_path, lambda m: m.update(ghost="model-00002-of-00003.safetensors"))
    refused(tmp_path, r"model-00002-of-00003\.safetensors lacks ghost, which .*index\.json places")


def test_a_tensor_that_the_index_lacks_is_named(tmp_path: Path) -> None:
    write_sharded(tmp_path, random_tensors())
    edit_index(tmp_path, lambda m: m.pop(UP1))
    refused(tmp_path, rf"holds {UP1}, which .*index\.json does not place there")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}])
def test_an_index_without_a_map_is_named(weight_map: Any, tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refused(tmp_path, r"index\.json has no weight_map")


# PyTorch files


def test_a_bin_without_torch_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "torch", None)
    refused(tmp_path, r"pytorch_model\.bin .*convert .* to safetensors .* or install torch")


def write_torch(path: Path, tensors: Tensors, dtype: str = "float32", zipped: bool = True) -> None:
    torch = pytest.importorskip("torch")
    content = {n: torch.from_numpy(t).to(getattr(torch, dtype)) for n, t in tensors.items()}
    torch.save(content, path, _use_new_zipfile_serialization=zipped)


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_bin_loads_through_torch(dtype: str, zipped: bool, tmp_path: Path) -> None:
    tensors = random_tensors()
    write_config(tmp_path)
    write_torch(tmp_path / "pytorch_model.bin", tensors, dtype, zipped)
    rounded = {n: t.astype(jnp.dtype(dtype)) for n, t in tensors.items()}
    assert HuggingFaceSource(tmp_path).read(Q0).dtype == jnp.dtype(dtype)
    assert_same(load_flat(tmp_path), {n: t.astype(np.float32) for n, t in rounded.items()})


def test_a_sharded_bin_loads_through_torch(tmp_path: Path) -> None:
    tensors = random_tensors()
    names = sorted(tensors)
    write_config(tmp_path)
    weight_map = {}
    for i in range(2):
        file = f"pytorch_model-{i + 1:05}-of-00002.bin"
        write_torch(tmp_path / file, {n: tensors[n] for n in names[i::2]})
        weight_map |= dict.fromkeys(names[i::2], file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_same(load_flat(tmp_path), tensors)


def test_safetensors_go_first(tmp_path: Path) -> None:
    tensors = random_tensors()
    write_single(tmp_path, tensors)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not looked at")
    assert_same(load_flat(tmp_path), tensors)


@pytest.mark.parametrize("content", [b"junk", b""])
def test_a_damaged_bin_is_named(content: bytes, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    write_config(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(content)
    refused(tmp_path, r"pytorch_model\.bin cannot be opened")


# EOS


def test_generation_config_is_optional(tmp_path: Path) -> None:
    write_single(tmp_path, random_tensors())
    assert HuggingFaceSource(tmp_path).generation_config == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [51, 52]}')
    assert HuggingFaceSource(tmp_path).generation_config == {"eos_token_id": [51, 52]}


@pytest.mark.parametrize(
    ("config", "generation", "tokenizer", "expected"),
    [
        ({"eos_token_id": 50}, {"eos_token_id": [51, 52]}, 53, (50, 51, 52, 53)),
        ({"eos_token_id": [50, 51]}, {"eos_token_id": 51}, None, (50, 51)),
        ({"eos_token_id": None}, {}, 2, (2,)),
        ({}, {"eos_token_id": None}, [7, 3], (3, 7)),
        ({"eos_token_id": 0}, {"eos_token_id": []}, None, (0,)),
        ({}, {}, None, ()),
    ],
)
def test_eos_ids_are_the_union(
    config: Any, generation: Any, tokenizer: Any, expected: tuple[int, ...]
) -> None:
    assert eos_ids(config, generation, tokenizer) == expected


@pytest.mark.parametrize("value", ["</s>", 2.5, [1, "2"]])
def test_other_eos_ids_are_refused(value: Any) -> None:
    with pytest.raises(CheckpointError, match=r"eos_token_id of generation_config\.json"):
        eos_ids({}, {"eos_token_id": value})
