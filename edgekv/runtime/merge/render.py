"""A graph rewritten for speed on a CPU: the bundle's integers as weights, floats between the operations."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from edgekv.runtime.cpu_instructions import multiplies_integers
from edgekv.runtime.cpu_mode import RenderedMode
from edgekv.runtime.merge.alike_rows import AlikeRows
from edgekv.runtime.merge.float_activations import FloatActivations
from edgekv.runtime.merge.float_adapters import FloatAdapters
from edgekv.runtime.merge.fuse_heads import FuseHeads
from edgekv.runtime.merge.fuse_layers import FuseLayers
from edgekv.runtime.merge.merge import with_shapes
from edgekv.runtime.merge.merge_heads import MergeHeads
from edgekv.runtime.merge.move_integers import MoveIntegers
from edgekv.runtime.merge.multiply_integers import MultiplyIntegers
from edgekv.runtime.merge.open_rows import OpenRows
from edgekv.runtime.merge.pack_matrices import PackMatrices
from edgekv.runtime.merge.skip_reshapes import SkipReshapes
from edgekv.runtime.merge.stack_adapters import StackAdapters
from edgekv.runtime.merge.two_rows import TwoRows
from edgekv.runtime.merge.weight_file import WeightFile
from edgekv.runtime.rewrite import InferredShapes, apply, collector_paused, load_model, sizes
from edgekv.spec import LOGITS

_SMALL_BYTES = 1 << 16


def rendered(graph: Path, mode: RenderedMode, weights: WeightFile, *, alike_rows: bool = False) -> onnx.ModelProto:
    """The graph of an ONNX file, rewritten; same inputs and outputs, other bits.

    Args:
        graph: the file; its weights are beside it.
        mode: how activations are rounded in products of a few rows with weights; those of many rows are 16 bits.
        weights: takes all weights, also those that are not packed.
        alike_rows: whether a row has the same bits in graphs of every AR; see `AlikeRows`.
    """
    with collector_paused():
        model = load_model(graph)
        apply(model, FloatActivations(), FloatAdapters(), MoveIntegers(), MergeHeads(InferredShapes(graph)))
        apply(model, StackAdapters())
        model = with_shapes(model, graph.parent)
        apply(model, FuseHeads(), FuseLayers())
        if multiplies_integers():
            apply(model, MultiplyIntegers(weights, mode, is_scoring=_is_scoring(model)))
        apply(model, PackMatrices(weights), SkipReshapes())
        if mode == "exact16":
            apply(model, TwoRows())
        if alike_rows:
            apply(model, AlikeRows())
        apply(model, OpenRows())
        _move_weights(model, weights)
        return ir.to_proto(model)


def _is_scoring(model: ir.Model) -> bool:
    """Whether a graph returns the logits of several tokens: it measures the decode step, so it computes alike."""
    *_, rows, _ = sizes(model.graph.outputs[-1])
    return model.graph.outputs[-1].name == LOGITS and rows > 1


def _move_weights(model: ir.Model, weights: WeightFile) -> None:
    """Copy the weights that still lie beside the bundle's graph: small ones into the model."""
    for name, value in model.graph.initializers.items():
        tensor = value.const_value
        if not isinstance(tensor, ir.ExternalTensor) or tensor.location == weights.location:
            continue
        if tensor.nbytes <= _SMALL_BYTES:
            value.const_value = ir.tensor(tensor.numpy(), dtype=tensor.dtype, name=name)
        else:
            value.const_value = weights.tensor(name, tensor.numpy(), tensor.dtype)
