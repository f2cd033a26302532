"""What `edgekv eval --layers` says."""

from __future__ import annotations

from typing import Literal

import msgspec

from exporters.inspect.propose import Proposal
from exporters.inspect.tally import Evaluation

Kind = Literal["weight", "activation", "key", "value"]


class TensorLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one tensor of a bundle.

    Attributes:
        name: the name in traces; for a matrix the name in the checkpoint.
        kind: `weight`, `activation`, or `key` or `value` of one head.
        layer: its layer; None for the embedding and the head.
        dtype: integer type.
        sqnr_db: SQNR against the reference; for an activation including the error of its inputs.
        own_db: SQNR due to this tensor's own quantization: for a matrix of its output on exact inputs, for an
            activation of the exact values in its encoding.
        outlier: the outlier channel, if there is one: for a matrix the input that causes most of its error, for an
            activation the channel that widens its range.
        clipped: share of the own error caused by values outside the encoding's range.
    """

    name: str
    kind: Kind
    layer: int | None
    dtype: str
    sqnr_db: float
    own_db: float
    outlier: int | None
    clipped: float = 0.0


class Levels(msgspec.Struct, frozen=True):
    """Minimum and mean SQNR of a group of tensors, dB."""

    least_db: float
    mean_db: float


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """SQNR levels of a layer, or of the `embedding` or the `head`."""

    place: str
    levels: dict[Kind, Levels]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with a large error and a suggestion; see `TensorLoss`."""

    name: str
    own_db: float
    sqnr_db: float
    suggestion: str


class LayersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `edgekv eval --layers`.

    Attributes:
        evaluation: perplexity and agreement on the same tokens.
        layers: in order, the embedding first, the head last.
        worst: the tensors with the largest own error, worst first.
        tensors: all tensors in the order of computation, a layer's matrices first.
        proposal: a suggested recipe, if requested.
    """

    evaluation: Evaluation
    layers: list[LayerLoss]
    worst: list[Advice]
    tensors: list[TensorLoss]
    proposal: Proposal | None = None
