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

    def __str__(self) -> str:
        if not self.paths:
            return "none"
        count = len(self.paths)
        return f"{count} node{'s' * (count > 1)} {[list(path) for path in self.paths]}"

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

    def level(self, depth: int) -> np.ndarray:
        """int32: the nodes at one depth, in order."""
        return np.flatnonzero(self.depths == depth).astype(np.int32)


PLAIN = Tree(())


@dataclasses.dataclass(frozen=True)
class DynamicTree:
    """A draft tree whose shape follows the head's confidence (EAGLE-2, arXiv 2406.16858).

    On each of `depth` levels the `width` likeliest nodes propose `width` children each; of all that
    were proposed, the `nodes` likeliest are verified.

    Attributes:
      nodes: draft tokens that are verified.
      depth: levels.
      width: nodes of a level that propose, and children that each of them proposes.
      least_ratio: leaves out children less likely than this share of their likeliest sibling
        (Clover, arXiv 2405.00263: 0.25); 0 is off.
      top_p: leaves out children beyond the fewest that reach this probability; 1 is off.
    """

    nodes: int
    depth: int = 5
    width: int = 4
    least_ratio: float = 0.0
    top_p: float = 1.0

    def __post_init__(self) -> None:
        if min(self.nodes, self.depth, self.width) < 1:
            raise ValueError(
                "a dynamic tree needs at least one node, level and child, not nodes "
                f"{self.nodes}, depth {self.depth}, width {self.width}"
            )
        if self.depth > 999:
            raise ValueError(f"a dynamic tree of depth {self.depth} is deeper than 999 tokens")
        if self.nodes < self.depth:
            raise ValueError(
                f"a dynamic tree of {self.nodes} nodes cannot fill a depth of {self.depth}"
            )
        pool = self.width + (self.depth - 1) * self.width**2
        if self.nodes > pool:
            raise ValueError(
                f"a dynamic tree of depth {self.depth} and width {self.width} proposes {pool} "
                f"tokens, fewer than the {self.nodes} to keep"
            )
        if not 0 <= self.least_ratio <= 1:
            raise ValueError(f"least_ratio must be between 0 and 1, got {self.least_ratio}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p of a tree must be above 0 and at most 1, got {self.top_p}")

    def __str__(self) -> str:
        return f"dynamic, {self.nodes} nodes of depth {self.depth} and width {self.width}"

    @property
    def size(self) -> int:
        """N, the root included."""
        return self.nodes + 1


AnyTree = Tree | DynamicTree


def parse_tree(tree: str | AnyTree | Iterable[Sequence[int]]) -> AnyTree:
    """Reads "paper", "chain-N", "dynamic-N", or child-rank paths in any order, such as
    [[0], [1], [0, 0]].

    "dynamic-N" is a DynamicTree of N nodes, up to five deep, as narrow as N allows but at least
    four wide.

    Raises:
      ValueError: another name, or paths that do not form a tree.
    """
    if isinstance(tree, AnyTree):
        return tree
    if isinstance(tree, str):
        return _named(tree)
    if not isinstance(tree, Iterable):
        raise ValueError(f"a tree is a name or child-rank paths, not {tree!r}")
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


def _named(name: str) -> AnyTree:
    if name == "paper":
        return Tree(tuple(sorted(PAPER_PATHS, key=lambda p: (len(p), p))))
    found = re.fullmatch(r"(chain|dynamic)-([1-9]\d*)", name)
    if found is None:
        raise ValueError(
            f"tree {name!r} is not known; give 'paper', 'chain-N' or 'dynamic-N' (such as "
            "'chain-3'), or child-rank paths (such as [[0], [1], [0, 0]])"
        )
    if len(found[2]) > 3:
        raise ValueError(f"tree {name!r} has more than 999 nodes")
    nodes = int(found[2])
    if found[1] == "chain":
        return Tree(tuple((0,) * d for d in range(1, nodes + 1)))
    depth = min(nodes, 5)
    width = 4
    while width + (depth - 1) * width**2 < nodes:
        width += 1
    return DynamicTree(nodes, depth, width)
