"""Qwen3-VL: the text decoder, a Qwen3."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import qwen3
from edgekv.spec.llama_like import text_config, text_positions

MODEL_TYPES = ("qwen3_vl",)

DEFAULTS = {"max_position_embeddings": 128_000, "rope_theta": 5e5}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`, without windows."""
    text = text_config(config, "qwen3_vl_text", tied=False)
    text.expect("use_sliding_window", False)
    return replace(qwen3.describe(text_positions(text.with_defaults(**DEFAULTS))), multimodal=True)
