"""One training step: the frozen teacher and the head in one compiled program."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.struct
import flax.traverse_util
import jax
import jax.numpy as jnp
import optax

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.target import Target
from train.loss import LossWeights, Teacher, Vocabulary, distillation_loss
from train.segments import Samples, block_mask, positions


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What the compiled step is specialised to.

    Attributes:
      target, draft: the two models.
      loss: weights of its terms.
      compute_dtype: dtype the head's weights are cast to for products; the f32 masters stay.
    """

    target: TargetConfig
    draft: DraftConfig
    loss: LossWeights
    compute_dtype: str


class Frozen(NamedTuple):
    """Arrays the step reads and never changes: the target and what the head borrows from it."""

    target: Any
    vocabulary: Vocabulary


@flax.struct.dataclass
class TrainState:
    """Everything training changes. The data position is the step (see packing.Batches)."""

    step: jax.Array
    params: Any
    opt_state: optax.OptState


def make_optimizer(
    learning_rate: float,
    total_steps: int,
    warmup_steps: int,
    weight_decay: float,
    clip_norm: float,
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW (0.9, 0.95) with clipping by global norm, linear warm-up and cosine decay to zero.

    Weight decay acts on weight matrices only.
    """
    schedule = optax.warmup_cosine_decay_schedule(
        init_value=0.0,
        peak_value=learning_rate,
        warmup_steps=min(warmup_steps, max(total_steps - 1, 0)),
        decay_steps=total_steps,
    )

    def is_weight(params: Any) -> Any:
        flat = flax.traverse_util.flatten_dict(params)
        return flax.traverse_util.unflatten_dict({p: p[-1] == "weight" for p in flat})

    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=weight_decay, mask=is_weight),
    )
    return optimizer, schedule


def read_target(target: TargetConfig, target_params: Any, samples: Samples) -> jax.Array:
    """The frozen target's hidden states over a batch, before its final norm: [B, T, D]."""
    place = positions(samples.segments)
    hidden, _ = Target(target).apply(
        {"params": target_params},
        samples.tokens,
        place,
        block_mask(samples.segments),
        span=place + 1,
    )
    return hidden


def batch_loss(
    recipe: Recipe,
    params: Any,
    frozen: Frozen,
    samples: Samples,
    hidden: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Loss and metrics of one batch, differentiable in the head's parameters.

    Args:
      hidden: the target's hidden states [B, T, D], if they are known already.
    """
    if hidden is None:
        hidden = read_target(recipe.target, frozen.target, samples)
    hidden = hidden.astype(frozen.vocabulary.embedding.dtype)
    normalized = Target(recipe.target).apply(
        {"params": frozen.target}, hidden.astype(jnp.float32), method="normalize"
    )
    return distillation_loss(
        recipe.draft,
        recipe.loss,
        cast_weights(params, jnp.dtype(recipe.compute_dtype)),
        Teacher(hidden, normalized),
        frozen.vocabulary,
        samples,
    )


def train_step(
    recipe: Recipe,
    optimizer: optax.GradientTransformation,
    state: TrainState,
    frozen: Frozen,
    samples: Samples,
    hidden: jax.Array | None = None,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """One update; the arguments are those of `batch_loss`."""
    grad = jax.value_and_grad(
        lambda p: batch_loss(recipe, p, frozen, samples, hidden), has_aux=True
    )
    (loss, metrics), gradients = grad(state.params)
    updates, opt_state = optimizer.update(gradients, state.opt_state, state.params)
    metrics = metrics | {"loss": loss, "gradient_norm": optax.tree.norm(gradients)}
    return (
        TrainState(state.step + 1, optax.apply_updates(state.params, updates), opt_state),
        metrics,
    )


def cast_weights(params: Any, dtype: jnp.dtype) -> Any:
    """Parameters with their weights in `dtype`, so that products are computed in it."""
    flat = flax.traverse_util.flatten_dict(params)
    return flax.traverse_util.unflatten_dict(
        {p: x.astype(dtype) if p[-1] == "weight" else x for p, x in flat.items()}
    )
