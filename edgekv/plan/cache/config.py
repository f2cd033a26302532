"""The few fields of a Hugging Face `config.json` that sizes follow from."""

from __future__ import annotations

from pathlib import Path

import msgspec

from edgekv.errors import CheckpointError
from edgekv.spec.sizes import Decoder

CONFIG = "config.json"
# Decoders whose matrices are exactly q, k, v, o, gate, up and down once those that are stored as one were split.
PLAIN = frozenset({"gemma2", "gemma3_text", "llama", "mistral", "phi3", "qwen2", "qwen3"})
# What these take where config.json says nothing; the others divide hidden_size by the heads.
_HEAD_DIMS = {"gemma2": 256, "gemma3_text": 256, "qwen3": 128}
# Their sliding_window counts only where use_sliding_window is true.
_ASKING = frozenset({"qwen2", "qwen3"})
_WITH_ROWS = frozenset({"full_attention", "sliding_attention"})


class Config(msgspec.Struct, frozen=True):
    """`config.json`, older or newer form; None stands for what is absent or null."""

    model_type: str | None = None
    num_hidden_layers: int | None = None
    hidden_size: int | None = None
    intermediate_size: int | None = None
    num_attention_heads: int | None = None
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    vocab_size: int | None = None
    max_position_embeddings: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    use_sliding_window: bool | None = None
    kv_lora_rank: int | None = None
    text_config: Config | None = None

    @property
    def own_head_dim(self) -> int | None:
        """D as the file says or, where it says nothing, the architecture; None if the heads tell."""
        return self.head_dim or _HEAD_DIMS.get(self.model_type or "")

    @property
    def window(self) -> int | None:
        """Tokens that some layers or all attend to at most, or None."""
        return None if self.model_type in _ASKING and not self.use_sliding_window else self.sliding_window


def read_config(path: Path) -> Config:
    """The configuration of the text decoder.

    Raises:
        CheckpointError: the file cannot be read, is no JSON object, a field has another type, or the model keeps no
            keys and values for each layer and head.
    """
    fix = "Give a config.json of Hugging Face form, or --layers, --kv-heads, --head-dim, --context and --kv-bits."
    try:
        config = msgspec.json.decode(path.read_bytes(), type=Config)
    except OSError as error:
        raise CheckpointError(str(path), got=error.strerror, expected="a readable file", fix=fix) from None
    except msgspec.ValidationError as error:
        raise CheckpointError(str(path), got=error, expected="one size for the whole model", fix=fix) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise CheckpointError(str(path), got=error, expected="whole JSON", fix=fix) from None
    if config.num_hidden_layers is None and config.text_config is not None:
        config = config.text_config
    if config.kv_lora_rank is not None:
        raise CheckpointError(
            f"{path}: kv_lora_rank",
            got=config.kv_lora_rank,
            expected="keys and values for each head",
            fix="Models with latent attention cannot be sized.",
        )
    if odd := sorted(set(config.layer_types or ()) - _WITH_ROWS):
        raise CheckpointError(
            f"{path}: layer_types",
            got=", ".join(odd),
            expected=" or ".join(sorted(_WITH_ROWS)),
            fix="Models with layers of another kind cannot be sized.",
        )
    return config


def decoder_of(config: Config, *, kv_heads: int, head_dim: int) -> Decoder | None:
    """The decoder's sizes, or None if the architecture has other matrices or a size is unknown."""
    layers, hidden, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size
    heads, vocab = config.num_attention_heads, config.vocab_size
    if config.model_type not in PLAIN:
        return None
    if layers is None or hidden is None or inner is None or heads is None or vocab is None:
        return None
    return Decoder(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=inner,
        vocab=vocab,
    )
