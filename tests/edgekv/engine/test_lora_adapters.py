"""Adapters of a bundle with slots: added once, chosen by name, swapped without loading anything."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

import edgekv
from edgekv.bundle import lora_adapters, open_bundle, open_lora, remove_lora
from edgekv.bundle.adapters import write_lora
from edgekv.cli import run as run_command
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.prefix import StoreConfig
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.export import export_bundle
from exporters.lora.add import add_lora
from exporters.lora.options import LoraOptions
from exporters.lora.quantize import folded_factors
from exporters.lora.ranges import adapted_ranges
from exporters.quantize.reference import NO_CHANGES, Reference
from exporters.quantize.sink_request import SinkRequest
from tests.support.checkpoints import ARCHITECTURES, NEWER, OLDER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter
from tests.support.thorough import variants

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
OTHER_MODULES = {
    "phi3": ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"),
    "lfm2": ("q_proj", "k_proj", "v_proj", "out_proj", "in_proj", "w1", "w2", "w3"),
    "lfm3": ("q_proj", "k_proj", "v_proj", "o_proj", "out_proj", "in_proj", "w1", "w2", "w3"),
}
BOS = 256
TOKENS = [BOS, *range(40, 60)]
OPTIONS = export_options(context=64, ar=(1, 8), lora=LoraOptions(8), sink=SinkRequest("none"))
WEAK = 0.2
"""lora_alpha of adapters that move a random model about as far as training moves a trained one."""


def add(bundle: Path, adapter: Path, name: str, scale: float = 1.0) -> None:
    add_lora(open_bundle(bundle), AdapterChoice(adapter, scale), name)


def floats(base: Path, *adapters: tuple[Path, float]) -> np.ndarray:
    """The logits of the float model with adapters merged into it."""
    merged = Checkpoint.open(str(base), [AdapterChoice(folder, scale) for folder, scale in adapters])
    (logits,) = Reference(merged, 64).logits([np.array(TOKENS)])
    return logits


def error(bundle: Path, wanted: np.ndarray, lora: str | None, engine: str = "cpu") -> float:
    """Energy of the difference from the float model, relative to its own."""
    with edgekv.load(bundle, engine, threads=1 if engine == "cpu" else None) as model:
        found = model.score(TOKENS, lora=lora)
    return float(np.square(found - wanted).sum() / np.square(wanted).sum())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base") / "checkpoint", OLDER)


@pytest.fixture(scope="module")
def adapters(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two adapters of rank 4."""
    folder = tmp_path_factory.mktemp("adapters")
    write_adapter(folder / "one", base, EVERY, lora_alpha=WEAK)
    write_adapter(folder / "two", base, ("q_proj", "down_proj"), seed=1, lora_alpha=2 * WEAK)
    return folder


@pytest.fixture(scope="module")
def slots(base: Path) -> Path:
    return exported(base, OPTIONS)


@pytest.fixture(scope="module")
def adapted(slots: Path, adapters: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle with the two adapters."""
    bundle = shutil.copytree(slots, tmp_path_factory.mktemp("adapted") / "bundle")
    for name in ("one", "two"):
        add(bundle, adapters / name, name)
    return bundle


# ---------------------------------------------------------------------- what an adapter computes


@pytest.mark.parametrize(
    "name",
    variants(
        ["smollm2", "qwen3", "qwen2", "phi3", "gemma2", "olmo2", "granite", "lfm2", "lfm3"],
        ["smollm2", "phi3", "gemma2", "lfm2"],
    ),
)
def test_an_adapter_gives_what_merging_it_gives(name: str, tmp_path: Path) -> None:
    base = write_checkpoint(tmp_path / "base", ARCHITECTURES[name])
    write_adapter(tmp_path / "lora", base, OTHER_MODULES.get(name, EVERY), lora_alpha=WEAK)
    bundle = shutil.copytree(exported(base, OPTIONS), tmp_path / "bundle")
    add(bundle, tmp_path / "lora", "tuned")
    plain, tuned = floats(base), floats(base, (tmp_path / "lora", 1.0))
    assert error(bundle, tuned, "tuned") < 2 * error(bundle, plain, None)
    assert error(bundle, tuned, None) > 4 * error(bundle, tuned, "tuned")


def test_an_adapter_is_rotated_as_the_weights_were(base: Path, adapters: Path, tmp_path: Path) -> None:
    """The checkpoint is not read again, from which the directions came."""
    options = replace(OPTIONS, recipe=OPTIONS.recipe.for_blocks())
    bundle = shutil.copytree(exported(base, options), tmp_path / "bundle")
    assert open_bundle(bundle).manifest.recipe.rotation == "principal"
    add(bundle, adapters / "one", "one")
    plain, tuned = floats(base), floats(base, (adapters / "one", 1.0))
    assert error(bundle, tuned, "one") < 2 * error(bundle, plain, None)
    assert error(bundle, tuned, None) > 4 * error(bundle, tuned, "one")


@pytest.mark.htp
def test_the_htp_computes_adapters_in_integers(adapted: Path, adapters: Path, base: Path) -> None:
    tuned = floats(base, (adapters / "one", 1.0))
    assert error(adapted, tuned, "one", "htp") < 2 * error(adapted, floats(base), None, "htp")


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_the_modes_of_the_cpu_compute_adapters(adapted: Path, adapters: Path, base: Path, mode: str) -> None:
    tuned = floats(base, (adapters / "one", 1.0))
    with edgekv.load(adapted, cpu_mode=mode, threads=1) as model:
        found = {name: model.score(TOKENS, lora=name) for name in ("one", None)}
    errors = {name: float(np.square(each - tuned).sum()) for name, each in found.items()}
    assert errors["one"] < errors[None] / 5


def test_adapters_stack_with_their_scales(adapted: Path, adapters: Path, base: Path) -> None:
    both = floats(base, (adapters / "one", 1.0), (adapters / "two", -0.5))
    assert error(adapted, both, "one,two=-0.5") < 2 * error(adapted, floats(base), None)
    assert error(adapted, both, "one") > 3 * error(adapted, both, "one,two=-0.5")


def test_a_scale_given_when_adding_stays(slots: Path, adapters: Path, base: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(slots, tmp_path / "bundle")
    add(bundle, adapters / "one", "half", 0.5)
    assert error(bundle, floats(base, (adapters / "one", 0.5)), "half") < 2 * error(bundle, floats(base), None)


def test_the_sink_is_computed_with_the_adapter(tmp_path: Path) -> None:
    base = write_sinking(tmp_path / "base", NEWER)
    write_adapter(tmp_path / "lora", base, ("k_proj", "v_proj"), lora_alpha=WEAK)
    options = replace(OPTIONS, sink=SinkRequest("tokens", (BOS,)))
    bundle = shutil.copytree(exported(base, options), tmp_path / "bundle")
    add(bundle, tmp_path / "lora", "tuned")
    assert error(bundle, floats(base, (tmp_path / "lora", 1.0)), "tuned") < 3 * error(bundle, floats(base), None)


# ---------------------------------------------------------------------- swapping


@pytest.mark.parametrize("engine", variants(["cpu", "htp"], ["cpu"]))
def test_a_swap_changes_nothing_but_the_adapter(adapted: Path, engine: str) -> None:
    alone = {}
    for name in ("one", "two", None):
        with edgekv.load(adapted, engine) as model:
            alone[name] = model.score(TOKENS, lora=name)
    with edgekv.load(adapted, engine) as model:
        for name in ("one", None, "two", "one", "two", None):
            assert np.array_equal(model.score(TOKENS, lora=name), alone[name])
    assert not np.array_equal(alone["one"], alone["two"])


def test_a_sequence_is_run_again_with_another_adapter(adapted: Path) -> None:
    with edgekv.load(adapted, threads=1) as model:
        answers = {lora: run(model, lora) for lora in ("one", None)}
        for lora in ("one", None, "one", "one"):
            assert run(model, lora, sequence=7) == answers[lora]
        again = model.generate(TOKENS, 4, ignore_eos=True, sequence=7, lora="one")
        list(again)
        assert again.stats.cache.reused_tokens == len(TOKENS) - 1
        other = model.generate(TOKENS, 4, ignore_eos=True, sequence=7, lora="two")
        list(other)
        assert other.stats.cache.reused_tokens == 0


def test_prefixes_are_kept_apart(adapted: Path) -> None:
    with edgekv.load(adapted, threads=1) as plain:
        answers = {lora: run(plain, lora) for lora in ("one", "two", None)}
    with edgekv.load(adapted, threads=1, prefix_cache=StoreConfig(tokens_per_block=4)) as model:
        for lora in ("one", None, "two"):
            first = model.generate(TOKENS, 4, ignore_eos=True, lora=lora)
            list(first)
            assert first.stats.cache.restored_tokens == 0
        for lora in ("two", "one", None):
            second = model.generate(TOKENS, 4, ignore_eos=True, lora=lora)
            assert [token.id for token in second] == answers[lora]
            assert second.stats.cache.restored_tokens >= len(TOKENS) - 4


def test_an_adapter_works_in_several_parts(base: Path, adapters: Path, slots: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(exported(base, replace(OPTIONS, splits=2)), tmp_path / "bundle")
    add(bundle, adapters / "one", "one")
    assert error(bundle, floats(base, (adapters / "one", 1.0)), "one") < 2 * error(bundle, floats(base), None)


def run(model: edgekv.Model, lora: str | None, sequence: int | None = None) -> list[int]:
    return [token.id for token in model.generate(TOKENS, 4, ignore_eos=True, lora=lora, sequence=sequence)]


# ---------------------------------------------------------------------- in the bundle


def test_adapters_are_listed_and_removed(adapted: Path, tmp_path: Path) -> None:
    bundle = open_bundle(shutil.copytree(adapted, tmp_path / "bundle"))
    found = lora_adapters(bundle)
    assert [each.record.name for each in found] == ["one", "two"]
    assert [each.record.rank for each in found] == [4, 4]
    assert found[1].record.targets == ["q", "down"]
    remove_lora(bundle, "one")
    assert [each.record.name for each in lora_adapters(bundle)] == ["two"]
    with pytest.raises(UsageError, match="'one'; expected two"):
        open_lora(bundle, "one")
    with pytest.raises(UsageError, match="'one'; expected two"):
        remove_lora(bundle, "one")


def test_damage_is_found(adapted: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(adapted, tmp_path / "bundle")
    tensors, record = (bundle / "adapters" / "one" / name for name in ("adapter.safetensors", "adapter.json"))
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with edgekv.load(bundle) as model, pytest.raises(BundleError, match="sha256"):
        model.score(TOKENS, lora="one")
    record.write_text(record.read_text().replace('"scale": 1', '"scale": 2'))
    with pytest.raises(BundleError, match="seal"):
        open_lora(open_bundle(bundle), "one")


@pytest.mark.parametrize("damage", ["no b", "no a", "inputs", "outputs", "rank", "dtype", "dimensions", "empty"])
def test_tensors_of_other_shapes_are_refused_though_they_are_sealed(adapted: Path, tmp_path: Path, damage: str) -> None:
    bundle = open_bundle(shutil.copytree(adapted, tmp_path / "bundle"))
    held = open_lora(bundle, "one")
    arrays = dict(held.arrays())
    a = next(name for name in arrays if name.startswith("a."))
    b = f"b{a[1:]}"
    changes = {
        "no b": {b: None},
        "no a": {a: None},
        "inputs": {a: arrays[a][:, 1:]},
        "outputs": {b: arrays[b][:, 1:]},
        "rank": {b: arrays[b][1:]},
        "dtype": {a: arrays[a].astype(np.float32)},
        "dimensions": {a: arrays[a].ravel(), b: arrays[b].ravel()},
        "empty": {a: arrays[a][:0], b: arrays[b][:0]},
    }
    arrays |= changes[damage]
    kept = {name: np.ascontiguousarray(array) for name, array in arrays.items() if array is not None}
    write_lora(bundle, held.record, kept, force=True)
    with edgekv.load(bundle.path) as model, pytest.raises(BundleError, match=r"adapters/one/.*: got [ab]\.\d"):
        model.score(TOKENS, lora="one")


def test_an_adapter_of_another_export_is_refused(adapted: Path, base: Path, tmp_path: Path) -> None:
    other = shutil.copytree(exported(base, replace(OPTIONS, lora=LoraOptions(9))), tmp_path / "other")
    shutil.copytree(adapted / "adapters", other / "adapters")
    with edgekv.load(other) as model, pytest.raises(BundleError, match="bundle_sha256"):
        model.score(TOKENS, lora="one")


def test_what_is_clipped_is_said(base: Path, adapters: Path, tmp_path: Path) -> None:
    narrow = replace(OPTIONS, lora=LoraOptions(4, reach=0.001))
    bundle = shutil.copytree(exported(base, narrow), tmp_path / "bundle")
    record = add_lora(open_bundle(bundle), AdapterChoice(adapters / "two"), "two").record
    assert {each.target for each in record.clipped} == {"q", "down"}
    assert all(each.reach > 1 and 0 < each.share <= 1 for each in record.clipped)


def test_calibration_fits_the_slots_to_adapters(base: Path, adapters: Path, tmp_path: Path) -> None:
    slots = LoraOptions(8, calibrate=(AdapterChoice(adapters / "one"),))
    bundle = shutil.copytree(exported(base, replace(OPTIONS, lora=slots)), tmp_path / "bundle")
    add(bundle, adapters / "one", "one")
    integers = open_lora(open_bundle(bundle), "one").arrays()
    largest = {name: int(np.abs(each).max()) for name, each in integers.items() if name.startswith("b.")}
    assert set(largest.values()) <= {26213, 26214}, "a quarter of headroom above 32767 / 1.25"
    with pytest.raises(CheckpointError, match="rank 4; expected at most 3"):
        small = replace(OPTIONS, lora=LoraOptions(3, calibrate=slots.calibrate))
        export_bundle(Checkpoint.open(str(base)), tmp_path / "refused", small)
    assert not (tmp_path / "refused").exists()


def test_the_ranges_with_an_adapter_are_those_of_the_merged_model(base: Path, adapters: Path) -> None:
    choice, tokens = AdapterChoice(adapters / "one"), np.arange(96).reshape(2, 48)
    plain, merged = Checkpoint.open(str(base)), Checkpoint.open(str(base), [choice])
    changes = folded_factors(Adapter.open(choice), plain)
    found, wanted, without = (
        adapted_ranges(*each, tokens, 64, sink=1, progress=lambda done, of: None)
        for each in ((plain, changes), (merged, NO_CHANGES), (plain, NO_CHANGES))
    )
    assert found.keys() == wanted.keys() == without.keys()
    for name, seen in found.items():
        most = wanted[name].absmax
        assert seen.high >= wanted[name].high - 1e-4 * most, name
        assert seen.low <= wanted[name].low + 1e-4 * most, name
    assert found["layers.1.down"].absmax != without["layers.1.down"].absmax


@pytest.mark.parametrize("sink", ["none", "auto"])
def test_calibration_covers_what_results_reach_with_adapters(sink: Literal["none", "auto"], tmp_path: Path) -> None:
    """An adapter that moves the model far: what it reaches is clipped without."""
    base = write_sinking(tmp_path / "base", NEWER)
    write_adapter(tmp_path / "lora", base, EVERY, lora_alpha=8)
    choice, losses = AdapterChoice(tmp_path / "lora"), []
    for calibrate in ((), (choice,)):
        options = replace(OPTIONS, sink=SinkRequest(sink), lora=LoraOptions(8, reach=4, calibrate=calibrate))
        bundle = shutil.copytree(exported(base, options), tmp_path / f"{len(calibrate)}")
        add(bundle, tmp_path / "lora", "tuned")
        losses.append(error(bundle, floats(base, (tmp_path / "lora", 1.0)), "tuned"))
    assert losses[1] < losses[0] / 4, losses


# ---------------------------------------------------------------------- bad input: named, and nothing changed


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"use_dora": True}, "use_dora"),
        ({"peft_type": "LOHA"}, "peft_type"),
        ({"base_weights_sha256": "0" * 64}, "base_weights_sha256"),
        ({"rank": 9}, "rank 9; expected at most 8"),
        ({"targets": ("embed_tokens",)}, "embed_tokens: got no slot"),
        ({"more": {f"base_model.model.model.layers.0.mlp.{'x' * 3}": np.ones(3, np.float32)}}, "mlp.xxx"),
    ],
)
def test_what_does_not_fit_is_named(
    slots: Path, base: Path, tmp_path: Path, config: dict[str, object], words: str
) -> None:
    bundle = shutil.copytree(slots, tmp_path / "bundle")
    write_adapter(tmp_path / "lora", base, **config)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=words):
        add(bundle, tmp_path / "lora", "tuned")
    assert not (bundle / "adapters").exists()


def test_a_target_without_a_slot_is_named(base: Path, adapters: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(exported(base, replace(OPTIONS, lora=LoraOptions(4, ("q", "v")))), tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"down_proj: got no slot for it; expected q, v.*--lora-targets q,v,down"):
        add(bundle, adapters / "two", "two")


def test_another_base_model_is_named(slots: Path, tmp_path: Path) -> None:
    wide = write_checkpoint(tmp_path / "wide", OLDER | {"hidden_size": 96})
    write_adapter(tmp_path / "shape", wide)
    bundle = shutil.copytree(slots, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"q_proj: got shapes .*trained on org/base"):
        add(bundle, tmp_path / "shape", "tuned")
    alike = write_checkpoint(tmp_path / "alike", OLDER | {"rms_norm_eps": 1e-6})
    weights = alike / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-2] ^= 1
    weights.write_bytes(content)
    write_adapter(tmp_path / "hash", alike, base_model_name_or_path=str(alike))
    with pytest.raises(CheckpointError, match="base_model_name_or_path"):
        add(bundle, tmp_path / "hash", "tuned")
    assert not (bundle / "adapters").exists()


def test_an_adapter_with_nan_is_refused(slots: Path, base: Path, tmp_path: Path) -> None:
    at = "base_model.model.model.layers.1.self_attn.v_proj.lora_A.weight"
    tensors = write_adapter(tmp_path / "lora", base)
    write_adapter(tmp_path / "lora", base, more={at: np.where(tensors[at] > 1, tensors[at], np.nan)})
    bundle = shutil.copytree(slots, tmp_path / "bundle")
    with pytest.raises(CheckpointError, match=r"layers.1.self_attn.v_proj.lora_A: got .* NaN"):
        add(bundle, tmp_path / "lora", "tuned")
    assert not (bundle / "adapters").exists()


def test_a_bundle_without_slots_has_no_adapters(small_export: Path, adapters: Path) -> None:
    with pytest.raises(BundleError, match="--lora-slots"):
        add(small_export, adapters / "one", "one")
    with edgekv.load(small_export) as model, pytest.raises(UsageError, match="--lora-slots"):
        model.generate([3], lora="one")


@pytest.mark.parametrize(
    "lora", ["", "none", "one=0", "one=x", "one,one", "one,two=500", "../one", "two=90", 5, ["one"]]
)
def test_choices_that_cannot_be_are_named(adapted: Path, lora: Any) -> None:
    with edgekv.load(adapted) as model, pytest.raises(UsageError, match="lora"):
        model.generate(TOKENS, lora=lora)


@pytest.mark.parametrize("command", [["bundle", "genai"], ["bundle", "geniex"], ["hub", "compile"]], ids=" ".join)
def test_other_runtimes_refuse_slots_by_name(
    slots: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    output = ["-o", str(tmp_path / "out")] if command[0] == "bundle" else ["--devices", "Samsung Galaxy S24"]
    assert run_command([*command, str(slots), *output]) != 0
    assert "slots for adapters" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_ranks_add_up_to_that_of_the_slots(base: Path, adapters: Path, tmp_path: Path) -> None:
    bundle = shutil.copytree(exported(base, replace(OPTIONS, lora=LoraOptions(7))), tmp_path / "bundle")
    for name in ("one", "two"):
        add(bundle, adapters / name, name)
    with edgekv.load(bundle) as model, pytest.raises(UsageError, match="rank 8 of layer 0, q, with two"):
        model.score(TOKENS, lora="one,two")


def test_a_name_is_taken_or_no_name(adapted: Path, adapters: Path) -> None:
    before = json.loads((adapted / "adapters" / "one" / "adapter.json").read_text())
    with pytest.raises(UsageError):
        add(adapted, adapters / "two", "one")
    with pytest.raises(UsageError, match="--name"):
        add(adapted, adapters / "two", "a/b")
    assert json.loads((adapted / "adapters" / "one" / "adapter.json").read_text()) == before
