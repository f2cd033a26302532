"""Qwen2-VL and Qwen2.5-VL: pictures of any shape, attention within windows, and positions in sections."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from msgspec import structs
from numpy.typing import NDArray
from openai import BadRequestError

import edgekv
from edgekv.bundle import MANIFEST, Bundle, open_bundle
from edgekv.conversation import Conversation
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.model import Model
from edgekv.pictures import (
    PictureEncoder,
    axis_positions,
    cut_tiles,
    encoder_inputs,
    graph_inputs,
    row_places,
)
from edgekv.pictures.tiles import tile_grid
from edgekv.runtime.cpu import CpuEngine
from edgekv.spec import PADDING_PORT, PIXELS_PORT, EncoderSpec
from edgekv.text import SamplingParams
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import VisionEncoder
from exporters.estimate.encoder import encoder_slices
from exporters.inspect.encoder import measure_encoder
from exporters.quantize.encoder import NumpyEncoder, encode
from exporters.quantize.reference import Reference
from tests.support.exports import export_options, exported
from tests.support.picture_models import SHAPED_SIZES, data_uri, photo, png, write_qwen2_5_vl, write_qwen2_vl
from tests.support.serving import NAME, served

_GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "pictures.npz")
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"See {PLACE} and {PLACE} say:"
FILES = [png(photo(*size, number)) for number, size in enumerate(SHAPED_SIZES)]


@dataclass(frozen=True)
class Kind:
    """A family, and what transformers computes with its random checkpoint."""

    name: str
    write: Callable[[Path], Path]

    @property
    def golden(self) -> Mapping[str, NDArray[Any]]:
        return _golden(self.name)


@cache
def _golden(kind: str) -> dict[str, NDArray[Any]]:
    prefix = f"{kind}_"
    return {name.removeprefix(prefix): _GOLDEN[name] for name in _GOLDEN if name.startswith(prefix)}


KINDS = [Kind("qwen2_vl", write_qwen2_vl), Kind("qwen2_5_vl", write_qwen2_5_vl)]


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: kind.name)
def kind(request: pytest.FixtureRequest) -> Kind:
    found: Kind = request.param
    return found


@pytest.fixture(scope="module")
def checkpoint(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(kind.write(tmp_path_factory.mktemp("vlm") / kind.name)))


@pytest.fixture(scope="module")
def vision(checkpoint: Checkpoint) -> VisionEncoder:
    assert checkpoint.vision is not None
    return checkpoint.vision


@pytest.fixture(scope="module")
def bundle(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = kind.write(tmp_path_factory.mktemp("vlm") / kind.name)
    return exported(folder, export_options(context=192, ar=(1, 16)))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with edgekv.load(bundle) as model:
        yield model


def _tiles(vision: VisionEncoder, count: int = 2) -> list[NDArray[np.uint8]]:
    pictures = [photo(*size, number) for number, size in enumerate(SHAPED_SIZES[:count])]
    return [cut_tiles(picture, vision.pictures, vision.spec.image).tiles[0] for picture in pictures]


def _db(found: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.float64]:
    """Of each row."""
    ratios: NDArray[np.float64] = 10 * np.log10(np.square(wanted).sum(-1) / np.square(found - wanted).sum(-1))
    return ratios


def _turned(opened: Bundle, checkpoint: Checkpoint, rows: NDArray[Any]) -> NDArray[np.float32]:
    """Rows in the basis of the bundle's residual."""
    rotation = opened.manifest.recipe.rotation
    if rotation == "none":
        return rows
    return ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(rows)


@pytest.mark.parametrize("number", range(len(SHAPED_SIZES)))
def test_patches_are_those_of_transformers(kind: Kind, vision: VisionEncoder, number: int):
    """There a patch has two frames, both of the same picture."""
    size, golden = SHAPED_SIZES[number], kind.golden
    picture = cut_tiles(photo(*size, number), vision.pictures, vision.spec.image)
    wanted = golden[f"pixels{number}"].reshape(-1, 3, 2, 8, 8)[:, :, 0]
    found = encoder_inputs(picture.tiles[0], vision.spec, vision.pictures).patches
    assert found.shape[0] == wanted.shape[0]
    assert np.abs(found - wanted.reshape(found.shape)).max() < 1e-6
    assert [edge // 8 for edge in picture.tiles[0].shape[:2]] == golden[f"grid{number}"][1:].tolist()


def test_rows_positions_and_logits_are_those_of_transformers(kind: Kind, checkpoint: Checkpoint, vision: VisionEncoder):
    """A prompt with two pictures, at whose edges windows are not full."""
    spec, golden, tiles = checkpoint.spec, kind.golden, _tiles(vision)
    ids = golden["ids"].copy()
    rows = np.concatenate(
        encode(
            NumpyEncoder(vision), vision.spec, [encoder_inputs(tile, vision.spec, vision.pictures) for tile in tiles]
        )
    )
    places = np.concatenate([row_places(*vision.spec.grid_of(*tile.shape[1::-1])) for tile in tiles])
    assert np.abs(rows - golden["rows"]).max() < 1e-4 * np.abs(golden["rows"]).max()
    pictured = ids == vision.pictures.token_id
    of_tokens = np.zeros((len(ids), 3), np.int64)
    of_tokens[:, 2], of_tokens[pictured] = 1, places
    assert np.array_equal(axis_positions(of_tokens), golden["positions"])
    assert {*spec.picture_axes} == {0, 1, 2}
    ids[pictured] = spec.vocab + np.arange(pictured.sum())
    (logits,) = Reference(checkpoint.with_pictures(PicturedRows(rows, places))).logits([ids])
    assert np.abs(logits - golden["logits"]).max() < 1e-4 * np.ptp(golden["logits"])


def test_rows_in_integers_are_those_of_transformers(
    kind: Kind, bundle: Path, checkpoint: Checkpoint, vision: VisionEncoder
):
    opened = open_bundle(bundle)
    wanted = _turned(opened, checkpoint, kind.golden["rows"])
    encoding = opened.manifest.encodings["embedding"]
    exact, mixed, fast = (
        np.concatenate(
            [
                encoding.dequantize(PictureEncoder(opened, CpuEngine(1, mode=mode)).encode(tile).embeddings)
                for tile in _tiles(vision)
            ]
        )
        for mode in ("emulate", "exact16", "fast")
    )
    assert _db(exact, wanted).min() > 30
    assert _db(mixed, exact).min() > 45 and _db(fast, exact).min() > 28
    assert min(layer.rows.min_db for layer in measure_encoder(opened, checkpoint)) > 30


@pytest.mark.parametrize("mode", ["emulate", "fast"])
def test_the_bundle_reads_pictures_as_transformers_does(kind: Kind, bundle: Path, mode: CpuMode):
    """In integers of 8 bits, of a random model that amplifies every rounding."""
    with edgekv.load(bundle, cpu_mode=mode) as model:
        generation = model.generate(PROMPT, max_new_tokens=1, temperature=0.0, return_logits=True, pictures=FILES[:2])
        logits = next(generation).logits
    assert logits is not None and generation.stats.prompt_tokens == len(kind.golden["ids"])
    assert _db(logits, kind.golden["logits"][-1]) > 20


def test_a_conversation_goes_on_behind_a_picture(model: Model):
    """Its second turn has a picture too, and gets what the whole text gets in an empty cache."""
    conversation = Conversation(model, params=SamplingParams(temperature=0.0, max_new_tokens=8))
    for number in range(2):
        answer = conversation.say("What?", [model.open_picture(FILES[number])])
        text = "".join(token.text for token in answer)
    assert answer.stats.cache.reused_tokens > 20
    messages: list[dict[str, Any]] = []
    for number in range(2):
        parts = [{"type": "image", "picture": number}, {"type": "text", "text": "What?"}]
        messages.append({"role": "user", "content": parts})
        if not number:
            messages.append(conversation.messages[1])
    model.sequences.clear()
    fresh = model.generate(messages=messages, pictures=FILES[:2], max_new_tokens=8, temperature=0.0)
    assert "".join(token.text for token in fresh) == text


def test_openai_clients_send_pictures(bundle: Path):
    """What they get is what the package gives; too many are counted before any is decoded."""
    parts: list[Any] = [
        *({"type": "image_url", "image_url": {"url": data_uri(file)}} for file in FILES[:2]),
        {"type": "text", "text": "What?"},
    ]
    with served(bundle) as server:
        client = server.client()
        asked: list[Any] = [{"role": "user", "content": parts}]
        reply = client.chat.completions.create(model=NAME, messages=asked, max_tokens=6, temperature=0.0)
        damaged: Any = [{"type": "image_url", "image_url": {"url": data_uri(FILES[0][:-40])}}] * 20
        with pytest.raises(BadRequestError, match="tokens") as refusal:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": damaged}])
        assert "damaged" not in str(refusal.value)
    with edgekv.load(bundle) as model:
        told: list[Any] = [{"type": "image", "picture": number} for number in range(2)]
        messages = [{"role": "user", "content": [*told, {"type": "text", "text": "What?"}]}]
        generation = model.generate(messages=messages, pictures=FILES[:2], max_new_tokens=6, temperature=0.0)
        assert "".join(token.text for token in generation) == reply.choices[0].message.content


def test_pictures_get_the_nearest_of_the_sizes_of_an_export(kind: Kind, tmp_path: Path):
    """Windows at their edges are not full: there are as many as the size with most of them has."""
    folder = kind.write(tmp_path / kind.name)
    options = export_options(context=96, ar=(1, 16), picture_sizes=((48, 48), (80, 48), (48, 80)))
    opened = open_bundle(exported(folder, options))
    vision = opened.manifest.vision
    assert vision is not None and vision.shown == "pictures of 48 x 48 or 80 x 48 or 48 x 80 pixels"
    assert vision.encoder.rows == 15 and vision.encoder.windows == (6 if kind.name == "qwen2_5_vl" else 0)
    assert vision.encoder.output_rows == (24 if kind.name == "qwen2_5_vl" else 15)
    source = Checkpoint.open(str(folder))
    assert source.vision is not None
    exact, encoder = source.vision.with_sizes(vision.pictures.sizes), PictureEncoder(opened, CpuEngine(1))
    for number, (width, height) in enumerate(vision.pictures.sizes):
        tile = photo(width, height, number)
        (wanted,) = encode(NumpyEncoder(exact), exact.spec, [encoder_inputs(tile, exact.spec, exact.pictures)])
        found = opened.manifest.encodings["embedding"].dequantize(encoder.encode(tile).embeddings)
        assert found.shape == wanted.shape and _db(found, _turned(opened, source, wanted)).min() > 30
    for size, whole in (((400, 390), (48, 48)), ((100, 60), (80, 48)), ((30, 90), (48, 80)), ((1, 1), (48, 48))):
        assert tile_grid(size, vision.pictures, vision.encoder.image).whole == whole
    with edgekv.load(opened.path) as model:
        assert str(model.open_picture(FILES[0])) == "100 x 60 pixels, shown as 80 x 48, 15 tokens"


@given(st.integers(1, 4000), st.integers(1, 4000))
def test_every_picture_fits_the_windows_of_a_graph(width: int, height: int):
    """Each patch has one place, those of a square stand together, and those of a window within its own places."""
    encoder, pictures = _published()
    whole = tile_grid((width, height), pictures, encoder.image).whole
    assert whole is not None
    (down, across), edge = encoder.grid_of(*whole), encoder.window
    inputs = encoder_inputs(np.zeros((whole[1], whole[0], 3), np.uint8), encoder, pictures)
    assert len({*inputs.slots}) == len(inputs.patches) <= encoder.patches and inputs.slots.max() < encoder.slots
    squares = inputs.slots.reshape(-1, encoder.merged)
    assert (squares // encoder.merged == inputs.output_rows(encoder)[:, None]).all()
    rows, columns = np.divmod(np.arange(down * across), across)
    windows = [*zip(rows // edge, columns // edge, inputs.output_rows(encoder) // edge**2, strict=True)]
    assert len({(row, column) for row, column, _ in windows}) == len({*windows}) == len({at for *_, at in windows})


@cache
def _published() -> tuple[EncoderSpec, Any]:
    """The sizes of Qwen2.5-VL-3B, with one layer."""
    from edgekv.spec import ENCODERS, Config

    fields = {
        "model_type": "qwen2_5_vl",
        "hidden_size": 2048,
        "vision_config": {
            "hidden_size": 1280,
            "out_hidden_size": 2048,
            "depth": 1,
            "fullatt_block_indexes": [0],
            "in_chans": 3,
            "spatial_patch_size": 14,
            "tokens_per_second": 2,
        },
    }
    prepared = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
    family = ENCODERS["qwen2_5_vl"]
    return family.describe(Config(fields), Config(prepared)), family.pictures(Config(fields), Config(prepared))


def test_the_published_sizes_have_21_windows():
    """All pictures of 448 x 448 pixels in area, up to four times as long as wide; a longer one is made smaller."""
    encoder, pictures = _published()
    assert (encoder.windows, encoder.window, encoder.rows, encoder.output_rows) == (21, 4, 256, 336)
    assert tile_grid((4032, 3024), pictures, 448).whole == (504, 364)
    assert tile_grid((4000, 1000), pictures, 448).whole == (896, 224)
    assert tile_grid((9000, 1000), pictures, 448).whole == (1120, 140)
    assert tile_grid((9000, 50), pictures, 448).whole == (2352, 28)


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"sizes": [[4096, 4096]]}, "sizes: got 4096 x 4096; expected whole rows, of 16 at most"),
        ({"sizes": [[40, 48]]}, "sizes: got 40 x 48"),
        ({"shapes": {"most": 17}}, "shapes: most: got 17; expected at most 16"),
        ({"shapes": {"windows": 60}}, "shapes: got .*60"),
        ({"shapes": None}, "shapes: got none"),
    ],
)
def test_a_manifest_whose_pictures_have_no_room_is_refused(
    bundle: Path, change: dict[str, Any], found: str, tmp_path: Path
):
    copied = shutil.copytree(bundle, tmp_path / "bundle")
    manifest = json.loads((copied / MANIFEST).read_text())
    pictures = manifest["vision"]["pictures"]
    for name, value in change.items():
        pictures[name] = pictures[name] | value if isinstance(value, dict) else value
    (copied / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(BundleError, match=found):
        open_bundle(copied)


def test_no_patch_sees_a_place_without_one(vision: VisionEncoder, bundle: Path):
    """What stands there changes nothing."""
    record = open_bundle(bundle).manifest.vision
    assert record is not None
    spec, session = record.encoder, CpuEngine(1).session(bundle / record.file)
    inputs = encoder_inputs(_tiles(vision)[0], spec, record.pictures)
    values = graph_inputs(inputs, spec, record.encodings)
    empty = np.setdiff1d(np.arange(spec.inputs), inputs.slots)
    assert len(empty) and (values[PADDING_PORT][..., empty] < values[PADDING_PORT][..., inputs.slots].min()).all()
    (rows,) = session.run(None, values)
    values[PIXELS_PORT][0, 0, empty] = 65535
    (others,) = session.run(None, values)
    at = inputs.output_rows(spec)
    assert np.array_equal(rows[0, 0, at], others[0, 0, at])


@pytest.mark.parametrize(
    ("write", "change", "found"),
    [
        (write_qwen2_5_vl, {"vision_config": {"window_size": 8}}, "window_size: got 8; expected at least 16"),
        (write_qwen2_5_vl, {"vision_config": {"fullatt_block_indexes": [3]}}, "fullatt_block_indexes: .*from 0 to 2"),
        (write_qwen2_5_vl, {"vision_config": {"hidden_act": "gelu"}}, "hidden_act: got 'gelu'; expected 'silu'"),
        (write_qwen2_5_vl, {"vision_config": {"out_hidden_size": 32}}, "out_hidden_size: got 32; expected 64"),
        (write_qwen2_vl, {"vision_config": {"hidden_size": 32}}, "hidden_size: got 32; expected 64"),
        (write_qwen2_vl, {"vision_config": {"embed_dim": 40}}, "embed_dim: got 40; expected a multiple of 4 times"),
        (write_qwen2_vl, {"vision_config": {"hidden_act": "gelu"}}, "hidden_act: got 'gelu'; expected 'quick_gelu'"),
        (write_qwen2_vl, {"vision_config": {"in_chans": 1}}, "in_chans: got 1; expected 3"),
        (
            write_qwen2_vl,
            {"text_config": {"rope_parameters": {"mrope_section": [4, 4]}}},
            "mrope_section: .*together 8",
        ),
    ],
)
def test_what_another_encoder_has_is_refused(
    write: Callable[[Path], Path], change: dict[str, Any], found: str, tmp_path: Path
):
    folder = write(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, fields in change.items():
        for field, value in fields.items():
            own = config[name].get(field)
            config[name][field] = {**own, **value} if isinstance(own, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=found):
        Checkpoint.open(str(folder))


def test_sizes_that_no_picture_can_have_are_refused(vision: VisionEncoder):
    with pytest.raises(UsageError, match=r"--picture-sizes: got 50x48; expected multiples of 16 pixels\. Use 48x48"):
        vision.with_sizes(((50, 48),))


@given(st.integers(1, 40), st.sets(st.integers(0, 39), max_size=12))
def test_slices_of_an_encoder_with_windows_add_up_to_all_its_layers(layers: int, full: set[int]):
    """Of each kind, so that the time of all is that of the slices, weighted."""
    encoder, _ = _published()
    full_layers = tuple(sorted(layer for layer in full if layer < layers))
    slices = encoder_slices(structs.replace(encoder, layers=layers, full_layers=full_layers))
    assert sum(times for _, times in slices) == 1 and max(part.layers for part, _ in slices) <= 8
    assert sum(len(part.full_layers) * times for part, times in slices) == len(full_layers)
    assert sum(part.layers * times for part, times in slices) == layers
