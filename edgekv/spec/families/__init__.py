"""The supported architectures, one file each.

A file declares `MODEL_TYPES`, the values of `model_type` that it reads, and `describe(config)`, which returns the
`DecoderSpec`. Files are found by listing this folder: a new architecture needs nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec

Describe = Callable[[Config], DecoderSpec]


def find_families() -> Mapping[str, Describe]:
    """How to describe a decoder, by `model_type`: one entry for each type that a file of this folder declares."""
    found: dict[str, Describe] = {}
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        found.update(dict.fromkeys(module.MODEL_TYPES, module.describe))
    return found


ARCHITECTURES = find_families()
"""All supported architectures; see `find_families`."""
