"""Bundles whose text has no end: what random weights choose, or a sampler draws, must not end a test."""

from __future__ import annotations

from pathlib import Path

from msgspec import structs

from edgekv.bundle import Bundle, open_bundle


def endless(bundle: Path) -> Bundle:
    """The bundle without tokens that end a text."""
    opened = open_bundle(bundle, verify=False)
    tokens = structs.replace(opened.manifest.tokens, eos=[])
    return Bundle(opened.path, structs.replace(opened.manifest, tokens=tokens))
