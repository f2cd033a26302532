"""How many inputs and outputs the graphs have: each one is a tensor that a runtime registers and binds."""

from __future__ import annotations

import msgspec

from edgekv.kv import Geometry

_INPUTS = ("input_ids", "attention_mask", "position_ids_cos", "position_ids_sin")
_PREFILL_INPUTS = (*_INPUTS, "logits_index")
_OUTPUTS = ("logits",)


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
    others = _INPUTS if ar == 1 else _PREFILL_INPUTS
    return GraphPorts(
        role="decode" if ar == 1 else "prefill",
        ar=ar,
        inputs=len(others) + geometry.tensors,
        outputs=len(_OUTPUTS) + geometry.tensors,
        kv_inputs=geometry.tensors,
        kv_outputs=geometry.tensors,
    )
