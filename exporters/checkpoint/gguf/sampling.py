"""The sampling defaults of a GGUF file, as the fields of a `generation_config.json`."""

from __future__ import annotations

from typing import Any

from exporters.checkpoint.gguf.file import GgufFile

_PREFIX = "general.sampling."
_NUMBERS = {"temp": "temperature", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repetition_penalty"}
_SAMPLES = ("temperature", "top_k", "top_p", "min_p")
_UNSUPPORTED = ("xtc_probability", "mirostat")  # further fields qualify these two
_SUPPRESSED = "tokenizer.ggml.suppress_tokens"


def sampling_fields(file: GgufFile) -> dict[str, Any]:
    """What the file recommends; a temperature of 0 or less is greedy, and none at all stands for 1 beside others.

    Raises:
        CheckpointError: a field is of another type.
    """
    fields: dict[str, Any] = {
        name: file.number(_PREFIX + key) for key, name in _NUMBERS.items() if _PREFIX + key in file
    }
    if f"{_PREFIX}top_k" in file:
        fields["top_k"] = file.size(f"{_PREFIX}top_k", least=0)
    if any(name in fields for name in _SAMPLES):
        fields["do_sample"] = fields.get("temperature", 1.0) > 0
    fields |= {name: file.number(_PREFIX + name) for name in _UNSUPPORTED if _PREFIX + name in file}
    return fields | {"suppress_tokens": file.entries(_SUPPRESSED)}
