"""Lets the target write its own training conversations (the idea of Magpie, arXiv 2406.08464).

Given nothing but the start of a user turn, an aligned chat model writes the user turn; then it
answers it. Batch k of a run is a pure function of the settings and of k, so a run that was stopped
goes on where it was, with the same result.

    python train/synthesize.py --target smollm2-135m --output chats.jsonl --conversations 4096
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from tqdm import tqdm

from infer import Model, generate, load
from infer.cli import run
from train.options import build, option, options_parser
from train.records import Record, Skip, read_conversations

Message = dict[str, str]

_TEXT = "{text}"
_MARK = "\N{OBJECT REPLACEMENT CHARACTER}"


@dataclasses.dataclass(frozen=True)
class SynthesizeConfig:
    """Settings of a run; each field is a command-line option.

    Raises:
      ValueError: a number that is too small, by name, or no temperature.
    """

    target: str = option("smollm2-135m", "'smollm2-135m', a folder, a GGUF file or a hub name")
    output: str = option("conversations.jsonl", "JSONL file, written batch by batch")
    conversations: int = option(1024, "conversations to write; the filters may leave fewer")
    batch_size: int = option(64, "conversations written side by side")
    turns: int = option(1, "most user turns of a conversation")
    openings: str = option("", "text file, a possible start of the first user turn per line")
    texts: str = option("", "conversations; their answers fill in {text} in the openings")
    user_tokens: int = option(
        160, "most tokens of a user turn, longer ones are dropped; 0: the opening is the turn"
    )
    answer_tokens: int = option(256, "most tokens of an answer; longer ones are cut there")
    user_temperature: float = option(0.8, "temperature of the user turns")
    user_top_p: float = option(0.95, "top-p of the user turns")
    answer_temperatures: tuple[float, ...] = option(
        (0.0,), "temperatures of the answers; batches take them in turn"
    )
    dtype: str | None = option(None, "float32 or bfloat16; by default as the platform likes it")
    seed: int = option(0, "seed of everything")

    def __post_init__(self) -> None:
        least = {"conversations": 1, "batch_size": 1, "turns": 1, "answer_tokens": 1}
        for name, low in (least | {"user_tokens": 0, "seed": 0}).items():
            if getattr(self, name) < low:
                raise ValueError(f"{name} must be at least {low}, got {getattr(self, name)}")
        if not self.user_tokens and not self.openings:
            raise ValueError("user_tokens 0 makes the openings user turns: give --openings")
        if not self.user_tokens and self.turns > 1:
            raise ValueError(f"user_tokens 0 leaves one user turn, not the {self.turns} of turns")
        if not self.answer_temperatures:
            raise ValueError("answer_temperatures holds no temperature")


@dataclasses.dataclass(frozen=True)
class Openings:
    """What the first user turns may begin with.

    Attributes:
      lines: one of them is drawn for each conversation.
      texts: one of them is drawn for each {text} in a line.
    """

    lines: tuple[str, ...] = ("",)
    texts: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.texts and any(_TEXT in line for line in self.lines):
            raise ValueError(f"an opening holds {_TEXT}, but there are no texts to fill it in")

    def draw(self, rng: np.random.Generator) -> str:
        head, *rest = self.lines[rng.integers(len(self.lines))].split(_TEXT)
        return head + "".join(self.texts[rng.integers(len(self.texts))] + part for part in rest)


def write_batch(
    model: Model, config: SynthesizeConfig, openings: Openings, index: int
) -> list[list[Message]]:
    """Writes batch `index`: conversations of {role, content} messages that passed the filters."""
    rng = np.random.default_rng([config.seed, index])
    # Half as many more are begun, since some user turns do not end: answers cost most.
    begun = config.batch_size * 3 // 2 if config.user_tokens else config.batch_size
    starts = [openings.draw(rng) for _ in range(begun)]
    seed = int(rng.integers(2**31))
    answer_temperature = config.answer_temperatures[index % len(config.answer_temperatures)]

    finished: list[list[Message]] = []
    running: list[list[Message]] = [[] for _ in starts]
    for turn in range(config.turns):
        asked = _user_turns(model, config, begun, running, starts, seed + 2 * turn * begun)
        # Where no further turn came, what there is stays.
        finished += [m for m, more in zip(running, asked, strict=True) if m and more is None]
        running = [messages for messages in asked if messages is not None][: config.batch_size]
        if not running:
            break
        answers = _write(
            model,
            config.batch_size,
            running,
            max_new_tokens=config.answer_tokens,
            temperature=answer_temperature,
            seed=seed + (2 * turn + 1) * begun,
        )
        going_on: list[list[Message]] = []
        for messages, (text, reason) in zip(running, answers, strict=True):
            if not text.strip():
                finished += [messages[:-1]] if turn else []
                continue
            messages = [*messages, {"role": "assistant", "content": text}]
            # A cut answer has no natural next turn.
            (going_on if reason == "eos" else finished).append(messages)
        running, starts = going_on, [""] * len(going_on)
    return finished + running


def _user_turns(
    model: Model,
    config: SynthesizeConfig,
    batch_size: int,
    conversations: list[list[Message]],
    starts: list[str],
    seed: int,
) -> list[list[Message] | None]:
    """Each conversation with a user turn more; None where the turn did not end or is empty."""
    assert model.tokenizer is not None
    if not config.user_tokens:
        turns = [start.strip() for start in starts]
        return [[{"role": "user", "content": turn}] if turn else None for turn in turns]
    prompts = [
        model.tokenizer.encode(
            user_turn_prefix(model.tokenizer, messages) + start, add_special_tokens=False
        )
        for messages, start in zip(conversations, starts, strict=True)
    ]
    written = _write(
        model,
        batch_size,
        prompts,
        max_new_tokens=config.user_tokens,
        temperature=config.user_temperature,
        top_p=config.user_top_p,
        seed=seed,
    )
    asked: list[list[Message] | None] = []
    for messages, start, (text, reason) in zip(conversations, starts, written, strict=True):
        content = (start + text).strip()
        complete = reason == "eos" and len(content) > len(start.strip())
        asked.append([*messages, {"role": "user", "content": content}] if complete else None)
    return asked


def _write(
    model: Model, batch_size: int, prompts: Sequence[Any], max_new_tokens: int, **settings: Any
) -> list[tuple[str, str]]:
    """(text, finish reason) of each prompt.

    The batch is filled up with rows that write nothing: another size would be compiled anew.
    """
    spare = batch_size - len(prompts)
    budget = [max_new_tokens] * len(prompts) + [0] * spare
    written = generate(model, [*prompts, *[prompts[0]] * spare], budget, **settings)
    return list(zip(written.texts, written.finish_reasons, strict=True))[: len(prompts)]


def user_turn_prefix(tokenizer: Any, messages: Sequence[Message]) -> str:
    """The rendered conversation up to the point where the next user turn's content begins."""
    rendered = tokenizer.apply_chat_template(
        [*messages, {"role": "user", "content": _MARK}], tokenize=False
    )
    return str(rendered.rpartition(_MARK)[0])


def read_openings(config: SynthesizeConfig) -> Openings:
    """The lines of `openings`, or the empty one alone, and the answers in `texts`.

    Records of `texts` that cannot be used are counted on standard output.

    Raises:
      ValueError: {text} without texts, texts that nothing uses, or texts without answers.
    """
    found = list(read_conversations(config.texts)) if config.texts else []
    skips = [skip for skip in found if isinstance(skip, Skip)]
    if skips:
        print(f"{len(skips)} of {len(found)} records left out; the first: {skips[0]}")
    texts = tuple(
        message["content"].strip()
        for record in found
        if isinstance(record, Record)
        for message in record.messages
        if message["role"] == "assistant"
    )
    if config.texts and not texts:
        raise ValueError(f"{config.texts} holds no answers")
    lines: tuple[str, ...] = ("",)
    if config.openings:
        # A line may end in a space, which belongs to the opening; an empty line opens freely.
        text = Path(config.openings).read_text(encoding="utf-8").removesuffix("\n")
        lines = tuple(line.replace("\\n", "\n") for line in text.split("\n"))
    if texts and not any(_TEXT in line for line in lines):
        raise ValueError(f"no opening holds {_TEXT}, so {config.texts} would not be used")
    return Openings(lines, texts)


def settings_digest(config: SynthesizeConfig, openings: Openings) -> str:
    """8 hexadecimal digits of everything that a batch depends on."""
    free = ("output", "conversations", "openings", "texts")
    fields = {k: v for k, v in dataclasses.asdict(config).items() if k not in free}
    text = json.dumps(fields | dataclasses.asdict(openings), sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=4).hexdigest()


def resume(output: Path, settings: str) -> tuple[int, int]:
    """Cuts off a half-written batch; returns the next batch and the conversations kept.

    Raises:
      ValueError: a file that holds something else, or was written with other settings.
    """
    if not output.exists():
        return 0, 0
    lines = output.read_bytes().split(b"\n")[:-1]  # what no newline ends is no line
    try:
        records = [json.loads(line) for line in lines]
        batches = [record["batch"] for record in records]
        others = {record["settings"] for record in records} - {settings}
    except (ValueError, LookupError, TypeError) as error:
        raise ValueError(f"{output} has lines that this script did not write") from error
    if others:
        raise ValueError(
            f"{output} was written with other settings ({', '.join(sorted(others))}, not "
            f"{settings}); choose another file or the same settings"
        )
    following = batches[-1] + 1 if batches else 0
    if batches and batches.count(batches[-1]) != records[-1].get("of"):
        following -= 1
        lines = [line for line, batch in zip(lines, batches, strict=True) if batch < following]
    os.truncate(output, sum(len(line) + 1 for line in lines))
    return following, len(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs until the conversations asked for have been started."""
    parser = options_parser("Lets a chat model write conversations.", SynthesizeConfig)
    config = build(SynthesizeConfig, parser.parse_args(argv))
    output = Path(config.output)
    output.parent.mkdir(parents=True, exist_ok=True)
    openings = read_openings(config)
    settings = settings_digest(config, openings)
    start, kept = resume(output, settings)
    model = load(target=config.target, dtype=config.dtype)
    if model.tokenizer is None or not model.tokenizer.chat_template:
        raise ValueError(f"{config.target} has no tokenizer with a chat template")
    batches = -(-config.conversations // config.batch_size)
    with (
        output.open("ab") as file,
        tqdm(total=batches, initial=start, unit="batch", desc=output.name) as bar,
    ):
        for index in range(start, batches):
            conversations = write_batch(model, config, openings, index)
            place = {"batch": index, "of": len(conversations), "settings": settings}
            lines = [json.dumps(place | {"messages": m}) for m in conversations]
            file.write("".join(line + "\n" for line in lines).encode())
            file.flush()
            os.fsync(file.fileno())
            kept += len(conversations)
            bar.update()
            bar.set_postfix(kept=kept, of=(index + 1) * config.batch_size)
    print(f"{output}: {kept} conversations")


if __name__ == "__main__":
    sys.exit(run(main))
