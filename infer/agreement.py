"""Where two texts of one model part, and whether rounding can be the reason.

Axes: T tokens, V vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import TargetConfig
from clover_jax.target import Target, causal_mask
from infer.load import Model
from infer.noise import row_keys
from infer.sampling import Sampling, gumbel_noise, process

# Two passes over the same tokens round differently. On SmolLM2-135M the leading logits moved by up
# to 2e-5 in float32 and 0.25 in bfloat16; a difference of two logits by twice that.
_ROUNDING = {"float32": 5e-4, "bfloat16": 0.5}


@dataclasses.dataclass(frozen=True)
class Difference:
    """The first token in which a text leaves the one of plain decoding.

    Attributes:
      position: its index among the new tokens.
      expected, found: the plain text's token and the other's; None where that text has ended.
      gap: how far the worse of the two is below the best token, in logits, noise included, when the
        target reads the common text in one pass; None where one text has ended.
      near_tie: rounding explains the difference.
    """

    position: int
    expected: int | None
    found: int | None
    gap: float | None
    near_tie: bool


def first_difference(
    model: Model,
    prompt: Sequence[int],
    expected: Sequence[int],
    found: Sequence[int],
    temperature: float = 0.0,
    seed: int = 0,
    dtype: str | None = None,
) -> Difference | None:
    """Compares new tokens with those of plain decoding.

    Args:
      prompt: token ids.
      expected: new tokens of plain decoding.
      found: new tokens of the same request by other means.
      temperature, seed: of the request; top-k and top-p were off.
      dtype: the coarsest that only one of the two was computed in; by default the activations'.

    Returns:
      None if the texts are the same.
    """
    if list(expected) == list(found):
        return None
    at = next(
        (i for i, (a, b) in enumerate(zip(expected, found, strict=False)) if a != b),
        min(len(expected), len(found)),
    )
    if at == min(len(expected), len(found)):
        ours, theirs = ((row[at] if at < len(row) else None) for row in (expected, found))
        return Difference(at, ours, theirs, gap=None, near_tie=False)

    scores = forced_scores(model, prompt, expected[:at], temperature, seed)
    gap = float(scores.max() - min(scores[expected[at]], scores[found[at]]))
    dtype = dtype or model.params["embed_tokens"].dtype.name
    return Difference(at, expected[at], found[at], gap, near_tie=gap <= _ROUNDING[dtype])


def forced_scores(
    model: Model, prompt: Sequence[int], new: Sequence[int], temperature: float, seed: int
) -> np.ndarray:
    """What plain decoding takes the argmax of after `new`, from one pass over all tokens.

    Returns:
      f32 [V], in logits: the noise is scaled by the temperature, not the logits by its inverse.
    """
    tokens = [*prompt, *new]
    padded = np.zeros((1, max(64, 1 << (len(tokens) - 1).bit_length())), np.int32)
    padded[0, : len(tokens)] = tokens
    sampling = Sampling.of(row_keys(seed, 1), model.config.vocab_size, temperature=temperature)
    scores = _scores(
        model.config,
        model.params,
        jnp.asarray(padded),
        jnp.int32(len(prompt)),
        jnp.int32(len(tokens)),
        sampling,
    )
    return np.asarray(scores) * (temperature or 1.0)


@functools.partial(jax.jit, static_argnums=0)
def _scores(
    config: TargetConfig,
    params: Any,
    tokens: jax.Array,
    prompt_length: jax.Array,
    length: jax.Array,
    sampling: Sampling,
) -> jax.Array:
    """f32 [V]: what the token after the first `length` of tokens [1, T] is the argmax of."""
    positions = jnp.arange(tokens.shape[1])[None]
    span = jnp.where(positions < prompt_length, prompt_length, positions + 1)
    target, variables = Target(config), {"params": params}
    hidden, _ = target.apply(variables, tokens, positions, causal_mask(tokens.shape[1]), span=span)
    logits = target.apply(variables, hidden[:, length - 1], method="logits")
    noise = gumbel_noise(sampling, length[None], config.vocab_size)
    return (process(logits, sampling) + noise)[0]
