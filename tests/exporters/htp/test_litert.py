"""TFLite graphs compiled for a chip by LiteRT's Qualcomm plugin, with the QNN libraries of onnxruntime-qnn."""

import shutil
import subprocess
import sys

import pytest

from devices import find
from edgekv.bundle import open_bundle
from edgekv.errors import EngineError, UsageError
from exporters.compile import compile_bundle
from exporters.graphs.tflite.flatbuffer import TfliteFile
from exporters.htp.compile_tflite import _operators, compile_tflite
from exporters.options import RunOptions
from exporters.pipeline import pieces
from tests.support.exports import export_options, exported

pytestmark = pytest.mark.htp


@pytest.fixture(scope="module")
def compiled(tmp_path_factory, embedded):
    """The embedded model for SM8650, with the record of its binaries."""
    made = exported(embedded, export_options(context=128, ar=(1, 32), kv_dtype="s8", graph_format="tflite"))
    folder = shutil.copytree(made, tmp_path_factory.mktemp("compiled") / "bundle")
    return folder, compile_bundle(open_bundle(folder), find("SM8650"))


def test_every_graph_is_one_call_of_one_context(compiled):
    folder, record = compiled
    (binary,) = record.binaries
    assert binary.wrappers == {"ar1_cl128": "graphs.tflite", "ar32_cl128": "graphs.tflite"}
    operators = _operators(folder / "compiled" / "SM8650" / "graphs.tflite")
    assert operators == {"ar1_cl128": [b"DISPATCH_OP"], "ar32_cl128": [b"DISPATCH_OP"]}


def test_the_graphs_share_their_weights(compiled):
    folder, record = compiled
    before = open_bundle(folder).manifest.files["graphs.tflite"].bytes
    assert record.files["graphs.tflite"].bytes < 1.3 * before


@pytest.mark.thorough
def test_weights_of_4_bits_stay_packed_beside_a_cache_of_16(compiled, tmp_path, embedded):
    options = export_options("w4a16", context=128, ar=(1,), kv_dtype="s16", graph_format="tflite")
    shutil.copytree(exported(embedded, options), tmp_path / "bundle")
    packed = compile_bundle(open_bundle(tmp_path / "bundle"), find("SM8650"))
    assert _operators(tmp_path / "bundle/compiled/SM8650/graphs.tflite") == {"ar1_cl128": [b"DISPATCH_OP"]}
    assert packed.files["graphs.tflite"].bytes < 0.8 * compiled[1].files["graphs.tflite"].bytes


def test_the_binary_itself_says_which_chip_it_targets(compiled):
    folder, record = compiled
    assert (record.soc, record.arch, record.vtcm_bytes) == ("SM8650", 75, 8 << 20)
    assert compile_bundle(open_bundle(folder), find("SM8750")).arch == 79


def test_a_file_that_is_finished_is_not_compiled_again(compiled, tmp_path, monkeypatch):
    bundle = open_bundle(shutil.copytree(compiled[0], tmp_path / "bundle"))
    chip, run, done = find("SM8550"), RunOptions(cache_dir=tmp_path / "cache", resume=True), []

    def counting(source, target, graphs, device):
        done.append(source.name)
        compile_tflite(source, target, graphs, device)

    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(pieces, "compile_tflite", counting)
    with monkeypatch.context() as stopping, pytest.raises(KeyboardInterrupt):
        stopping.setattr("exporters.compile.write_compiled", stop)
        compile_bundle(bundle, chip, run)
    assert not (bundle.path / "compiled" / chip.soc).exists()
    assert compile_bundle(bundle, chip, run).arch == 73 and done == ["graphs.tflite"]
    assert not [*(tmp_path / "cache" / "pieces").glob("[!.]*")]


def test_a_chip_that_the_plugin_does_not_know_is_refused(compiled):
    with pytest.raises(UsageError, match=r"--device: got QCS8550 for TFLite graphs; .* --format onnx"):
        compile_bundle(open_bundle(compiled[0]), find("QCS8550"))


def test_an_operator_that_the_compiler_leaves_to_the_cpu_is_refused_by_name(tmp_path):
    file = TfliteFile()
    graph = file.subgraph("graph")
    a, b = graph.input("a", "f32", [1, 8]), graph.input("b", "f32", [1, 8])
    angle = graph.result("angle", "f32", [1, 8])
    graph.operate("ATAN2", [a, b], [angle])
    total = graph.result("total", "f32", [1, 8])
    graph.operate("ADD", [angle, a], [total], "AddOptions")
    graph.output("total", total)
    file.save(tmp_path / "graphs.tflite")
    with pytest.raises(EngineError, match=r"got .*refused: \w*[Aa]tan2; expected all operators in one partition"):
        compile_tflite(tmp_path / "graphs.tflite", tmp_path / "out.tflite", ["graph"], find("SM8650"))


@pytest.mark.parametrize("package", ["ai_edge_litert", "onnxruntime_qnn"])
def test_a_missing_package_tells_how_to_install_it(compiled, package):
    program = f"""
import sys
from importlib import util
find = util.find_spec
util.find_spec = lambda name: None if name == {package!r} else find(name)  # as if it were not installed
from edgekv.cli import run
sys.exit(run(["compile", {str(compiled[0])!r}, "--device", "SM8850"]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 1
    assert f"got no package {package}" in done.stderr and 'pip install "edgekv[litert,htp]"' in done.stderr
    assert not (compiled[0] / "compiled" / "SM8850").exists()
