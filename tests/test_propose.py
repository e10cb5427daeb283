"""Dynamic trees, against a transcription in numpy that expands and ranks node by node.

Axes: B batch, N tree nodes, D model.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import rigs
from rigs import CONFIG

from clover_jax.draft import DraftHead
from clover_jax.tree import DynamicTree

TEXT = [4, 1, 2, 3, 9, 11, 4, 1]


def by_hand(model, tree, state, noise):
    """Path -> log-probability of every node that is kept, greedily from the head itself."""
    head, variables = DraftHead(model.draft_config), {"params": model.draft.params}
    lm_head, embed = np.asarray(model.draft.lm_head), np.asarray(model.draft.embedding)

    def children(state, features, depth):
        scores = features @ lm_head.T + noise[depth]
        best = np.argsort(-scores, kind="stable")[: tree.width]
        masses = np.exp(scores - scores.max())
        masses = masses / masses.sum()
        kept, reached = [], 0.0
        for token in best:
            if masses[token] >= tree.least_ratio * masses[best[0]] and reached < tree.top_p:
                kept.append((int(token), float(np.log(masses[token]))))
            reached += masses[token]
        return kept

    features = head.apply(variables, state, method="first_features")
    frontier, pool = [((), 0.0, state, np.asarray(features))], {}
    for depth in range(tree.depth):
        grown = []
        for path, joint, at, features in frontier:
            for token, score in children(at, features, depth):
                pool[(*path, token)] = joint + score
                grown.append(((*path, token), joint + score, at))
        frontier = []
        for path, joint, at in sorted(grown, key=lambda g: -g[1])[: tree.width]:
            state, features = head.apply(variables, at, embed[path[-1]], method="extend")
            frontier.append((path, joint, state, np.asarray(features)))
    best = sorted(pool, key=lambda p: -pool[p])[: tree.nodes]
    return {path: pool[path] for path in best}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "tree",
    [
        DynamicTree(12, depth=4, width=3),
        DynamicTree(3, depth=1, width=3),
        DynamicTree(9, depth=9, width=1),
        DynamicTree(14, depth=3, width=3, least_ratio=0.25),
        DynamicTree(14, depth=3, width=3, top_p=0.6),
    ],
)
def test_the_likeliest_nodes_are_kept(tree, temperature):
    model = rigs.rig_r()
    rng = np.random.default_rng(1)
    states = jnp.asarray(rng.normal(size=(2, CONFIG.hidden_size)), jnp.float32)
    noise = [
        jnp.asarray(temperature * rng.gumbel(size=(2, CONFIG.vocab_size)), jnp.float32)
        for _ in range(tree.depth)
    ]
    text, root = jnp.asarray([TEXT, TEXT]), jnp.asarray([7, 4])
    sampling = rigs.row_sampling(2, 0, temperature=temperature)
    config = dataclasses.replace(model.draft_config, copy_bias=())
    found = rigs.proposal(config, model.draft, tree, states, text, root, noise, sampling)
    for row in range(2):
        tokens, parents = np.asarray(found.tokens[row]), np.asarray(found.parents[row])
        assert tokens[0] == TEXT[int(root[row])]
        assert parents[0] == -1
        paths, lines = [()], [{0}]
        for node in range(1, tree.size):
            assert 0 <= parents[node] < node
            paths.append((*paths[parents[node]], int(tokens[node])))
            lines.append(lines[parents[node]] | {node})
        assert found.depths[row].tolist() == [len(p) for p in paths]
        assert [set(np.flatnonzero(a)) for a in found.ancestors[row]] == lines
        expected = by_hand(model, tree, states[row], [np.asarray(n[row]) for n in noise])
        real = [p for p in paths[1:] if -1 not in p]
        assert len(set(real)) == len(real)
        assert set(real) == set(expected)
