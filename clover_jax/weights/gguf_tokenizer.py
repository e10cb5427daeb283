"""The tokenizer inside a GGUF file, built with `tokenizers`, without torch.

What llama.cpp makes of the same fields is the reference: ids agree with it, except that Qwen 2's
text is brought to NFC first, as its own tokenizer does.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from gguf import TokenType
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
)

from clover_jax.weights.gguf_file import GgufFile, open_gguf
from clover_jax.weights.source import CheckpointError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# Llama 3 and Qwen 2 split alike, but for the number of digits that stay together.
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# tokenizer.ggml.pre -> the regular expressions that cut the text, each what the last one left.
_SPLITS = {
    "gpt-2": [_GPT2_WORDS],
    "smollm": [r"\p{N}", _GPT2_WORDS],
    "llama-bpe": [_LLAMA3_WORDS.format(digits="{1,3}")],
    "qwen2": [_LLAMA3_WORDS.format(digits="")],
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"],
}


def tokenizer(path: Path | str) -> PreTrainedTokenizerFast | None:
    """Builds the tokenizer of a GGUF file, with its special tokens and chat template.

    Byte-level BPE (tokenizer.ggml.model 'gpt2') with a known pre-tokenizer, and SentencePiece BPE
    ('llama') are supported.

    Returns:
      The tokenizer, or None if the file has none.

    Raises:
      FileNotFoundError: there is no such file.
      CheckpointError: a tokenizer of another kind, or fields that do not fit together.
    """
    file = open_gguf(path)
    model = file.metadata.get("tokenizer.ggml.model", "none")
    if model in ("none", "no_vocab"):
        return None
    if model == "gpt2":
        backend = _byte_level(file)
    elif model == "llama":
        backend = _sentencepiece(file)
    else:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.model {model!r} is not supported; supported: 'gpt2', "
            "'llama'"
        )
    _add_special_tokens(file, backend)

    from transformers import PreTrainedTokenizerFast  # takes seconds, and tensors need none of it

    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=_special_token(file, "bos"),
        eos_token=_special_token(file, "eos"),
        unk_token=_special_token(file, "unknown"),
        pad_token=_special_token(file, "padding"),
        add_bos_token=_adds(file, "bos", model == "llama" or _pre(file) == "llama-bpe"),
        add_eos_token=_adds(file, "eos", False),
        chat_template=file.metadata.get("tokenizer.chat_template"),
        model_max_length=file.metadata.get("llama.context_length"),
        clean_up_tokenization_spaces=False,
    )


def special_token_id(file: GgufFile, role: str) -> int | None:
    """The id a file declares for bos, eos, eot, eom, unknown or padding, if it does.

    Raises:
      CheckpointError: an id outside the vocabulary.
    """
    key = f"tokenizer.ggml.{role}_token_id"
    if key not in file.metadata:
        return None
    token_id = int(file.metadata[key])
    num_tokens = len(file.metadata.get("tokenizer.ggml.tokens", ()))
    if num_tokens and not 0 <= token_id < num_tokens:
        raise CheckpointError(f"{file.path}: {key} is {token_id}, of {num_tokens} tokens")
    return token_id


def _field(file: GgufFile, name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in file.metadata:
        raise CheckpointError(f"{file.path}: the key {key} is missing")
    return file.metadata[key]


def _pre(file: GgufFile) -> str | None:
    return file.metadata.get("tokenizer.ggml.pre")


def _special_token(file: GgufFile, role: str) -> str | None:
    token_id = special_token_id(file, role)
    return None if token_id is None else _field(file, "tokens")[token_id]


def _adds(file: GgufFile, role: str, default: bool) -> bool:
    """Whether encoding a text adds bos in front of it, or eos behind it."""
    adds = bool(file.metadata.get(f"tokenizer.ggml.add_{role}_token", default))
    if adds and special_token_id(file, role) is None:
        raise CheckpointError(
            f"{file.path}: texts get a {role} token, but tokenizer.ggml.{role}_token_id is missing"
        )
    return adds


def _vocabulary(file: GgufFile) -> dict[str, int]:
    tokens = _field(file, "tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.tokens has {len(tokens)} entries, of which only "
            f"{len(vocabulary)} differ"
        )
    return vocabulary


def _token_types(file: GgufFile) -> list[int]:
    num_tokens = len(_field(file, "tokens"))
    types = [int(t) for t in _field(file, "token_type")]
    if len(types) != num_tokens:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.token_type has {len(types)} entries for {num_tokens} "
            "tokens"
        )
    return types


def _byte_level(file: GgufFile) -> Tokenizer:
    pre = _pre(file)
    if pre not in _SPLITS:
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.pre {pre!r} is not supported; supported: "
            f"{sorted(_SPLITS)}"
        )
    halves = (merge.partition(" ") for merge in _field(file, "merges"))
    backend = _bpe(
        file, [(left, right) for left, _, right in halves], ignore_merges=pre == "llama-bpe"
    )
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), "isolated") for split in _SPLITS[pre]]
        + [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(file: GgufFile) -> Tokenizer:
    backend = _bpe(
        file,
        _merges_by_score(file),
        unk_token=_special_token(file, "unknown"),
        fuse_unk=True,
        byte_fallback=True,
    )
    # Each stretch between special tokens starts with a space of its own, also behind a space.
    prefixed = bool(file.metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = [normalizers.Replace(" ", "▁")]
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), *spaces] if prefixed else spaces
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence(
        [*steps, decoders.Strip(" ", left=1)] if prefixed else steps
    )
    return backend


def _bpe(file: GgufFile, merges: list[tuple[str, str]], **options: Any) -> Tokenizer:
    vocabulary = _vocabulary(file)
    try:
        return Tokenizer(models.BPE(vocab=vocabulary, merges=merges, **options))
    except Exception as error:  # `tokenizers` raises nothing more specific
        raise CheckpointError(f"{file.path}: tokenizer.ggml.merges: {error}") from error


def _merges_by_score(file: GgufFile) -> list[tuple[str, str]]:
    """SentencePiece's rule as a list of merges.

    SentencePiece joins the two neighbours whose union has the best score. So every way to cut a
    piece in two pieces is a merge, and it ranks by the score of the whole.
    """
    vocabulary, scores = _vocabulary(file), _field(file, "scores")
    if len(scores) != len(vocabulary):
        raise CheckpointError(
            f"{file.path}: tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary)} "
            "tokens"
        )
    merges = [
        (piece[:cut], piece[cut:])
        for piece in sorted(vocabulary, key=lambda piece: -scores[vocabulary[piece]])
        for cut in range(1, len(piece))
    ]
    return [(left, right) for left, right in merges if left in vocabulary and right in vocabulary]


def _add_special_tokens(file: GgufFile, backend: Tokenizer) -> None:
    """Makes control tokens special, and both them and user-defined ones atomic, under their ids."""
    special, plain = [], []
    for token, kind in zip(_field(file, "tokens"), _token_types(file), strict=True):
        if kind in (TokenType.CONTROL, TokenType.UNKNOWN):
            special.append(AddedToken(token, normalized=False))
        elif kind == TokenType.USER_DEFINED:
            plain.append(AddedToken(token, normalized=False))
    backend.add_special_tokens(special)
    backend.add_tokens(plain)
