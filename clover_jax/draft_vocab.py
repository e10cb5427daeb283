"""The tokens that a head may propose: a ranking, most frequent first, and how far it is used.

A head's features score any row of the LM head, so the vocabulary is no part of its weights: fewer
tokens make drafting cheaper, more let it propose what is rare.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np


def read_draft_vocab(path: Path, vocab_size: int) -> np.ndarray | None:
    """Token ids from a file, one per line, most frequent first: int32 [W], or None if it lists all.

    Raises:
      ValueError: a line that is no token id or has been there before, by its number; none at all.
    """
    found: dict[int, None] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not word.isdecimal() or int(word) >= vocab_size:
            raise ValueError(f"{path}:{number}: {word!r} is no token id below {vocab_size}")
        if int(word) in found:
            raise ValueError(f"{path}:{number}: token id {word} is there twice")
        found[int(word)] = None
    if not found:
        raise ValueError(f"{path} holds no token id")
    return None if len(found) == vocab_size else np.array(list(found), np.int32)


def resized(ranking: np.ndarray | None, size: int, vocab_size: int) -> np.ndarray | None:
    """The first `size` tokens of a ranking; beyond its end the others follow in order of their ids.

    Args:
      ranking: int32 [W], or None for all tokens in order of their ids.

    Returns:
      int32 [size], or None for all.

    Raises:
      ValueError: no size between 1 and the vocabulary's.
    """
    if not 1 <= size <= vocab_size:
        raise ValueError(f"draft_vocab must be between 1 and {vocab_size}, got {size}")
    if size == vocab_size:
        return None
    every = np.arange(vocab_size, dtype=np.int32)
    if ranking is None:
        return every[:size]
    return np.concatenate([ranking, np.setdiff1d(every, ranking)])[:size].astype(np.int32)
