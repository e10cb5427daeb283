"""The distillation loss against a loop over positions, its offsets, and its memory."""

import dataclasses
import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.draft import DraftHead
from clover_jax.rope import Rope
from clover_jax.target import causal_mask
from clover_jax.weights.clover import abstract_head
from train.loss import LossWeights, Teacher, Vocabulary, distillation_loss, total_loss
from train.segments import Samples, block_mask, positions, supervised

B, T, D, V, STEPS = 3, 11, 16, 23, 3
WEIGHTS = LossWeights(decay=0.6, hidden=2.0, cross_entropy=0.5)
BLOCK = TargetConfig(
    vocab_size=V,
    hidden_size=D,
    intermediate_size=24,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    rms_norm_eps=1e-5,
    rope=Rope(head_dim=8),
    max_position_embeddings=32,
    tie_word_embeddings=False,
)
DRAFT_IDS = np.array([4, 21, 7, 0, 15, 2, 11, 12, 9], np.int32)

Params = dict[str, Any]


def draft_config(vocab: np.ndarray | None) -> DraftConfig:
    size = V if vocab is None else len(vocab)
    return DraftConfig(block=BLOCK, num_heads=2, draft_vocab_size=size, num_steps=STEPS)


@dataclasses.dataclass
class Case:
    """A batch and everything the loss needs of it, all random."""

    params: Params
    teacher: Teacher
    vocabulary: Vocabulary
    tokens: np.ndarray
    mask: np.ndarray
    segments: np.ndarray


def case(vocab: np.ndarray | None) -> Case:
    rng = np.random.default_rng(0)

    def normal(*shape: int, scale: Any = 1.0) -> np.ndarray:
        return (scale * rng.normal(size=shape)).astype(np.float32)

    shapes = abstract_head(draft_config(vocab))
    params = flax.traverse_util.unflatten_dict(
        {path: normal(*leaf.shape, scale=0.5) for path, leaf in shapes.items()}
    )
    hidden, lm_head, embedding = normal(B, T, D), normal(V, D), normal(V, D)
    ids = np.arange(V) if vocab is None else vocab
    row_of = np.full(V, -1, np.int32)
    row_of[ids] = np.arange(len(ids))
    tokens = rng.integers(0, V, (B, T)).astype(np.int32)
    mask = rng.random((B, T)) < 0.6
    mask[:, 0] = True  # the first token has no position before it
    mask[:, -1] = True
    return Case(
        params,
        Teacher(hidden, hidden * normal(D, scale=3)),
        Vocabulary(lm_head[ids], row_of, embedding),
        tokens,
        mask,
        np.ones((B, T), np.int32),
    )


# Compiling is what takes the time here.
quick_jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": "0"})


@functools.partial(quick_jit, static_argnums=(0, 1))
def ours(config: DraftConfig, chunk: int, params: Params, teacher, vocabulary, samples) -> Any:
    with jax.default_matmul_precision("highest"):
        return jax.value_and_grad(
            lambda p: distillation_loss(config, WEIGHTS, p, teacher, vocabulary, samples, chunk),
            has_aux=True,
        )(params)


def of_case(config: DraftConfig, chunk: int, c: Case) -> Any:
    samples = Samples(c.tokens, c.mask, c.segments)
    return ours(config, chunk, c.params, c.teacher, c.vocabulary, samples)


def naive_loss(config: DraftConfig, c: Case, params: Params) -> tuple[jax.Array, dict[str, Any]]:
    """Head i at t predicts token t+2+i, and its teacher is the target at t+1+i; nothing is cut."""
    head, variables = DraftHead(config), {"params": params}
    e = jnp.asarray(c.vocabulary.embedding[c.tokens])
    positions = jnp.broadcast_to(jnp.arange(T - 1), (B, T - 1))
    # h_t and e(x_{t+1}); the last position has no next token.
    state, _ = head.apply(
        variables,
        c.teacher.hidden[:, :-1],
        e[:, 1:],
        positions,
        causal_mask(T - 1),
        method="advance",
    )
    features = [head.apply(variables, state, method="first_features")]
    for i in range(1, STEPS):  # at t with x_{t+1+i}, as far as there is one
        state, feature = head.apply(variables, state[:, :-1], e[:, 1 + i :], method="extend")
        features.append(feature)

    lm_rows, goals = c.vocabulary.lm_rows, c.teacher.normalized
    taught = goals[:, 1:-1][c.mask[:, 2:]]  # wherever head 0 has a teacher
    rms = jnp.sqrt(jnp.mean(taught**2) + 1e-6)
    terms: dict[str, list[Any]] = {"loss_hidden": [], "loss_ce": [], "accuracy": [], "count": []}
    for i in range(STEPS):
        rows = [(b, t) for b in range(B) for t in range(T - 2 - i) if c.mask[b, t + 2 + i]]
        b, t = np.array(rows).T
        ours, goal = features[i][b, t], goals[b, t + 1 + i]  # [N, D]
        error = jnp.abs(ours - goal) / rms
        terms["loss_hidden"].append(jnp.mean(jnp.where(error < 1, error**2 / 2, error - 0.5)))
        logits, its = ours @ lm_rows.T, goal @ lm_rows.T
        cross = -jnp.sum(jax.nn.softmax(its) * jax.nn.log_softmax(logits), axis=-1)
        terms["loss_ce"].append(jnp.mean(cross))
        hit = jnp.argmax(logits, axis=-1) == c.vocabulary.row_of[c.tokens[b, t + 2 + i]]
        terms["accuracy"].append(jnp.mean(hit))
        terms["count"].append(len(rows))
    loss = sum(
        0.6**i * (2.0 * terms["loss_hidden"][i] + 0.5 * terms["loss_ce"][i]) for i in range(STEPS)
    )
    return loss, {name: jnp.asarray(values) for name, values in terms.items()}


@pytest.mark.parametrize(
    ("vocab", "chunk"),
    [(None, 5), (DRAFT_IDS, 64)],
    ids=["all tokens in small chunks", "draft vocabulary in a chunk that is not full"],
)
def test_against_the_naive_loss(vocab: np.ndarray | None, chunk: int) -> None:
    c, config = case(vocab), draft_config(vocab)
    assert c.tokens.size % chunk

    @quick_jit
    def naive(params: Params) -> Any:
        with jax.default_matmul_precision("highest"):
            return jax.value_and_grad(lambda p: naive_loss(config, c, p), has_aux=True)(params)

    (wanted, terms), slope = naive(c.params)
    (loss, metrics), gradient = of_case(config, chunk, c)
    np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert metrics.keys() == terms.keys()
    for name, value in terms.items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-5, err_msg=name)
    assert np.unique(terms["count"]).size == STEPS  # each head counts on its own
    for ours, its in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(ours, its, rtol=1e-4, atol=1e-6)


def test_a_single_head_is_the_first_of_several() -> None:
    c, config = case(None), draft_config(None)
    (_, metrics), _ = of_case(config, 5, c)
    (loss, alone), _ = of_case(dataclasses.replace(config, num_steps=1), 5, c)
    for name, value in alone.items():
        np.testing.assert_allclose(value, metrics[name][:1], rtol=1e-6, err_msg=name)
    np.testing.assert_allclose(loss, total_loss(WEIGHTS, alone), rtol=1e-6)


def test_total_of_the_terms() -> None:
    means = {"loss_hidden": np.array([1.0, 2.0]), "loss_ce": np.array([3.0, 5.0])}
    assert total_loss(LossWeights(0.5, 10.0, 2.0), means) == pytest.approx(16 + 0.5 * 30)


# Offsets


def test_supervised_positions_of_each_head() -> None:
    """Head i counts at t when the token at t+2+i is supervised, and of the same sample."""
    mask = np.array([[1, 1, 0, 0, 1, 1, 0, 1]], bool)

    def counted(mask: np.ndarray, segments: list[int]) -> list[list[int]]:
        samples = Samples(np.zeros_like(mask, np.int32), mask, np.array([segments]))
        return [np.flatnonzero(row).tolist() for row in np.asarray(supervised(samples, 5))[:, 0]]

    assert counted(mask, [1] * 8) == [[2, 3, 5], [1, 2, 4], [0, 1, 3], [0, 2], [1]]
    assert counted(mask, [1] * 4 + [2] * 4) == [[5], [4], [], [], []]
    assert counted(np.zeros((1, 8), bool), [1] * 8) == [[]] * 5


def test_positions_and_sight_in_a_packed_row() -> None:
    segments = np.array([[1, 1, 1, 2, 2, 3, 0, 0]])
    assert np.asarray(positions(segments)).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1]]
    seen = [np.flatnonzero(row).tolist() for row in np.asarray(block_mask(segments))[0]]
    assert seen == [[0], [0, 1], [0, 1, 2], [3], [3, 4], [5], [6], [6, 7]]


def test_samples_packed_into_one_row_teach_what_they_teach_alone() -> None:
    c, config = case(None), draft_config(None)
    (wanted, metrics), slope = of_case(config, 5, c)

    def joined(x: np.ndarray) -> np.ndarray:
        return np.asarray(x).reshape(1, B * T, *x.shape[2:])

    packed = Case(
        c.params,
        Teacher(*map(joined, c.teacher)),
        c.vocabulary,
        joined(c.tokens),
        joined(c.mask),
        np.repeat(np.arange(1, B + 1), T)[None],
    )
    (loss, its), gradient = of_case(config, 5, packed)
    np.testing.assert_allclose(loss, wanted, rtol=1e-6)
    for name, value in metrics.items():
        np.testing.assert_allclose(its[name], value, rtol=1e-6, err_msg=name)
    for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_which_head_learns_which_offset() -> None:
    """A lone supervised token at q: head i reads h up to q-2-i, and tokens up to q-1."""
    c, config, q = case(None), draft_config(None), 7
    c.mask = np.arange(T)[None] == np.full((B, 1), q)

    def losses(hidden: np.ndarray, tokens: np.ndarray) -> np.ndarray:
        changed = dataclasses.replace(c, teacher=c.teacher._replace(hidden=hidden), tokens=tokens)
        (_, metrics), _ = of_case(config, 5, changed)
        assert np.all(metrics["count"] == B)
        return np.asarray(metrics["loss_ce"])

    hidden = np.asarray(c.teacher.hidden)
    before = losses(hidden, c.tokens)
    for t in range(T):
        other = hidden.copy()
        other[:, t] += 1
        reads = losses(other, c.tokens) != before
        assert reads.tolist() == [t <= q - 2 - i for i in range(STEPS)], t

        tokens = c.tokens.copy()
        tokens[:, t] = (tokens[:, t] + 1) % V
        reads = losses(hidden, tokens) != before
        assert reads.tolist() == [1 <= t <= q - 1] * STEPS, t


def test_what_follows_the_last_supervised_token_changes_nothing() -> None:
    """Other garbage behind the end, and more of it: the same loss and the same gradient."""
    c, config = case(None), draft_config(None)
    c.mask = c.mask & (np.arange(T) < 8)
    (wanted, metrics), slope = of_case(config, 5, c)
    rng = np.random.default_rng(1)
    for extra in (0, 6):
        tokens = rng.integers(0, V, (B, T + extra)).astype(np.int32)
        tokens[:, :8] = c.tokens[:, :8]

        def garbage(x: np.ndarray, extra: int = extra) -> np.ndarray:
            junk = 100 * rng.normal(size=(B, T + extra, D))
            junk[:, :8] = x[:, :8]
            return junk.astype(np.float32)

        longer = Case(
            c.params,
            Teacher(*map(garbage, c.teacher)),
            c.vocabulary,
            tokens,
            np.pad(c.mask, ((0, 0), (0, extra))),
            np.pad(c.segments, ((0, 0), (0, extra))),
        )
        (loss, its), gradient = of_case(config, 5, longer)
        np.testing.assert_allclose(loss, wanted, rtol=1e-6)
        for name, value in metrics.items():
            np.testing.assert_allclose(its[name], value, rtol=1e-6, err_msg=name)
        for one, other in zip(jax.tree.leaves(gradient), jax.tree.leaves(slope), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def test_a_batch_without_supervision() -> None:
    c, config = case(None), draft_config(None)
    c.mask = np.zeros_like(c.mask)
    (loss, metrics), gradient = of_case(config, 5, c)
    assert loss == 0
    assert not np.any(metrics["count"])
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(gradient))


# Memory


def test_memory_does_not_grow_as_heads_by_length_by_vocabulary() -> None:
    """Llama 3's vocabulary and the paper's length, compiled but not run."""
    vocab, length, width = 128_256, 2048, 16
    config = DraftConfig(
        block=dataclasses.replace(BLOCK, vocab_size=vocab),
        num_heads=2,
        draft_vocab_size=vocab,
        num_steps=5,
    )

    def abstract(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    def slope(params: Params, *rest: Any) -> Any:
        return jax.grad(lambda p: distillation_loss(config, WEIGHTS, p, *rest), has_aux=True)(
            params
        )

    compiled = (
        quick_jit(slope)
        .lower(
            flax.traverse_util.unflatten_dict(abstract_head(config)),
            Teacher(*(abstract(jnp.float32, 1, length, width),) * 2),
            Vocabulary(
                abstract(jnp.float32, vocab, width),
                abstract(jnp.int32, vocab),
                abstract(jnp.float32, vocab, width),
            ),
            Samples(
                abstract(jnp.int32, 1, length),
                abstract(jnp.bool_, 1, length),
                abstract(jnp.int32, 1, length),
            ),
        )
        .compile()
    )
    peak = compiled.memory_analysis().temp_size_in_bytes
    one_head = length * vocab * 4
    assert peak < one_head
