"""Prompts in the format of Spec-Bench: JSON lines of {question_id, task or category, turns}."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from clover_jax.chat import Message, encode_prompt
from infer import cli
from infer.load import Model


@dataclasses.dataclass(frozen=True)
class Question:
    """A conversation of a benchmark.

    Attributes:
      name: its question_id.
      task: what kind of prompt it is.
      turns: what the user says.
    """

    name: str
    task: str
    turns: tuple[str, ...]


def read_questions(path: Path | None, per_task: int | None = None) -> list[Question]:
    """Reads a file.

    Args:
      path: the file, or None for the prompts that come with the package.
      per_task: keep the first so many of each task.

    Raises:
      ValueError: a line that is something else, by its number, or no prompt at all.
    """
    if path is None:
        text = resources.files("infer").joinpath("bench_prompts.jsonl").read_text("utf-8")
    else:
        text = cli.read_text(path)
    questions, kept = [], Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        question = _question(line, f"{path or 'bench_prompts.jsonl'}:{number}")
        kept[question.task] += 1
        if per_task is None or kept[question.task] <= per_task:
            questions.append(question)
    if not questions:
        raise ValueError(f"{path} holds no prompt")
    return questions


def _question(line: str, place: str) -> Question:
    try:
        fields = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{place} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f"{place} holds a {type(fields).__name__}, not an object")
    task, turns = fields.get("task", fields.get("category")), fields.get("turns")
    if "question_id" not in fields or not isinstance(task, str):
        raise ValueError(f"{place} lacks a question_id, or a task or category")
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) for t in turns):
        raise ValueError(f"{place} has no turns, a list of texts")
    for number, turn in enumerate(turns, start=1):
        if not turn.strip():
            raise ValueError(f"{place}: turn {number} is empty")
    return Question(str(fields["question_id"]), task, tuple(turns))


def first_prompts(
    model: Model, questions: Sequence[Question], max_new_tokens: int
) -> list[list[int]]:
    """Token ids of each first turn through the chat template.

    Raises:
      ValueError: a prompt that does not fit the context with its budget, by its name.
    """
    context, prompts = model.config.max_position_embeddings, []
    for question in questions:
        message: Message = {"role": "user", "content": question.turns[0]}
        prompt = encode_prompt(model.tokenizer, [message])
        if len(prompt) + max_new_tokens > context:
            raise ValueError(
                f"question {question.name} has {len(prompt)} tokens; with max_new_tokens "
                f"{max_new_tokens} it needs {len(prompt) + max_new_tokens} of a context of "
                f"{context}"
            )
        prompts.append(prompt)
    return prompts
