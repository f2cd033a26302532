"""A bundle on one of its engines."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.cli.summary import engine_and_mode
from edgekv.spec.chat import ChatTemplates, read_bundle_templates
from exporters.compare.contender import ContenderDescription, Timing, bytes_on_disk
from exporters.quantize.reference import Floats

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_COMPILED = "compiled"  # binaries of chips, which repeat the weights


class BundleContender:
    """A bundle; see `Contender`."""

    must_begin = False

    def __init__(self, path: Path, engine: str, cpu_mode: str | None, threads: int | None) -> None:
        """Load it.

        Raises:
            EdgeKVError: as `edgekv.load`.
        """
        self._model = edgekv.load(path, engine, cpu_mode=cpu_mode, threads=threads)
        manifest = self._model.bundle.manifest
        bos = manifest.tokens.bos
        self.first: Sequence[int] = [] if bos is None else [bos]
        if manifest.sink is not None:
            self.first, self.must_begin = manifest.sink.tokens, True
        self.tokenizer: Tokenizer | None = self._model.tokenizer
        self.chat: ChatTemplates | None = read_bundle_templates(path)
        self.described = ContenderDescription(
            path=str(path),
            kind=f"bundle, {manifest.recipe.name}",
            engine=f"edgekv, {engine_and_mode(self._model.engine.name)}",
            bytes=bytes_on_disk(path) - bytes_on_disk(path / _COMPILED),
            context=manifest.context,
        )

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        for window in windows:
            yield self._model.score(window.tolist())

    def time(self, tokens: Sequence[int], new: int, /) -> Timing:
        self._model.session.reset()
        return Timing.of(self._model.generate(tokens, max_new_tokens=new, temperature=0, ignore_eos=True))

    def close(self) -> None:
        self._model.close()
