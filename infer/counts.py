"""What runs cost, added up: tokens, target passes, accepted drafts and seconds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from infer.session import Generation


@dataclasses.dataclass(frozen=True)
class Counts:
    """The cost of one run, or of several together.

    Attributes:
      tokens: new tokens, each text's end-of-sequence token included.
      decoded: those after the first of each text, which the prefill emits.
      passes: forward passes of the target, prefills included.
      verified: those without the prefills.
      accepted: for depth 1, 2, ... of the tree, verify passes that kept a draft token there.
      prefill_seconds, decode_seconds: wall time.
    """

    tokens: int = 0
    decoded: int = 0
    passes: int = 0
    verified: int = 0
    accepted: tuple[int, ...] = ()
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0

    @classmethod
    def of(cls, generation: Generation) -> Counts:
        """The cost of one call, all of its rows together."""
        lengths = [len(row) for row in generation.token_ids]
        stats = generation.stats
        verified = sum(stats.target_passes) - len(lengths)
        return cls(
            tokens=sum(lengths),
            decoded=sum(max(n - 1, 0) for n in lengths),
            passes=sum(stats.target_passes),
            verified=verified,
            accepted=tuple(round(share * verified) for share in stats.accepted_by_depth),
            prefill_seconds=stats.prefill_seconds,
            decode_seconds=stats.decode_seconds,
        )

    def __add__(self, other: Counts) -> Counts:
        depth = max(len(self.accepted), len(other.accepted))
        padded = (c.accepted + (0,) * (depth - len(c.accepted)) for c in (self, other))
        return Counts(
            tokens=self.tokens + other.tokens,
            decoded=self.decoded + other.decoded,
            passes=self.passes + other.passes,
            verified=self.verified + other.verified,
            accepted=tuple(a + b for a, b in zip(*padded, strict=True)),
            prefill_seconds=self.prefill_seconds + other.prefill_seconds,
            decode_seconds=self.decode_seconds + other.decode_seconds,
        )

    @property
    def seconds(self) -> float:
        """Prefill and decoding."""
        return self.prefill_seconds + self.decode_seconds

    @property
    def tokens_per_second(self) -> float:
        """New tokens per second of prefill and decoding."""
        return ratio(self.tokens, self.seconds)

    @property
    def decoded_per_second(self) -> float:
        """Tokens after the first of each text, per second of decoding."""
        return ratio(self.decoded, self.decode_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """New tokens per target pass, prefills included."""
        return ratio(self.tokens, self.passes)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """For depth 1, 2, ...: the share of verify passes that kept a draft token there."""
        return tuple(ratio(count, self.verified) for count in self.accepted)


def total(counts: Iterable[Counts]) -> Counts:
    """The cost of several runs together."""
    return sum(counts, Counts())


def ratio(part: float, whole: float) -> float:
    """part / whole, and 0 where there is nothing to divide by."""
    return part / whole if whole else 0.0
