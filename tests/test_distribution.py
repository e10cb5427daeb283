"""On rig M the exact distribution is known: speculative decoding samples it, and nothing else.

Settings are other than temperature 1 with top_p 1, where forgetting a processor would not show.
All tests share one compiled program: a tree that asks for more tokens than the vocabulary has, over
a batch of independent seeds.

Axes: B rows, V vocabulary.
"""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import rigs
from scipy import stats

from clover_jax.tree import parse_tree
from infer import generate, speculative_generate
from infer.adjust import history
from infer.drafter import Proposals
from infer.noise import row_keys
from infer.propose import Proposal
from infer.rejection import accept_by_rejection
from infer.sampling import Sampling

ROWS = 512  # of a call
CALLS = 8
START = 2  # the prompt
TREE = [
    *([a] for a in range(10)),
    *([a, b] for a in range(3) for b in range(2)),
    [0, 0, 0],
]
SETTINGS = [(0.6, 1.0), (0.6, 0.7), (1.3, 0.9)]  # temperature, top_p


def exact_table(temperature: float, top_p: float) -> np.ndarray:
    """f64 [V, V]: the probability of each next token, by sorting."""
    logits = rigs.table(rigs.TINY).astype(np.float64) / temperature
    p = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for row in p:
        order = np.argsort(-row)
        before = np.cumsum(row[order]) - row[order]
        row[order[before >= top_p]] = 0.0
    return p / p.sum(axis=1, keepdims=True)


# Acceptance by rejection shall come to refuse all children, and to leaves.
TREES = {"shared": TREE, "rejection": [[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 1, 0]]}


def sample(model, temperature: float, top_p: float, acceptance: str) -> np.ndarray:
    """int [CALLS * B, 4]: the first new tokens of as many seeds."""
    said = []
    for call in range(CALLS):
        out = speculative_generate(
            model,
            [[START]] * ROWS,
            4,
            temperature=temperature,
            top_p=top_p,
            seed=call * ROWS,
            tree=TREES[acceptance],
            acceptance=acceptance,
        )
        said += out.token_ids
    return np.array(said)


@pytest.mark.parametrize("acceptance", TREES)
@pytest.mark.parametrize(("temperature", "top_p"), SETTINGS)
def test_pairs_are_distributed_as_the_target_says(temperature, top_p, acceptance):
    """The head is misled, so that tokens are accepted at every rank, and added by the target."""
    said = sample(rigs.rig_m(rigs.TINY, noise=1.0), temperature, top_p, acceptance)
    p = exact_table(temperature, top_p)
    before = np.eye(rigs.TINY.vocab_size)[START]  # distribution of the token before the pair
    for place in range(3):
        pairs = (before @ p)[:, None] * p  # [V, V], of the tokens at place and place + 1
        counts = np.zeros_like(pairs)
        np.add.at(counts, (said[:, place], said[:, place + 1]), 1)
        assert not counts[pairs == 0].any(), "a token outside the nucleus"
        possible = pairs > 0
        expected = pairs[possible] * len(said)
        seen = counts[possible]
        rare = expected < 5  # chi-square wants more: they are counted together
        if rare.any():
            expected = np.append(expected[~rare], expected[rare].sum())
            seen = np.append(seen[~rare], seen[rare].sum())
        assert stats.chisquare(seen, expected).pvalue > 1e-3
        before = before @ p


def test_rejection_differs_from_plain_decoding_unless_it_is_greedy():
    model, prompts = rigs.rig_m(rigs.TINY, noise=1.0), [[row % 6] for row in range(ROWS)]

    def same(temperature: float) -> bool:
        settings = {"temperature": temperature, "seed": 3}
        plain = generate(model, prompts, 12, **settings)
        fast = speculative_generate(
            model, prompts, 12, tree=TREES["rejection"], acceptance="rejection", **settings
        )
        return fast.token_ids == plain.token_ids

    assert same(0.0)
    assert not same(1.0)


def test_a_child_that_was_not_drawn_is_not_offered():
    """The draft is sure of token 0, so its second child only fills the tree; p is uniform."""
    rows, size = 4096, 3
    tree = parse_tree([[0], [1]])
    drawn = jnp.broadcast_to(jnp.asarray([[[0.0, -jnp.inf, -jnp.inf]]]), (rows, 1, size))
    proposal = Proposal(
        tokens=jnp.broadcast_to(jnp.asarray([[2, 0, 1]]), (rows, 3)),
        parents=jnp.asarray([[-1, 0, 0]]),
        depths=jnp.asarray([[0, 1, 1]]),
        ancestors=jnp.asarray(tree.ancestors)[None],
        inner=(Proposals(jnp.arange(size)[None, None], drawn, drawn),),
    )
    sampling = Sampling.of(row_keys(0, rows), size, temperature=1.0)
    none = jnp.zeros(rows, jnp.int32)
    past = history(sampling.adjustments, none[:, None], none, none)
    logits = jnp.zeros((rows, 3, size))
    path = accept_by_rejection(tree, proposal, logits, none, sampling, past)
    counts = np.bincount(path.tokens[:, 0], minlength=size)
    assert stats.chisquare(counts).pvalue > 1e-3
    assert path.length[path.tokens[:, 0] == 0].min() == 2


def test_rejection_takes_no_dynamic_tree():
    with pytest.raises(ValueError, match="takes no dynamic"):
        speculative_generate(
            rigs.rig_m(), [[1]], 4, tree="dynamic-4", acceptance="rejection", seed=0
        )
    with pytest.raises(ValueError, match="acceptance 'exact' is neither"):
        speculative_generate(rigs.rig_m(), [[1]], 4, acceptance="exact")


@pytest.mark.parametrize("noise", [0.0, 1.0])
@pytest.mark.parametrize(("temperature", "top_p"), [(0.0, 1.0), (0.7, 0.1), (1.3, 0.9)])
def test_a_branch_wider_than_the_vocabulary(temperature, top_p, noise):
    """Ten children of a vocabulary of six; at top_p 0.1 most of them have no probability."""
    model = rigs.rig_m(rigs.TINY, noise=noise)
    prompts = [[row % 6] for row in range(ROWS)]
    settings = {"temperature": temperature, "top_p": top_p, "seed": 3}
    plain = generate(model, prompts, 12, **settings)
    fast = speculative_generate(model, prompts, 12, tree=TREE, **settings)
    sampling = rigs.row_sampling(ROWS, 3, temperature=temperature, top_p=top_p)
    assert rigs.near_ties(model, prompts, plain.token_ids, fast.token_ids, sampling) <= 1
    # All of the vocabulary is among the children: the first draft token is always right.
    assert fast.stats.accepted_by_depth[0] == pytest.approx(1.0, abs=0.17)


@pytest.mark.parametrize("copy_bias", [(), (1.0, 2.0)])
def test_twin_siblings_do_not_exist(copy_bias):
    """A head that is certain still proposes each token once, also one that it copies."""
    model = rigs.rig_m(rigs.TINY)
    config = dataclasses.replace(model.draft_config, copy_bias=copy_bias)
    certain = model.draft._replace(lm_rows=1e6 * model.draft.lm_rows)
    tree = parse_tree(TREE)
    state = jnp.ones((2, rigs.TINY.hidden_size))
    text, root = jnp.array([[0, 1, 0, 1, 0, 5], [3, 0, 0, 0, 0, 0]]), jnp.array([4, 0])
    noise = [jnp.zeros((2, 6))] * tree.depth
    for top_p in (0.1, 1.0):
        sampling = rigs.row_sampling(2, 0, temperature=0.7, top_p=top_p, config=rigs.TINY)
        found = rigs.proposal(config, certain, tree, state, text, root, noise, sampling)
        for row in np.asarray(found.tokens):
            for node in range(tree.size):
                drafted = [token for token in row[tree.parents == node] if token >= 0]
                assert len(set(drafted)) == len(drafted)
            assert sorted(row[tree.parents == 0]) == [-1, -1, -1, -1, 0, 1, 2, 3, 4, 5]
