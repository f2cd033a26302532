"""What `edgekv eval --layers` says."""

from __future__ import annotations

from typing import Literal

import msgspec

from exporters.inspect.propose import Proposal
from exporters.inspect.tally import Evaluation

Kind = Literal["weight", "activation", "key", "value", "state"]


class ValueRange(msgspec.Struct, frozen=True, kw_only=True):
    """The range of a result's encoding, and the values that the float reference had there.

    Attributes:
        reach: least and greatest value that the encoding represents.
        seen: least and greatest value.
        central: the 0.1 % and 99.9 % quantiles at all positions but 0, from a sample.
        unused_bits: log2 of the width of `reach` over that of `central`: bits that 99.8 % of the values do not use.
    """

    reach: tuple[float, float]
    seen: tuple[float, float]
    central: tuple[float, float]
    unused_bits: float


class TensorLoss(msgspec.Struct, frozen=True, kw_only=True):
    """The error of one tensor of a bundle.

    SQNR is the mean over tokens of each token's, so that no token owns it; position 0 is not among them.

    Attributes:
        name: the name in traces; for a matrix the name in the checkpoint.
        kind: `weight`, `activation`, or `key` or `value` of one head.
        layer: its layer; None for the embedding and the head.
        dtype: integer type.
        sqnr_db: SQNR against the reference; for an activation including the error of its inputs; for a matrix of its
            elements.
        own_db: SQNR due to this tensor's own quantization: for a matrix of its output on exact inputs, for an
            activation of the exact values in its encoding.
        first_db: `sqnr_db` of an activation at position 0; None if no graph computes it.
        outlier: the outlier channel, if there is one: for a matrix the input that causes most of its error, for an
            activation the channel that widens its range.
        clipped: share of the own error caused by values outside the encoding's range.
        range: of an activation.
    """

    name: str
    kind: Kind
    layer: int | None
    dtype: str
    sqnr_db: float
    own_db: float
    outlier: int | None
    first_db: float | None = None
    clipped: float = 0.0
    range: ValueRange | None = None


class TokenSpan(msgspec.Struct, frozen=True, kw_only=True):
    """A token whose magnitudes span the range of a result.

    Attributes:
        name: of the result.
        position: of the token in its window.
        token: its id.
        text: its text.
        magnitude: the greatest at this token.
        others: the greatest at all other tokens; see `exporters.inspect.meters.Peak`.
        seen: least and greatest value with it.
        without: least and greatest value at the other tokens.
        cost_db: how much coarser the steps of the range are with it, 20 log10.
    """

    name: str
    position: int
    token: int
    text: str
    magnitude: float
    others: float
    seen: tuple[float, float]
    without: tuple[float, float]
    cost_db: float

    @property
    def ratio(self) -> float:
        """The magnitude over that of all others."""
        return self.magnitude / max(self.others, 1e-30)


class Levels(msgspec.Struct, frozen=True):
    """Minimum and mean SQNR of a group of tensors, dB."""

    min_db: float
    mean_db: float


class LayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """SQNR levels of a layer, or of the `embedding` or the `head`.

    Attributes:
        place: the number of the layer, `embedding` or `head`.
        levels: of each kind of tensor.
        first: of the activations at position 0; None if no graph computes it.
    """

    place: str
    levels: dict[Kind, Levels]
    first: Levels | None = None


class Advice(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor with a large error and a suggestion; see `TensorLoss`."""

    name: str
    own_db: float
    sqnr_db: float
    suggestion: str


class EncoderMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """A matrix of a vision encoder, and the SQNR of its product with exact inputs, dB."""

    name: str
    own_db: float


class EncoderLayerLoss(msgspec.Struct, frozen=True, kw_only=True):
    """SQNR of the rows of a vision encoder's residual behind a layer, with the error of all before.

    Attributes:
        place: `patches`, the number of the layer, or `rows`: what decoders read.
        rows: the least row and the median one.
        worst: the matrix of the layer with the largest error of its own.
    """

    place: str
    rows: Levels
    worst: EncoderMatrix


class LayersReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of `edgekv eval --layers`.

    Attributes:
        evaluation: perplexity and agreement on the same tokens.
        layers: in order, the embedding first, the head last.
        worst: the tensors with the largest own error, worst first.
        spans: results whose range one token spans, the most costly first.
        tensors: all tensors in the order of computation, a layer's matrices first.
        proposal: a suggested recipe, if requested.
        encoder: the layers of the vision encoder, on a drawn picture; empty for bundles of text.
    """

    evaluation: Evaluation
    layers: list[LayerLoss]
    worst: list[Advice]
    tensors: list[TensorLoss]
    spans: list[TokenSpan] = []
    proposal: Proposal | None = None
    encoder: list[EncoderLayerLoss] = []
