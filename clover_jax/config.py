"""What a target model and a draft head look like, as frozen values."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from clover_jax import families
from clover_jax.rope import Rope

ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh", "relu")


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A decoder; the defaults are Llama's, other families set more (see families.py).

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
      qk_norm: queries and keys pass an RMSNorm over each head before they are rotated.
      windows: of each layer how many tokens it sees, itself included, or None for all; () if all
        layers see all.
      local_rope: rotary embedding of the layers with a window, if it is another one.
      post_norms: a norm after attention and MLP too, before the residual is added.
      attention_softcap, logit_softcap: scores and logits become cap * tanh(x / cap).
      query_scale: what scores are multiplied by; None is head_dim ** -0.5.
      embed_scale: what embeddings are multiplied by, rounded to their dtype.
      unit_offset_norms: checkpoints store the norms' scales less 1; parameters do not.
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
    qk_norm: bool = False
    windows: tuple[int | None, ...] = ()
    local_rope: Rope | None = None
    post_norms: bool = False
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    query_scale: float | None = None
    embed_scale: float = 1.0
    unit_offset_norms: bool = False

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
        """Parses a Hugging Face config.json, old or new; absent keys take the family's defaults.

        Raises:
          ValueError: an architecture or a setting that is not implemented, by name.
        """
        model_type = config.get("model_type", "llama")
        families.check_supported(model_type, config)
        defaults = families.DEFAULTS[model_type]
        given = {**defaults, **config}

        def get(key: str) -> Any:
            return defaults[key] if given[key] is None else given[key]

        hidden, heads = int(get("hidden_size")), int(get("num_attention_heads"))
        if given.get("head_dim") is None and hidden % heads:
            raise ValueError(
                f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
                "and there is no head_dim"
            )
        head_dim = int(given.get("head_dim") or hidden // heads)
        max_position = int(get("max_position_embeddings"))
        rope, local_rope = families.ropes(model_type, config, head_dim, max_position)
        return cls(
            vocab_size=int(get("vocab_size")),
            hidden_size=hidden,
            intermediate_size=int(get("intermediate_size")),
            num_layers=int(get("num_hidden_layers")),
            num_heads=heads,
            num_kv_heads=int(given.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            rms_norm_eps=float(get("rms_norm_eps")),
            rope=rope,
            max_position_embeddings=max_position,
            tie_word_embeddings=bool(get("tie_word_embeddings")),
            hidden_act=str(get("hidden_act" if "hidden_act" in defaults else "hidden_activation")),
            windows=families.windows(model_type, given),
            local_rope=local_rope,
            **families.biases(model_type, config),
            **families.extras(model_type, given),
        )

    def window(self, layer: int) -> int | None:
        """How many tokens a layer sees, itself included; None for all."""
        return self.windows[layer] if self.windows else None


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
        """The default head for a target: its layers, heads and rotary embedding.

        The block's layers see all tokens, and what a target does to embeddings and logits is not
        the head's.
        """
        return cls(
            block=dataclasses.replace(
                target,
                num_layers=num_layers,
                windows=(),
                local_rope=None,
                logit_softcap=None,
                embed_scale=1.0,
                unit_offset_norms=False,
            ),
            num_heads=target.num_heads,
            draft_vocab_size=draft_vocab_size or target.vocab_size,
        )
