"""The work of measuring a written bundle against the float32 reference, in pieces."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

import edgekv
from edgekv.load_options import EngineOptions
from edgekv.runtime import make_engine
from exporters.checkpoint.folded import transformed_as
from exporters.inspect.evaluate import context_windows, evaluate_windows
from exporters.inspect.layers import measure_layers
from exporters.inspect.report import LayerLoss
from exporters.inspect.tally import Evaluation
from exporters.inspect.wikitext import Window
from exporters.quantize.reference import Floats, Reference
from exporters.sweep.source import Source
from exporters.sweep.store import PieceStore
from exporters.sweep.work import BUNDLE

ENGINE, TEXT = "cpu", "text.txt"


class LayerErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The error of every layer."""

    layers: list[LayerLoss]


@dataclass(frozen=True, slots=True)
class Sample:
    """The text of the evaluation.

    Attributes:
        key: of the piece that holds it.
        name: of the text.
        tokens: number of tokens to predict.
    """

    key: str
    name: str
    tokens: int

    def read(self, store: PieceStore) -> str:
        """The text, its line ends as they are: they are tokens."""
        return (store.path(self.key) / TEXT).read_bytes().decode()


@dataclass(frozen=True, slots=True)
class ReferenceWork:
    """Logits of the float32 reference, a file for each window."""

    source: Source
    sample: Sample

    def __call__(self, folder: Path, store: PieceStore) -> object:
        prepared = self.source.prepared
        windows = _windows(self.source, self.sample, store)
        reference = Reference(prepared.checkpoint, prepared.options.contexts[-1])
        for number, logits in enumerate(reference.logits([window.inputs for window in windows])):
            np.save(folder / f"{number}.npy", logits)
        return len(windows)


@dataclass(frozen=True, slots=True)
class StoredLogits:
    """Logits that `ReferenceWork` has written."""

    folder: Path

    def logits(self, windows: Sequence[NDArray[np.int64]], /) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window."""
        for number in range(len(windows)):
            yield np.load(self.folder / f"{number}.npy")


@dataclass(frozen=True, slots=True)
class EvaluateWork:
    """Perplexity and agreement with the reference; answers an `Evaluation`.

    Attributes:
        source: checkpoint and options.
        sample: the text.
        bundle: key of the written bundle.
        reference: key of the reference's logits.
    """

    source: Source
    sample: Sample
    bundle: str
    reference: str

    def __call__(self, folder: Path, store: PieceStore) -> Evaluation:
        windows = _windows(self.source, self.sample, store)
        with edgekv.load(store.path(self.bundle) / BUNDLE, engine=ENGINE) as model:
            return evaluate_windows(
                model,
                self.source.prepared.checkpoint,
                windows,
                self.sample.name,
                reference=StoredLogits(store.path(self.reference)),
            )


@dataclass(frozen=True, slots=True)
class ErrorWork:
    """The error of every layer on the first tokens of the text; answers `LayerErrors`."""

    source: Source
    sample: Sample
    bundle: str

    def __call__(self, folder: Path, store: PieceStore) -> LayerErrors:
        windows = _windows(self.source, self.sample, store)
        with edgekv.load(store.path(self.bundle) / BUNDLE, engine=ENGINE) as model:
            runner = make_engine(model.bundle, EngineOptions(ENGINE))
            tensors = transformed_as(model.bundle, self.source.prepared.checkpoint)
            return LayerErrors(layers=measure_layers(model.bundle, runner, tensors, windows, self.sample.name).layers)


def _windows(source: Source, sample: Sample, store: PieceStore) -> list[Window]:
    """The windows that `edgekv eval` measures: of the context length, with `sample.tokens` predicted tokens in all."""
    prepared, sink = source.prepared, source.surveyed(store).sink
    first = () if sink is None else sink.tokens
    context = prepared.options.contexts[-1]
    return context_windows(prepared.checkpoint, sample.read(store), context, first, sample.tokens)
