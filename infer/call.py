"""From what a caller passes to a checked request, as arrays, and the bucket it falls in.

A bucket is (batch size, cache slots, prompt chunk, tree). Cache slots are the smallest power of two
that holds the longest prompt with its budget, at least 64 and at most the model's context; the
prompt chunk is a power of two from 16 to 256. Sampling settings, seeds, budgets, prompt lengths and
end-of-sequence tokens are arguments of the program and never recompile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.chat import encode_prompt
from clover_jax.tree import Tree
from infer.decode import Request, Shape, Weights
from infer.load import Model
from infer.sampling import Sampling, row_keys

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]

_EOS_SLOTS = 8  # ids beyond it go into the next multiple


class Call(NamedTuple):
    """A checked request as arrays, and the bucket it falls in."""

    shape: Shape
    weights: Weights
    request: Request
    prompt: jax.Array
    prompt_length: jax.Array
    slots: int
    chunk: int


def prepare(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float],
    top_p: float | Sequence[float],
    top_k: int | Sequence[int],
    seed: int | Sequence[int],
    tree: Tree,
) -> Call:
    """Checks the arguments of `engine.generate`, and picks the bucket.

    Raises:
      ValueError: a prompt or a setting that cannot be used, with the numbers.
    """
    ids = [encode_prompt(model.tokenizer, p) for p in _as_list(prompts)]
    rows = len(ids)
    budget = _per_row("max_new_tokens", max_new_tokens, rows, np.int32, 0, 2**31 - 1)
    sampling = Sampling(
        temperature=jnp.asarray(_per_row("temperature", temperature, rows, np.float32, 0.0)),
        top_k=jnp.asarray(_per_row("top_k", top_k, rows, np.int32, 0, 2**31 - 1)),
        top_p=jnp.asarray(_per_row("top_p", top_p, rows, np.float32, 0.0, 1.0)),
        keys=row_keys(seed, rows),
    )
    context = model.config.max_position_embeddings
    for row, (prompt, new) in enumerate(zip(ids, budget.tolist(), strict=True)):
        _check_prompt(row, prompt, new, model.config.vocab_size, context)

    longest = max(len(p) for p in ids)
    need = max(len(p) + n for p, n in zip(ids, budget.tolist(), strict=True))
    slots = min(max(_power_of_two(need), 64), context)
    chunk = min(max(_power_of_two(longest), 16), 256)
    padded = np.zeros((rows, -(-slots // chunk) * chunk), np.int32)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    ends = np.full(-(-max(len(model.eos_ids), 1) // _EOS_SLOTS) * _EOS_SLOTS, -1, np.int32)
    ends[: len(model.eos_ids)] = model.eos_ids
    plain = tree.depth == 0
    return Call(
        shape=Shape(model.config, None if plain else model.draft_config, tree),
        weights=Weights(model.params, None if plain else model.draft),
        request=Request(sampling, jnp.asarray(budget), jnp.asarray(ends)),
        prompt=jnp.asarray(padded),
        prompt_length=jnp.asarray([len(p) for p in ids], jnp.int32),
        slots=slots,
        chunk=chunk,
    )


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Tells one prompt from a list of them."""
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Sequence | np.ndarray):
        raise ValueError(
            "prompts are a string, token ids, messages or a list of those, not "
            f"{type(prompts).__name__}"
        )
    listed: list[Any] = list(prompts)
    if not listed:
        raise ValueError("the prompt is empty")
    if all(isinstance(x, dict) for x in listed):
        return [listed]
    if all(isinstance(x, int | np.integer) for x in listed):
        return [[int(x) for x in listed]]
    return listed


def _per_row(
    name: str,
    value: Any,
    rows: int,
    dtype: type[np.generic],
    low: float,
    high: float = float("inf"),
) -> np.ndarray:
    values = np.asarray(value)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        raise ValueError(f"{name} holds {values.size} values for {rows} prompts")
    whole = np.issubdtype(dtype, np.integer)
    if not np.issubdtype(values.dtype, np.integer if whole else np.number):
        raise ValueError(f"{name} must be {'whole numbers' if whole else 'numbers'}, got {value!r}")
    bad = values[~((values >= low) & (values <= high) & np.isfinite(values))]
    if bad.size:
        bounds = f"between {low} and {high}" if np.isfinite(high) else f"at least {low}"
        raise ValueError(f"{name} must be {bounds}, got {bad.flat[0]}")
    return np.broadcast_to(values, (rows,)).astype(dtype)


def _check_prompt(row: int, prompt: list[int], budget: int, vocab_size: int, context: int) -> None:
    if not prompt:
        raise ValueError(f"prompt {row} is empty")
    outside = [t for t in prompt if not 0 <= t < vocab_size]
    if outside:
        raise ValueError(
            f"prompt {row} holds token id {outside[0]}, outside the vocabulary of {vocab_size}"
        )
    if len(prompt) + budget > context:
        raise ValueError(
            f"prompt {row} has {len(prompt)} tokens; with max_new_tokens {budget} it needs "
            f"{len(prompt) + budget} of a context of {context}"
        )


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
