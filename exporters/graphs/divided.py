"""Decode graphs divided at the routers of experts, and the graph of experts whose integers are operands.

One graph computes the experts of a token, of any layer: its encodings cover those of all layers, and the integers and
scales of a matrix are inputs. The residual is not among them, and keeps its own encoding in each layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np

from edgekv.bundle import Bundle, BundleWeights, Manifest
from edgekv.errors import UsageError
from edgekv.graphs.decoder import decoder_layer, layer_result, route_layer
from edgekv.spec import (
    EXPERT_INPUT,
    EXPERT_MATRICES,
    EXPERT_SCALES,
    EXPERT_SHARES,
    EXPERT_SUM,
    EXPERTS,
    DecoderSpec,
    DividedPart,
    ExpertMatrix,
    ExpertSteps,
    GraphRecord,
    Port,
    divided_at_routers,
    expert_ports,
)
from edgekv.spec.tensors import expert_projection
from exporters.graphs.nodes import QdqNodes, Tensor
from exporters.graphs.parts import end_part, save_model_beside, with_boundaries
from exporters.graphs.qdq import QdqOps, make_model, value_info
from exporters.graphs.weights import PlacedWeights
from quant import Encoding

_CHANNELS = ("int8", "int4")
"""Types whose columns have one scale each."""


def write_divided(bundle: Bundle, folder: Path) -> tuple[dict[str, Path], ExpertSteps]:
    """Write the decode graphs of a mixture, divided at its routers, and the graph of experts, as ONNX files.

    Args:
        bundle: with undivided graphs.
        folder: the target; the files of weights are linked there.

    Returns:
        The files by the names of the parts, and the steps of the experts' integers.

    Raises:
        UsageError: the bundle has no experts, or such whose columns have several scales.
    """
    manifest = bundle.manifest
    check_divisible(manifest)
    experts, spec = manifest.model.experts, manifest.model
    assert experts is not None, "checked"
    encodings = dict(_covering_encodings(manifest))
    steps, products = _operands(bundle.weights(), spec, manifest.encodings)
    files = {EXPERTS: folder / f"{EXPERTS}.onnx"}
    for graph in (graph for graph in manifest.graphs if graph.role == "decode"):
        divided = divided_at_routers(graph, spec.layers, experts.layers)
        for part, ops in zip(divided.parts, _build(manifest, divided, encodings), strict=True):
            files[part.name] = folder / part.file
            save_model_beside(ops.finish(), files[part.name], bundle.path)
    ports = expert_ports(spec.hidden, experts.intermediate, experts.used)
    files[EXPERTS].write_bytes(expert_graph(*ports, encodings | products, steps))
    return files, steps


def check_divisible(manifest: Manifest) -> None:
    """Check that decode graphs can be divided at routers.

    Raises:
        UsageError: as `write_divided`.
    """
    spec, field = manifest.model, "--experts"
    if spec.experts is None:
        raise UsageError(field, got="a model without experts", expected="a mixture", fix="Leave it out.")
    if manifest.graph_format != "onnx" or spec.gives_hidden or spec.target is not None:
        got = "a drafter, or the target of one" if manifest.graph_format == "onnx" else "TFLite graphs"
        raise UsageError(field, got=got, expected="a model of its own in ONNX graphs", fix="Leave it out.")
    for weight in manifest.recipe.weights:
        if ".mlp.experts." in weight.tensor and weight.dtype not in _CHANNELS:
            raise UsageError(
                field,
                got=f"{weight.dtype} for {weight.tensor}",
                expected=f"{' or '.join(_CHANNELS)}, whose columns have one scale each",
                fix="Export with --recipe w8a16 or w4a16.",
            )


def _covering_encodings(manifest: Manifest) -> Iterator[tuple[str, Encoding]]:
    """Encodings of the graph of experts, each of which covers those of all layers."""
    results = {
        EXPERT_INPUT: "mlp_norm",
        EXPERT_SHARES: "router_weights",
        EXPERT_SUM: "down",
        "gate": "gate",
        "up": "up",
        "sigmoid": "sigmoid",
        "silu": "silu",
        "mlp": "mlp",
        "expert": "expert",
    }
    assert manifest.model.experts is not None, "checked"
    for name, result in results.items():
        reaches = [manifest.encodings[f"layers.{layer}.{result}"].reach for layer in manifest.model.experts.layers]
        yield name, Encoding.asymmetric(min(low for low, _ in reaches), max(high for _, high in reaches), "u16")


def _operands(
    weights: BundleWeights, spec: DecoderSpec, encodings: Mapping[str, Encoding]
) -> tuple[ExpertSteps, dict[str, Encoding]]:
    """The step of the integers of each kind of matrix, and the encodings of products with them.

    A product `x @ (step * q)` is the result divided by the column's share of the step. So it is at most the reach of
    the result over that share, and by Cauchy and Schwarz at most the norms of x and of the column.
    """
    assert spec.experts is not None, "checked"
    experts, steps, most = spec.experts, dict.fromkeys(EXPERT_MATRICES, 0.0), dict.fromkeys(EXPERT_MATRICES, 0.0)
    for matrix in EXPERT_MATRICES:
        for layer in experts.layers:
            for expert in range(experts.count):
                weight = weights.matrix(f"model.layers.{layer}.{expert_projection(expert, matrix + '_proj')}.weight")
                steps[matrix] = max(steps[matrix], float(weight.grid.scales.max()))
                width = weight.integers.shape[0]
                x = encodings[f"layers.{layer}." + ("expert" if matrix == "down" else "mlp_norm")]
                x_norm = math.sqrt(width) * _magnitude(x)
                scales = np.maximum(weight.grid.scales.astype(np.float64), np.finfo(np.float32).tiny)
                by_result = _magnitude(encodings[f"layers.{layer}.{matrix}"]) / scales
                by_norms = x_norm * np.sqrt(np.square(weight.integers, dtype=np.float32).sum(axis=0))
                most[matrix] = max(most[matrix], float(np.minimum(by_result, by_norms).max()))
    products = {
        f"{matrix}_product": Encoding.symmetric(most[matrix] * steps[matrix], "u16") for matrix in EXPERT_MATRICES
    }
    return ExpertSteps(**steps), products


def _magnitude(encoding: Encoding) -> float:
    low, high = encoding.reach
    return max(-low, high)


def _build(manifest: Manifest, graph: GraphRecord, covering: Mapping[str, Encoding]) -> Iterator[QdqOps]:
    """The parts of a divided graph, each ready to finish."""
    spec, weights = manifest.model, PlacedWeights(manifest.weights)
    encodings = {**with_boundaries(spec, manifest.encodings), **covering}
    for part in graph.parts:
        assert isinstance(part, DividedPart), "of a divided graph"
        ops = QdqOps(graph, part, manifest.interface, spec, encodings, weights)
        hidden = ops.entry
        if part.resumes:
            hidden = ops.add(hidden, ops.read(EXPERT_SUM), layer_result(spec, part.first_layer - 1))
        for layer in part.layers[: -1 if part.routes else None]:
            hidden = decoder_layer(ops, spec, layer, hidden)
        if part.routes:
            hidden, x, shares = route_layer(ops, spec, part.stop_layer - 1, hidden)
            ops.give(x, EXPERT_INPUT)
            ops.give(shares, EXPERT_SHARES)
            encodings[part.exit] = hidden.encoding  # the next part reads it
        end_part(ops, graph, part, hidden)
        yield ops


def expert_graph(inputs: Sequence[Port], output: Port, encodings: Mapping[str, Encoding], steps: ExpertSteps) -> bytes:
    """The ONNX model of `sum_j share_j * down_j(silu(gate_j x) * up_j x)`.

    Args:
        inputs: see `expert_ports`.
        output: its output.
        encodings: of the results.
        steps: of the integers of matrices.
    """
    nodes, used = QdqNodes(encodings), sum(port.name.startswith("share_") for port in inputs)

    def product(x: Tensor, matrix: ExpertMatrix, expert: int) -> Tensor:
        """With the integers, then times the scales of the columns."""
        name, operand = f"{matrix}_{expert}", Encoding("u8", steps[matrix], 128)
        integers = nodes.dequantize(name, f"{name}_dq", operand)
        unscaled = nodes.emit("MatMul", [x.name, integers.name], f"{matrix}_product")
        scales = nodes.dequantize(f"{matrix}_scale_{expert}", f"{name}_scale_dq", EXPERT_SCALES)
        encoding = encodings[EXPERT_SUM if matrix == "down" else matrix]
        return nodes.emit("Mul", [unscaled.name, scales.name], f"{name}_scaled", encoding)

    x = nodes.dequantize(EXPERT_INPUT, "x", encodings[EXPERT_INPUT])
    total: Tensor | None = None
    for expert in range(used):
        gate, up = product(x, "gate", expert), product(x, "up", expert)
        sigmoid = nodes.emit("Sigmoid", [gate.name], "sigmoid")
        silu = nodes.emit("Mul", [gate.name, sigmoid.name], "silu")
        inner = nodes.emit("Mul", [silu.name, up.name], "mlp")
        share = nodes.dequantize(f"share_{expert}", f"share_{expert}_dq", encodings[EXPERT_SHARES])
        weighed = nodes.emit("Mul", [inner.name, share.name], "expert")
        down = product(weighed, "down", expert)
        total = down if total is None else nodes.emit("Add", [total.name, down.name], "sum", down.encoding)
    assert total is not None, "a token has an expert"
    nodes.quantize(total.name, EXPERT_SUM, total.encoding)
    ports = [value_info(port) for port in inputs], [value_info(output)]
    content: bytes = make_model(EXPERTS, nodes.nodes, *ports, nodes.constants).SerializeToString()
    return content
