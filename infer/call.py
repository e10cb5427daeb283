"""From what a caller passes to a checked request, as arrays, and the bucket it falls in.

A bucket is (batch size, samples per prompt, cache slots, prompt chunk, tree). Cache slots are the
smallest power of two that holds the longest prompt with its budget, at least 64 and at most the
model's context; the prompt chunk is a power of two from 16 to 512 (on CPUs 128), smaller with many
rows. Number and length of bad words that are longer than a token count too, each rounded up to a
power of two. All other settings, seeds, budgets, prompt lengths and ends are arguments of the
program and never recompile it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Unpack

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.chat import encode_prompt
from clover_jax.tree import PLAIN, AnyTree
from infer.decode import Acceptance, Request, Shape, Weights
from infer.load import Model
from infer.noise import row_keys
from infer.options import Options
from infer.sampling import Sampling
from infer.settings import adjustments, per_row, power_of_two, stop_strings

# Prompt tokens that are read together. With 512 an accelerator has as much to compute as to read; a
# CPU gains nothing beyond 128, and a prompt is padded to whole chunks.
_LONGEST_CHUNK, _LONGEST_CHUNK_ON_CPU = 512, 128
_CHUNK_TOKENS = 1024  # of all rows together, which keeps any machine busy and bounds the scores

Message = dict[str, Any]
Prompt = str | Sequence[int] | Sequence[Message]


class Call(NamedTuple):
    """A checked request as arrays, and the bucket it falls in.

    Attributes:
      prompt: int32 [P, T], one row per prompt.
      prompt_length: int32 [P].
      samples: rows per prompt; all of `request` has P * samples rows, a prompt's side by side.
      stops: stop strings of each of those rows.
    """

    shape: Shape
    weights: Weights
    request: Request
    prompt: jax.Array
    prompt_length: jax.Array
    slots: int
    chunk: int
    samples: int
    stops: tuple[tuple[str, ...], ...]


def prepare(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    tree: AnyTree | Literal["auto"],
    max_new_tokens: int | Sequence[int],
    temperature: float | Sequence[float],
    top_p: float | Sequence[float],
    top_k: int | Sequence[int],
    seed: int | Sequence[int],
    acceptance: Acceptance = "shared",
    **options: Unpack[Options],
) -> Call:
    """Checks the arguments of `engine.generate`, picks the bucket, and the tree if it is "auto".

    Raises:
      ValueError: a prompt or a setting that cannot be used, with the numbers.
    """
    unknown = sorted(set(options) - set(Options.__annotations__))
    if unknown:
        known = (
            "max_new_tokens",
            "temperature",
            "top_p",
            "top_k",
            "seed",
            *Options.__annotations__,
        )
        raise ValueError(f"option {unknown[0]!r} is not known; known: {', '.join(known)}")
    ids = [encode_prompt(model.tokenizer, p) for p in _as_list(prompts)]
    count = len(ids)
    samples = options.get("num_samples", 1)
    if not isinstance(samples, int) or isinstance(samples, bool) or samples < 1:
        raise ValueError(f"num_samples must be a whole number of at least 1, got {samples!r}")
    budget = per_row("max_new_tokens", max_new_tokens, count, np.int32, 0, 2**31 - 1)
    context = model.config.max_position_embeddings
    for row, (prompt, new) in enumerate(zip(ids, budget.tolist(), strict=True)):
        _check_prompt(row, prompt, new, model.config.vocab_size, context)

    if tree == "auto":
        tree = model.auto_tree(count * samples)
    sampling = Sampling(
        temperature=jnp.asarray(per_row("temperature", temperature, count, np.float32, 0.0)),
        top_k=jnp.asarray(per_row("top_k", top_k, count, np.int32, 0, 2**31 - 1)),
        top_p=jnp.asarray(per_row("top_p", top_p, count, np.float32, 0.0, 1.0)),
        min_p=jnp.asarray(per_row("min_p", options.get("min_p", 0.0), count, np.float32, 0.0, 1.0)),
        adjustments=adjustments(model, count, options),
        keys=row_keys(seed, count),
    )
    stops = stop_strings(model, count, options)
    if samples > 1:
        budget = np.repeat(budget, samples)
        stops = [row for row in stops for _ in range(samples)]
        seeds = (
            seed
            if isinstance(seed, int | np.integer)
            else [s + i for s in seed for i in range(samples)]
        )
        keys = row_keys(seeds, count * samples)
        sampling = jax.tree.map(lambda x: jnp.repeat(x, samples, axis=0), sampling)
        sampling = sampling._replace(keys=keys)

    longest = max(len(p) for p in ids)
    need = max(len(p) + n for p, n in zip(ids, budget[::samples].tolist(), strict=True))
    slots = min(max(power_of_two(need), 64), context)
    most = power_of_two(_CHUNK_TOKENS // count + 1) // 2  # the power of two below
    cap = _LONGEST_CHUNK_ON_CPU if jax.default_backend() == "cpu" else _LONGEST_CHUNK
    chunk = max(min(power_of_two(longest), cap, most), 16)
    padded = np.zeros((count, -(-slots // chunk) * chunk), np.int32)
    for row, prompt in enumerate(ids):
        padded[row, : len(prompt)] = prompt
    plain = tree == PLAIN
    wanted = jnp.asarray(bool(options.get("logprobs", False)))
    return Call(
        shape=Shape(
            model.config,
            None if plain else model.draft_config,
            tree,
            "shared" if plain else acceptance,
        ),
        weights=Weights(model.params, None if plain else model.draft),
        request=Request(sampling, jnp.asarray(budget), wanted),
        prompt=jnp.asarray(padded),
        prompt_length=jnp.asarray([len(p) for p in ids], jnp.int32),
        slots=slots,
        chunk=chunk,
        samples=samples,
        stops=tuple(stops),
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
