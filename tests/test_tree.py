"""Draft trees against what their paths say, and what is refused."""

import numpy as np
import pytest

from clover_jax.tree import PAPER_PATHS, PLAIN, DynamicTree, Tree, parse_tree

TREES = {
    "paper": PAPER_PATHS,
    "chain-4": [(0,), (0, 0), (0, 0, 0), (0, 0, 0, 0)],
    "wide": [(a,) for a in range(9)],
    "gaps": [(3,), (1,), (3, 2), (1, 0), (3, 2, 5)],  # in no order, with ranks left out
}


@pytest.mark.parametrize("name", TREES)
def test_topology(name):
    paths = TREES[name]
    tree = parse_tree(paths)
    nodes = [(), *sorted(paths, key=lambda p: (len(p), p))]  # in node order
    assert tree.size == len(nodes)
    assert tree.depth == max(map(len, nodes))
    assert tree.depths.tolist() == [len(p) for p in nodes]
    assert tree.ranks.tolist() == [p[-1] if p else 0 for p in nodes]
    assert tree.parents.tolist() == [nodes.index(p[:-1]) if p else -1 for p in nodes]
    ancestors = [[a == b[: len(a)] for a in nodes] for b in nodes]
    assert np.array_equal(tree.ancestors, ancestors)
    levels = [tree.level(d).tolist() for d in range(tree.depth + 1)]
    assert levels == [[i for i, p in enumerate(nodes) if len(p) == d] for d in range(len(levels))]


def test_paper_tree_has_25_nodes_of_depth_5():
    tree = parse_tree("paper")
    assert (tree.size, tree.depth) == (26, 5)
    assert [len(tree.level(d)) for d in range(6)] == [1, 4, 8, 8, 3, 2]


def test_names_and_forms():
    assert parse_tree("chain-3") == parse_tree([[0, 0], [0], [0, 0, 0]])
    assert parse_tree("chain-12").depth == 12
    assert parse_tree(np.array([[0], [1]]).tolist()) == parse_tree([(np.int64(1),), (0,)])
    tree = parse_tree("paper")
    assert parse_tree(tree) is tree
    assert hash(tree) == hash(parse_tree(PAPER_PATHS))
    assert (PLAIN.size, PLAIN.depth) == (1, 0)


def test_dynamic_trees_by_name():
    assert parse_tree("dynamic-1") == DynamicTree(1, 1, 4)
    assert parse_tree("dynamic-16") == DynamicTree(16, 5, 4)
    assert parse_tree("dynamic-256") == DynamicTree(256, 5, 8)  # 8 + 4 * 64 >= 256 > 7 + 4 * 49
    assert parse_tree(DynamicTree(9, 2, 3)).size == 10


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((0, 1, 1), "nodes 0, depth 1, width 1"),
        ((4, 5, 2), "4 nodes cannot fill a depth of 5"),
        ((13, 3, 2), "depth 3 and width 2 proposes 10 tokens, fewer than the 13"),
        ((4, 2, 2, 1.5), "least_ratio must be between 0 and 1, got 1.5"),
        ((4, 2, 2, 0, 0.0), "top_p of a tree must be above 0 and at most 1, got 0.0"),
    ],
)
def test_impossible_dynamic_trees_are_refused(arguments, says):
    with pytest.raises(ValueError, match=says):
        DynamicTree(*arguments)


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ("papre", r"'papre' is not known"),
        ("chain-0", r"'chain-0' is not known"),
        ("chain-1000", r"'chain-1000' has more than 999 nodes"),
        (None, r"child-rank paths, not None"),
        ("chain-", r"'chain-' is not known"),
        ("chain-2.5", r"'chain-2.5' is not known"),
        ([], r"no paths"),
        ([[]], r"\[\].*none is empty"),
        ([[0], [0, 0, 0]], r"\[0, 0, 0\] has no parent \[0, 0\]"),
        ([[1, 0]], r"\[1, 0\] has no parent \[1\]"),
        ([[0], [-1]], r"\[-1\].*count from 0"),
        ([[0], [1], [0]], r"\[0\] is given twice"),
        ([[0], [0.5]], r"\[0.5\].*not a whole number"),
        ([0, 1], r"path 0 is not a list"),
        (["0", "1"], r"path '0' is not a list"),
    ],
)
def test_malformed_trees_are_refused_in_one_line(tree, says):
    with pytest.raises(ValueError, match=says) as error:
        parse_tree(tree)
    assert "\n" not in str(error.value)


def test_tree_takes_sorted_paths_only():
    with pytest.raises(ValueError, match="sorted"):
        Tree(((0, 0), (0,)))
