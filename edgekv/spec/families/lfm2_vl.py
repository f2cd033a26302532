"""LFM2-VL: the text decoder, an LFM2."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import lfm2
from edgekv.spec.llama_like import text_config

MODEL_TYPES = ("lfm2_vl",)


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`; whether the head is tied is said beside it."""
    tied = config.flag("tie_embedding", config.flag("tie_word_embeddings", True))
    text = text_config(config, "lfm2").changed(tie_embedding=tied)
    return replace(lfm2.describe(text), multimodal=True)
