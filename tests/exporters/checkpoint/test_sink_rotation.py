"""Values of the sink come to lie on the grid of an 8-bit cache, also with adapters that the slots are calibrated on."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from edgekv.bundle import open_bundle
from edgekv.spec import KINDS, KvTensor
from exporters.checkpoint.aligned import AlignedHead
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.checkpoint.rotate import hadamard
from exporters.checkpoint.sink_rotation import sink_rotation, sink_rotations
from exporters.lora.base import LoraBase
from exporters.lora.options import LoraOptions
from exporters.lora.quantize import folded_factors
from exporters.lora.sink import exact_sink
from exporters.quantize.reference import Reference
from exporters.quantize.survey import survey
from quant import Encoding
from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter

LIMIT, MOST = 127, 127 / 1.1
EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def rotation_of(turn: np.ndarray, step: np.float32) -> np.ndarray:
    none = np.zeros((0, 2), np.float32)
    return AlignedHead(none, none[:, 0], turn, np.array([1, step], np.float32)).rotation


def off_grid(rows: np.ndarray, step: float) -> float:
    """Energy of rounding, in squared steps."""
    return float(np.square(rows / step - np.rint(rows / step)).sum())


def off_grid_of(kind: str, rows: Mapping[str, np.ndarray], encodings: Mapping[str, Encoding]) -> float:
    return sum(off_grid(row, encodings[name].scale) for name, row in rows.items() if kind in name)


@pytest.mark.parametrize("count", [2, 4, 7])
def test_several_values_come_close_to_the_grid(count: int) -> None:
    random = np.random.default_rng(count)
    first = random.standard_normal(64)
    rows = np.stack([first, *(first + 0.2 * random.standard_normal((count - 1, 64)))]).astype(np.float32)
    turn, step = sink_rotations(5.0, rows, LIMIT, MOST)
    rotation = rotation_of(turn, step)
    np.testing.assert_allclose(rotation @ rotation.T, np.eye(64), atol=1e-5)
    assert 5.0 / MOST <= step <= 5.0 / MOST / 0.9 * 1.001
    assert off_grid(rows @ rotation, step) < 0.2 * off_grid(rows @ hadamard(64), 5.0 / MOST)


def test_values_that_adapters_do_not_change_cost_nothing() -> None:
    row = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    turn, step = sink_rotations(5.0, np.stack([row, row, np.zeros_like(row)]), LIMIT, MOST)
    assert off_grid(row @ rotation_of(turn, step), step) < 0.1


def test_one_value_lies_on_the_grid() -> None:
    row = np.random.default_rng(0).standard_normal(32).astype(np.float32)
    turn, step = sink_rotation(5.0, row, 32, LIMIT, MOST)
    assert off_grid(row @ rotation_of(turn, step), step) < 1e-4


@pytest.mark.parametrize("architecture", [NEWER, ARCHITECTURES["qwen3"]], ids=["llama", "qwen3"])
def test_the_rows_are_those_of_the_merged_model(architecture: dict[str, object], tmp_path: Path) -> None:
    base, tokens = write_checkpoint(tmp_path / "base", architecture), [4, 9]
    choices = []
    for seed in range(2):
        write_adapter(tmp_path / f"{seed}", base, EVERY, seed=seed, lora_alpha=1)
        choices.append(AdapterChoice(tmp_path / f"{seed}", 0.5))
    checkpoint, windows = Checkpoint.open(str(base)), np.array([[*tokens, 7, 30]])
    for choice in choices:
        changes = folded_factors(Adapter.open(choice), checkpoint)
        rows = survey(checkpoint, windows, 64, len(tokens), changes=changes).rows
        merged = Checkpoint.open(str(base), [choice])
        seen: dict[str, np.ndarray] = {}
        list(Reference(merged, 64).logits([np.array(tokens)], observe=seen.__setitem__))
        spec = checkpoint.spec
        wanted = {KvTensor(i, kind, h) for i in range(spec.layers) for kind in KINDS for h in range(spec.kv_heads)}
        assert rows.keys() == wanted
        for tensor, row in rows.items():
            np.testing.assert_allclose(row, seen[tensor.past], rtol=1e-3, atol=1e-4)


def test_slots_are_calibrated_for_the_sink_of_their_adapters(tmp_path: Path) -> None:
    base = write_sinking(tmp_path / "base", NEWER)
    write_adapter(tmp_path / "lora", base, EVERY, lora_alpha=1)
    choice, energy = AdapterChoice(tmp_path / "lora", 1.0), []
    for calibrate in ((), (choice,)):
        slots = LoraOptions(4, calibrate=calibrate)
        options = export_options(context=64, ar=(1,), calibration_tokens=512, lora=slots)
        bundle = open_bundle(exported(base, options))
        opened = LoraBase.open(bundle)
        rows = exact_sink(bundle, opened, folded_factors(Adapter.open(choice), opened))
        steps = bundle.manifest.encodings
        energy.append([off_grid_of(kind, rows, steps) for kind in KINDS])
    (keys, values), (calibrated_keys, calibrated_values) = energy
    assert 0 < calibrated_values < 0.3 * values
    assert 0 < calibrated_keys < 0.7 * keys
