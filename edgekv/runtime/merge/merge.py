"""Applies the passes that make a graph fast on a CPU."""

from __future__ import annotations

from pathlib import Path

import onnx
import onnx_ir as ir

from edgekv.runtime.merge.merge_heads import MergeHeads
from edgekv.runtime.merge.move_integers import MoveIntegers
from edgekv.runtime.rewrite import InferredShapes, apply, collector_paused, load_model


def merged(graph: Path) -> onnx.ModelProto:
    """The graph of an ONNX file with equal nodes of many heads merged into one; same inputs and outputs.

    Weights stay in their files, as external data.
    """
    with collector_paused():
        model = load_model(graph)
        apply(model, MoveIntegers(), MergeHeads(InferredShapes(graph)))
        return ir.to_proto(model)
