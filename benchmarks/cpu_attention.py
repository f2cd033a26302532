"""Attention over the uint8 cache on a CPU: the engine's nodes beside GroupQueryAttention's int8 cache.

    python -m benchmarks.cpu_attention [--heads 9] [--kv-heads 3] [--head-dim 64] [--layers 30]

A decode step's attention in all layers, one thread, processor time, the least of several turns. Both get each head's
past rows as the cache holds them. `merged` is what the CPU engine runs: the rows of all heads side by side,
dequantized, two products and a softmax. `GroupQueryAttention` reads int8 without a zero point, so every byte's highest
bit is turned first; `without the turn` is what a cache of such integers would cost. The largest difference of the
results is printed too.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import dataclass

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

ROWS = (64, 256, 1024, 4096)
TURNS = 15
SCALE = np.float32(0.04)
ZERO_POINT = 128
_CONTRIB = "com.microsoft"


@dataclass(frozen=True, slots=True)
class Shape:
    """Heads, heads of keys and values, elements of a head, layers, and past rows."""

    heads: int
    kv_heads: int
    head_dim: int
    layers: int
    rows: int


Arrays = dict[str, NDArray[np.generic]]


def random_inputs(shape: Shape) -> Arrays:
    """A query, the past and new rows of each head, and a mask that hides nothing."""
    random = np.random.default_rng(0)
    found: Arrays = {"query": random.normal(size=(shape.heads, shape.head_dim)).astype(np.float32)}
    for kind in ("key", "value"):
        for head in range(shape.kv_heads):
            for name, rows in (("past", shape.rows), ("new", 1)):
                values = random.integers(0, 256, (1, 1, rows, shape.head_dim))
                found[f"{name}_{kind}_{head}"] = values.astype(np.uint8)
    return found | {"mask": np.zeros((1, 1, 1, shape.rows + 1), np.float32)}


def merged(shape: Shape) -> ModelProto:
    """The nodes of the CPU engine."""
    group = shape.heads // shape.kv_heads
    constants = {
        "per_head": np.array([shape.kv_heads, 1, -1, shape.head_dim]),
        "of_queries": np.array([shape.kv_heads, 1, group, shape.head_dim]),
        "flat": np.array([1, 1, -1]),
        "scale": np.full(shape.kv_heads, SCALE),
        "zero_point": np.full(shape.kv_heads, ZERO_POINT, np.uint8),
    }
    nodes = []
    for layer in range(shape.layers):
        for kind in ("key", "value"):
            each = [f"{name}_{kind}_{head}" for head in range(shape.kv_heads) for name in ("past", "new")]
            nodes += [
                helper.make_node("Concat", each, [f"rows_{kind}_{layer}"], axis=2),
                helper.make_node("Reshape", [f"rows_{kind}_{layer}", "per_head"], [f"heads_{kind}_{layer}"]),
                helper.make_node(
                    "DequantizeLinear", [f"heads_{kind}_{layer}", "scale", "zero_point"], [f"{kind}_{layer}"], axis=0
                ),
            ]
        scaled = {"alpha": shape.head_dim**-0.5, "transB": 1, "domain": _CONTRIB}
        nodes += [
            helper.make_node("Reshape", ["query", "of_queries"], [f"query_{layer}"]),
            helper.make_node("FusedMatMul", [f"query_{layer}", f"key_{layer}"], [f"scores_{layer}"], **scaled),
            helper.make_node("Add", [f"scores_{layer}", "mask"], [f"masked_{layer}"]),
            helper.make_node("Softmax", [f"masked_{layer}"], [f"probabilities_{layer}"]),
            helper.make_node("MatMul", [f"probabilities_{layer}", f"value_{layer}"], [f"mixed_{layer}"]),
            helper.make_node("Reshape", [f"mixed_{layer}", "flat"], [f"result_{layer}"]),
        ]
    return _model(nodes, random_inputs(shape), constants, shape.layers)


def group_query(shape: Shape, *, turned: bool) -> ModelProto:
    """GroupQueryAttention; with the highest bit of every past byte turned, or not."""
    constants = {
        "scale": np.full((1, shape.kv_heads, 1, shape.head_dim), SCALE),
        "past_rows": np.array([shape.rows], np.int32),
        "all_rows": np.array(shape.rows + 1, np.int32),
    } | ({"highest": np.array(-ZERO_POINT, np.int8)} if turned else {})
    types = {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    nodes = []
    for layer in range(shape.layers):
        for kind in ("key", "value"):
            each = [f"past_{kind}_{head}" for head in range(shape.kv_heads)]
            rows = f"{'bytes' if turned else 'past'}_{kind}_of_{layer}"
            nodes.append(helper.make_node("Concat", each, [rows], axis=1))
            if turned:
                nodes.append(helper.make_node("BitwiseXor", [rows, "highest"], [f"past_{kind}_of_{layer}"]))
        past = [f"past_key_of_{layer}", f"past_value_of_{layer}", "past_rows", "all_rows"]
        inputs = ["query", "new_key", "new_value", *past, "", "", "", "mask", "", "scale", "scale"]
        outputs = [f"result_{layer}", f"present_key_{layer}", f"present_value_{layer}"]
        counts = {"num_heads": shape.heads, "kv_num_heads": shape.kv_heads, "domain": _CONTRIB}
        nodes.append(helper.make_node("GroupQueryAttention", inputs, outputs, **types, **counts))
    return _model(nodes, for_group_query(random_inputs(shape), turned=turned), constants, shape.layers)


def for_group_query(inputs: Arrays, *, turned: bool) -> Arrays:
    """The same inputs as GroupQueryAttention takes them: new rows in float, past ones as int8."""
    found: Arrays = {"query": inputs["query"].reshape(1, 1, -1), "mask": inputs["mask"]}
    for kind in ("key", "value"):
        new = [values for name, values in inputs.items() if name.startswith(f"new_{kind}")]
        found[f"new_{kind}"] = (np.concatenate(new, -1).astype(np.float32) - ZERO_POINT).reshape(1, 1, -1) * SCALE
    for name, values in inputs.items():
        if name.startswith("past"):
            found[name] = (values if turned else values ^ np.uint8(ZERO_POINT)).view(np.int8)
    return found


def _model(nodes: list[NodeProto], inputs: Arrays, constants: Arrays, layers: int) -> ModelProto:
    def port(name: str, values: NDArray[np.generic]) -> ValueInfoProto:
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(values.dtype), values.shape)

    results = [helper.make_tensor_value_info(f"result_{layer}", TensorProto.FLOAT, None) for layer in range(layers)]
    initializers = [numpy_helper.from_array(values, name) for name, values in constants.items()]
    graph = helper.make_graph(nodes, "attention", [port(*each) for each in inputs.items()], results, initializers)
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(_CONTRIB, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10)


class Contender:
    """A graph with bound inputs and outputs."""

    def __init__(self, model: ModelProto, inputs: Arrays) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = ort.InferenceSession(model.SerializeToString(), options)
        self.result: NDArray[np.float32] = self._session.run(["result_0"], inputs)[0]
        self._io = self._session.io_binding()
        for name, values in inputs.items():
            self._io.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(values))
        for output in self._session.get_outputs():
            self._io.bind_output(output.name)
        self.times_ms: list[float] = []

    def step(self) -> None:
        began = time.process_time()
        self._session.run_with_iobinding(self._io)
        self.times_ms.append(1e3 * (time.process_time() - began))


def measure(shape: Shape) -> tuple[list[float], float]:
    """The least time of each contender in ms, and the largest difference between the first two results."""
    inputs = random_inputs(shape)
    contenders = [Contender(merged(shape), inputs)]
    for turned in (True, False):
        model = group_query(shape, turned=turned)
        contenders.append(Contender(model, for_group_query(inputs, turned=turned)))
    for _ in range(TURNS):
        for each in contenders:
            each.step()
    first, second = contenders[0].result.ravel(), contenders[1].result.ravel()
    return [min(each.times_ms[1:]) for each in contenders], float(abs(first - second).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, usual in (("--heads", 9), ("--kv-heads", 3), ("--head-dim", 64), ("--layers", 30)):
        parser.add_argument(name, type=int, default=usual)
    args = parser.parse_args()
    table = Table(title=f"attention of {args.layers} layers in a decode step, milliseconds")
    for column in ("past rows", "merged", "GroupQueryAttention", "without the turn", "largest difference"):
        table.add_column(column, justify="right")
    for rows in ROWS:
        times_ms, difference = measure(Shape(args.heads, args.kv_heads, args.head_dim, args.layers, rows))
        table.add_row(f"{rows:,}", *(f"{each:.2f}" for each in times_ms), f"{difference:.1e}")
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
