"""The supported architectures, one file each.

A file declares `MODEL_TYPES`, the values of `model_type` that it reads, and `describe(config)`, which returns the
`DecoderSpec`; or, of drafters that read the state of another model, `DRAFTER_TYPES` and `describe_drafter(config,
target)`. Files are found by listing this folder: a new architecture needs nothing else.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec

Describe = Callable[[Config], DecoderSpec]
DescribeDrafter = Callable[[Config, DecoderSpec], DecoderSpec]


def find_families() -> tuple[Mapping[str, Describe], Mapping[str, DescribeDrafter]]:
    """How to describe a decoder or a drafter, by `model_type`: one entry for each type that a file here declares."""
    decoders: dict[str, Describe] = {}
    drafters: dict[str, DescribeDrafter] = {}
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if hasattr(module, "DRAFTER_TYPES"):
            drafters.update(dict.fromkeys(module.DRAFTER_TYPES, module.describe_drafter))
        else:
            decoders.update(dict.fromkeys(module.MODEL_TYPES, module.describe))
    return decoders, drafters


ARCHITECTURES, DRAFTERS = find_families()
"""All supported architectures, and drafters; see `find_families`."""
