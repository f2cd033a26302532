"""InternVL 3 and 3.5: the text decoder, Qwen2 or Qwen3; `edgekv.spec.encoders.internvl` has the vision encoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama, qwen2, qwen3
from edgekv.spec.llama_like import text_config

MODEL_TYPES = ("internvl",)

_TEXT = {"qwen2": qwen2.describe, "qwen3": qwen3.describe, "llama": llama.describe}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`."""
    text = text_config(config, *_TEXT)
    return replace(_TEXT[text.text("model_type")](text), multimodal=True)
