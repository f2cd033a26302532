"""What the vision encoder of a model costs, from its sizes alone."""

from __future__ import annotations

import math

import msgspec

from edgekv.plan.compiling import compile_bytes
from edgekv.spec import EncoderSpec

CALIBRATION_TILES = 6
"""Pictures that export draws."""

_HEAD_GRAPH_BYTES, _LAYER_GRAPH_BYTES, _ENDS_GRAPH_BYTES = 5_143, 3_520, 7_000
_PROCESS_BYTES = 120_000_000
_COMPILER = 1.36  # of what decoders of this size take: 0.95 GB for SmolVLM2's, 2.43 for InternVL3.5's


class EncoderPlan(msgspec.Struct, frozen=True, kw_only=True):
    """A vision encoder, which has a graph and an HTP context of its own.

    Attributes:
        image: edge of a tile, in pixels.
        tokens: rows that a tile becomes in a prompt.
        parameters: elements of all matrices.
        weights_bytes: int8 matrices with their scales, and tensors of 16 bits.
        activations_bytes: an upper estimate, as that of the decoder's graphs.
        graph_bytes: its file without weights.
        quantization_peak_bytes: RAM to quantize it.
        compile_peak_bytes: RAM to compile it.
    """

    image: int
    tokens: int
    parameters: int
    weights_bytes: int
    activations_bytes: int
    graph_bytes: int
    quantization_peak_bytes: int
    compile_peak_bytes: int

    @property
    def used_bytes(self) -> int:
        """Of its HTP context."""
        return self.weights_bytes + self.activations_bytes

    @property
    def bundle_bytes(self) -> int:
        """On disk."""
        return self.weights_bytes + self.graph_bytes

    @classmethod
    def of(cls, spec: EncoderSpec, tiles: int = CALIBRATION_TILES) -> EncoderPlan:
        """The plan of an encoder that is calibrated on so many tiles."""
        matrices, tensors = spec.matrices.values(), spec.tensors.values()
        parameters = sum(rows * columns for rows, columns in matrices)
        weights_bytes = parameters + sum(4 * rows for rows, _ in matrices) + 2 * sum(map(math.prod, tensors))
        graph_bytes = spec.layers * (spec.heads * _HEAD_GRAPH_BYTES + _LAYER_GRAPH_BYTES) + _ENDS_GRAPH_BYTES
        return cls(
            image=spec.image,
            tokens=spec.rows,
            parameters=parameters,
            weights_bytes=weights_bytes,
            activations_bytes=2 * spec.inputs * (3 * spec.hidden + 2 * max(spec.inputs, spec.intermediate)),
            graph_bytes=graph_bytes,
            quantization_peak_bytes=_PROCESS_BYTES + quantization_bytes(spec, tiles),
            compile_peak_bytes=round(_COMPILER * compile_bytes(weights_bytes, graph_bytes, 1)),
        )


def quantization_bytes(spec: EncoderSpec, tiles: int) -> int:
    """RAM to quantize an encoder: a layer in float32, all matrices as integers, and the largest results of a tile."""
    integers = sum(rows * columns for rows, columns in spec.matrices.values())
    layer = 4 * spec.hidden * (4 * spec.hidden + 2 * spec.intermediate)
    projector = 12 * spec.output * spec.hidden * spec.merged
    results = 12 * spec.patches * max(spec.patches, spec.intermediate, spec.patch_values)
    return integers + max(2 * layer, projector) + results + 8 * tiles * spec.patches * spec.patch_values
