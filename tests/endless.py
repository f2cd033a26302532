"""Bundles whose text has no end: what random weights choose, or a sampler draws, must not end a test."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from msgspec import structs

import edgekv
from edgekv.bundle import Bundle, open_bundle


def endless(bundle: Path, *, eos: Sequence[int] = ()) -> Bundle:
    """The bundle without tokens that end a text, or with others, for runtimes that need one."""
    opened = open_bundle(bundle, verify=False)
    tokens = structs.replace(opened.manifest.tokens, eos=list(eos))
    return Bundle(opened.path, structs.replace(opened.manifest, tokens=tokens))


def ending_elsewhere(bundle: Path, prompt: Sequence[int], count: int, engine: str = "htp") -> tuple[Bundle, list[int]]:
    """The bundle with an end token that its text of `count` tokens does not have, and that text, chosen greedily."""
    tokens = [token.id for token in edgekv.load(endless(bundle), engine).generate(list(prompt), count)]
    unchosen = min(set(range(len(tokens) + 1)) - set(tokens))
    return endless(bundle, eos=[unchosen]), tokens
