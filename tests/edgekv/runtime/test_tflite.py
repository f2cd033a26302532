"""A bundle of TFLite graphs: written without TensorFlow, run by LiteRT and by tflite-runtime on the cache's memory."""

import shutil
import subprocess
import sys
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

import edgekv
from edgekv.bundle import open_bundle, record_files, write_manifest
from edgekv.errors import BundleError, EdgeKVError, EngineError, UsageError
from edgekv.kv import STRATEGIES
from edgekv.kv.memory import aligned_zeros
from edgekv.runtime import LitertEngine, TfliteEngine, foreign_graph
from edgekv.runtime.litert import run_graphs
from edgekv.spec.tensors import matrices
from exporters.capabilities import GENIE
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.graphs.tflite import limits
from exporters.inspect.probe import Probe
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference
from tests.support import exports
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options
from tests.support.thorough import variants

pytestmark = pytest.mark.slow

# tflite-runtime was built for numpy 1 and breaks with 2, where these run on LiteRT alone.
ENGINES = ["litert", pytest.param("tflite", marks=pytest.mark.numpy1)]
PROMPT = "import os\n\ndef main(argv):\n    parser = argparse.ArgumentParser()\n    parser.add_argument("


TFLITE = {"context": 128, "ar": (1, 32), "kv_dtype": "s8", "graph_format": "tflite"}


def export(checkpoint, **options):
    return exports.exported(checkpoint, export_options(**(TFLITE | options)))


@pytest.fixture(scope="module")
def exported(embedded):
    return export(embedded)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Rows of 16 bytes: where they begin is rarely a multiple of 64."""
    return export(write_checkpoint(tmp_path_factory.mktemp("small") / "checkpoint"), context=64, ar=(1, 8))


def tokens(model, count=24):
    return [token.id for token in model.generate(PROMPT, count)]


def test_one_file_holds_a_signature_for_each_graph_and_weights_once(exported):
    manifest = open_bundle(exported).manifest
    parameters = 4_000_000
    assert {graph.file for graph in manifest.graphs} == {"graphs.tflite"} and len(manifest.graphs) == 3
    assert manifest.files["graphs.tflite"].bytes < 1.2 * (parameters + 2 * manifest.model.vocab * manifest.model.hidden)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_most_likely_tokens_are_those_of_the_onnx_graphs(exported, bundle, embedded, engine):
    cpu, model = edgekv.load(bundle, "cpu"), edgekv.load(exported, engine)
    ids = cpu.encode((embedded / "heldout.txt").read_text("utf-8"))[:640]
    windows = [ids[start : start + 128] for start in range(0, len(ids), 128)]
    agreed = [(cpu.score(w).argmax(-1) == model.score(w).argmax(-1)).mean() for w in windows]
    assert np.mean(agreed) >= 0.97


@pytest.mark.thorough
def test_weights_of_4_bits_are_packed_and_run_on_litert_alone(exported, embedded):
    recipe = find_recipe("w4a16")
    packed = export(embedded, recipe=recipe)
    onnx = export(embedded, recipe=recipe, kv_dtype="u8", graph_format="onnx")
    sizes = [open_bundle(each).manifest.files["graphs.tflite"].bytes for each in (packed, exported)]
    shapes = matrices(Checkpoint.open(str(embedded)).spec).items()
    packed_elements = sum(rows * inputs for name, (rows, inputs) in shapes if recipe.rule(name).dtype == "int4")
    assert sizes[1] - sizes[0] == pytest.approx(packed_elements / 2, rel=0.01) and packed_elements > 2_500_000
    cpu, model = edgekv.load(onnx, "cpu"), edgekv.load(packed, "litert")
    ids = cpu.encode((embedded / "heldout.txt").read_text("utf-8"))[:128]
    assert (cpu.score(ids).argmax(-1) == model.score(ids).argmax(-1)).mean() >= 0.96
    with pytest.raises(UsageError, match=r"got tflite for a bundle with int4 weights, .* Use litert"):
        edgekv.load(packed, "tflite")


@pytest.mark.parametrize("engine", ENGINES)
def test_every_strategy_gives_the_same_tokens(exported, engine):
    """They do so only if the runtime reads and writes the cache's own memory, wherever its window moves."""
    runs = {name: edgekv.load(exported, engine, kv_update=name) for name in STRATEGIES}
    found = {name: tokens(model, 100) for name, model in runs.items()}
    assert len({tuple(each) for each in found.values()}) == 1
    assert runs["pointer-shift"].cache.stats.bytes_copied == runs["mirror"].cache.stats.bytes_copied == 0


def test_litert_is_lent_the_addresses_of_the_cache(exported):
    model = edgekv.load(exported, "litert", kv_update="pointer-shift")
    tokens(model, 3)
    (store,) = model.cache.arenas
    (part,) = model.engine.graphs._loaded["ar1_cl128"]._parts
    ((_, past, new, *_),) = (group.bound for group in part._groups)
    inputs, outputs = part._binding._inputs.addresses(), part._binding._outputs.addresses()
    for tensor, address in zip(store.tensors, store.addresses, strict=True):
        assert inputs[tensor.past] == address + past * store.row_bytes
        assert outputs[tensor.new] == address + new * store.row_bytes


@pytest.mark.numpy1
def test_tflite_runtime_is_laid_over_the_addresses_of_the_cache(exported):
    model = edgekv.load(exported, "tflite", kv_update="pointer-shift")
    tokens(model, 3)
    (store,) = model.cache.arenas
    (part,) = model.engine.graphs._loaded["ar1_cl128"]._parts
    ((_, past, new, *_),) = (group.bound for group in part._groups)
    binding = part._binding
    details = {**binding._details.get_input_details(), **binding._details.get_output_details()}

    def address(name):
        return binding._runtime.tensor(binding, details[name]["index"], binding._subgraph).ctypes.data

    for tensor, base in zip(store.tensors, store.addresses, strict=True):
        assert address(tensor.past) == base + past * store.row_bytes
        assert address(tensor.new) == base + new * store.row_bytes


@pytest.mark.parametrize(
    ("architecture", "engine"),
    [
        *variants(
            [(name, "litert") for name in ("llama-biased", "qwen2", "qwen3", "gemma3", "phi3")], [("gemma3", "litert")]
        ),
        pytest.param("gemma2", "tflite", marks=pytest.mark.numpy1),
    ],
)
def test_every_architecture_is_as_near_to_float_as_its_onnx_graphs(tmp_path, architecture, engine):
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    options = {"context": 64, "ar": (1, 8), "kv_dtype": "s16"}
    onnx, tflite = export(folder, **options, graph_format="onnx"), export(folder, **options)
    ids = [ord(letter) for letter in "the quick brown fox jumps over the lazy dog, twice"]
    (float32,) = Reference(Checkpoint.open(str(folder)), 64).logits([np.array(ids)])

    def sqnr_db(model):
        return 10 * np.log10(np.square(float32).sum() / np.square(model.score(ids) - float32).sum())

    assert sqnr_db(edgekv.load(tflite, engine)) > max(20, sqnr_db(edgekv.load(onnx, "cpu")) - 1)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_of_16_bits_runs_too(embedded, engine):
    model = edgekv.load(export(embedded, kv_dtype="s16"), engine)
    assert model.cache.arenas[0].dtype == np.int16
    assert len(tokens(model, 8)) == 8


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_that_cannot_be_bound_anywhere_need_the_strategy_slot(small, engine):
    assert len([*edgekv.load(small, engine).generate([5, 6, 7], 8)]) == 8
    with pytest.raises(UsageError, match=r"got pointer-shift with rows of 16 bytes on the engine .* Use slot"):
        edgekv.load(small, engine, kv_update="pointer-shift")


@pytest.mark.parametrize("make", [LitertEngine, pytest.param(TfliteEngine, marks=pytest.mark.numpy1)])
def test_an_address_that_is_not_aligned_is_refused_not_copied(exported, make):
    binding = make().load(exported / "graphs.tflite", "ar1_cl128")
    port = next(each for each in binding.interface.inputs if each.name == "attention_mask")
    array = aligned_zeros(port.shape, port.dtype)
    with pytest.raises(ValueError, match=r"attention_mask: got address 0x.*; expected a multiple of 64"):
        binding.inputs([port.name], array.dtype, array.shape, [array.ctypes.data], 8)


@pytest.mark.parametrize("make", [LitertEngine, pytest.param(TfliteEngine, marks=pytest.mark.numpy1)])
def test_a_broken_file_is_refused_by_name(tmp_path, make):
    (tmp_path / "graphs.tflite").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"graphs.tflite on "):
        make().load(tmp_path / "graphs.tflite", "ar1_cl128")


@pytest.mark.numpy2
def test_numpy_2_with_tflite_runtime_is_explained(exported):
    with pytest.raises(EngineError, match=r"engine tflite: got numpy 2.*expected numpy below 2.*--engine litert"):
        tokens(edgekv.load(exported, "tflite"))


def test_engines_and_graphs_that_do_not_go_together_are_refused(exported, bundle):
    with pytest.raises(UsageError, match=r"got cpu for a bundle of tflite graphs; expected litert or tflite"):
        edgekv.load(exported, "cpu")
    with pytest.raises(UsageError, match=r"got litert for a bundle of onnx graphs; expected cpu or htp"):
        edgekv.load(bundle, "litert")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_dtype": "u8"}, "got u8 with --format tflite; expected s8 or s16"),
        ({"kv_dtype": "s8", "graph_format": "onnx"}, "got s8 with --format onnx; expected u8 or s16"),
        ({"recipe": find_recipe("w4a16-lpbq64")}, "got w4a16-lpbq64, with a scale for each block, with --format"),
        ({"key_layout": "columns"}, "got columns with --format tflite; expected rows"),
    ],
)
def test_what_the_kernels_cannot_do_is_refused_before_work_starts(options, message):
    with pytest.raises(UsageError, match=message):
        export_options(**(TFLITE | options))


def test_more_than_a_flatbuffer_can_address_is_refused(tmp_path, embedded, monkeypatch):
    monkeypatch.setattr(limits, "MAX_BYTES", 1_000_000)
    with pytest.raises(UsageError, match=r"--format tflite: got 0.0 GB of weights"):
        export_bundle(Checkpoint.open(str(embedded)), tmp_path / "bundle", export_options(**TFLITE))
    assert not (tmp_path / "bundle").exists()


@pytest.mark.parametrize(
    ("package", "arguments", "message"),
    [
        ("ai_edge_litert", ["generate", "BUNDLE", "--prompt", "x", "--engine", "litert"], "edgekv[litert]"),
        (
            "ai_edge_litert",
            ["export", "CHECKPOINT", "-o", "OUT", "--device", "SM8650", "--format", "tflite"],
            "[litert]",
        ),
    ],
)
def test_a_missing_package_tells_how_to_install_it(exported, embedded, tmp_path, package, arguments, message):
    places = {"BUNDLE": str(exported), "CHECKPOINT": str(embedded), "OUT": str(tmp_path / "out")}
    arguments = [places.get(each, each) for each in arguments]
    code = f"""
import sys
sys.modules[{package!r}] = None  # as if it were not installed
from edgekv.cli import run
sys.exit(run({arguments!r}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=Path(__file__).parents[3])
    assert done.returncode == 1
    assert f"got no package {package}" in done.stderr and message in done.stderr


def test_what_reads_onnx_graphs_alone_says_so(exported):
    with pytest.raises(BundleError, match=r"got tflite graphs; expected onnx graphs, which Genie reads. Export it"):
        GENIE.check(open_bundle(exported))
    with pytest.raises(BundleError, match=r"got tflite graphs; expected onnx graphs"):
        Probe(open_bundle(exported), LitertEngine())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_prefix_is_not_run_again(exported, tmp_path, engine):
    model = edgekv.load(exported, engine, prefix_cache=tmp_path / "prefixes")
    first = [token.id for token in model.generate(PROMPT * 2, 8)]
    again = model.generate(PROMPT * 2, 8)
    assert [token.id for token in again] == first
    assert again.stats.cache.reused_tokens > 32


@pytest.mark.parametrize("engine", ENGINES)
def test_a_cache_that_grows_is_lent_anew(embedded, engine):
    exported = export(embedded, context=(64, 128))
    grown = edgekv.load(exported, engine, kv_growth="staggered")
    assert tokens(grown, 80) == tokens(edgekv.load(exported, engine), 80)
    assert grown.cache.groups[0].reallocations > 0


@pytest.mark.thorough
def test_a_forged_file_is_refused_and_never_crashes_the_caller(small, tmp_path):
    """Words of the file replaced, and hashed anew: the loader trusts them, and often takes the process down."""
    raw = (small / "graphs.tflite").read_bytes()
    outcomes = []
    for seed in range(8):
        random = Random(seed)
        forged = bytearray(raw)
        for _ in range(10):
            at = random.randrange(len(raw) // 4) * 4
            forged[at : at + 4] = random.randbytes(4)
        bundle = shutil.copytree(small, tmp_path / str(seed))
        (bundle / "graphs.tflite").write_bytes(forged)
        manifest = structs.replace(open_bundle(small).manifest, files=record_files(bundle))
        write_manifest(bundle, manifest)
        try:
            outcomes.append(str(len(list(edgekv.load(bundle, "litert").generate([3, 4, 5], 2)))))
        except EdgeKVError as error:
            outcomes.append(str(error))
    assert any("a crash or hang of the process that tried it: SIG" in outcome for outcome in outcomes), outcomes


def test_a_file_is_tried_once(small, monkeypatch):
    assert len(list(edgekv.load(small, "litert").generate([3, 4, 5], 2))) == 2
    monkeypatch.setattr(foreign_graph, "call", lambda *_: pytest.fail("tried again"))
    assert len(list(edgekv.load(small, "litert").generate([3, 4, 5], 2))) == 2


def test_a_trial_that_does_not_end_is_ended(small, monkeypatch):
    monkeypatch.setattr(foreign_graph, "_TRIAL_S", 0.01)
    with pytest.raises(EngineError, match=r"the process that tried it: no answer within 0\.01 s; expected graphs"):
        foreign_graph.try_file(small / "graphs.tflite", "a runtime that was not tried", run_graphs)
