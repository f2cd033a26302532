"""What keys and values depend on beside the tokens."""

from __future__ import annotations

import hashlib

import msgspec

from edgekv.bundle import Manifest


def prefix_fingerprint(manifest: Manifest, engine: str) -> str:
    """A hash of a bundle's graphs, weights, encodings and RoPE, and of the engine that runs them.

    Engines differ in the last bit, so that each reuses what it has computed itself.
    """
    said = (manifest.files, manifest.encodings, manifest.ropes, manifest.model, manifest.kv_dtype, engine)
    return hashlib.sha256(msgspec.json.encode(said, order="sorted")).hexdigest()
