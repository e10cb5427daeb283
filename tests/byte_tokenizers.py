"""Two tokenizers for the rigs' 32 tokens, in which most characters take several tokens.

Rig M counts, so greedy text runs through PIECES in this order, from any token on.
"""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

# An emoji with an invalid byte right behind it, Hangul, the first half of an emoji, a lone
# continuation byte.
BYTES = " ab\N{GRINNING FACE}".encode() + b"\xffc" + "한d".encode() + b"\xf1\xa0ef\x81ghijklmnopq"
SPECIAL = ["<user>", "<bot>", "<end>"]
USER, BOT, END = range(len(BYTES), len(BYTES) + 3)
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}"
    "{{ m.content ~ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)
assert len(set(BYTES)) == len(BYTES) == 29


def byte_level() -> PreTrainedTokenizerFast:
    """As in GPT-2, Llama 3 and SmolLM2: every byte has a printable stand-in."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    stand_in = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
    core = Tokenizer(models.BPE(vocab={stand_in[b]: i for i, b in enumerate(BYTES)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return _wrap(core)


def byte_fallback() -> PreTrainedTokenizerFast:
    """As in Llama 2 and Vicuna: characters, and bytes for those that have no token of their own.

    A run of bytes decodes as a whole: one invalid byte makes all of them invalid.
    """
    names = ["▁" if b == 0x20 else chr(b) if b < 0x80 else f"<0x{b:02X}>" for b in BYTES]
    core = Tokenizer(
        models.BPE(vocab={n: i for i, n in enumerate(names)}, merges=[], byte_fallback=True)
    )
    core.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return _wrap(core)


def _wrap(core: Tokenizer) -> PreTrainedTokenizerFast:
    core.add_special_tokens(SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", chat_template=TEMPLATE)
