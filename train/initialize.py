"""Where training starts."""

from __future__ import annotations

from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp

from clover_jax.config import DraftConfig
from clover_jax.draft import DraftHead
from clover_jax.target import lm_head

_NOISE = 0.01


def initialize_head(
    config: DraftConfig, target_params: Any, key: jax.Array, hidden_rms: float
) -> dict[str, Any]:
    """Parameters of a new head, f32; none shares a buffer with the target's or with another.

    The start is the target's own output with the new token mixed in: the attention decoders' gates
    are open (equal biases on q and k, so that their cosine is near 1); V adds the token at the
    strength of the state, in a random direction, because its own direction is the one in which a
    tied LM head reads that token; the augmenting block is the target's last layer with its two
    output projections at 0; FC1 = I and FC2 = [I | 0]; and the norms give the target's final norm.
    The paper starts from V near 0 instead, where the token hardly enters, and learns more slowly.

    Args:
      target_params: the frozen target's.
      key: for the noise that breaks the ties.
      hidden_rms: typical root mean square of the target's last hidden state on real text.
    """
    width = config.block.hidden_size
    shapes = jax.eval_shape(
        DraftHead(config).init,
        key,
        jax.ShapeDtypeStruct((1, 1, width), jnp.float32),
        jax.ShapeDtypeStruct((1, 1, width), jnp.float32),
    )["params"]
    last = f"layers_{len([k for k in target_params if k.startswith('layers_')]) - 1}"
    last_layer = flax.traverse_util.flatten_dict(target_params[last])
    tokens = target_params["embed_tokens"]
    embedding = tokens if config.embedding == "embed_tokens" else lm_head(target_params)
    embedding_rms = jnp.sqrt(jnp.mean(jnp.square(embedding.astype(jnp.float32))))
    identity = jnp.eye(width)

    def initial(path: tuple[str, ...], shape: tuple[int, ...], key: jax.Array) -> jax.Array:
        normal = jax.random.normal(key, shape) / width**0.5  # keeps the length of a vector
        noise = _NOISE * normal
        match path:
            case (block, *rest) if block.startswith("block_") and block != "block_norm":
                if rest[-2] in ("o_proj", "down_proj"):
                    return jnp.zeros(shape)
                return jnp.array(last_layer[tuple(rest)], jnp.float32)
            case ("head_norm", "scale"):
                return jnp.array(target_params["norm"]["scale"], jnp.float32)
            case ("ad1" | "ad2" as decoder, "v", "weight"):
                # AD2 reads states of the block's norm, whose RMS is 1.
                state_rms = hidden_rms if decoder == "ad1" else 1.0
                return normal * state_rms / embedding_rms
            case ("ad1" | "ad2", "q" | "k", "bias") | (*_, "scale"):
                return jnp.ones(shape)
            case ("ad1" | "ad2", "q" | "k", "weight"):
                return noise
            case ("fc1", "weight"):
                return identity + noise
            case ("fc2", "weight"):
                return jnp.concatenate([identity, jnp.zeros((width, width))], axis=1) + noise
            case (*_, "bias"):
                return jnp.zeros(shape)
        raise KeyError(path)

    flat = flax.traverse_util.flatten_dict(shapes)
    keys = jax.random.split(key, len(flat))
    return flax.traverse_util.unflatten_dict(
        {p: initial(p, s.shape, k) for (p, s), k in zip(sorted(flat.items()), keys, strict=True)}
    )
