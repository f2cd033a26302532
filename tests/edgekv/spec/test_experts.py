"""Mixtures of experts: routers, files, what is refused, and graphs that compute every expert."""

from __future__ import annotations

import json
import re
from itertools import cycle, product
from pathlib import Path

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import CheckpointError, UsageError
from edgekv.graphs.decoder import routed
from edgekv.graphs.floats import FloatOps
from edgekv.graphs.graph_cache import rendered_graph
from edgekv.graphs.products import Products
from edgekv.graphs.stacked_decoder import StackedOps
from edgekv.machine.graph_file import graph_content
from edgekv.plan.export_cost import graph_bytes
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from edgekv.spec import recipe_weights, views
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.cli.exported import export_warnings
from exporters.export import export_bundle
from exporters.htp.check import floating_nodes
from exporters.inspect.probe import Probe
from exporters.lora.options import LoraOptions
from exporters.quantize.recipe import describe_recipe, find_recipe
from exporters.quantize.reference import NumpyOps, Reference, Weights
from exporters.quantize.survey import survey
from tests.support.bundles import source_of
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import variants

MIXTURES = ("granitemoe", "lfm2_moe", "mellum", "olmoe", "qwen3_moe")
RECIPES = ("w8a16", "w4a16", "w4a16-lpbq32")
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon."


def opened(folder: Path, name: str, *changes, gain: float = 1.0) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(folder, {**ARCHITECTURES[name], **dict(*changes)}, gain=gain)))


def weights_of(checkpoint: Checkpoint, layer: int, rows: np.ndarray, **changes) -> np.ndarray:
    """The router's weights for inputs `[T, H]`."""
    spec = checkpoint.spec
    spec = replace(spec, experts=replace(spec.experts, **changes))
    ops = NumpyOps(spec, Weights(checkpoint), len(rows), len(rows))
    found, chosen = routed(ops, spec, layer, rows)
    assert ((found > 1e-6) == (chosen == 1)).all() and (chosen.sum(-1) == spec.experts.used).all()
    return found


def test_routers_weigh_as_their_papers_say(tmp_path):
    rows = np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32)
    checkpoint = opened(tmp_path / "softmax", "granitemoe")
    scores = rows @ checkpoint.tensor("model.layers.1.mlp.router.weight").T
    exps = np.exp(scores - scores.max(-1, keepdims=True))
    largest = np.sort(exps, -1)[:, -3:-2]
    kept = np.where(exps >= largest, exps, 0)
    assert np.allclose(weights_of(checkpoint, 1, rows), kept / kept.sum(-1, keepdims=True), atol=1e-6)
    unnormalized = weights_of(checkpoint, 1, rows, normalized=False)
    assert np.allclose(unnormalized, kept / exps.sum(-1, keepdims=True), atol=1e-6)
    checkpoint = opened(tmp_path / "sigmoid", "lfm2_moe")
    sigmoids = 1 / (1 + np.exp(-rows @ checkpoint.tensor("model.layers.1.mlp.router.weight").T))
    choosing = sigmoids + checkpoint.tensor("model.layers.1.mlp.router.correction")
    kept = np.where(choosing >= np.sort(choosing, -1)[:, -2:-1], sigmoids, 0)
    assert np.allclose(weights_of(checkpoint, 1, rows), kept / (kept.sum(-1, keepdims=True) + 1e-6), atol=1e-6)
    assert np.allclose(weights_of(checkpoint, 1, rows, normalized=False), kept, atol=1e-6)


def test_of_equal_experts_the_first_are_chosen(tmp_path):
    folder = write_checkpoint(tmp_path, ARCHITECTURES["granitemoe"])
    tensors = load_file(folder / "model.safetensors")
    router = tensors["model.layers.0.block_sparse_moe.router.layer.weight"]
    router[:] = router[0]
    save_file(tensors, folder / "model.safetensors")
    found = weights_of(Checkpoint.open(str(folder)), 0, np.ones((1, 64), np.float32))
    assert np.allclose(found[0], [1 / 3] * 3 + [0] * 5, atol=1e-6)


@pytest.mark.parametrize("name", MIXTURES)
def test_files_with_experts_apart_or_together_are_one_model(tmp_path, name):
    checkpoint = opened(tmp_path / "one", name)
    other = write_checkpoint(tmp_path / "other", ARCHITECTURES[name], gain=1.0)
    fused = checkpoint.spec.fused ^ {"experts"}
    tensors = load_file(other / "model.safetensors")
    for view in views(checkpoint.spec):
        if view.role.startswith("expert_") and view.is_matrix:
            tensors.pop(view.key, None)
    moved: dict[str, np.ndarray] = {}
    for view in views(replace(checkpoint.spec, fused=fused)):
        if view.role.startswith("expert_") and view.is_matrix:
            whole = moved.setdefault(view.key, np.zeros((view.rows, view.shape[1]), np.float32))
            whole[view.first : view.first + view.shape[0]] = checkpoint.tensor(view.name) / view.gain
            if view.stacked is None or view.first + view.shape[0] == view.rows:
                moved[view.key] = whole.reshape(view.stored_shape)
    dtype = next(iter(tensors.values())).dtype
    save_file(tensors | {key: value.astype(dtype) for key, value in moved.items()}, other / "model.safetensors")
    tokens = np.array([256, *checkpoint.encode(TEXT)])
    ours, theirs = (next(Reference(each).logits([tokens])) for each in (checkpoint, Checkpoint.open(str(other))))
    assert np.abs(ours - theirs).max() < 1e-5 * np.ptp(ours)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("granitemoe", {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9", "at most num_local_experts = 8"]),
        ("lfm2_moe", {"num_experts_per_tok": 7}, ["num_experts_per_tok", "7", "at most num_experts = 6"]),
        ("qwen3_moe", {"shared_expert_intermediate_size": 96}, ["shared_expert_intermediate_size", "96", "shares"]),
        ("granitemoe", {"shared_intermediate_size": 96}, ["shared_intermediate_size", "96", "shares"]),
        ("olmoe", {"num_experts": 1}, ["num_experts", "1", "at least 2"]),
        ("olmoe", {"intermediate_size": [32, 64]}, ["intermediate_size", "above 0"]),
        ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ("granitemoe", {"num_local_experts": 0}, ["num_local_experts", "0"]),
        ("granitemoe", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ("lfm2_moe", {"num_dense_layers": 4}, ["num_dense_layers", "4", "fewer than num_hidden_layers"]),
        ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, ["decoder_sparse_step", "at least one layer with experts"]),
        ("qwen3_moe", {"n_group": 4}, ["n_group", "4"]),
    ],
)
def test_other_mixtures_are_refused_by_field(tmp_path, name, override, words):
    folder = write_checkpoint(tmp_path, ARCHITECTURES[name])
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | override))
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(folder))
    assert [word for word in words if word not in str(caught.value)] == []


def test_experts_that_are_missing_or_of_another_size_are_named(tmp_path):
    folder = write_checkpoint(tmp_path, ARCHITECTURES["qwen3_moe"])
    whole = load_file(folder / "model.safetensors")
    key = "model.layers.2.mlp.experts.3.up_proj.weight"
    save_file({name: value for name, value in whole.items() if name != key}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{key}: got no such tensor; expected shape \[32, 64\]"):
        Checkpoint.open(str(folder))
    save_file(whole | {key: whole[key][:16]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=rf"{key}: got shape \[16, 64\]; expected shape \[32, 64\]"):
        Checkpoint.open(str(folder))
    save_file(whole | {key.replace("experts.3", "experts.4"): whole[key]}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"experts.4.up_proj.weight: got a tensor that config.json does not"):
        Checkpoint.open(str(folder))


def test_one_file_of_several_that_is_missing_is_named(tmp_path):
    folder = write_checkpoint(tmp_path, ARCHITECTURES["olmoe"], shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00003.safetensors: got no such file"):
        Checkpoint.open(str(folder))


def calibrated(checkpoint: Checkpoint, folder: Path, **changes) -> Path:
    (folder / "text").write_text(TEXT)
    options = {"context": 64, "ar": (1, 16), "calibration": folder / "text", **changes}
    return exported(checkpoint.folder, export_options(**options))


def sqnr_db(exact: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(exact).sum() / max(np.square(exact - found).sum(), 1e-30)))


@pytest.mark.parametrize("name", MIXTURES)
def test_a_plan_knows_the_bytes_of_all_experts(tmp_path, name):
    bundle = calibrated(opened(tmp_path / "checkpoint", name), tmp_path)
    manifest = open_bundle(bundle).manifest
    decoder = manifest.model.sizes
    planned = recipe_weights(decoder, "w8a16")
    extents = {file: 0 for _, file, _ in manifest.weights.extents()}
    for _, file, extent in manifest.weights.extents():
        extents[file] += extent.bytes
    small = sum(place.extent.bytes for name, place in manifest.weights.tensors.items() if "embed_tokens" not in name)
    norms = 2 * manifest.model.hidden * (2 * manifest.model.layers + 1)
    assert planned.total_bytes == sum(extents.values()) - small + norms
    graph = manifest.graph("prefill")
    assert graph is not None
    assert 0.7 < graph_bytes(decoder) / len(graph_content(bundle / graph.parts[0].file)) < 2


@pytest.mark.parametrize("name", MIXTURES)
def test_every_mode_of_the_cpu_loses_what_int8_weights_lose(tmp_path, name):
    """Random routers have near ties, which rounding decides otherwise: such tokens lose more than others."""
    checkpoint = opened(tmp_path / "checkpoint", name)
    bundle = calibrated(checkpoint, tmp_path)
    tokens = [256, *checkpoint.encode(TEXT)][:64]
    exact = next(Reference(checkpoint, 64).logits([np.array(tokens)]))
    for mode in ("emulate", "fast", "exact16"):
        model = edgekv.load(bundle, cpu_mode=mode)
        losses = [sqnr_db(*rows) for rows in zip(exact, model.score(tokens), strict=True)]
        assert np.median(losses) > 25, mode


def test_what_is_said_of_a_recipe_names_no_expert_by_itself(tmp_path):
    checkpoint = opened(tmp_path / "checkpoint", "granitemoe")
    lines = [*describe_recipe(find_recipe("w4a16").record(checkpoint.spec))]
    assert "experts.up_proj of 2 layers" in lines[0] and not re.search(r"experts\.\d", "".join(lines))
    assert not any("neurons" in line for line in lines), "those of experts are not scaled"


def test_branches_skip_experts_and_change_no_bit(tmp_path, monkeypatch):
    checkpoint = opened(tmp_path / "checkpoint", "granitemoe")
    bundle = calibrated(checkpoint, tmp_path)
    tokens, found, branches = [256, *checkpoint.encode(TEXT)][:12], [], []
    for kept, mixture in (tmp_path / "skips", FloatOps.mixture), (tmp_path / "all", StackedOps.mixture):
        monkeypatch.setenv("EDGEKV_CACHE_DIR", str(kept))
        monkeypatch.setattr(FloatOps, "mixture", mixture)
        with edgekv.load(bundle, cpu_mode="exact16") as model:
            found.append(np.stack([model.session.feed((token,)).copy() for token in tokens]))
        with rendered_graph(source_of(bundle, "ar1_cl64.onnx.gz"), "exact16") as (content, _):
            branches.append([node.op_type for node in onnx.load_from_string(content).graph.node].count("If"))
    assert np.array_equal(*found)
    assert branches == [2 * 8, 0]


@pytest.mark.parametrize(
    ("name", "recipe"), variants(product(MIXTURES, RECIPES), {*zip(MIXTURES, cycle(RECIPES), strict=False)})
)
def test_one_node_computes_the_experts_of_a_single_row_as_branches_do(tmp_path, monkeypatch, name, recipe):
    """Both round activations to 8 bits, each in its own blocks."""
    checkpoint = opened(tmp_path / "checkpoint", name)
    bundle = calibrated(checkpoint, tmp_path, recipe=recipe)
    tokens, found, counts = [256, *checkpoint.encode(TEXT)][:40], [], []
    for kept, mixes in (tmp_path / "node", Products.mixes), (tmp_path / "branches", lambda *_: False):
        monkeypatch.setenv("EDGEKV_CACHE_DIR", str(kept))
        monkeypatch.setattr(Products, "mixes", mixes)
        with edgekv.load(bundle, cpu_mode="fast") as model:
            logits = model.bundle.manifest.encodings["logits"]
            found.append(np.stack([logits.dequantize(model.session.feed((token,))) for token in tokens]))
        with rendered_graph(source_of(bundle, "ar1_cl64.onnx.gz"), "fast") as (content, _):
            kinds = [node.op_type for node in onnx.load_from_string(content).graph.node]
            counts.append((kinds.count("QMoE"), kinds.count("If")))
    layers = len(checkpoint.spec.experts.layers)
    assert counts == [(layers, 0), (0, layers * checkpoint.spec.experts.count)]
    losses = [sqnr_db(*rows) for rows in zip(*found, strict=True)]
    assert np.median(losses) > 25


@pytest.mark.htp
@pytest.mark.parametrize("name", MIXTURES)
def test_the_htp_chooses_the_same_experts_in_integers_alone(tmp_path, name):
    """Its norms and softmaxes differ by steps from the CPU's, as in every model: a near tie may go the other way."""
    checkpoint = opened(tmp_path / "checkpoint", name)
    bundle = calibrated(checkpoint, tmp_path)
    manifest = open_bundle(bundle).manifest
    assert floating_nodes([bundle / file for file in manifest.graph_files], find("SM8650")) == []
    tokens = [256, *checkpoint.encode(TEXT)][:64]
    emulated = edgekv.load(bundle, cpu_mode="emulate").score(tokens)
    measured = edgekv.load(bundle, "htp", verify=False).score(tokens)
    alike = np.array([sqnr_db(*rows) for rows in zip(emulated, measured, strict=True)])
    assert np.median(alike) > 35 and (alike > 20).mean() > 0.9
    assert (emulated.argmax(-1) == measured.argmax(-1)).mean() > 0.9


def test_an_expert_that_the_first_token_alone_has_chosen_makes_no_sink(tmp_path):
    """Its results are 0 for all others, but other experts' are not, and have the same encodings."""
    changes = {"num_hidden_layers": 1, "mlp_only_layers": [], "num_experts": 16}
    checkpoint = opened(tmp_path / "checkpoint", "qwen3_moe", changes)
    found = survey(checkpoint, np.array([[256, *[65] * 15]]), 64, 1)
    assert 0 < found.outlier.ratio < 100


@pytest.fixture
def trained(embedded: Path) -> Path:
    """Eight experts, two of each token; made by models/train_experts.py."""
    return embedded.parent / "experts-900k"


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "kl_nats", "top1"), [("w8a16", 0.0015, 0.98), ("w4a16", 0.03, 0.88)])
def test_a_trained_mixture_keeps_its_quality(trained, embedded, capsys, recipe, kl_nats, top1):
    """On text it never saw; 0.0005 and 98.7 %, of 4 bits 0.013 and 91.6 %."""
    folder = exported(trained, export_options(recipe, context=512, ar=(1, 64)))
    capsys.readouterr()
    assert run(["eval", str(folder), "--text", str(embedded / "heldout.txt"), "--tokens", "2048", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["kl_nats"] <= kl_nats
    assert measured["top1_agreement"] >= top1
    assert measured["reference_perplexity"] < 30


@pytest.mark.slow
@pytest.mark.htp
def test_the_htp_follows_a_trained_router(trained, embedded):
    """Of 480 tokens three have another expert than on the CPU, all in the last layer; random routers lose 10 %."""
    bundle = open_bundle(exported(trained, export_options(context=512, ar=(1, 64))))
    tokens = bundle.tokenizer().encode((embedded / "heldout.txt").read_text()).ids[:480]
    ours, theirs = (Probe(bundle, make_engine(bundle, EngineOptions(name))).run(tokens) for name in ("cpu", "htp"))
    others = np.zeros(len(tokens), bool)
    for layer in range(3):
        chosen, measured = (trace[f"layers.{layer}.router_chosen"] > 0.5 for trace in (ours, theirs))
        assert (chosen.sum(-1) == 2).all() and (measured.sum(-1) == 2).all()
        others |= (chosen != measured).any(-1)
    assert others.mean() <= 0.02
    losses = np.array([sqnr_db(*rows) for rows in zip(ours["head"], theirs["head"], strict=True)])
    assert np.median(losses) > 42 and (losses > 30).mean() > 0.98


@pytest.mark.parametrize("mode", ["fast", "exact16"])
def test_a_prompt_in_windows_gives_what_its_tokens_give_one_by_one(tmp_path, mode):
    """In graphs of many rows, each expert reads those rows alone that have chosen it."""
    checkpoint = opened(tmp_path / "checkpoint", "granitemoe")
    bundle = calibrated(checkpoint, tmp_path)
    with rendered_graph(source_of(bundle, "ar16_cl64.onnx.gz"), "fast") as (content, _):
        branches = [node.attribute[0].g for node in onnx.load_from_string(content).graph.node if node.op_type == "If"]
    assert len(branches) == 2 * 8
    assert all("ScatterND" in {node.op_type for node in graph.node} for graph in branches)
    tokens = (256, *checkpoint.encode(TEXT))[:50]
    with edgekv.load(bundle, cpu_mode=mode) as model:
        logits = model.bundle.manifest.encodings["logits"]
        together = logits.dequantize(model.session.feed(tokens))
        model.cache.reset()
        alone = [logits.dequantize(model.session.feed((token,))) for token in tokens][-1]
    assert sqnr_db(alone, together) > 25


def test_experts_that_no_token_reaches_are_rounded_by_their_weights_and_named(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2_moe"], gain=1.0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.feed_forward.expert_bias"][4] = -9
    save_file(tensors, folder / "model.safetensors")
    manifest = open_bundle(calibrated(Checkpoint.open(str(folder)), tmp_path, recipe="w4a16")).manifest
    assert "2.4" in manifest.source.unreached_experts
    computed, warning, *_ = export_warnings(manifest)
    assert "compute all 6 of a layer, of which a token has 2" in computed
    assert re.search(r"layer 2: [\d, ]*\b4\b", warning)
    dtypes = {each.tensor: each.dtype for each in manifest.recipe.weights}
    assert dtypes["model.layers.2.mlp.router.weight"] == "int8"
    assert dtypes["model.layers.2.mlp.experts.4.up_proj.weight"] == "int4"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"graph_format": "tflite", "kv_dtype": "s8"}, "--format: got tflite"),
        ({"lora": LoraOptions(4)}, "--lora-slots"),
    ],
)
def test_what_graphs_with_experts_cannot_have_is_refused(tmp_path, changes, words):
    checkpoint = opened(tmp_path / "checkpoint", "granitemoe")
    with pytest.raises(UsageError, match=words):
        export_bundle(checkpoint, tmp_path / "bundle", export_options(context=64, ar=(1, 16), **changes))
    assert not (tmp_path / "bundle").exists()
