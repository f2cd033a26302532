"""The number of inputs and outputs of the graphs: each is a tensor that a runtime registers and binds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from edgekv.spec import DecoderInterface, Geometry, GraphRecord, LayeredGeometry, Role, RotaryInputs


class GraphPorts(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of one graph.

    Attributes:
        role: `decode` (AR-1); `prefill`, which also has the input `logits_index`; or `verify`.
        ar: tokens per inference.
        inputs: all graph inputs.
        outputs: all graph outputs.
        kv_inputs: past rows of cache tensors, among the inputs.
        kv_outputs: new rows of cache tensors, among the outputs.
    """

    role: str
    ar: int
    inputs: int
    outputs: int
    kv_inputs: int
    kv_outputs: int


def graph_ports(
    geometry: Geometry | LayeredGeometry, role: Role, ar: int, rotary: Sequence[RotaryInputs]
) -> GraphPorts:
    """The ports of the graph for `ar` tokens per inference, as one part."""
    record = GraphRecord.whole("", "", layers=geometry.layers, ar=ar, context=geometry.context, role=role)
    # All heads of a layer have the same ports, so one is enough to count the others.
    cache = replace(geometry, kv_heads=1) if isinstance(geometry, Geometry) else replace(geometry, kv_heads=(1,))
    ports = DecoderInterface(hidden=1, vocab=1, cache=cache, rotary=tuple(rotary)).graph(record)
    return GraphPorts(
        role=role,
        ar=ar,
        inputs=sum(port.kind not in ("past", "state") for port in ports.inputs) + geometry.tensors,
        outputs=sum(port.kind != "new" for port in ports.outputs) + geometry.tensors,
        kv_inputs=geometry.tensors,
        kv_outputs=geometry.tensors,
    )
