"""Graphs that the CPU engine builds for speed: other bits, the same integers as weights."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest

import edgekv
from edgekv.bundle import Bundle, GraphRecord, open_bundle
from edgekv.cli import run
from edgekv.errors import EngineError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.graphs.graph_cache import rendered_graph
from edgekv.graphs.nodes import Nodes
from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.graphs.packed_weights import SCRATCH, remove_unused_weights
from edgekv.graphs.processor import multiplies_integers
from edgekv.graphs.products import Products, Rows, packed, scales, wide
from edgekv.graphs.source import PartSource
from edgekv.graphs.weight_file import WeightFile
from edgekv.machine.scratch import held_folder
from edgekv.runtime import CpuEngine, make_engine
from edgekv.runtime.load_options import EngineOptions
from quant import WEIGHT_TYPES, Grid, QuantizedWeight, WeightDtype
from tests.support.bundles import any_step, as_built, outputs, source_of
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.processes import left_by_a_killed_process

Arrays = dict[str, np.ndarray[Any, Any]]


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of rendered graphs in a cache of its own."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "rendered"


def _usual_step(bundle: Bundle, graph: GraphRecord) -> Arrays:
    """A step with keys and values in the middle of their range, so that no result is clipped."""
    feeds = any_step(bundle, graph)
    for name, array in feeds.items():
        if name.startswith("past_"):
            middle = 128 if array.dtype == np.uint8 else 0
            feeds[name] = (middle + (array.astype(np.int64) - middle) // 4).astype(array.dtype)
    return feeds


def test_graphs_above_the_limit_of_the_cache_go_the_min_recently_used_first(
    kept: Path, bundle: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = open_bundle(bundle)
    parts = [PartSource.of(opened.path, opened.manifest, part.file) for part in opened.manifest.parts]
    with rendered_graph(parts[0], "fast"):
        (first,) = kept.glob("*.onnx")
    with rendered_graph(parts[1], "exact16"):
        assert len([*kept.glob("*.onnx")]) == 2
    monkeypatch.setenv("EDGEKV_CACHE_LIMIT", "1MB")
    with rendered_graph(parts[1], "fast"):
        pass
    (last,) = kept.glob("*.onnx")
    assert last != first
    monkeypatch.setenv("EDGEKV_CACHE_LIMIT", "many")
    assert run(["cache"]) == 2
    assert "EDGEKV_CACHE_LIMIT: got 'many'; expected a size" in capsys.readouterr().err


def test_the_cache_is_shown_and_cleared_but_for_the_history(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept.mkdir(parents=True)
    (kept / "a.weights").write_bytes(bytes(2_000_000))
    (kept.parent / "chat-history").write_text("+Hello\n")
    (kept.parent / "a note").write_text("not edgekv's")
    assert run(["cache"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{kept.parent} (EDGEKV_CACHE_DIR): 2.0 MB; graphs for the CPU at most 8.00 GB")
    assert re.search(r"rendered +2\.0 MB  graphs for the CPU", printed)
    assert run(["cache", "--clear"]) == 0
    assert {path.name for path in kept.parent.iterdir()} == {"chat-history", "a note"}


def _sqnr_db(expected: np.ndarray[Any, Any], found: np.ndarray[Any, Any]) -> float:
    wanted = expected.astype(np.float64)
    noise = np.square(found - wanted).mean()
    return float(10 * np.log10(wanted.var() / max(noise, 1e-9)))


def _assert_close(bundle: Bundle) -> None:
    """exact16 differs from emulate by its 16-bit rounding, fast by that of 8-bit activations."""
    for graph in bundle.manifest.graphs:
        path, feeds = bundle.graph_path(graph), as_built(bundle, _usual_step(bundle, graph))
        plain, exact, fast = (
            outputs(CpuEngine(1, mode).load(path, graph.name), feeds)["logits"]
            for mode in ("emulate", "exact16", "fast")
        )
        assert np.ptp(plain) > 1000
        exact_db, fast_db = _sqnr_db(plain, exact), _sqnr_db(plain, fast)
        assert exact_db > 30 and fast_db > 20 and exact_db > fast_db, (graph.name, exact_db, fast_db)


@pytest.mark.slow
def test_the_modes_compute_what_emulate_computes(small: Path, kept: Path) -> None:
    _assert_close(open_bundle(small))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "recipe", "layout"),
    [
        pytest.param("qwen2", "w8a16", "rows", marks=pytest.mark.thorough),  # biases
        pytest.param("phi4-mini", "w4a16", "columns", marks=pytest.mark.thorough),  # heads that turn in part
        ("gemma3", "w4a16-lpbq32", "rows"),  # norms of heads, windows, two rotary embeddings
        ("olmo2", "w4a16", "columns"),  # norms of all heads, norms behind attention
    ],
)
def test_the_modes_compute_any_architecture(tmp_path: Path, architecture: str, recipe: str, layout: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    _assert_close(open_bundle(exported(checkpoint, export_options(recipe, context=64, ar=(1, 8), key_layout=layout))))


def _source(graph: Path) -> PartSource:
    return source_of(graph.parent, graph.name)


def _rendered(graph: Path, mode: Any = "fast", *, batch_invariant: bool = False) -> onnx.ModelProto:
    with rendered_graph(_source(graph), mode, batch_invariant=batch_invariant) as (content, _):
        return onnx.load_from_string(content)


def test_no_weight_is_kept_as_float(small: Path, kept: Path) -> None:
    graph = _rendered(small / "ar1_cl64.onnx.gz").graph
    floats = [each for each in graph.initializer if each.data_type == onnx.TensorProto.FLOAT]
    scales = {node.input[2] for node in graph.node if node.op_type in ("MatMulNBits", "DynamicQuantizeMatMul")}
    assert len(scales) > 4
    assert max(np.prod(each.dims) for each in floats if each.name not in scales) < 1000
    used = {name for node in graph.node for name in node.input}
    assert used.issuperset(each.name for each in graph.initializer)


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_rows_are_alike_without_a_further_node_where_queries_share_keys(small: Path, kept: Path, mode: str) -> None:
    graphs = [
        _rendered(small / "ar1_cl64.onnx.gz", mode, batch_invariant=invariant).graph for invariant in (False, True)
    ]
    counts = [Counter(node.op_type for node in graph.node) for graph in graphs]
    assert counts[0] == counts[1]


def test_a_layer_takes_few_nodes(small: Path, kept: Path) -> None:
    layers = open_bundle(small).manifest.model.layers
    counts = [node.op_type for node in _rendered(small / "ar1_cl64.onnx.gz").graph.node]
    assert len(counts) <= 31 * layers + 20
    for op in ("Sigmoid", "Sub", "RMSNormalization", "Transpose"):
        assert op not in counts
    assert counts.count("RotaryEmbedding") <= 2 * layers
    assert counts.count("SkipSimplifiedLayerNormalization") == 2 * layers


@pytest.mark.parametrize(("dtype", "block"), [("int8", 64), ("int8", 128), ("int4", 64), ("lpbq32", 32)])
def test_a_matrix_is_packed_exactly(dtype: Any, block: int) -> None:
    """The packed integers, dequantized as MatMulNBits is specified, are the matrix."""
    weight = _weight(dtype, rows=96)
    bits, (rows, columns) = weight.grid.type.bits, weight.integers.shape
    found = packed(weight, block)
    if bits == 4:
        found = np.stack([found & 15, found >> 4], axis=-1).reshape(columns, found.shape[1], -1)
    unpacked = (found.astype(np.float32) - (1 << (bits - 1))) * scales(weight, block)[:, :, None]
    assert np.array_equal(unpacked.reshape(columns, -1)[:, :rows].T, weight.dequantize())
    assert not unpacked.reshape(columns, -1)[:, rows:].any()


def _weight(dtype: WeightDtype, rows: int, largest: int = 16) -> QuantizedWeight:
    random, columns, kind = np.random.default_rng(0), 5, WEIGHT_TYPES[dtype]
    integers = random.integers(*kind.limits, (rows, columns), endpoint=True).astype(np.int8)
    steps = random.uniform(0.01, 0.02, columns).astype(np.float32)
    blocks = None
    if kind.block:
        blocks = random.integers(1, largest, (rows // kind.block, columns), endpoint=True).astype(np.uint8)
    return QuantizedWeight(integers, Grid(dtype, steps, blocks))


def test_a_rendered_graph_is_kept_and_made_again_when_its_weights_are_damaged(small: Path, kept: Path) -> None:
    path = small / "ar1_cl64.onnx.gz"
    with rendered_graph(_source(path), "fast") as (content, folder):
        assert folder == kept
    weights = max(kept.glob("*.weights"), key=lambda file: file.stat().st_size)
    files = {*kept.iterdir()}
    right, made = weights.read_bytes(), weights.stat().st_ino
    with rendered_graph(_source(path), "fast") as (again, _):
        assert again == content and weights.stat().st_ino == made
    weights.write_bytes(right[:-1] + b"x")
    with rendered_graph(_source(path), "fast") as (again, _):
        assert again == content and weights.read_bytes() == right
    assert {*kept.iterdir()} == files


def test_each_mode_has_a_rendering_of_its_own(small: Path, kept: Path) -> None:
    modes: tuple[Any, ...] = ("fast", "exact16")
    assert len({_rendered(small / "ar1_cl64.onnx.gz", mode).SerializeToString() for mode in modes}) == 2
    assert len([*kept.glob("*.onnx")]) == 2


def test_graphs_are_rendered_without_a_cache_folder(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "file" / "cache"))
    with edgekv.load(small, cpu_mode="fast") as model:
        assert len([*model.generate([5, 6, 7], 2)]) == 2


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_a_model_generates_in_every_mode(small: Path, kept: Path, mode: CpuMode) -> None:
    with edgekv.load(small, cpu_mode=mode) as model:
        generation = model.generate([5, 6, 7], 4)
        assert len([*generation]) == 4
        # Prefixes are stored under the name: keys and values of another mode are others.
        assert generation.stats.setup.engine == f"cpu-{mode}"


def test_a_mode_that_does_not_exist_is_refused_by_name(small: Path) -> None:
    with pytest.raises(UsageError, match="cpu_mode: got 'quick'; expected emulate, exact16, fast"):
        make_engine(open_bundle(small), EngineOptions("cpu", cpu_mode="quick"))


def test_only_the_cpu_has_modes(small: Path) -> None:
    with pytest.raises(UsageError, match="cpu_mode: got fast with the engine htp"):
        make_engine(open_bundle(small), EngineOptions("htp", cpu_mode="fast"))


def test_more_threads_than_processors_are_refused_by_name(small: Path) -> None:
    with pytest.raises(UsageError, match=r"threads: got 1000; expected 1 to [0-9]+, the processors"):
        make_engine(open_bundle(small), EngineOptions("cpu", threads=1000))


@pytest.mark.skipif(not multiplies_integers(), reason="no VNNI: prefill multiplies in blocks")
def test_prefill_multiplies_integers_of_8_bits(small: Path, kept: Path) -> None:
    """All but the head and the matrix before it, which read one row.

    Activations have 16 bits in two parts; in `fast` 8 bits, these narrow ones in one group.
    """
    layers = open_bundle(small).manifest.model.layers
    for mode, parts in (("exact16", 2 * 4), ("fast", 4)):
        ops = Counter(node.op_type for node in _rendered(small / "ar8_cl64.onnx.gz", mode).graph.node)
        assert ops["MatMulIntegerToFloat"] == parts * layers + 2 * (mode == "exact16")
        assert ops["DynamicQuantizeLinear"] == 4 * layers * (mode == "exact16")
        assert ops["DynamicQuantizeMatMul"] == 2 * (mode == "fast")
    assert "MatMulIntegerToFloat" not in [node.op_type for node in _rendered(small / "ar1_cl64.onnx.gz").graph.node]


@pytest.mark.skipif(not multiplies_integers(), reason="no VNNI: prefill multiplies in blocks")
def test_an_outlier_takes_bits_from_its_group_of_inputs_alone(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    rows = random.normal(size=(1, 8, 2304)).astype(np.float32)
    rows[0, :, 7] = 400
    weight = QuantizedWeight(
        random.integers(-127, 128, (2304, 32)).astype(np.int8), Grid("int8", np.ones(32, np.float32))
    )
    weight.integers[7] = 0  # what the others lose is seen
    losses = []
    for is_normal in (False, True):
        nodes = Nodes()
        with (tmp_path / "weights").open("wb") as file:
            products = Products(
                nodes, WeightFile(file, "weights"), "fast", is_scoring=False, batch_invariant=False, in_groups=True
            )
            result = products.multiply(Rows("x", "tokens", 8, is_normal, False), weight, "matrix")
        ports = [onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in ("x", result)]
        model = nodes.model("product", ports[:1], ports[1:]).SerializeToString()
        session = ort.InferenceSession(model, session_options(tmp_path, 1), providers=PROVIDERS)
        losses.append(np.square(session.run(None, {"x": rows})[0] - rows @ weight.dequantize()).sum())
    assert losses[0] < 0.4 * losses[1], "one of three groups has the outlier"


def test_scales_of_blocks_fit_into_8_bits_exactly_or_are_refused() -> None:
    weight = _weight("lpbq32", rows=64, largest=15)
    wanted = weight.integers.astype(np.int32) * np.repeat(weight.grid.block_scales, 32, axis=0)
    assert np.array_equal(wide(weight), wanted)
    weight.integers[0, 0], weight.grid.block_scales[0, 0] = 7, 19  # 133
    assert wide(weight) is None


@pytest.mark.thorough
@pytest.mark.slow
def test_eval_tells_a_modes_agreement_with_emulate(bundle: Path, embedded: Path, capsys: Any) -> None:
    asked = ["eval", str(bundle), "--text", str(embedded / "heldout.txt"), "--tokens", "508", "--json"]
    found = {}
    for mode in ("exact16", "fast"):
        assert run([*asked, "--cpu-mode", mode]) == 0
        result = json.loads(capsys.readouterr().out)
        assert (result["engine"], result["agreement"]["mode"]) == (f"cpu-{mode}", mode)
        assert result["perplexity"] <= 1.01 * result["reference_perplexity"]
        found[mode] = result["agreement"]
    assert found["exact16"]["kl_nats"] < found["fast"]["kl_nats"] < 0.01
    assert found["exact16"]["top1_agreement"] > 0.98 and found["fast"]["top1_agreement"] > 0.95
    assert run(asked) == 0
    assert json.loads(capsys.readouterr().out)["agreement"] is None


def test_eval_measures_layers_in_emulate_only(small: Path, tmp_path: Path, capsys: Any) -> None:
    (tmp_path / "text").write_text("some text " * 50)
    asked = ["eval", str(small), "--text", str(tmp_path / "text"), "--layers", "--cpu-mode", "fast"]
    assert run(asked) == 2
    assert "--cpu-mode: got fast with --layers" in capsys.readouterr().err


def test_too_little_memory_is_refused_with_the_mode_that_takes_less(
    small: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights_bytes = sum(path.stat().st_size for path in small.glob("*.safetensors"))
    monkeypatch.setattr("edgekv.runtime.cpu.free_memory_bytes", lambda: weights_bytes)
    with pytest.raises(EngineError, match=r"memory for bundle: got .* free; .*Use --cpu-mode fast"):
        edgekv.load(small).generate([5, 6, 7], 2)
    assert len([*edgekv.load(small, cpu_mode="fast").generate([5, 6, 7], 2)]) == 2


@pytest.mark.slow
def test_a_kept_graph_is_loaded_without_the_package_that_builds(small: Path, kept: Path) -> None:
    program = "import sys, edgekv; print([t.id for t in edgekv.load(sys.argv[1], cpu_mode='fast').generate([5, 6], 2)])"
    program += "; print('onnx' in sys.modules)"
    command = [sys.executable, "-c", program, str(small)]
    first, second = (subprocess.run(command, capture_output=True, text=True, check=True).stdout for _ in range(2))
    assert first.split("]")[0] == second.split("]")[0] and (first.split()[-1], second.split()[-1]) == ("True", "False")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"splits": 2, "head": "own", "embedding": "host"}, {"kv_dtype": "s16"}])
def test_graphs_of_parts_and_wide_caches_are_rendered_too(tmp_path: Path, kept: Path, options: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    folder = exported(checkpoint, export_options(context=64, ar=(1, 8), **options))
    scored = []
    for mode in ("emulate", "exact16"):
        with edgekv.load(folder, cpu_mode=mode, threads=1) as model:
            scored.append(model.score([*range(5, 45)]))
    assert _sqnr_db(*scored) > 30


def _files_of_weights(graph: Path, mode: Any = "fast") -> set[str]:
    return {
        entry.value
        for tensor in _rendered(graph, mode).graph.initializer
        for entry in tensor.external_data
        if entry.key == "location"
    }


def test_weights_lie_in_files_as_kernels_read_them(small: Path, kept: Path) -> None:
    """A session maps them: it makes no copies."""
    graph = _rendered(small / "ar1_cl64.onnx.gz").graph
    read = {node.input[1] for node in graph.node if node.op_type in ("MatMulNBits", "DynamicQuantizeMatMul")}
    matrices = [tensor for tensor in graph.initializer if tensor.name in read and tensor.external_data]
    assert len(matrices) >= 4
    for tensor in matrices:
        found = {entry.key: entry.value for entry in tensor.external_data}
        file = kept / found["location"]
        assert file.stem == sha256(file.read_bytes()).hexdigest()
        kernel, blob = found["prepacked_0"].split("|")
        offset, length, *_ = map(int, blob.split(";"))
        assert "MatMul" in kernel and offset % 4096 == 0
        assert int(found["length"]) <= offset < offset + length <= file.stat().st_size


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_graphs_share_the_files_of_equal_weights(small: Path, kept: Path, mode: CpuMode) -> None:
    decode, prefill = (_files_of_weights(small / name, mode) for name in ("ar1_cl64.onnx.gz", "ar8_cl64.onnx.gz"))
    shared = decode & prefill
    assert shared and {path.name for path in kept.glob("*.weights")} == decode | prefill
    if multiplies_integers() and mode == "exact16":
        assert shared == decode


def test_weights_that_no_graph_uses_are_removed(tmp_path: Path) -> None:
    for name in ("used.weights", "unused.weights", "graph.onnx"):
        (tmp_path / name).touch()
    (left_by_a_killed_process(tmp_path, SCRATCH) / "weights").touch()
    with held_folder(tmp_path, SCRATCH) as another:
        remove_unused_weights(tmp_path, {"used.weights"})
        assert {*tmp_path.iterdir()} == {*tmp_path.glob("*used.weights"), tmp_path / "graph.onnx", another}
        remove_unused_weights(tmp_path, {"used.weights"}, age_s=-60)
    assert {path.name for path in tmp_path.iterdir()} == {"used.weights", "graph.onnx"}


def test_graphs_kept_by_an_older_version_are_ignored(small: Path, kept: Path) -> None:
    kept.mkdir(parents=True)
    (kept / "old.onnx").write_bytes(sha256(b"\xff" * 99).digest() + b"\xff" * 99)
    assert _rendered(small / "ar1_cl64.onnx.gz").graph.node


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_graphs_take_any_number_of_past_rows(tmp_path: Path, kept: Path, layout: Any) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    folder = exported(checkpoint, export_options(context=64, ar=(1, 8), key_layout=layout))
    for graph in open_bundle(folder).manifest.graphs:
        path = folder / graph.part.file
        assert CpuEngine(1, "fast").load(path, graph.name).reads_used_rows
        assert not CpuEngine(1).load(path, graph.name).reads_used_rows


def test_reading_only_the_rows_in_use_changes_no_logit(
    small: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closed columns have no weight in attention: the logits are the same but for the order of sums."""
    scored = []
    for block in (8, 1000):
        monkeypatch.setattr("edgekv.runtime.graph._ROW_BLOCK", block)
        with edgekv.load(small, cpu_mode="exact16", threads=1, policy="sliding-window") as model:
            generation = model.generate([*range(5, 25)], 60, ignore_eos=True, return_logits=True)
            scored.append(np.stack([token.logits for token in generation if token.logits is not None]))
    assert len(scored[0]) == 60
    assert _sqnr_db(*scored) > 30


def _resident_bytes(files: set[Path]) -> int:
    """How much of these files this process has in memory."""
    total, counts = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            counts = Path(rest[-1]) in files if rest else False
        elif first == "Rss:" and counts:
            total += int(rest[0]) << 10
    return total


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells what is mapped")
def test_a_graph_that_has_not_run_for_a_while_leaves_no_weights_in_memory(
    small: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short. Each session maps its own files, also those that graphs share: without VNNI, all."""
    monkeypatch.setattr("edgekv.runtime.idle_memory.is_short_of_memory", lambda: True)
    files = {kept / file for ar in (1, 8) for file in _files_of_weights(small / f"ar{ar}_cl64.onnx.gz")}
    with edgekv.load(small, cpu_mode="fast") as model:
        resident = [_resident_bytes(files) for _ in model.generate([*range(5, 21)], 30, ignore_eos=True)]
        assert resident[0] == 0 < resident[-1] == max(resident), "weights of a prompt leave with its step"
        first, again = ([token.id for token in model.generate([*range(5, 21)], 4, ignore_eos=True)] for _ in range(2))
        assert first == again and 0 < _resident_bytes(files) <= max(resident)


@pytest.mark.parametrize("mode", ["emulate", "exact16", "fast"])
def test_rows_of_a_prompt_do_not_depend_on_what_the_cache_held_before(small_export: Path, mode: Any) -> None:
    with edgekv.load(small_export, cpu_mode=mode) as model:
        session = model.session
        session.feed([5, 6, 7])
        wanted = session.cache.state.rows
        session.feed([*range(100, 140)])
        session.reset()
        session.feed([5, 6, 7])
        found = session.cache.state.rows
    assert all(np.array_equal(found[name], rows) for name, rows in wanted.items())


def test_without_the_package_that_builds_only_kept_graphs_run(
    small: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = small / "ar1_cl64.onnx.gz"
    with rendered_graph(_source(path), "fast") as (content, folder):
        assert folder == kept
    monkeypatch.setitem(sys.modules, "onnx", None)
    with rendered_graph(_source(path), "fast") as (again, _):
        assert again == content
    with pytest.raises(EngineError, match=r'no package onnx.* pip install "edgekv\[cpu\]"'):
        edgekv.load(small, cpu_mode="exact16").score([1, 2])
