"""Copying: what followed the same tokens earlier in the text is one more candidate.

Texts repeat themselves: names, phrases of the prompt, the form of a list. A small head learns that
late, and a comparison finds it at once. So each node of the draft tree looks for the longest
earlier occurrence of the tokens that end in it, and proposes the token that came next there, with
a draft logit that is raised by a bias for the length of the occurrence. It is the copy mechanism of
pointer-generator networks (arXiv 1704.04368) and of the continuous cache (arXiv 1612.04426) in its
smallest form; the biases are fitted after training (train/copy_bias.py).

Axes: B batch, S tokens of the text, F nodes, M tokens compared at most.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Match(NamedTuple):
    """An earlier occurrence of each node's last tokens.

    Attributes:
      place: int32 [B, F], where the token that followed it lies; means nothing where length is 0.
      length: int32 [B, F], tokens that agree, 0..M.
    """

    place: jax.Array
    length: jax.Array


def longest_match(tokens: jax.Array, known: jax.Array, ending: jax.Array) -> Match:
    """The longest earlier occurrence of each node's last tokens; of several the latest.

    Args:
      tokens: int32 [B, S], the text; never negative.
      known: int32 [B, F] or [B, 1], the last place of the text that a node may copy from.
      ending: int32 [B, F, M], the node's own token, the one before it, ...; negative for none.
    """
    slots, longest = tokens.shape[1], ending.shape[2]
    places = jnp.arange(slots)
    agrees = places < known[..., None]  # [B, F, S]: an occurrence ends before the place it gives
    length = jnp.zeros(agrees.shape, jnp.int32)
    for back in range(longest):
        earlier = jnp.where(places >= back, jnp.roll(tokens, back, axis=1), -1)[:, None]
        here = ending[..., back, None]
        agrees = agrees & (earlier == here) & (here >= 0)
        length += agrees
    last = jnp.argmax(length * slots + places, axis=-1).astype(jnp.int32)
    found = jnp.take_along_axis(length, last[..., None], axis=-1)[..., 0]
    return Match(place=jnp.minimum(last + 1, slots - 1), length=found)


def last_tokens(tokens: jax.Array, place: jax.Array, count: int) -> jax.Array:
    """int32 [B, F, M]: the tokens at `place` [B, F], before it, ...; -1 beyond the beginning."""
    places = place[..., None] - jnp.arange(count)
    rows = jnp.arange(len(tokens))[:, None, None]
    return jnp.where(places >= 0, tokens[rows, jnp.maximum(places, 0)], -1)
