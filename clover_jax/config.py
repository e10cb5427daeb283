"""What a target model and a draft head look like, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from clover_jax.rope import Rope

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")

# config.json keys that would change the computation and are not implemented: each is refused
# unless it holds a value that switches it off.
_UNSUPPORTED_WHEN_SET = ("quantization_config", "sliding_window", "layer_types")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder of the Llama family.

    Attributes:
      vocab_size: V, rows of the embedding.
      hidden_size: D.
      intermediate_size: F, width of the gated MLP.
      num_layers, num_heads, num_kv_heads: query heads are grouped, num_heads = K * G.
      head_dim: H, independent of hidden_size.
      rms_norm_eps: epsilon of every RMSNorm.
      rope: rotary embedding.
      max_position_embeddings: context length in tokens.
      tie_word_embeddings: the LM head is the embedding.
      hidden_act: activation of the MLP, one of ACTIVATIONS.
      qkv_bias, out_bias, mlp_bias: which projections carry a bias.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    tie_word_embeddings: bool
    hidden_act: str = "silu"
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads {self.num_heads} is not a multiple of "
                f"num_key_value_heads {self.num_kv_heads}"
            )
        if self.hidden_act not in ACTIVATIONS:
            raise ValueError(
                f"hidden_act {self.hidden_act!r} is not supported; supported: {ACTIVATIONS}"
            )

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> TargetConfig:
        """Parses a Hugging Face config.json, old or new; absent keys take LlamaConfig's defaults.

        Raises:
          ValueError: an architecture or a setting that is not implemented, by name.
        """
        model_type = config.get("model_type", "llama")
        architectures = config.get("architectures") or ["LlamaForCausalLM"]
        if model_type != "llama" or architectures != ["LlamaForCausalLM"]:
            raise ValueError(
                f"model_type {model_type!r} with architectures {architectures} is not supported; "
                "supported: 'llama' with ['LlamaForCausalLM']"
            )
        for key in _UNSUPPORTED_WHEN_SET:
            if config.get(key):
                raise ValueError(f"{key} {config[key]!r} is not supported")

        def get(key: str, default: Any) -> Any:
            value = config.get(key)
            return default if value is None else value

        hidden = int(get("hidden_size", 4096))
        heads = int(get("num_attention_heads", 32))
        if config.get("head_dim") is None and hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        head_dim = int(get("head_dim", hidden // heads))
        max_position = int(get("max_position_embeddings", 2048))
        attention_bias = bool(get("attention_bias", False))
        return cls(
            vocab_size=int(get("vocab_size", 32000)),
            hidden_size=hidden,
            intermediate_size=int(get("intermediate_size", 11008)),
            num_layers=int(get("num_hidden_layers", 32)),
            num_heads=heads,
            num_kv_heads=int(get("num_key_value_heads", heads)),
            head_dim=head_dim,
            rms_norm_eps=float(get("rms_norm_eps", 1e-6)),
            rope=Rope.from_hf(config, head_dim, max_position),
            max_position_embeddings=max_position,
            tie_word_embeddings=bool(get("tie_word_embeddings", False)),
            hidden_act=str(get("hidden_act", "silu")),
            qkv_bias=attention_bias,
            out_bias=attention_bias,
            mlp_bias=bool(get("mlp_bias", False)),
        )


@dataclasses.dataclass(frozen=True)
class DraftConfig:
    """A Clover-2 head for one target (arXiv 2408.00264, section 3).

    Attributes:
      block: shape of the augmenting block's layers: a TargetConfig of `block.num_layers` layers;
        its vocab_size is the target's.
      num_heads: heads of the attention decoders; divides block.hidden_size.
      num_steps: draft positions supervised in training (the paper's 5 heads).
      draft_vocab_size: rows of the LM head the draft proposes from.
      embedding: which of the target's matrices embeds the chosen token.
      copy_bias: what the logit of a copied token gains when 1, 2, ... tokens before it agree (the
        last value for all beyond); empty for a head that does not copy. See copying.py.
    """

    block: TargetConfig
    num_heads: int
    draft_vocab_size: int
    num_steps: int = 5
    embedding: Literal["embed_tokens", "lm_head"] = "embed_tokens"
    copy_bias: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        width = self.block.hidden_size
        if width % self.num_heads:
            raise ValueError(
                f"a Clover-2 head splits hidden_size {width} into {self.num_heads} heads, "
                "which does not divide it"
            )
        if not 0 < self.draft_vocab_size <= self.block.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is outside 1..{self.block.vocab_size}"
            )
        if self.embedding not in ("embed_tokens", "lm_head"):
            raise ValueError(f"embedding {self.embedding!r} is neither embed_tokens nor lm_head")

    @classmethod
    def for_target(
        cls, target: TargetConfig, num_layers: int = 2, draft_vocab_size: int | None = None
    ) -> DraftConfig:
        """The default head for a target: its layers, heads and rotary embedding."""
        return cls(
            block=dataclasses.replace(target, num_layers=num_layers),
            num_heads=target.num_heads,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
        )
