"""Mistral Small 3.1 and Ministral 3 with a vision model: the text decoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import ministral3, mistral
from edgekv.spec.llama_like import text_config

MODEL_TYPES = ("mistral3",)

_TEXT = {"mistral": mistral.describe, "ministral3": ministral3.describe}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`, a Mistral or a Ministral 3."""
    text = text_config(config, *_TEXT)
    return replace(_TEXT[text.text("model_type")](text), multimodal=True)
