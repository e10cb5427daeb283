"""The distillation loss of Clover-2 (arXiv 2408.00264, section 4), in chunks over the vocabulary.

Head i at position t reads h_t and the tokens up to x_{t+1+i} and predicts x_{t+2+i}; its teacher is
the target at p = t+1+i. Everything below is aligned to p, so that the five heads share one teacher.

Axes: B batch, T tokens, I heads (draft steps), R rows of a chunk, D model, W draft vocabulary.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.config import DraftConfig
from clover_jax.draft import DraftHead
from clover_jax.layers import matmul
from clover_jax.target import causal_mask


@dataclasses.dataclass(frozen=True)
class LossWeights:
    """How the terms add up: sum_i decay^i (hidden * SmoothL1_i + cross_entropy * CE_i).

    Attributes:
      decay: weight of each head relative to the one before.
      hidden: of the hidden-state term, whose states are first divided by the teacher's RMS.
      cross_entropy: of the distribution term.
    """

    decay: float = 0.7
    hidden: float = 1.0
    cross_entropy: float = 1.0


class Teacher(NamedTuple):
    """What the frozen target says of a batch.

    Attributes:
      hidden: [B, T, D], h_t, before the final norm.
      normalized: f32 [B, T, D], after it.
    """

    hidden: jax.Array
    normalized: jax.Array


class Vocabulary(NamedTuple):
    """What the head proposes from.

    Attributes:
      lm_rows: [W, D], rows of the target's LM head.
      row_of: int32 [V], row of each token, -1 for the tokens left out.
      embedding: [V, D], e.
    """

    lm_rows: jax.Array
    row_of: jax.Array
    embedding: jax.Array


def head_features(
    config: DraftConfig, params: Any, embedding: jax.Array, hidden: jax.Array, tokens: jax.Array
) -> jax.Array:
    """What every head gives to the LM head, teacher-forced: f32 [I, B, T, D], aligned to t."""
    head, variables = DraftHead(config), {"params": params}
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), (batch, length))

    def following(offset: int) -> jax.Array:
        return embedding[jnp.roll(tokens, -offset, axis=1)]

    state, _ = head.apply(
        variables, hidden, following(1), positions, causal_mask(length), method="advance"
    )
    features = [head.apply(variables, state, method="first_features")]
    for i in range(1, config.num_steps):
        state, feature = head.apply(variables, state, following(1 + i), method="extend")
        features.append(feature)
    return jnp.stack(features)


def supervised(mask: jax.Array, num_steps: int) -> jax.Array:
    """Which teacher positions count for which head: mask bool [B, T] -> bool [I, B, T].

    Head i counts at p when x_{p+1} belongs to an assistant turn and t = p-1-i exists.
    """
    predicts = jnp.pad(mask[:, 1:], ((0, 0), (0, 1)))
    p = jnp.arange(mask.shape[1])
    return jnp.stack([predicts & (p >= 1 + i) for i in range(num_steps)])


def distillation_loss(
    config: DraftConfig,
    weights: LossWeights,
    params: Any,
    teacher: Teacher,
    vocabulary: Vocabulary,
    tokens: jax.Array,
    mask: jax.Array,
    chunk: int = 256,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one batch, each term averaged over the supervised positions of its head.

    With a draft vocabulary both distributions are those over its tokens.

    Args:
      params: the head's.
      tokens: int32 [B, T].
      mask: bool [B, T], tokens of assistant turns.
      chunk: R; no array is larger than [R, W].

    Returns:
      The loss, and per head [I]: `loss_hidden`, `loss_ce`, `accuracy` (of the draft's first choice
      against the next token), and `count` of supervised positions.
    """
    features = head_features(config, params, vocabulary.embedding, teacher.hidden, tokens)
    features = jnp.stack([jnp.roll(f, 1 + i, axis=1) for i, f in enumerate(features)])
    counted = supervised(mask, config.num_steps)
    next_token = vocabulary.row_of[jnp.roll(tokens, -1, axis=1)]

    sums = _sum_over_chunks(
        features, teacher.normalized, counted, next_token, vocabulary.lm_rows, chunk
    )
    count = jnp.sum(counted, axis=(1, 2)).astype(jnp.float32)
    means = {name: total / jnp.maximum(count, 1.0) for name, total in sums.items()}
    return total_loss(weights, means), means | {"count": count}


def total_loss(weights: LossWeights, means: dict[str, Any]) -> jax.Array:
    """The loss from each head's mean terms, [I]."""
    terms = weights.hidden * means["loss_hidden"] + weights.cross_entropy * means["loss_ce"]
    return jnp.sum(weights.decay ** jnp.arange(len(terms)) * terms)


def _sum_over_chunks(
    features: jax.Array,
    teacher: jax.Array,
    counted: jax.Array,
    next_token: jax.Array,
    lm_rows: jax.Array,
    chunk: int,
) -> dict[str, jax.Array]:
    """Sums of each head's terms, [I]; the logits of a chunk live only while it is computed."""
    heads = features.shape[0]
    rows = next_token.size
    padding = -rows % chunk
    mean_square = jnp.mean(jnp.square(teacher), axis=-1)
    weight = counted[0].astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.sum(mean_square * weight) / jnp.maximum(jnp.sum(weight), 1.0) + 1e-6)
    kernel = lm_rows.T

    def split(x: jax.Array, axis: int) -> jax.Array:
        """[.., B, T, ..] with B at `axis` -> [chunks, .., R, ..]."""
        x = x.reshape(*x.shape[:axis], rows, *x.shape[axis + 2 :])
        pad = [(0, padding if a == axis else 0) for a in range(x.ndim)]
        x = jnp.pad(x, pad)
        x = x.reshape(*x.shape[:axis], -1, chunk, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, 0)

    @jax.checkpoint
    def chunk_sums(xs: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
        feature, goal, use, token = xs  # [I, R, D], [R, D], [I, R], [R]
        probability = jax.nn.softmax(matmul(goal, kernel), axis=-1)  # [R, W]
        # sum_w p_w (row_w . f) = (sum_w p_w row_w) . f: the heads share this product.
        expected_row = matmul(probability, lm_rows)  # [R, D]
        sums = []
        for i in range(heads):
            logits = matmul(feature[i], kernel)
            cross = jax.nn.logsumexp(logits, axis=-1) - jnp.sum(feature[i] * expected_row, axis=-1)
            error = (feature[i] - goal) * scale
            smooth_l1 = jnp.where(
                jnp.abs(error) < 1, 0.5 * jnp.square(error), jnp.abs(error) - 0.5
            ).mean(axis=-1)
            # The first choice is the next token; an argmax costs several times more on a CPU.
            mine = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
            hit = (token >= 0) & (mine >= jnp.max(logits, axis=-1))
            sums.append(
                {
                    "loss_hidden": jnp.sum(jnp.where(use[i], smooth_l1, 0.0)),
                    "loss_ce": jnp.sum(jnp.where(use[i], cross, 0.0)),
                    "accuracy": jnp.sum(use[i] & hit).astype(jnp.float32),
                }
            )
        return jax.tree.map(lambda *x: jnp.stack(x), *sums)

    def add(total: dict[str, jax.Array], xs: tuple[jax.Array, ...]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, chunk_sums(xs)), None

    zero = {k: jnp.zeros((heads,), jnp.float32) for k in ("loss_hidden", "loss_ce", "accuracy")}
    chunks = (split(features, 1), split(teacher, 0), split(counted, 1), split(next_token, 0))
    return jax.lax.scan(add, zero, chunks)[0]
