"""SmolVLM and SmolVLM2: the text decoder, a Llama; `edgekv.spec.encoders.smolvlm` has the vision encoder."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import llama

MODEL_TYPES = ("smolvlm",)


def describe(config: Config) -> DecoderSpec:
    """The decoder of `text_config`."""
    text = config.table("text_config").with_defaults(model_type="llama", rms_norm_eps=1e-5)
    text.expect("model_type", "llama")
    tied = config.flag("tie_word_embeddings", False)
    return replace(llama.describe(text.with_defaults(tie_word_embeddings=tied)), multimodal=True)
