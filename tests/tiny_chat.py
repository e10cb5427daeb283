"""A tiny chat model on disk: a Llama folder of 40 tokens, one per character, with a chat template.

Two kinds of weights. Random ones, whose text depends on the whole context. And those of a chain,
where the blocks output zero and the embedding is the identity, so that the next token depends on
the last one alone, by a table that the test chooses.
"""

import json
import string
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from clover_jax.config import TargetConfig
from clover_jax.weights.target import abstract_params, tensor_name

SPECIAL = ("<user>", "<bot>", "<end>")
PIECES = [*SPECIAL, *string.ascii_lowercase, *string.digits, " "]
V = len(PIECES)
USER, BOT, END = range(3)
TEMPLATE = (
    "{% for m in messages %}{{ '<user>' if m.role == 'user' else '<bot>' }}"
    "{{ m.content ~ '<end>' }}{% endfor %}{% if add_generation_prompt %}{{ '<bot>' }}{% endif %}"
)
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": V,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "eos_token_id": END,
}


def tokenizer() -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(PIECES)}, merges=[]))
    core.decoder = decoders.Fuse()
    core.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<end>", chat_template=TEMPLATE)


def ids(text: str) -> list[int]:
    return [PIECES.index(character) for character in text]


def random_model(folder: Path, seed: int = 0) -> Path:
    """Random weights with large argmax margins."""
    rng = np.random.default_rng(seed)
    return _write(folder, lambda path, shape: rng.normal(size=shape) * 0.3)


def chain_model(folder: Path, table: np.ndarray) -> Path:
    """The logits after token i are table[i], f32 [V, V]."""

    def parameter(path: tuple[str, ...], shape: tuple[int, ...]) -> np.ndarray:
        if path[-1] == "scale":
            return np.ones(shape)
        if path == ("embed_tokens",):
            return np.eye(V)
        # The final norm turns a one-hot row into one of sqrt(V).
        return table.T / V**0.5 if path == ("lm_head",) else np.zeros(shape)

    return _write(folder, parameter)


def cycle_table(text: str) -> np.ndarray:
    """After <bot> and from character to character of `text` (all different), then <end>."""
    order = [BOT, *ids(text), END]
    table = np.zeros((V, V))
    table[order[:-1], order[1:]] = 8.0
    return table


def write_chats(path: Path, chats: list[tuple[str, ...]]) -> str:
    """JSONL of conversations given as user text, answer, user text, ..."""
    roles = ("user", "assistant")
    path.write_text(
        "".join(
            json.dumps(
                {"messages": [{"role": roles[i % 2], "content": t} for i, t in enumerate(c)]}
            )
            + "\n"
            for c in chats
        )
    )
    return str(path)


def random_text(rng: np.random.Generator, low: int, high: int) -> str:
    return "".join(rng.choice(PIECES[3:], size=rng.integers(low, high)))


def _write(folder: Path, parameter) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    tokenizer().save_pretrained(folder)
    tensors = {}
    for path, leaf in abstract_params(TargetConfig.from_hf(CONFIG)).items():
        value = np.asarray(parameter(path, leaf.shape), np.float32)
        tensors[tensor_name(path)] = np.ascontiguousarray(value)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
