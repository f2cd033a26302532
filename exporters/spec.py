"""What the exporters need to know of an architecture: sizes, rotary embedding and special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgekv.errors import CheckpointError
from exporters.rope import Rope

SUPPORTED = ("llama",)


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder of the Llama family: pre-norm, grouped-query attention, SwiGLU, RMSNorm, RoPE."""

    model_type: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_positions: int
    eps: float
    tied_head: bool
    rope: Rope

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> DecoderSpec:
        """Reads a Hugging Face `config.json`.

        Raises:
            CheckpointError: naming the field that is missing, contradictory or not supported.
        """
        model_type = config.get("model_type")
        if model_type not in SUPPORTED:
            raise CheckpointError(
                "config.json: model_type",
                found=repr(model_type),
                wanted=" or ".join(SUPPORTED),
                way_out="This architecture cannot be exported yet.",
            )
        for name, expected in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
            if config.get(name, expected) != expected:
                raise CheckpointError(
                    f"config.json: {name}",
                    found=repr(config[name]),
                    wanted=repr(expected),
                    way_out="This variant of the architecture cannot be exported yet.",
                )
        heads = _size(config, "num_attention_heads")
        hidden = _size(config, "hidden_size")
        kv_heads = _size(config, "num_key_value_heads", default=heads)
        head_dim = _size(config, "head_dim", default=hidden // heads)
        if heads % kv_heads:
            raise CheckpointError(
                "config.json: num_key_value_heads",
                found=kv_heads,
                wanted=f"a divisor of num_attention_heads = {heads}",
                way_out="Correct config.json.",
            )
        if head_dim % 2:
            raise CheckpointError(
                "config.json: head_dim", found=head_dim, wanted="an even number", way_out="Correct config.json."
            )
        return cls(
            model_type=model_type,
            layers=_size(config, "num_hidden_layers"),
            hidden=hidden,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate=_size(config, "intermediate_size"),
            vocab=_size(config, "vocab_size"),
            max_positions=_size(config, "max_position_embeddings"),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            tied_head=bool(config.get("tie_word_embeddings", False)),
            rope=Rope.from_config(config),
        )

    @property
    def group(self) -> int:
        """Query heads that share one key/value head."""
        return self.heads // self.kv_heads


def _size(config: Mapping[str, Any], name: str, *, default: int | None = None) -> int:
    value = config.get(name)
    if value is None:
        value = default
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    raise CheckpointError(
        f"config.json: {name}",
        found="nothing" if value is None else repr(value),
        wanted="a whole number above 0",
        way_out="Correct config.json.",
    )
