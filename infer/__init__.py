"""Text from a target model, with or without its draft head."""

from clover_jax.tree import DynamicTree
from infer.engine import generate, speculative_generate, stream
from infer.load import Model, load
from infer.session import Generation, Stats
from infer.stream import Piece, Stream

__all__ = [
    "DynamicTree",
    "Generation",
    "Model",
    "Piece",
    "Stats",
    "Stream",
    "generate",
    "load",
    "speculative_generate",
    "stream",
]
