"""A model that can be compared."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.spec.chat import ChatTemplates
from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class ContenderDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a model is and what runs it.

    Attributes:
        path: its file or folder.
        kind: its format, such as `bundle` or `GGUF`.
        engine: what computes, with its version.
        bytes: size of its weights and graphs on disk.
        context: the most tokens of a sequence.
    """

    path: str
    kind: str
    engine: str
    bytes: int
    context: int


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """How long one generation took.

    Attributes:
        first_s: to the first token, in seconds: prefill.
        rest_s: from there to the last one: decode.
    """

    first_s: float
    rest_s: float

    @classmethod
    def of(cls, tokens: Iterable[object]) -> Timing:
        """Of a generator of tokens, run to its end."""
        began = perf_counter()
        running = iter(tokens)
        next(running)
        first = perf_counter()
        for _ in running:
            pass
        return cls(first_s=first - began, rest_s=perf_counter() - first)


class Contender(Protocol):
    """One of the two models.

    Attributes:
        described: what it is.
        tokenizer: of its text; None if only the runtime has it.
        chat: its chat templates; None if it has none here.
        first: the tokens that its texts begin with.
        must_begin: whether the runtime computes no text that begins otherwise.
    """

    described: ContenderDescription
    tokenizer: Tokenizer | None
    chat: ChatTemplates | None
    first: Sequence[int]
    must_begin: bool

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window of token ids `[T]`, each from an empty cache.

        Raises:
            EngineError: the runtime failed.
        """

    def close(self) -> None:
        """Free the model. A second call does nothing."""


@runtime_checkable
class TimedContender(Contender, Protocol):
    """One whose speed means something."""

    def time(self, tokens: Sequence[int], new: int, /) -> Timing:
        """How long the generation of `new` tokens after these takes, from an empty cache.

        Raises:
            EngineError: the runtime failed.
        """


def bytes_on_disk(folder: Path) -> int:
    """The size of all files of a folder, or of one file."""
    files = [folder] if folder.is_file() else [file for file in folder.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)
