"""The matrices of a layer as pieces of their own: the integers of the whole layer, and what waits for what."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from exporters.sweep.bundles import assemble
from exporters.sweep.planning import Exported, Planner
from exporters.sweep.source import open_checkpoint, prepared_for
from exporters.sweep.store import PieceStore

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import RunOptions, export_bundle
from exporters.lora.options import LoraOptions
from tests.checkpoints import NEWER, write_checkpoint
from tests.test_sweep import COMMON, files, wanted


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("division") / "checkpoint", NEWER)


def planned(checkpoint: Path, recipe: str, *, divide: bool) -> tuple[Planner, Exported]:
    planner = Planner(str(checkpoint), divide=divide)
    (combination,) = [each for each in wanted(devices=("SM8650",)) if each.recipe_name == recipe]
    return planner, planner.export(replace(combination.options(COMMON), calibration_tokens=256))


def bundle(checkpoint: Path, recipe: str, folder: Path, *, divide: bool) -> dict[str, bytes]:
    """The files of an export whose pieces are done one after another in this process."""
    planner, exported = planned(checkpoint, recipe, divide=divide)
    store = PieceStore(str(folder / "pieces"))
    for piece in planner.plan.pieces.values():
        store.make(piece.key, piece.kind, partial(piece.work, store=store))
    (combination, *_) = wanted(devices=("SM8650",))
    assemble(exported, combination.device, store, folder / "bundle", force=False)
    return files(folder / "bundle")


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16"])
def test_a_divided_layer_has_the_same_integers(checkpoint, recipe, tmp_path):
    whole = bundle(checkpoint, recipe, tmp_path / "whole", divide=False)
    assert bundle(checkpoint, recipe, tmp_path / "divided", divide=True) == whole
    assert any(name.startswith("weights-") for name in whole)


@pytest.mark.parametrize(("recipe", "waits"), [("w8a16", False), ("w4a16", True)])
def test_only_recipes_below_8_bits_wait_for_matrices(checkpoint, recipe, waits):
    planner, exported = planned(checkpoint, recipe, divide=True)
    pieces = planner.plan.pieces
    runs = [piece for piece in pieces.values() if piece.kind == "run"]
    matrices = {piece.key for piece in pieces.values() if piece.kind == "matrix"}
    assert bool(planner.plan.under([runs[-1].key]) & matrices) == waits
    assert matrices <= planner.plan.under([exported.write])


def test_slots_for_adapters_have_the_bytes_of_one_machine(checkpoint, tmp_path):
    lora = LoraOptions(rank=4)
    (combination, *_) = wanted(devices=("SM8650",))
    options = replace(combination.options(COMMON), calibration_tokens=256, lora=lora)
    plain, slotted = Planner(str(checkpoint)), Planner(str(checkpoint))
    assert plain.export(replace(options, lora=None)).write != slotted.export(options).write
    store = PieceStore(str(tmp_path / "pieces"))
    for piece in slotted.plan.pieces.values():
        store.make(piece.key, piece.kind, partial(piece.work, store=store))
    assemble(slotted.export(options), options.device, store, tmp_path / "far", force=False)
    export_bundle(
        Checkpoint.open(str(checkpoint)), tmp_path / "near", options, RunOptions(cache_dir=tmp_path / "cache")
    )
    assert files(tmp_path / "far") == files(tmp_path / "near")


def test_another_template_tokenizer_or_default_is_another_bundle(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", NEWER)

    def written() -> str:
        for kept in (open_checkpoint, prepared_for):  # of one command
            kept.cache_clear()
        return planned(folder, "w8a16", divide=False)[1].write

    keys = [written(), written()]
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    keys.append(written())
    (folder / "generation_config.json").write_text('{"do_sample": true, "temperature": 0.5, "eos_token_id": 257}')
    keys.append(written())
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + "\n")
    keys.append(written())
    assert keys[0] == keys[1] and len(set(keys)) == 4


def test_a_divided_layer_has_the_key_of_the_whole(checkpoint):
    def layers(divide: bool) -> list[str]:
        planner, _ = planned(checkpoint, "w4a16", divide=divide)
        return [piece.key for piece in planner.plan.pieces.values() if piece.kind == "layer"]

    assert layers(True) == layers(False)
