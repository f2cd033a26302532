"""Bits where they count: `--target-mb` and `--max-kl` choose the type of each matrix."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, strategies as st

from devices import find
from edgekv.bundle import Manifest, RecipeRecord, WeightRecord, open_bundle
from edgekv.cli import run
from edgekv.errors import UsageError
from edgekv.spec import EMBEDDING, HEAD, Config, DecoderInterface, DecoderSpec, describe, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.estimate import DecodeSpeed, estimate_spec
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.graphs.onnx import plan_graphs
from exporters.graphs.split import Split
from exporters.pipeline import sensitivity
from exporters.pipeline.inputs import DecoderKey
from exporters.plan import plan_export
from exporters.quantize.allocation import Front, Fronts, possible_types, type_bytes
from exporters.quantize.recipe import Recipe, find_recipe
from quant import WEIGHT_TYPES, WeightDtype
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.exports import small_options
from tests.support.thorough import at_most


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"), NEWER)))


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def options(recipe: str = "w4a16-lpbq32", **changes: object) -> ExportOptions:
    return small_options(recipe, **{"context": 64, "ar": (1, 16), "calibration_tokens": 256} | changes)


def export(checkpoint: Checkpoint, folder: Path, cache: Path, **changes: object) -> Manifest:
    kept = RunOptions(cache_dir=cache, resume=True, keep_pieces=True)
    return export_bundle(checkpoint, folder, options(**changes), kept, force=True)


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


TIED_16K = {
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "vocab_size": 16384,
    "max_position_embeddings": 512,
    "tie_word_embeddings": True,
}

SLOW_MATRICES = NEWER | {
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}
"""Large enough for their types to decide how fast decode is."""

COSTS = st.lists(st.floats(1e-9, 1), min_size=4, max_size=4)
TIMES = st.lists(st.integers(-100, 1000).map(lambda tenths: tenths / 10), min_size=4, max_size=4)


@given(st.data())
def test_more_bytes_never_lose_more(checkpoint: Checkpoint, data: st.DataObject) -> None:
    spec: DecoderSpec = checkpoint.spec
    types = possible_types(spec, "cpu")
    costs = {name: dict(zip(each, data.draw(COSTS), strict=False)) for name, each in types.items()}
    front = Front.of(spec, costs)
    slopes = [change.nats / change.bytes for change in front.changes]
    assert slopes == sorted(slopes, reverse=True) and all(slope > 0 for slope in slopes)
    sizes = sorted(data.draw(st.lists(st.integers(0, 2 * front.largest.bytes), min_size=2, max_size=4)))
    found = [front.within(size) for size in sizes]
    for size, each in zip(sizes, found, strict=True):
        assert each.bytes <= max(size, front.smallest.bytes)
        assert each.types.keys() == types.keys() and all(each.types[name] in types[name] for name in types)
        assert each.nats == pytest.approx(sum(costs[name][dtype] for name, dtype in each.types.items()))
    assert front.within(front.largest.bytes) == front.largest
    wanted = data.draw(st.floats(0, front.smallest.nats))
    chosen = front.losing(wanted)
    assert chosen.nats <= wanted + 1e-9 or chosen == front.largest


@at_most(8)
@given(st.data())
def test_a_limit_in_time_is_kept_and_a_looser_one_loses_no_more(checkpoint: Checkpoint, data: st.DataObject) -> None:
    types = possible_types(checkpoint.spec, "cpu")
    costs, times = (
        {name: dict(zip(each, data.draw(drawn), strict=False)) for name, each in types.items()}
        for drawn in (COSTS, TIMES)
    )
    fronts = Fronts(checkpoint.spec, costs, times)
    fastest = sum(min(each.values()) for each in times.values())
    slowest = sum(max(each.values()) for each in times.values())
    limits = sorted(data.draw(st.lists(st.floats(fastest + 0.01, slowest + 1), min_size=2, max_size=4)))
    found = [fronts.choose(lambda front: front.largest, limit) for limit in limits]
    for limit, each in zip(limits, found, strict=True):
        assert each.us <= limit
        assert each.us == pytest.approx(sum(times[name][dtype] for name, dtype in each.types.items()))
        assert each.nats == pytest.approx(sum(costs[name][dtype] for name, dtype in each.types.items()))
    assert all(one.nats >= other.nats - 1e-9 for one, other in pairwise(found))
    assert fronts.choose(lambda front: front.largest, fastest - 1).us == pytest.approx(fastest)


def test_blocks_divide_the_inputs(checkpoint: Checkpoint) -> None:
    for types in possible_types(checkpoint.spec, "cpu").values():
        assert {"int4", "int8"} <= {*types}
    for types in possible_types(checkpoint.spec, "litert").values():
        assert {*types} == {"int4", "int8"}, "its kernels have no blocks"


@pytest.fixture(scope="module")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    folder = write_checkpoint(
        tmp_path_factory.mktemp("untied"), NEWER, {"tie_word_embeddings": False, "hidden_size": 256}
    )
    return Checkpoint.open(str(folder))


@pytest.mark.slow
def test_a_head_of_its_own_gets_4_bits_for_its_bytes(untied: Checkpoint, tmp_path: Path, cache: Path) -> None:
    """Its embeddings stay at 8. Without a goal it has 8 too."""
    export(untied, tmp_path / "small", cache, recipe="w4a16")
    export(untied, tmp_path / "smaller", cache, recipe="w4a16-head-int4")
    sizes = [folder_bytes(tmp_path / name) / 1e6 for name in ("smaller", "small")]
    found = export(untied, tmp_path / "bundle", cache, target_mb=sum(sizes) / 2)
    assert sizes[0] < folder_bytes(tmp_path / "bundle") / 1e6 <= sum(sizes) / 2
    assert WEIGHT_TYPES[Recipe.of(found.recipe).rule(HEAD).dtype].bits == 4
    assert found.weights.matrices[EMBEDDING].dtype == "int8"
    large = export(untied, tmp_path / "large", cache, target_mb=100)
    assert Recipe.of(large.recipe).rule(HEAD).dtype == "int8"


def test_a_head_that_a_recipe_names_keeps_its_type(untied: Checkpoint, tmp_path: Path, cache: Path) -> None:
    found = export(untied, tmp_path / "bundle", cache, recipe="w4a16-head-lpbq32", target_mb=100)
    assert Recipe.of(found.recipe).rule(HEAD).dtype == "lpbq32"


def test_only_time_gives_a_tied_head_4_bits(checkpoint: Checkpoint) -> None:
    """It takes more bytes than a head that is the table of embeddings too."""
    spec = msgspec.structs.replace(checkpoint.spec, vocabulary="turned")
    int8, int4 = (type_bytes(spec, HEAD, dtype) for dtype in ("int8", "int4"))
    assert int8 < int4
    fronts = Fronts(spec, {HEAD: {"int4": 0.02, "int8": 0.001}}, {HEAD: {"int4": -300.0, "int8": 0.0}})
    assert fronts.choose(lambda front: front.largest).types == {HEAD: "int8"}
    assert fronts.choose(lambda front: front.largest, -100.0).types == {HEAD: "int4"}


def test_a_bundle_is_as_large_as_it_may_be(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    for name in ("w4a16-lpbq32", "w8a16"):
        export(checkpoint, tmp_path / name, cache, recipe=name)
    middle = sum(folder_bytes(tmp_path / name) for name in ("w4a16-lpbq32", "w8a16")) / 2e6
    found = export(checkpoint, tmp_path / "middle", cache, target_mb=middle)
    assert 0.97 * middle < folder_bytes(tmp_path / "middle") / 1e6 <= middle, "the manifest counts too"
    assert found.recipe.name == f"{middle:g}mb"
    types = Counter(WEIGHT_TYPES[each.dtype].bits for each in found.recipe.weights)
    assert types[4] and types[8]
    assert {each.method for each in found.recipe.weights} <= {"attention", "descent", "gptq", "nearest"}
    assert export(checkpoint, tmp_path / "large", cache, target_mb=100).recipe.name == "100mb"


def test_queries_that_attention_will_round_count_half_of_what_gptq_loses(
    monkeypatch: pytest.MonkeyPatch, checkpoint: Checkpoint, tmp_path: Path
) -> None:
    gptq = {"q_proj": {"int4": 0.4, "int8": 0.002}, "o_proj": {"int4": 0.4, "int8": 0.002}}
    monkeypatch.setattr(sensitivity, "matrix_costs", lambda *_, **__: {name: {**nats} for name, nats in gptq.items()})
    monkeypatch.setattr(sensitivity, "Quantizer", lambda *_, **__: None)
    exact = plan_export(checkpoint, options()).survey_tokens
    inputs: Any = SimpleNamespace(
        surveyed=lambda _: SimpleNamespace(tokens=exact, sink_tokens=0),
        folded=lambda _: None,
        store=SimpleNamespace(folder=tmp_path),
        progress=None,
    )
    rules = tuple(
        WeightRecord(tensor=name, dtype="int4", method=method)
        for name, method in (("q_proj", "attention"), ("o_proj", "descent"))
    )
    key = DecoderKey("weights", "config", checkpoint.spec, 64)
    costs = sensitivity.SensitivityPiece(key, rules, ()).make(tmp_path, inputs)
    assert costs == {"q_proj": {"int4": 0.2, "int8": 0.001}, "o_proj": gptq["o_proj"]}


def mean_bits(checkpoint: Checkpoint, recipe: RecipeRecord) -> float:
    """Bits a weight of the matrices of the layers, with their scales."""
    shapes = matrices(checkpoint.spec)
    found = [(each.dtype, *shapes[each.tensor]) for each in recipe.weights if each.tensor.startswith("model.layers.")]
    total_bytes = sum(WEIGHT_TYPES[dtype].matrix_bytes(inputs, outputs) for dtype, outputs, inputs in found)
    return 8 * total_bytes / sum(outputs * inputs for _, outputs, inputs in found)


@pytest.mark.parametrize("bits", [6, 7.5])
def test_a_recipe_of_the_front_has_the_bits_of_its_name(
    checkpoint: Checkpoint, tmp_path: Path, cache: Path, bits: float
) -> None:
    found = export(checkpoint, tmp_path / "bundle", cache, recipe=f"front-{bits}").recipe
    assert found.name == f"front-{bits}"
    assert bits - 0.5 < mean_bits(checkpoint, found) <= bits
    assert {WEIGHT_TYPES[each.dtype].bits for each in found.weights} == {4, 8}


def test_a_recipe_file_may_say_the_bits(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    rules = [{"tensors": "*", "dtype": "int8", "method": "nearest"}]
    (tmp_path / "mine.json").write_text(json.dumps({"weights": rules, "mean_bits": 7}))
    found = export(checkpoint, tmp_path / "bundle", cache, recipe=str(tmp_path / "mine.json")).recipe
    assert (found.name, found.rotation) == ("mine", "none")
    assert 6 < mean_bits(checkpoint, found) <= 7
    assert {each.method for each in found.weights} == {"nearest"}


@pytest.mark.parametrize("name", ["front-", "front-9", "front-3.9", "front-5x", "front-nan", "front--5"])
def test_bits_that_no_recipe_has_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"--recipe: got '{name}'; expected front-BITS, from 4 to 8 bits a weight"):
        find_recipe(name)


def test_a_sweep_refuses_recipes_of_the_front(checkpoint: Checkpoint, tmp_path: Path, capsys) -> None:
    command = ["sweep", str(checkpoint.folder), "-o", str(tmp_path / "sweep"), "--recipes", "w8a16,front-5"]
    assert run([*command, "--devices", "SM8650", "--text", str(checkpoint.folder / "config.json")]) == 2
    assert "got front-5; expected recipes that say the type of each matrix" in capsys.readouterr().err


def test_a_goal_that_no_types_reach_names_the_nearest(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    export(checkpoint, tmp_path / "small", cache, recipe="w4a16")
    smallest = folder_bytes(tmp_path / "small")
    with pytest.raises(
        UsageError, match=r"--target-mb: got 0\.05; expected about 0\.\d+: every matrix in its smallest"
    ):
        export(checkpoint, tmp_path / "bundle", cache, target_mb=0.05)
    with pytest.raises(UsageError, match=r"--target-mb: got .*; expected at least 0\.\d+: every matrix"):
        export(checkpoint, tmp_path / "bundle", cache, target_mb=0.95 * smallest / 1e6)
    with pytest.raises(UsageError, match=r"--recipe front-4: got 4 bits a weight; expected 4\.\d or more"):
        export(checkpoint, tmp_path / "bundle", cache, recipe="front-4")
    with pytest.raises(UsageError, match=r"--max-kl: got 1e-09; expected .* which 8 bits for every matrix give"):
        export(checkpoint, tmp_path / "bundle", cache, max_kl=1e-9, check_quality=True)
    assert not (tmp_path / "bundle").exists()


def test_a_divergence_is_kept(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    wide = export(checkpoint, tmp_path / "wide", cache, recipe="w8a16", check_quality=True)
    narrow = export(checkpoint, tmp_path / "narrow", cache, recipe="w4a16", check_quality=True)
    least, most = (each.quality[0].kl_nats for each in (wide, narrow))
    found = export(checkpoint, tmp_path / "bundle", cache, max_kl=(least + most) / 2, check_quality=True)
    assert found.quality[0].kl_nats <= (least + most) / 2
    assert folder_bytes(tmp_path / "bundle") < folder_bytes(tmp_path / "wide")


def test_a_size_and_a_divergence_both_hold_or_are_refused(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    export(checkpoint, tmp_path / "small", cache, recipe="w4a16")
    max_mb = 1.3 * folder_bytes(tmp_path / "small") / 1e6
    both = {"target_mb": max_mb, "check_quality": True}
    export(checkpoint, tmp_path / "both", cache, max_kl=10.0, **both)
    assert folder_bytes(tmp_path / "both") <= max_mb * 1e6
    with pytest.raises(
        UsageError, match=r"--max-kl: got 1e-06 with --target-mb .*; expected .* or more, which the types"
    ):
        export(checkpoint, tmp_path / "bundle", cache, max_kl=1e-6, **both)


@pytest.mark.slow
@pytest.mark.htp
def test_types_are_chosen_for_a_simulated_speed(tmp_path: Path, cache: Path) -> None:
    """Within the size of an LPBQ bundle, faster types are chosen until the simulated speed is reached."""
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", SLOW_MATRICES)))
    blocks = export(checkpoint, tmp_path / "blocks", cache, recipe="w4a16-lpbq64")
    slow, fast = (decoded_per_s(manifest_with(blocks, dtype), cache) for dtype in ("lpbq64", "int4"))
    assert fast > 1.1 * slow
    max_bytes = folder_bytes(tmp_path / "blocks")
    goals = {"target_mb": max_bytes / 1e6, "target_tokens_per_s": (slow + fast) / 2}
    found = export(checkpoint, tmp_path / "fast", cache, **goals)
    assert folder_bytes(tmp_path / "fast") <= max_bytes
    assert decoded_per_s(found, cache) >= goals["target_tokens_per_s"]
    layers = {each.dtype for each in found.recipe.weights if each.tensor.startswith("model.layers.")}
    assert layers > {"int4"}, "slower types, as there is time for them"
    with pytest.raises(
        UsageError, match=r"--target-tokens-per-s: got 1e\+09; expected at most [\d.]+: the fastest types"
    ):
        export(checkpoint, tmp_path / "bundle", cache, target_tokens_per_s=1e9)


def manifest_with(manifest: Manifest, dtype: WeightDtype) -> Manifest:
    """The same with one type for all matrices of the layers."""
    weights = [
        msgspec.structs.replace(each, dtype=dtype) if each.tensor.startswith("model.layers.") else each
        for each in manifest.recipe.weights
    ]
    return msgspec.structs.replace(manifest, recipe=msgspec.structs.replace(manifest.recipe, weights=weights))


def decoded_per_s(manifest: Manifest, cache: Path) -> float:
    """By the compiler's simulation of the types in a manifest, in a binary with all graphs that ship."""
    graphs = [graph for graph in manifest.graphs if graph.role != "score"]
    found = estimate_spec(
        manifest.model,
        Recipe.of(manifest.recipe),
        graphs,
        manifest.interface,
        find("SM8650"),
        RunOptions(cache_dir=cache),
    )
    (decode,) = (graph for graph in found.graphs if graph.role == "decode")
    assert decode.tokens_per_s is not None
    return decode.tokens_per_s


@pytest.mark.slow
@pytest.mark.htp
def test_a_tied_head_of_4_bits_is_timed_as_it_would_be_exported(tmp_path: Path, cache: Path) -> None:
    """With its table apart, so without the matrix in front of a shared one; beside it as exports have it."""
    spec = describe(Config(TIED_16K))
    (graph,) = (each for each in plan_graphs((1,), (64,), Split.whole(spec.layers)) if each.role == "decode")
    interface = DecoderInterface.of(spec, 64, "u8", "rows", "u16")
    shared = msgspec.structs.replace(spec, vocabulary="turned")
    run = RunOptions(cache_dir=cache)
    speed = DecodeSpeed(shared, find_recipe("w4a16"), graph, [graph], interface, find("SM8650"), run)
    assert speed.times({HEAD: ("int4", "int8")})[HEAD]["int4"] < -50, "microseconds"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"target_mb": 1.0, "max_kl": 1.0, "target_tokens_per_s": 1.0, "check_quality": True},
            "--target-mb, --max-kl, --target-tokens-per-s: got all of them; expected one or two",
        ),
        ({"target_tokens_per_s": 0.0}, "--target-tokens-per-s: got 0.0; expected a number above 0"),
        (
            {"target_tokens_per_s": 1.0, "graph_format": "tflite", "kv_dtype": "s8", "recipe": "w8a16"},
            "--target-tokens-per-s: got --format tflite; expected ONNX graphs",
        ),
        ({"target_mb": -1.0}, "--target-mb: got -1.0; expected a number above 0"),
        ({"max_kl": float("nan")}, "--max-kl: got nan; expected a number above 0"),
        ({"max_kl": 1.0, "check_quality": False}, "--max-kl: got --no-quality-check"),
        ({"target_mb": 1.0, "recipe": "front-5"}, "--target-mb: got it with the recipe front-5"),
        ({"target_mb": 1.0, "recipe": "as-stored"}, "got the recipe as-stored, which keeps stored integers"),
    ],
)
def test_goals_that_exclude_each_other_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        options(**changes)


def test_the_command_takes_a_recipe_of_4_bits_by_itself(checkpoint: Checkpoint, tmp_path: Path, cache: Path) -> None:
    command = ["export", str(checkpoint.folder), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "-q", "--resume"]
    command += ["--skip-htp-check", "--no-quality-check", "--context", "64", "--ar", "1,16"]
    assert run([*command, "--calibration-tokens", "256", "--cache-dir", str(cache), "--target-mb", "100"]) == 0
    found = open_bundle(tmp_path / "bundle").manifest.recipe
    assert (found.name, found.rotation, found.heads) == ("100mb", "principal", "aligned")
