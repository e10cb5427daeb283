"""The time of a decoding step by its tree: measured on some trees, pieced together for others."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.tree import PLAIN, Tree, parse_tree
from infer.call import prepare
from infer.load import Model
from infer.session import proceed, start

_STEPS = 8  # of one measurement
_ROUNDS = 7
_SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
# How deep the trees are that measure a level on which so many nodes propose.
_DEPTH_BY_WIDTH = {1: 5, 2: 4, 4: 3, 8: 3}


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Seconds.

    Attributes:
      passes: of a step with a tree one level deep, by its nodes, root included; of plain decoding
        for 1.
      levels: of each further level, by the nodes that propose on it.
      trees: of a step with a tree that was measured itself.
    """

    passes: Mapping[int, float]
    levels: Mapping[int, float]
    trees: Mapping[Tree, float] = dataclasses.field(default_factory=dict)

    def of(self, tree: Tree) -> float:
        """Of one step."""
        if tree == PLAIN:
            return self.passes[1]
        if tree in self.trees:
            return self.trees[tree]
        drafted = {nodes: seconds for nodes, seconds in self.passes.items() if nodes > 1}
        total = _interpolated(drafted, tree.size)
        for depth in range(2, tree.depth + 1):
            proposing = len(set(tree.parents[tree.level(depth)].tolist()))
            total += _interpolated(self.levels, proposing)
        return total


class Setting(NamedTuple):
    """What steps are measured with.

    Attributes:
      prompt: of every row.
      new_tokens: that there is room for, which decides the cache slots.
    """

    model: Model
    prompt: list[int]
    rows: int
    temperature: float
    new_tokens: int


def measure(setting: Setting, most: int) -> StepTimes:
    """Runs the compiled loop with trees of up to `most` nodes, in turns."""
    sizes = [n for n in _SIZES if n <= most]
    trees = {f"nodes {n}": _wide(n) for n in sizes}
    widths = [w for w, depth in _DEPTH_BY_WIDTH.items() if w * depth <= most]
    for width in widths:
        trees[f"levels {width}"] = _chains(width, _DEPTH_BY_WIDTH[width])
    seconds = _in_turns(setting, trees)
    passes = {1: seconds["plain"]} | {n + 1: seconds[f"nodes {n}"] for n in sizes}
    drafted = {nodes: s for nodes, s in passes.items() if nodes > 1}
    levels = {}
    for width in widths:
        tree = trees[f"levels {width}"]
        further = seconds[f"levels {width}"] - _interpolated(drafted, tree.size)
        levels[width] = max(further / (tree.depth - 1), 0.0)
    return StepTimes(passes, levels)


def with_trees(times: StepTimes, setting: Setting, trees: Sequence[Tree]) -> StepTimes:
    """The same, and these trees measured themselves, relative to plain decoding."""
    named = {str(tree): tree for tree in trees}
    seconds = _in_turns(setting, named)
    drift = times.passes[1] / seconds["plain"]
    found = {tree: drift * seconds[name] for name, tree in named.items()}
    return dataclasses.replace(times, trees=found)


def _in_turns(setting: Setting, trees: Mapping[str, Tree]) -> dict[str, float]:
    """Seconds of a step, from the medians of several rounds over all trees and plain decoding.

    A tree's is that of plain decoding times the ratio of the two in one round, since a machine's
    speed drifts.
    """
    model, prompt, rows, temperature, new_tokens = setting
    found: dict[str, list[float]] = {name: [] for name in ("plain", *trees)}
    deepest = max(tree.depth for tree in trees.values())
    budget = max(new_tokens, (_STEPS + 1) * (deepest + 1))  # no row may end meanwhile
    for turn in range(_ROUNDS + 1):
        for name, times in found.items():
            tree = trees.get(name, PLAIN)
            call = prepare(model, [prompt] * rows, tree, budget, temperature, 1.0, 0, 0)
            adjustments = call.request.sampling.adjustments
            never = adjustments._replace(ends=jnp.zeros_like(adjustments.ends))
            sampling = call.request.sampling._replace(adjustments=never)
            call = call._replace(request=call.request._replace(sampling=sampling))
            state = jax.block_until_ready(proceed(call, start(call), 1))
            started = time.perf_counter()
            jax.block_until_ready(proceed(call, state, _STEPS))
            if turn:  # the first compiles
                times.append((time.perf_counter() - started) / _STEPS)
    plain = found["plain"]
    ratios = {
        name: statistics.median(t / p for t, p in zip(times, plain, strict=True))
        for name, times in found.items()
    }
    return {name: ratio * statistics.median(plain) for name, ratio in ratios.items()}


def _wide(nodes: int) -> Tree:
    """One level of so many."""
    return Tree(tuple((rank,) for rank in range(nodes)))


def _chains(count: int, depth: int) -> Tree:
    """So many chains side by side."""
    tree = parse_tree([[rank, *[0] * d] for rank in range(count) for d in range(depth)])
    assert isinstance(tree, Tree)
    return tree


def _interpolated(known: Mapping[int, float], at: int) -> float:
    """Linear between what is known, and on in the last direction beyond it."""
    xs = sorted(known)
    if len(xs) > 1 and at > xs[-1]:
        slope = (known[xs[-1]] - known[xs[-2]]) / (xs[-1] - xs[-2])
        return known[xs[-1]] + slope * (at - xs[-1])
    return float(np.interp(at, xs, [known[x] for x in xs]))
