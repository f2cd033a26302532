"""Decode graphs that are divided at their routers, so that the host runs the experts that a router has chosen."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal, get_args

import msgspec

from edgekv.spec.parts import GraphRecord, PartRecord
from edgekv.spec.ports import Port
from quant import Encoding

EXPERTS = "experts"
"""Name of the graph of experts that a token has; see `expert_ports`."""
EXPERT_INPUT, EXPERT_SHARES, EXPERT_SUM = "expert_input", "expert_shares", "expert_sum"
"""What a part gives of its last layer, `[1, 1, 1, H]` and the weights of all experts, `[1, 1, 1, E]`; and what the next
one adds to the residual, `[1, 1, 1, H]`. Each has one encoding in all layers.
"""

ExpertMatrix = Literal["gate", "up", "down"]
EXPERT_MATRICES: tuple[ExpertMatrix, ...] = get_args(ExpertMatrix)

EXPERT_SCALES = Encoding("u16", 1 / 65535, 0)
"""Of the scales of columns, as shares of a step."""

_Step = Annotated[float, msgspec.Meta(gt=0, le=1e30)]


class ExpertSteps(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The steps of the integers of experts' matrices, of all experts: the largest scale of a column.

    The scales of columns are inputs of the graph of experts, as shares of these.
    """

    gate: _Step
    up: _Step
    down: _Step

    def __getitem__(self, matrix: ExpertMatrix) -> float:
        return {"gate": self.gate, "up": self.up, "down": self.down}[matrix]


class DividedPart(PartRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a decode graph that is divided at its routers.

    Attributes:
        resumes: whether it begins by adding what the experts of the layer before its first have given.
        routes: whether it ends at the router of its last layer, whose experts are run before the next part.
    """

    resumes: bool
    routes: bool


def divided_at_routers(graph: GraphRecord, layers: int, with_experts: frozenset[int]) -> GraphRecord:
    """A decode graph of so many layers, divided behind the routers of those with experts."""
    parts, first, embeds = list[PartRecord](), graph.parts[0].first_layer, graph.parts[0].embeds
    for stop in sorted(layer + 1 for layer in with_experts):
        parts.append(_part(graph, first, stop, embeds=embeds and not parts, resumes=bool(parts), routes=True))
        first = stop
    parts.append(_part(graph, first, layers, embeds=False, resumes=True, routes=False))
    return msgspec.structs.replace(graph, parts=parts)


def _part(graph: GraphRecord, first: int, stop: int, *, embeds: bool, resumes: bool, routes: bool) -> DividedPart:
    name = f"{graph.name}_layers{first}to{stop}"
    return DividedPart(
        name=name,
        file=f"{name}.onnx",
        first_layer=first,
        stop_layer=stop,
        embeds=embeds,
        head=not routes,
        resumes=resumes,
        routes=routes,
    )


def expert_ports(hidden: int, inner: int, used: int) -> tuple[list[Port], Port]:
    """The inputs of the graph of a token's experts, and its output.

    For each of the `used` experts J: `share_J` [1, 1, 1, 1]; its matrices as uint8 integers, int8 plus 128, `gate_J`
    and `up_J` [hidden, inner], and `down_J` [inner, hidden]; the scales of their columns, `gate_scale_J` [1, 1, 1,
    inner] and so on.

    Args:
        hidden: width of the residual.
        inner: width of an expert.
        used: experts of a token.
    """
    inputs = [Port(EXPERT_INPUT, "uint16", (1, 1, 1, hidden), "expert")]
    for expert in range(used):
        inputs.append(Port(f"share_{expert}", "uint16", (1, 1, 1, 1), "expert"))
        for matrix in EXPERT_MATRICES:
            shape = (inner, hidden) if matrix == "down" else (hidden, inner)
            inputs.append(Port(f"{matrix}_{expert}", "uint8", shape, "expert"))
            inputs.append(Port(f"{matrix}_scale_{expert}", "uint16", (1, 1, 1, shape[1]), "expert"))
    return inputs, Port(EXPERT_SUM, "uint16", (1, 1, 1, hidden), "expert")


def boundary_ports(part: PartRecord, hidden: int, experts: int) -> Iterator[tuple[bool, Port]]:
    """The further ports of a part of a divided graph, and whether each is an input."""
    if not isinstance(part, DividedPart):
        return
    if part.resumes:
        yield True, Port(EXPERT_SUM, "uint16", (1, 1, 1, hidden), "expert", EXPERT_SUM)
    if part.routes:
        yield False, Port(EXPERT_INPUT, "uint16", (1, 1, 1, hidden), "expert", EXPERT_INPUT)
        yield False, Port(EXPERT_SHARES, "uint16", (1, 1, 1, experts), "expert", EXPERT_SHARES)
