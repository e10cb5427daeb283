"""The same weights in transformers, in torch, to compare with: float32 on the CPU, one row."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from infer.counts import Counts
from infer.load import open_target


class TorchReference:
    """transformers' LlamaForCausalLM with the tensors of a checkpoint that we can read."""

    def __init__(self, target: str | Path, eos_ids: Sequence[int]) -> None:
        """Loads the checkpoint.

        Args:
          target: as in `infer.load`.
          eos_ids: tokens that end a text.

        Raises:
          ValueError: torch is not installed.
        """
        try:
            import torch
        except ImportError:
            raise ValueError(
                "the comparison with transformers runs in torch, which is not installed: "
                "pip install torch"
            ) from None
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.utils import logging

        self._torch, self._eos_ids = torch, list(eos_ids)
        source, _ = open_target(target)
        tensors = {
            name: torch.from_numpy(np.array(source.read(name), np.float32))
            for name in source.names()
        }
        fields = {k: v for k, v in source.config.items() if k not in ("dtype", "torch_dtype")}
        logging.disable_progress_bar()
        self._model: Any = LlamaForCausalLM.from_pretrained(
            None, config=LlamaConfig(**fields), state_dict=tensors, dtype=torch.float32
        )
        self._model.eval()

    def generate(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        temperature: float,
        lookup: int | None = None,
    ) -> tuple[list[int], Counts]:
        """New tokens, the end-of-sequence token included, and what they cost.

        Args:
          lookup: tokens that prompt lookup decoding drafts; None for plain decoding.
        """
        from transformers import GenerationConfig
        from transformers.generation.streamers import BaseStreamer

        class Clock(BaseStreamer):
            """Notes when the first new token comes: `put` is called with the prompt before it."""

            def __init__(self) -> None:
                self.calls: list[float] = []

            def put(self, _: Any) -> None:
                self.calls.append(time.perf_counter())

            def end(self) -> None: ...

        torch, clock = self._torch, Clock()
        sampling: dict[str, Any] = {"do_sample": False}
        if temperature > 0:
            sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
        if lookup is not None:
            sampling["prompt_lookup_num_tokens"] = lookup
        ids = torch.tensor([list(prompt)])
        passes = 0

        def count(*_: Any) -> None:
            nonlocal passes
            passes += 1

        hook = self._model.register_forward_pre_hook(count)
        started = time.perf_counter()
        with torch.inference_mode():
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                generation_config=GenerationConfig(
                    max_new_tokens=max_new_tokens,
                    eos_token_id=self._eos_ids or None,
                    pad_token_id=self._eos_ids[0] if self._eos_ids else 0,
                    **sampling,
                ),
                streamer=clock,
            )
        ended = time.perf_counter()
        hook.remove()
        tokens = output[0, len(prompt) :].tolist()
        return tokens, Counts(
            tokens=len(tokens),
            decoded=len(tokens) - 1,
            passes=passes,
            verified=passes - 1,
            prefill_seconds=clock.calls[1] - started,
            decode_seconds=ended - clock.calls[1],
        )
