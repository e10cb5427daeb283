"""Rotary position embeddings and their length extensions.

Half-split layout: dimension i of a head is rotated together with dimension i + H/2.
Sources: RoFormer (arXiv 2104.09864), position interpolation (2306.15595), dynamic NTK scaling,
YaRN (2309.00071), and the frequency bands of Llama 3.1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

RopeKind = Literal["default", "linear", "dynamic", "llama3", "yarn"]

# Some configs keep these beside the rope fields instead of among them.
_TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
_COMMON_KEYS = {"rope_type", *_TOP_LEVEL_KEYS}
_KEYS: dict[str, set[str]] = {
    "default": set(),
    "linear": {"factor"},
    "dynamic": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
    "yarn": {
        "factor",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
        "finetuned",
    },
}


@dataclasses.dataclass(frozen=True)
class Rope:
    """How positions become angles.

    Attributes:
      head_dim: H, even.
      theta: base of the geometric series of wavelengths.
      kind: the length extension.
      factor: how many times longer the context became (all kinds but `default`).
      original_context: context length before the extension, in tokens.
      low_freq_factor, high_freq_factor: band limits of `llama3`.
      attention_factor: multiplies cos and sin (`yarn`; 1 otherwise).
      beta_fast, beta_slow, truncate: ramp limits of `yarn`, in rotations over the original context.
    """

    head_dim: int
    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0
    original_context: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self) -> None:
        if self.head_dim < 2 or self.head_dim % 2:
            raise ValueError(f"rotary embeddings need an even head_dim >= 2, got {self.head_dim}")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], head_dim: int, max_position: int) -> Rope:
        """Reads `rope_theta`, `rope_scaling` and `rope_parameters` of a config.json.

        Both generations of the format are understood; where both are present they must agree.

        Raises:
          ValueError: an unknown kind or key, a missing key, or two values in conflict.
        """
        scaling = _merged_rope_fields(config)
        kind = scaling.get("rope_type", "default")
        if kind not in _KEYS:
            raise ValueError(f"rope_type {kind!r} is not supported; supported: {sorted(_KEYS)}")
        if float(scaling.get("partial_rotary_factor") or 1.0) != 1.0:
            raise ValueError(
                f"partial_rotary_factor {scaling['partial_rotary_factor']} is not supported"
            )
        unknown = sorted(set(scaling) - _COMMON_KEYS - _KEYS[kind])
        if unknown:
            raise ValueError(f"unknown keys for rope_type {kind!r}: {unknown}")
        theta = scaling.get("rope_theta")
        rope = cls(head_dim=head_dim, theta=10_000.0 if theta is None else float(theta), kind=kind)
        if kind == "default":
            return rope

        original = scaling.get("original_max_position_embeddings")
        if kind in ("linear", "dynamic"):
            # Linear scaling needs none; Hugging Face measures dynamic scaling against
            # max_position_embeddings alone.
            original = max_position
        original = int(original or max_position)
        factor = scaling.get("factor")
        if factor is None and kind == "yarn":
            factor = max_position / original
        if factor is None:
            raise ValueError(f"rope_type {kind!r} needs the key 'factor'")
        rope = dataclasses.replace(rope, factor=float(factor), original_context=original)
        if kind == "llama3":
            missing = [k for k in ("low_freq_factor", "high_freq_factor") if k not in scaling]
            if missing:
                raise ValueError(f"rope_type 'llama3' needs the keys {missing}")
            rope = dataclasses.replace(
                rope,
                low_freq_factor=float(scaling["low_freq_factor"]),
                high_freq_factor=float(scaling["high_freq_factor"]),
            )
        if kind == "yarn":
            rope = dataclasses.replace(
                rope,
                attention_factor=_yarn_attention_factor(scaling, rope.factor),
                beta_fast=float(scaling.get("beta_fast") or 32.0),
                beta_slow=float(scaling.get("beta_slow") or 1.0),
                truncate=bool(scaling.get("truncate", True)),
            )
        return rope

    def inverse_frequencies(self) -> np.ndarray:
        """Angle per position of each rotated pair, f32 [H/2]; `dynamic` gives the unscaled ones."""
        exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
        plain = (1.0 / np.float32(self.theta) ** exponent).astype(np.float32)
        if self.kind == "linear":
            return plain / np.float32(self.factor)
        if self.kind == "llama3":
            rotations = self.original_context * plain / (2 * math.pi)
            ramp = (rotations - self.low_freq_factor) / (
                self.high_freq_factor - self.low_freq_factor
            )
            ramp = np.clip(ramp, 0.0, 1.0)
            return (ramp * plain + (1 - ramp) * plain / self.factor).astype(np.float32)
        if self.kind == "yarn":
            low, high = self._yarn_dimension(self.beta_fast), self._yarn_dimension(self.beta_slow)
            if self.truncate:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, self.head_dim - 1)
            if low == high:
                high += 0.001  # a step instead of a ramp, without dividing by zero
            ramp = np.clip((np.arange(self.head_dim // 2) - low) / (high - low), 0.0, 1.0)
            return (plain * (1 - ramp) + plain / self.factor * ramp).astype(np.float32)
        return plain

    def _yarn_dimension(self, rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        wavelength = self.original_context / (rotations * 2 * math.pi)
        return self.head_dim * math.log(wavelength) / (2 * math.log(self.theta))

    def tables(self, positions: jax.Array, span: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Cosines and sines for `apply`.

        Args:
          positions: int32 [B, T].
          span: int32 [B, T] or broadcastable to it, the sequence length each token was computed
            at; only `dynamic` depends on it.

        Returns:
          (cos, sin), f32 [B, T, H/2].
        """
        angles: jax.Array
        if self.kind == "dynamic":
            length = jnp.maximum(span, self.original_context).astype(jnp.float32)
            stretch = self.factor * length / self.original_context - (self.factor - 1)
            base = self.theta * stretch ** (self.head_dim / (self.head_dim - 2))
            exponent = np.arange(0, self.head_dim, 2, dtype=np.float32) / np.float32(self.head_dim)
            frequencies = base[..., None] ** -exponent  # [B, T, H/2]
        else:
            frequencies = jnp.asarray(self.inverse_frequencies())
        angles = positions[..., None].astype(jnp.float32) * frequencies
        return jnp.cos(angles) * self.attention_factor, jnp.sin(angles) * self.attention_factor


def apply(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates heads by their position.

    Args:
      x: [B, T, n, H], any float dtype; computed in f32.
      cos, sin: f32 [B, T, H/2].

    Returns:
      [B, T, n, H] in x's dtype.
    """
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def _merged_rope_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """One dict from the top-level keys, `rope_scaling` and `rope_parameters`."""
    merged: dict[str, Any] = {}
    top = {k: config[k] for k in _TOP_LEVEL_KEYS if k in config}
    sources = {
        "config.json": top,
        "rope_scaling": config.get("rope_scaling") or {},
        "rope_parameters": config.get("rope_parameters") or {},
    }
    for name, fields in sources.items():
        for key, value in fields.items():
            if value is None:
                continue
            key = "rope_type" if key == "type" else key  # the older spelling
            if key in merged and merged[key] != value:
                raise ValueError(
                    f"config.json states two values for {key}: {merged[key]!r} and, "
                    f"in {name}, {value!r}"
                )
            merged[key] = value
    return merged


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator, denominator = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(numerator) / magnitude(denominator)
    return magnitude(1.0)
