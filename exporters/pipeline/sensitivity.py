"""The piece that measures what each matrix would lose in each type that it may get."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from edgekv.bundle import WeightRecord
from edgekv.spec import HEAD
from exporters.inspect.sensitivity import Candidates, Costs, matrix_costs
from exporters.pipeline.inputs import DecoderKey, Inputs
from exporters.pipeline.piece import Piece
from exporters.pipeline.pieces import recipe_of
from exporters.quantize.matrices import Quantizer
from quant import WeightDtype

_TOKENS = 4096
_WEIGHED = 0.5  # what `attention` leaves of the loss of GPTQ, with which types are compared


@dataclass(frozen=True, slots=True)
class SensitivityPiece(Piece):
    """KL divergence from the exact decoder if one matrix alone has a type; answers `Costs`.

    Matrices are rounded on the exact decoder's activations on the first tokens of the calibration text. A later window
    and the last one are measured: prose, and a chat if there are any.

    Attributes:
        decoder: what is quantized, and its calibration text.
        rules: the methods of the matrices; their types do not count.
        types: that each may get.
    """

    kind: ClassVar[str] = "sensitivity"

    decoder: DecoderKey
    rules: tuple[WeightRecord, ...]
    types: tuple[tuple[str, tuple[WeightDtype, ...]], ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return self.decoder.needs

    def make(self, folder: Path, inputs: Inputs) -> Costs:
        surveyed, tensors = inputs.surveyed(self.decoder), inputs.folded(self.decoder)
        windows, context, types = surveyed.tokens, self.decoder.context, dict(self.types)
        measured = [windows[-1 - len(windows) // 3], windows[-1]]
        fitted = windows[: max(1, min(_TOKENS // windows.shape[1], len(windows) * 2 // 3 - 1))]
        rules, sink = recipe_of(self.rules), surveyed.sink_tokens
        quantizer = Quantizer(tensors, fitted, context, rules, sink, follows=False, folder=inputs.store.folder)

        def quantized(layer: int | None) -> Candidates:
            return (
                quantizer.head_candidates(types.get(HEAD, ())) if layer is None else quantizer.candidates(layer, types)
            )

        costs = matrix_costs(quantized, tensors, measured, context, inputs.progress, sink=sink)
        for name in (rule.tensor for rule in self.rules if rule.method == "attention" and rule.tensor in costs):
            costs[name] = {dtype: _WEIGHED * nats for dtype, nats in costs[name].items()}
        return costs
