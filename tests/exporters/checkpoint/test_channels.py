"""Outlier channels of the residual are split: the same logits, and 16 bits suffice for the other channels."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from edgekv.spec import SplitChannel
from exporters.checkpoint.channels import outlier_channels
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed_as
from exporters.htp.check import floating_nodes
from exporters.inspect import measure_layers
from exporters.inspect.divergence import sqnr_db
from exporters.inspect.evaluate import open_source
from exporters.inspect.tally import Tally, log_softmax
from exporters.inspect.wikitext import Window
from exporters.quantize.recipe import describe_recipe, find_recipe
from exporters.quantize.reference import Floats, Reference
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import ROOT, export_options, exported
from tests.support.thorough import variants

OUTLIERS = (5, 40)
TRAINED_OUTLIERS = (23, 118)
TOKENS = np.array([256, *((37 * i * i + 5 * i) % 250 for i in range(60))])
POST_NORMS = ["exaone4", "gemma2", "gemma3", "gemma3-newer", "olmo2", "olmo3"]
PARTS = [SplitChannel(channel=0, parts=4), SplitChannel(channel=63, parts=64)]
TRAINED = ROOT / "models" / "outliers-600k"
HELD_OUT, CALIBRATION = (ROOT / "models" / "stdlib-4m" / f"{each}.txt" for each in ("heldout", "calibration"))


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


def token_sqnr_db(bundle: Path, folder: Path, text: str | None = None) -> float:
    tally, checkpoint = Tally(), Checkpoint.open(str(folder))
    tokens = TOKENS if text is None else np.array([256, *checkpoint.encode(text)])
    with edgekv.load(bundle, threads=1) as model:
        expected = next(Reference(checkpoint, model.bundle.manifest.context).logits([tokens]))
        tally.add(Window.of(tokens), expected, model.score(tokens.tolist()))
    return tally.evaluation("cpu", "").token_sqnr_db


def trained_outliers(folder: Path, times: float) -> Path:
    """The trained model with its outlier channels `times` as large, and their weights in all norms as much smaller.

    They dominate the mean of squares, so that this changes the model hardly at all.
    """
    shutil.copytree(TRAINED, folder)
    tensors = load_file(folder / "model.safetensors")
    channels = list(TRAINED_OUTLIERS)
    for key, stored in tensors.items():
        values = stored.astype(np.float32)
        if key == "model.embed_tokens.weight":
            values[:, channels] *= times
        elif "post_attention" in key or "post_feedforward" in key:
            values[channels] = (values[channels] + 1) * times - 1
        elif "pre_feedforward" in key or "input_layernorm" in key or key == "model.norm.weight":
            larger = (values + 1) * times - 1
            larger[channels] = (values[channels] + 1) / times - 1 if key == "model.norm.weight" else values[channels]
            values = larger
        tensors[key] = values
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", POST_NORMS)
def test_logits_stay(tmp_path: Path, name: str) -> None:
    checkpoint = opened(tmp_path, name)
    split = checkpoint.as_spec(msgspec.structs.replace(checkpoint.spec, split=tuple(PARTS)))
    assert (split.spec.hidden, split.spec.copies) == (64, 3 + 63)
    exact, found = (next(Reference(each).logits([TOKENS])) for each in (checkpoint, split))
    assert float(np.abs(exact - found).max() / np.ptp(exact)) < 1e-4


def test_some_rows_are_those_of_the_whole(tmp_path: Path) -> None:
    checkpoint = opened(tmp_path, "gemma3")
    split = checkpoint.as_spec(msgspec.structs.replace(checkpoint.spec, split=tuple(PARTS)))
    at = "model.layers.1."
    norms = ("model.norm.weight", at + "input_layernorm.weight", at + "post_attention_layernorm.weight")
    for name in ("model.embed_tokens.weight", "lm_head.weight", at + "mlp.down_proj.weight", *norms):
        whole = split.tensor(name)
        np.testing.assert_array_equal(split.tensor(name, slice(3, 9)), whole[3:9])
        np.testing.assert_array_equal(split.tensor(name, np.array([8, 0])), whole[[8, 0]])


@pytest.mark.parametrize("name", POST_NORMS)
def test_outliers_are_found_by_the_weights(tmp_path: Path, name: str) -> None:
    plain = opened(tmp_path / "plain", name)
    assert outlier_channels(plain.spec, plain.tensor) == []
    large = Checkpoint.open(str(write_outliers(tmp_path / "large", name)))
    found = outlier_channels(large.spec, large.tensor)
    assert [each.channel for each in found] == list(OUTLIERS)
    assert {each.parts for each in found} <= {4**n for n in range(1, 8)}


def test_a_residual_that_can_be_rotated_is_not_split(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(str(write_outliers(tmp_path, "llama-2")))
    assert outlier_channels(checkpoint.spec, checkpoint.tensor) == []


@pytest.mark.slow
def test_outliers_behind_norms_alone_cost_less_than_3_db(tmp_path: Path) -> None:
    """Against the same model with channels so little larger than the others that they cost none of the 16 bits."""
    options = {"context": 128, "ar": (1, 16), "calibration_tokens": 512}
    kept = msgspec.structs.replace(find_recipe("w8a16"), outlier_channels="keep")
    outliers, mild = (write_outliers(tmp_path / str(large), "olmo3", large) for large in (1000.0, 30.0))
    usual = token_sqnr_db(exported(mild, export_options(kept, **options)), mild)
    as_they_are = token_sqnr_db(exported(outliers, export_options(kept, **options)), outliers)
    split = token_sqnr_db(exported(outliers, export_options(**options)), outliers)
    assert split > usual - 3
    assert split > as_they_are + 3


def test_the_trained_model_has_outliers_at_every_position() -> None:
    checkpoint, least = Checkpoint.open(str(TRAINED)), []

    def observe(name: str, values: Floats) -> None:
        if name == "embedding" or name.endswith("_add"):
            others = np.delete(values[1:], TRAINED_OUTLIERS, axis=1)
            least.append(np.abs(values[1:, TRAINED_OUTLIERS]).min() / np.sqrt(np.square(others).mean()))

    text = HELD_OUT.read_text()[:400]
    tokens = np.array([256, *checkpoint.encode(text)])
    logits = next(Reference(checkpoint).logits([tokens], observe=observe))
    assert min(least) > 30  # the least value of an outlier channel, times the others' root mean square
    assert max(least) > 150
    assert -log_softmax(logits[:-1])[np.arange(len(tokens) - 1), tokens[1:]].mean() < math.log(6)  # of 256 bytes


@pytest.mark.slow
@pytest.mark.parametrize("times", variants([1, 8], [8]))
def test_outliers_of_a_trained_model_cost_less_than_3_db(tmp_path: Path, times: int) -> None:
    """Against the same model with channels a quarter as large: 100 or 800 times the others instead of 25.

    Factors of columns help the table of embeddings alone.
    """
    options = {"context": 256, "ar": (1, 32), "calibration_tokens": 2048, "calibration": CALIBRATION}
    kept = msgspec.structs.replace(find_recipe("w8a16"), outlier_channels="keep")
    outliers, mild = (trained_outliers(tmp_path / str(each), each) for each in (times, 0.25))
    text = HELD_OUT.read_text()[:250]
    usual = token_sqnr_db(exported(mild, export_options(kept, **options)), mild, text)
    as_they_are = token_sqnr_db(exported(outliers, export_options(kept, **options)), outliers, text)
    split = token_sqnr_db(exported(outliers, export_options(**options)), outliers, text)
    assert usual > 33
    assert split > usual - 1
    assert as_they_are < usual - (6 if times == 8 else 0)


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.slow
def test_the_htp_computes_split_channels_in_integers(tmp_path: Path) -> None:
    folder = write_outliers(tmp_path, "gemma3")
    bundle = exported(folder, export_options(context=128, ar=(1, 16), calibration_tokens=512))
    (decode,) = [graph for graph in open_bundle(bundle).manifest.graphs if graph.role == "decode"]
    assert floating_nodes([bundle / decode.file], find("SM8650")) == []
    on_htp, on_cpu = (edgekv.load(bundle, engine).score(TOKENS.tolist()) for engine in ("htp", "cpu"))
    assert sqnr_db(on_cpu, on_htp) > 40


def test_layers_of_a_split_model_are_measured(tmp_path: Path) -> None:
    folder = write_outliers(tmp_path, "gemma3")
    bundle = open_bundle(exported(folder, export_options(context=128, ar=(1, 16), calibration_tokens=512)))
    source = open_source(bundle.manifest, None)
    windows = [Window.of(TOKENS)]
    report = measure_layers(
        bundle, make_engine(bundle, EngineOptions("cpu")), transformed_as(bundle, source), windows, "text"
    )
    assert len(report.layers) == source.spec.layers + 2  # embedding and head


def test_the_manifest_says_what_was_split(tmp_path: Path) -> None:
    folder = write_outliers(tmp_path, "gemma3")
    bundle = open_bundle(exported(folder, export_options(context=128, ar=(1, 16), calibration_tokens=512)))
    split = bundle.manifest.model.split
    assert [each.channel for each in split] == list(OUTLIERS)
    assert any("residual, split: 5 into" in line for line in describe_recipe(bundle.manifest.recipe, split))
    assert [each.channel for each in open_source(bundle.manifest, None).spec.split] == list(OUTLIERS)
