"""Pieces that measure a written bundle against the float32 reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.load_options import EngineOptions
from edgekv.runtime import make_engine
from exporters.checkpoint.folded import transformed_as
from exporters.inspect.evaluate import evaluate_windows
from exporters.inspect.layers import measure_layers
from exporters.inspect.report import LayerLoss
from exporters.inspect.tally import Evaluation
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece
from exporters.pipeline.quality import Measured
from exporters.quantize.reference import Floats, Reference

ENGINE = "cpu"


class LayerErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The error of every layer."""

    layers: list[LayerLoss]


@dataclass(frozen=True, slots=True)
class ReferencePiece(Piece):
    """Logits of the float32 reference, a file for each window."""

    kind: ClassVar[str] = "reference"

    measured: Measured

    @property
    def needs(self) -> tuple[str, ...]:
        return self.measured.needs

    def make(self, folder: Path, inputs: Inputs) -> object:
        windows, exact = self.measured.windows(inputs), self.measured.exact
        reference = Reference(inputs.text_checkpoint(exact, self.measured.tokenizer), self.measured.context)
        for number, logits in enumerate(reference.logits([window.inputs for window in windows])):
            np.save(folder / f"{number}.npy", logits)
        return len(windows)


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """Logits that `ReferencePiece` has written."""

    folder: Path

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window."""
        for number in range(len(windows)):
            yield np.load(self.folder / f"{number}.npy")


@dataclass(frozen=True, slots=True)
class EvaluatePiece(Piece):
    """Perplexity and agreement with the reference; answers an `Evaluation`.

    Attributes:
        measured: the text.
        bundle: name of the written bundle.
        reference: name of the reference's logits.
        engine: that runs the bundle.
    """

    kind: ClassVar[str] = "evaluate"

    measured: Measured
    bundle: str
    reference: str
    engine: str = ENGINE

    @property
    def needs(self) -> tuple[str, ...]:
        return *self.measured.needs, self.bundle, self.reference

    def make(self, folder: Path, inputs: Inputs) -> Evaluation:
        windows = self.measured.windows(inputs)
        with edgekv.load(inputs.bundle(self.bundle), engine=self.engine) as model:
            return evaluate_windows(
                model,
                inputs.text_checkpoint(self.measured.exact, self.measured.tokenizer),
                windows,
                self.measured.sample.title,
                reference=StoredLogits(inputs.store.path(self.reference)),
            )


@dataclass(frozen=True, slots=True)
class ErrorPiece(Piece):
    """The error of every layer on the first tokens of the text; answers `LayerErrors`.

    Attributes:
        measured: the text.
        bundle: name of the written bundle.
        engine: that runs the bundle.
    """

    kind: ClassVar[str] = "error"

    measured: Measured
    bundle: str
    engine: str = ENGINE

    @property
    def needs(self) -> tuple[str, ...]:
        return *self.measured.needs, self.bundle

    def make(self, folder: Path, inputs: Inputs) -> LayerErrors:
        windows, title = self.measured.windows(inputs), self.measured.sample.title
        with edgekv.load(inputs.bundle(self.bundle), engine=self.engine) as model:
            runner = make_engine(model.bundle, EngineOptions(self.engine))
            checkpoint = inputs.text_checkpoint(self.measured.exact, self.measured.tokenizer)
            tensors = transformed_as(model.bundle, checkpoint)
            return LayerErrors(layers=measure_layers(model.bundle, runner, tensors, windows, title).layers)
