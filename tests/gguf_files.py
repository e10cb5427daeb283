"""Small GGUF files, written the way llama.cpp's converter writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import pre_tokenizers

HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 64, 2, 4, 2, 16, 40

METADATA: dict[str, Any] = {
    "llama.block_count": LAYERS,
    "llama.context_length": 256,
    "llama.embedding_length": HIDDEN,
    "llama.feed_forward_length": MLP,
    "llama.attention.head_count": HEADS,
    "llama.attention.head_count_kv": KV_HEADS,
    "llama.attention.key_length": HEAD_DIM,
    "llama.attention.value_length": HEAD_DIM,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.dimension_count": HEAD_DIM,
    "llama.rope.freq_base": 50_000.0,
    "llama.vocab_size": VOCAB,
}


def llama_tensors(tied: bool = False, biases: bool = False) -> dict[str, np.ndarray]:
    """Random weights of a Llama with the sizes above: Hugging Face name -> f32."""
    rng = np.random.default_rng(0)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    projections = {
        "self_attn.q_proj": (q, HIDDEN),
        "self_attn.k_proj": (kv, HIDDEN),
        "self_attn.v_proj": (kv, HIDDEN),
        "self_attn.o_proj": (HIDDEN, q),
        "mlp.gate_proj": (MLP, HIDDEN),
        "mlp.up_proj": (MLP, HIDDEN),
        "mlp.down_proj": (HIDDEN, MLP),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    if not tied:
        shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{prefix}{norm}.weight"] = (HIDDEN,)
        for name, shape in projections.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if biases:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    return {name: rng.normal(size=s).astype(np.float32) for name, s in shapes.items()}


def converted(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face tensors -> GGUF tensors, names by the `gguf` package, Q and K permuted."""
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    result = {}
    for name, tensor in tensors.items():
        if ".q_proj." in name:
            tensor = side_by_side(tensor, HEADS)
        if ".k_proj." in name:
            tensor = side_by_side(tensor, KV_HEADS)
        result[names.get_name(name, (".weight", ".bias"))] = tensor
    return result


def side_by_side(tensor: np.ndarray, heads: int) -> np.ndarray:
    """Moves row i of the second half of each head to right behind row i of the first."""
    size = len(tensor) // heads
    rows = [
        head * size + i + half * size // 2
        for head in range(heads)
        for i in range(size // 2)
        for half in (0, 1)
    ]
    return tensor[rows]


def write_gguf(
    path: Path,
    tensors: Mapping[str, np.ndarray],
    metadata: Mapping[str, Any],
    architecture: str = "llama",
    quantised: gguf.GGMLQuantizationType | None = None,
) -> Path:
    """Writes GGUF tensors and metadata; a value of None leaves its key out.

    `quantised` applies to matrices: vectors stay as they are.
    """
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata.items():
        match value:
            case int() if key == "general.alignment":  # it also moves the tensors
                writer.add_custom_alignment(value)
            case bool():
                writer.add_bool(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case str():
                writer.add_string(key, value)
            case list():
                writer.add_array(key, value)
    for name, tensor in tensors.items():
        if quantised is not None and tensor.ndim == 2:
            writer.add_tensor(name, gguf.quantize(tensor, quantised), raw_dtype=quantised)
        else:
            writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_fields(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary whose merges show where the text was cut.

    256 bytes, the merges' results, then <|bos|>, <|eot|> and <tool>.
    """
    merges = ["1 2", "12 3", "123 4", "Ġ 1", "Ċ Ċ", "! Ċ", "' S", "' s", "Ġ a", "Ġ Ġ", "a '"]
    merges += ["Ġ !", "( a", ". 5", "A B", "AB C", "= =", "a b", "ĠĠ Ġ"]
    tokens = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens += [merge.replace(" ", "") for merge in merges]
    tokens += ["abcd"]  # no merge leads to it
    types = [gguf.TokenType.NORMAL] * len(tokens)
    tokens += ["<|bos|>", "<|eot|>", "<tool>"]
    types += [gguf.TokenType.CONTROL, gguf.TokenType.CONTROL, gguf.TokenType.USER_DEFINED]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": tokens.index("<|bos|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|eot|>"),
    }


def sentencepiece_fields() -> dict[str, Any]:
    """A SentencePiece BPE vocabulary: <unk>, <s>, </s>, 256 bytes, then pieces, the best first."""
    pieces = ["▁a", "ab", "▁▁", "bc", "▁ab", "abc", "aa", "▁▁▁▁", "ca", "aaa", "▁ca", "▁abc", "12"]
    pieces += ["▁", "a", "b", "c", "1", "2", "é"]
    types = [gguf.TokenType.UNKNOWN, gguf.TokenType.CONTROL, gguf.TokenType.CONTROL]
    types += [gguf.TokenType.BYTE] * 256 + [gguf.TokenType.NORMAL] * len(pieces)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            *("<unk>", "<s>", "</s>"),
            *(f"<0x{byte:02X}>" for byte in range(256)),
            *pieces,
        ],
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [int(t) for t in types],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
