"""A graph of a bundle with the cache that onnxruntime-genai passes."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.bundle import Manifest
from edgekv.kv import Sink
from edgekv.runtime.rewrite import apply
from edgekv.spec import GraphRecord
from exporters.targets.genai.sink_columns import SinkColumns
from exporters.targets.key_columns import KeysInColumns
from exporters.targets.stack_heads import StackHeads


def stack_heads(model: ir.Model, manifest: Manifest, record: GraphRecord, sink: Sink | None = None) -> None:
    """Give a graph of a bundle keys in columns, the sink if there is one, and stacked heads, in place.

    Raises:
        BundleError: the graph's cache is not the one of the manifest.
    """
    passes: list[ir.passes.PassBase] = [StackHeads(manifest, record)]
    if sink is not None:
        passes.insert(0, SinkColumns(manifest, sink))
    if manifest.key_layout == "rows":
        passes.insert(0, KeysInColumns(manifest.geometry.names()))
    apply(model, *passes)
