"""InternVL 3 and 3.5: the text decoder, Qwen2 or Qwen3; `edgekv.spec.encoders.internvl` has the vision encoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama, qwen2, qwen3

MODEL_TYPES = ("internvl",)

_TEXT = {"qwen2": qwen2.describe, "qwen3": qwen3.describe, "llama": llama.describe}


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`."""
    text = config.table("text_config").with_defaults(model_type="qwen2")
    family = _TEXT.get(text.text("model_type"))
    if family is None:
        raise text.refusal("model_type", " or ".join(_TEXT), fix="This text model cannot be exported.")
    tied = config.flag("tie_word_embeddings", text.flag("tie_word_embeddings", True))
    return replace(family(text.with_defaults(tie_word_embeddings=tied)), multimodal=True)
