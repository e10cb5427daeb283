"""A head on disk that always drafts what the chain model of tiny_chat.py says next."""

from pathlib import Path

import jax
import jax.numpy as jnp

from clover_jax.config import DraftConfig
from clover_jax.weights.clover import Head, save_head
from clover_jax.weights.fingerprint import fingerprint
from infer.load import load
from train.initialize import initialize_head


def perfect_head(target: Path, folder: Path) -> Path:
    """A head for a chain model: of all it reads only the last token counts."""
    model = load(target=target)
    config = DraftConfig.for_target(model.config, num_layers=1)
    head = initialize_head(config, model.params, jax.random.key(0), hidden_rms=1e3)
    width = model.config.hidden_size
    # FC2 reads [state ; token embedding]: the second half alone is the target's own state.
    head["fc2"]["kernel"] = jnp.concatenate([jnp.zeros((width, width)), jnp.eye(width)])
    save_head(
        folder, Head(config, head, None, fingerprint(model.config, model.params)), jnp.float32
    )
    return folder
