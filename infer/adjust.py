"""What the text so far and the user do to the logits: penalties, biases and bans.

All of it is done before temperature, top-k and top-p, and for greedy rows too. Tokens on the path
to a node of the draft tree count for the node as if they had been emitted, so plain and speculative
decoding choose from the same logits.

Axes: B rows, F nodes, C candidates (all of V, or those that the head may propose), d tokens on the
path to a node, X bad words, M their greatest length, S tokens of the text, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from clover_jax.copying import last_tokens


class Adjustments(NamedTuple):
    """Settings of each row.

    Attributes:
      active: bool [B], any of them is on.
      repetition: f32 [B], divides positive and multiplies negative logits of tokens in prompt or
        text (arXiv 1909.05858, section 4.1); 1 is off.
      presence: f32 [B], subtracted for tokens among the new ones.
      frequency: f32 [B], subtracted for each time a token is among the new ones.
      min_new_tokens: int32 [B], before so many new tokens `ends` are banned.
      bias: f32 [B, V], added; -inf bans.
      ends: bool [B, V], tokens that end the row.
      bad_words: int32 [B, X, M], sequences of at least two tokens that must not be completed,
        right-aligned, -1 before them; a row of -1 is none.
    """

    active: jax.Array
    repetition: jax.Array
    presence: jax.Array
    frequency: jax.Array
    min_new_tokens: jax.Array
    bias: jax.Array
    ends: jax.Array
    bad_words: jax.Array


class History(NamedTuple):
    """The text up to a root, as far as adjustments look at it.

    Attributes:
      seen: bool [B, V], the token is in prompt or text.
      counts: int32 [B, V], how often it is among the new tokens.
      ending: int32 [B, M], the last tokens, newest first; -1 beyond the beginning.
      emitted: int32 [B], new tokens.
    """

    seen: jax.Array
    counts: jax.Array
    ending: jax.Array
    emitted: jax.Array


def history(
    settings: Adjustments, text: jax.Array, length: jax.Array, emitted: jax.Array
) -> History:
    """Reads the text.

    Args:
      text: int32 [B, S], prompt and new tokens.
      length: int32 [B], how many of them there are.
      emitted: int32 [B], how many of those are new.
    """
    shape = settings.bias.shape
    rows, places = jnp.arange(shape[0])[:, None], jnp.arange(text.shape[1])

    def tally() -> tuple[jax.Array, jax.Array]:
        written = places < length[:, None]
        new = written & (places >= (length - emitted)[:, None])
        seen = jnp.zeros(shape, bool).at[rows, text].max(written)
        return seen, jnp.zeros(shape, jnp.int32).at[rows, text].add(new.astype(jnp.int32))

    def nothing() -> tuple[jax.Array, jax.Array]:
        return jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32)

    seen, counts = jax.lax.cond(jnp.any(settings.active), tally, nothing)
    ending = last_tokens(text, length[:, None] - 1, settings.bad_words.shape[-1])[:, 0]
    return History(seen, counts, ending, emitted)


def adjust(
    logits: jax.Array,
    settings: Adjustments,
    history: History,
    path: jax.Array,
    candidates: jax.Array | None = None,
) -> jax.Array:
    """Adjusted logits of the tokens that follow each node, f32 [B, F, C]; -inf where banned.

    Args:
      logits: f32 [B, F, C].
      path: int32 [B, F, d], the tokens between the text and what follows; the last is the node's.
      candidates: int32 [B, F, C], which tokens the logits are of; None for all, C = V.
    """

    def of_candidates(table: jax.Array) -> jax.Array:  # [B, V] -> [B, F or 1, C]
        if candidates is None:
            return table[:, None]
        return jnp.take_along_axis(table[:, None], candidates, axis=2)

    def per_row(x: jax.Array) -> jax.Array:  # [B] -> [B, 1, 1]
        return x[:, None, None]

    ids = jnp.arange(logits.shape[-1])[None, None] if candidates is None else candidates
    drafted = path.shape[-1]
    on_path = jnp.zeros(logits.shape, jnp.int32)
    for step in range(drafted):
        on_path += path[..., step, None] == ids
    count = of_candidates(history.counts) + on_path
    seen = of_candidates(history.seen) | (on_path > 0)

    scale = per_row(settings.repetition)
    logits = jnp.where(seen, jnp.where(logits > 0, logits / scale, logits * scale), logits)
    logits -= per_row(settings.frequency) * count + per_row(settings.presence) * (count > 0)
    logits += of_candidates(settings.bias)

    too_early = per_row(history.emitted + drafted < settings.min_new_tokens)
    banned = too_early & of_candidates(settings.ends)
    words, longest = settings.bad_words.shape[1:]
    before = jnp.broadcast_to(history.ending[:, None], (*path.shape[:2], longest))
    ending = jnp.concatenate([path[..., ::-1], before], axis=-1)  # newest first
    for word in range(words):
        tokens = settings.bad_words[:, None, word]  # [B, 1, M]
        earlier = tokens[..., -2::-1]  # all but the last, newest first
        met = jnp.all((earlier < 0) | (earlier == ending[..., : longest - 1]), axis=-1)
        last = tokens[..., -1]
        banned |= (met & (last >= 0))[..., None] & (ids == last[..., None])
    return jnp.where(banned, -jnp.inf, logits)
