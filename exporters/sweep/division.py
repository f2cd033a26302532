"""The work of quantizing one layer, divided so that matrices with the same inputs are quantized side by side.

A layer runs to the inputs of each group of matrices, they are quantized, and it runs on with them. With matrices of 8
bits it does not wait for them, because the exact decoder stands for the quantized one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exporters.quantize.matrices import GROUPS
from exporters.quantize.reference import Floats
from exporters.quantize.stages import Stage
from exporters.sweep.source import Source
from exporters.sweep.store import PieceStore
from exporters.sweep.work import STAGE, quantizer_of, read_stage

_RESIDUAL = "residual"
_ATTENTION = 2  # group before whose inputs attention is added to the residual
_END = GROUPS


@dataclass(frozen=True, slots=True)
class RunWork:
    """A layer from the inputs of one group of matrices to those of the next, with observed ranges.

    Attributes:
        source: checkpoint and options.
        layer: its number.
        group: the group to run to; the last is the end of the layer.
        residual: key of the piece with the residual before it; None for the embeddings, or if it is not needed.
        before: key of the run to the group before; None for the first.
        matrices: names of the matrices of the group before; each with its key, or None if the exact one is used.
    """

    source: Source
    layer: int
    group: int
    residual: str | None
    before: str | None
    matrices: tuple[tuple[str, str | None], ...]

    def __call__(self, folder: Path, store: PieceStore) -> object:
        quantizer = quantizer_of(self.source, store)
        if self.layer or self.group:
            quantizer.take_ranges()  # that of the embedding belongs to the first run
        if self.residual is not None:
            quantizer.hidden = _residual(store, self.residual)
        for name, key in self.matrices:
            quantizer.use(name, None if key is None else read_stage(store, key).matrix(name))
        x = None if self.before is None else read_stage(store, self.before).hidden()
        found = quantizer.run_to(self.layer, self.group, x)
        Stage.write(folder / STAGE, {}, quantizer.take_ranges(), found)
        if self.group == _ATTENTION:
            Stage.write(folder / _RESIDUAL, {}, {}, quantizer.hidden)
        return None


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """One quantized matrix of a layer.

    Attributes:
        source: checkpoint and options.
        name: of the matrix.
        inputs: key of the run to its inputs.
    """

    source: Source
    name: str
    inputs: str

    def __call__(self, folder: Path, store: PieceStore) -> object:
        quantizer = quantizer_of(self.source, store)
        weight = quantizer.quantized(self.name, quantizer.inputs(read_stage(store, self.inputs).hidden()))
        Stage.write(folder / STAGE, {self.name: weight}, {}, None)
        return None


@dataclass(frozen=True, slots=True)
class JoinWork:
    """A layer from its runs and matrices: the files of `LayerWork`.

    Attributes:
        runs: keys of its runs, in order.
        matrices: names and keys of its matrices, in order.
    """

    runs: tuple[str, ...]
    matrices: tuple[tuple[str, str], ...]

    def __call__(self, folder: Path, store: PieceStore) -> object:
        stages = [read_stage(store, key) for key in self.runs]
        ranges = {name: seen for stage in stages for name, seen in stage.ranges().items()}
        matrices = {name: read_stage(store, key).matrix(name) for name, key in self.matrices}
        Stage.write(folder / STAGE, matrices, ranges, stages[_END].hidden())
        return None


def _residual(store: PieceStore, key: str) -> Floats:
    """The residual that a run to group 2 or to the end of a layer, or a whole layer, has left."""
    folder = store.path(key)
    found = Stage.open(folder / _RESIDUAL) if (folder / _RESIDUAL).exists() else read_stage(store, key)
    if found is None:
        raise ValueError(f"{folder}: got a damaged residual; expected what was written. Remove the folder.")
    return found.hidden()
