"""Gemma 4 without inputs of layers: an encoder with layers as in its decoder, as transformers computes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import open_bundle
from edgekv.errors import CheckpointError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.model import Model
from edgekv.pictures import EncoderInputs, PictureEncoder, block_order, cut_tiles, encoder_inputs
from edgekv.pictures.tiles import tile_grid
from edgekv.runtime.cpu import CpuEngine
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import VisionEncoder
from exporters.inspect.encoder import measure_encoder
from exporters.quantize.encoder import NumpyEncoder, encode
from exporters.quantize.reference import Reference
from tests.support.exports import export_options, exported
from tests.support.picture_models import SHAPED_SIZES, photo, png, write_gemma4_vl

STORED = np.load(Path(__file__).parents[2] / "golden" / "pictures.npz")


def _golden(prefix: str) -> dict[str, NDArray[Any]]:
    return {name.removeprefix(prefix): value for name, value in STORED.items() if name.startswith(prefix)}


GOLDEN, CLIPPED, LAYERED = map(_golden, ("gemma4_vl_", "gemma4_vl-clipped_", "gemma4_vl-layered_"))
PATCH, MERGE = 4, 3
SIZED = {
    (100, 60): (120, 72),
    (1, 1): (96, 96),
    (700, 3): (840, 12),
    (3, 700): (12, 840),
    (4000, 1): (840, 12),
    (1920, 1080): (132, 72),
    (13, 97): (36, 264),
    (1000, 40): (492, 12),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_gemma4_vl(tmp_path_factory.mktemp("vlm") / "gemma4")))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return exported(write_gemma4_vl(tmp_path_factory.mktemp("vlm") / "gemma4"), export_options(context=192, ar=(1, 16)))


def _tiles(checkpoint: Checkpoint, count: int) -> list[NDArray[np.uint8]]:
    vision = checkpoint.vision
    assert vision is not None
    pictures = [photo(*size, number) for number, size in enumerate(SHAPED_SIZES[:count])]
    return [cut_tiles(picture, vision.pictures, vision.spec.image).tiles[0] for picture in pictures]


def _db(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / max(np.square(found - wanted).sum(), 1e-9)))


def test_pixels_and_places_are_those_of_transformers(checkpoint: Checkpoint):
    vision = checkpoint.vision
    assert vision is not None
    for number, tile in enumerate(_tiles(checkpoint, len(SHAPED_SIZES))):
        pixels, places = GOLDEN[f"pixels{number}"], GOLDEN[f"places{number}"]
        order = block_order(tile.shape[0] // PATCH, tile.shape[1] // PATCH, MERGE)
        wanted = (2 * pixels - 1).reshape(-1, PATCH, PATCH, 3).transpose(0, 3, 1, 2).reshape(len(pixels), -1)[order]
        shown = encoder_inputs(tile, vision.spec, vision.pictures)
        assert np.abs(shown.patches - wanted).max() < 1e-6
        assert shown.places is not None
        found = shown.places.reshape(len(pixels), 2, vision.spec.table_side)
        assert np.array_equal(found.argmax(-1), places[order]) and (found.sum(-1) == 1).all()


def test_rows_and_logits_are_those_of_transformers(checkpoint: Checkpoint):
    vision, spec, ids = checkpoint.vision, checkpoint.spec, GOLDEN["ids"].copy()
    assert vision is not None
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in _tiles(checkpoint, 2)]
    rows = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown))
    assert np.abs(rows - GOLDEN["rows"]).max() < 1e-4 * np.abs(GOLDEN["rows"]).max()
    pictured = ids == vision.pictures.token_id
    ids[pictured] = spec.vocab + np.arange(pictured.sum())
    pictures = PicturedRows(rows, np.zeros((len(rows), 3), np.int64))
    (logits,) = Reference(checkpoint.with_pictures(pictures)).logits([ids])
    assert np.abs(logits[-8:] - GOLDEN["logits"]).max() < 1e-4 * np.ptp(GOLDEN["logits"])


def test_rows_in_integers_are_those_of_transformers(bundle: Path, checkpoint: Checkpoint):
    opened, wanted = open_bundle(bundle), GOLDEN["rows"]
    rotation = opened.manifest.recipe.rotation
    if rotation != "none":
        wanted = ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(wanted)
    modes: tuple[CpuMode, ...] = ("emulate", "fast")
    for mode in modes:
        encoder = PictureEncoder(opened, CpuEngine(1, mode=mode))
        found = np.concatenate([encoder.encode(tile).embeddings for tile in _tiles(checkpoint, 2)])
        assert _db(opened.manifest.encodings["embedding"].dequantize(found), wanted) > 30, mode


@pytest.mark.parametrize(
    ("kind", "golden"), [("bundle", GOLDEN), ("layered_bundle", LAYERED)], ids=["plain", "layered"]
)
def test_logits_behind_pictures_are_those_of_transformers(
    request: pytest.FixtureRequest, kind: str, golden: dict[str, NDArray[Any]]
):
    files = [png(photo(*size, number)) for number, size in enumerate(SHAPED_SIZES[:2])]
    prompt = "See <|image|> and <|image|> say: what are they?"

    def last(model: Model, pictures: list[bytes]) -> NDArray[np.float32]:
        found = model.generate(prompt, pictures=pictures, max_new_tokens=1, temperature=0.0, return_logits=True)
        (logits,) = [token.logits for token in found]
        assert logits is not None
        return logits

    with edgekv.load(request.getfixturevalue(kind)) as model:
        first, other = last(model, files), last(model, files[::-1])
    wanted = golden["logits"][-1]
    assert _db(first, wanted) > 15
    assert _db(other, wanted) < _db(first, wanted) - 6


@pytest.mark.htp
@pytest.mark.parametrize("clipped", [False, True])
def test_the_htp_computes_in_integers_alone(tmp_path: Path, clipped: bool):
    folder = write_gemma4_vl(tmp_path / "gemma4", clipped=clipped)
    opened = open_bundle(exported(folder, export_options(context=192, ar=(1, 16), check_on_htp=True)))
    assert opened.manifest.vision is not None and opened.manifest.htp_check == "integers-only"


@pytest.mark.parametrize(
    ("table", "fields"),
    [
        ("vision_config", {"standardize": True}),
        ("text_config", {"use_bidirectional_attention": "vision"}),
    ],
)
def test_an_encoder_that_computes_otherwise_is_left_out(tmp_path: Path, table: str, fields: dict[str, Any]):
    folder = write_gemma4_vl(tmp_path / "gemma4")
    config = json.loads((folder / "config.json").read_text())
    config[table] |= fields
    (folder / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(str(folder)).vision is None


def test_sizes_of_pictures_are_those_of_transformers(checkpoint: Checkpoint):
    """Those that `get_aspect_ratio_preserving_size` gave, of strips too."""
    vision = checkpoint.vision
    assert vision is not None
    for (width, height), wanted in SIZED.items():
        assert tile_grid((width, height), vision.pictures, vision.spec.image).whole == wanted


def test_pictures_of_chosen_sizes_alone_have_a_table_for_their_edges(checkpoint: Checkpoint):
    assert checkpoint.vision is not None
    vision = checkpoint.vision.with_sizes(((120, 72), (48, 96)))
    assert (vision.spec.table_side, vision.spec.max_patches) == (30, 540)
    wanted = encode(NumpyEncoder(vision), vision.spec, [_shown(vision, photo(*SHAPED_SIZES[0]))])[0]
    assert np.abs(wanted - GOLDEN["rows"][: len(wanted)]).max() < 1e-4 * np.abs(wanted).max()
    with pytest.raises(UsageError, match=r"--picture-sizes: got an edge of 1200 pixels; expected at most 1024"):
        checkpoint.vision.with_sizes(((1200, 12),))


def _shown(vision: VisionEncoder, picture: NDArray[np.uint8]) -> EncoderInputs:
    tile = cut_tiles(picture, vision.pictures, vision.spec.image).tiles[0]
    return encoder_inputs(tile, vision.spec, vision.pictures)


def test_what_matrices_read_and_write_is_clipped(tmp_path: Path):
    """Integers are, as their encodings reach no further."""
    checkpoint = Checkpoint.open(str(write_gemma4_vl(tmp_path / "gemma4", clipped=True)))
    vision, wanted = checkpoint.vision, CLIPPED["rows"]
    assert vision is not None
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in _tiles(checkpoint, 2)]
    rows = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown))
    assert np.abs(rows - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert _db(GOLDEN["rows"], wanted) < 20
    opened = open_bundle(exported(tmp_path / "gemma4", export_options(context=192, ar=(1, 16))))
    rotation = opened.manifest.recipe.rotation
    if rotation != "none":
        wanted = ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(wanted)
    modes: tuple[CpuMode, ...] = ("emulate", "fast")
    for mode in modes:
        encoder = PictureEncoder(opened, CpuEngine(1, mode=mode))
        found = np.concatenate([encoder.encode(tile).embeddings for tile in _tiles(checkpoint, 2)])
        assert _db(opened.manifest.encodings["embedding"].dequantize(found), wanted) > 30, mode
    with pytest.raises(UsageError, match="--format tflite: got a vision encoder with use_clipped_linears"):
        exported(tmp_path / "gemma4", export_options(context=192, ar=(1, 16), graph_format="tflite"))


@pytest.mark.parametrize("end", ["min", "max"])
def test_bounds_on_one_side_of_zero_are_refused(tmp_path: Path, end: str):
    folder = write_gemma4_vl(tmp_path / "gemma4", clipped=True)
    weights = load_file(folder / "model.safetensors")
    name = "model.vision_tower.encoder.layers.1.mlp.up_proj.output_"
    weights[name + end] = np.array(0.5 if end == "min" else -0.5, np.float32)
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"up_proj\.output_min: got .*; expected a minimum below 0"):
        Checkpoint.open(str(folder))


@pytest.fixture(scope="module")
def layered(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """As E2B and E4B: layers of the decoder have inputs of their own, and the last ones share caches."""
    folder = tmp_path_factory.mktemp("vlm") / "gemma4"
    return Checkpoint.open(str(write_gemma4_vl(folder, clipped=True, layered=True)))


@pytest.fixture(scope="module")
def layered_bundle(layered: Checkpoint) -> Path:
    return exported(layered.folder, export_options(context=192, ar=(1, 16)))


def test_what_layers_read_of_pictures_is_that_of_transformers(layered: Checkpoint):
    vision, spec, ids = layered.vision, layered.spec, LAYERED["ids"].copy()
    assert vision is not None and spec.layer_inputs == 8
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in _tiles(layered, 2)]
    rows = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown))
    embedded = rows[:, : spec.hidden]
    assert np.abs(embedded - LAYERED["rows"]).max() < 1e-4 * np.abs(LAYERED["rows"]).max()
    pictured = ids == vision.pictures.token_id
    ids[pictured] = spec.vocab + np.arange(pictured.sum())

    def error(rows: NDArray[np.float32]) -> float:
        (logits,) = Reference(layered.with_pictures(PicturedRows(rows, np.zeros((len(rows), 3), np.int64)))).logits(
            [ids]
        )
        return float(np.abs(logits[-8:] - LAYERED["logits"]).max() / np.ptp(LAYERED["logits"]))

    assert error(rows) < 1e-4
    assert error(np.concatenate([embedded, 0 * rows[:, spec.hidden :]], axis=1)) > 0.02


def test_what_layers_read_of_pictures_in_integers(layered_bundle: Path, layered: Checkpoint):
    opened, vision = open_bundle(layered_bundle), layered.vision
    assert vision is not None
    tiles = _tiles(layered, 2)
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in tiles]
    wanted = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown))[:, layered.spec.hidden :]
    modes: tuple[CpuMode, ...] = ("emulate", "fast")
    for mode in modes:
        encoder = PictureEncoder(opened, CpuEngine(1, mode=mode))
        encoded = [encoder.encode(tile) for tile in tiles]
        rows = np.concatenate([tile.embeddings for tile in encoded])
        assert _db(opened.manifest.encodings["embedding"].dequantize(rows), LAYERED["rows"]) > 30, mode
        behind = np.concatenate([tile.behind for tile in encoded])
        assert _db(opened.manifest.encodings["per_layer_inputs"].dequantize(behind), wanted) > 30, mode
    losses = measure_encoder(opened, layered)
    assert losses[-1].place == "inputs of layers" and losses[-1].worst.name == "vision.layer_rows.weight"
    assert min(layer.rows.mean_db for layer in losses) > 24


@pytest.mark.htp
def test_the_htp_computes_what_layers_read_in_integers_alone(layered: Checkpoint):
    opened = open_bundle(exported(layered.folder, export_options(context=192, ar=(1, 16), check_on_htp=True)))
    assert opened.manifest.vision is not None and opened.manifest.htp_check == "integers-only"


def test_published_files_are_read(layered: Checkpoint, tmp_path: Path):
    """Fields as those of E2B and E4B, some of which no program reads today."""
    folder = write_gemma4_vl(tmp_path / "gemma4", clipped=True, layered=True)
    config = json.loads((folder / "config.json").read_text())
    nothing = {"_name_or_path": "", "architectures": None, "problem_type": None, "chunk_size_feed_forward": 0}
    outputs = {"output_attentions": False, "output_hidden_states": False, "return_dict": True}
    labels = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    config["vision_config"] |= {
        **nothing,
        **outputs,
        **labels,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "default_output_length": 280,
        "dtype": "bfloat16",
        "global_head_dim": 12,
        "hidden_activation": "gelu_pytorch_tanh",
        "initializer_range": 0.02,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
    }
    config["text_config"] |= {"use_bidirectional_attention": None, "num_global_key_value_heads": None}
    config |= {"vision_soft_tokens_per_image": 280, "boa_token_id": 256000, "eoa_token_index": 258883}
    (folder / "config.json").write_text(json.dumps(config))
    prepared = json.loads((folder / "preprocessor_config.json").read_text())
    images = {"image_mean": [0.0] * 3, "image_std": [1.0] * 3, "image_seq_length": 280, "rescale_factor": 1 / 255}
    prepared |= images | {"image_processor_type": "Gemma4ImageProcessor", "resample": 3, "do_convert_rgb": True}
    (folder / "preprocessor_config.json").unlink()
    (folder / "processor_config.json").write_text(json.dumps({"image_processor": prepared, "image_seq_length": 280}))
    opened = Checkpoint.open(str(folder))
    assert opened.vision is not None and layered.vision is not None
    assert (opened.vision.spec, opened.vision.pictures) == (layered.vision.spec, layered.vision.pictures)
    config["vision_config"]["rope_parameters"] = {"rope_theta": 100.0, "rope_type": "linear", "factor": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="rope_type: got 'linear'; expected 'axial' or 'default'"):
        Checkpoint.open(str(folder))
