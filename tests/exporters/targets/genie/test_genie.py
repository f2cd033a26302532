"""Qualcomm's own libGenie.so runs here, on what `edgekv bundle genie` writes."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest

import edgekv
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, EdgeKVError, EngineError, UsageError
from edgekv.machine.graph_file import graph_content
from edgekv.runtime.graph import RopeTable
from edgekv.spec import Rope
from edgekv.text import SamplingParams, Token
from exporters.quantize.sink_request import SinkRequest
from exporters.targets.genie import dialog, write
from exporters.targets.genie.config import Debug, GenieConfig
from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.folder import GenieFolder, open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.plan import GeniePlan
from exporters.targets.genie.ports import GeniePorts, read_ports
from exporters.targets.genie.proof import read_specs
from exporters.targets.genie.write import write_genie
from tests.support.bundles import ROW_STEPS, assert_same_or_tied, ending_elsewhere
from tests.support.checkpoints import ARCHITECTURES, NEWER, OLDER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported

pytestmark = pytest.mark.htp

PROMPT = "def main(argv=None):\n    parser = argparse.Argum"


def _export(checkpoint: Path, **options: object) -> Bundle:
    chosen = {"context": 128, "ar": (1, 32), "key_layout": "columns", **options}
    return open_bundle(exported(checkpoint, export_options(**chosen)))


@pytest.fixture(scope="module")
def columns(wide_columns: Path) -> Bundle:
    """With keys in columns, compiled for edgekv's own loop too."""
    return open_bundle(wide_columns)


@pytest.fixture(scope="module")
def folder(genie_folder: GenieFolder) -> GenieFolder:
    return genie_folder


@pytest.fixture
def genie(folder: GenieFolder) -> Iterator[GenieDialog]:
    with GenieDialog(folder.path, folder.config()) as dialog:
        yield dialog


@dataclass(frozen=True)
class Ours:
    """The prompt's tokens without BOS, which Genie adds, and what edgekv's loop continues them with."""

    prompt: list[int]
    tokens: list[Token]

    @property
    def ids(self) -> list[int]:
        return [token.id for token in self.tokens]

    def text(self, count: int) -> str:
        return "".join(token.text for token in self.tokens[:count])


@pytest.fixture(scope="module")
def ours(columns: Bundle) -> Ours:
    """32 tokens on compiled binaries."""
    generation = edgekv.load(columns, engine="htp").generate(PROMPT, max_new_tokens=32)
    tokens = list(generation)
    return Ours(list(generation.prompt[1:]), tokens)


def test_genie_chooses_the_tokens_that_edgekv_chooses(genie: GenieDialog, ours: Ours) -> None:
    assert len(ours.prompt) > 32, "the prefill graph runs more than once"
    assert len(ours.ids) == 32
    assert list(genie.token_query(ours.prompt, max_new_tokens=32)) == ours.ids


def test_both_run_the_same_binary(columns: Bundle, folder: GenieFolder) -> None:
    """Byte for byte but for the name of the graph."""
    wrapper = onnx.load(columns.path / "compiled" / "SM8650" / "ar1_cl128.onnx")
    (given,) = (each.s for each in wrapper.graph.node[0].attribute if each.name == "partition_name")
    (decode,) = (graph for graph in folder.manifest.graphs if graph.ar == 1)
    binary = (columns.path / "compiled" / "SM8650" / "ar1_cl128_qnn.bin").read_bytes()
    assert (folder.path / decode.file).read_bytes() == binary.replace(given, decode.name.encode())


@pytest.mark.thorough
def test_the_same_bundle_gives_the_same_folder(columns: Bundle, folder: GenieFolder, tmp_path: Path) -> None:
    assert write_genie(columns, tmp_path / "again" / "genie", GenieOptions(check=False)) == folder.manifest


def test_a_text_is_continued_likewise(genie: GenieDialog, ours: Ours) -> None:
    assert "".join(genie.query(PROMPT, max_new_tokens=16)) == ours.text(16)


def test_a_saved_conversation_goes_on(genie: GenieDialog, folder: GenieFolder, tmp_path: Path) -> None:
    first = list(genie.token_query([300, 301, 302], max_new_tokens=4))
    genie.save(tmp_path)
    second = list(genie.token_query([400, 401], max_new_tokens=4))
    genie.reset()
    assert list(genie.token_query([300, 301, 302], max_new_tokens=4)) == first
    with GenieDialog(folder.path, folder.config()) as other:
        other.restore(tmp_path)
        assert list(other.token_query([400, 401], max_new_tokens=4)) == second


@pytest.mark.parametrize("bits", [16, pytest.param(8, marks=pytest.mark.thorough)])
def test_a_model_with_states_gives_the_tokens_of_edgekv(tmp_path: Path, bits: int) -> None:
    """Prompts of one pass and of several, padded or not, and further turns."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"], gain=1.0)
    bundle, random = _export(checkpoint, state_bits=bits), np.random.default_rng(1)
    write_genie(bundle, tmp_path / "genie", GenieOptions())
    folder = open_genie_folder(tmp_path / "genie")
    config, end = folder.config(), bundle.manifest.model.vocab - 1
    context = msgspec.structs.replace(config.dialog.context, eos_token=[end])
    config = GenieConfig(dialog=msgspec.structs.replace(config.dialog, context=context))
    bos = [] if context.bos_token < 0 else [context.bos_token]
    params = SamplingParams(max_new_tokens=4, ignore_eos=True)
    with (
        edgekv.load(bundle.path, "htp") as model,
        edgekv.load(bundle.path) as on_cpu,
        GenieDialog(folder.path, config) as genie,
    ):

        def answers(text: list[int], prompt: list[int]) -> list[int]:
            wanted = [token.id for token in model.generate([*text, *prompt], params)]
            found = list(genie.token_query(prompt, max_new_tokens=4))
            assert_same_or_tied(found, wanted, [*text, *prompt], on_cpu, ROW_STEPS)  # Genie's windows are others
            return [*text, *prompt, *found, end]  # Genie ends an answer that was cut with the end of a text

        for length in (1, 2, 31, 32, 33, 80):
            genie.reset()
            answers(bos, random.integers(3, 250, length).tolist())
        genie.reset()
        text = bos
        for length in (7, 2, 9):
            text = answers(text, random.integers(3, 250, length).tolist())
        with pytest.raises(UsageError, match="save: got a model with states, which Genie leaves out of what it saves"):
            genie.save(tmp_path)


def test_a_sink_of_a_model_with_states_is_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"], gain=1.0)
    bundle = _export(checkpoint, sink=SinkRequest("tokens", (256,)))
    with pytest.raises(BundleError, match="sink: got a first token that is restored, of a model with states"):
        write_genie(bundle, tmp_path / "genie", GenieOptions())


def test_the_folder_needs_nothing_beside_it(folder: GenieFolder) -> None:
    there = {path.name for path in folder.path.iterdir()}
    for config in (folder.config(), folder.config(shared=True)):
        named = {config.dialog.tokenizer.path, config.dialog.engine.backend.extensions}
        assert named | set(config.dialog.engine.model.binary.ctx_bins) <= there
    assert there == {*folder.manifest.files, "genie_bundle.json"}
    assert not any(path.suffix == ".onnx" for path in folder.path.iterdir())


def test_the_shared_binary_holds_both_graphs_and_one_copy_of_the_weights(folder: GenieFolder) -> None:
    (shared,) = folder.manifest.shared
    content = (folder.path / shared).read_bytes()
    assert all(content.count(graph.name.encode()) == 3 for graph in folder.manifest.graphs)
    assert [graph.name.strip("_").split("__")[0] for graph in folder.manifest.graphs] == [
        "token_ar1_cl128",
        "prompt_ar32_cl128",
    ]
    assert all(graph.name.endswith("_1_of_1") for graph in folder.manifest.graphs)
    alone = sum(folder.manifest.files[graph.file].bytes for graph in folder.manifest.graphs)
    assert folder.manifest.files[shared].bytes < 0.6 * alone


def test_a_crash_of_genie_is_an_error(folder: GenieFolder) -> None:
    """The emulator cannot load binaries of several graphs, and crashes."""
    with pytest.raises(
        EngineError, match=r"Genie: create: got SIGSEGV; .*binary of several graphs: use genie_config.json"
    ):
        GenieDialog(folder.path, folder.config(shared=True))


def test_a_hang_of_genie_is_an_error(folder: GenieFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "0.01")
    with pytest.raises(EngineError, match=r"Genie: create: got no answer within 0.01 s.* Set EDGEKV_TIMEOUT_S"):
        GenieDialog(folder.path, folder.config())


def test_a_prompt_that_does_not_fit_is_an_error(genie: GenieDialog) -> None:
    with pytest.raises(EngineError, match="the context is full"):
        list(genie.token_query([300] * 128, max_new_tokens=1))


def test_a_misnamed_cache_tensor_is_found_where_genie_finds_nothing(
    columns: Bundle, folder: GenieFolder, tmp_path: Path, ours: Ours
) -> None:
    """In a graph before it is compiled, and in a binary that Genie loads without a word."""
    (graph,) = (each for each in columns.manifest.graphs if each.role == "decode")
    wanted = GeniePorts.of(columns.manifest, graph, graph.part)
    exported = tmp_path / "exported.onnx"
    exported.write_bytes(graph_content(columns.graph_path(graph)))
    wanted.compare(graph.file, read_ports(exported))
    right, wrong = "past_key_1_h0_in", "past_kez_1_h0_in"
    (tmp_path / "misnamed.onnx").write_bytes(exported.read_bytes().replace(right.encode(), wrong.encode()))
    message = rf"got no {right}; expected {right} u8 \[1, 1, 64, 127\], .*Genie would load it"
    with pytest.raises(BundleError, match=message):
        wanted.compare(graph.file, read_ports(tmp_path / "misnamed.onnx"))

    config = folder.config()
    for name in (*config.dialog.engine.model.binary.ctx_bins, "tokenizer.json", "htp_backend_ext_config.json"):
        content = (folder.path / name).read_bytes()
        (tmp_path / name).write_bytes(content.replace(right.encode(), wrong.encode()))
    debug = Debug(path=str(tmp_path / "debug"), dump_specs=True)
    (tmp_path / "debug").mkdir()
    with GenieDialog(tmp_path, GenieConfig(dialog=msgspec.structs.replace(config.dialog, debug=debug))) as dialog:
        assert list(dialog.token_query(ours.prompt, max_new_tokens=8)) != ours.ids[:8]
    (name,) = (each.name for each in folder.manifest.graphs if each.ar == 1)
    with pytest.raises(BundleError, match=message):
        wanted.compare(name, read_specs(tmp_path / "debug")[name])


@pytest.mark.thorough
def test_the_table_may_stay_outside_of_the_graphs(
    columns: Bundle, folder: GenieFolder, tmp_path: Path, ours: Ours
) -> None:
    bundle = Bundle(shutil.copytree(columns.path, tmp_path / "bundle"), columns.manifest)
    os.link(bundle.path / "weights-vocabulary.safetensors", tmp_path / "a second hard link")
    write_genie(bundle, tmp_path / "genie", GenieOptions(embedding_table=True, check=False))
    outside = open_genie_folder(tmp_path / "genie")
    table = outside.manifest.files["embedding_weights.raw"].bytes
    assert table == 2 * columns.manifest.model.vocab * columns.manifest.model.hidden
    for one, other in zip(outside.manifest.graphs, folder.manifest.graphs, strict=True):
        assert (
            outside.manifest.files[one.file].bytes < folder.manifest.files[other.file].bytes - 0.9 * table / 2
        )  # which has 8 bits there
    with GenieDialog(outside.path, outside.config()) as dialog:
        assert list(dialog.token_query(ours.prompt, max_new_tokens=8)) == ours.ids[:8]


@pytest.mark.thorough
def test_rotary_tables_of_llama3_are_genies_bit_by_bit(tmp_path: Path) -> None:
    """And a 16-bit cache gives edgekv's tokens, which `write_genie` checks."""
    bundle = _export(write_checkpoint(tmp_path / "checkpoint", OLDER), ar=(1, 8), kv_dtype="s16")
    write_genie(bundle, tmp_path / "genie", GenieOptions())
    written = open_genie_folder(tmp_path / "genie")
    debug = Debug(path=str(tmp_path / "debug"), dump_tensors=True)
    (tmp_path / "debug").mkdir()
    config = GenieConfig(dialog=msgspec.structs.replace(written.config().dialog, debug=debug))
    with GenieDialog(written.path, config) as dialog:
        list(dialog.token_query([1, 2, 3], max_new_tokens=1))
    manifest = bundle.manifest
    encodings = (manifest.encodings[f"position_ids_{name}"] for name in ("cos", "sin"))
    rows = RopeTable(manifest.rotations[""].inverse_frequencies, *encodings).rows(0, manifest.context)
    for name, ours in zip(("cos", "sin"), rows, strict=True):
        (dump,) = (tmp_path / "debug").rglob(f"position_ids_{name}.u16.dat")
        assert np.array_equal(np.fromfile(dump, np.uint16), ours.ravel())


@pytest.mark.thorough
def test_genie_runs_the_parts_of_a_split_model_as_edgekv_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three parts, the last a head by itself, and embeddings from a table; `write_genie` compares the tokens."""
    monkeypatch.setattr(write, "_CHECKED_TOKENS", 24)
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    bundle = _export(checkpoint, context=(24, 64), ar=(1,), splits=2)
    written = write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False))
    assert written.checked and [graph.part for graph in written.graphs] == [1, 1, 2, 2, 3]
    assert (
        len(written.shared) == 3
        and written.files["embedding_weights.raw"].bytes == 2 * 320 * bundle.manifest.model.hidden
    )


@pytest.mark.thorough
def test_a_split_may_keep_the_embedding_and_the_head_in_its_ends(tmp_path: Path) -> None:
    split = {"splits": 2, "embedding": "graph", "head": "last"}
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), ar=(1, 8), context=32, **split)
    assert write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False)).checked


@pytest.mark.thorough
def test_genie_moves_to_the_next_context_as_edgekv_does(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    prompt = list(range(20))
    bundle, ours = ending_elsewhere(_export(checkpoint, context=(32, 96), ar=(1,)).path, prompt, 24)
    written = write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False))
    assert {(graph.ar, graph.context) for graph in written.graphs} == {(1, 32), (1, 96)}
    with GenieDialog(tmp_path / "genie", open_genie_folder(tmp_path / "genie").config()) as dialog:
        assert list(dialog.token_query(prompt, max_new_tokens=24)) == ours
    assert len(prompt) + len(ours) > 32


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"rope": Rope("linear", 1e4, 64, {"factor": 2.0})},
            "rotary embedding: got linear of 64 elements; expected default",
        ),
        ({"rope": Rope("default", 1e4, 32, {})}, "got default of 32 elements"),
    ],
)
def test_what_genie_was_not_compared_for_is_refused(columns: Bundle, change: dict[str, object], message: str) -> None:
    manifest = columns.manifest
    other = msgspec.structs.replace(manifest, model=msgspec.structs.replace(manifest.model, **change))
    with pytest.raises(BundleError, match=message):
        GeniePlan.of(Bundle(columns.path, other), GenieOptions())


@pytest.mark.parametrize("contexts", [64, (64, 128)])
def test_a_context_in_which_genie_misplaces_keys_is_refused(tmp_path: Path, contexts: int | tuple[int, ...]) -> None:
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), context=contexts)
    message = "context: got 64 with AR 32, .* Export the bundle with --context 96 or more, or with a smaller --ar"
    with pytest.raises(BundleError, match=message):
        write_genie(bundle, tmp_path / "genie", GenieOptions())


@pytest.mark.thorough
def test_the_min_context_that_genie_runs(tmp_path: Path) -> None:
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), context=96)
    assert write_genie(bundle, tmp_path / "genie", GenieOptions()).checked


@pytest.mark.thorough
def test_a_phone_needs_no_binaries_of_single_graphs(tmp_path: Path) -> None:
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), ar=(1, 8), context=32, splits=2)
    with pytest.raises(
        UsageError, match=r"--no-per-graph-binaries: got no binaries of single graphs; .* Add --skip-check"
    ):
        GenieOptions(per_graph_binaries=False)
    written = write_genie(bundle, tmp_path / "genie", GenieOptions(per_graph_binaries=False, check=False))
    listed = open_genie_folder(tmp_path / "genie").config().dialog.engine.model.binary.ctx_bins
    assert listed == [f"shared_token_ar1_cl32_{part}_of_3_qnn.bin" for part in (1, 2, 3)]
    assert [graph.file for graph in written.graphs] == [file for file in listed for _ in range(2)]
    assert written.shared == []


@pytest.mark.thorough
def test_the_check_compares_tokens_behind_one_that_ends_a_text(tmp_path: Path) -> None:
    """Here every token does; Genie reports none of them."""
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), ar=(1,))
    tokens = msgspec.structs.replace(bundle.manifest.tokens, eos=list(range(bundle.manifest.model.vocab)))
    ending = Bundle(bundle.path, msgspec.structs.replace(bundle.manifest, tokens=tokens))
    assert write_genie(ending, tmp_path / "genie", GenieOptions(bos=False)).checked


@pytest.mark.thorough
def test_one_graph_needs_no_shared_binary(tmp_path: Path) -> None:
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), ar=(1,))
    options = GenieOptions(context=100, max_new_tokens=5, sampling=SamplingParams(0.8, top_k=7, seed=3), bos=False)
    written = write_genie(bundle, tmp_path / "genie", options)
    assert written.shared == []
    dialog = json.loads((tmp_path / "genie" / "genie_config.json").read_text())["dialog"]
    assert (dialog["max-num-tokens"], dialog["context"]["size"], dialog["context"]["bos-token"]) == (5, 100, -1)
    assert dialog["sampler"] == {
        "version": 1,
        "seed": 3,
        "temp": 0.8,
        "top-k": 7,
        "top-p": 1.0,
        "greedy": False,
    }


def test_the_command_line_writes_and_runs(
    columns: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], ours: Ours
) -> None:
    target = tmp_path / "genie"
    assert run(["bundle", "genie", str(columns.path), "-o", str(target), "--skip-check", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)
    assert (written["soc"], written["checked"], written["context"]) == ("SM8650", False, 128)
    assert run(["genie", "run", str(target), "--prompt", PROMPT, "--max-new-tokens", "8", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == ours.text(8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "SM8750"}, "--device: got SM8750; expected SM8650 .*export the bundle with --device SM8750"),
        ({"context": 512}, "--context: got 512; expected 33 to 128"),
        ({"context": 32}, "--context: got 32; expected 33 to 128"),
    ],
)
def test_what_does_not_fit_is_refused_before_work_starts(
    columns: Bundle, tmp_path: Path, options: dict[str, object], message: str
) -> None:
    if "device" in options:
        options = {"device": find(str(options["device"]))}
    with pytest.raises(EdgeKVError, match=message):
        write_genie(columns, tmp_path / "genie", GenieOptions(**options))  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


@pytest.mark.thorough
def test_keys_in_rows_become_columns_and_genie_chooses_the_same_tokens(wide_on_htp: Path, tmp_path: Path) -> None:
    """edgekv's loop runs the bundle's own graphs, whose keys stay in rows."""
    rows = open_bundle(wide_on_htp)
    assert rows.manifest.key_layout == "rows"
    write_genie(rows, tmp_path / "genie", GenieOptions(check=False))
    generation = edgekv.load(rows, engine="htp").generate(PROMPT, max_new_tokens=8)
    ours = [token.id for token in generation]
    with GenieDialog(tmp_path / "genie", open_genie_folder(tmp_path / "genie").config()) as dialog:
        assert list(dialog.token_query(list(generation.prompt[1:]), max_new_tokens=8)) == ours


@pytest.mark.thorough
@pytest.mark.parametrize("options", [{"kv_dtype": "s16"}, {"splits": 2, "embedding": "graph", "head": "last"}])
def test_a_cache_of_16_bits_and_the_parts_of_a_split_model_may_have_keys_in_rows(
    tmp_path: Path, options: dict[str, object]
) -> None:
    """`write_genie` compares the tokens."""
    rows = {"key_layout": "rows", "ar": (1,), "context": 32}
    bundle = _export(write_checkpoint(tmp_path / "checkpoint"), **rows, **options)
    assert write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False, embedding_table=True)).checked


@pytest.fixture(scope="module")
def sinking(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first token no graph computes."""
    return write_sinking(tmp_path_factory.mktemp("sink"), NEWER)


SINK_TEXT = "<|0|>"


@pytest.mark.thorough
def test_genie_begins_with_the_sink(sinking: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`write_genie` compares the tokens with edgekv's loop, which begins with it too."""
    bundle = _export(sinking, ar=(1, 16), calibration_tokens=512)
    assert bundle.manifest.sink is not None
    target = tmp_path / "genie"
    assert run(["bundle", "genie", str(bundle.path), "-o", str(target)]) == 0
    printed = capsys.readouterr().out
    assert f"restore sink before the first query; it holds '{SINK_TEXT}', which prompts leave out" in printed
    assert "Genie chooses edgekv's tokens" in printed
    opened = open_genie_folder(target)
    assert opened.manifest.sink is not None and opened.manifest.sink.tokens == bundle.manifest.sink.tokens
    assert opened.config().dialog.context.bos_token == -1

    def answers(dialog: GenieDialog) -> list[list[int]]:
        found = []
        for first in range(3, 63, 20):
            found.append(list(dialog.token_query(list(range(first, first + 40)), max_new_tokens=4)))
            dialog.reset()
        return found

    with GenieDialog(target, opened.config(), opened.state) as dialog:
        tokens = answers(dialog)
        assert answers(dialog) == tokens
    with GenieDialog(target, opened.config()) as empty:
        assert answers(empty) != tokens

    texts = []
    for text in ("hello", SINK_TEXT + "hello"):
        assert run(["genie", "run", str(target), "--prompt", text, "--max-new-tokens", "2", "--json"]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert run(["genie", "run", str(target), "--prompt", SINK_TEXT]) == 2
    assert "--prompt: got no text; expected some, after the first token" in capsys.readouterr().err


@pytest.mark.thorough
def test_genie_saves_the_sink_as_it_was_written(sinking: Path, tmp_path: Path) -> None:
    """Two tokens in a cache of 16 bits, of the parts of a split model that reads embeddings from a table."""
    wanted = SinkRequest("tokens", (256, 40))
    bundle = _export(sinking, context=32, ar=(1,), kv_dtype="s16", splits=2, sink=wanted)
    assert write_genie(bundle, tmp_path / "genie", GenieOptions()).checked
    folder, saved = open_genie_folder(tmp_path / "genie"), tmp_path / "saved"
    assert folder.state is not None
    saved.mkdir()
    with GenieDialog(folder.path, folder.config(), folder.state) as dialog:
        dialog.save(saved)
    files = list(folder.state.iterdir())
    assert len(files) == 3
    assert [(saved / file.name).read_bytes() for file in files] == [file.read_bytes() for file in files]


def test_the_sink_takes_the_place_of_bos(sinking: Path, tmp_path: Path) -> None:
    bundle = _export(sinking, ar=(1, 16), calibration_tokens=512)
    with pytest.raises(UsageError, match="--no-bos: got it with a bundle whose token 256 is restored"):
        write_genie(bundle, tmp_path / "genie", GenieOptions(bos=False))
    with pytest.raises(UsageError, match="--context: got 17; expected 18 to 128"):
        write_genie(bundle, tmp_path / "genie", GenieOptions(context=17))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("TESTED", "2.6.0", "got onnxruntime-qnn 2.7.0; expected the tested 2.6.0"),
        ("LIBRARY", "None", "got no .*libNone.so"),
    ],
)
def test_another_version_of_genie_is_refused(
    columns: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str, message: str
) -> None:
    monkeypatch.setattr(dialog, name, value)
    with pytest.raises(EngineError, match=message):
        write_genie(columns, tmp_path / "genie", GenieOptions())


def test_a_changed_folder_is_refused(folder: GenieFolder, tmp_path: Path) -> None:
    for path in folder.path.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "genie_config.json").write_text("{}")
    with pytest.raises(BundleError, match=r"genie_config.json: got sha256 .*edgekv bundle genie"):
        open_genie_folder(tmp_path)
    with pytest.raises(BundleError, match="expected a folder that edgekv bundle genie wrote"):
        open_genie_folder(tmp_path / "none")


def test_another_folder_is_called_what_it_is(
    small_export: Path, embedded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "genai_config.json").write_text("{}")
    for other, words in (
        (small_export, f"got a bundle .* edgekv bundle genie {small_export} -o DIR"),
        (embedded, f"got a checkpoint; .* edgekv export {embedded} -o BUNDLE"),
        (tmp_path, f"got a folder for onnxruntime-genai; .* edgekv genai run {tmp_path}"),
    ):
        assert run(["genie", "run", str(other), "--prompt", "a"]) != 0
        assert re.search(words, " ".join(capsys.readouterr().err.split()))
