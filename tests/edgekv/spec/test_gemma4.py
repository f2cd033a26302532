"""Gemma 4: layers that share a cache, two sizes of heads, and inputs that the host gathers for each layer."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, UsageError
from edgekv.graphs.cpu_mode import CPU_MODES
from edgekv.kv import STRATEGIES
from edgekv.plan import Overrides, PlanOptions, find_subject, make_plan
from edgekv.plan.cache import CHOICES
from edgekv.plan.fit import divide_model
from edgekv.prefix import StoreConfig
from edgekv.spec import LAYER_INPUTS
from exporters.capabilities import AI_HUB, GENAI, GENIE, GENIEX
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.cli.exported import export_lines
from exporters.htp.check import floating_nodes
from exporters.lora.options import LoraOptions
from exporters.quantize.reference import Reference
from exporters.quantize.table import rounded_rows
from exporters.targets.genie.config import EmbeddingTable
from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.folder import open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from tests.edgekv.engine.test_states import CONTEXT, ids, random_calls, same
from tests.support.checkpoints import ARCHITECTURES, WINDOW, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import calls, variants

TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon."
PROMPT = [*range(40, 100)]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
FIRST_SHARING = 3
"""Layers 3 and 4 read the caches of 2 and 1."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma4")
    (folder / "text").write_text(TEXT)
    return write_checkpoint(folder / "checkpoint", ARCHITECTURES["gemma4"], gain=1.0)


def gemma(checkpoint: Path, **options: Any) -> Path:
    chosen = {"context": (64, CONTEXT), "ar": (1, 16), "calibration": checkpoint.parent / "text", **options}
    return exported(checkpoint, export_options(**chosen))


@pytest.fixture(scope="module")
def bundle(checkpoint: Path) -> Path:
    return gemma(checkpoint, draft_rows=(4, 8))


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Windows beyond the context: sums are in one order in graphs of every AR, on the CPU too."""
    folder = tmp_path_factory.mktemp("wide")
    (folder / "text").write_text(TEXT)
    fields = {**ARCHITECTURES["gemma4"], "sliding_window": 512}
    return gemma(write_checkpoint(folder / "checkpoint", fields, gain=1.0), draft_rows=(4, 8))


def test_layers_that_share_a_cache_have_no_tensors_of_their_own(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    groups = manifest.cache_geometry.groups()
    assert [(each.numbers, each.head_dim, each.window) for each in groups] == [((0, 2), 16, 24), ((1,), 32, CONTEXT)]
    assert not [name for name in manifest.weights.matrices if ".3.self_attn.k_proj" in name or ".4.self_attn.v" in name]
    for graph in manifest.graphs:
        own, reading = (manifest.interface.graph(graph, part) for part in graph.parts)
        assert [part.layers for part in graph.parts] == [range(FIRST_SHARING), range(FIRST_SHARING, 5)]
        assert [port.name for port in reading.outputs] == ["logits"]
        borrowed = [port for port in reading.inputs if port.kind == "borrowed"]
        assert {port.name for port in borrowed} == {
            f"past_{kind}_{layer}_h{head}_out" for kind in ("key", "value") for layer in (1, 2) for head in (0, 1)
        }
        assert all(own[port.name] == port for port in borrowed)


@pytest.mark.parametrize("mode", CPU_MODES)
def test_windows_before_the_last_skip_the_layers_without_a_cache(bundle: Path, checkpoint: Path, mode: str) -> None:
    """And leave the same bits, in the cache and in the logits, as running every layer in every window."""
    with edgekv.load(bundle, cpu_mode=mode) as model:
        ran, session = count_runs(model), model.session
        logits = session.feed(PROMPT).copy()
        assert ran[0] > ran[1] == 1
        state, windows = session.cache.state, ran[0]
        session.reset()
        rows: list[Any] = []
        session.feed(PROMPT, take=lambda found: rows.append(found[-1].copy()))
        assert ran == [2 * windows, 1 + windows]
        assert np.array_equal(rows[-1], logits) and same(session.cache.state, state)


def test_two_parts_give_the_bits_of_one(bundle: Path, checkpoint: Path) -> None:
    whole = gemma(checkpoint, draft_rows=(4, 8), splits=1)
    with edgekv.load(bundle, cpu_mode="emulate") as divided, edgekv.load(whole, cpu_mode="emulate") as undivided:
        assert len(undivided.bundle.manifest.graphs[0].parts) == 1
        assert np.array_equal(divided.session.feed(PROMPT), undivided.session.feed(PROMPT))
        assert same(divided.session.cache.state, undivided.session.cache.state)
        assert ids(divided.generate(PROMPT, PARAMS)) == ids(undivided.generate(PROMPT, PARAMS))


def count_runs(model: edgekv.Model) -> list[int]:
    """How often each part of graphs runs from now on."""
    graphs, ran = model.session._graphs, [0, 0]
    load = graphs._load

    def counting(record: Any) -> Any:
        graph = load(record)
        for number, part in enumerate(graph._parts):
            if not hasattr(part, "counted"):
                part.counted, run = True, part.run

                def count(number: int = number, run: Any = run) -> None:
                    ran[number] += 1
                    run()

                part.run = count
        return graph

    graphs._load = counting
    return ran


def test_texts_in_pieces_have_the_bits_of_the_whole(wide: Path) -> None:
    """Their first tokens, which find an empty cache, too."""
    with edgekv.load(wide, cpu_mode="emulate", kv_update="pointer-shift") as model:
        session = model.session
        for seed in range(8):
            text = np.random.default_rng(seed).integers(3, 250, 20).tolist()
            session.reset()
            logits, state = session.feed(text).copy(), session.cache.state
            for cuts in ([10], [4, 12], [*range(1, 20)]):
                session.reset()
                for start, stop in pairwise([0, *cuts, 20]):
                    found = session.feed(text[start:stop])
                assert np.array_equal(found, logits) and same(session.cache.state, state), (seed, cuts)


@pytest.mark.parametrize("strategy", variants(STRATEGIES, ["pointer-shift"]))
def test_divisions_change_no_bit(bundle: Path, checkpoint: Path, strategy: str) -> None:
    """Divided within the layers that share a cache, too: a part reads rows that another one has just written."""
    with edgekv.load(bundle, cpu_mode="emulate", kv_update=strategy) as model:
        wanted, score = ids(model.generate(PROMPT, PARAMS)), model.score(PROMPT)
    divided = gemma(checkpoint, draft_rows=(4, 8), splits=5)
    stops = [part.stop_layer for part in open_bundle(divided).manifest.graphs[0].parts]
    assert FIRST_SHARING in stops and len(stops) == 6  # and the head
    with edgekv.load(divided, cpu_mode="emulate", kv_update=strategy) as model:
        assert ids(model.generate(PROMPT, PARAMS)) == wanted
        assert np.array_equal(model.score(PROMPT), score)


@pytest.mark.parametrize("strategy", variants([each for each in STRATEGIES if each != "slot"], ["pointer-shift"]))
def test_strategies_change_the_order_of_sums_alone(bundle: Path, strategy: str) -> None:
    """Only in layers that have dropped rows: until then a token has the same column."""
    with (
        edgekv.load(bundle, cpu_mode="emulate", kv_update="slot") as slots,
        edgekv.load(bundle, cpu_mode="emulate", kv_update=strategy) as model,
    ):
        wanted, found = slots.score(PROMPT), model.score(PROMPT)
    assert np.array_equal(found[:WINDOW], wanted[:WINDOW])
    assert np.square(found - wanted).sum() < 1e-5 * np.square(wanted).sum()


@pytest.mark.parametrize("options", [{"key_layout": "columns"}, {"embedding": "host"}, {"kv_dtype": "s16"}])
def test_every_form_of_graphs_loses_what_int8_weights_lose(checkpoint: Path, options: dict[str, Any]) -> None:
    tokens = [256, *TEXT.encode()][:60]
    (wanted,) = Reference(Checkpoint.open(str(checkpoint)), CONTEXT).logits([np.array(tokens)])
    found = edgekv.load(gemma(checkpoint, **options)).score(tokens)
    assert np.square(wanted).sum() > 10**2.4 * np.square(found - wanted).sum()


def test_rewinds_prefixes_and_drafts_change_no_bit(wide: Path) -> None:
    """In steps of whole windows: their sums are in one order on every processor."""
    config = StoreConfig(tokens_per_block=16, max_bytes=1 << 22)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    options: dict[str, Any] = {"cpu_mode": "emulate", "reproducible": True, "kv_update": "pointer-shift"}
    with edgekv.load(wide, **options) as plain, edgekv.load(wide, prefix_cache=config, **options) as model:
        assert random_calls(plain, model, calls(20), params) > 100


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_rewinds_prefixes_and_drafts_change_no_bit_on_the_htp(bundle: Path) -> None:
    """With windows of 24 tokens."""
    config = StoreConfig(tokens_per_block=16, max_bytes=1 << 22)
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with edgekv.load(bundle, "htp") as plain, edgekv.load(bundle, "htp", prefix_cache=config) as model:
        assert random_calls(plain, model, 6, params) > 20


@pytest.mark.htp
def test_the_htp_computes_both_parts_in_integers(checkpoint: Path) -> None:
    bundle = gemma(checkpoint, context=64)
    tokens = [256, *TEXT.encode()][:40]
    (decode,) = [graph for graph in open_bundle(bundle).manifest.graphs if graph.role == "decode"]
    assert floating_nodes([bundle / part.file for part in decode.parts], find("SM8650")) == []
    with edgekv.load(bundle, "htp") as htp, edgekv.load(bundle, cpu_mode="emulate") as cpu:
        on_htp, on_cpu = htp.score(tokens), cpu.score(tokens)
        assert np.square(on_cpu).sum() > 10**4 * np.square(on_htp - on_cpu).sum()
        session = htp.session
        session.reset()
        once = session.feed(tokens).copy()
        session.reset()
        for token in tokens:
            stepwise = session.feed([token])
        assert np.array_equal(once, stepwise)


def test_the_host_gathers_rounded_rows_of_the_exact_table(bundle: Path, checkpoint: Path) -> None:
    """The projection, norm and table of transformers, as one row of 8 bits for each token."""
    table, exact = open_bundle(bundle).layer_inputs(), Checkpoint.open(str(checkpoint))
    assert table is not None and isinstance(table.integers.base, np.memmap)
    rows = exact.tensor(LAYER_INPUTS, np.arange(320))
    found = table.encoding.dequantize(table.rows(range(320)))
    assert np.abs(found - rounded_rows(rows)).max() <= table.encoding.scale
    assert np.square(rows).sum() > 10**4 * np.square(found - rows).sum()


def test_a_plan_counts_the_table_of_the_host_apart(checkpoint: Path, bundle: Path) -> None:
    planned = find_subject(checkpoint, Overrides(context=64, ar=(1, 16)))
    exists = find_subject(bundle, Overrides())
    assert planned.host_bytes == exists.host_bytes == 320 * 5 * 8 + 4 * 320
    stored = sum(each.bytes for _, file, each in open_bundle(bundle).manifest.weights.extents() if "inputs" not in file)
    assert exists.weights_bytes is not None and 0 <= exists.weights_bytes - stored < 1 << 16


def test_a_plan_divides_before_the_layers_that_own_no_cache(checkpoint: Path, bundle: Path) -> None:
    """As an export does: two parts are the least."""
    planned = find_subject(checkpoint, Overrides(context=CONTEXT, ar=(1, 16)))
    thrice = gemma(checkpoint, draft_rows=(4, 8), splits=3)
    for subject, made in (
        (planned, bundle),
        (find_subject(bundle, Overrides()), bundle),
        (find_subject(thrice, Overrides()), thrice),
    ):
        stops = [part.stop_layer for part in open_bundle(made).manifest.graphs[0].parts]
        parts = divide_model(subject, CHOICES[0])
        assert parts is not None and [part.first_layer + part.layers for part in parts] == stops
        assert FIRST_SHARING in stops and len(stops) == (2 if made == bundle else 4)
    assert make_plan(checkpoint, find("SM8650"), PlanOptions(context=CONTEXT, ar=(1, 16))).fit.contexts == 2


def test_a_forged_manifest_is_refused_by_field(bundle: Path, tmp_path: Path) -> None:
    manifest = json.loads((bundle / "manifest.json").read_text())
    for field, value, words in (
        ("cache_owners", [0, 1, 2, 4, 1], "cache_owners: got 4 of layer 3; expected an earlier layer"),
        ("cache_owners", [0, 1, 2, 1, 1], "cache_owners: got 1 of layer 3; expected a layer of the same kind"),
        ("cache_owners", [0, 1], "cache_owners: got 2; expected none or 5"),
        ("layer_inputs", 4, "weights: model.layers.0.per_layer_input_gate.weight"),
        ("layer_inputs", 0, "weights: got model.layer_inputs.weight; expected weights of the decoder"),
    ):
        forged = {**manifest, "model": {**manifest["model"], field: value}}
        (tmp_path / "manifest.json").write_text(json.dumps(forged))
        with pytest.raises(BundleError) as refusal:
            open_bundle(tmp_path)
        assert words in str(refusal.value)


@pytest.mark.slow
def test_a_trained_model_keeps_its_quality(embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KL 0.00005; made by models/train_gemma.py."""
    folder = exported(embedded.parent / "gemma4-1m", export_options(context=512, ar=(1, 128)))
    capsys.readouterr()
    text = ["--text", str(embedded / "heldout.txt"), "--tokens", "2048"]
    assert run(["eval", str(folder), *text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_nats"] <= 0.0015 and found["perplexity_ratio"] <= 1.003


def test_what_gemma_4_cannot_have_is_refused_by_option(checkpoint: Path) -> None:
    with pytest.raises(UsageError, match="--format tflite: got inputs that the host gathers for each layer"):
        gemma(checkpoint, graph_format="tflite", kv_dtype="s8", context=64)
    with pytest.raises(UsageError, match="--lora-slots: got layers that differ in size or share a cache"):
        gemma(checkpoint, lora=LoraOptions(rank=4, targets=("q",)))


def test_layers_that_share_a_cache_do_without_the_keys_that_files_have(checkpoint: Path, tmp_path: Path) -> None:
    """As transformers does, which writes none."""
    folder = shutil.copytree(checkpoint, tmp_path / "checkpoint")
    tensors = load_file(folder / "model.safetensors")
    of_layer = {key: values for key, values in tensors.items() if re.search(r"\.2\.self_attn\.[kv]_", key)}
    more = {key.replace(".2.", ".3."): values for key, values in of_layer.items()}
    save_file(tensors | more, folder / "model.safetensors")
    one, other = (Checkpoint.open(str(each)) for each in (checkpoint, folder))
    assert len(more) == 3 and one.spec == other.spec
    found, wanted = (next(iter(Reference(each, 64).logits([np.arange(20)]))) for each in (other, one))
    assert np.array_equal(found, wanted)


def test_encoders_of_images_and_sound_are_left_out(tmp_path: Path) -> None:
    """And the export says so."""
    whole = write_checkpoint(tmp_path / "whole", ARCHITECTURES["gemma4-multimodal"])
    opened = Checkpoint.open(str(whole))
    manifest = open_bundle(exported(whole, export_options(context=64, ar=(1, 16)))).manifest
    assert manifest.model.multimodal and not [name for name in manifest.weights.tensors if "audio" in name]
    assert any("text decoder alone" in line for line in export_lines(tmp_path, manifest, opened))


@pytest.mark.htp
def test_genie_gathers_the_inputs_of_layers(tmp_path: Path) -> None:
    """Of layers of one size without windows, all that Genie runs of Gemma 4; it chooses the tokens of edgekv."""
    fields = {
        **ARCHITECTURES["gemma4"],
        "num_hidden_layers": 2,
        "layer_types": ["full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "global_head_dim": 16,
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    }
    (tmp_path / "text").write_text(TEXT)
    checkpoint = write_checkpoint(tmp_path / "checkpoint", fields, gain=1.0)
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][[*range(32), *range(127, 320)]] = 0  # answers are ASCII
    save_file(weights, checkpoint / "model.safetensors")
    bundle = gemma(checkpoint, context=128, ar=(1, 32), key_layout="columns")
    write_genie(open_bundle(bundle), tmp_path / "genie", GenieOptions())  # compares Genie's text with edgekv's
    folder = open_genie_folder(tmp_path / "genie")
    table = folder.config().dialog.perlayer_embedding
    assert isinstance(table, EmbeddingTable) and (table.size, table.lut_path) == (2 * 8, "per_layer_inputs.raw")
    assert (tmp_path / "genie" / table.lut_path).stat().st_size == 320 * 2 * 8 * 2
    with GenieDialog(folder.path, folder.config()) as genie:
        assert len("".join(genie.query(TEXT[:40], max_new_tokens=8))) == 8


def test_other_runtimes_refuse_what_they_do_not_feed(bundle: Path) -> None:
    for target in (AI_HUB, GENIE, GENIEX, GENAI):
        with pytest.raises(BundleError):
            target.check(open_bundle(bundle))
    with pytest.raises(BundleError, match="layers: got two sizes of layers or shared caches"):
        replace(AI_HUB, parts="any").check(open_bundle(bundle))
