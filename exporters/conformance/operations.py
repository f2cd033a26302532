"""Single operations, cut out of the graphs of a layer."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import onnx
from onnx import TensorProto, helper

_QUANTIZE = "QuantizeLinear"


@dataclass(frozen=True, slots=True)
class Operation:
    """A kind of operation, and where an example of it is.

    Attributes:
        family: whose first layers have it.
        layer: the layer.
        result: of it, a regular expression; the first that matches.
        begins: names of the results that it reads, regular expressions; empty for the nearest quantized ones.
    """

    family: str
    layer: int
    result: str
    begins: tuple[str, ...] = ()


OPERATIONS: Mapping[str, Operation] = {
    "norm": Operation("qwen2", 0, r"layers\.0\.attention_norm_q"),
    "embedding": Operation("qwen2", 0, r"embedding_q", (r"input_ids",)),
    "lpbq-product": Operation("llama", 0, r"layers\.0\.q\.h0\S*_q"),
    "int8-product": Operation("qwen3", 0, r"layers\.0\.gate_q"),
    "rotary": Operation("qwen2", 0, r"layers\.0\.q\.h0\.rotated_q", (r"layers\.0\.q\.h0_q",)),
    "softmax": Operation("qwen2", 0, r"probabilities_q"),
    "attention": Operation(
        "qwen2", 0, r"layers\.0\.attention_q", (r"layers\.0\.q\.h0\.rotated_q", r"new_\S+", r"past_\S+")
    ),
    "attention-16-bit-cache": Operation(
        "qwen3", 0, r"layers\.0\.attention_q", (r"layers\.0\.q\.h0\.rotated_q", r"new_\S+", r"past_\S+")
    ),
    "soft-cap": Operation("gemma2", 0, r"layers\.0\.\S*tanh\S*_q"),
    "gelu": Operation("gemma2", 0, r"layers\.0\.gelu\S*_q"),
    "silu": Operation("qwen2", 0, r"layers\.0\.silu_q"),
    "relu2": Operation("arcee", 0, r"layers\.0\.mlp_q", (r"layers\.0\.up_q",)),
    "xielu": Operation("apertus", 0, r"layers\.0\.mlp_q", (r"layers\.0\.up_q",)),
    "residual-add": Operation("qwen2", 0, r"layers\.0\.mlp_add_q"),
    "state": Operation("lfm2", 0, r"layers\.0\.conv\.output_q", (r"layers\.0\.conv\.[bcx]_q",)),
    "delta-rule": Operation("qwen3_5", 0, r"layers\.0\.delta\.out_q", (r"layers\.0\.attention_norm_q",)),
}


SCORES = re.compile(r".*\.(?:scores|masked)\.\S+_q|probabilities\S*_q")
"""Integers that traces leave out: their width is the context."""


def order_of(model: onnx.ModelProto) -> list[str]:
    """The outputs of a graph in the order in which they are computed."""
    outputs = {output.name for output in model.graph.output}
    return [name for node in model.graph.node for name in node.output if name in outputs]


def cut(model: onnx.ModelProto, operation: Operation) -> onnx.ModelProto:
    """The graph of one operation: from quantized results to its own.

    Args:
        model: of a layer, with every result quantized.
        operation: what to cut out.

    Raises:
        KeyError: the layer has no such result.
    """
    makers = {name: node for node in model.graph.node for name in node.output}
    result = next((name for name in makers if re.fullmatch(operation.result, name)), None)
    if result is None:
        raise KeyError(f"{operation.result} in {model.graph.name}: {', '.join(makers)}")
    constants = {tensor.name: tensor for tensor in model.graph.initializer}
    shaped = onnx.shape_inference.infer_shapes(model, strict_mode=True)
    shapes = {value.name: value for value in (*shaped.graph.value_info, *shaped.graph.output)}
    ports = {port.name: port for port in model.graph.input}
    nodes, begins, used = list[onnx.NodeProto](), dict[str, None](), dict[str, None]()
    waiting, seen = [result], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        if name in constants:
            used[name] = None
        elif name in ports or (name != result and _is_begin(name, makers[name], operation)):
            begins[name] = None
        else:
            nodes.append(makers[name])
            waiting += filter(None, makers[name].input)
    kept = {id(node) for node in nodes}
    graph = helper.make_graph(
        [node for node in model.graph.node if id(node) in kept],
        "operation",
        [ports.get(name) or shapes[name] for name in sorted(begins)],
        [shapes[result]],
        [constants[name] for name in used],
    )
    cut = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    cut.producer_name = model.producer_name
    return cut


def _is_begin(name: str, node: onnx.NodeProto, operation: Operation) -> bool:
    """Whether an operation begins at a result: at the named ones, or at every quantized one."""
    if node.op_type != _QUANTIZE:
        return False
    return not operation.begins or any(re.fullmatch(begin, name) for begin in operation.begins)


def quantized(model: onnx.ModelProto) -> Iterator[tuple[str, int]]:
    """Names of all integers that a graph computes, with their element type."""
    constants = {tensor.name: tensor.data_type for tensor in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type == _QUANTIZE:
            yield node.output[0], constants.get(node.input[2], TensorProto.UINT8)


def with_outputs(model: onnx.ModelProto, names: Collection[str]) -> onnx.ModelProto:
    """A copy of a graph that gives these integers too."""
    wider = onnx.ModelProto()
    wider.CopyFrom(model)
    held, types = {output.name for output in wider.graph.output}, dict(quantized(model))
    for name in names:
        if name in types and name not in held:
            wider.graph.output.append(helper.make_tensor_value_info(name, types[name], None))
    return wider
