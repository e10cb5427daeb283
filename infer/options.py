"""The further settings of a call, by the names that `generate`, `speculative_generate` and `stream`
share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypedDict

Word = str | Sequence[int]


class Options(TypedDict, total=False):
    """What may be asked for besides length, temperature, top-p, top-k and seed.

    Each is one value for all prompts or a list with one per prompt, except `num_samples` and
    `logprobs`, which hold for the whole call. Processing is in this order: penalties, logit bias,
    bans (bad words, and ends before `min_new_tokens`), temperature, top-k, top-p, min-p.

    Attributes:
      min_p: drops tokens less likely than this share of the most likely one; 0 is off.
      repetition_penalty: divides the positive and multiplies the negative logits of tokens that
        occur in prompt or text (arXiv 1909.05858, section 4.1); 1 is off.
      presence_penalty: subtracted from the logit of each token that occurs among the new ones.
      frequency_penalty: subtracted from it once for each time it occurs among the new ones.
      min_new_tokens: no end-of-sequence or stop token before so many new tokens.
      logit_bias: token id -> what its logit gains.
      bad_words: texts or sequences of token ids that are never completed.
      stop: texts that end the row; what comes out ends before the first of them. The token ids
        include the token that completed it.
      stop_token_ids: tokens that end a row as the model's own end-of-sequence tokens do.
      num_samples: texts per prompt, which are drawn with consecutive seeds; the results of a prompt
        lie side by side.
      logprobs: also return the log-probability of each new token under the model's own
        distribution, before any of the processing above.
    """

    min_p: float | Sequence[float]
    repetition_penalty: float | Sequence[float]
    presence_penalty: float | Sequence[float]
    frequency_penalty: float | Sequence[float]
    min_new_tokens: int | Sequence[int]
    logit_bias: Mapping[int, float] | Sequence[Mapping[int, float]]
    bad_words: Sequence[Word] | Sequence[Sequence[Word]]
    stop: str | Sequence[str] | Sequence[Sequence[str]]
    stop_token_ids: Sequence[int] | Sequence[Sequence[int]]
    num_samples: int
    logprobs: bool
