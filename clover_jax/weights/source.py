"""A checkpoint on disk, seen as Hugging Face names, whatever its format."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol

import numpy as np


class CheckpointError(ValueError):
    """A file that cannot be used, with the reason."""


class TensorSource(Protocol):
    """Named tensors that are read one at a time.

    Attributes:
      path: the file or folder, for messages.
      config: what the checkpoint says of its model, in the form of a Hugging Face config.json.
    """

    path: Path
    config: dict[str, Any]

    def names(self) -> list[str]:
        """Hugging Face tensor names, such as 'model.layers.0.self_attn.q_proj.weight'."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor in the file's dtype; quantised formats give f32."""
        ...
