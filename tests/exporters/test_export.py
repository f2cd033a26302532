import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from safetensors.numpy import load_file

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import EngineError, UsageError
from edgekv.plan import Overrides, find_subject
from edgekv.qnn import provider as qnn
from edgekv.spec import View
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.cli.exported import export_warnings
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.graphs.nodes import parameter_names
from exporters.graphs.parts import stored_graph
from exporters.htp.check import floating_nodes
from exporters.pipeline.pieces import LayerPiece
from exporters.pipeline.write import WritePiece
from exporters.plan import export_geometry
from exporters.quantize.calibrate import read_calibration
from exporters.quantize.recipe import Recipe, WeightRule
from quant import quantize_per_channel
from tests.support.checkpoints import ARCHITECTURES, OLDER, write_checkpoint
from tests.support.exports import export_options, exported, small_options

DEVICE = find("SM8650")
ROOT = str(Path(__file__).parents[2])
NEAREST = WeightRule(tensors="*", dtype="int8", method="nearest")


def options(**changes) -> ExportOptions:
    return small_options(**({"context": 64, "ar": (1, 16)} | changes))


@pytest.fixture(scope="module")
def small(tmp_path_factory) -> Path:
    """A bundle of a small random checkpoint with llama3 rotary embedding and a head of its own, not checked."""
    return exported(write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint", OLDER), options())


def shapes(values) -> dict[str, list[int]]:
    return {value.name: [d.dim_value for d in value.type.tensor_type.shape.dim] for value in values}


def test_graphs_are_static_and_single_head(small):
    for graph in open_bundle(small).manifest.graphs:
        model = stored_graph(small / graph.file)
        inputs, outputs = shapes(model.graph.input), shapes(model.graph.output)
        assert inputs["input_ids"] == [1, graph.ar]
        assert inputs["attention_mask"] == [1, 1, graph.ar, 64]
        assert inputs["position_ids_cos"] == inputs["position_ids_sin"] == [1, 1, graph.ar, 8]
        for layer in range(2):
            for kind in ("key", "value"):
                for head in range(2):
                    name, past, new = f"past_{kind}_{layer}_h{head}", [64 - graph.ar, 16], [graph.ar, 16]
                    order = -1 if kind == "key" else 1  # keys are columns
                    assert inputs[f"{name}_in"] == [1, 1, *past[::order]]
                    assert outputs[f"{name}_out"] == [1, 1, *new[::order]]
        assert outputs["logits"] == [1, graph.ar if graph.role == "score" else 1, 320]
        assert ("logits_index" in inputs) is (graph.role == "prefill")


def test_past_and_new_rows_of_a_head_have_one_encoding_in_all_graphs(small):
    manifest = open_bundle(small).manifest
    for graph in manifest.graphs:
        model = stored_graph(small / graph.file)
        readers = {node.input[0]: node for node in model.graph.node if node.op_type == "DequantizeLinear"}
        writers = {node.output[0]: node for node in model.graph.node if node.op_type == "QuantizeLinear"}
        for tensor in manifest.geometry.names():
            past, new = readers[tensor.past].input[1:], writers[tensor.new].input[1:]
            joined = readers[f"{tensor.kind}_{tensor.layer}_h{tensor.head}_q"].input[1:]
            assert list(past) == list(new) == list(joined)
            assert tuple(past) == parameter_names(manifest.encodings[tensor.past])


@pytest.mark.slow
def test_heads_are_slices_of_the_quantized_matrix(small, tmp_path):
    """Rounded to nearest, so that the integers depend on nothing but the matrix."""
    checkpoint = Checkpoint.open(open_bundle(small).manifest.source.checkpoint)
    recipe = Recipe(name="plain", weights=(NEAREST,), activations="u16", rotation="none")
    export_bundle(checkpoint, tmp_path / "bundle", options(recipe=recipe))
    stored = load_file(tmp_path / "bundle" / "weights-layer-01.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"
    assert (
        np.concatenate([*stored[f"{key}.int8"]], axis=1) == quantize_per_channel(checkpoint.tensor(key).T).integers
    ).all()


def test_all_graphs_point_at_the_same_bytes(small):
    places: dict[str, tuple[str, ...]] = {}
    for graph in open_bundle(small).manifest.graphs:
        model = stored_graph(small / graph.file)
        for tensor in model.graph.initializer:
            place = tuple(entry.value for entry in tensor.external_data)
            assert places.setdefault(tensor.name, place) == place
    assert any(name.endswith(".int8") for name in places)


@pytest.mark.slow
def test_two_exports_are_equal(small, tmp_path):
    manifest = open_bundle(small).manifest
    again = export_bundle(Checkpoint.open(manifest.source.checkpoint), tmp_path / "again", options())
    assert again == manifest


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ar": (16, 32)}, ["--ar", "16,32"]),
        ({"ar": (0, 1)}, ["--ar", "0,1"]),
        ({"context": 65}, ["--context", "65", "multiple", "64"]),
        ({"context": 16}, ["--context", "16", "above"]),
        ({"kv_dtype": "s16", "device": "QCS6490"}, ["--kv", "QCS6490", "V73"]),
    ],
)
def test_options_that_no_checkpoint_fits_are_refused(changes, words):
    with pytest.raises(UsageError) as caught:
        options(**changes)
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--recipe", "w3a16"], "--recipe"),
        (["--recipe", "w4a16", "--sink", "first"], "--sink: got 'first'"),
        (["--recipe", "w4a16", "--sink", "none", "--context", "8"], "--context: got 8"),
    ],
)
def test_values_of_options_are_read_from_the_command_line(tmp_path, capsys, given, words):
    assert run(["export", str(tmp_path), "-o", str(tmp_path / "bundle"), "--device", "SM8650", *given]) == 2
    assert words in (said := capsys.readouterr().err) and "bug" not in said


def test_a_context_beyond_the_checkpoint_is_refused(tmp_path):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    with pytest.raises(UsageError, match="at most max_position_embeddings = 256"):
        export_bundle(checkpoint, tmp_path / "bundle", options(context=512))
    assert not (tmp_path / "bundle").exists()


def test_an_existing_bundle_is_not_replaced_without_force(small):
    before = (small / "manifest.json").read_bytes()
    checkpoint = Checkpoint.open(open_bundle(small).manifest.source.checkpoint)
    stages = []
    with pytest.raises(UsageError, match="--force"):
        export_bundle(checkpoint, small, options(), progress=lambda stage, *_: stages.append(stage))
    assert stages == []  # refused before a tensor is read
    assert (small / "manifest.json").read_bytes() == before


def test_a_check_without_its_compiler_is_refused_before_the_work(tmp_path, monkeypatch):
    """As without the extra htp: the package is not installed."""

    def version(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(qnn.metadata, "version", version)
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    stages = []
    with pytest.raises(EngineError, match=r'HTP check: .* pip install "edgekv\[htp\]"\. .*: --skip-htp-check'):
        export_bundle(
            checkpoint,
            tmp_path / "bundle",
            options(check_on_htp=True),
            progress=lambda stage, *_: stages.append(stage),
        )
    assert stages == [] and [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.thorough
@pytest.mark.slow
def test_a_killed_export_leaves_no_bundle_and_the_next_one_cleans_up(tmp_path, embedded):
    target = tmp_path / "bundle"
    words = ["-o", str(target), "--device", "SM8650", "--calibration-tokens", "512"]
    command = [sys.executable, "-m", "edgekv", "export", str(embedded), *words]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not any(tmp_path.glob(".bundle.partial-*/new/weights-*")) and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert not target.exists()
    assert list(tmp_path.glob(".bundle.partial-*"))

    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    export_bundle(checkpoint, target, options())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bundle", "checkpoint"]


@pytest.mark.htp
def test_every_graph_of_the_embedded_model_is_integers_only(embedded_on_htp):
    assert open_bundle(embedded_on_htp).manifest.htp_check == "integers-only"


@pytest.mark.thorough
@pytest.mark.htp
def test_a_16_bit_cache_is_integers_only_too(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint", OLDER)
    manifest = open_bundle(exported(checkpoint, options(kv_dtype="s16", check_on_htp=True))).manifest
    assert manifest.htp_check == "integers-only"
    assert manifest.encodings["past_key_0_h0_in"].zero_point == 0


@pytest.mark.htp
def test_keys_may_lie_in_columns_and_give_the_same_tokens(wide_on_htp, wide_columns):
    """As Genie wants them: [1, 1, D, S-AR] in, [1, 1, D, AR] out; on the HTP bit by bit what rows give."""
    models, strategies = {}, {"cpu": ("slot", "pointer-shift", "shift-concat"), "htp": ("slot",)}
    for layout, bundle in (("rows", wide_on_htp), ("columns", wide_columns)):
        manifest = open_bundle(bundle).manifest
        assert manifest.htp_check == "integers-only" and manifest.geometry.key_layout == layout
        for engine, tried in strategies.items():
            for strategy in tried:
                models[layout, strategy, engine] = edgekv.load(bundle, engine, kv_update=strategy)
    graph = stored_graph(wide_columns / "ar32_cl128.onnx.gz").graph
    assert shapes(graph.input)["past_key_0_h0_in"] == [1, 1, 64, 96]
    assert shapes(graph.output)["past_key_0_h0_out"] == [1, 1, 64, 32]
    tokens = models["rows", "slot", "cpu"].encode("def __init__(self, name):\n    self.name = name\n" * 2)[:45]
    expected = models["rows", "slot", "htp"].score(tokens)
    for (_, strategy, engine), model in models.items():
        logits = model.score(tokens)
        assert engine == "cpu" or (logits == expected).all(), strategy
        assert (logits.argmax(-1) == expected.argmax(-1)).mean() > 0.95
    generated = [[t.id for t in m.generate(tokens[:20], 30)] for (_, _, engine), m in models.items() if engine == "cpu"]
    assert all(each == generated[0] for each in generated)


def float_model(path: Path) -> Path:
    """SiLU without a quantized value between its two operations, which the provider runs in float."""
    constants = [
        helper.make_tensor("scale", TensorProto.FLOAT, [], [1 / 4096]),
        helper.make_tensor("zero", TensorProto.UINT16, [], [32768]),
    ]
    nodes = [
        helper.make_node("DequantizeLinear", ["x", "scale", "zero"], ["real"]),
        helper.make_node("Sigmoid", ["real"], ["gate"], name="gate_node"),
        helper.make_node("Mul", ["real", "gate"], ["silu"], name="silu_node"),
        helper.make_node("QuantizeLinear", ["silu", "scale", "zero"], ["y"]),
    ]
    ends = [helper.make_tensor_value_info(name, TensorProto.UINT16, [1, 64]) for name in "xy"]
    graph = helper.make_graph(nodes, "silu", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--allow-float", "--skip-htp-check"],
            "--allow-float: got --skip-htp-check; expected the HTP compiler's check",
        ),
        (["--allow-float", "--format", "tflite"], "--allow-float: got --format tflite; expected the HTP compiler's"),
        (["--skip-htp-check", "--cache-dir", "a", "--store", "b"], "--cache-dir: got it with a folder as --store"),
        (["--skip-htp-check", "--state-bits", "8"], "--state-bits: got 8 for a checkpoint without states"),
        (["--skip-htp-check", "--calibration-pictures", "."], "--calibration-pictures: got"),
    ],
)
def test_options_that_would_change_nothing_are_refused(tmp_path, monkeypatch, capsys, words, said):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    monkeypatch.chdir(tmp_path)
    command = ["export", str(checkpoint), "-o", "bundle", "--device", "SM8650", "--context", "64", "--ar", "1,16"]
    assert run([*command, *words]) == 2
    assert said in capsys.readouterr().err and not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("changes", "defaults"),
    [
        ({}, ("u8", "columns")),
        ({"draft_rows": (8,)}, ("u8", "rows")),
        ({"give_hidden": True}, ("u8", "rows")),
        ({"graph_format": "tflite"}, ("s8", "rows")),
        ({"draft_rows": (8,), "key_layout": "columns"}, ("u8", "columns")),
    ],
)
def test_options_in_python_have_the_defaults_of_the_command(changes: dict[str, Any], defaults: tuple[str, str]) -> None:
    in_python = replace(ExportOptions(DEVICE), **changes)
    assert (in_python.cache_dtype, in_python.cache_layout) == defaults


def test_a_plan_has_the_cache_of_an_export(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", OLDER)
    planned = find_subject(checkpoint, Overrides(context=64)).geometry
    assert planned == export_geometry(Checkpoint.open(str(checkpoint)).spec, ExportOptions(DEVICE, context=64))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ([], "columns"),
        (["--key-layout", "rows"], "rows"),
        (["--draft-rows", "4"], "rows"),
        (["--draft-rows", "4", "--key-layout", "columns"], "columns"),
        (["--format", "tflite"], "rows"),
    ],
    ids=" ".join,
)
def test_keys_are_columns_where_nothing_speaks_for_rows(tmp_path, given, layout):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    command = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "--context", "64", "-q"]
    short = ["--ar", "1,16", "--calibration-tokens", "256", "--skip-htp-check", "--no-quality-check"]
    assert run([*command, *short, *given]) == 0
    assert open_bundle(tmp_path / "bundle").manifest.key_layout == layout


@pytest.mark.htp
def test_the_float_check_names_the_node(tmp_path):
    (found, *_) = [node for node in floating_nodes([float_model(tmp_path / "silu.onnx")], DEVICE) if "gate" in node]
    assert found.startswith("silu: ") and "float" in found


@pytest.mark.htp
def test_an_export_with_float_nodes_is_refused_unless_they_are_allowed(tmp_path, monkeypatch):
    """A decoder whose SiLU lost its inner quantization, as an export bug would make it."""
    from exporters.graphs.qdq import QdqOps, Tensor

    def bare_sigmoid(self, x, name):
        self._nodes.node("Sigmoid", [x.name], [self._nodes.unique(name)])
        return Tensor(name, self._encodings[name])

    monkeypatch.setattr(QdqOps, "sigmoid", bare_sigmoid)
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    with pytest.raises(EngineError, match=r"compute in float, the first: ar1_cl64: .*--allow-float"):
        export_bundle(checkpoint, tmp_path / "bundle", options(check_on_htp=True))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


@pytest.mark.htp
def test_a_crash_of_the_compiler_is_reported_and_survived(tmp_path):
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no graph")
    with pytest.raises(EngineError, match=r"compiling broken.onnx for SM8650"):
        floating_nodes([broken], DEVICE)


def test_a_checkpoint_is_calibrated_on_its_own_text_if_it_has_one(tmp_path):
    assert read_calibration(None, tmp_path).name == "edgekv's own"
    (tmp_path / "calibration.txt").write_text("one domain")
    (tmp_path / "given.txt").write_text("another")
    assert read_calibration(None, tmp_path).text == "one domain"
    assert read_calibration(tmp_path / "given.txt", tmp_path).text == "another"


def test_the_manifest_says_where_the_bundle_is_from(small):
    raw = json.loads((small / "manifest.json").read_text())
    assert raw["source"]["calibration"] == "edgekv's own" and raw["source"]["calibration_tokens"] > 500
    rope = raw["model"]["rope"]
    assert rope["rope_type"] == "llama3" and rope["parameters"]["factor"] == 8
    assert set(raw["files"]) >= {"tokenizer.json", "ar1_cl64.onnx.gz", "weights-head.safetensors"}


@pytest.mark.parametrize(("context", "is_long"), [(64, False), (128, True)])
def test_a_bundle_says_that_it_rotates_short_texts_as_long_ones(tmp_path, context, is_long):
    """A random Phi-4-mini of an original context of 64: transformers has other factors for texts of up to 64 tokens."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["phi4-mini"], gain=1.0)
    bundle = exported(checkpoint, export_options(context=context, ar=(1, 16), check_quality=True))
    manifest = open_bundle(bundle).manifest
    short = [each for each in manifest.quality if each.text == "short"]
    warnings = [each for each in export_warnings(manifest) if "short_factor" in each]
    assert len(short) == len(warnings) == is_long
    if is_long:
        assert short[0].top1_agreement < 1 and short[0].kl_nats > 0
        assert "--context 128 is above original_max_position_embeddings = 64" in warnings[0]
        assert f"top-1 {short[0].top1_agreement:.1%}" in warnings[0]


@pytest.mark.slow
def test_a_projection_goes_through_twenty_files(tmp_path):
    """From the piece of its layer to the written bundle: the files of functions that are given its name, and of all
    that call them."""
    name, files = "model.layers.0.self_attn.q_proj.weight", set()
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["smollm2"])))
    chosen = small_options("w4a16", context=64, ar=(1, 8), calibration_tokens=256)

    def is_it(value):
        return value == name if isinstance(value, str) else isinstance(value, View) and value.name == name

    def look(frame, event, _):
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(ROOT):
            return
        if any(
            is_it(frame.f_locals.get(each)) for each in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        ):
            stack = [*frames(frame)]
            if any(isinstance(each.f_locals.get("self"), LayerPiece | WritePiece) for each in stack):
                files.update(each.f_code.co_filename for each in stack)

    sys.setprofile(look)
    try:
        export_bundle(checkpoint, tmp_path / "bundle", chosen, RunOptions(cache_dir=tmp_path / "cache"))
    finally:
        sys.setprofile(None)
    own = sorted(file.removeprefix(ROOT) for file in files if file.startswith(f"{ROOT}/exporters/"))
    assert {Path(file).name for file in own} >= {"checkpoint.py", "matrices.py", "pieces.py", "weights.py", "write.py"}
    assert len(own) <= 20, own


def frames(frame):
    while frame is not None:
        yield frame
        frame = frame.f_back
