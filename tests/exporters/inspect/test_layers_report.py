"""What a bundle lost in each layer and tensor, and a recipe that gets most of it back for few bytes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed_as
from exporters.inspect import LayersReport, Proposal, Trace, find_divergence, measure_layers, propose, trace_reference
from exporters.inspect.divergence import sqnr_db
from exporters.inspect.evaluate import evaluate, evaluation_windows
from exporters.inspect.layers import LayerMeter
from exporters.inspect.probe import Probe
from exporters.quantize.calibrate import token_windows
from exporters.quantize.recipe import Recipe, WeightRule, find_recipe
from exporters.quantize.sink_request import SinkRequest
from quant import quantize
from tests.support.checkpoints import ARCHITECTURES, CONFIG, NEWER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported
from tests.support.thorough import variants

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
TEXT = "".join(chr(33 + i * i * 7 % 90) for i in range(140))
ALL = WeightRule(tensors="*", dtype="int8", method="nearest")


def export(checkpoint: Checkpoint, recipe: Recipe) -> Path:
    return exported(checkpoint.folder, export_options(recipe, context=64, ar=(1, 16)))


def recipe(*rules: WeightRule, rotation: str = "none") -> Recipe:
    return Recipe(name="mine", weights=rules, activations="u16", rotation=rotation)


def report(folder: Path, checkpoint: Checkpoint) -> LayersReport:
    bundle = open_bundle(folder)
    windows = evaluation_windows(checkpoint, TEXT, bundle.manifest, 100)
    tensors = transformed_as(bundle, checkpoint)
    return measure_layers(bundle, make_engine(bundle, EngineOptions("cpu")), tensors, windows, "text")


def proposal(folder: Path, checkpoint: Checkpoint, budget: float) -> Proposal:
    bundle = open_bundle(folder)
    windows = evaluation_windows(checkpoint, TEXT, bundle.manifest, 100)
    inputs = [window.inputs for window in windows]
    return propose(bundle, transformed_as(bundle, checkpoint), inputs, budget)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), NEWER, SIZES)))


@pytest.fixture(scope="module")
def four_bits(checkpoint: Checkpoint) -> Path:
    return export(checkpoint, find_recipe("w4a16-lpbq32"))


def test_the_losses_of_layers_alone_are_those_of_the_report(checkpoint: Checkpoint, four_bits: Path) -> None:
    bundle = open_bundle(four_bits)
    windows = evaluation_windows(checkpoint, TEXT, bundle.manifest, 100)
    probe = Probe(bundle, make_engine(bundle, EngineOptions("cpu", 1)))
    meter = LayerMeter(bundle, probe.first, transformed_as(bundle, checkpoint), windows)
    stages = probe.stages([window.inputs for window in windows])
    while found := [*islice(stages, len(windows))]:
        meter.add(found)
    assert meter.losses == report(four_bits, checkpoint).layers


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(["llama-biased", "qwen3", "phi4-mini", "gemma3"], ["llama-biased"]))
def test_every_architecture_has_a_level_for_every_layer_and_tensor(tmp_path: Path, name: str) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name], gain=1.0)))
    folder = export(checkpoint, recipe(ALL, rotation="hadamard"))
    found = report(folder, checkpoint)
    spec = open_bundle(folder).manifest.model
    assert [layer.place for layer in found.layers] == ["embedding", *map(str, range(spec.layers)), "head"]
    assert [sum(loss.kind == kind for loss in found.tensors) for kind in ("weight", "key", "value")] == [
        7 * spec.layers + 1 + (spec.vocabulary == "turned"),
        spec.layers * spec.kv_heads,
        spec.layers * spec.kv_heads,
    ]
    assert min(loss.sqnr_db for loss in found.tensors if loss.kind == "weight") > 30
    assert min(loss.own_db for loss in found.tensors) > 15  # of values that calibration never saw
    assert all(layer.levels["weight"].min_db <= layer.levels["weight"].mean_db for layer in found.layers[1:])


@pytest.mark.slow
def test_the_report_evaluates_what_eval_does(four_bits: Path, checkpoint: Checkpoint) -> None:
    found = report(four_bits, checkpoint).evaluation
    plain = evaluate(edgekv.load(four_bits), checkpoint, TEXT, "text", tokens=100)
    assert (found.tokens, found.engine) == (plain.tokens, plain.engine)
    assert found.perplexity == pytest.approx(plain.perplexity, rel=1e-4)
    assert found.reference_perplexity == pytest.approx(plain.reference_perplexity, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "int4", "lpbq32"])
@pytest.mark.parametrize("part", ["self_attn.q_proj", "mlp.down_proj"])
def test_matrices_are_read_as_they_were_written(checkpoint: Checkpoint, dtype: str, part: str) -> None:
    folder = export(checkpoint, recipe(WeightRule(tensors="*", dtype=dtype, method="nearest")))
    key = f"model.layers.1.{part}.weight"
    wanted = quantize(checkpoint.tensor(key).T, dtype, "nearest", None).dequantize().T
    gain = checkpoint.spec.query_gain if "q_proj" in part else 1.0
    np.testing.assert_allclose(open_bundle(folder).weights().matrix(key).dequantize().T, gain * wanted, rtol=1e-6)


def test_the_one_matrix_of_4_bits_is_the_worst_and_shall_have_8(checkpoint: Checkpoint) -> None:
    key = "model.layers.1.mlp.up_proj.weight"
    rule = WeightRule(tensors=key, dtype="int4", method="nearest")
    folder = export(checkpoint, recipe(ALL, rule))
    first = report(folder, checkpoint).worst[0]
    assert (first.name, first.suggestion) == (key, "int8 for this matrix")
    assert [each.tensor for each in proposal(folder, checkpoint, 1.5).promotions] == [key]


@pytest.mark.slow
def test_a_suggested_recipe_has_the_size_foretold_and_less_error(
    tmp_path: Path, four_bits: Path, checkpoint: Checkpoint
) -> None:
    found = proposal(four_bits, checkpoint, 1.15)
    assert found.expected_bytes <= found.budget_bytes == int(1.15 * found.weights_bytes)
    assert 0 < found.expected_nats < found.nats
    before = open_bundle(four_bits).manifest
    found.recipe(Recipe.of(before.recipe)).write(tmp_path / "better.json")
    folder = export(checkpoint, find_recipe(str(tmp_path / "better.json")))
    after = open_bundle(folder).manifest
    assert after.weights.total_bytes == found.expected_bytes
    changed = {a.tensor for a, b in zip(after.recipe.weights, before.recipe.weights, strict=True) if a != b}
    assert changed == {each.tensor for each in found.promotions}
    one, other = (report(each, checkpoint).evaluation.sqnr_db for each in (four_bits, folder))
    assert other > one + 1


def test_the_trace_of_a_rotated_reference_is_that_of_a_rotated_bundle(checkpoint: Checkpoint) -> None:
    bundle = open_bundle(export(checkpoint, recipe(ALL, rotation="hadamard")))
    tokens = list(range(20))
    found = Probe(bundle, make_engine(bundle, EngineOptions("cpu"))).run(tokens)
    assert find_divergence(trace_reference(transformed_as(bundle, checkpoint), tokens), found, limit_db=5).first is None
    assert find_divergence(trace_reference(checkpoint, tokens), found, limit_db=5).first == "embedding"


@pytest.mark.slow
def test_eval_prints_layers_and_writes_the_recipe(four_bits: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text").write_text(TEXT)
    asked = ["eval", str(four_bits), "--text", str(tmp_path / "text"), "--tokens", "100"]
    assert run([*asked, "--layers"]) == 0
    printed = capsys.readouterr().out
    assert "layer 1 " in printed and printed.count(": int8 for this matrix") == 9
    assert "lm_head.turn.weight: no action: already the widest type" in printed, "it has 8 bits"
    assert run([*asked, "--suggest-recipe", str(tmp_path / "more.json"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["proposal"]["expected_bytes"] <= 1.2 * found["proposal"]["weights_bytes"]
    assert len(found["worst"]) == 10 and found["evaluation"]["tokens"] == 100
    promoted = [each["tensor"] for each in found["proposal"]["promotions"]]
    rules = find_recipe(str(tmp_path / "more.json")).weights
    assert [rule.tensors for rule in rules[-len(promoted) :]] == promoted
    assert {rule.dtype for rule in rules[-len(promoted) :]} == {"int8"}


def test_layers_of_a_bundle_where_nothing_can_be_written(four_bits: Path, tmp_path: Path) -> None:
    """A file system that is mounted to be read: the temporary directory takes what is beside the bundle else."""
    place, text = tmp_path / "read-only", tmp_path / "text"
    place.mkdir()
    text.write_text(TEXT)
    words = [sys.executable, "-m", "edgekv", "eval", str(place / four_bits.name), "--text", str(text), "--tokens", "63"]
    words += ["--layers", "--quiet", "--checkpoint", open_bundle(four_bits).manifest.source.checkpoint]
    mounted = 'mount --bind "$1" "$2" && mount -o remount,bind,ro "$2" && shift 2 && exec "$@"'
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mounted, "sh", str(four_bits.parent), str(place)]
    if shutil.which("unshare") is None or subprocess.run([*command, "true"], check=False).returncode:
        pytest.skip("this system gives no mounts of one's own")
    done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not [path for path in four_bits.parent.iterdir() if path.name.startswith(".edgekv")]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--suggest-recipe", "more.txt"], "more.txt: got a name without .json"),
        (["--suggest-recipe", "nowhere/more.json"], "no such folder"),
        (["--size-budget", "1.1x"], "--size-budget: got it alone; expected --suggest-recipe"),
        (["--suggest-recipe", "more.json", "--size-budget", "much"], "--size-budget: got 'much'"),
        (["--suggest-recipe", "more.json", "--size-budget", "nanx"], "--size-budget: got 'nanx'"),
        (["--suggest-recipe", "more.json", "--size-budget", "1000"], "which give one matrix 8 bits"),
    ],
)
def test_what_cannot_be_suggested_is_refused(
    four_bits: Path, tmp_path: Path, monkeypatch, capsys, options: list[str], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text(TEXT)
    assert run(["eval", str(four_bits), "--text", "text", "--tokens", "63", *options]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "more.json").exists()


def test_8_bits_leave_nothing_to_suggest(small: Path, tmp_path: Path, capsys) -> None:
    (tmp_path / "text").write_text(TEXT)
    asked = ["eval", str(small), "--text", str(tmp_path / "text"), "--suggest-recipe", str(tmp_path / "more.json")]
    assert run(asked) == 2
    assert "a bundle without 4-bit matrices" in capsys.readouterr().err


@pytest.fixture(scope="module")
def sinking(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_sinking(tmp_path_factory.mktemp("sinking"), NEWER)))


def test_the_sink_is_named_where_it_spans_the_range(sinking: Checkpoint) -> None:
    options = export_options(recipe(ALL), context=64, ar=(1, 16), sink=SinkRequest("none"))
    folder = exported(sinking.folder, options)
    found = report(folder, sinking)
    spans = {span.name: span for span in found.spans}
    assert {"layers.0.down", "layers.0.mlp_add", "layers.1.mlp_add"} <= set(spans)
    assert [span.cost_db for span in found.spans] == sorted((span.cost_db for span in found.spans), reverse=True)
    span = spans["layers.0.down"]
    assert (span.position, span.token, span.text) == (0, CONFIG["bos_token_id"], "<|0|>")
    exact = [each["layers.0.down"] for each in traces(sinking)]
    assert span.magnitude == pytest.approx(max(np.abs(each[0]).max() for each in exact))
    rest = np.concatenate([each[1:] for each in exact])
    assert span.others == pytest.approx(np.abs(rest).max())
    assert span.without == pytest.approx((rest.min(), rest.max()))
    steps = np.ptp(np.concatenate(exact)) / (rest.max() - rest.min())
    assert span.cost_db == pytest.approx(20 * np.log10(steps), abs=0.1)
    loss = next(each for each in found.tensors if each.name == "layers.0.down")
    assert loss.first_db is not None
    assert loss.sqnr_db < loss.first_db - 20, "position 0 is represented well, and does not own the mean"
    advice = {each.name: each.suggestion for each in found.worst}
    assert advice["layers.0.down"].startswith("--sink auto: '<|0|>' at position 0 spans the range")


def test_nothing_spans_the_ranges_of_a_bundle_that_restores_the_sink(sinking: Checkpoint) -> None:
    folder = exported(sinking.folder, export_options(recipe(ALL), context=64, ar=(1, 16)))
    found = report(folder, sinking)
    assert found.spans == []
    assert {layer.first for layer in found.layers} == {None}
    assert found.evaluation.first_sqnr_db is None
    assert min(loss.own_db for loss in found.tensors if loss.kind == "activation") > 30


def test_a_probe_of_a_whole_context_keeps_the_sink_to_the_end(sinking: Checkpoint) -> None:
    folder = exported(sinking.folder, export_options(recipe(ALL), context=64, ar=(1, 16)))
    tokens = [CONFIG["bos_token_id"], *(37 * i * i % 250 for i in range(63))]
    bundle = open_bundle(folder)
    probed = Probe(bundle, make_engine(bundle, EngineOptions("cpu"))).run(tokens)["logits"]
    scored = edgekv.load(folder).score(tokens)[1:]
    assert len(probed) == 63
    assert min(sqnr_db(a, b) for a, b in zip(scored, probed, strict=True)) > 40


def traces(checkpoint: Checkpoint) -> list[Trace]:
    """Those of the float reference for the windows that `report` measures."""
    windows = token_windows(checkpoint, TEXT, 64)
    return [trace_reference(checkpoint, window.tolist(), 64) for window in windows]
