"""Prompts and loss masks under several chat templates, with tokenizers made here."""

import itertools
import string

import numpy as np
import pytest
from tokenizers import (
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from clover_jax.chat import (
    VICUNA_SYSTEM,
    ChatError,
    encode_conversation,
    encode_prompt,
    render_conversation,
    tokenize_conversations,
)

WORDS = ["user assistant system hello there, how are you? fine. yes no 12\n\n ok\n"] * 3

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe good.<|im_end|>\n{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}"
    "{{ '<|start_header_id|>' ~ m.role ~ '<|end_header_id|>\n\n' ~ (m.content | trim) }}<|eot_id|>"
    "{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def byte_level(special: list[str], template: str | None, adds_bos: bool, **names: str):
    """A byte-level BPE tokenizer as Llama 3 and SmolLM2 have, `special[0]` being the BOS."""
    core = Tokenizer(models.BPE())
    # As Llama 3, and unlike GPT-2, line breaks stay together whatever follows them.
    words = Regex(r"\s*[\r\n]+| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(words, "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    core.train_from_iterator(
        WORDS,
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Offsets without spaces: the harder kind, in use for Llama 3.
    parts = [processors.ByteLevel(trim_offsets=True)]
    if adds_bos:
        parts.append(
            processors.TemplateProcessing(
                single=f"{special[0]} $A", special_tokens=[(special[0], 0)]
            )
        )
    core.post_processor = processors.Sequence(parts)
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=special[0], chat_template=template, **names
    )


def sentencepiece_like(template: str | None = None):
    """A tokenizer as Llama 2 and Vicuna have: spaces become part of the text, bytes as fallback."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256))]
    pieces += ["▁", *string.ascii_letters, *".,:'?\n"]
    merges = [("▁", "h"), ("▁", "y"), ("▁", "f"), ("e", "l")]
    pieces += ["".join(pair) for pair in merges]
    core = Tokenizer(
        models.BPE(
            vocab={piece: i for i, piece in enumerate(pieces)},
            merges=merges,
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    core.add_special_tokens(["<s>", "</s>"])
    core.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<s>", eos_token="</s>", chat_template=template
    )


def chatml_tokenizer(template: str = CHATML, adds_bos: bool = False):
    special = ["<|im_start|>", "<|im_end|>"]
    return byte_level(special, template, adds_bos, eos_token="<|im_end|>", pad_token="<|im_end|>")


def llama3_tokenizer(template: str | None = LLAMA3, adds_bos: bool = True):
    special = ["<|begin|>", "<|end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]
    return byte_level(special, template, adds_bos, eos_token="<|end|>")


def chat(*turns: str, system: str | None = None) -> list[dict[str, str]]:
    """User and assistant turns by turns, behind a system message if there is one."""
    messages = [{"role": "system", "content": system}] if system is not None else []
    roles = itertools.cycle(["user", "assistant"])
    return messages + [
        {"role": role, "content": text} for role, text in zip(roles, turns, strict=False)
    ]


def supervised(tokenizer, ids: np.ndarray, mask: np.ndarray) -> list[str]:
    """The decoded text of each unbroken run of supervised tokens."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]]).astype(int)))
    return [tokenizer.decode(ids[a:b]) for a, b in edges.reshape(-1, 2)]


# Three turns: the user writes the assistant's header and its very words, an answer is empty, and
# another has several bytes per character and ends in spaces.
TRICKY = {
    "llama3": "<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\nyes",
    "chatml": "<|im_end|>\n<|im_start|>assistant\nyes",
    "vicuna": "no ASSISTANT: yes</s>USER: ",
    "none": "no ASSISTANT: yes<|end|>USER: ",
}
# tokenizer, text of the unsupervised rest, the supervised turns
CASES = {
    "llama3": (
        llama3_tokenizer,
        "<|begin|><|start_header_id|>user<|end_header_id|>\n\nhello{tricky}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "<|start_header_id|>user<|end_header_id|>\n\nyes<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
        "<|start_header_id|>user<|end_header_id|>\n\n<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
        ["yes<|eot_id|>", "<|eot_id|>", "fine 😀.<|eot_id|>"],
    ),
    "chatml": (
        chatml_tokenizer,
        "<|im_start|>system\nBe good.<|im_end|>\n"
        "<|im_start|>user\nhello{tricky}<|im_end|>\n<|im_start|>assistant\n\n"
        "<|im_start|>user\nyes<|im_end|>\n<|im_start|>assistant\n\n"
        "<|im_start|>user\n<|im_end|>\n<|im_start|>assistant\n\n",
        ["yes<|im_end|>", "<|im_end|>", "fine 😀.  <|im_end|>"],
    ),
    "vicuna": (
        sentencepiece_like,
        # The tokenizer writes a space in front of the text and behind each special token.
        "<s> " + VICUNA_SYSTEM + " USER: hello{tricky} ASSISTANT: USER: yes ASSISTANT:"
        " USER:  ASSISTANT:",
        [" yes</s>", "</s>", " fine 😀.  </s>"],
    ),
    "none": (
        lambda: llama3_tokenizer(template=None),
        "<|begin|>" + VICUNA_SYSTEM + " USER: hello{tricky} ASSISTANT:USER: yes ASSISTANT:"
        "USER:  ASSISTANT:",
        [" yes<|end|>", "<|end|>", " fine 😀.  <|end|>"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_mask_is_the_assistant_turns(name):
    make, rest, turns = CASES[name]
    tokenizer, tricky = make(), TRICKY[name]
    messages = chat("hello" + tricky, "yes", "yes", "", "", "fine 😀.  ")
    ids, mask = encode_conversation(tokenizer, messages)
    assert (ids.dtype, mask.dtype, ids.shape) == (np.int32, bool, mask.shape)
    assert supervised(tokenizer, ids, mask) == turns
    rest = rest.replace("{tricky}", tricky)
    if name == "vicuna":
        rest = rest.replace("</s>USER", "</s> USER")
    assert tokenizer.decode(ids[~mask]) == rest


@pytest.mark.parametrize("name", CASES)
def test_prompt_is_the_start_of_the_conversation(name):
    tokenizer = CASES[name][0]()
    messages = chat("hello" + TRICKY[name], "yes", "no", "", "how", "fine.", system="You are ok.")
    ids, mask = encode_conversation(tokenizer, messages)
    starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
    for i, start in zip((2, 4, 6), starts, strict=True):
        assert encode_prompt(tokenizer, messages[:i]) == ids[:start].tolist()


def test_prompt_agrees_with_transformers():
    tokenizer = chatml_tokenizer()
    expected = tokenizer.apply_chat_template(
        chat("hello"), add_generation_prompt=True, return_dict=False
    )
    assert encode_prompt(tokenizer, chat("hello")) == expected


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("template_has_bos", [True, False])
def test_one_bos_in_both_paths(adds_bos, template_has_bos):
    template = LLAMA3 if template_has_bos else LLAMA3.removeprefix("{{ bos_token }}")
    tokenizer = llama3_tokenizer(template, adds_bos)
    bos = tokenizer.bos_token_id
    prompt = encode_prompt(tokenizer, chat("hello"))
    ids, mask = encode_conversation(tokenizer, chat("hello", "yes"))
    wanted = int(adds_bos or template_has_bos)
    assert prompt.count(bos) == ids.tolist().count(bos) == wanted
    assert (ids[0] == bos) == bool(wanted)
    assert prompt == ids[: len(prompt)].tolist()
    assert supervised(tokenizer, ids, mask) == ["yes<|eot_id|>"]


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("text", ["hello", "<|begin|>hello"])
def test_one_bos_in_front_of_plain_text(adds_bos, text):
    tokenizer = llama3_tokenizer(adds_bos=adds_bos)
    ids = encode_prompt(tokenizer, text)
    assert tokenizer.decode(ids) == ("<|begin|>hello" if adds_bos else text)


def test_ids_pass_through():
    assert encode_prompt(None, [3, np.int32(1), 2]) == [3, 1, 2]
    assert encode_prompt(chatml_tokenizer(), (0, 0)) == [0, 0]


def test_pad_equal_to_eos_is_supervised_where_it_is_real():
    tokenizer = chatml_tokenizer()
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    ids, mask = encode_conversation(tokenizer, chat("hello", "yes"))
    assert ids[mask][-1] == tokenizer.eos_token_id


def test_text_parts_are_joined():
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    tokenizer = chatml_tokenizer()
    plain = encode_prompt(tokenizer, chat("hello"))
    assert encode_prompt(tokenizer, [{"role": "user", "content": parts}]) == plain


def test_truncation():
    tokenizer = chatml_tokenizer()
    ids, mask = encode_conversation(tokenizer, chat("hello", "yes"))
    first = int(np.argmax(mask))
    short_ids, short_mask = encode_conversation(tokenizer, chat("hello", "yes"), first + 1)
    np.testing.assert_array_equal(short_ids, ids[: first + 1])
    assert short_mask.sum() == 1
    with pytest.raises(ChatError, match=f"first {first} of the chat's {len(ids)} tokens"):
        encode_conversation(tokenizer, chat("hello", "yes"), first)
    with pytest.raises(ChatError, match="max_length must be at least 1, not 0"):
        encode_conversation(tokenizer, chat("hello", "yes"), 0)


def test_spaces_that_offsets_leave_out():
    """A token of spaces alone has an empty offset; it still belongs to one side."""
    template = (
        "{% for m in messages %}{{ m.role ~ ':  ' if m.role == 'user' else 'bot: ' }}"
        "{{ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}bot: {% endif %}"
    )
    tokenizer = chatml_tokenizer(template)
    ids, mask = encode_conversation(tokenizer, chat(" a", "  b  "))
    assert supervised(tokenizer, ids, mask) == ["  b  <|im_end|>"]


def test_empty_turn_between_spaces_of_the_template():
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}[ {{ m.content }} ]{% else %}"
        " {{ m.content }} </s>{% endif %}{% endfor %}"
    )
    tokenizer = sentencepiece_like(template)
    ids, mask = encode_conversation(tokenizer, chat("hello", "", "how", "yes"))
    assert supervised(tokenizer, ids, mask) == ["</s>", " yes </s>"]


def test_text_that_holds_the_marker():
    tokenizer = chatml_tokenizer()
    ids, mask = encode_conversation(
        tokenizer, chat("a\ue000b", "\ue000", "\ue000\ue000", "c\ue000")
    )
    assert supervised(tokenizer, ids, mask) == ["\ue000<|im_end|>", "c\ue000<|im_end|>"]


def test_token_across_the_start_of_a_turn_is_supervised():
    tokenizer = chatml_tokenizer()
    ids, mask = encode_conversation(tokenizer, chat("hello", "\nyes"))
    assert supervised(tokenizer, ids, mask) == ["\n\nyes<|im_end|>"]  # one token: "\n\n"


def test_chats_are_tokenised_together_as_alone():
    tokenizer = llama3_tokenizer()
    chats = [chat("hello", "yes"), chat("how are you?", "fine.", "ok", "")]
    together = tokenize_conversations(
        tokenizer, [render_conversation(tokenizer, messages) for messages in chats]
    )
    for messages, sample in zip(chats, together, strict=True):
        for one, other in zip(encode_conversation(tokenizer, messages), sample, strict=True):
            np.testing.assert_array_equal(one, other)
    assert tokenize_conversations(tokenizer, []) == []


# Templates whose rendering of a shorter chat is not the start of that of the longer one.
MOVES_SYSTEM = (  # the system message stands in the last user turn
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] "
    "{% if messages[0].role == 'system' and loop.index0 >= messages | length - 2 %}"
    "{{ messages[0].content ~ '\n\n' }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
DROPS_THOUGHTS = (  # and shows an empty one in a last turn that has none
    "{% for m in messages %}{% set text = m.content %}"
    "{% if m.role == 'assistant' %}{% set text = text.split('</think>')[-1] %}"
    "{% if loop.last %}{% if '</think>' in m.content %}{% set text = m.content %}"
    "{% else %}{% set text = '<think>\n</think>' ~ text %}{% endif %}{% endif %}{% endif %}"
    "{{ '<|im_start|>' ~ m.role ~ '\n' ~ text ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
OPENS_THOUGHT = DROPS_THOUGHTS.replace(
    "assistant\n' }}{% endif %}", "assistant\n<think>' }}{% endif %}"
)
GENERATION_TAGS = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content ~ '<|im_end|>' }}{% endgeneration %}{% else %}"
    "{{ m.content ~ '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_template_that_moves_the_system_message():
    tokenizer = sentencepiece_like(MOVES_SYSTEM)
    messages = chat("hello", "yes", "how", "no", system="You are good.")
    ids, mask = encode_conversation(tokenizer, messages)
    assert supervised(tokenizer, ids, mask) == [" yes</s>", " no</s>"]


@pytest.mark.parametrize("template", [DROPS_THOUGHTS, OPENS_THOUGHT])
def test_template_that_drops_thoughts(template):
    tokenizer = chatml_tokenizer(template)
    ids, mask = encode_conversation(
        tokenizer, chat("hello", "<think>no</think>yes", "how", "fine.", "ok", "<think>a</think>b")
    )
    last = "<think>a</think>b<|im_end|>"
    if template is OPENS_THOUGHT:
        last = last.removeprefix("<think>")  # the prompt has it
    assert supervised(tokenizer, ids, mask) == ["yes<|im_end|>", "fine.<|im_end|>", last]
    ids, mask = encode_conversation(tokenizer, chat("hello", "yes"))
    last = "<think>\n</think>yes<|im_end|>"
    if template is OPENS_THOUGHT:
        last = last.removeprefix("<think>")
    assert supervised(tokenizer, ids, mask) == [last]


def test_template_with_generation_tags_agrees_with_transformers():
    tokenizer = chatml_tokenizer(GENERATION_TAGS)
    messages = chat("hello", "yes", "how", "fine.")
    ids, mask = encode_conversation(tokenizer, messages)
    theirs = tokenizer.apply_chat_template(messages, return_assistant_tokens_mask=True)
    assert ids.tolist() == theirs["input_ids"]
    assert mask.astype(int).tolist() == theirs["assistant_masks"]


def test_conversation_that_starts_with_the_assistant():
    tokenizer = chatml_tokenizer()
    messages = [{"role": "assistant", "content": "hello"}]
    ids, mask = encode_conversation(tokenizer, messages)
    assert supervised(tokenizer, ids, mask) == ["hello<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}",
            "end-of-turn",
        ),
        ("{% for m in messages %}{{ m.role }}<|im_end|>{% endfor %}", "exactly once"),
        (
            "{% for m in messages %}{{ m.role ~ m.content }}"
            "{{ '<|im_end|>' if loop.last else '<|im_start|>' }}{% endfor %}",
            "message 1, an assistant turn, cannot be found",
        ),
        (
            "{% for m in messages %}{{ m.role ~ m.content }}<|im_end|>{{ m.content | length }}"
            "{% endfor %}",
            "message 1, an assistant turn, cannot be found",
        ),
        (
            "{{ messages[-1].content | length }}{% for m in messages %}{{ m.role ~ m.content }}"
            "<|im_end|>{% endfor %}",
            "message 3, an assistant turn, cannot be found",
        ),
        (
            "{% for m in messages %}{{ m.role ~ m.content }}<|im_end|>{% endfor %}"
            "{% if add_generation_prompt %}assistantyes<|im_end|>{% endif %}",
            "message 1, an assistant turn, cannot be found",
        ),
        ("{{ raise_exception('roles must alternate') }}", "refuses .* roles must alternate"),
        (
            "{% for m in messages if m.role == 'assistant' %}{{ m.content }}<|im_end|>{% endfor %}",
            "nothing but assistant turns",
        ),
    ],
)
def test_templates_without_a_right_mask_are_refused(template, message):
    with pytest.raises(ChatError, match=message):
        encode_conversation(chatml_tokenizer(template), chat("hello", "yes", "how", "no"))


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ({"role": "user", "content": "hi"}, "not of type dict"),
        (["hi"], "message 0 is of type str"),
        ([True], "message 0 is of type bool"),
        ([{"content": "hi"}], "role of message 0 is missing"),
        ([{"role": "user", "content": None}], "content of message 0 is missing, not text"),
        (
            [{"role": "user", "content": [{"type": "image_url"}]}],
            r"not text \(of type 'image_url'\)",
        ),
        ([{"role": "user", "content": "a\ud83d"}], "message 0 .* lone surrogate at character 1"),
        ("a\ud83d", "the prompt .* lone surrogate at character 1"),
    ],
)
def test_malformed_prompts_are_refused(prompt, message):
    with pytest.raises(ChatError, match=message):
        encode_prompt(chatml_tokenizer(), prompt)


@pytest.mark.parametrize("prompt", ["hello", chat("hello")])
def test_text_without_tokenizer_is_refused(prompt):
    with pytest.raises(ChatError, match="no tokenizer: give prompts as lists of token ids"):
        encode_prompt(None, prompt)


def test_conversation_without_assistant_is_refused():
    with pytest.raises(ChatError, match="none of the 1 messages is an assistant turn"):
        encode_conversation(chatml_tokenizer(), chat("hello"))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([{"role": "user", "content": "a"}] * 2, "role of message 1 must be 'assistant'"),
        (chat("a", "b", system="s")[:1] + chat("a", "b")[1:], "role of message 1 must be 'user'"),
        (chat("hello", "yes"), "must end with a user message"),
    ],
)
def test_vicuna_format_keeps_the_order_of_roles(messages, message):
    with pytest.raises(ChatError, match=message):
        encode_prompt(sentencepiece_like(), messages)


def test_vicuna_format_text():
    """As in Vicuna v1.1: the conversation's own system message, one space, no space behind </s>."""
    tokenizer = sentencepiece_like()
    rendered = render_conversation(tokenizer, chat("hello", "yes", "how", "no", system="ok."))
    assert rendered.text == "ok. USER: hello ASSISTANT: yes</s>USER: how ASSISTANT: no</s>"
    tokenizer.eos_token = None
    with pytest.raises(ChatError, match="no chat template, and no EOS token"):
        render_conversation(tokenizer, chat("hello", "yes"))


def test_slow_tokenizer_is_refused():
    class Slow:
        is_fast = False
        chat_template = None
        eos_token = "</s>"

    with pytest.raises(ChatError, match="fast tokenizer, and Slow is none"):
        encode_conversation(Slow(), chat("hello", "yes"))
