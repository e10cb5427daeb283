"""A head on disk that always drafts what the chain model of tiny_chat.py says next."""

from pathlib import Path

import flax.traverse_util
import jax.numpy as jnp
import numpy as np

from clover_jax.config import DraftConfig
from clover_jax.weights.clover import Head, abstract_head, save_head
from clover_jax.weights.fingerprint import fingerprint
from infer.load import load


def perfect_head(target: Path, folder: Path) -> Path:
    """A head whose logits are the chain model's own; returns its folder."""
    model = load(target=target)
    config = DraftConfig.for_target(model.config, num_layers=1)
    width = model.config.hidden_size

    def parameter(path: tuple[str, ...]) -> np.ndarray:
        match path:
            case (*_, "scale"):
                return np.ones(width)
            case ("ad1", "q" | "k", "bias"):
                return np.ones(width)  # the gate is open
            case ("ad1", "v", "weight"):
                return 1e8 * np.eye(width)  # the token drowns the state it is added to
            case ("fc1", "weight"):
                return np.eye(width)
            case ("fc2", "weight"):  # reads [state ; token]
                return np.concatenate([np.zeros((width, width)), np.eye(width)], axis=1)
        return np.zeros(abstract_head(config)[path].shape)

    params = flax.traverse_util.unflatten_dict(
        {path: jnp.asarray(parameter(path), jnp.float32) for path in abstract_head(config)}
    )
    head = Head(config, params, None, fingerprint(model.config, model.params))
    save_head(folder, head, jnp.float32)
    return folder
