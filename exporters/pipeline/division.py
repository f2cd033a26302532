"""A layer in several pieces, so that matrices with the same inputs are quantized side by side.

A layer runs to the inputs of each group of matrices, they are quantized, and it runs on with them. With matrices of 8
bits it does not wait for them, because the exact decoder stands for the quantized one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from edgekv.bundle import WeightRecord
from exporters.pipeline.inputs import LAYER, Folded, Inputs
from exporters.pipeline.layer_file import LayerFile
from exporters.pipeline.piece import Piece
from exporters.pipeline.pieces import LayerPiece, recipe_of
from exporters.quantize.windows import Windows

_RESIDUAL = "residual"
MIXED = 1
"""The group of matrices that read the results of attention: a run to it computes keys and values."""
_ATTENTION = 2  # group before whose inputs attention is added to the residual


@dataclass(frozen=True, slots=True)
class RunPiece(Piece):
    """A layer from the inputs of one group of matrices to those of the next, with observed ranges.

    Attributes:
        folded: the decoder, and its calibration text.
        layer: its number.
        group: the group to run to; the last is the end of the layer.
        follows: see `LayerPiece`.
        residual: name of the piece with the residual before it; None for the embeddings, or if it is not needed.
        before: name of the run to the group before; None for the first.
        matrices: names of the matrices of the group before; each with its piece, or None if the exact one is used.
        shared: names of the runs with keys and values of other layers that it reads.
    """

    kind: ClassVar[str] = "run"

    folded: Folded
    layer: int
    group: int
    follows: bool
    residual: str | None
    before: str | None
    matrices: tuple[tuple[str, str | None], ...]
    shared: tuple[str, ...] = ()

    @property
    def needs(self) -> tuple[str, ...]:
        others = (self.residual, self.before, *(name for _, name in self.matrices), *self.shared)
        return (*self.folded.needs, *filter(None, others))

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.folded, recipe_of(()), follows=self.follows)
        if self.layer or self.group:
            quantizer.take_ranges()  # that of the embedding belongs to the first run
        if self.residual is not None:
            quantizer.hidden = _residual(inputs, self.residual)
        for matrix, name in self.matrices:
            quantizer.use(matrix, None if name is None else inputs.layer(name).matrix(matrix))
        for name in self.shared:
            quantizer.share(inputs.layer(name).shared())
        x = None if self.before is None else inputs.layer(self.before).hidden()
        found = quantizer.run_to(self.layer, self.group, x)
        shared = quantizer.shared_rows(self.layer) if self.group == MIXED else {}
        LayerFile.write(folder / LAYER, {}, quantizer.take_ranges(), found, shared)
        if self.group == _ATTENTION:
            LayerFile.write(folder / _RESIDUAL, {}, {}, quantizer.hidden)
        return None


@dataclass(frozen=True, slots=True)
class MatrixPiece(Piece):
    """One quantized matrix of a layer.

    Attributes:
        folded: the decoder, and its calibration text.
        matrix: its name.
        rules: its rule alone.
        follows: see `LayerPiece`.
        group: of the matrices with the same inputs.
        inputs: name of the run to its inputs.
        residual: name of the piece with the residual that its outputs are added to; None for the embeddings, or if it
            is not needed.
    """

    kind: ClassVar[str] = "matrix"

    folded: Folded
    matrix: str
    rules: tuple[WeightRecord, ...]
    follows: bool
    group: int
    inputs: str
    residual: str | None

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.folded.needs, self.inputs, *filter(None, (self.residual,)))

    def make(self, folder: Path, inputs: Inputs) -> object:
        quantizer = inputs.take_quantizer(self.folded, recipe_of(self.rules), follows=self.follows)
        if self.residual is not None:
            quantizer.hidden = _residual(inputs, self.residual)
        x = inputs.layer(self.inputs).hidden()
        weight = quantizer.quantized(self.matrix, quantizer.inputs(x, self.group), x)
        LayerFile.write(folder / LAYER, {self.matrix: weight}, {}, None)
        return None


@dataclass(frozen=True, slots=True)
class JoinPiece(Piece):
    """A layer from its runs and matrices: the piece that `LayerPiece` makes at once, under the same name.

    Attributes:
        layer: what it is.
        runs: names of its runs, in order.
        matrices: names and pieces of its matrices, in order.
    """

    kind: ClassVar[str] = "layer"

    layer: LayerPiece
    runs: tuple[str, ...]
    matrices: tuple[tuple[str, str], ...]

    @property
    def name(self) -> str:
        return self.layer.name

    @property
    def needs(self) -> tuple[str, ...]:
        return (*self.runs, *(name for _, name in self.matrices))

    def make(self, folder: Path, inputs: Inputs) -> object:
        runs = [inputs.layer(name) for name in self.runs]
        ranges = {name: seen for run in runs for name, seen in run.ranges().items()}
        matrices = {matrix: inputs.layer(name).matrix(matrix) for matrix, name in self.matrices}
        LayerFile.write(folder / LAYER, matrices, ranges, runs[-1].hidden(), runs[MIXED].shared())
        return None


def _residual(inputs: Inputs, name: str) -> Windows:
    """The residual that a run to group 2 or to the end of a layer, or a whole layer, has left."""
    folder = inputs.store.path(name)
    return LayerFile.open(folder / (_RESIDUAL if (folder / _RESIDUAL).exists() else LAYER)).hidden()
