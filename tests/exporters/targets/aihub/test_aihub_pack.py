"""The upload form of a graph, and the step with which it is tried."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import edgekv
from edgekv.bundle import MANIFEST, Bundle, GraphRecord, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import BundleError, UsageError
from edgekv.machine.graph_file import write_graph
from edgekv.runtime import CpuEngine
from exporters.graphs.parts import stored_graph
from exporters.quantize.recipe import find_recipe
from exporters.targets.aihub.run import pack_graph
from exporters.targets.aihub.sample import Sample, read_sample, take_sample
from tests.support.checkpoints import NEWER, write_sinking
from tests.support.exports import export_options, exported

TEXT = "def main():\n    return sum(range(10))\n" * 4


def test_a_packed_graph_is_one_onnx_and_one_data_file_that_compute_the_same(small: Path, tmp_path: Path) -> None:
    bundle = open_bundle(small)
    for graph in bundle.manifest.graphs[:2]:
        packed = pack_graph(bundle, graph, tmp_path)
        name = packed.name.removesuffix(".onnx.zip")
        with zipfile.ZipFile(packed) as archive:
            assert archive.namelist() == [f"{name}/{name}.onnx", f"{name}/{name}.data"]
        sample = take_sample(bundle, graph, TEXT)
        outputs = _run_packed(bundle, graph, tmp_path, sample)
        assert onnx.load(tmp_path / name / f"{name}.onnx", load_external_data=False).graph.name == name
        assert all((a == b).all() for a, b in zip(outputs, sample.outputs.values(), strict=True))


def test_packing_twice_gives_the_same_bytes(small: Path, tmp_path: Path) -> None:
    bundle = open_bundle(small)
    first = pack_graph(bundle, bundle.manifest.graphs[0], tmp_path)
    content = first.read_bytes()
    assert pack_graph(bundle, bundle.manifest.graphs[0], tmp_path).read_bytes() == content
    assert [path.name for path in tmp_path.glob("*.zip*")] == [first.name]


def test_a_weight_outside_of_the_bundle_is_refused(small: Path, tmp_path: Path) -> None:
    bundle = open_bundle(small)
    graph = bundle.manifest.graphs[0]
    model = stored_graph(small / graph.file)
    weight = next(t for t in model.graph.initializer if t.external_data)
    next(entry for entry in weight.external_data if entry.key == "location").value = f"../{MANIFEST}"
    write_graph(model.SerializeToString(), small / graph.file)
    with pytest.raises(BundleError, match=r"of \.\./manifest\.json; expected bytes of a file of the bundle"):
        pack_graph(bundle, graph, tmp_path)
    assert not list(tmp_path.glob("*.zip*"))


def test_a_step_is_one_of_the_generation_loop(small: Path, tmp_path: Path) -> None:
    bundle = open_bundle(small)
    scores = edgekv.load(bundle).score(bundle.tokenizer().encode(TEXT).ids[:24])
    logits = bundle.manifest.encodings["logits"]
    for graph, last in ((bundle.manifest.graphs[0], 16), (bundle.manifest.graphs[1], 23)):
        found = take_sample(bundle, graph, TEXT).outputs["logits"]
        assert np.abs(logits.dequantize(found)[0, 0] - scores[last]).max() <= 2 * logits.scale


@pytest.mark.slow
@pytest.mark.parametrize(
    "other",
    [
        {"key_layout": "columns"},
        pytest.param({"max_attention_window": (12, 64), "context": (32, 64)}, marks=pytest.mark.thorough),
        pytest.param({"recipe": find_recipe("w4a16-lpbq32")}, marks=pytest.mark.thorough),
    ],
    ids=["columns", "windows", "blocks"],
)
def test_so_it_is_with_keys_in_columns_attention_windows_and_4_bits(
    small: Path, tmp_path: Path, other: dict[str, Any]
) -> None:
    options = export_options(**({"context": (64,), "ar": (1, 8)} | other))
    bundle = open_bundle(exported(Path(open_bundle(small).manifest.source.checkpoint), options))
    scores = edgekv.load(bundle).score(bundle.tokenizer().encode(TEXT).ids[:24])
    logits = bundle.manifest.encodings["logits"]
    for graph in bundle.manifest.graphs:
        if graph.role != "score":
            sample = take_sample(bundle, graph, TEXT)
            last = 16 if graph.ar == 1 else 23
            found = logits.dequantize(sample.outputs["logits"])
            # Graphs of other AR add in another order: an entry of the cache may round the other way.
            assert np.abs(found[0, 0] - scores[last]).max() <= 64 * logits.scale
            outputs = _run_packed(bundle, graph, tmp_path, sample)
            assert all((a == b).all() for a, b in zip(outputs, sample.outputs.values(), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("key_layout", ["rows", "columns"])
def test_a_step_of_a_bundle_with_a_sink_begins_with_it(tmp_path: Path, key_layout: str) -> None:
    options = export_options(context=64, ar=(1, 8), calibration_tokens=256, key_layout=key_layout)
    bundle = open_bundle(exported(write_sinking(tmp_path / "checkpoint", NEWER), options))
    sink = read_sink(bundle)
    assert sink is not None
    scores = edgekv.load(bundle, threads=1).score([*sink.tokens, *bundle.tokenizer().encode(TEXT).ids[:24]])
    logits = bundle.manifest.encodings["logits"]
    for graph, before, last in ((bundle.manifest.graphs[0], 16, 17), (bundle.manifest.graphs[1], 16, 24)):
        sample = take_sample(bundle, graph, TEXT)
        for name, row in sink.rows.items():
            past = sample.inputs[name][0, 0]
            past = past.T if key_layout == "columns" and "key" in name else past
            np.testing.assert_array_equal(past[-before - 1], row[0])
            assert (past[: -before - 1] == bundle.manifest.geometry.zero_point).all()
        found = logits.dequantize(sample.outputs["logits"])
        assert np.abs(found[0, 0] - scores[last]).max() <= 12 * logits.scale
        assert len(sample.inputs) == len(bundle.manifest.interface.graph(graph).inputs), "a job gets every input"


def _run_packed(bundle: Bundle, graph: GraphRecord, folder: Path, sample: Sample) -> list[np.ndarray[Any, Any]]:
    """Outputs of the packed graph on the inputs of a step."""
    packed = pack_graph(bundle, graph, folder)
    with zipfile.ZipFile(packed) as archive:
        archive.extractall(folder)
    name = packed.name.removesuffix(".onnx.zip")
    return CpuEngine().session(folder / name / f"{name}.onnx").run(list(sample.outputs), dict(sample.inputs))


def test_a_text_that_is_too_short_and_a_step_that_is_missing_are_said_so(small: Path, tmp_path: Path) -> None:
    bundle = open_bundle(small)
    with pytest.raises(UsageError, match=r"--text: got 2 tokens; expected 17"):
        take_sample(bundle, bundle.manifest.graphs[0], "ab")
    with pytest.raises(BundleError, match=r"expected the step that was submitted\. Run: edgekv hub infer"):
        read_sample(tmp_path / "sample.safetensors")
