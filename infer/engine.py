"""Generation from Python: prompts in, texts out, one compiled program per bucket (see call.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Unpack

from clover_jax.tree import PLAIN, AnyTree, parse_tree
from infer.call import Call, Prompt, prepare
from infer.decode import Acceptance
from infer.load import Model
from infer.options import Options
from infer.session import Generation, Session
from infer.stream import Stream


def generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    **options: Unpack[Options],
) -> Generation:
    """Generates with the target alone.

    Args:
      model: from `load`.
      prompts: one prompt or a list of them. A prompt is a string, which is tokenised as it stands;
        a list of token ids; or a list of {role, content} messages, which goes through the
        tokenizer's chat template.
      max_new_tokens: at most this many tokens; prompt and budget must fit the model's context.
      temperature: 0 is greedy.
      top_p: keeps the fewest most likely tokens whose probability reaches it; 1 is off.
      top_k: keeps this many; 0 is off.
      seed: one per row, or one for all: row i then uses seed + i.
      options: penalties, stop strings and more: see `Options`.
      All settings but the model are scalars or hold one value per prompt.

    Returns:
      A Generation.

    Raises:
      ValueError: a prompt or a setting that cannot be used, with the numbers.
    """
    return _run(
        model,
        prepare(model, prompts, PLAIN, max_new_tokens, temperature, top_p, top_k, seed, **options),
    )


def speculative_generate(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    tree: str | AnyTree | Sequence[Sequence[int]] = "auto",
    acceptance: Acceptance = "shared",
    **options: Unpack[Options],
) -> Generation:
    """Generates the same text as `generate` with the same arguments, in fewer target passes.

    Args:
      tree: what the head proposes: "auto", the fastest that `python -m infer.tune` found on this
        machine (or no tree, where plain decoding was faster; `stats.tree` tells), "paper" (the 25
        nodes of Clover-2), "chain-N", "dynamic-N", a DynamicTree, or a list of child-rank paths
        such as [[0], [1], [0, 0]].
      acceptance: "rejection" accepts as the paper does, which at temperatures above 0 gives
        another text of the same distribution; it is there for comparison.
      Everything else is as in `generate`.

    Raises:
      ValueError: also if the model has no head or the paths form no tree.
    """
    return _run(
        model,
        prepare(
            model,
            prompts,
            _speculative_tree(model, tree),
            max_new_tokens,
            temperature,
            top_p,
            top_k,
            seed,
            acceptance,
            **options,
        ),
    )


def stream(
    model: Model,
    prompts: Prompt | Sequence[Prompt],
    max_new_tokens: int | Sequence[int] = 128,
    temperature: float | Sequence[float] = 0.0,
    top_p: float | Sequence[float] = 1.0,
    top_k: int | Sequence[int] = 0,
    seed: int | Sequence[int] = 0,
    tree: str | AnyTree | Sequence[Sequence[int]] | None = "auto",
    acceptance: Acceptance = "shared",
    **options: Unpack[Options],
) -> Stream:
    """The same text piece by piece, each with its row; after the last, `.generation` is all of it.

    Args:
      tree: as in `speculative_generate`, or None to stream plainly.
      Everything else is as there.

    Raises:
      ValueError: as `speculative_generate`; at once, not with the first piece.
    """
    call = prepare(
        model,
        prompts,
        PLAIN if tree is None else _speculative_tree(model, tree),
        max_new_tokens,
        temperature,
        top_p,
        top_k,
        seed,
        acceptance,
        **options,
    )
    return Stream(model, call)


def _run(model: Model, call: Call) -> Generation:
    session = Session(model, call)
    session.run()
    return session.generation()


def _speculative_tree(
    model: Model, tree: str | AnyTree | Sequence[Sequence[int]]
) -> AnyTree | Literal["auto"]:
    if model.draft is None:
        raise ValueError("this model has no draft head; use generate(), or load one with draft=...")
    return "auto" if tree == "auto" else parse_tree(tree)
