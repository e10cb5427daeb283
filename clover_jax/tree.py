"""The shape of a draft tree: a compile-time constant.

A tree is given by child-rank paths: (0,) is the draft's best first token, (0, 1) the second-best
token after it. Node 0 is the root, the last token already emitted; a tree without paths is plain
decoding.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Sequence

import numpy as np

# Clover-2's static tree (arXiv 2408.00264, appendix; 25 nodes and the root).
PAPER_PATHS: tuple[tuple[int, ...], ...] = (
    *((a,) for a in range(4)),
    *((0, a) for a in range(3)),
    *((a, b) for a in (1, 2) for b in range(2)),
    (3, 0),
    *((0, 0, a) for a in range(3)),
    *((0, a, b) for a in (1, 2) for b in range(2)),
    (1, 0, 0),
    *((0, 0, 0, a) for a in range(3)),
    *((0, 0, 0, 0, a) for a in range(2)),
)


@dataclasses.dataclass(frozen=True)
class Tree:
    """Topology of a draft tree with N nodes, the root included, in order of depth.

    Attributes:
      paths: the child-rank path of each node but the root, sorted by depth, then by rank.
    """

    paths: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if list(self.paths) != sorted(set(self.paths), key=lambda p: (len(p), p)):
            raise ValueError("paths must be distinct and sorted by depth, then by rank")
        known = {()} | set(self.paths)
        for path in self.paths:
            if not path or min(path) < 0:
                raise ValueError(f"tree path {list(path)}: ranks count from 0, and none is empty")
            if path[:-1] not in known:
                raise ValueError(f"tree path {list(path)} has no parent {list(path[:-1])}")

    @functools.cached_property
    def size(self) -> int:
        """N, the root included."""
        return 1 + len(self.paths)

    @functools.cached_property
    def depth(self) -> int:
        """Draft tokens on the longest path; 0 for plain decoding."""
        return max((len(p) for p in self.paths), default=0)

    @functools.cached_property
    def depths(self) -> np.ndarray:
        """int32 [N]: distance from the root."""
        return np.array([0] + [len(p) for p in self.paths], np.int32)

    @functools.cached_property
    def parents(self) -> np.ndarray:
        """int32 [N]: index of the parent; -1 for the root."""
        index = {(): 0} | {p: i + 1 for i, p in enumerate(self.paths)}
        return np.array([-1] + [index[p[:-1]] for p in self.paths], np.int32)

    @functools.cached_property
    def ranks(self) -> np.ndarray:
        """int32 [N]: rank among siblings; 0 for the root."""
        return np.array([0] + [p[-1] for p in self.paths], np.int32)

    @functools.cached_property
    def ancestors(self) -> np.ndarray:
        """bool [N, N]: row i marks node i and the nodes on its way to the root."""
        mask = np.eye(self.size, dtype=bool)
        for node in range(1, self.size):
            mask[node] |= mask[self.parents[node]]
        return mask

    @functools.cached_property
    def children(self) -> np.ndarray:
        """int32 [N, W]: children of each node by rank, -1 where there is none; W >= 1."""
        width = int(self.ranks.max()) + 1
        table = np.full((self.size, width), -1, np.int32)
        for node in range(1, self.size):
            table[self.parents[node], self.ranks[node]] = node
        return table

    def level(self, depth: int) -> np.ndarray:
        """int32: the nodes at one depth, in order."""
        return np.flatnonzero(self.depths == depth).astype(np.int32)


PLAIN = Tree(())


def parse_tree(tree: str | Tree | Iterable[Sequence[int]]) -> Tree:
    """Reads "paper", "chain-N", or child-rank paths in any order, such as [[0], [1], [0, 0]].

    Raises:
      ValueError: another name, or paths that do not form a tree.
    """
    if isinstance(tree, Tree):
        return tree
    if isinstance(tree, str):
        if tree == "paper":
            return Tree(tuple(sorted(PAPER_PATHS, key=lambda p: (len(p), p))))
        chain = re.fullmatch(r"chain-([1-9]\d*)", tree)
        if chain is None:
            raise ValueError(
                f"tree {tree!r} is not known; give 'paper', 'chain-N' (such as 'chain-3') or "
                "child-rank paths (such as [[0], [1], [0, 0]])"
            )
        if len(chain[1]) > 3:
            raise ValueError(f"tree {tree!r} is deeper than 999 tokens")
        return Tree(tuple((0,) * d for d in range(1, int(chain[1]) + 1)))
    if not isinstance(tree, Iterable):
        raise ValueError(f"a tree is 'paper', 'chain-N' or child-rank paths, not {tree!r}")
    paths = []
    for path in tree:
        if isinstance(path, str) or not isinstance(path, Sequence):
            raise ValueError(f"tree path {path!r} is not a list of child ranks")
        if not all(isinstance(rank, int | np.integer) for rank in path):
            raise ValueError(f"tree path {path!r} holds something that is not a whole number")
        paths.append(tuple(int(rank) for rank in path))
    if not paths:
        raise ValueError("the tree has no paths; use generate() for plain decoding")
    if len(set(paths)) < len(paths):
        twice = next(p for p in paths if paths.count(p) > 1)
        raise ValueError(f"tree path {list(twice)} is given twice")
    return Tree(tuple(sorted(paths, key=lambda p: (len(p), p))))
