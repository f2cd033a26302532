"""Manifests that say something else than the exporter wrote, under a seal that fits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from edgekv.bundle import MANIFEST
from edgekv.bundle.formats import SEAL, seal_of


def change_manifest(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest in a bundle's folder, as plain JSON, and seal it again."""
    file = folder / MANIFEST
    content = json.loads(file.read_text("utf-8"))
    del content[SEAL]
    change(content)
    file.unlink()  # it may be a link
    file.write_text(json.dumps(content | {SEAL: seal_of(content)}, indent=1), "utf-8")


def replace_in_manifest(folder: Path, old: str, new: str) -> None:
    """Replace text in the manifest, and seal it again."""
    file = folder / MANIFEST
    text = file.read_text("utf-8")
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new), "utf-8")
    change_manifest(folder, lambda content: None)
