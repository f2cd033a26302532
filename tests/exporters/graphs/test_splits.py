"""Graphs divided into parts against whole ones: the same bits, from the same weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st

import edgekv
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, UsageError
from edgekv.machine.graph_file import graph_name
from edgekv.plan import divide
from edgekv.runtime import CpuEngine, make_engine
from edgekv.runtime.load_options import EngineOptions
from exporters.compile import BinaryChoice, compile_bundle
from exporters.htp.check import floating_nodes
from exporters.inspect.probe import Probe
from exporters.targets.genai.write import choose_graphs
from tests.support.bundles import replace_in_manifest
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

DEVICE = find("SM8650")
PROMPT = [(7 * i) % 200 + 3 for i in range(20)]
SPLITS = {
    "whole": {},
    "body and head": {"splits": 1, "head": "own"},
    "host": {"splits": 1, "embedding": "host"},
    "two": {"splits": 2},
    "three": {"splits": 3, "embedding": "graph", "head": "last"},
}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("splits") / "checkpoint", {"num_hidden_layers": 3})
    return {
        name: exported(checkpoint, export_options(context=(24, 48), ar=(1, 8), **split))
        for name, split in SPLITS.items()
    }


@pytest.fixture(scope="module")
def two(bundles: dict[str, Path]) -> Bundle:
    return open_bundle(bundles["two"])


def _logits(folder: Path, engine: str, strategy: str) -> tuple[np.ndarray, np.ndarray]:
    """Of a prompt and single tokens across both contexts; and of every token, scored."""
    model = edgekv.load(folder, engine, kv_update=strategy)
    session = model.session
    rows = [session.feed(PROMPT).copy(), *(session.feed([(11 * t) % 200]).copy() for t in range(8))]
    return np.stack(rows), model.score(PROMPT)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "names"),
    [pytest.param("slot", [*SPLITS][1:], marks=pytest.mark.thorough), ("pointer-shift", ["two"])],
    ids=["slot", "pointer-shift"],
)
def test_parts_give_the_bits_of_the_whole(bundles: dict[str, Path], strategy: str, names: list[str]) -> None:
    wanted = _logits(bundles["whole"], "cpu", strategy)
    for name in names:
        for found, each in zip(_logits(bundles[name], "cpu", strategy), wanted, strict=True):
            assert np.array_equal(found, each) and each.std() > 0


@pytest.mark.thorough
@pytest.mark.htp
def test_parts_give_the_bits_of_the_whole_on_the_htp(bundles: dict[str, Path]) -> None:
    """If embeddings are looked up at the same place: the HTP's own products are a step off now and then."""
    for pair in (("two", "host"), ("three", "whole")):
        for found, wanted in zip(*(_logits(bundles[each], "htp", "slot") for each in pair), strict=True):
            assert np.array_equal(found, wanted)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_part_reads_the_masks_and_rotary_embeddings_of_its_own_layers(tmp_path: Path) -> None:
    """Gemma's local and global layers have one each."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["gemma3"])
    one, three = (exported(checkpoint, export_options(context=48, ar=(1, 8), splits=splits)) for splits in (1, 3))
    assert np.array_equal(edgekv.load(one).score(PROMPT), edgekv.load(three).score(PROMPT))
    opened = open_bundle(three)
    decode = opened.manifest.graphs[0]
    ports = [part.inputs for part in opened.manifest.interface.parts(decode)]
    small = [[port.name for port in each if "past" not in port.name] for each in ports]
    local = ["attention_mask_w24", "position_ids_cos_local", "position_ids_sin_local"]
    assert small == [
        ["inputs_embeds", *local],
        ["hidden_1", *local],
        ["hidden_2", "attention_mask", "position_ids_cos", "position_ids_sin"],
        ["hidden_3"],
    ]


def test_graphs_share_parts_and_weights(bundles: dict[str, Path], two: Bundle) -> None:
    names = {graph.name: [part.name for part in graph.parts] for graph in two.manifest.graphs}
    assert names["ar1_cl24"] == ["ar1_cl24_part1", "ar1_cl24_part2", "head"]
    assert names["ar8_cl48"] == ["ar8_cl48_part1", "ar8_cl48_part2", "head"]
    assert names["ar8_cl48_score"] == ["ar8_cl48_part1", "ar8_cl48_part2", "head_ar8"]
    whole = open_bundle(bundles["whole"]).manifest
    assert [graph.file for graph in whole.graphs[:2]] == ["ar1_cl24.onnx.gz", "ar8_cl24.onnx.gz"] and whole.is_whole
    assert {n: r for n, r in two.manifest.files.items() if "weights" in n} == {
        n: r for n, r in whole.files.items() if "weights" in n
    }


def test_a_head_by_itself_runs_once_a_feed(bundles: dict[str, Path]) -> None:
    model = edgekv.load(bundles["two"])
    model.session.feed(PROMPT[:8])
    (prefill,) = model.engine.graphs.loaded
    before = prefill.logits.copy()
    prefill.run(PROMPT[8:16], prefill.window(8), 8, logits=False)
    model.cache.commit(8)
    assert np.array_equal(prefill.logits, before) and model.cache.length == 16
    prefill.run(PROMPT[16:20], prefill.window(4), 16)
    assert not np.array_equal(prefill.logits, before)


@pytest.mark.htp
def test_every_part_computes_in_integers(two: Bundle) -> None:
    parts = two.manifest.graphs[1].parts
    assert floating_nodes([two.part_path(part) for part in parts], DEVICE) == []


@pytest.mark.thorough
@pytest.mark.htp
def test_one_binary_for_each_part_that_all_graphs_share(bundles: dict[str, Path], tmp_path: Path) -> None:
    peaks: dict[str, int] = {}
    two = open_bundle(shutil.copytree(bundles["two"], tmp_path / "two"))
    record = compile_bundle(two, DEVICE, watch=peaks.__setitem__)
    graphs = [f"ar{ar}_cl{context}" for context in (24, 48) for ar in (1, 8)]
    assert [[*binary.wrappers] for binary in record.binaries] == [
        [f"{graph}_part1" for graph in graphs],
        [f"{graph}_part2" for graph in graphs],
        ["head"],
    ]
    assert peaks.keys() == {binary.file for binary in record.binaries}
    assert all(50e6 < peak_bytes < 2e9 for peak_bytes in peaks.values())
    with pytest.raises(UsageError, match="--force"):
        compile_bundle(two, DEVICE, choice=BinaryChoice(per_graph=True))


@pytest.mark.thorough
@pytest.mark.htp
def test_the_engine_loads_what_was_compiled_of_each_part(bundles: dict[str, Path], tmp_path: Path) -> None:
    options = export_options(context=24, ar=(1,), splits=1, head="own")
    made = exported(bundles["two"].parent / "checkpoint", options)
    bundle = open_bundle(shutil.copytree(made, tmp_path / "bundle"))
    rows = [edgekv.load(bundle, "htp").session.feed(PROMPT[:4]).copy()]
    compile_bundle(bundle, DEVICE, choice=BinaryChoice(per_graph=True))
    loaded = make_engine(bundle, EngineOptions("htp")).compiled
    assert {graph_name(part): wrapper.stem for part, wrapper in loaded.items()} == {
        name: name for name in ("ar1_cl24_body", "head")
    }
    rows.append(edgekv.load(bundle, "htp").session.feed(PROMPT[:4]).copy())
    assert np.array_equal(*rows)


def test_what_runs_a_graph_as_one_file_refuses_parts_by_name(two: Bundle) -> None:
    wanted = r"got graphs of 3 parts; expected .*, which {} runs. Export it with --splits 1 --head last"
    with pytest.raises(BundleError, match=wanted.format("onnxruntime-genai")):
        choose_graphs(two)


def test_a_trace_of_parts_is_that_of_the_whole(bundles: dict[str, Path]) -> None:
    traces = {name: Probe(open_bundle(bundles[name]), CpuEngine()).run(PROMPT) for name in ("whole", "two", "three")}
    whole = traces["whole"]
    assert [traces[name].keys() ^ whole.keys() for name in ("two", "three")] == [set(), set()]
    for name in ("two", "three"):
        assert all(np.array_equal(values, whole[key]) for key, values in traces[name].items())


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"stop_layer": 1,', '"stop_layer": 2,', r"parts: got 0:2, 1:3, 3:3 head; expected layers 0 to 3"),
        ('"embeds": false', '"embeds": true', r"embeds: got \[True, "),
        ('"head": true', '"head": false', r"parts: got"),
    ],
)
def test_parts_that_are_no_decoder_are_refused(two: Bundle, tmp_path: Path, old: str, new: str, message: str) -> None:
    text = json.dumps(json.loads((two.path / "manifest.json").read_text()))
    (tmp_path / "manifest.json").write_text(text.replace(old, new))
    with pytest.raises(BundleError, match=message):
        open_bundle(tmp_path)


def test_a_table_of_another_model_is_refused(bundles: dict[str, Path], tmp_path: Path) -> None:
    for path in bundles["host"].iterdir():
        (tmp_path / path.name).symlink_to(path)
    replace_in_manifest(tmp_path, '"vocab": 320', '"vocab": 319')
    with pytest.raises(BundleError, match=r"lm_head.weight: got int8 \[320, .*expected int8 by outputs \[319, "):
        edgekv.load(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--splits", "4"], "--splits: got 4; expected 1 to 3, the layers of the checkpoint. Use --splits 3"),
        (["--splits", "0"], "--splits: got 0"),
        (["--embedding", "phone"], "--embedding: got 'phone'; expected graph or host"),
        (["--head", "first"], "--head: got 'first'; expected own or last"),
        (["--splits", "2", "--format", "tflite"], "--splits, --embedding, --head: got 2"),
    ],
)
def test_a_split_that_cannot_be_is_refused(
    bundles: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    checkpoint = bundles["two"].parent / "checkpoint"
    command = ["export", str(checkpoint), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "--context", "64"]
    assert run([*command, *options]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.data(), st.integers(0, 99), st.integers(0, 99))
def test_layers_are_divided_in_order_and_evenly(layers: list[int], data: st.DataObject, first: int, last: int) -> None:
    splits = data.draw(st.integers(1, len(layers)))
    parts = divide(layers, splits, first_bytes=first, last_bytes=last)
    assert [layer for part in parts for layer in part] == [*range(len(layers))]
    assert len(parts) == splits and all(parts)


def test_equal_layers_are_divided_into_parts_that_differ_by_one_at_most() -> None:
    assert [len(part) for part in divide([10] * 16, 5)] == [3, 3, 4, 3, 3]
    assert [len(part) for part in divide([10] * 6, 3, last_bytes=20)] == [3, 2, 1]
