"""Pieces that measure a written bundle against the float32 reference."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import edgekv
from edgekv.bundle import open_bundle
from exporters.inspect.evaluate import evaluate_windows
from exporters.inspect.tally import Evaluation
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Piece
from exporters.pipeline.quality import QualityWindows, StoredLogits

ENGINE = "cpu"


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

    measured: QualityWindows
    bundle: str
    reference: str
    engine: str = ENGINE

    @property
    def needs(self) -> tuple[str, ...]:
        return *self.measured.needs, self.bundle, self.reference

    def make(self, folder: Path, inputs: Inputs) -> Evaluation:
        windows = self.measured.windows(inputs)
        bundle, reference = open_bundle(inputs.bundle(self.bundle), verify=False), inputs.store.path(self.reference)
        with edgekv.load(bundle, engine=self.engine, threads=inputs.threads) as model:
            return evaluate_windows(model, StoredLogits(reference), windows, self.measured.title)
