"""Mistral Small 3.1 and Ministral 3 with a vision model: the text decoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import ministral3, mistral

MODEL_TYPES = ("mistral3",)

_TEXT = {"mistral": mistral.describe, "ministral3": ministral3.describe}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`, a Mistral or a Ministral 3."""
    text = config.table("text_config").with_defaults(model_type="mistral")
    if "tie_word_embeddings" in config:
        text = text.with_defaults(tie_word_embeddings=config.flag("tie_word_embeddings"))
    family = _TEXT.get(text.text("model_type"))
    if family is None:
        raise text.refusal("model_type", " or ".join(_TEXT), fix="This text model cannot be exported.")
    return replace(family(text), multimodal=True)
