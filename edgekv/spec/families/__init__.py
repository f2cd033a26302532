"""The architectures that can be exported, one file each: from a `config.json` to a `DecoderSpec`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.families import gemma2, gemma3, llama, mistral, phi3, qwen2, qwen3

ARCHITECTURES: Mapping[str, Callable[[Config], DecoderSpec]] = {
    "gemma2": gemma2.describe,
    "gemma3_text": gemma3.describe,
    "llama": llama.describe,
    "mistral": mistral.describe,
    "phi3": phi3.describe,
    "qwen2": qwen2.describe,
    "qwen3": qwen3.describe,
}


def describe(fields: Mapping[str, Any]) -> DecoderSpec:
    """The decoder that a Hugging Face `config.json` stands for.

    Raises:
        CheckpointError: the architecture is unknown, or a field is missing, contradictory or not supported.
    """
    config = Config(fields)
    found = ARCHITECTURES.get(fields["model_type"]) if isinstance(fields.get("model_type"), str) else None
    if found is None:
        raise config.refusal("model_type", ", ".join(ARCHITECTURES), fix="This architecture cannot be exported.")
    return found(config)


__all__ = ["ARCHITECTURES", "describe"]
