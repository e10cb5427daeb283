"""How the head would have ranked the tokens of known texts: all that a tree's passes depend on.

Axes: R roots, D depths, K ranks, S tokens of a text, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.draft import DraftHead
from clover_jax.target import Target, causal_mask
from infer.adjust import history
from infer.call import Call
from infer.decode import Request, Shape, Weights
from infer.drafter import Drafter
from infer.sampling import gumbel_noise

_ROWS = 32  # roots that are ranked together

Path = tuple[int, ...]


def token_ranks(call: Call, new: Sequence[int], depth: int, width: int) -> np.ndarray:
    """The rank of each true token among the children of the node that the true tokens lead to.

    Args:
      call: of one prompt, with a head.
      new: the text that it gave.
      depth, width: D, K.

    Returns:
      int [R, D] for each root, the new tokens in order but the last: entry [r, d] is the rank of
      token r + 1 + d among the children at depth d + 1; -1 where it is beyond K, or the text over.
    """
    prompt = int(call.prompt_length[0])
    size = max(64, 1 << (prompt + len(new) - 1).bit_length())
    text = np.zeros((1, size), np.int32)
    text[0, :prompt] = call.prompt[0, :prompt]
    text[0, prompt : prompt + len(new)] = new
    length = jnp.asarray([prompt], jnp.int32)
    states = _head_states(call.shape, call.weights, jnp.asarray(text), length)
    ranks = np.full((len(new) - 1, depth), -1)
    for first in range(0, len(ranks), _ROWS):
        roots = np.arange(first, min(first + _ROWS, len(ranks)))
        padded = np.pad(roots, (0, _ROWS - len(roots)), mode="edge")
        found = _ranks(
            call.shape, call.weights, call.request, jnp.asarray(text), length, states,
            jnp.asarray(padded, jnp.int32), depth, width,
        )  # fmt: skip
        ranks[roots] = np.asarray(found)[: len(roots)]
    beyond = np.arange(len(ranks))[:, None] + 1 + np.arange(depth) >= len(new)
    return np.where(beyond, -1, ranks)


def count_passes(ranks: np.ndarray, tree: Collection[Path]) -> int:
    """Verify passes that a tree takes for a text, exactly: int [R, D] of `token_ranks`."""
    passes, root = 0, 0
    while root < len(ranks):
        passes += 1
        root += 1 + _accepted(ranks[root], tree)
    return passes


def _accepted(ranks: np.ndarray, tree: Collection[Path]) -> int:
    path = tuple(ranks.tolist())
    return next((depth for depth in range(len(path)) if path[: depth + 1] not in tree), len(path))


@functools.partial(jax.jit, static_argnums=0)
def _head_states(shape: Shape, weights: Weights, text: jax.Array, prompt: jax.Array) -> jax.Array:
    """s_0 at every token [S, D], from one pass over the text."""
    assert shape.draft is not None and weights.draft is not None  # noqa: PT018
    positions = jnp.arange(text.shape[1])[None]
    span = jnp.where(positions < prompt[:, None], prompt[:, None], positions + 1)
    mask = causal_mask(text.shape[1])
    hidden, _ = Target(shape.target).apply(
        {"params": weights.target}, text, positions, mask, span=span
    )
    following = weights.draft.embedding[jnp.roll(text, -1, axis=1)]
    states, _ = DraftHead(shape.draft).apply(
        {"params": weights.draft.params}, hidden, following, positions, mask, span=span,
        method="advance",
    )  # fmt: skip
    return states[0]


@functools.partial(jax.jit, static_argnums=(0, 7, 8))
def _ranks(
    shape: Shape,
    weights: Weights,
    request: Request,
    text: jax.Array,
    prompt: jax.Array,
    states: jax.Array,
    roots: jax.Array,
    depth: int,
    width: int,
) -> jax.Array:
    """int32 [R, D]; each root is a row of its own for the drafter."""
    assert shape.draft is not None and weights.draft is not None  # noqa: PT018
    rows = len(roots)
    sampling = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), request.sampling)
    text = jnp.broadcast_to(text, (rows, text.shape[1]))
    root = prompt + roots  # the place of the last known token
    past = history(sampling.adjustments, text, root + 1, roots + 1)
    noise = [gumbel_noise(sampling, root + 1 + d, shape.target.vocab_size) for d in range(depth)]
    drafter = Drafter(shape.draft, weights.draft, text, root, noise, sampling, past)
    frontier, found = drafter.start(states[root - 1]), []
    for d in range(depth):
        children, _ = drafter.propose(frontier).best(width)
        true = jnp.take(text[0], root + 1 + d, mode="clip")[:, None]
        match = children[:, 0] == true  # [R, K]
        found.append(jnp.where(jnp.any(match, axis=1), jnp.argmax(match, axis=1), -1))
        path = jnp.concatenate([frontier.path, true[..., None]], axis=2)
        frontier = drafter.extend(frontier.states, path)
    return jnp.stack(found, axis=1)
