"""The settings of a distillation run."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from train.options import option

_AT_LEAST_1 = (
    *("max_length", "batch_size", "num_layers", "num_steps"),
    *("log_every", "eval_every", "save_every", "keep"),
)
_ABOVE_0 = ("epochs", "learning_rate", "clip_norm")
_AT_LEAST_0 = (
    *("copy_length", "draft_vocab", "warmup_steps", "weight_decay", "seed"),
    *("head_decay", "hidden_weight", "ce_weight"),
)


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """Everything train/distill.py can be told; each field is a command-line option.

    Raises:
      ValueError: a number that is too small, by name.
    """

    target: str = option("smollm2-135m", "'smollm2-135m', a folder, a GGUF file or a hub name")
    data: tuple[str, ...] = option((), "JSON or JSONL files with conversations, or globs")
    init: str = option("", "a head's folder to go on from; empty: a new head")
    output: str = option("runs/distill", "folder for checkpoints, metrics and the exported head")

    max_length: int = option(2048, "tokens of a training sample; longer ones are cut")
    join: bool = option(
        False, "fill rows to max_length and let each sample read those before it: long contexts"
    )
    features: str = option(
        "online", "'online': the target reads each batch; 'cached': once, onto the disk"
    )
    eval_fraction: float = option(0.02, "share of the conversations held back for evaluation")
    batch_size: int = option(16, "rows per step, each packed with whole samples")
    epochs: float = option(21.0, "passes over the data")

    num_layers: int = option(2, "layers of the augmenting block")
    num_steps: int = option(5, "draft tokens supervised per position (the paper's heads)")
    copy_length: int = option(
        8, "most tokens compared to copy what followed them in the text; 0: the head copies nothing"
    )
    draft_vocab: int = option(0, "tokens the head proposes from, the most frequent ones; 0: all")
    draft_vocab_file: str = option("", "the same as a file of token ids, one per line")

    learning_rate: float = option(1e-3, "peak rate of AdamW, after warm-up and before decay to 0")
    warmup_steps: int = option(100, "steps of linear warm-up")
    weight_decay: float = option(0.01, "decoupled weight decay of the weight matrices")
    clip_norm: float = option(1.0, "global norm the gradients are clipped to")
    head_decay: float = option(0.7, "loss weight of each draft step relative to the one before")
    hidden_weight: float = option(1.0, "weight of the hidden-state loss")
    ce_weight: float = option(1.0, "weight of the cross-entropy with the target's distribution")

    dtype: str = option("bfloat16", "dtype of the matrix products; master weights are float32")
    seed: int = option(0, "seed of the initial head and of the order of the data")
    log_every: int = option(10, "steps between metrics")
    eval_every: int = option(250, "steps between evaluations")
    save_every: int = option(250, "steps between checkpoints")
    keep: int = option(2, "checkpoints kept")

    # What may change between a run and its resumption.
    _FREE: ClassVar[tuple[str, ...]] = ("output", "log_every", "eval_every", "save_every", "keep")

    def __post_init__(self) -> None:
        if self.features not in ("online", "cached"):
            raise ValueError(f"features must be 'online' or 'cached', got {self.features!r}")
        if self.draft_vocab and self.draft_vocab_file:
            raise ValueError("draft_vocab and draft_vocab_file are two ways to say one thing")
        for name in _AT_LEAST_1:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in _ABOVE_0:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        for name in _AT_LEAST_0:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")

    def fixed(self) -> dict[str, Any]:
        """The settings that a resumed run must share, as JSON values."""
        fields = dataclasses.asdict(self)
        return {
            k: list(v) if isinstance(v, tuple) else v
            for k, v in fields.items()
            if k not in self._FREE
        }
