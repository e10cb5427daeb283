"""The GGUF container: metadata, and tensors under their own names.

Quantised tensors are dequantised by the `gguf` package. The header is read here, because
`gguf.GGUFReader` makes several array objects of every token and every merge: 2.5 s of CPU for the
49k vocabulary of SmolLM2, where this takes 0.06 s.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from pathlib import Path
from typing import Any

import gguf
import ml_dtypes
import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType

from clover_jax.weights.source import CheckpointError

_VERSIONS = (2, 3)  # 1 had 32-bit counts, and no released model uses it

_NUMBERS = {
    GGUFValueType.UINT8: "<u1",
    GGUFValueType.INT8: "<i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

# Types that need no dequantisation.
_PLAIN = {
    GGMLQuantizationType.F32: np.dtype(np.float32),
    GGMLQuantizationType.F16: np.dtype(np.float16),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}


@dataclasses.dataclass(frozen=True)
class GgufTensor:
    """Where a tensor lies in its file.

    Attributes:
      shape: slowest dimension first, the reverse of what the file states.
      kind: how it is stored.
      offset: of its first byte, from the start of the file.
      num_bytes: its size in the file.
    """

    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """A file whose header was read and whose tensors were not.

    Attributes:
      path: the file.
      metadata: key -> bool, int, float, str, list of str, or array of numbers.
      tensors: GGUF name -> where it lies, in file order.
    """

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, GgufTensor]

    def read(self, name: str) -> np.ndarray:
        """One tensor: f32, f16 and bf16 as they are, quantised ones as f32.

        Raises:
          CheckpointError: a quantisation that the `gguf` package cannot undo, by name.
        """
        tensor = self.tensors[name]
        stored = np.asarray(
            np.memmap(
                self.path, np.uint8, mode="r", offset=tensor.offset, shape=(tensor.num_bytes,)
            )
        )
        if tensor.kind in _PLAIN:
            return stored.view(_PLAIN[tensor.kind]).reshape(tensor.shape)
        blocks = stored.reshape(gguf.quant_shape_to_byte_shape(tensor.shape, tensor.kind))
        try:
            return gguf.dequantize(blocks, tensor.kind).astype(np.float32, copy=False)
        except NotImplementedError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as {tensor.kind.name}, which the gguf "
                "package cannot dequantise"
            ) from error


def open_gguf(path: Path | str) -> GgufFile:
    """Reads the header of a GGUF file.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointError: it is not a GGUF file, is cut off or damaged, or is of an unknown version.
    """
    path = Path(path)
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise CheckpointError(f"{path} is not a GGUF file: it does not start with 'GGUF'")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            header = _Header(path, data)
            try:
                return header.parse()
            except UnicodeDecodeError as error:
                raise CheckpointError(f"{path}: a text in its header is not UTF-8") from error


class _Header:
    """A cursor over the header's bytes."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path = path
        self.data = data
        self.position = 4  # behind the magic

    def parse(self) -> GgufFile:
        version = self.integer(4)
        if version not in _VERSIONS:
            order = "big-endian" if version & 0xFFFF == 0 else f"of version {version}"
            raise CheckpointError(
                f"{self.path}: a GGUF file {order}; supported: little-endian, versions {_VERSIONS}"
            )
        num_tensors, num_keys = self.integer(8), self.integer(8)
        metadata = {self.text(): self.value(self.integer(4)) for _ in range(num_keys)}
        listed = [self.tensor() for _ in range(num_tensors)]

        # Offsets count from the end of the header, rounded up.
        alignment = int(metadata.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT))
        if alignment < 1:
            raise CheckpointError(f"{self.path}: general.alignment is {alignment}")
        start = -(-self.position // alignment) * alignment
        tensors: dict[str, GgufTensor] = {}
        for name, tensor in listed:
            if name in tensors:
                raise CheckpointError(f"{self.path}: tensor {name} is listed twice")
            tensors[name] = dataclasses.replace(tensor, offset=start + tensor.offset)
            end = tensors[name].offset + tensor.num_bytes
            if end > len(self.data):
                raise CheckpointError(
                    f"{self.path}: tensor {name} ends at byte {end}, the file at byte "
                    f"{len(self.data)}: it is cut off"
                )
        return GgufFile(self.path, metadata, tensors)

    def take(self, count: int) -> bytes:
        piece = self.data[self.position : self.position + count]
        if len(piece) != count:
            raise CheckpointError(f"{self.path}: the file ends within its header: it is cut off")
        self.position += count
        return piece

    def integer(self, num_bytes: int) -> int:
        return int.from_bytes(self.take(num_bytes), "little")

    def text(self) -> str:
        return self.take(self.integer(8)).decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == GGUFValueType.STRING:
            return self.text()
        if kind == GGUFValueType.ARRAY:
            kind, count = self.integer(4), self.integer(8)
            if kind == GGUFValueType.STRING:
                return [self.text() for _ in range(count)]
            return self.numbers(kind, count)
        number = self.numbers(kind, 1)[0]
        # A decimal that was rounded to f32 comes back as that decimal: 1e-05, not 9.99999974e-06.
        return float(str(number)) if kind == GGUFValueType.FLOAT32 else number.item()

    def numbers(self, kind: int, count: int) -> np.ndarray:
        if kind not in _NUMBERS:
            raise CheckpointError(f"{self.path}: its header has a value of the unknown type {kind}")
        dtype = np.dtype(_NUMBERS[GGUFValueType(kind)])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self) -> tuple[str, GgufTensor]:
        """Name and place of the next tensor; its offset is still relative."""
        name = self.text()
        sizes = [self.integer(8) for _ in range(self.integer(4))]
        number, offset = self.integer(4), self.integer(8)
        try:
            kind = GGMLQuantizationType(number)
        except ValueError as error:
            raise CheckpointError(
                f"{self.path}: tensor {name} is stored as type {number}, which the gguf package "
                "does not know"
            ) from error
        block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        num_bytes = math.prod(sizes) // block * block_bytes
        return name, GgufTensor(tuple(reversed(sizes)), kind, offset, num_bytes)
