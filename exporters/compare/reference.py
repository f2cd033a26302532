"""A checkpoint or a GGUF file in float32 on numpy, as `edgekv eval` computes it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.spec.chat import ChatTemplates
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compare.contender import ContenderDescription
from exporters.quantize.reference import Floats, Reference

if TYPE_CHECKING:
    from tokenizers import Tokenizer

ENGINE = "numpy, float32"


class ReferenceContender:
    """A checkpoint; see `Contender`. Its speed is that of numpy, so it is not timed."""

    must_begin = False

    def __init__(self, checkpoint: Checkpoint, kind: str, size_bytes: int) -> None:
        self._reference = Reference(checkpoint)
        self.tokenizer: Tokenizer | None = checkpoint.tokenizer
        self.chat: ChatTemplates | None = checkpoint.chat
        bos = checkpoint.special.bos
        self.first: Sequence[int] = [] if bos is None else [bos]
        self.described = ContenderDescription(
            path=checkpoint.name, kind=kind, engine=ENGINE, bytes=size_bytes, context=checkpoint.spec.max_positions
        )

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        return self._reference.logits(windows)

    def close(self) -> None:
        """Nothing is kept open."""
