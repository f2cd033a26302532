"""A layer of experts on the CPU: onnxruntime's QMoE beside the branches that edgekv builds, over the same integers.

`python -m benchmarks.qmoe [--rows 1] [--turns 200]`: one thread, random weights of Granite-3.1-1B-A400M's sizes (32
experts of 1024 x 512, 8 of each token). Each form computes `sum_e share_e * down_e(silu(gate_e x) * up_e x)`; prints
the median of each and how far it is from the same integers in float64. Branches have the nodes for one row, so that
their figure for more rows, of which an expert's are gathered, is not that of a prompt.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from benchmarks.turns import by_turns

HIDDEN, INNER, EXPERTS, USED = 1024, 512, 32, 8
_MICROSOFT = "com.microsoft"
_BLOCK = 64
_LEVEL = 4  # MatMulNBits: int8 activations

Floats = NDArray[np.float32]


class Layer:
    """Random integers `[E, out, in]`, with a scale for each output channel."""

    def __init__(self, bits: int) -> None:
        random, self.bits, most = np.random.default_rng(0), bits, (1 << (bits - 1)) - 1
        self.gate, self.up = (random.integers(-most, most + 1, (EXPERTS, INNER, HIDDEN)) for _ in range(2))
        self.down = random.integers(-most, most + 1, (EXPERTS, HIDDEN, INNER))
        self.step = np.float32(0.06 / most)

    def exact(self, x: Floats, logits: Floats) -> NDArray[np.float64]:
        """In float64."""
        found = np.zeros((len(x), HIDDEN))
        for row, (values, scores) in enumerate(zip(x.astype(np.float64), logits, strict=True)):
            chosen = np.argsort(-scores)[:USED]
            shares = np.exp(scores[chosen] - scores.max())
            for expert, share in zip(chosen, shares / shares.sum(), strict=True):
                gate, up = (matrix[expert] @ values * self.step for matrix in (self.gate, self.up))
                found[row] += share * (self.down[expert] @ (gate / (1 + np.exp(-gate)) * up)) * self.step
        return found


def _packed(integers: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Unsigned, with the middle as zero point; of 4 bits, the low ones first."""
    unsigned = (integers + (1 << (bits - 1))).astype(np.uint8)
    return unsigned if bits == 8 else (unsigned[..., 0::2] | unsigned[..., 1::2] << 4).astype(np.uint8)


def qmoe(layer: Layer, rows: int, block: int = 0) -> bytes:
    """One node; `block` is that of its scales, 0 for a scale for each output channel."""
    together = np.stack([layer.gate, layer.up], axis=2).reshape(EXPERTS, 2 * INNER, HIDDEN)  # interleaved

    def scales(outputs: int, inputs: int) -> Floats:
        return np.full((EXPERTS, outputs, *([inputs // block] if block else [])), layer.step, np.float32)

    constants = {
        "gate_up": _packed(together, layer.bits),
        "gate_up_scales": scales(2 * INNER, HIDDEN),
        "down": _packed(layer.down, layer.bits),
        "down_scales": scales(HIDDEN, INNER),
    }
    inputs = ["x", "logits", "gate_up", "gate_up_scales", "", "down", "down_scales", ""]
    attributes: dict[str, Any] = {"k": USED, "activation_type": "swiglu", "swiglu_fusion": 1}
    attributes |= {"normalize_routing_weights": 1, "expert_weight_bits": layer.bits}
    attributes |= {"activation_alpha": 1.0, "activation_beta": 0.0}
    attributes |= {"block_size": block, "accuracy_level": _LEVEL} if block else {}
    node = helper.make_node("QMoE", inputs, ["y"], domain=_MICROSOFT, **attributes)
    return _model([node], constants, rows)


def branches(layer: Layer, rows: int) -> bytes:
    """An `If` for each expert, as `edgekv.graphs.floats` builds them for one row."""
    constants: dict[str, NDArray[Any]] = {
        "used": np.array([USED], np.int64),
        "count": np.array([EXPERTS], np.int64),
        "ends": np.array([0, 1], np.float32),
        "second": np.array([-2], np.int64),
        "first": np.array([0], np.int64),
        "raise": np.array(20, np.float32),
        "zero": np.array(0, np.float32),
        "both": np.array([INNER, INNER], np.int64),
        "each": np.ones(EXPERTS, np.int64),
    }
    make = helper.make_node
    nodes = [
        make("TopK", ["logits", "used"], ["largest", "indices"], axis=-1),
        make("OneHot", ["indices", "count", "ends"], ["hot"]),
        make("ReduceSum", ["hot", "second"], ["chosen"], keepdims=0),
        make("Mul", ["chosen", "raise"], ["raising"]),
        make("Add", ["logits", "raising"], ["raised"]),
        make("Softmax", ["raised"], ["shares"]),
        make("ReduceMax", ["chosen", "first"], ["any"], keepdims=0),
        make("Cast", ["any"], ["flags"], to=TensorProto.BOOL),
        make("Split", ["flags", "each"], [f"flag{expert}" for expert in range(EXPERTS)], axis=0),
        make("Split", ["shares", "each"], [f"share{expert}" for expert in range(EXPERTS)], axis=-1),
        make("Mul", ["x", "zero"], ["total"]),
    ]
    total = "total"
    for expert in range(EXPERTS):
        name = lambda what, expert=expert: f"{what}{expert}"  # noqa: E731
        matrix = np.concatenate([layer.gate[expert], layer.up[expert]])
        inner = [
            _product(constants, "x", name("gate_up"), matrix, layer),
            make("Split", [name("gate_up"), "both"], [name("gate"), name("up")], axis=-1),
            make("QuickGelu", [name("gate")], [name("active")], domain=_MICROSOFT, alpha=1.0),
            make("Mul", [name("active"), name("up")], [name("inner")]),
            make("Mul", [name("inner"), name("share")], [name("weighed")]),
            _product(constants, name("weighed"), name("down"), layer.down[expert], layer),
            make("Add", [total, name("down")], [name("added")]),
        ]
        skipped = [make("Identity", [total], [name("kept")])]
        sides = {
            side: helper.make_graph(part, name(side), [], [helper.make_empty_tensor_value_info(output)])
            for side, part, output in (
                ("then_branch", inner, name("added")),
                ("else_branch", skipped, name("kept")),
            )
        }
        nodes.append(make("If", [name("flag")], [name("total") if expert < EXPERTS - 1 else "y"], **sides))
        total = name("total")
    return _model(nodes, constants, rows)


def _product(
    constants: dict[str, NDArray[Any]], x: str, name: str, matrix: NDArray[Any], layer: Layer
) -> onnx.NodeProto:
    """Of int8, `DynamicQuantizeMatMul` for what a norm gives; all others as `MatMulNBits`."""
    outputs, inputs = matrix.shape
    if layer.bits == 8 and x == "x":
        constants[f"{name}.integers"] = np.ascontiguousarray(matrix.T).astype(np.int8)
        constants[f"{name}.scales"] = np.full(outputs, layer.step, np.float32)
        names = [x, f"{name}.integers", f"{name}.scales"]
        return helper.make_node("DynamicQuantizeMatMul", names, [name], domain=_MICROSOFT)
    constants[f"{name}.integers"] = _packed(matrix, layer.bits).reshape(outputs, inputs // _BLOCK, -1)
    constants[f"{name}.scales"] = np.full(outputs * inputs // _BLOCK, layer.step, np.float32)
    sizes = {"K": inputs, "N": outputs, "bits": layer.bits, "block_size": _BLOCK, "accuracy_level": _LEVEL}
    names = [x, f"{name}.integers", f"{name}.scales"]
    return helper.make_node("MatMulNBits", names, [name], domain=_MICROSOFT, **sizes)


def _model(nodes: list[onnx.NodeProto], constants: dict[str, NDArray[Any]], rows: int) -> bytes:
    value = helper.make_tensor_value_info
    inputs = [value("x", TensorProto.FLOAT, [rows, HIDDEN]), value("logits", TensorProto.FLOAT, [rows, EXPERTS])]
    stored = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    graph = helper.make_graph(nodes, "experts", inputs, [value("y", TensorProto.FLOAT, [rows, HIDDEN])], stored)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1")
    parser.add_argument("--turns", type=int, default=200)
    args = parser.parse_args()
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    forms: dict[str, Callable[[Layer, int], bytes]] = {
        "branches": branches,
        "QMoE": qmoe,
        "QMoE, blocks of 64": partial(qmoe, block=_BLOCK),
    }
    for bits in (8, 4):
        layer = Layer(bits)
        for rows in map(int, args.rows.split(",")):
            random = np.random.default_rng(1)
            feeds = {"x": random.normal(0, 1, (rows, HIDDEN)).astype(np.float32)}
            feeds["logits"] = random.normal(0, 2, (rows, EXPERTS)).astype(np.float32)
            exact, sessions, losses = layer.exact(feeds["x"], feeds["logits"]), {}, {}
            for name, build in forms.items():
                try:
                    session = ort.InferenceSession(build(layer, rows), options, providers=["CPUExecutionProvider"])
                    (found,) = session.run(None, feeds)
                except Exception as error:  # the runtime's exceptions have no common base
                    print(f"int{bits}, {rows} rows, {name}: {' '.join(str(error).split())[:200]}")
                    continue
                losses[name] = 10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum())
                sessions[name] = partial(_time_s, session, feeds)
            for name, times in by_turns(sessions, args.turns).items():
                figures = f"{1e6 * median(times):,.0f} us ({1e6 * min(times):,.0f} at least), {losses[name]:.1f} dB"
                print(f"int{bits}, {rows} rows, {name}: {figures}", flush=True)


def _time_s(session: ort.InferenceSession, feeds: dict[str, Floats]) -> float:
    began = perf_counter()
    session.run(None, feeds)
    return perf_counter() - began


if __name__ == "__main__":
    main()
