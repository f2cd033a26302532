"""The CPU engine's graphs: fewer nodes, the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.runtime import CpuEngine
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.merge import merged_bytes
from edgekv.runtime.merge.merge import merged
from tests.checkpoints import ARCHITECTURES, write_checkpoint
from tests.exports import export_options, exported

Arrays = dict[str, np.ndarray[Any, Any]]


def _any_step(bundle: Bundle, graph: GraphRecord) -> Arrays:
    """Inputs of every integer that their types have."""
    random, feeds = np.random.default_rng(0), {}
    for port in bundle.manifest.interface.graph(graph).inputs:
        low, high = np.iinfo(port.dtype).min, np.iinfo(port.dtype).max
        if port.dtype == "int32":  # ids and rows
            low, high = 0, graph.ar - 1
        values = random.choice([low, high], port.shape) if "mask" in port.name else None
        values = random.integers(low, high, port.shape, endpoint=True) if values is None else values
        feeds[port.name] = values.astype(port.dtype)
    return feeds


def _outputs(binding: Binding, feeds: Arrays) -> Arrays:
    made = {port.name: np.zeros(port.shape, port.dtype) for port in binding.interface.outputs}
    for bind, arrays in ((binding.inputs, feeds), (binding.outputs, made)):
        for name, array in arrays.items():
            bind([name], array.dtype, array.shape, [array.ctypes.data])
    binding.run()
    return made


def _assert_same_bits(bundle: Bundle) -> None:
    engine = CpuEngine(threads=1)
    for graph in bundle.manifest.graphs:
        path, feeds = bundle.graph_path(graph), _any_step(bundle, graph)
        plain = _outputs(MemoryBinding(engine.session(path)), feeds)
        fast = _outputs(engine.load(path, graph.name), feeds)
        assert np.ptp(plain["logits"]) > 1000
        assert [name for name in plain if not np.array_equal(plain[name], fast[name])] == []


@pytest.mark.slow
def test_merging_heads_changes_no_bit_of_the_embedded_model(bundle: Path) -> None:
    _assert_same_bits(open_bundle(bundle))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "recipe", "layout"),
    [
        ("qwen2", "w8a16", "rows"),  # biases
        ("phi4-mini", "w4a16", "columns"),  # heads that turn in part
        ("gemma3", "w4a16-lpbq32", "rows"),  # norms of heads, windows, two rotary embeddings
    ],
)
def test_merging_heads_changes_no_bit(tmp_path: Path, architecture: str, recipe: str, layout: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    options = export_options(recipe, context=64, ar=(1, 8), key_layout=layout)
    _assert_same_bits(open_bundle(exported(checkpoint, options)))


@pytest.mark.slow
def test_the_number_of_nodes_does_not_grow_with_the_heads(tmp_path: Path) -> None:
    nodes = []
    for heads in (4, 8):
        shape = {"num_attention_heads": heads, "num_key_value_heads": heads // 2}
        bundle = exported(write_checkpoint(tmp_path / f"{heads}", shape), export_options(context=16, ar=(1,)))
        graph = merged(bundle / "ar1_cl16.onnx").graph
        constants = {each.name for each in graph.initializer}
        nodes.append(sum(not constants.issuperset(node.input) for node in graph.node))
    assert nodes[0] == nodes[1]


def _written(folder: Path, text: str) -> Path:
    onnx.save(onnx.parser.parse_model(text), folder / "graph.onnx")
    return folder / "graph.onnx"


HEAD = '<ir_version: 10, opset_import: ["": 21]>'


def test_heads_that_end_the_graph_keep_their_names(tmp_path: Path) -> None:
    heads = ["float[1,1,2,3] past_a", "float[1,1,2,3] past_b"]
    outputs = "float[1,1,2,3] x, float[1,1,2,3] y"
    path = _written(
        tmp_path, f"{HEAD} agraph ({', '.join(heads)}) => ({outputs}) {{ x = Tanh(past_a)  y = Tanh(past_b) }}"
    )
    assert [node.op_type for node in merged(path).graph.node] == ["Concat", "Tanh", "Split"]
    random = np.random.default_rng(0)
    feeds = {name: random.normal(size=(1, 1, 2, 3)).astype(np.float32) for name in ("past_a", "past_b")}
    found = CpuEngine().session(path).run(["x", "y"], feeds)
    session = ort.InferenceSession(merged(path).SerializeToString())
    assert all(np.array_equal(a, b) for a, b in zip(session.run(["x", "y"], feeds), found, strict=True))


def test_what_differs_is_left_as_it_is(tmp_path: Path) -> None:
    """Another operation, another attribute, another shape, another axis than that of the heads."""
    shape = "float[1,1,2,3]"
    path = _written(
        tmp_path,
        f"""{HEAD} agraph ({shape} past_a, {shape} past_b, float[1,1,2,4] past_c)
        => ({shape} u, {shape} v, {shape} w, float[1,1,2,4] x, {shape} y, {shape} z) {{
            u = Tanh(past_a)  v = Softmax<axis = -1>(past_a)  w = Softmax<axis = 2>(past_b)
            x = Softmax<axis = -1>(past_c)  y = Softmax<axis = 0>(past_a)  z = Softmax<axis = 0>(past_b)
        }}""",
    )
    assert merged(path).graph.node == ir.to_proto(ir.load(path)).graph.node


def test_requantizing_to_another_encoding_is_kept(tmp_path: Path) -> None:
    """Only where scale and zero point stay the same is a moved value the moved integer."""
    path = _written(
        tmp_path,
        f"""{HEAD} agraph (uint8[1,1,2,3] a) => (uint8[1,1,3,2] x, uint8[1,1,3,2] y)
        <float s = {{0.5}}, float t = {{0.25}}, uint8 z = {{128}}> {{
            b = DequantizeLinear(a, s, z)
            c = Transpose<perm = [0, 1, 3, 2]>(b)  x = QuantizeLinear(c, s, z)
            d = Transpose<perm = [0, 1, 3, 2]>(b)  y = QuantizeLinear(d, t, z)
        }}""",
    )
    made = {node.output[0]: node.op_type for node in merged(path).graph.node}
    assert made == {"b": "DequantizeLinear", "x": "Transpose", "d": "Transpose", "y": "QuantizeLinear"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of kept graphs in a cache of its own."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "merged"


def test_a_merged_graph_is_kept_and_made_again_when_it_is_damaged(small: Path, kept: Path) -> None:
    graph = small / "ar1_cl64.onnx"
    content = merged_bytes(graph)
    (file,) = kept.iterdir()
    made_ns = file.stat().st_mtime_ns
    assert merged_bytes(graph) == content == merged(graph).SerializeToString()
    assert file.stat().st_mtime_ns == made_ns
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert merged_bytes(graph) == content and [*kept.iterdir()] == [file] and file.read_bytes() != damaged


def test_another_graph_in_the_same_place_is_merged_anew(tmp_path: Path, kept: Path) -> None:
    for op in ("Tanh", "Sigmoid"):
        path = _written(tmp_path, f"{HEAD} agraph (float[1,1,2,3] a) => (float[1,1,2,3] x) {{ x = {op}(a) }}")
        assert [node.op_type for node in onnx.load_from_string(merged_bytes(path)).graph.node] == [op]


def test_only_so_many_merged_graphs_are_kept(tmp_path: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    for number in range(70):
        (kept / f"{number}.onnx").touch()
        os.utime(kept / f"{number}.onnx", (number, number))
    merged_bytes(_written(tmp_path, f"{HEAD} agraph (float[2] a) => (float[2] x) {{ x = Tanh(a) }}"))
    assert len([*kept.iterdir()]) == 64 and not (kept / "6.onnx").exists() and (kept / "7.onnx").exists()


def test_graphs_are_merged_without_a_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    path = _written(tmp_path, f"{HEAD} agraph (float[2] a) => (float[2] x) {{ x = Tanh(a) }}")
    assert merged_bytes(path) == merged(path).SerializeToString()


@pytest.mark.slow
def test_a_kept_graph_is_loaded_without_the_packages_that_merge(small: Path, kept: Path) -> None:
    program = "import sys, edgekv; print([t.id for t in edgekv.load(sys.argv[1]).generate([5, 6, 7], 2)]); "
    program += "print(any(name in sys.modules for name in ('onnx', 'onnx_ir', 'sympy')))"
    first, second = (
        subprocess.run([sys.executable, "-c", program, str(small)], capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    )
    assert first.split("]")[0] == second.split("]")[0] and (first.split()[-1], second.split()[-1]) == ("True", "False")


def test_shapes_are_int64_where_numpy_s_integers_are_not(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy 1 has int32 for Python's integers on Windows, which `Reshape` does not take."""
    made = np.array

    class Numpy:
        def __getattr__(self, name: str) -> Any:
            return getattr(np, name)

        def array(self, value: Any, dtype: Any = None) -> Any:
            array = made(value, dtype)
            return array.astype(np.int32) if dtype is None and array.dtype == np.int64 else array

    monkeypatch.setattr("edgekv.runtime.merge.merge_heads.np", Numpy())
    bundle = open_bundle(small_export)
    path = bundle.graph_path(bundle.manifest.graphs[0])
    options = ort.SessionOptions()
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(path.parent))
    assert ort.InferenceSession(merged_bytes(path), options, providers=["CPUExecutionProvider"]).get_inputs()
