"""A pass: activations of 16 bits for products that round them to 8."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from edgekv.runtime.merge.fusing import Fuser, replace, shape_of
from edgekv.runtime.rewrite import remove_unused

_INT8 = ir.DataType.INT8


class TwoRows(ir.passes.InPlacePass):
    """Multiplies each activation as the sum of two rows: rounded to int8 in blocks, and what that left.

    `MatMulNBits` rounds every row again, in the same blocks: the first row exactly, the second to the next 8 bits. The
    rows are made once for all matrices with the same blocks.
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        fuser = Fuser(model.graph, "in_two_rows")
        rows: dict[tuple[ir.Value, int], ir.Value] = {}
        products = [node for node in model.graph if node.op_type == "MatMulNBits"]
        for node in products:
            _multiply_rows(fuser, node, rows)
        remove_unused(model)
        return ir.passes.PassResult(model, bool(products))


def _multiply_rows(fuser: Fuser, node: ir.Node, made: dict[tuple[ir.Value, int], ir.Value]) -> None:
    x, block = node.inputs[0], node.attributes["block_size"].as_int()
    assert x is not None, "an activation"
    if (x, block) not in made:
        made[x, block] = _rows(fuser, node, x, block)
    *first, count, width = shape_of(node.outputs[0])
    shape = (*first, 2 * count, width)
    inputs = [made[x, block], *node.inputs[1:]]
    product = fuser.one(node, "MatMulNBits", inputs, shape, node.domain)
    producer = product.producer()
    assert producer is not None, "just made"
    for attribute in node.attributes.values():
        producer.attributes.add(attribute)
    by_part = product if count == 1 else fuser.reshape(node, product, (*first, 2, count, width))
    axes = fuser.integers([len(first)])
    total = fuser.one(node, "ReduceSum", [by_part, axes], (*first, count, width), keepdims=int(count == 1))
    replace(node.outputs[0], total)


def _rows(fuser: Fuser, before: ir.Node, x: ir.Value, block: int) -> ir.Value:
    """`[..., AR, K]` to `[..., 2 AR, K]`: what int8 holds, then the rest."""
    *first, count, width = shape = shape_of(x)
    blocks = -(-width // block)
    scales = (*first, count, blocks)
    kernel = [1] * (len(shape) - 3) + [block]
    magnitude = fuser.one(before, "Abs", [x], shape)
    largest = fuser.one(before, "MaxPool", [magnitude], scales, kernel_shape=kernel, strides=kernel, ceil_mode=1)
    step = fuser.one(before, "Mul", [largest, fuser.constant("step_of_int8", np.array(1 / 127, np.float32))], scales)
    attributes: dict[str, Any] = {"axis": len(shape) - 1, "block_size": block}
    integers = fuser.one(before, "QuantizeLinear", [x, step], shape, output_dtype=int(_INT8), **attributes)
    integers.type = ir.TensorType(_INT8)
    held = fuser.one(before, "DequantizeLinear", [integers, step], shape, **attributes)
    rest = fuser.one(before, "Sub", [x, held], shape)
    return fuser.one(before, "Concat", [held, rest], (*first, 2 * count, width), axis=len(shape) - 2)
