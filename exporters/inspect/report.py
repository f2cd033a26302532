"""What `edgekv eval --layers` says."""

from __future__ import annotations

from typing import Literal

import msgspec

from exporters.inspect.evaluate import Evaluation
from exporters.inspect.propose import Proposal

Kind = Literal["weight", "activation", "key", "value"]


class TensorLoss(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a bundle beside the reference's.

    Attributes:
        name: as in traces; a matrix bears its name in the checkpoint.
        kind: a matrix, a result, or keys or values of one head.
        layer: its layer; None for what stands before and behind the layers.
        dtype: its integers.
        sqnr_db: how far it is from the reference's. A result has the errors of all before it.
        own_db: what its own integers cost: of a matrix the SQNR of its output on exact inputs; of a result that of the
            exact values in its encoding.
        outlier: the channel that stands out, if one does: the greatest input of a matrix's error, or the channel that
            makes a result's range wide.
        clipped: of the result's own error, the share that comes of values beyond the encoding's reach.
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
    """The least and the mean of some tensors' SQNR, dB."""

    least_db: float
    mean_db: float


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors of a layer, or of what stands before (`embedding`) and behind the layers (`head`)."""

    place: str
    levels: dict[Kind, Levels]


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor that costs, and the way out; see `TensorLoss`."""

    name: str
    own_db: float
    sqnr_db: float
    suggestion: str


class LayersReport(msgspec.Struct, frozen=True, kw_only=True):
    """What `edgekv eval --layers` finds.

    Attributes:
        evaluation: perplexity and agreement on the same tokens.
        layers: in order, the embedding first, the head last.
        worst: the tensors whose own integers cost most, the worst first.
        tensors: all tensors, in the order in which they are computed; a layer's matrices first.
        proposal: a recipe that would cost less quality, if one was asked for.
    """

    evaluation: Evaluation
    layers: list[LayerLoss]
    worst: list[Advice]
    tensors: list[TensorLoss]
    proposal: Proposal | None = None
