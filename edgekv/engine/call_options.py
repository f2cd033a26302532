"""What a call of `Model.generate` may say beside its prompt and how to choose tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from edgekv.draft import Speculation, SpeculationMode
from edgekv.engine.pictures import PictureSource
from edgekv.pictures import Picture
from edgekv.prefix import RetentionPolicy
from edgekv.spec.chat import Message
from edgekv.text.params import BeamKeywords, SamplingKeywords
from edgekv.text.sampler import LogitsProcessor
from edgekv.text.tools import Tools


@dataclass(frozen=True, slots=True)
class CallOptions:
    """See `Model.generate`, whose keywords these are."""

    messages: Sequence[Message] | None = None
    tools: Tools | Sequence[Mapping[str, Any]] | None = None
    sequence: int | None = None
    cache_salt: str | None = None
    retention: RetentionPolicy | None = None
    processors: Sequence[LogitsProcessor] = ()
    thoughts: bool | None = None
    return_logits: bool = False
    speculate: Speculation | SpeculationMode | None = None
    lora: str | None = None
    pictures: Sequence[Picture | PictureSource] = ()

    @classmethod
    def split(cls, keywords: Mapping[str, Any]) -> tuple[CallOptions, dict[str, Any]]:
        """The options among keywords, and the keywords that are none."""
        names = {field.name for field in fields(cls)}
        own = {name: value for name, value in keywords.items() if name in names}
        return cls(**own), {name: value for name, value in keywords.items() if name not in names}


class BeamCall(BeamKeywords, total=False):
    """Keywords of a beam search."""

    sequence: int | None
    lora: str | None
    pictures: Sequence[Picture | PictureSource]


class TextsCall(SamplingKeywords, total=False):
    """Keywords of a call with a list of texts."""

    cache_salt: str | None
    retention: RetentionPolicy | None
    processors: Sequence[LogitsProcessor]
    thoughts: bool | None
    return_logits: bool
    speculate: Speculation | SpeculationMode | None
    lora: str | None


class GenerateCall(TextsCall, total=False):
    """All keywords of a call that samples."""

    messages: Sequence[Message] | None
    tools: Tools | Sequence[Mapping[str, Any]] | None
    sequence: int | None
    pictures: Sequence[Picture | PictureSource]
