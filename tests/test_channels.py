"""Outlier channels of the residual are split: the same logits, and 16 bits suffice for the other channels."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
from checkpoints import ARCHITECTURES, write_checkpoint
from exports import export_options, exported
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import ChannelRecord, open_bundle
from exporters.checkpoint.channels import outlier_channels
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.evaluate import open_source
from exporters.inspect.tally import Tally
from exporters.inspect.wikitext import Window
from exporters.quantize.recipe import describe_recipe, find_recipe
from exporters.quantize.reference import Reference

OUTLIERS = (5, 40)
TOKENS = np.array([256, *((37 * i * i + 5 * i) % 250 for i in range(60))])
POST_NORMS = ["gemma2", "gemma3", "gemma3-newer", "olmo2", "olmo3"]
PARTS = [ChannelRecord(channel=0, parts=3), ChannelRecord(channel=63, parts=62)]


def opened(folder: Path, name: str) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(folder, ARCHITECTURES[name])))


def write_outliers(folder: Path, name: str, large: float = 1000.0) -> Path:
    """A random model two channels of whose residual are `large` times larger than the others, at every position.

    They are the same for all tokens, as far as the embedding goes. The norms that read the residual make up for it, so
    that the other channels have the effect that they had.
    """
    write_checkpoint(folder, ARCHITECTURES[name])
    tensors = load_file(folder / "model.safetensors")
    offset = np.float32(name.startswith("gemma"))
    gain = 8.0 if offset else 1.0  # Gemma multiplies embeddings by sqrt(hidden)
    rms = large * np.sqrt(len(OUTLIERS) / 64)
    for key, stored in tensors.items():
        values = stored.astype(np.float32)
        if key == "model.embed_tokens.weight":
            values[:, OUTLIERS] = large / gain
        elif "post_attention" in key or "post_feedforward" in key:
            values[list(OUTLIERS)] = large * 0.1 - offset
        elif "pre_feedforward" in key or "input_layernorm" in key or key == "model.norm.weight":
            values = (values + offset) * np.float32(rms) - offset
            values[list(OUTLIERS)] = -offset + 0.1
        tensors[key] = values.astype(stored.dtype)
    save_file(tensors, folder / "model.safetensors")
    return folder


def token_sqnr_db(bundle: Path, folder: Path) -> float:
    tally = Tally()
    with edgekv.load(bundle, threads=1) as model:
        expected = next(Reference(Checkpoint.open(str(folder)), 128).logits([TOKENS]))
        tally.add(Window.of(TOKENS), expected, model.score(TOKENS.tolist()))
    return tally.evaluation("cpu", "").token_sqnr_db


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_logits_stay(tmp_path: Path, name: str) -> None:
    checkpoint = opened(tmp_path, name)
    split = checkpoint.split(PARTS if checkpoint.spec.hidden == 64 else PARTS[:1])
    assert split.spec.hidden > checkpoint.spec.hidden
    exact, found = (next(Reference(each).logits([TOKENS])) for each in (checkpoint, split))
    assert float(np.abs(exact - found).max() / np.ptp(exact)) < 1e-4


def test_some_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    split = opened(tmp_path, "gemma3").split(PARTS)
    for name in ("model.layers.1.mlp.down_proj.weight", "model.embed_tokens.weight", "model.norm.weight"):
        whole = split.tensor(name)
        np.testing.assert_array_equal(split.tensor(name, slice(3, 9)), whole[3:9])
        np.testing.assert_array_equal(split.tensor(name, np.array([8, 2])), whole[[8, 2]])


@pytest.mark.parametrize("name", POST_NORMS)
def test_outliers_are_found_by_the_weights(tmp_path: Path, name: str) -> None:
    plain = opened(tmp_path / "plain", name)
    assert outlier_channels(plain.spec, plain.tensor) == []
    large = Checkpoint.open(str(write_outliers(tmp_path / "large", name)))
    found = outlier_channels(large.spec, large.tensor)
    assert [each.channel for each in found] == list(OUTLIERS)
    assert large.split(found).spec.hidden % 64 == 0


def test_a_residual_that_can_be_rotated_is_not_split(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_outliers(tmp_path, "llama-2")))
    assert outlier_channels(checkpoint.spec, checkpoint.tensor) == []


@pytest.mark.slow
@pytest.mark.parametrize(("name", "large"), [("gemma3-newer", 3000.0), ("olmo3", 1000.0)])
def test_outliers_cost_less_than_3_db(tmp_path: Path, name: str, large: float) -> None:
    """Against the same model with channels so little larger than the others that they cost none of the 16 bits."""
    options = {"context": 128, "ar": (1, 16), "calibration_tokens": 512}
    kept = msgspec.structs.replace(find_recipe("w8a16"), outlier_channels="keep")
    outliers, mild = write_outliers(tmp_path / "outliers", name, large), write_outliers(tmp_path / "mild", name, 30.0)
    usual = token_sqnr_db(exported(mild, export_options(kept, **options)), mild)
    as_they_are = token_sqnr_db(exported(outliers, export_options(kept, **options)), outliers)
    split = token_sqnr_db(exported(outliers, export_options(**options)), outliers)
    assert split > usual - 3
    assert split > as_they_are + 3


def test_the_manifest_says_what_was_split(tmp_path: Path) -> None:
    folder = write_outliers(tmp_path, "gemma3")
    bundle = open_bundle(exported(folder, export_options(context=128, ar=(1, 16), calibration_tokens=512)))
    recipe = bundle.manifest.recipe
    assert [each.channel for each in recipe.split_channels] == list(OUTLIERS)
    assert any("residual, split: 5 into" in line for line in describe_recipe(recipe))
    assert open_source(bundle.manifest, None).spec.hidden == bundle.manifest.model.hidden == 128
