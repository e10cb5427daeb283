"""Tiny models that make faults of decoding visible, built without files.

M  Blocks that output zero and an embedding that is the identity: the next token depends on the last
   one alone, its logits are a row of a known table, and greedy output is the cycle i, i+1, ...
   Its head's parameters are set so that the draft's logits equal the target's, or miss them a bit;
   the latter also copies from the text.
R  Random weights with large margins: all of the context matters. Its head is random, and copies.
O  R's target under a head that was overfitted on what that target says to the prompts below.

All of them share one config, so that they share compiled programs too.

Axes: B batch, T tokens, V vocabulary, D model.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.draft import DraftHead
from clover_jax.rope import Rope
from clover_jax.target import Target, causal_mask
from clover_jax.tree import AnyTree, DynamicTree
from clover_jax.weights.target import abstract_params
from infer.adjust import history
from infer.drafter import Draft, Drafter
from infer.engine import generate
from infer.load import Model, ready_draft
from infer.noise import row_keys
from infer.propose import Proposal, propose
from infer.sampling import Sampling, gumbel_noise, process
from train.initialize import initialize_head
from train.loss import LossWeights, Vocabulary
from train.segments import Samples
from train.step import Frozen, Recipe, TrainState, make_optimizer, train_step

Params = dict[str, Any]

SEED = 11  # of what rig O's head has learnt
NEAR = 1e-4  # two scores closer than this may change places by rounding
CONTEXT = 900  # longer than three prompt chunks, and no power of two
COPY_BIAS = (0.5, 2.0, 4.0)
NEW = 64  # tokens to generate, for all tests that share a compiled program
CONFIG = TargetConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope=Rope(head_dim=8),
    max_position_embeddings=CONTEXT,
    tie_word_embeddings=False,
)
# Fewer tokens than some trees ask for, and a table that is quickly exhausted by sampling.
TINY = dataclasses.replace(
    CONFIG,
    vocab_size=6,
    hidden_size=6,
    num_layers=1,
    num_heads=1,
    num_kv_heads=1,
    head_dim=2,
    rope=Rope(head_dim=2),
)

PROMPTS = [[5, 9, 10], [1], [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [30, 31, 7, 7, 0, 19]]

TREES: dict[str, Any] = {
    "paper": "paper",
    "chain-3": "chain-3",
    "chain-7": "chain-7",
    # Every token there is, so that a bad draft is right at depth 1 too.
    "wide": [[a] for a in range(CONFIG.vocab_size)] + [[a, 0] for a in range(8)],
    # Rank 2 of the first level is left out.
    "bushy": [
        *([a] for a in (0, 1, 3, 4)),
        *([a, b] for a in (0, 1, 4) for b in range(3)),
        *([a, b, c] for a in (0, 1) for b in (0, 2) for c in range(3)),
    ],
    "single node": [[0]],
    "dynamic": DynamicTree(nodes=12, depth=4, width=3),
    "dynamic, truncated": DynamicTree(10, depth=3, width=3, least_ratio=0.25, top_p=0.9),
}


@functools.cache
def rig_m(config: TargetConfig = CONFIG, noise: float = 0.0) -> Model:
    """Rig M under a head whose logits equal the target's, or miss them by about `noise`."""
    size = config.vocab_size
    logits = table(config)
    params = _fill(abstract_params(config), functools.partial(_silent, size=size))
    # The final norm turns the one-hot embedding i into sqrt(V) times itself.
    params["lm_head"] = jnp.asarray(logits.T / size**0.5)
    draft_config = dataclasses.replace(
        DraftConfig.for_target(config, num_layers=1), copy_bias=COPY_BIAS if noise else ()
    )
    head = _fill(_head_shapes(draft_config), functools.partial(_silent, size=size))
    rng = np.random.default_rng(3)
    for name in ("fc1", "fc2"):
        head[name]["weight"] += noise * rng.normal(size=head[name]["weight"].shape) / size**0.5
    return _model(config, params, draft_config, head)


def table(config: TargetConfig) -> np.ndarray:
    """f32 [V, V]: rig M's logits after each token; the next one in the cycle is the likeliest."""
    size = config.vocab_size
    rows = np.random.default_rng(1).uniform(0.0, 1.5, (size, size))
    rows[np.arange(size), (np.arange(size) + 1) % size] = 1.8
    return rows.astype(np.float32)


def _silent(path: tuple[str, ...], shape: tuple[int, ...], size: int) -> np.ndarray:
    """Rig M's parameters: what is read is the last token, and nothing else."""
    match path:
        case (*_, "o_proj" | "down_proj", "weight"):
            return np.zeros(shape)
        case ("embed_tokens",) | ("lm_head",) | ("fc1", "weight"):
            return np.eye(*shape)
        case ("ad1", "v", "weight"):
            # The gate is open, and the token drowns the state it is added to.
            return 1e8 * np.eye(size)
        case ("ad1" | "ad2", _, "weight"):
            return np.zeros(shape)
        case ("ad1" | "ad2", "q" | "k", "bias") | (*_, "scale"):
            return np.ones(shape)
        case ("fc2", "weight"):
            return np.concatenate([np.zeros((size, size)), np.eye(size)], axis=1)
        case (*_, "bias"):
            return np.zeros(shape)
    return np.random.default_rng(4).normal(0.0, 0.3, shape)


@functools.cache
def rig_r(config: TargetConfig = CONFIG) -> Model:
    """Rig R."""
    rng = np.random.default_rng(2)

    def weight(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        if path[-1] == "scale":
            return np.ones(shape)
        return rng.normal(0.0, 1.0 if path == ("embed_tokens",) else 0.3, shape)

    params = _fill(abstract_params(config), weight)
    draft_config = DraftConfig.for_target(config, num_layers=1)
    head = _fill(_head_shapes(draft_config), weight)
    draft_config = dataclasses.replace(draft_config, copy_bias=COPY_BIAS)
    return _model(config, params, draft_config, head)


@functools.cache
def rig_o() -> Model:
    """Rig O."""
    model = rig_r()
    texts = []
    for temperature in (0.0, 0.7):
        said = generate(model, PROMPTS, NEW, temperature=temperature, top_p=0.9, seed=SEED)
        texts += [p + new for p, new in zip(PROMPTS, said.token_ids, strict=True)]
    return _overfitted(model, texts, steps=600)


def _overfitted(model: Model, texts: list[list[int]], steps: int) -> Model:
    """The model under a head trained on nothing but these texts."""
    config = DraftConfig.for_target(model.config, num_layers=1)
    recipe = Recipe(model.config, config, LossWeights(), "float32")
    all_tokens = jnp.arange(model.config.vocab_size)
    vocabulary = Vocabulary(model.params["lm_head"], all_tokens, model.params["embed_tokens"])
    frozen = Frozen(model.params, vocabulary)
    head = initialize_head(config, model.params, jax.random.key(0), hidden_rms=6.5)
    optimizer, _ = make_optimizer(1e-2, steps, 20, 0.0, 1.0)
    width = max(map(len, texts))
    tokens = jnp.asarray([t + [0] * (width - len(t)) for t in texts])
    inside = jnp.arange(width) < jnp.asarray([[len(t)] for t in texts])
    samples = Samples(tokens, inside, inside.astype(jnp.int32))

    @jax.jit
    def train(state: TrainState) -> TrainState:
        def step(_: int, state: TrainState) -> TrainState:
            return train_step(recipe, optimizer, state, frozen, samples)[0]

        return jax.lax.fori_loop(0, steps, step, state)

    trained = train(TrainState(jnp.int32(0), head, optimizer.init(head)))
    return _model(model.config, model.params, config, trained.params)


def with_eos(model: Model, *ids: int) -> Model:
    """The model with these tokens declared to end a text."""
    return dataclasses.replace(model, eos_ids=ids)


def with_draft_vocabulary(model: Model, ids: Sequence[int]) -> Model:
    """The model whose head proposes these tokens alone."""
    config = dataclasses.replace(model.draft_config, draft_vocab_size=len(ids))
    return _model(model.config, model.params, config, model.draft.params, np.asarray(ids))


def _model(
    config: TargetConfig,
    params: Params,
    draft_config: DraftConfig,
    head: Params,
    draft_ids: np.ndarray | None = None,
) -> Model:
    draft = ready_draft(draft_config, head, draft_ids, config, params)
    return Model(config, params, draft_config, draft, None, ())


def _head_shapes(config: DraftConfig) -> dict[tuple[str, ...], jax.ShapeDtypeStruct]:
    x = jax.ShapeDtypeStruct((1, 1, config.block.hidden_size), jnp.float32)
    shapes = jax.eval_shape(DraftHead(config).init, jax.random.key(0), x, x)
    return flax.traverse_util.flatten_dict(shapes["params"])


def _fill(
    shapes: dict[tuple[str, ...], jax.ShapeDtypeStruct],
    weight: Callable[[tuple[str, ...], tuple[int, ...]], np.ndarray],
) -> Params:
    return flax.traverse_util.unflatten_dict(
        {p: jnp.asarray(weight(p, shapes[p].shape), jnp.float32) for p in sorted(shapes)}
    )


class Forced(NamedTuple):
    """What the target chooses for each new token once all before it are given.

    Attributes:
      choices: int32 [B, R].
      margins: f32 [B, R], by how much the choice beats the runner-up.
    """

    choices: np.ndarray
    margins: np.ndarray


def teacher_forced(
    model: Model,
    prompts: Sequence[Sequence[int]],
    token_ids: Sequence[Sequence[int]],
    sampling: Sampling,
) -> Forced:
    """One pass without a cache over prompts and new tokens; R is the most new tokens of a row."""
    texts = [[*p, *new] for p, new in zip(prompts, token_ids, strict=True)]
    width = 128 if max(map(len, texts)) <= 128 else 1024  # two programs, not one per length
    tokens = jnp.asarray([t + [0] * (width - len(t)) for t in texts], jnp.int32)
    choices, margins = _choices(model.config, model.params, tokens, sampling)
    start = np.array([len(p) for p in prompts])[:, None] - 1
    at = np.minimum(start + np.arange(max(map(len, token_ids))), width - 1)
    return Forced(*(np.take_along_axis(np.asarray(x), at, axis=1) for x in (choices, margins)))


@functools.partial(jax.jit, static_argnums=0)
def _choices(
    config: TargetConfig, params: Params, tokens: jax.Array, sampling: Sampling
) -> tuple[jax.Array, jax.Array]:
    """After each of [B, T] tokens: the choice [B, T] and its margin [B, T]."""
    batch, length = tokens.shape
    positions = jnp.broadcast_to(jnp.arange(length), tokens.shape)
    target, variables = Target(config), {"params": params}
    hidden, _ = target.apply(variables, tokens, positions, causal_mask(length))
    logits = target.apply(variables, hidden, method="logits")

    def score(logits: jax.Array, position: jax.Array) -> jax.Array:  # [B, V], one position
        noise = gumbel_noise(sampling, jnp.full((batch,), position), config.vocab_size)
        return process(logits, sampling) + noise

    scores = jax.vmap(score, in_axes=(1, 0), out_axes=1)(logits, jnp.arange(length) + 1)
    best, which = jax.lax.top_k(scores, 2)
    return which[..., 0], best[..., 0] - best[..., 1]


def row_sampling(
    rows: int,
    seed: int,
    temperature: Any = 0.0,
    top_k: Any = 0,
    top_p: Any = 1.0,
    config: TargetConfig = CONFIG,
) -> Sampling:
    """What the engine makes of these settings."""
    return Sampling.of(
        row_keys(seed, rows),
        config.vocab_size,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )


@functools.partial(jax.jit, static_argnums=(0, 2))
def proposal(
    config: DraftConfig,
    draft: Draft,
    tree: AnyTree,
    state: jax.Array,
    text: jax.Array,
    root: jax.Array,
    noise: list[jax.Array],
    sampling: Sampling,
) -> Proposal:
    """The tree that the head fills; arguments as of Drafter."""
    adjustments = sampling.adjustments
    past = history(adjustments, text, root + 1, jnp.zeros_like(root))
    return propose(Drafter(config, draft, text, root, noise, sampling, past), tree, state)


def near_ties(
    model: Model,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Sequence[int]],
    got: Sequence[Sequence[int]],
    sampling: Sampling,
) -> int:
    """How many rows of `got` leave `expected` at a near-tie of the argmax.

    Raises:
      AssertionError: a row leaves it anywhere else.
    """
    if list(expected) == list(got):
        return 0
    forced = teacher_forced(model, prompts, expected, sampling)
    count = 0
    for row, (a, b) in enumerate(zip(expected, got, strict=True)):
        if a == b:
            continue
        same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
        assert same is not None, f"row {row}: {len(b)} tokens instead of {len(a)}"
        margin = forced.margins[row, same]
        assert margin < NEAR, f"row {row}, token {same}: {b[same]}, not {a[same]}; margin {margin}"
        count += 1
    return count
