"""The matrices of a layer as pieces of their own: the integers of the whole layer, and what waits for what."""

from __future__ import annotations

from pathlib import Path

import pytest

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.pipeline.assemble import assemble
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.planning import Exported, Planner
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import PieceStore
from exporters.prepared import prepare
from exporters.progress import silent
from tests.checkpoints import ARCHITECTURES, NEWER, write_checkpoint
from tests.exports import export_options
from tests.folders import contents
from tests.thorough import variants

OPTIONS = {"context": 64, "ar": (1, 16), "calibration_tokens": 256}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("division") / "checkpoint", NEWER)))


def planned(checkpoint: Checkpoint, recipe: str, *, divide: bool) -> tuple[Planner, Exported]:
    planner = Planner(Identity.of(checkpoint), divide=divide)
    return planner, planner.export(prepare(checkpoint, export_options(recipe, **OPTIONS)))


def bundle(checkpoint: Checkpoint, recipe: str, folder: Path, *, divide: bool) -> dict[str, bytes]:
    """The files of an export whose pieces are done one after another in this process."""
    planner, exported = planned(checkpoint, recipe, divide=divide)
    store = PieceStore(str(folder / "pieces"))
    run_serial(planner.plan, exported.names, Inputs(store, Place.of(checkpoint)), silent, resume=False)
    assemble(exported, export_options().device, store, folder / "bundle", force=False)
    return contents(folder / "bundle")


@pytest.mark.parametrize("recipe", variants(["w8a16", "w4a16"], ["w4a16"]))
def test_layers_that_read_the_cache_of_others_wait_for_it(recipe, tmp_path):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["gemma4"])))
    whole = bundle(checkpoint, recipe, tmp_path / "whole", divide=False)
    assert bundle(checkpoint, recipe, tmp_path / "divided", divide=True) == whole


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16"])
def test_a_divided_layer_has_the_same_integers(checkpoint, recipe, tmp_path):
    whole = bundle(checkpoint, recipe, tmp_path / "whole", divide=False)
    assert bundle(checkpoint, recipe, tmp_path / "divided", divide=True) == whole
    assert any(name.startswith("weights-") for name in whole)


@pytest.mark.parametrize(("recipe", "waits"), [("w8a16", False), ("w4a16", True)])
def test_only_recipes_below_8_bits_wait_for_matrices(checkpoint, recipe, waits):
    planner, exported = planned(checkpoint, recipe, divide=True)
    pieces = planner.plan.pieces
    runs = [name for name, each in pieces.items() if each.piece.kind == "run"]
    matrices = {name for name, each in pieces.items() if each.piece.kind == "matrix"}
    assert bool(planner.plan.under([runs[-1]]) & matrices) == waits
    assert matrices <= planner.plan.under([exported.write])


def test_a_divided_layer_has_the_name_of_the_whole(checkpoint):
    def layers(divide: bool) -> list[str]:
        pieces = planned(checkpoint, "w4a16", divide=divide)[0].plan.pieces
        return [name for name, each in pieces.items() if each.piece.kind == "layer"]

    assert layers(True) == layers(False)
