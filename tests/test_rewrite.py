"""The graph-rewriting helper, and the passes that are not tied to one runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgekv.bundle import Bundle, open_bundle
from edgekv.errors import BundleError
from edgekv.runtime.rewrite import (
    NodeWriter,
    encoding,
    follow,
    link_weights,
    load_model,
    remove_unused,
    save_model,
    weight_files,
)
from exporters.targets.key_columns import KeysInColumns
from quant import Encoding
from tests.checkpoints import write_checkpoint
from tests.exports import export_options, exported

HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def _model(text: str) -> ir.Model:
    return ir.from_onnx_text(f"{HEAD} {text}")


def test_a_constant_is_written_once_and_a_node_is_called_after_its_result() -> None:
    model = _model("agraph (float[2] x) => (float[2] y) { y = Tanh(x) }")
    writer = NodeWriter(model.graph)
    first = writer.requantize(model.graph.inputs[0], "a", Encoding("u8", 0.5, 128))
    writer.requantize(first, "b", Encoding("u8", 0.5, 128))
    assert sorted(model.graph.initializers) == ["scale_0.5", "zero_u8_128"]
    assert [node.name for node in writer.nodes] == ["a_q_node", "a_node", "b_q_node", "b_node"]
    assert [encoding(node) for node in writer.nodes] == [Encoding("u8", 0.5, 128)] * 4


def test_what_no_output_depends_on_is_removed() -> None:
    model = _model(
        "agraph (float[2] x) => (float[2] y) <float[2] c = {1, 2}, float[2] d = {3, 4}>"
        " { a = Add(x, c)  b = Tanh(a)  y = Add(x, d) }"
    )
    remove_unused(model)
    assert [node.op_type for node in model.graph] == ["Add"]
    assert list(model.graph.initializers) == ["d"]


def test_a_chain_that_forks_is_refused_by_the_name_of_its_result() -> None:
    model = _model("agraph (float[2] x) => (float[2] y) { a = Tanh(x)  b = Sigmoid(a)  y = Add(a, b) }")
    with pytest.raises(BundleError, match=r"graph agraph: got 2 readers of a; expected a graph as this edgekv exports"):
        follow(model.graph[0], "Add")
    assert [node.op_type for node in follow(model.graph[1], "Add")] == ["Sigmoid", "Add"]


@pytest.fixture(scope="module", params=["u8", "s16"])
def layouts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """One checkpoint, exported with keys in rows and with keys in columns; shared, so not to be written to."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("layouts") / "checkpoint")
    shared: dict[str, Any] = {"context": 32, "ar": (1, 8), "kv_dtype": request.param}
    rows, columns = (exported(checkpoint, export_options(key_layout=each, **shared)) for each in ("rows", "columns"))
    return open_bundle(rows), open_bundle(columns)


@pytest.mark.slow
def test_turning_keys_gives_the_graph_of_an_export_with_keys_in_columns(layouts: tuple[Bundle, Bundle]) -> None:
    rows, columns = layouts
    for record in rows.manifest.graphs:
        model = load_model(rows.graph_path(record))
        assert KeysInColumns(rows.manifest.geometry.names())(model).modified
        wanted = load_model(columns.path / record.file)
        assert _nodes(model) == _nodes(wanted)
        assert model.graph.initializers.keys() == wanted.graph.initializers.keys()
        for ports in ("inputs", "outputs"):
            assert [str(each) for each in getattr(model.graph, ports)] == [
                str(each) for each in getattr(wanted.graph, ports)
            ]


def _nodes(model: ir.Model) -> dict[str | None, tuple[str, list[str | None], list[str]]]:
    """The nodes by their first results."""
    return {
        node.outputs[0].name: (
            node.op_type,
            [value.name for value in node.inputs if value is not None],
            sorted(str(each) for each in node.attributes.values()),
        )
        for node in model.graph
    }


@pytest.mark.slow
def test_a_part_without_keys_is_left_as_it_is(layouts: tuple[Bundle, Bundle]) -> None:
    model = _model("agraph (float[2] x) => (float[2] y) { y = Tanh(x) }")
    assert not KeysInColumns(layouts[0].manifest.geometry.names())(model).modified


def test_weights_are_linked_and_the_written_graph_runs(layouts: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    rows, columns = layouts
    record = rows.manifest.graph("decode")
    model = load_model(rows.graph_path(record))
    KeysInColumns(rows.manifest.geometry.names())(model)
    save_model(model, tmp_path / record.file)
    link_weights(model, rows.path, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {record.file, *weight_files(model)}
    found, wanted = (ort.InferenceSession(folder / record.file) for folder in (tmp_path, columns.path))
    random = np.random.default_rng(0)
    feeds = {}
    for port in wanted.get_inputs():
        dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
        feeds[port.name] = random.integers(0, 100, port.shape, dtype)
    assert all(np.array_equal(a, b) for a, b in zip(found.run(None, feeds), wanted.run(None, feeds), strict=True))
