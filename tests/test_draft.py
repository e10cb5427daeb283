"""The draft head against its equations, transcribed into plain numpy in float64."""

import dataclasses
import functools
from typing import Any

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from clover_jax import cache as kv
from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.draft import DraftHead
from clover_jax.rope import Rope
from clover_jax.target import causal_mask
from clover_jax.weights.clover import abstract_head

B, T, D, HEADS, KV_HEADS, HEAD_DIM, WIDE = 2, 7, 12, 3, 1, 6, 20
EPSILON = 1e-3  # large enough to be seen
TARGET = TargetConfig(
    vocab_size=11,
    hidden_size=D,
    intermediate_size=WIDE,
    num_layers=3,
    num_heads=HEADS,
    num_kv_heads=KV_HEADS,
    head_dim=HEAD_DIM,
    rms_norm_eps=EPSILON,
    rope=Rope(head_dim=HEAD_DIM, theta=100.0),
    max_position_embeddings=32,
    tie_word_embeddings=False,
)
CONFIG = DraftConfig.for_target(TARGET)
POSITIONS = jnp.broadcast_to(jnp.arange(T), (B, T))

Params = dict[str, Any]


@pytest.fixture(scope="module")
def params() -> Params:
    """Random, biases and norms too."""
    rng = np.random.default_rng(0)
    flat = {
        path: jnp.asarray(rng.normal(size=leaf.shape) * 0.5, jnp.float32)
        for path, leaf in abstract_head(CONFIG).items()
    }
    return flax.traverse_util.unflatten_dict(flat)


@pytest.fixture(scope="module")
def inputs() -> tuple[np.ndarray, np.ndarray]:
    """h and e, [B, T, D]."""
    hidden, embeddings = np.random.default_rng(1).normal(size=(2, B, T, D)).astype(np.float32)
    return hidden, embeddings


@functools.partial(jax.jit, static_argnames="method")
def apply(params: Params, method: str, *args: Any) -> Any:
    with jax.default_matmul_precision("highest"):
        return DraftHead(CONFIG).apply({"params": params}, *args, method=method)


# The equations


def linear(p: Params, x: np.ndarray) -> np.ndarray:
    return x @ np.asarray(p["weight"], np.float64).T + np.asarray(p.get("bias", 0), np.float64)


def rms_norm(p: Params, x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + EPSILON) * np.asarray(p["scale"])


def attention_decoder(p: Params, x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """One vector each."""
    q = linear(p["q"], rms_norm(p["input_layernorm"], x)).reshape(HEADS, -1)
    k, v = linear(p["k"], e).reshape(HEADS, -1), linear(p["v"], e).reshape(HEADS, -1)
    out = []
    for head in range(HEADS):
        norms = np.linalg.norm(q[head]) * np.linalg.norm(k[head])
        out.append(q[head] @ k[head] / norms * v[head])
    return x + np.concatenate(out)


def rotate(x: np.ndarray, position: int) -> np.ndarray:
    angle = position * 100.0 ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = np.split(x, 2)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ]
    )


def decoder_layer(p: Params, xs: np.ndarray) -> np.ndarray:
    """[T, D] -> [T, D]."""
    normed = rms_norm(p["input_layernorm"], xs)
    queries, keys, values = (
        linear(p["self_attn"][name], normed).reshape(T, -1, HEAD_DIM)
        for name in ("q_proj", "k_proj", "v_proj")
    )
    out = []
    for t in range(T):
        mixed = []
        for head in range(HEADS):
            q = rotate(queries[t, head], t)
            scores = np.array([q @ rotate(keys[s, 0], s) for s in range(t + 1)]) / HEAD_DIM**0.5
            weights = np.exp(scores - scores.max())
            mixed.append(weights @ values[: t + 1, 0] / weights.sum())
        out.append(np.concatenate(mixed))
    xs = xs + linear(p["self_attn"]["o_proj"], np.array(out))
    normed = rms_norm(p["post_attention_layernorm"], xs)
    gate = linear(p["mlp"]["gate_proj"], normed)
    silu = gate / (1 + np.exp(-gate))
    return xs + linear(p["mlp"]["down_proj"], silu * linear(p["mlp"]["up_proj"], normed))


def first_states(p: Params, hidden: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
    """s_0 of one row, [T, D]: extraction, then the augmenting block, then its norm."""
    z = np.array(
        [attention_decoder(p["ad1"], h, e) for h, e in zip(hidden, embeddings, strict=True)]
    )
    return rms_norm(p["block_norm"], decoder_layer(p["block_1"], decoder_layer(p["block_0"], z)))


# The tests


def test_step_0(params: Params, inputs) -> None:
    hidden, embeddings = inputs
    state, _ = apply(params, "advance", hidden, embeddings, POSITIONS, causal_mask(T))
    wanted = np.array([first_states(params, h, e) for h, e in zip(*inputs, strict=True)])
    np.testing.assert_allclose(state, wanted, atol=2e-5)

    features = apply(params, "first_features", state)
    wanted = rms_norm(params["head_norm"], linear(params["fc1"], wanted))
    np.testing.assert_allclose(features, wanted, atol=5e-5)


def test_later_steps(params: Params, inputs) -> None:
    """Three draft tokens in a row: AD2 and FC2 are shared, and s goes on un-normalised."""
    _, embeddings = inputs
    state = np.random.default_rng(2).normal(size=(B, D)) * 3
    ours = jnp.asarray(state, jnp.float32)
    for step in range(3):
        e = embeddings[:, step]
        state = np.array(
            [attention_decoder(params["ad2"], s, x) for s, x in zip(state, e, strict=True)]
        )
        joined = np.concatenate([state, e], axis=-1)
        features = rms_norm(params["head_norm"], linear(params["fc2"], joined))
        ours, our_features = apply(params, "extend", ours, e)
        np.testing.assert_allclose(ours, state, atol=2e-5)
        np.testing.assert_allclose(our_features, features, atol=2e-5)


def test_extend_takes_any_leading_axes(params: Params, inputs) -> None:
    """A frontier [B, F, D] gives what its nodes give one by one."""
    state, embeddings = inputs
    states, features = apply(params, "extend", state, embeddings)
    one_state, one_features = apply(params, "extend", state[1, 4], embeddings[1, 4])
    np.testing.assert_allclose(states[1, 4], one_state, atol=1e-5)
    np.testing.assert_allclose(features[1, 4], one_features, atol=1e-5)


@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 3]], ids=str)
def test_advance_in_pieces(params: Params, inputs, pieces: list[int]) -> None:
    """With the cache of what came before, any division gives the states of one pass."""
    hidden, embeddings = inputs
    whole, _ = apply(params, "advance", hidden, embeddings, POSITIONS, causal_mask(T))
    # Slots that are not valid hold junk, which nothing may read.
    cache = jax.tree.map(lambda x: x + 1e3, kv.init(CONFIG.block, B, 10, jnp.dtype(jnp.float32)))
    states, done = [], 0
    for size in pieces:
        part = slice(done, done + size)
        positions = POSITIONS[:, part]
        state, new = apply(
            params,
            "advance",
            hidden[:, part],
            embeddings[:, part],
            positions,
            causal_mask(size),
            cache,
            jnp.full((B,), done),
        )
        cache = kv.commit(cache, new, positions, state)
        states.append(state)
        done += size
    np.testing.assert_allclose(np.concatenate(states, axis=1), whole, atol=2e-5)


def test_a_state_of_zeros_has_finite_slopes(params: Params, inputs) -> None:
    """cosine(q, k) with q = 0 or k = 0: no NaN, neither in the value nor in the gradient."""
    closed = jax.tree.map(jnp.zeros_like, params)

    def total(p: Params, x: jax.Array, e: jax.Array) -> jax.Array:
        return jnp.sum(jnp.stack(apply(p, "extend", x, e)))

    _, embeddings = inputs
    slope = jax.jit(jax.value_and_grad(total, argnums=(0, 1, 2)))
    value, slopes = slope(closed, jnp.zeros((B, T, D)), embeddings)
    assert np.isfinite(value)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(slopes))


def test_dtypes(params: Params, inputs) -> None:
    """The state keeps the dtype of the hidden states; what the LM head reads is f32."""
    hidden, embeddings = (jnp.asarray(x, jnp.bfloat16) for x in inputs)
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    state, new = apply(half, "advance", hidden, embeddings, POSITIONS, causal_mask(T))
    assert state.dtype == new[0].k.dtype == jnp.bfloat16
    state, features = apply(half, "extend", state, embeddings)
    assert (state.dtype, features.dtype) == (jnp.bfloat16, jnp.float32)
    assert apply(half, "first_features", state).dtype == jnp.float32


def test_the_default_head() -> None:
    config = DraftConfig.for_target(TARGET, num_layers=1, draft_vocab_size=5)
    assert config.block == dataclasses.replace(TARGET, num_layers=1)
    assert (config.num_heads, config.draft_vocab_size, config.num_steps) == (HEADS, 5, 5)
    assert config.embedding == "embed_tokens"
    assert CONFIG.block.num_layers == 2
    assert CONFIG.draft_vocab_size == TARGET.vocab_size


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_heads": 5}, "hidden_size 12 into 5 heads"),
        ({"draft_vocab_size": 12}, r"draft_vocab_size 12 is outside 1\.\.11"),
        ({"draft_vocab_size": 0}, r"draft_vocab_size 0 is outside 1\.\.11"),
        ({"embedding": "lm_heads"}, "embedding 'lm_heads' is neither embed_tokens nor lm_head"),
    ],
)
def test_a_head_that_cannot_be(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIG, **fields)
