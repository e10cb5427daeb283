"""The distillation loss of Clover-2 (arXiv 2408.00264, section 4).

Head i at position t reads h_t and the tokens up to x_{t+1+i} and predicts x_{t+2+i}; its teacher is
the target at t+1+i. Only supervised positions are computed, some at a time, and the gradient of
such a chunk is taken together with its loss, so that no logits are kept.

Axes: B batch, T tokens, N = B*T rows, R rows of a chunk, I heads (draft steps), D model, W draft
vocabulary.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.config import DraftConfig
from clover_jax.draft import DraftHead
from clover_jax.matmul import matmul
from train.segments import Samples, block_mask, positions, supervised


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


def distillation_loss(
    config: DraftConfig,
    weights: LossWeights,
    params: Any,
    teacher: Teacher,
    vocabulary: Vocabulary,
    samples: Samples,
    chunk: int = 256,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The loss of one batch, each term averaged over the supervised positions of its head.

    With a draft vocabulary both distributions are those over its tokens.

    Args:
      params: the head's.
      chunk: R; no array is larger than [R, W].

    Returns:
      The loss, and per head [I]: `loss_hidden`, `loss_ce`, `accuracy` (of the draft's first choice
      against the next token), and `count` of supervised positions.
    """
    state = read_samples(config, params, teacher.hidden, vocabulary.embedding, samples)
    width = state.shape[-1]
    counted = supervised(samples, config.num_steps).reshape(config.num_steps, -1)
    count = jnp.sum(counted, axis=1).astype(jnp.float32)
    goal = teacher.normalized.reshape(-1, width)
    # Head 0 has the most positions: what it counts at t is taught by t + 1.
    taught = jnp.roll(counted[0], 1)
    mean_square = jnp.sum(jnp.where(taught[:, None], jnp.square(goal), 0.0)) / width
    lesson = Lesson(
        goal=goal,
        mean_row=_mean_rows(goal, taught, vocabulary.lm_rows, chunk),
        inverse_rms=jax.lax.rsqrt(mean_square / jnp.maximum(count[0], 1.0) + 1e-6),
        tokens=jnp.asarray(samples.tokens).reshape(-1),
        counted=counted,
        vocabulary=vocabulary,
    )
    share = weights.decay ** jnp.arange(config.num_steps) / jnp.maximum(count, 1.0)
    scale = {"loss_hidden": weights.hidden * share, "loss_ce": weights.cross_entropy * share}
    # The other parameters have done their part in `state`.
    drafting = {name: params[name] for name in ("fc1", "ad2", "fc2", "head_norm")}
    loss, sums = _chunked_loss(config, chunk, drafting, state.reshape(-1, width), lesson, scale)
    means = {name: total / jnp.maximum(count, 1.0) for name, total in sums.items()}
    return loss, means | {"count": count}


def total_loss(weights: LossWeights, means: dict[str, Any]) -> jax.Array:
    """The loss from each head's mean terms, [I]."""
    terms = weights.hidden * means["loss_hidden"] + weights.cross_entropy * means["loss_ce"]
    return jnp.sum(weights.decay ** jnp.arange(len(terms)) * terms)


def read_samples(
    config: DraftConfig, params: Any, hidden: jax.Array, embedding: jax.Array, samples: Samples
) -> jax.Array:
    """s_0 at every position, [B, T, D]; at the last one of a sample x_{t+1} is another's."""
    following = jnp.roll(samples.tokens, -1, axis=1)
    state, _ = DraftHead(config).apply(
        {"params": params},
        hidden,
        embedding[following],
        positions(samples.segments),
        block_mask(samples.segments),
        method="advance",
    )
    return state


def head_features(
    config: DraftConfig, params: Any, state: jax.Array, embeddings: jax.Array
) -> jax.Array:
    """What every head gives to the LM head, teacher-forced: f32 [I, R, D].

    Args:
      state: [R, D], s_0.
      embeddings: [I - 1, R, D], e(x_{t+2}), e(x_{t+3}), ...
    """
    head, variables = DraftHead(config), {"params": params}
    features = [head.apply(variables, state, method="first_features")]
    for embedding in embeddings:
        state, feature = head.apply(variables, state, embedding, method="extend")
        features.append(feature)
    return jnp.stack(features)


class Lesson(NamedTuple):
    """What the rows of a batch are taught; none of it is differentiated.

    Attributes:
      goal: f32 [N, D], the target's normalised hidden states.
      mean_row: f32 [N, D], the mean of `lm_rows` under the target's distribution.
      inverse_rms: f32 scalar, 1 / RMS of the goals.
      tokens: int32 [N].
      counted: bool [I, N].
      vocabulary: what the head proposes from.
    """

    goal: jax.Array
    mean_row: jax.Array
    inverse_rms: jax.Array
    tokens: jax.Array
    counted: jax.Array
    vocabulary: Vocabulary


def _chunk_loss(
    config: DraftConfig,
    params: Any,
    state: jax.Array,
    rows: jax.Array,
    inside: jax.Array,
    lesson: Lesson,
    scale: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss of a chunk, and sums of each head's terms, [I].

    Args:
      state: [R, D], s_0 at `rows`.
      rows: int32 [R], where the chunk's positions lie in the batch.
      inside: bool [R], False where the chunk is only filled up.
      scale: weight of each summed term in the loss, f32 [I].
    """
    heads, last = config.num_steps, lesson.tokens.shape[0] - 1

    def ahead(offset: int) -> jax.Array:  # t + offset; what is cut off is not counted
        return jnp.minimum(rows + offset, last)

    vocabulary = lesson.vocabulary
    drafted = lesson.tokens[jnp.minimum(rows + jnp.arange(2, heads + 1)[:, None], last)]
    features = head_features(config, params, state, vocabulary.embedding[drafted])
    terms = []
    for i in range(heads):
        feature, goal = features[i], lesson.goal[ahead(1 + i)]  # [R, D]
        use = lesson.counted[i, rows] & inside
        logits = _logits(jax.lax.stop_gradient(feature), vocabulary.lm_rows)
        partition, mean_row, best = _partition(logits, vocabulary.lm_rows)
        # CE = log Z(f) - f . (target's mean row), and d log Z / df is the head's own mean row: the
        # tangent says both, without differentiating through the logits.
        own = jnp.sum(feature * mean_row, axis=-1)
        tangent = own + jax.lax.stop_gradient(partition - own)
        cross = tangent - jnp.sum(feature * lesson.mean_row[ahead(1 + i)], axis=-1)
        error = jnp.abs(feature - goal) * lesson.inverse_rms
        smooth_l1 = jnp.where(error < 1, 0.5 * jnp.square(error), error - 0.5).mean(axis=-1)
        # The first choice is the next token; an argmax costs several times more on a CPU.
        token = vocabulary.row_of[lesson.tokens[ahead(2 + i)]]
        mine = jnp.take_along_axis(logits, jnp.maximum(token, 0)[:, None], axis=-1)[:, 0]
        terms.append(
            {
                "loss_hidden": jnp.sum(jnp.where(use, smooth_l1, 0.0)),
                "loss_ce": jnp.sum(jnp.where(use, cross, 0.0)),
                "accuracy": jnp.sum(use & (token >= 0) & (mine >= best)).astype(jnp.float32),
            }
        )
    sums = jax.tree.map(lambda *x: jnp.stack(x), *terms)
    return sum((jnp.sum(scale[name] * sums[name]) for name in scale), jnp.float32(0)), sums


def _logits(feature: jax.Array, lm_rows: jax.Array) -> jax.Array:
    """f32 [R, W], multiplied in the dtype of the rows."""
    return matmul(feature.astype(lm_rows.dtype), lm_rows)


def _partition(logits: jax.Array, lm_rows: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of logits [R, W]: log Z [R], mean of `lm_rows` under the softmax [R, D], maximum [R]."""
    best = jnp.max(logits, axis=-1)
    weights = jnp.exp(logits - best[:, None])
    total = jnp.sum(weights, axis=-1)
    mean_row = jnp.dot(weights.astype(lm_rows.dtype), lm_rows, preferred_element_type=jnp.float32)
    return jnp.log(total) + best, mean_row / total[:, None], best


def _mean_rows(goal: jax.Array, taught: jax.Array, lm_rows: jax.Array, chunk: int) -> jax.Array:
    """The mean of `lm_rows` under the target's distribution at the rows of `taught`: f32 [N, D]."""

    def add(rows: jax.Array, _: jax.Array, mean_row: jax.Array) -> jax.Array:
        _, fresh, _ = _partition(_logits(goal[rows], lm_rows), lm_rows)
        return mean_row.at[rows].set(fresh)

    return _over_chunks(add, taught, chunk, jnp.zeros(goal.shape, jnp.float32))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _chunked_loss(
    config: DraftConfig,
    chunk: int,
    params: Any,
    state: jax.Array,
    lesson: Lesson,
    scale: dict[str, jax.Array],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and sums over all rows; differentiable in params and in state [N, D], by the loss."""

    def add(rows: jax.Array, inside: jax.Array, total: Any) -> Any:
        fresh = _chunk_loss(config, params, state[rows], rows, inside, lesson, scale)
        return jax.tree.map(jnp.add, total, fresh)

    return _over_chunks(add, jnp.any(lesson.counted, axis=0), chunk, _no_loss(config))


def _chunked_loss_forward(
    config: DraftConfig,
    chunk: int,
    params: Any,
    state: jax.Array,
    lesson: Lesson,
    scale: dict[str, jax.Array],
) -> tuple[Any, Any]:
    slope_of = jax.value_and_grad(
        functools.partial(_chunk_loss, config), argnums=(0, 1), has_aux=True
    )

    def add(rows: jax.Array, inside: jax.Array, carry: Any) -> Any:
        total, params_slope, state_slope = carry
        fresh, (params_part, state_part) = slope_of(
            params, state[rows], rows, inside, lesson, scale
        )
        return (
            jax.tree.map(jnp.add, total, fresh),
            jax.tree.map(jnp.add, params_slope, params_part),
            state_slope.at[rows].add(state_part),  # rows that only fill up add 0
        )

    def zeros(x: jax.Array) -> jax.Array:
        return jnp.zeros(x.shape, jnp.float32)

    carry = (_no_loss(config), jax.tree.map(zeros, params), jnp.zeros_like(state))
    total, params_slope, state_slope = _over_chunks(
        add, jnp.any(lesson.counted, axis=0), chunk, carry
    )
    dtypes = jax.tree.map(lambda x: jnp.zeros((0,), x.dtype), params)
    return total, (params_slope, state_slope, dtypes)


def _chunked_loss_backward(
    config: DraftConfig, chunk: int, saved: Any, cotangents: Any
) -> tuple[Any, Any, None, None]:
    params_slope, state_slope, dtypes = saved
    slope, _ = cotangents
    return (
        jax.tree.map(lambda x, like: (slope * x).astype(like.dtype), params_slope, dtypes),
        (slope * state_slope).astype(state_slope.dtype),
        None,
        None,
    )


_chunked_loss.defvjp(_chunked_loss_forward, _chunked_loss_backward)


def _no_loss(config: DraftConfig) -> tuple[jax.Array, dict[str, jax.Array]]:
    names = ("loss_hidden", "loss_ce", "accuracy")
    return jnp.float32(0), {name: jnp.zeros((config.num_steps,), jnp.float32) for name in names}


def _over_chunks(add: Any, wanted: jax.Array, chunk: int, carry: Any) -> Any:
    """Runs `add(rows [R], inside [R], carry)` over the rows where `wanted` [N] holds."""
    chunk = min(chunk, wanted.shape[0])
    order = jnp.argsort(~wanted, stable=True)
    count = jnp.sum(wanted)

    def step(index: jax.Array, carry: Any) -> Any:
        # The last slice is moved back where it would pass the end: rows done before are not inside.
        start = jnp.minimum(index * chunk, wanted.shape[0] - chunk)
        places = start + jnp.arange(chunk)
        inside = (places >= index * chunk) & (places < count)
        return add(jax.lax.dynamic_slice_in_dim(order, start, chunk), inside, carry)

    return jax.lax.fori_loop(0, (count + chunk - 1) // chunk, step, carry)
