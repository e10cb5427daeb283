"""The best static trees for texts whose ranks are known.

With N nodes at most D deep the tree that keeps most tokens is made of the N rank paths that the
texts take most often. A path is taken at most as often as its beginning, so those N are a tree, and
no other has a larger sum: what Sequoia (arXiv 2402.12374, section 3.1) finds by dynamic programming
from acceptance rates by rank is here the count itself, with all that depth and the ranks before
have to do with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

import numpy as np

from clover_jax.tree import Tree

Path = tuple[int, ...]


def likely_paths(ranks: Sequence[np.ndarray]) -> list[Path]:
    """Every rank path that the texts take, the most frequent first, beginnings before ends.

    Args:
      ranks: of each text, int [R, D] as from `calibrate.token_ranks`.
    """
    counts = Counter[Path]()
    for row in (row for text in ranks for row in text.tolist()):
        depth = row.index(-1) if -1 in row else len(row)
        counts.update(tuple(row[:d]) for d in range(1, depth + 1))
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))


def candidates(paths: Sequence[Path], sizes: Sequence[int]) -> Iterator[Tree]:
    """The best tree of each size and greatest depth, each once."""
    seen = set()
    for depth in range(1, max(map(len, paths), default=0) + 1):
        shallow = [path for path in paths if len(path) <= depth]
        for size in sizes:
            chosen = tuple(sorted(shallow[:size], key=lambda p: (len(p), p)))
            if len(chosen) == size and chosen not in seen:
                seen.add(chosen)
                yield Tree(chosen)


def acceptance(ranks: Sequence[np.ndarray], width: int) -> np.ndarray:
    """f64 [D, K]: of the roots whose true tokens up to depth d were all proposed, the share whose
    next is of each rank."""
    every = np.concatenate(list(ranks))
    first = np.ones((len(every), 1), bool)
    reached = np.concatenate([first, np.cumprod(every[:, :-1] >= 0, axis=1) > 0], axis=1)
    of_rank = (every[..., None] == np.arange(width)) & reached[..., None]
    total = np.maximum(reached.sum(axis=0), 1)
    found: np.ndarray = of_rank.sum(axis=0) / total[:, None]
    return found
