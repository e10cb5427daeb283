"""A local Hugging Face folder: config.json beside safetensors or PyTorch files, one or many."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
import safetensors

from clover_jax.weights.source import CheckpointError

# Tried in this order, as transformers does.
WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)

# 8-bit floats, and integers as weights, would need scales that no supported checkpoint has.
_DTYPES = ("F64", "F32", "F16", "BF16", "I32")


class HuggingFaceSource:
    """Tensors of a local Hugging Face folder, memory-mapped and read one at a time.

    Attributes:
      path: the folder.
      config: config.json.
      generation_config: generation_config.json, {} where there is none.
    """

    def __init__(self, folder: str | Path) -> None:
        """Opens every file of the checkpoint; no tensor is read.

        Raises:
          CheckpointError: a missing, unreadable or inconsistent file, by name; PyTorch files
            where torch is not installed.
        """
        self.path = Path(folder)
        if not self.path.is_dir():
            raise CheckpointError(f"{self.path} is not a folder")
        self.config = read_json(self.path / "config.json")
        generation = self.path / "generation_config.json"
        self.generation_config = read_json(generation) if generation.exists() else {}
        self._shards = _open_shards(self.path)

    def names(self) -> list[str]:
        """Every tensor name, sorted."""
        return sorted(self._shards)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        return self._shard(name).shape(name)

    def read(self, name: str) -> np.ndarray:
        """One tensor in the file's dtype: f64, f32, f16, ml_dtypes.bfloat16 or int32.

        Raises:
          CheckpointError: no such tensor, or one of another dtype.
        """
        return self._shard(name).read(name)

    def _shard(self, name: str) -> _Shard:
        if name not in self._shards:
            raise CheckpointError(f"{self.path}: there is no tensor {name}")
        return self._shards[name]


def eos_ids(
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    tokenizer_eos: int | Iterable[int] | None = None,
) -> tuple[int, ...]:
    """Every token id that ends a text: the union of what the three places say, sorted.

    Args:
      config, generation_config: `eos_token_id` of each may be an int, a list, null or absent.
      tokenizer_eos: the tokenizer's own, where there is a tokenizer.

    Raises:
      CheckpointError: an `eos_token_id` that is something else.
    """
    found: set[int] = set()
    for place, value in (
        ("config.json", config.get("eos_token_id")),
        ("generation_config.json", generation_config.get("eos_token_id")),
        ("the tokenizer", tokenizer_eos),
    ):
        ids = [] if value is None else [value] if isinstance(value, int) else value
        if isinstance(ids, str) or not isinstance(ids, Iterable):
            raise CheckpointError(f"eos_token_id of {place} is {value!r}, neither int nor list")
        for token in ids:
            if not isinstance(token, int):
                raise CheckpointError(f"eos_token_id of {place} lists {token!r}, not a token id")
            found.add(token)
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file that holds an object.

    Raises:
      CheckpointError: no such file, or something else in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} does not exist") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds a {type(content).__name__}, not an object")
    return content


class _Shard(Protocol):
    def names(self) -> list[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> np.ndarray: ...


class _SafetensorsFile:
    """One safetensors file; safe_open maps it into memory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = safetensors.safe_open(path, framework="np")
        except (OSError, safetensors.SafetensorError) as error:
            raise CheckpointError(f"{path} cannot be opened: {error}") from error

    def names(self) -> list[str]:
        return list(self._file.keys())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._file.get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        dtype = self._file.get_slice(name).get_dtype()
        if dtype not in _DTYPES:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {dtype}; supported: {', '.join(_DTYPES)}"
            )
        return self._file.get_tensor(name)


class _TorchFile:
    """One file written by torch.save."""

    def __init__(self, path: Path) -> None:
        try:
            import torch
        except ImportError:
            raise CheckpointError(
                f"{path} is a PyTorch file: convert the checkpoint to safetensors "
                "(save_pretrained of transformers writes it) or install torch to read it"
            ) from None
        self.path = path
        self._torch = torch
        try:
            # Files of the format before torch 1.6 are no zip archives and cannot be mapped.
            mmap = zipfile.is_zipfile(path)
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        except Exception as error:  # unpickling raises whatever the damage leads to
            raise CheckpointError(f"{path} cannot be opened: {error}") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} holds a {type(content).__name__}, not named tensors")
        for name, value in content.items():
            if not isinstance(value, torch.Tensor):
                raise CheckpointError(f"{path}: {name} is a {type(value).__name__}, not a tensor")
        self._tensors = content

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str) -> np.ndarray:
        torch, tensor = self._torch, self._tensors[name].detach().contiguous()
        if tensor.dtype == torch.bfloat16:  # torch has no numpy view of it
            return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.int32):
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.dtype}; supported: "
                "float64, float32, float16, bfloat16, int32"
            )
        return tensor.numpy()


def _open_shards(folder: Path) -> dict[str, _Shard]:
    """Tensor name -> the open file that holds it."""
    found = next((folder / name for name in WEIGHT_FILES if (folder / name).exists()), None)
    if found is None:
        raise CheckpointError(f"{folder} holds no weights; looked for {', '.join(WEIGHT_FILES)}")
    open_file = _SafetensorsFile if ".safetensors" in found.name else _TorchFile
    if found.suffix != ".json":
        shard = open_file(found)
        return dict.fromkeys(shard.names(), shard)
    return _open_indexed(found, open_file)


def _open_indexed(index: Path, open_file: type[_SafetensorsFile | _TorchFile]) -> dict[str, _Shard]:
    """The shards of an index, which must list exactly the tensors that they hold."""
    listed = read_json(index).get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(f, str) for f in listed.values()):
        raise CheckpointError(f"{index} has no weight_map from tensor names to file names")
    shards: dict[str, _Shard] = {}
    for file in sorted(set(listed.values())):
        path = index.parent / file
        if not path.is_file():
            raise CheckpointError(f"{index} names the file {file}, which does not exist")
        shard = open_file(path)
        wanted = {name for name, place in listed.items() if place == file}
        present = set(shard.names())
        if wanted - present:
            missing = ", ".join(sorted(wanted - present))
            raise CheckpointError(f"{path} lacks {missing}, which {index.name} places there")
        if present - wanted:
            extra = ", ".join(sorted(present - wanted))
            raise CheckpointError(f"{path} holds {extra}, which {index.name} does not place there")
        shards.update(dict.fromkeys(wanted, shard))
    return shards
