"""Texts and chats to token ids, by the same code for training and for inference.

`encode_prompt` makes what the model is asked to continue. `encode_conversation` makes a training
sample: the ids of a whole chat and a mask of what the model itself would have written, that is
every assistant turn and the end-of-turn text that closes it (`<|im_end|>`, `<|eot_id|>`, `</s>`).

How a turn is found, for any chat template and without knowing its headers:

- It starts where the prompt for it ends: at the length of the messages before it, rendered with the
  generation prompt. Where that is no prefix of the whole text (templates that move the system
  message, or open a thought in the generation prompt alone), it starts with the turn's content.
- Its content is found by rendering the chat again with a marker in its place, so a user who writes
  an assistant header, or the same words as the assistant, changes nothing.
- Its end-of-turn text is what the template writes after the marker when the turn is the last
  message, without the whitespace at its end: the next turn's prompt supplies that.

A tokenizer without a chat template gets the format of Vicuna v1.1, whose checkpoints have none:
`{system} USER: {text} ASSISTANT: {text}</s>USER: ...`, with the tokenizer's EOS for `</s>`.

Legend: T tokens of one sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jinja2
import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Message = dict[str, str]

# The system message Vicuna v1.1 was trained with; used where a chat has none of its own.
VICUNA_SYSTEM = (
    "A chat between a curious user and an artificial intelligence assistant. "
    "The assistant gives helpful, detailed, and polite answers to the user's questions."
)
_MARK = "\ue000"  # a private-use character: no text of a chat holds it, save by intent


class ChatError(ValueError):
    """A prompt or conversation that cannot be encoded; the message says which part and why."""


@dataclass(frozen=True)
class RenderedChat:
    """A conversation as text. `turns` are the [start, end) character spans that are supervised."""

    text: str
    turns: tuple[tuple[int, int], ...]


def encode_prompt(tokenizer: PreTrainedTokenizerFast | None, prompt: object) -> list[int]:
    """Token ids of one prompt.

    Args:
        tokenizer: a fast tokenizer, or None if the model has none (then only ids are accepted).
        prompt: a string (plain text, no template), a list of token ids (returned as it is: their
            range is for the model to check), or a list of `{"role", "content"}` messages, which is
            put through the chat template and ends with its generation prompt.

    Returns:
        The ids. If the tokenizer puts a BOS in front of texts, there is exactly one in front, also
        where the template or the text itself spells it out.

    Raises:
        ChatError: no tokenizer for a text, a malformed message, or a chat the template refuses.
    """
    if isinstance(prompt, str):
        tokenizer = _required(tokenizer)
        ids = tokenizer(_encodable(prompt, "the prompt"), verbose=False).input_ids
        if ids[:2] == [tokenizer.bos_token_id] * 2 and _adds_bos(tokenizer):
            return ids[1:]
        return ids
    if not isinstance(prompt, list | tuple):
        raise ChatError(
            f"a prompt is a string, a list of token ids or a list of messages, not {_kind(prompt)}"
        )
    if all(isinstance(item, int | np.integer) and not isinstance(item, bool) for item in prompt):
        return [int(item) for item in prompt]
    tokenizer = _required(tokenizer)
    text = _render(tokenizer, check_messages(prompt), generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    return _bos_to_add(tokenizer, ids) + ids


def encode_conversation(
    tokenizer: PreTrainedTokenizerFast | None,
    messages: Sequence[Mapping[str, Any]],
    max_length: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids and loss mask of one conversation.

    Args:
        tokenizer: a fast tokenizer.
        messages: `{"role", "content"}` messages, at least one of them by the assistant.
        max_length: cut both outputs after this many tokens.

    Returns:
        ids, int32 [T], and mask, bool [T]: True on the tokens of each assistant turn and on its
        end-of-turn token. The ids of `encode_prompt(messages[:i])` are those in front of turn i,
        unless the template renders a chat differently once it goes on.

    Raises:
        ChatError: as `encode_prompt`; also if there is no assistant turn (within `max_length`), if
            the template closes turns with nothing, or if a turn cannot be found in what it writes.
    """
    if max_length is not None and max_length < 1:
        raise ChatError(f"max_length must be at least 1, not {max_length}")
    tokenizer = _required(tokenizer)
    rendered = render_conversation(tokenizer, check_messages(messages))
    ids, mask = tokenize_conversations(tokenizer, [rendered])[0]
    if not mask[:max_length].any():
        raise ChatError(
            f"no assistant token among the first {max_length} of the chat's {len(ids)} tokens"
        )
    return ids[:max_length], mask[:max_length]


def check_messages(messages: Sequence[Any]) -> list[Message]:
    """The messages as plain role and text; a list of `{"type": "text"}` parts is concatenated.

    Raises:
        ChatError: no messages, a message without role or text, a part that is not text, or text
            that is not valid Unicode.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ChatError(f"a chat is a non-empty list of messages, not {_kind(messages)}")
    checked = []
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ChatError(f"message {i} is {_kind(message)}, not an object with role and content")
        role = message.get("role")
        if not isinstance(role, str):
            raise ChatError(f"the role of message {i} is {_kind(role)}, not a string")
        text = _text(message.get("content"), f"the content of message {i}")
        checked.append({"role": role, "content": text})
    return checked


def render_conversation(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message]
) -> RenderedChat:
    """The conversation as the template writes it, with the span of each assistant turn.

    `messages` come from `check_messages`. Raises as `encode_conversation`.
    """
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ChatError(f"none of the {len(messages)} messages is an assistant turn")
    text = _render(tokenizer, messages)
    mark = _MARK
    while mark in text:
        mark += _MARK
    _, closing = _around(tokenizer, messages[: turns[-1] + 1], turns[-1], mark)
    closing = closing.rstrip()
    if not closing:
        raise ChatError(
            "the chat template writes no end-of-turn text after an assistant turn: "
            "the end of an answer could not be learned"
        )
    spans = []
    for i in turns:
        before, after = _around(tokenizer, messages, i, mark)
        prompt = _render(tokenizer, messages[:i], generation_prompt=True) if i else None
        start = len(prompt if prompt is not None and text.startswith(prompt) else before)
        content_end = len(text) - len(after)
        if (
            not text.startswith(before[:start])
            or not text.endswith(after)
            or not after.startswith(closing)
            or start > content_end
        ):
            raise ChatError(
                f"message {i}, an assistant turn, cannot be found in the rendered chat: the chat "
                "template changes what stands around a turn with its content or place"
            )
        if not text[start:content_end].strip():  # an empty turn: its end-of-turn text alone
            start = content_end + len(closing) - len(closing.lstrip())
        spans.append((start, content_end + len(closing)))
    if sum(end - start for start, end in spans) >= len(text.rstrip()):
        raise ChatError("the chat template writes nothing but assistant turns: nothing to answer")
    return RenderedChat(text, tuple(spans))


def tokenize_conversations(
    tokenizer: PreTrainedTokenizerFast, chats: Sequence[RenderedChat]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids, int32 [T], and mask, bool [T], of each chat; all chats go to the tokenizer at once.

    A token is supervised if it holds any character of a turn.
    """
    if not chats:
        return []
    if not getattr(tokenizer, "is_fast", False):
        raise ChatError(
            f"a loss mask needs the character offsets of a fast tokenizer, "
            f"and {type(tokenizer).__name__} is none"
        )
    encoded = tokenizer(
        [chat.text for chat in chats],
        add_special_tokens=False,
        return_offsets_mapping=True,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    samples = []
    for chat, ids, offsets in zip(chats, encoded.input_ids, encoded.offset_mapping, strict=True):
        start, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
        # Some tokenizers leave spaces out of the offsets: spaces that end at p are then (p, p), and
        # belong to what is before p. No turn ends in spaces, so only its start has to be exact.
        mask = np.zeros(len(ids), bool)
        for turn_start, turn_end in chat.turns:
            mask |= (start < turn_end) & (end > turn_start)
        bos = _bos_to_add(tokenizer, ids)
        samples.append(
            (np.array(bos + ids, np.int32), np.array([False] * len(bos) + [*mask], bool))
        )
    return samples


def _around(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], i: int, mark: str
) -> tuple[str, str]:
    """What the template writes before and after the content of message i, an assistant turn."""
    marked = {"role": "assistant", "content": mark}
    pieces = _render(tokenizer, [*messages[:i], marked, *messages[i + 1 :]]).split(mark)
    if len(pieces) != 2:
        raise ChatError(f"the chat template does not write the content of message {i} exactly once")
    return pieces[0], pieces[1]


def _render(
    tokenizer: PreTrainedTokenizerFast,
    messages: Sequence[Message],
    generation_prompt: bool = False,
) -> str:
    if not tokenizer.chat_template:
        return _render_vicuna(tokenizer.eos_token, messages, generation_prompt)
    try:
        return tokenizer.apply_chat_template(
            list(messages), tokenize=False, add_generation_prompt=generation_prompt
        )
    except jinja2.TemplateError as error:
        raise ChatError(f"the chat template refuses this conversation: {error}") from error


def _render_vicuna(eos: str | None, messages: Sequence[Message], generation_prompt: bool) -> str:
    if eos is None:
        raise ChatError("the tokenizer has no chat template, and no EOS token for Vicuna's format")
    has_system = messages[0]["role"] == "system"
    text = messages[0]["content"] if has_system else VICUNA_SYSTEM
    gap = " " if text else ""
    expected = "user"
    for i, message in enumerate(messages[has_system:], start=int(has_system)):
        role, content = message["role"], message["content"]
        if role != expected:
            raise ChatError(
                f"in Vicuna's format the role of message {i} must be {expected!r}, not {role!r}"
            )
        if role == "user":
            text += f"{gap}USER: {content}"
            expected = "assistant"
        else:
            text += " ASSISTANT:" + (f" {content}" if content else "") + eos
            gap, expected = "", "user"
    if not generation_prompt:
        return text
    if expected == "user":
        raise ChatError("a chat in Vicuna's format must end with a user message to be answered")
    return text + " ASSISTANT:"


def _adds_bos(tokenizer: PreTrainedTokenizerFast) -> bool:
    bos = tokenizer.bos_token_id
    return bos is not None and tokenizer("").input_ids[:1] == [bos]


def _bos_to_add(tokenizer: PreTrainedTokenizerFast, ids: list[int]) -> list[int]:
    """[BOS] if the tokenizer puts one in front of texts and `ids`, a rendered chat, lack it."""
    if ids[:1] == [tokenizer.bos_token_id] or not _adds_bos(tokenizer):
        return []
    return [tokenizer.bos_token_id]


def _text(content: object, what: str) -> str:
    if isinstance(content, str):
        return _encodable(content, what)
    if not isinstance(content, list | tuple):
        raise ChatError(f"{what} is {_kind(content)}, not text")
    parts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        text = part.get("text") if isinstance(part, Mapping) else None
        if kind != "text" or not isinstance(text, str):
            described = f"of type {kind!r}" if isinstance(kind, str) else _kind(part)
            raise ChatError(f"{what} has a part that is not text ({described})")
        parts.append(_encodable(text, what))
    return "".join(parts)


def _encodable(text: str, what: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ChatError(
            f"{what} is not valid Unicode: lone surrogate at character {error.start}"
        ) from error
    return text


def _required(tokenizer: PreTrainedTokenizerFast | None) -> PreTrainedTokenizerFast:
    if tokenizer is None:
        raise ChatError("the model has no tokenizer: give prompts as lists of token ids")
    return tokenizer


def _kind(value: object) -> str:
    if value is None:
        return "missing"
    if isinstance(value, list | tuple) and not value:
        return "an empty list"
    return f"of type {type(value).__name__}"
