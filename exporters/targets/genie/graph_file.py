"""The inputs and outputs of a graph in Genie's shapes, with the encodings of its first and last nodes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import onnx_ir as ir

from exporters.graphs.models import encoding, load_model, readers, sizes
from exporters.targets.genie.ports import GeniePort, GeniePorts


def read_ports(path: Path) -> GeniePorts:
    """The ports of a graph that dequantizes its inputs first and quantizes its outputs last."""
    graph = load_model(path).graph
    return GeniePorts(
        tuple(_port(each, readers(each)) for each in graph.inputs),
        tuple(_port(each, [each.producer()]) for each in graph.outputs),
    )


def _port(value: ir.Value, nodes: Iterable[ir.Node | None]) -> GeniePort:
    found = next((encoding(node) for node in nodes if node is not None), None)
    return GeniePort.of(str(value.name), tuple(sizes(value)), found)
