"""A pass: products with integer matrices, without a float copy of them."""

from __future__ import annotations

import onnx_ir as ir

from edgekv.errors import EngineError
from edgekv.runtime.merge.matrices import IntegerMatrix, read_matrix
from edgekv.runtime.merge.weight_file import WeightFile
from edgekv.runtime.rewrite import remove_unused

CONTRIB = "com.microsoft"
_INT8_ACTIVATIONS = 4


class PackMatrices(ir.passes.InPlacePass):
    """Replaces products with constant matrices by `MatMulNBits`, which reads their integers.

    Activations are rounded to int8 in blocks as long as those of the weights.
    """

    def __init__(self, weights: WeightFile) -> None:
        """Args: weights: takes the packed integers."""
        super().__init__()
        self._weights = weights

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        modified = [node for node in model.graph if node.op_type == "MatMul" and self._pack(model.graph, node)]
        if modified:
            model.graph.opset_imports[CONTRIB] = 1
            remove_unused(model)
        return ir.passes.PassResult(model, bool(modified))

    def _pack(self, graph: ir.Graph, node: ir.Node) -> bool:
        matrix = read_matrix(node.inputs[1])
        if matrix is None:
            _check_is_no_matrix(node)
            return False
        constants = self._constants(graph, f"{node.outputs[0].name}.packed", matrix)
        rows, columns = matrix.integers.shape
        attributes = {
            "K": rows,
            "N": columns,
            "bits": matrix.bits,
            "block_size": matrix.block_rows,
            "accuracy_level": _INT8_ACTIVATIONS,
        }
        inputs = [node.inputs[0], *constants]
        made = ir.node("MatMulNBits", inputs, attributes, domain=CONTRIB, name=f"{node.name}_packed")
        result = made.outputs[0]
        result.name, result.shape, result.type = (
            f"{node.outputs[0].name}_packed",
            node.outputs[0].shape,
            node.outputs[0].type,
        )
        graph.insert_before(node, made)
        node.outputs[0].replace_all_uses_with(result)
        return True

    def _constants(self, graph: ir.Graph, name: str, matrix: IntegerMatrix) -> tuple[ir.Value, ir.Value]:
        """The packed integers and their scales."""
        integers = self._weights.constant(f"{name}.integers", matrix.packed())
        scales = self._weights.constant(f"{name}.scales", matrix.scales().reshape(-1))
        graph.register_initializer(integers)
        graph.register_initializer(scales)
        return integers, scales


def _check_is_no_matrix(node: ir.Node) -> None:
    """Refuse a product that would silently multiply a float copy of integer weights.

    Raises:
        EngineError: the right factor is dequantized from constants.
    """
    right = node.inputs[1]
    source = right.producer() if right is not None else None
    while source is not None and source.op_type == "Concat":
        source = source.inputs[0].producer() if source.inputs[0] is not None else None
    if source is None or source.op_type != "DequantizeLinear":
        return
    integers = source.inputs[0]
    if integers is not None and integers.const_value is not None:
        blocks = source.attributes.get_int("block_size", 0)
        raise EngineError(
            f"weights {integers.name}",
            got=f"{integers.dtype} {list(integers.shape or ())}" + (f" in blocks of {blocks}" if blocks else ""),
            expected="int4 or int8, zero point 0, a scale for each column or for blocks of 16 rows or more",
            fix="Use --cpu-mode emulate.",
        )
