"""Qwen2-VL and Qwen2.5-VL: the text decoder, a Qwen2."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import qwen2
from edgekv.spec.llama_like import text_config, text_positions

MODEL_TYPES = ("qwen2_vl", "qwen2_5_vl")

DEFAULTS = {"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`; files of the hub have its fields beside those of the whole model."""
    text = config
    if "text_config" in config:
        text = text_config(config, config.text("model_type") + "_text", tied=False)
        tied = config.flag("tie_word_embeddings") or config.table("text_config").flag("tie_word_embeddings")
        text = text.changed(tie_word_embeddings=tied)
    return replace(qwen2.describe(text_positions(text.with_defaults(**DEFAULTS))), multimodal=True)
