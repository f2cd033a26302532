"""The supported vision encoders, one file each.

A file declares `MODEL_TYPES`, the values of `model_type` that it reads, and two functions of the configuration and the
processor's: `describe` returns the `EncoderSpec`, and `pictures` the `PictureSpec`. `NAMES` says what its checkpoints
call tensors. `decoder`, where it is there, adds what pictures change in the decoder, of the configuration.
`reads`, where it is there, says whether an encoder is one of those that are exported; else the decoder is alone.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from edgekv.spec.config import Config
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.encoders.names import EncoderNames
from edgekv.spec.vision import EncoderSpec, PictureSpec


@dataclass(frozen=True, slots=True)
class EncoderFamily:
    """How to read the checkpoints of an architecture; see the package."""

    describe: Callable[[Config, Config], EncoderSpec]
    pictures: Callable[[Config, Config], PictureSpec]
    names: EncoderNames
    decoder: Callable[[Config, DecoderSpec], DecoderSpec] | None = None
    reads: Callable[[Config], bool] | None = None


def find_encoders() -> Mapping[str, EncoderFamily]:
    """The encoders by `model_type`."""
    encoders: dict[str, EncoderFamily] = {}
    for entry in sorted(pkgutil.iter_modules(__path__), key=lambda entry: entry.name):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        if hasattr(module, "MODEL_TYPES"):
            decoder = getattr(module, "decoder", None)
            reads = getattr(module, "reads", None)
            family = EncoderFamily(module.describe, module.pictures, module.NAMES, decoder, reads)
            encoders.update(dict.fromkeys(module.MODEL_TYPES, family))
    return encoders


ENCODERS = find_encoders()
"""All supported encoders; see `find_encoders`."""


def encoder_family(config: Config) -> EncoderFamily | None:
    """How to read the encoder of a checkpoint; None if it has none, or one that is left out."""
    family = ENCODERS.get(config.text("model_type"))
    return None if family is None or (family.reads is not None and not family.reads(config)) else family
