"""Mistral: a Llama whose layers may all see the same number of tokens."""

from __future__ import annotations

from dataclasses import replace

from exporters.architectures.shared import plain, same_window
from exporters.config import Config
from exporters.spec import DecoderSpec

WINDOW = 4096  # where config.json says nothing


def describe(config: Config) -> DecoderSpec:
    """Llama's decoder with `sliding_window` for every layer (arXiv 2310.06825)."""
    config.expect("hidden_act", "silu")
    spec = plain(config)
    return replace(spec, windows=same_window(config, spec.layers, config.optional_size("sliding_window", WINDOW)))
