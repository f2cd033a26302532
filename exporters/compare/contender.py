"""A model that can be compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class Described(msgspec.Struct, frozen=True, kw_only=True):
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


class Contender(Protocol):
    """One of the two models.

    Attributes:
        described: what it is.
        tokenizer: of its text; None if only the runtime has it.
        first: the tokens that its texts begin with.
        must_begin: whether the runtime computes no text that begins otherwise.
        is_timed: whether its speed means anything.
    """

    described: Described
    tokenizer: Tokenizer | None
    first: Sequence[int]
    must_begin: bool
    is_timed: bool

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window of token ids `[T]`, each from an empty cache.

        Raises:
            EngineError: the runtime failed.
        """

    def seconds(self, tokens: Sequence[int], new: int, /) -> float:
        """How long these tokens and the generation of `new` others take, from an empty cache.

        Raises:
            EngineError: the runtime failed.
        """

    def close(self) -> None:
        """Free the model. A second call does nothing."""


def bytes_on_disk(folder: Path) -> int:
    """The size of all files of a folder, or of one file."""
    files = [folder] if folder.is_file() else [each for each in folder.rglob("*") if each.is_file()]
    return sum(each.stat().st_size for each in files)
