"""Text from a target model, with or without its draft head."""

from infer.engine import Generation, Stats, generate, speculative_generate, stream
from infer.load import Model, load

__all__ = [
    "Generation",
    "Model",
    "Stats",
    "generate",
    "load",
    "speculative_generate",
    "stream",
]
