"""From the options of a call to arrays with one entry per row, checked.

Axes: B rows, X bad words, M tokens of the longest, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from infer.adjust import Adjustments
from infer.load import Model
from infer.options import Options, Word


def per_row(
    name: str,
    value: Any,
    rows: int,
    dtype: type[np.generic],
    low: float,
    high: float = float("inf"),
) -> np.ndarray:
    """One number for all rows or one for each -> [rows].

    Raises:
      ValueError: not numbers, too many or too few, or one outside of low..high.
    """
    values = np.asarray(value)
    if values.ndim > 1 or (values.ndim == 1 and len(values) != rows):
        raise ValueError(f"{name} holds {values.size} values for {rows} prompts")
    whole = np.issubdtype(dtype, np.integer)
    if not np.issubdtype(values.dtype, np.integer if whole else np.number):
        raise ValueError(f"{name} must be {'whole numbers' if whole else 'numbers'}, got {value!r}")
    bad = values[~((values >= low) & (values <= high) & np.isfinite(values))]
    if bad.size:
        bounds = f"between {low} and {high}" if np.isfinite(high) else f"at least {low}"
        raise ValueError(f"{name} must be {bounds}, got {bad.flat[0]}")
    return np.broadcast_to(values, (rows,)).astype(dtype)


def adjustments(model: Model, rows: int, options: Options) -> Adjustments:
    """What the options of `rows` prompts do to their logits.

    Raises:
      ValueError: an option that cannot be used.
    """
    size = model.config.vocab_size
    repetition = per_row(
        "repetition_penalty", options.get("repetition_penalty", 1.0), rows, np.float32, 1e-3, 1e3
    )
    presence, frequency = (
        per_row(name, options.get(name, 0.0), rows, np.float32, -1e3, 1e3)
        for name in ("presence_penalty", "frequency_penalty")
    )
    least = per_row(
        "min_new_tokens", options.get("min_new_tokens", 0), rows, np.int32, 0, 2**31 - 1
    )
    biases = _each("logit_bias", options.get("logit_bias", {}), rows, _is_mapping)
    words = [
        [ids for word in of_row for ids in _word_ids(model, word)]
        for of_row in _each("bad_words", options.get("bad_words", ()), rows, _is_words)
    ]
    single = [[ids[0] for ids in of_row if len(ids) == 1] for of_row in words]
    longer = [[ids for ids in of_row if len(ids) > 1] for of_row in words]
    stops = _each("stop_token_ids", options.get("stop_token_ids", ()), rows, _is_ids)
    active = (repetition != 1) | (presence != 0) | (frequency != 0) | (least > 0)
    active |= np.array([bool(b or w) for b, w in zip(biases, words, strict=True)])
    return Adjustments(
        active=jnp.asarray(active),
        repetition=jnp.asarray(repetition),
        presence=jnp.asarray(presence),
        frequency=jnp.asarray(frequency),
        min_new_tokens=jnp.asarray(least),
        bias=_bias(biases, single, size),
        ends=_ends(model.eos_ids, stops, size),
        bad_words=jnp.asarray(_table(longer)),
    )


def stop_strings(model: Model, rows: int, options: Options) -> list[tuple[str, ...]]:
    """The stop strings of each prompt.

    Raises:
      ValueError: an empty one, something that is no text, or a model without a tokenizer.
    """
    found = _each("stop", options.get("stop", ()), rows, _is_texts)
    texts = [(row,) if isinstance(row, str) else tuple(row) for row in found]
    for text in (text for row in texts for text in row):
        if not isinstance(text, str) or not text:
            raise ValueError(f"stop must be texts that are not empty, got {text!r}")
        if model.tokenizer is None:
            raise ValueError("stop strings are found in text, and this model has no tokenizer")
    return texts


def _each(name: str, value: Any, rows: int, is_one: Callable[[Any], bool]) -> list[Any]:
    """One value for all rows, or a list of one for each."""
    if is_one(value):
        return [value] * rows
    if not isinstance(value, Sequence) or not all(is_one(v) for v in value):
        raise ValueError(f"{name} {value!r} is neither one value for all prompts nor a list of one")
    if len(value) != rows:
        raise ValueError(f"{name} holds {len(value)} values for {rows} prompts")
    return list(value)


def _is_mapping(value: Any) -> bool:
    return isinstance(value, Mapping)


def _is_ids(value: Any) -> bool:
    listed = isinstance(value, Sequence) and not isinstance(value, str)
    return listed and all(isinstance(i, int) and not isinstance(i, bool) for i in value)


def _is_texts(value: Any) -> bool:
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and all(isinstance(text, str) for text in value)


def _is_words(value: Any) -> bool:
    """A list of words, each a text or a list of token ids that is not empty."""
    if isinstance(value, str) or not isinstance(value, Sequence):
        return False
    return all(isinstance(w, str) or (_is_ids(w) and len(w) > 0) for w in value)


def _word_ids(model: Model, word: Word) -> list[list[int]]:
    """Token sequences of a bad word: a text's alone and after a space."""
    if not isinstance(word, str):
        _check_ids("bad_words", word, model.config.vocab_size)
        return [list(word)]
    if model.tokenizer is None:
        raise ValueError("bad_words given as text need a tokenizer, and this model has none")
    if not word.strip():
        raise ValueError(f"bad_words must not be empty, got {word!r}")
    found = []
    for text in (word, " " + word):
        ids = model.tokenizer(text, add_special_tokens=False, verbose=False).input_ids
        if ids not in found:
            found.append(ids)
    return found


def _check_ids(name: str, ids: Sequence[int], size: int) -> None:
    outside = [i for i in ids if not 0 <= i < size]
    if outside:
        raise ValueError(f"{name} holds token id {outside[0]}, outside the vocabulary of {size}")


def _bias(
    biases: Sequence[Mapping[int, float]], banned: Sequence[Sequence[int]], size: int
) -> jax.Array:
    """f32 [B, V]."""
    if not any(biases) and not any(banned):
        return jnp.zeros((len(biases), size), jnp.float32)
    table = np.zeros((len(biases), size), np.float32)
    for row, (bias, none) in enumerate(zip(biases, banned, strict=True)):
        if not _is_ids(list(bias)):
            raise ValueError(f"logit_bias maps token ids to numbers, got {dict(bias)!r}")
        _check_ids("logit_bias", list(bias), size)
        for token, value in bias.items():
            if not isinstance(value, int | float) or np.isnan(value) or value > 1e6:
                raise ValueError(
                    f"logit_bias of token {token} must be a number up to 1e6, got {value!r}"
                )
            table[row, token] = value
        table[row, list(none)] = -np.inf
        if np.all(np.isneginf(table[row])):
            raise ValueError(f"logit_bias and bad_words leave no token to prompt {row}")
    return jnp.asarray(table)


def _ends(eos_ids: Sequence[int], stops: Sequence[Sequence[int]], size: int) -> jax.Array:
    """bool [B, V]: the model's end-of-sequence tokens and each row's stop tokens."""
    table = np.zeros((len(stops), size), bool)
    table[:, [i for i in eos_ids if i < size]] = True  # an id beyond the vocabulary never comes
    for row, ids in enumerate(stops):
        _check_ids("stop_token_ids", ids, size)
        table[row, list(ids)] = True
    return jnp.asarray(table)


def _table(words: Sequence[Sequence[Sequence[int]]]) -> np.ndarray:
    """int32 [B, X, M], right-aligned; X and M are powers of two, so that few shapes compile."""
    most = max(len(of_row) for of_row in words)
    longest = max((len(ids) for of_row in words for ids in of_row), default=1)
    table = np.full((len(words), power_of_two(most) if most else 0, power_of_two(longest)), -1)
    for row, of_row in enumerate(words):
        for index, ids in enumerate(of_row):
            table[row, index, -len(ids) :] = ids
    return table.astype(np.int32)


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`."""
    return 1 << max(number - 1, 0).bit_length()
