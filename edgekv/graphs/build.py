"""Builds the CPU's graph of a part of a bundle."""

from __future__ import annotations

import onnx

from edgekv.bundle import BundleWeights
from edgekv.graphs.appending import AppendingOps
from edgekv.graphs.cpu_mode import RenderedMode
from edgekv.graphs.decoder import decoder_layer, drafter_input, part_end
from edgekv.graphs.emulated import EmulatedOps
from edgekv.graphs.float_encoder import float_encoder
from edgekv.graphs.floats import FloatOps
from edgekv.graphs.source import EncoderSource, PartSource, Source
from edgekv.graphs.stacked_decoder import StackedOps
from edgekv.graphs.weight_file import WeightFile
from edgekv.graphs.wide import WideOps


def emulated(source: PartSource, *, batch_invariant: bool = False) -> onnx.ModelProto:
    """The part's graph with every result rounded as on the HTP; its weights stay in the bundle's files.

    Args:
        batch_invariant: whether a row has the same bits in graphs of every AR; they may differ from those of the
            exported graph.
    """
    weights = BundleWeights(source.folder, source.weights)
    return _built(source, EmulatedOps(source, weights, batch_invariant=batch_invariant))


def rendered(source: Source, mode: RenderedMode, file: WeightFile, *, batch_invariant: bool = False) -> onnx.ModelProto:
    """A graph with the bundle's integers as weights, and floats between the operations.

    Args:
        source: the part, or the encoder.
        mode: how activations are rounded in products of a few rows with weights; those of many rows are 16 bits.
        file: takes all large weights.
        batch_invariant: whether a row has the same bits in graphs of every AR.
    """
    weights = BundleWeights(source.folder, source.weights)
    if isinstance(source, EncoderSource):
        return float_encoder(source.vision, weights, mode, file)
    ops = WideOps if source.takes_fewer else AppendingOps if source.appends and source.part.layers else FloatOps
    return _built(source, ops(source, weights, mode=mode, file=file, batch_invariant=batch_invariant))


def _built(source: PartSource, ops: StackedOps) -> onnx.ModelProto:
    spec, part = ops.spec, source.part
    hidden = drafter_input(ops, spec, ops.entry())
    for layer in part.layers:
        hidden = decoder_layer(ops, spec, layer, hidden)
    ops.give(part_end(ops, spec, source.graph, part, hidden))
    return ops.finish()
