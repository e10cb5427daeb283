"""Fits how far a head should trust what it copies from the text (clover_jax/copying.py).

For every held-back position and head the copied token is either the next one or not. What the head
says of it is known; the bias that makes it right most often, in the sense of the likelihood, is a
logistic regression with one unknown per length of match.

Axes: B batch, T tokens, I heads, R supervised positions, D model, V vocabulary, M lengths.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import DraftConfig
from clover_jax.copying import last_tokens, longest_match
from clover_jax.matmul import matmul
from train.loss import Vocabulary, head_features, read_samples
from train.segments import Samples, supervised

_LARGEST = 12.0
_PRIOR_VARIANCE = 25.0


def copied_tokens(samples: Samples, longest: int, vocab_size: int) -> tuple[jax.Array, jax.Array]:
    """What each token's sample says about the next: the copied token and the length of the match.

    Returns:
      int32 [B, T] twice; the token means nothing where the length is 0.
    """
    # Tokens of different samples are made different, so that no match leaves its sample.
    apart = jnp.asarray(samples.tokens) + jnp.asarray(samples.segments) * vocab_size
    places = jnp.broadcast_to(jnp.arange(apart.shape[1]), apart.shape)
    match = longest_match(apart, places, last_tokens(apart, places, longest))
    return jnp.take_along_axis(apart, match.place, axis=1) % vocab_size, match.length


def lead(
    config: DraftConfig,
    params: Any,
    hidden: jax.Array,
    vocabulary: Vocabulary,
    lm_head: jax.Array,
    samples: Samples,
    copied: jax.Array,
) -> jax.Array:
    """How far the head puts the copied token ahead of all others together, f32 [I, B, T].

    Entry [i, b, t] belongs to head i at t: the logit of the token copied for t + 2 + i, less the
    log of the summed exponentials of the rest of the draft vocabulary.
    """
    state = read_samples(config, params, hidden, vocabulary.embedding, samples)

    def of_row(row: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:  # [T, D], [T], [T]
        state, tokens, copied = row
        drafted = [jnp.roll(tokens, -offset) for offset in range(2, config.num_steps + 1)]
        embeddings = vocabulary.embedding[jnp.stack(drafted)] if drafted else jnp.zeros((0,))
        leads = []
        for i, feature in enumerate(head_features(config, params, state, embeddings)):
            token = jnp.roll(copied, -(1 + i))
            logits = matmul(feature.astype(vocabulary.lm_rows.dtype), vocabulary.lm_rows)
            own = jnp.sum(feature * lm_head[token].astype(jnp.float32), axis=-1)
            columns = jnp.arange(logits.shape[1])
            others = jnp.where(columns == vocabulary.row_of[token][:, None], -jnp.inf, logits)
            leads.append(own - jax.nn.logsumexp(others, axis=-1))
        return jnp.stack(leads)

    # Row by row: logits of a whole batch would not fit where the vocabulary is large.
    return jnp.moveaxis(jax.lax.map(of_row, (state, samples.tokens, copied)), 0, 1)


def fit_bias(lead: np.ndarray, right: np.ndarray, length: np.ndarray, longest: int) -> list[float]:
    """The bias of each length 1..M: the most likely one, held back a little where cases are few.

    Args:
      lead: f32 [R].
      right: bool [R], the copied token was the next one.
      length: int [R], of the match.
      longest: M.

    Returns:
      M numbers, 0 for a length that never occurs.
    """
    found = []
    for size in range(1, longest + 1):
        chosen = length == size
        margin, hits = lead[chosen].astype(np.float64), float(right[chosen].sum())
        low, high = -_LARGEST, _LARGEST  # the slope of the log-likelihood falls with the bias
        for _ in range(40):
            bias = (low + high) / 2
            slope = hits - np.sum(1 / (1 + np.exp(-(margin + bias)))) - bias / _PRIOR_VARIANCE
            low, high = (bias, high) if slope > 0 else (low, bias)
        found.append(round(bias, 3))
    return found


def copy_cases(
    config: DraftConfig,
    longest: int,
    params: Any,
    hidden: jax.Array,
    vocabulary: Vocabulary,
    lm_head: jax.Array,
    samples: Samples,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """What `fit_bias` reads, of one batch: lead, right and length, each [I, B, T].

    The length is 0 where nothing is copied or the head is not supervised.
    """
    copied, length = copied_tokens(samples, longest, len(lm_head))
    heads = range(config.num_steps)

    def ahead(x: jax.Array, offset: int) -> jax.Array:  # [I, B, T], x at t + offset + i
        return jnp.stack([jnp.roll(x, -(offset + i), axis=1) for i in heads])

    return (
        lead(config, params, hidden, vocabulary, lm_head, samples, copied),
        ahead(copied, 1) == ahead(jnp.asarray(samples.tokens), 2),
        jnp.where(supervised(samples, config.num_steps), ahead(length, 1), 0),
    )
