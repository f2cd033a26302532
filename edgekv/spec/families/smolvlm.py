"""SmolVLM and SmolVLM2: the text decoder, a Llama; `edgekv.spec.encoders.smolvlm` has the vision encoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama
from edgekv.spec.llama_like import text_config

MODEL_TYPES = ("smolvlm",)


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`."""
    return replace(llama.describe(text_config(config, "llama", tied=False)), multimodal=True)
