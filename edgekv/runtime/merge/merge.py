"""Applies the passes that make a graph fast on a CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from edgekv.runtime.merge.alike_rows import AlikeRows
from edgekv.runtime.merge.float_adapters import FloatAdapters
from edgekv.runtime.merge.merge_heads import MergeHeads
from edgekv.runtime.merge.move_integers import MoveIntegers
from edgekv.runtime.merge.open_rows import OpenRows
from edgekv.runtime.merge.stack_adapters import StackAdapters
from edgekv.runtime.rewrite import InferredShapes, apply, collector_paused, load_model


def merged(graph: Path, *, alike_rows: bool = False) -> onnx.ModelProto:
    """The graph of an ONNX file with equal nodes of many heads merged into one; same inputs and outputs.

    Weights stay in their files, as external data.

    Args:
        graph: the file.
        alike_rows: whether a row has the same bits in graphs of every AR, which may differ from those of the file; see
            `AlikeRows`.
    """
    with collector_paused():
        model = load_model(graph)
        apply(model, FloatAdapters(), MoveIntegers(), MergeHeads(InferredShapes(graph)), StackAdapters())
        if alike_rows:
            model = with_shapes(model, graph.parent)
            apply(model, AlikeRows(), OpenRows())
        return ir.to_proto(model)


def with_shapes(model: ir.Model, folder: Path) -> ir.Model:
    """The model with the shapes that can be inferred, without traces of removed nodes; its weights are in a folder."""
    read = ir.from_proto(onnx.shape_inference.infer_shapes(ir.to_proto(model)))
    for value in read.graph.initializers.values():
        if isinstance(value.const_value, ir.ExternalTensor):
            value.const_value = _at(value.const_value, folder)
    return read


def _at(tensor: ir.ExternalTensor, folder: Path) -> ir.ExternalTensor:
    return ir.ExternalTensor(
        tensor.location,
        tensor.offset,
        tensor.length,
        tensor.dtype,
        shape=tensor.shape,
        name=tensor.name,
        base_dir=folder,
    )
