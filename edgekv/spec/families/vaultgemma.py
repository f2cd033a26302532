"""VaultGemma: Gemma 2 without norms behind its blocks."""

from __future__ import annotations

from msgspec.structs import replace

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import gemma2

MODEL_TYPES = ("vaultgemma",)

STORED_NAMES = (("post_attention_layernorm", "pre_feedforward_layernorm"),)


def describe(config: Config) -> DecoderSpec:
    """Gemma 2's decoder with two norms for each layer (arXiv 2510.15001)."""
    return replace(gemma2.describe(config), post_norms=False, stored_names=STORED_NAMES)
