"""`benchmarks.without_attention`: graphs of matrices and norms alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import onnx
import onnxruntime as ort
import pytest

from benchmarks.without_attention import write_without_attention
from edgekv.bundle import open_bundle


def _matrices(graph: onnx.GraphProto) -> set[str]:
    return {name for node in graph.node if node.op_type == "MatMul" for name in node.input if "weight" in name}


def test_only_matrices_and_norms_are_left(small: Path) -> None:
    source = open_bundle(small).graph_path(open_bundle(small).manifest.graphs[0])
    target = small / "without.onnx"
    write_without_attention(source, target)
    whole, left = (onnx.load(path, load_external_data=False).graph for path in (source, target))
    kinds = Counter(node.op_type for node in left.node)
    assert not kinds["Softmax"]
    assert _matrices(left) == _matrices(whole)
    assert kinds["RMSNormalization"] == sum(node.op_type == "RMSNormalization" for node in whole.node)
    assert not [each.name for each in left.input if each.name.startswith("past_")]
    assert [each.name for each in left.output] == [each.name for each in whole.output]
    ort.InferenceSession(target)  # it is a complete graph


def test_a_graph_without_attention_is_refused(small: Path) -> None:
    source = open_bundle(small).graph_path(open_bundle(small).manifest.graphs[0])
    write_without_attention(source, small / "without.onnx")
    with pytest.raises(ValueError, match="no joined heads"):
        write_without_attention(small / "without.onnx", small / "again.onnx")
