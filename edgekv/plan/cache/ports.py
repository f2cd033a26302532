"""How many inputs and outputs the graphs have: each one is a tensor that a runtime registers and binds."""

from __future__ import annotations

import msgspec

from edgekv.kv import Geometry
from edgekv.spec import DecoderInterface, GraphRecord, Role, RotaryInputs


class GraphPorts(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of one graph.

    Attributes:
        role: `decode` (AR-1) or `prefill`, which has the input `logits_index` too.
        ar: tokens per inference.
        inputs: all graph inputs.
        outputs: all graph outputs.
        kv_inputs: those that are the past of a cache tensor.
        kv_outputs: those that are the new rows of one.
    """

    role: str
    ar: int
    inputs: int
    outputs: int
    kv_inputs: int
    kv_outputs: int


def graph_ports(geometry: Geometry, ar: int) -> GraphPorts:
    """The ports of the graph for `ar` tokens per inference."""
    role: Role = "decode" if ar == 1 else "prefill"
    decoder = DecoderInterface(hidden=0, vocab=0, cache=geometry, rotary=(RotaryInputs("", geometry.head_dim // 2),))
    record = GraphRecord.whole("", "", layers=geometry.layers, ar=ar, context=geometry.context, role=role)
    ports = decoder.graph(record)
    return GraphPorts(
        role=role,
        ar=ar,
        inputs=len(ports.inputs),
        outputs=len(ports.outputs),
        kv_inputs=sum(port.kind == "past" for port in ports.inputs),
        kv_outputs=sum(port.kind == "new" for port in ports.outputs),
    )
