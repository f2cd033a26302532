"""Pictures: decoded, cut, encoded and placed in prompts as transformers does."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import zlib
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from openai import BadRequestError, OpenAI
from PIL import Image, ImageFilter, ImageOps
from PIL.PngImagePlugin import PngInfo
from playwright.sync_api import Browser

import edgekv
from devices import find
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.conversation import Conversation
from edgekv.engine.pictures import PictureSent
from edgekv.errors import CheckpointError, ContextFullError, EngineError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.graphs.processor import multiplies_integers
from edgekv.model import Model
from edgekv.pictures import (
    Picture,
    PictureEncoder,
    PictureReader,
    Tile,
    TiledPicture,
    TileGrid,
    cut_tiles,
    decoder_child,
    encoder_inputs,
    expand,
    normalized,
    open_tiles,
    read_picture,
)
from edgekv.pictures.decode import picture_size
from edgekv.pictures.tiles import tile_grid
from edgekv.prefix import StoreConfig
from edgekv.runtime.cpu import CpuEngine
from edgekv.runtime.htp import HtpEngine
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.tflite import TfliteEngine
from edgekv.serve import Limits
from edgekv.spec import CENTER, TABLE, EncoderSpec, PictureSpec, low_of
from edgekv.spec.chat import ChatTemplates
from edgekv.text import SamplingParams
from edgekv.text.tools import render_with_tools
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import VisionEncoder
from exporters.compile import compile_bundle
from exporters.htp.compile_tflite import _operators
from exporters.inspect.encoder import measure_encoder
from exporters.pipeline.encoder import EncoderPiece
from exporters.pipeline.place import Identity
from exporters.pipeline.planning import Planner
from exporters.plan import plan_export
from exporters.quantize.effort import DEFAULT_EFFORT, Effort
from exporters.quantize.encoder import NumpyEncoder, encode, quantize_encoder
from exporters.quantize.pictures import drawn_picture
from exporters.quantize.recipe import find_recipe
from exporters.targets.android.push import open_payload
from exporters.targets.genie.dialog import GeniePipeline
from exporters.targets.genie.folder import GenieVision, open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from exporters.targets.prove import own_tokens
from quant import Method, QuantizedWeight
from tests.support.checkpoints import as_saved, write_checkpoint
from tests.support.exports import export_options, exported, exported_architecture, small_options
from tests.support.picture_models import (
    SHAPED_SIZES,
    SIZES,
    data_uri,
    photo,
    png,
    write_gemma3_vl,
    write_gemma4_vl,
    write_internvl,
    write_lfm2_vl,
    write_qwen2_5_vl,
    write_qwen2_vl,
    write_qwen3_vl,
    write_smolvlm,
)
from tests.support.serving import (
    ERROR,
    IDLE,
    KEPT,
    NAME,
    change_settings,
    drop_files,
    new_chat,
    say,
    served,
    talking_bundle,
)
from tests.support.thorough import variants

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "pictures.npz")
PICTURES = PictureSpec(
    tiling="multiples",
    resample="lanczos",
    longest=2048,
    mean=(0.5, 0.5, 0.5),
    deviation=(0.5, 0.5, 0.5),
    token="<image>",
    token_id=1,
    begin="<f>",
    whole="<w>",
    end="<f>",
    layout="lines",
)


QWEN_WRITES = [write_qwen2_vl, write_qwen2_5_vl, write_qwen3_vl]
WRITES = [write_smolvlm, write_internvl, write_lfm2_vl, *QWEN_WRITES, write_gemma3_vl]


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it is this large."""
    small = png(np.zeros((1, 1, 3), np.uint8))
    header = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4) + small[33:]


def _png16(pixels: np.ndarray[Any, Any]) -> bytes:
    """A PNG of 16 bits a channel, which Pillow does not write; the lower ones are others."""
    height, width, _ = pixels.shape
    wide = (pixels.astype(">u2") << 8 | 77).astype(">u2")
    rows = b"".join(b"\0" + row.tobytes() for row in wide)
    header = width.to_bytes(4) + height.to_bytes(4) + bytes([16, 2, 0, 0, 0])
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        len(data).to_bytes(4) + kind + data + zlib.crc32(kind + data).to_bytes(4) for kind, data in chunks
    )


def _read(content: bytes) -> np.ndarray[Any, Any]:
    return read_picture(content, "p").pixels


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionEncoder:
    found = Checkpoint.open(str(write_smolvlm(tmp_path_factory.mktemp("vlm") / "smolvlm"))).vision
    assert found is not None
    return found


def _rows(vision: VisionEncoder, picture: TiledPicture) -> np.ndarray[Any, Any]:
    inputs = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in picture.tiles]
    return np.concatenate(encode(NumpyEncoder(vision), vision.spec, inputs))


def _pixels(vision: VisionEncoder, picture: TiledPicture) -> np.ndarray[Any, Any]:
    return np.stack([normalized(tile, vision.pictures).transpose(2, 0, 1) for tile in picture.tiles])


def _written(vision: VisionEncoder, picture: TiledPicture) -> str:
    tiles = tuple(Tile(tile, vision.spec.grid_of(tile.shape[1], tile.shape[0])) for tile in picture.tiles)
    placed = Picture(tiles, picture.grid)
    return expand(f"See {vision.pictures.token} and say:", [placed], vision.pictures)


@pytest.mark.parametrize("number", range(len(SIZES)))
def test_pixels_are_those_of_transformers(vision: VisionEncoder, number: int):
    width, height = SIZES[number]
    picture = cut_tiles(photo(width, height, number), vision.pictures, vision.spec.image)
    found, wanted = _pixels(vision, picture), GOLDEN[f"pixels{number}"]
    assert found.shape == wanted.shape and np.abs(found - wanted).max() < 1e-6


def write_unbiased(folder: Path) -> Path:
    return write_internvl(folder, attention_bias=False)


def write_plain(folder: Path) -> Path:
    return write_lfm2_vl(folder, merged_norm=False)


def write_layered(folder: Path) -> Path:
    return write_gemma4_vl(folder, clipped=True, layered=True)


WRITERS = {
    "gemma3-pictures": write_gemma3_vl,
    "gemma4-layered": write_layered,
    "gemma4-pictures": write_gemma4_vl,
    "smolvlm": write_smolvlm,
    "internvl": write_internvl,
    "internvl-unbiased": write_unbiased,
    "lfm2_vl-pictures": write_lfm2_vl,
    "lfm2_vl-plain": write_plain,
    "qwen3_vl-pictures": write_qwen3_vl,
}
SAVED = json.loads((Path(__file__).parents[2] / "golden" / "saved.json").read_text())


@pytest.mark.parametrize("name", WRITERS)
def test_the_encoder_reads_what_transformers_saves(name: str, tmp_path: Path):
    """The rows are those of files that have the names of transformers' classes; nothing that processors write is left
    unread.
    """
    expected = Checkpoint.open(str(WRITERS[name](tmp_path / "written"))).vision
    found = Checkpoint.open(str(as_saved(WRITERS[name](tmp_path / "saved"), SAVED[name]))).vision
    assert expected is not None and found is not None
    assert found.pictures == expected.pictures and found.spec == expected.spec
    picture = cut_tiles(photo(*SIZES[0]), found.pictures, found.spec.image)
    assert np.array_equal(_rows(found, picture), _rows(expected, picture))


@pytest.mark.parametrize("write", WRITES)
def test_the_processor_of_newer_checkpoints_is_read(write: Callable[[Path], Path], tmp_path: Path):
    """transformers 5 writes `processor_config.json` alone; older files of this name say nothing of pixels."""
    folder = write(tmp_path)
    expected = Checkpoint.open(str(folder)).vision
    older, newer = folder / "preprocessor_config.json", folder / "processor_config.json"
    content = json.loads(older.read_text()) | {"do_rescale": True, "rescale_factor": 1 / 255, "data_format": None}
    newer.write_text(json.dumps({"image_processor": content, "processor_class": "SmolVLMProcessor"}))
    older.unlink()
    found = Checkpoint.open(str(folder)).vision
    assert expected is not None and found is not None
    assert found.pictures == expected.pictures and found.spec == expected.spec
    newer.write_text(json.dumps({"image_seq_len": 64, "processor_class": "SmolVLMProcessor"}))
    with pytest.raises(CheckpointError, match=r"preprocessor_config\.json: got no such file"):
        Checkpoint.open(str(folder))


@pytest.mark.parametrize(
    ("write", "prefix"),
    [(write_smolvlm, ""), (write_internvl, "internvl_"), (write_unbiased, "internvl-unbiased_")],
)
def test_the_float_encoder_gives_the_rows_of_transformers(write: Callable[[Path], Path], prefix: str, tmp_path: Path):
    checkpoint = Checkpoint.open(str(write(tmp_path / "checkpoint")))
    vision = checkpoint.vision
    assert vision is not None
    picture = cut_tiles(photo(*SIZES[0]), vision.pictures, vision.spec.image)
    assert np.abs(_pixels(vision, picture) - GOLDEN[prefix + ("pixels" if prefix else "pixels0")]).max() < 1e-6
    wanted = GOLDEN[prefix + "rows"]
    assert np.abs(_rows(vision, picture) - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert checkpoint.encode(_written(vision, picture)) == GOLDEN[prefix + "ids"].tolist()


def _shaped_tiles(vision: VisionEncoder, prefix: str, number: int) -> list[NDArray[np.uint8]]:
    """What transformers made of a picture, as pixels: its patches are rows, columns and channels."""
    tiles, patch = list[NDArray[np.uint8]](), vision.spec.patch
    kinds = (GOLDEN[f"{prefix}{kind}{number}"] for kind in ("pixels", "shapes"))
    for patches, (rows, columns) in zip(*kinds, strict=True):
        values = patches[: rows * columns].reshape(rows, columns, patch, patch, 3).transpose(0, 2, 1, 3, 4)
        pixels = (values * vision.pictures.deviation + vision.pictures.mean) * 255
        tiles.append(pixels.round().astype(np.uint8).reshape(rows * patch, columns * patch, 3))
    return tiles


@pytest.mark.parametrize("number", range(len(SHAPED_SIZES)))
def test_tiles_of_pictures_with_shapes_are_those_of_transformers(number: int, tmp_path: Path):
    """They are resized by Pillow here and by torchvision there, which rounds some values the other way."""
    vision = Checkpoint.open(str(write_lfm2_vl(tmp_path))).vision
    assert vision is not None
    size = SHAPED_SIZES[number]
    picture = cut_tiles(photo(*size, number), vision.pictures, vision.spec.image)
    wanted = _shaped_tiles(vision, "lfm2_vl_", number)
    assert [tile.shape for tile in picture.tiles] == [tile.shape for tile in wanted]
    for tile, expected in zip(picture.tiles, wanted, strict=True):
        assert np.abs(tile.astype(int) - expected).max() <= 1
    assert picture.grid == tile_grid(size, vision.pictures, vision.spec.image)


@pytest.mark.parametrize(("write", "prefix"), [(write_lfm2_vl, "lfm2_vl_"), (write_plain, "lfm2_vl-plain_")])
def test_the_float_encoder_reads_pictures_of_several_shapes_as_transformers_does(
    write: Callable[[Path], Path], prefix: str, tmp_path: Path
):
    checkpoint = Checkpoint.open(str(write(tmp_path / "checkpoint")))
    vision = checkpoint.vision
    assert vision is not None
    picture = cut_tiles(photo(*SHAPED_SIZES[0]), vision.pictures, vision.spec.image)
    given = replace(picture, tiles=tuple(_shaped_tiles(vision, prefix, 0)))
    wanted = GOLDEN[prefix + "rows"]
    assert np.abs(_rows(vision, given) - wanted).max() < 1e-4 * np.abs(wanted).max()
    assert checkpoint.encode(_written(vision, picture)) == GOLDEN[prefix + "ids"].tolist()


@pytest.mark.parametrize(("width", "height"), [(700, 3), (3, 700), (1, 20_000), (4000, 3000)])
def test_a_picture_of_any_shape_has_as_many_rows_as_it_may(width: int, height: int, tmp_path: Path):
    """transformers fails on a long strip: its rows are more than it has places for."""
    vision = Checkpoint.open(str(write_lfm2_vl(tmp_path))).vision
    assert vision is not None and vision.pictures.shapes is not None
    picture = cut_tiles(np.zeros((height, width, 3), np.uint8), vision.pictures, vision.spec.image)
    for tile in picture.tiles:
        assert 1 <= vision.spec.rows_of(tile.shape[1], tile.shape[0]) <= vision.pictures.shapes.most


@pytest.mark.parametrize(("write", "prefix"), [(write_lfm2_vl, "lfm2_vl_"), (write_plain, "lfm2_vl-plain_")])
def test_lfm2_vl_runs_as_a_bundle(write: Callable[[Path], Path], prefix: str, tmp_path: Path):
    """Its rows in integers, those of a whole picture with padding too, are those of transformers to 30 dB."""
    bundle = exported(write(tmp_path / "lfm2_vl"), export_options(context=192, ar=(1, 16)))
    opened, checkpoint = open_bundle(bundle), Checkpoint.open(str(tmp_path / "lfm2_vl"))
    vision, rotation = checkpoint.vision, opened.manifest.recipe.rotation
    assert vision is not None
    encoder, embedding = PictureEncoder(opened, CpuEngine(1)), opened.manifest.encodings["embedding"]
    tiles = _shaped_tiles(vision, prefix, 0)
    rows = np.concatenate([embedding.dequantize(encoder.encode(tile).embeddings) for tile in tiles])
    wanted = GOLDEN[prefix + "rows"]
    if rotation != "none":
        wanted = ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(wanted)
    power, noise = np.square(wanted).sum(-1), np.square(rows - wanted).sum(-1)
    assert 10 * np.log10(power.sum() / noise.sum()) > 30
    assert (10 * np.log10(power / noise)).min() > 24  # the worst row
    with edgekv.load(bundle) as model:
        generation = model.generate(
            "See <image> and say:",
            max_new_tokens=1,
            temperature=0.0,
            return_logits=True,
            pictures=[png(photo(*SHAPED_SIZES[0]))],
        )
        logits, expected = next(generation).logits, GOLDEN[prefix + "logits"][-1]
        assert generation.stats.prompt_tokens == len(GOLDEN[prefix + "ids"])
    assert logits is not None
    assert 10 * np.log10(np.square(expected).sum() / np.square(logits - expected).sum()) > 20


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_smolvlm(tmp_path_factory.mktemp("vlm") / "smolvlm")
    return exported(folder, export_options(context=192, ar=(1, 16)))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with edgekv.load(bundle) as model:
        yield model


def _tokens(model: Model, prompt: str = "See <image> and say:", **keywords: Any) -> tuple[list[int], int]:
    generation = model.generate(prompt, max_new_tokens=6, temperature=0.0, **keywords)
    return [token.id for token in generation], generation.stats.cache.reused_tokens


def test_the_bundle_reads_a_picture_as_transformers_does(model: Model):
    """In integers of 8 bits, of a random model that amplifies every rounding."""
    generation = model.generate(
        "See <image> and say:", max_new_tokens=1, temperature=0.0, return_logits=True, pictures=[png(photo(*SIZES[0]))]
    )
    logits, wanted = next(generation).logits, GOLDEN["logits"][-1]
    assert logits is not None and generation.stats.prompt_tokens == len(GOLDEN["ids"])
    assert 10 * np.log10(np.square(wanted).sum() / np.square(logits - wanted).sum()) > 20


def test_internvl_runs_as_a_bundle(tmp_path: Path):
    bundle = exported(write_internvl(tmp_path / "internvl"), export_options(context=192, ar=(1, 16)))
    with edgekv.load(bundle) as model:
        generation = model.generate(
            "See <IMG_CONTEXT> and say:",
            max_new_tokens=1,
            temperature=0.0,
            return_logits=True,
            pictures=[png(photo(*SIZES[0]))],
        )
        logits, wanted = next(generation).logits, GOLDEN["internvl_logits"][-1]
    assert logits is not None
    assert 10 * np.log10(np.square(wanted).sum() / np.square(logits - wanted).sum()) > 20


def test_a_cache_tells_pictures_apart(model: Model):
    first, other = png(photo(70, 45)), png(photo(70, 45, 3))
    before = len(model.encode("See "))
    shown, _ = _tokens(model, pictures=[first], sequence=1)
    assert _tokens(model, pictures=[first], sequence=1) == (shown, len(GOLDEN["ids"]) - 1)
    again, reused = _tokens(model, pictures=[other], sequence=1)
    assert again != shown and before <= reused < before + 4  # of the prompt, up to the first row


def test_a_prefix_on_disk_belongs_to_its_picture(bundle: Path, tmp_path: Path):
    first, other = png(photo(70, 45)), png(photo(70, 45, 3))
    with edgekv.load(bundle, prefix_cache=tmp_path) as model:
        shown, _ = _tokens(model, pictures=[first])
    with edgekv.load(bundle, prefix_cache=tmp_path) as model:
        generation = model.generate("See <image> and say:", max_new_tokens=6, temperature=0.0, pictures=[first])
        assert [token.id for token in generation] == shown and generation.stats.cache.restored_tokens >= 32
        assert not any(tile.encode_ms for each in generation.pictures for tile in each.tiles)  # none was run
        assert _tokens(model, pictures=[other])[0] != shown


def test_prompts_and_pictures_must_agree(model: Model):
    picture = png(photo(70, 45))
    with pytest.raises(UsageError, match="got 2 times <image>; expected 1, one for each picture"):
        model.generate("<image> <image>", pictures=[picture])
    with pytest.raises(ContextFullError, match="at most 192"):
        model.generate("What?", pictures=[picture] * 9)


def test_too_many_pictures_are_refused_before_any_is_decoded(
    bundle: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    chromium: Browser,
):
    """By the library, `generate`, `chat` and the page; a policy that evicts tokens has room for them."""
    file = tmp_path / "photo.png"
    file.write_bytes(png(photo(70, 45)))
    decoded = list[int]()
    read = PictureReader.open
    monkeypatch.setattr(PictureReader, "open", lambda self, number: (decoded.append(number), read(self, number))[1])
    found = "pictures: got 306 tokens; expected at most 192, the context of the bundle"
    with edgekv.load(bundle) as model, pytest.raises(ContextFullError, match=found):
        model.generate("What?", pictures=[file] * 9)
    many = ["--image", str(file)] * 9
    for command in (["generate", str(bundle), "--prompt", "What?"], ["chat", str(bundle), "--message", "What?"]):
        assert run([*command, *many]) != 0
        assert found in " ".join(capsys.readouterr().err.split())
    with served(bundle) as server, new_chat(chromium, server) as chat:
        drop_files(chat, **{f"photo{number}": file.read_bytes() for number in range(9)})
        chat.wait("dropped.length === 9")
        say(chat, "What?")
        chat.wait(f"{IDLE} && {ERROR}.includes('tokens')")
        chat.messages.clear()
    assert not decoded
    with edgekv.load(bundle, policy="sliding-window") as model:
        assert [*model.generate("What?", max_new_tokens=1, pictures=[file] * 9)] and len(decoded) == 9


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (png(photo(40, 30))[:200], "a damaged file"),
        (png(photo(40, 30), "JPEG")[:300], "a damaged file"),
        (b"GIF89a" + bytes(20), "a damaged file|another kind|0 x 0"),
        (png(photo(40, 30), "WEBP")[:200], "a damaged file|another kind"),
        (png(photo(40, 30), "BMP")[:200], "a damaged file"),
        (png(photo(40, 30), "TIFF"), "a file of another kind"),
        (b"\x00\x01 no picture", "a file of another kind"),
        (b"%PDF-1.7 a document that says it is a picture", "a file of another kind"),
        (b"", "a file of another kind"),
        (_bomb(0, 4), "a damaged file: its header is wrong"),
        (png(photo(40, 30), "BMP")[:18] + bytes(8) + png(photo(40, 30), "BMP")[26:], "a damaged file"),
        (_bomb(60_000, 60_000), "60,000 x 60,000 pixels|far more"),
        (_bomb(14_000, 14_000), "14,000 x 14,000 pixels; expected at most 184,549,376 pixels in such a file"),
    ],
)
def test_bad_pictures_are_refused_by_name(content: bytes, found: str):
    with pytest.raises(UsageError, match=found):
        read_picture(content, "picture")


def test_odd_pictures_are_read_as_they_look():
    pixels = photo(40, 24)
    cmyk = BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG", quality=95)
    assert np.abs(_read(cmyk.getvalue()).astype(int) - pixels).mean() < 12
    gray = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    assert (_read(png(gray))[..., 0] == gray >> 8).all()
    assert (_read(png(gray, transparency=0))[0, 0] == 255).all() and not _read(png(gray))[0, 0].any()
    clear = np.zeros((4, 4, 4), np.uint8)
    for kind in ("PNG", "WEBP"):
        assert (_read(png(clear, kind)) == 255).all()  # what is transparent is on white
    for width, height in ((1, 1), (20_000, 1), (1, 20_000)):
        picture = cut_tiles(np.zeros((height, width, 3), np.uint8), PICTURES, 512)
        assert picture.tiles[-1].shape == (512, 512, 3) and len(picture.tiles) in (5, 17)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_picture_is_turned_as_its_exif_says(orientation: int, kind: str):
    exif = Image.Exif()
    exif[0x0112] = orientation
    content = png(photo(40, 24), kind, exif=exif)
    turned = ImageOps.exif_transpose(Image.open(BytesIO(content))).convert("RGB")
    read = read_picture(content, "p")
    assert np.array_equal(read.pixels, np.asarray(turned))
    assert read.size == turned.size == picture_size(content, "p")


@pytest.mark.parametrize("kind", ["PNG", "WEBP"])
def test_a_damaged_exif_turns_nothing(kind: str):
    """It says nothing of the pixels, which are whole."""
    content = png(photo(40, 24), kind, exif=b"Exif\0\0no directory")
    read = read_picture(content, "p")
    assert read.size == (40, 24) == picture_size(content, "p")
    assert np.array_equal(read.pixels, _read(png(photo(40, 24), kind)))


def test_bits_and_palettes_of_png_are_read_as_they_look():
    """Of 1 to 16 bits, with a color that is clear, or how clear each is; long texts beside them are skipped."""
    pixels = photo(40, 24)
    picture, clear = Image.fromarray(pixels), np.zeros((24, 40, 2), np.uint8)
    for mode in ("1", "L", "P"):
        file, transparent = BytesIO(), BytesIO()
        made = picture.quantize(16) if mode == "P" else picture.convert(mode)
        made.save(file, "PNG")
        made.save(transparent, "PNG", transparency=(last := int(np.asarray(made).max())))
        plain, over = _read(file.getvalue()), _read(transparent.getvalue())
        of_last = np.asarray(made) == last
        assert np.array_equal(plain, np.asarray(made.convert("RGB"))) and np.array_equal(
            over[~of_last], plain[~of_last]
        )
        assert (over[of_last] == 255).all()
    assert (_read(png(clear)) == 255).all()  # gray with alpha
    text = PngInfo()
    text.add_text("workflow", "x" * (2 << 20), zip=True)
    assert np.array_equal(_read(png(pixels, pnginfo=text)), pixels)
    rows = (np.arange(24 * 40 * 3).reshape(24, 40, 3) % 256).astype(np.uint8)
    assert np.array_equal(_read(_png16(rows)), rows)


@pytest.mark.parametrize(("kind", "options"), [("GIF", {}), ("PNG", {}), ("WEBP", {"lossless": True})])
def test_an_animation_is_its_first_picture(kind: str, options: dict[str, Any]):
    frames, file = [Image.fromarray(photo(16, 12, number)).quantize(16) for number in range(3)], BytesIO()
    frames[0].save(file, kind, save_all=True, append_images=frames[1:], **options)
    with Image.open(file) as image:
        assert image.is_animated
    assert np.array_equal(_read(file.getvalue()), np.asarray(frames[0].convert("RGB")))


_LARGE = np.asarray(Image.fromarray(photo(408, 300)).filter(ImageFilter.GaussianBlur(4)))


@pytest.mark.parametrize(
    "content",
    [
        png(_LARGE),
        png(np.dstack([_LARGE, np.full((300, 408), 255, np.uint8)])),
        png(_LARGE[..., 0].astype(np.uint16) << 8),
        *(png(_LARGE, kind) for kind in ("JPEG", "WEBP", "GIF", "BMP")),
        png(_LARGE, "JPEG", progressive=True),
    ],
    ids=["rgb", "rgba", "16-bit", "jpeg", "webp", "gif", "bmp", "progressive"],
)
def test_a_huge_picture_is_made_smaller_while_it_is_read(content: bytes, monkeypatch: pytest.MonkeyPatch):
    """Its tiles are nearly those of the whole picture, and as many."""
    whole = read_picture(content, "p")
    monkeypatch.setattr("edgekv.pictures.decode.MAX_READ_PIXELS", 136 * 100)
    monkeypatch.setattr("edgekv.pictures.decode._STRIP_PIXELS", 5000)
    read = read_picture(content, "p")
    smaller = (75, 102, 3) if content.startswith(b"\xff\xd8") else (100, 136, 3)  # halves, or any whole number
    assert read.size == whole.size == (408, 300) and read.pixels.shape == smaller
    pictures = msgspec.structs.replace(PICTURES, longest=100)
    found, wanted = (cut_tiles(each.pixels, pictures, 32, each.size) for each in (read, whole))
    assert found.grid == wanted.grid
    differences = np.stack(found.tiles).astype(int) - np.stack(wanted.tiles)
    assert np.abs(differences).mean() < 1.5


def test_pictures_are_decoded_in_a_child_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file, pixels = tmp_path / "picture.png", photo(700, 3)
    file.write_bytes(png(pixels))
    found, wanted = open_tiles(file, "p", PICTURES, 512), cut_tiles(pixels, PICTURES, 512)
    assert len(found.tiles) == len(wanted.tiles) and all(map(np.array_equal, found.tiles, wanted.tiles))
    assert found.grid == wanted.grid and found.grid.size == (700, 3)
    with pytest.raises(UsageError, match="No such file"):
        open_tiles(tmp_path / "none.png", "--image", PICTURES, 512)
    with pytest.raises(UsageError, match=r"^picture: got a damaged file: .*\. Save or fetch it again"):
        open_tiles(png(pixels)[:100], "picture", PICTURES, 512)
    with pytest.raises(UsageError, match="at most 32 MiB"):
        open_tiles(bytes(33 << 20), "picture", PICTURES, 512)
    monkeypatch.setattr(decoder_child, "_LIMITS", replace(decoder_child._LIMITS, timeout_s=0.001))
    with pytest.raises(UsageError, match=r"a picture whose decoding ended with no answer within 0\.001 s"):
        open_tiles(file, "picture", PICTURES, 512)


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory of a process")
@pytest.mark.parametrize(
    ("kind", "mode", "size", "options"),
    [
        ("JPEG", "RGB", (16320, 12240), {}),
        ("JPEG", "RGB", (11100, 11000), {"progressive": True, "subsampling": 0}),
        ("PNG", "RGBA", (13580, 13580), {}),
        ("WEBP", "RGBA", (6075, 6075), {"lossless": True, "method": 0}),
    ],
    ids=["jpeg", "progressive", "rgba", "webp"],
)
def test_the_largest_pictures_fit_the_memory_of_the_child(
    kind: str, mode: str, size: tuple[int, int], options: dict[str, Any]
):
    """A photo of 200 million pixels is read."""
    content = BytesIO()
    Image.new(mode, size).save(content, kind, **options)
    assert open_tiles(content.getvalue(), "picture", PICTURES, 512).grid.size == size


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory of a process")
def test_the_memory_of_a_picture_is_limited(monkeypatch: pytest.MonkeyPatch):
    content = png(np.zeros((6000, 6000, 4), np.uint8))
    monkeypatch.setattr(decoder_child, "_LIMITS", replace(decoder_child._LIMITS, memory_bytes=256 << 20))
    with pytest.raises(UsageError, match="a picture that takes more memory; expected one that is decoded in 1,024 MiB"):
        open_tiles(content, "picture", PICTURES, 512)


def test_a_conversation_encodes_each_picture_once(model: Model):
    conversation = Conversation(model, params=SamplingParams(max_new_tokens=4, temperature=0.0))
    picture = model.open_picture(png(photo(70, 45)))
    first = conversation.say("What?", [picture])
    assert list(first) and first.stats.prompt_tokens > picture.tokens == 20
    second = conversation.say("And now?")
    assert list(second) and second.stats.cache.reused_tokens >= first.stats.prompt_tokens
    assert [token.id for token in conversation.regenerate()]
    with pytest.raises(UsageError, match="turns with pictures"):
        conversation.save(Path("unwritten.json"))


def test_pictures_that_come_again_are_not_decoded_again(bundle: Path, monkeypatch: pytest.MonkeyPatch):
    """As a server gets them with each turn of a conversation."""
    first, other = png(photo(70, 45)), png(photo(70, 45, 3))
    with edgekv.load(bundle) as model:
        opened = model.open_picture(first)
        assert model.open_picture(first) is opened and model.open_picture(other) is not opened
        with model.pictures.opening([PictureSent(first, "picture", is_split=False)]) as opening:
            whole = opening.open(0)
        assert len(whole.tiles) == 1 and whole.tokens == 4
        monkeypatch.setattr("edgekv.engine.pictures._KEPT_BYTES", 1)
        model.open_picture(other)
        assert model.open_picture(first) is not opened


def test_what_one_user_sent_is_decoded_and_encoded_again_for_another(bundle: Path):
    """Otherwise the time of an answer tells who has seen a picture. Neither share its rows in a cache."""
    content = png(photo(70, 45))
    with edgekv.load(bundle, prefix_cache=StoreConfig()) as model:
        opened = dict[str | None, Picture]()
        for salt in (None, "one", "two"):
            with model.pictures.opening([PictureSent(content, "picture")], salt) as opening:
                assert opening.opened == [None]
                opened[salt] = opening.open(0)
            with model.pictures.opening([PictureSent(content, "picture")], salt) as opening:
                assert opening.opened == [opened[salt]]
        tiles = [tile for picture in opened.values() for tile in picture.tiles]
        assert len({id(tile) for tile in tiles}) == len({tile.ids for tile in tiles}) == 3 * 5
        texts = [
            "".join(token.text for token in model.generate("<image>", 4, pictures=[content], cache_salt=salt))
            for salt in opened
        ]
        assert len(set(texts)) == 1 and all(tile.encode_ms for tile in tiles)


def test_openai_clients_send_pictures(model: Model, bundle: Path):
    counts = list[int]()

    def ask(client: OpenAI, url: str, **detail: str) -> str | None:
        parts: Any = [{"type": "image_url", "image_url": {"url": url, **detail}}, {"type": "text", "text": "What?"}]
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": parts}], max_tokens=4, temperature=0.0
        )
        assert answer.usage is not None
        counts.append(answer.usage.prompt_tokens)
        return answer.choices[0].message.content

    picture = png(photo(70, 45), "JPEG")
    encoded = b64encode(picture).decode()
    with served(bundle) as server:
        client = server.client()
        shown = ask(client, f"data:image/jpeg;base64,{encoded}")
        assert shown == ask(client, f"data:image/png;base64,{encoded}")  # its content says what it is
        written_otherwise = f"DATA:image/JPEG;name=a b;charset=utf-8;base64,{encoded[:40]}%0A {encoded[40:]}"
        assert shown == ask(client, written_otherwise.replace("+", "%2B"), detail="high")
        assert shown == ask(client, f" data:application/octet-stream;base64,{encoded.rstrip('=')}\n")
        ask(client, f"data:image/jpeg;base64,{encoded}", detail="low")
        assert counts[0] > 20 and counts[0] - 16 > counts[-1] > 4  # one tile of five
        with pytest.raises(BadRequestError, match=r"image_url.detail: got 'most'; expected auto, low or high"):
            ask(client, f"data:image/jpeg;base64,{encoded}", detail="most")
        for url, found in {
            "https://example.org/picture.png": "the server fetches nothing",
            "file:///etc/passwd": "the server fetches nothing",
            "data:image/png,%89PNG": "expected a data URI",
            "data:image/png;base64,QUJDR": "whole base64",
            "data:text/plain;base64,aGk=": "expected a data URI",
            "data:image/png;base64,aGk=": "a file of another kind",
            f"data:image/png;base64,{encoded[:-60]}": "a damaged file",
            "data:image/png;base64,#": "whole base64",
        }.items():
            with pytest.raises(BadRequestError, match=found):
                ask(client, url)
        part: Any = {"type": "input_image", "detail": "high", "image_url": f"data:image/jpeg;base64,{encoded}"}
        asked: Any = [{"role": "user", "content": [part, {"type": "input_text", "text": "What?"}]}]
        first = client.responses.create(model=NAME, input=asked, max_output_tokens=4, temperature=0.0)
        assert first.output_text == shown
        more = client.responses.create(
            model=NAME, input="And now?", previous_response_id=first.id, max_output_tokens=2, temperature=0.0
        )
        assert first.usage is not None and more.usage is not None
        assert more.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens
        asked[0]["content"][0]["image_url"] = "https://example.org/picture.png"
        with pytest.raises(BadRequestError, match=r"input\[0\].content\[0\].image_url: .* the server fetches nothing"):
            client.responses.create(model=NAME, input=asked)
    generation = model.generate(
        messages=[{"role": "user", "content": [{"type": "image", "picture": 0}, {"type": "text", "text": "What?"}]}],
        max_new_tokens=4,
        temperature=0.0,
        pictures=[picture],
    )
    assert "".join(token.text for token in generation) == shown


def test_a_text_may_have_the_token_of_pictures_beside_one(model: Model, bundle: Path):
    """In messages, parts stand for pictures: what people write is text."""
    picture, text = png(photo(70, 45)), "Is <image> or <image> a token?"
    vocab = model.bundle.manifest.model.vocab

    def prompt(text: str) -> list[int]:
        parts = [{"type": "image", "picture": 0}, {"type": "text", "text": text}]
        messages = [{"role": "user", "content": parts}]
        return list(model.generate(messages=messages, max_new_tokens=1, pictures=[picture]).prompt)

    found, plain = prompt(text), prompt("")
    assert [token for token in found if token >= vocab] == [token for token in plain if token >= vocab]
    assert text in model.tokenizer.decode([token for token in found if token < vocab], skip_special_tokens=False)
    conversation = Conversation(model)
    for _ in range(2):
        "".join(token.text for token in conversation.say(text, [model.open_picture(picture)]))
    url = f"data:image/png;base64,{b64encode(picture).decode()}"
    parts = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    with served(bundle) as server:
        body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200 and answer["usage"]["prompt_tokens"] == len(found)


@pytest.mark.parametrize("sees", ["all", "user", "user, with text of tools"])
def test_a_picture_of_a_tool_is_shown(model: Model, sees: str):
    """By the template, or by the user where it shows none in a tool's result."""
    source = (
        "{% for m in messages %}[{{ m.role }}]{% for p in m.content if m.content is not string %}"
        "{% if p.type == 'image' %}<image>{% else %}{{ p.text }}{% endif %}{% endfor %}"
        "{{ m.content if m.content is string }}{% endfor %}{# <tool_call> #}"
    )
    if sees != "all":
        source = source.replace("if p.type == 'image'", "if p.type == 'image' and m.role == 'user'")
    if sees == "user, with text of tools":
        source = source.replace("[{{ m.role }}]", "[{{ m.role }}]{{ m.content + '' if m.role == 'tool' }}")
    templates = ChatTemplates(templates={"default": source})
    picture = model.open_picture(png(photo(20, 20)))
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages: list[Any] = [
        {"role": "user", "content": [{"type": "image", "picture": 0}, {"type": "text", "text": "a"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": [{"type": "image", "picture": 1}]},
        {"role": "tool", "tool_call_id": "1", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    text = model.pictures.rendered(messages, [picture] * 2, lambda told: render_with_tools(templates, told, None))
    shown = model.pictures.expanded("<image>", [picture])
    assert text.count(shown) == 2 and text.startswith(f"[user]{shown}a[assistant][tool]")
    assert text.endswith("[user]c" if sees == "all" else f"[user]{shown}c")


def test_a_bundle_of_text_refuses_pictures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, chromium: Browser
):
    """The library, commands, both kinds of requests, and the page, which sends none; all go on with text."""
    bundle, file, found = talking_bundle(tmp_path), tmp_path / "photo.png", "reads text alone"
    file.write_bytes(png(photo(8, 8)))
    with edgekv.load(bundle) as model, pytest.raises(UsageError, match=found):
        model.generate("What?", pictures=[file])
    for command in (["generate", str(bundle), "--prompt", "What?"], ["chat", str(bundle), "--message", "What?"]):
        assert run([*command, "--image", str(file)]) == 2
        assert found in " ".join(capsys.readouterr().err.split())
    monkeypatch.setattr("sys.stdin", StringIO(f"/image {file}\nWhat?\n"))
    assert run(["chat", str(bundle), "--max-new-tokens", "2"]) == 0
    told = capsys.readouterr()
    assert found in " ".join(told.err.split()) and told.out.strip()
    url = data_uri(file.read_bytes())
    asked: Any = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]
    shown: Any = [{"role": "user", "content": [{"type": "input_image", "detail": "auto", "image_url": url}]}]
    with served(bundle) as server:
        client = server.client()
        with pytest.raises(BadRequestError, match=found):
            client.chat.completions.create(model=NAME, messages=asked)
        with pytest.raises(BadRequestError, match=found):
            client.responses.create(model=NAME, input=shown)
        with new_chat(chromium, server) as chat:
            change_settings(chat, max_tokens=2)
            drop_files(chat, photo=file.read_bytes())
            chat.wait(f"{ERROR} === 'This model reads text alone.'")
            say(chat, "What?", turns=2)
            assert chat.run(ERROR) == ""


def _tile(bundle: Bundle) -> NDArray[np.uint8]:
    """One for its encoder: if pictures have shapes of their own, a strip."""
    vision = bundle.manifest.vision
    assert vision is not None
    edge, step = vision.encoder.image, vision.encoder.patch * vision.encoder.merge
    return photo(edge, edge // 3 // step * step if vision.encoder.has_shapes else edge)


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize(("mode", "min_db"), [("exact16", 45), ("fast", 30 if multiplies_integers() else 28)])
def test_each_mode_of_the_cpu_gives_the_rows(
    write: Callable[[Path], Path], mode: CpuMode, min_db: float, tmp_path: Path
):
    """Against `emulate`; `fast` rounds the results of norms to 8 bits."""
    bundle = open_bundle(exported(write(tmp_path / "checkpoint"), export_options(context=96, ar=(1, 16))))
    engines, tile = (CpuEngine(1, mode=mode), CpuEngine(1)), _tile(bundle)
    rows, wanted = (PictureEncoder(bundle, engine).encode(tile).embeddings.astype(np.int64) for engine in engines)
    noise = np.square(rows - wanted).sum(-1)
    power = np.square(wanted - bundle.manifest.encodings["embedding"].zero_point).sum(-1)
    assert (10 * np.log10(power / np.maximum(noise, 1))).min() > min_db


@pytest.mark.slow
@pytest.mark.parametrize("write", variants(WRITES, [write_smolvlm]))
@pytest.mark.parametrize("kind", [LitertEngine, pytest.param(TfliteEngine, marks=pytest.mark.numpy1)])
def test_an_encoder_of_a_tflite_bundle_gives_the_rows_of_emulate(
    write: Callable[[Path], Path], kind: type[LitertEngine | TfliteEngine], tmp_path: Path
):
    """Both have int8 weights and activations of 16 bits, here with zero point 0."""
    checkpoint, options = write(tmp_path / "checkpoint"), export_options(context=192, ar=(1, 16))
    onnx = open_bundle(exported(checkpoint, options))
    bundle = open_bundle(exported(checkpoint, replace(options, graph_format="tflite", kv_dtype="s8")))
    rows, wanted = (
        opened.manifest.encodings["embedding"].dequantize(PictureEncoder(opened, engine).encode(_tile(onnx)).embeddings)
        for opened, engine in ((bundle, kind()), (onnx, CpuEngine(1)))
    )
    assert {"graphs.tflite", "vision.tflite"} < bundle.manifest.files.keys()
    assert (10 * np.log10(np.square(wanted).sum(-1) / np.square(rows - wanted).sum(-1))).min() > 55
    prefix, token = {
        write_smolvlm: ("", "<image>"),
        write_internvl: ("internvl_", "<IMG_CONTEXT>"),
        write_lfm2_vl: ("lfm2_vl_", "<image>"),
        **dict.fromkeys(QWEN_WRITES, ("", "<|vision_start|><|image_pad|><|vision_end|>")),
        write_gemma3_vl: ("", "<start_of_image>"),
    }[write]

    def answered(model: edgekv.Model) -> NDArray[np.float32]:
        generation = model.generate(
            f"See {token} and say:",
            max_new_tokens=1,
            temperature=0.0,
            return_logits=True,
            pictures=[png(photo(*(SHAPED_SIZES if write in (write_lfm2_vl, *QWEN_WRITES) else SIZES)[0]))],
        )
        found = next(generation).logits
        assert found is not None
        return found

    with edgekv.load(bundle.path, kind.name) as model:
        logits = answered(model)
    if not prefix and write is not write_smolvlm:  # whose golden prompt has two pictures
        with edgekv.load(onnx.path, cpu_mode="emulate") as model:
            float_logits = answered(model)
    else:
        float_logits = GOLDEN[prefix + "logits"][-1]
    assert 10 * np.log10(np.square(float_logits).sum() / np.square(logits - float_logits).sum()) > 20


@pytest.mark.parametrize(
    ("write", "rotation"),
    [
        (write_smolvlm, "hadamard"),
        (write_smolvlm, "principal"),
        (write_internvl, "hadamard"),
        (write_lfm2_vl, "hadamard"),
    ],
)
def test_eval_shows_where_the_error_of_an_encoder_arises(
    write: Callable[[Path], Path],
    rotation: Literal["hadamard", "principal"],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    """The last line is the error of the rows that decoders read."""
    checkpoint, text = write(tmp_path / "checkpoint"), tmp_path / "text.txt"
    text.write_text("def main(argv=None):\n    return 0\n" * 20)
    recipe = msgspec.structs.replace(find_recipe("w8a16"), rotation=rotation)
    bundle = exported(checkpoint, export_options(recipe, context=96, ar=(1, 16)))
    assert run(["eval", str(bundle), "--text", str(text), "--tokens", "64", "--layers", "--json"]) == 0
    layers = json.loads(capsys.readouterr().out)["encoder"]
    assert [each["place"] for each in layers] == ["patches", "0", "1", "rows"]
    levels = [each["rows"]["min_db"] for each in layers]
    assert levels[0] > max(levels[1:]) and min(levels) > 25
    opened, source = open_bundle(bundle), Checkpoint.open(str(checkpoint))
    vision = source.vision
    assert opened.manifest.recipe.rotation == rotation and vision is not None
    inputs = encoder_inputs(drawn_picture(99, vision.spec.image), vision.spec, vision.pictures)
    (wanted,), rows = (
        encode(NumpyEncoder(vision), vision.spec, [inputs]),
        PictureEncoder(opened, CpuEngine(1)).encode(drawn_picture(99, vision.spec.image)).embeddings,
    )
    wanted = ResidualRotation(source.spec, source.tensor, rotation).rotated(wanted)
    noise = np.square(opened.manifest.encodings["embedding"].dequantize(rows) - wanted).sum(-1)
    assert levels[-1] == pytest.approx((10 * np.log10(np.square(wanted).sum(-1) / noise)).min(), abs=0.2)


@pytest.mark.parametrize("write", WRITES)
def test_a_recipe_keeps_matrices_of_an_encoder_at_16_bits(
    write: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """Each is two of 8 bits; with all of them only the rounding of activations is left."""
    checkpoint, file = write(tmp_path / "checkpoint"), tmp_path / "wide.json"
    recipe = find_recipe("w8a16")
    msgspec.structs.replace(recipe, encoder_16bit=("vision.*",)).write(file)
    measured = []
    for each in (recipe, find_recipe(str(file))):
        options = export_options(context=96, ar=(1, 16), recipe=each)
        bundle = open_bundle(exported(checkpoint, options))
        assert bundle.manifest.vision is not None
        layers = measure_encoder(bundle, Checkpoint.open(str(checkpoint)))
        measured.append((bundle.manifest.vision, layers[-1].rows.min_db))
        tile = _tile(bundle)
        rows, wanted = (
            PictureEncoder(bundle, CpuEngine(1, mode=mode)).encode(tile).embeddings for mode in ("exact16", "emulate")
        )
        assert np.abs(rows.astype(int) - wanted).max() < 0.01 * np.ptp(wanted)
    (plain, plain_db), (wide, wide_db) = measured
    assert wide_db > plain_db + 12  # what is left is the rounding of activations, most in the means of InternVL
    assert plain.encoder.wide == ((TABLE,) if plain.encoder.has_table else ())
    others = {name for name in wide.encoder.matrices if "_mean" in name or name == CENTER or "_low." in name}
    assert len(wide.encoder.wide) == len(wide.encoder.matrices.keys() - others)
    assert wide.weights.matrices[low_of(wide.encoder.wide[0])].dtype == "int8"
    assert run(["info", str(bundle.path)]) == 0
    assert f"w8a16 with {len(wide.encoder.wide)} matrices at 16 bits" in capsys.readouterr().out.replace("\n", " ")


@dataclass(frozen=True)
class _Rounded:
    """An encoder with some of its matrices as integers have them."""

    vision: VisionEncoder
    matrices: Mapping[str, QuantizedWeight]

    @property
    def spec(self) -> EncoderSpec:
        return self.vision.spec

    def tensor(self, name: str) -> NDArray[np.float32]:
        return self.matrices[name].dequantize().T if name in self.matrices else self.vision.tensor(name)


@pytest.mark.parametrize("write", WRITES)
def test_effort_rounds_an_encoder_on_what_its_matrices_read(write: Callable[[Path], Path], tmp_path: Path):
    """On a picture that none of them was fitted to, the whole error is lower too."""
    checkpoint = Checkpoint.open(str(write(tmp_path / "checkpoint")))
    vision = checkpoint.vision
    assert vision is not None
    spec, prepared, losses_db = vision.spec, vision.pictures, dict[Method, float]()
    seen, (new,) = (
        [encoder_inputs(drawn_picture(number, spec.image), spec, prepared) for number in numbers]
        for numbers in (range(6), [99])
    )
    (exact,) = encode(NumpyEncoder(vision), spec, [new])
    for method in (DEFAULT_EFFORT.encoder_method, Effort.parse("--effort", "3").encoder_method):
        rounded = _Rounded(vision, quantize_encoder(vision, prepared, seen, method=method).matrices)
        (rows,) = encode(NumpyEncoder(rounded), spec, [new])
        losses_db[method] = float(10 * np.log10(np.square(exact).sum() / np.square(rows - exact).sum()))
    assert losses_db["descent"] > losses_db["nearest"] + 2
    planner = Planner(Identity.of(checkpoint))
    planner.export(plan_export(checkpoint, small_options(context=96, ar=(1, 16), effort=Effort.parse("--effort", "3"))))
    (piece,) = (each.piece for each in planner.plan.pieces.values() if isinstance(each.piece, EncoderPiece))
    assert piece.method == "descent"


def test_a_recipe_that_names_no_matrix_of_an_encoder_is_refused(tmp_path: Path):
    recipe = msgspec.structs.replace(find_recipe("w8a16"), encoder_16bit=("vision.layers.7.*",))
    options = export_options(context=96, ar=(1, 16), recipe=recipe)
    with pytest.raises(UsageError, match=r"encoder_16bit: got 'vision.layers.7.\*'; expected a pattern that matches"):
        plan_export(Checkpoint.open(str(write_smolvlm(tmp_path / "smolvlm"))), options)
    with pytest.raises(UsageError, match="got encoder_16bit; expected a checkpoint with a vision encoder"):
        plan_export(Checkpoint.open(str(write_checkpoint(tmp_path / "text"))), options)


def test_an_encoder_is_calibrated_on_a_folder(tmp_path: Path):
    checkpoint, folder = Checkpoint.open(str(write_smolvlm(tmp_path / "checkpoint"))), tmp_path / "photos"
    options = export_options(context=96, ar=(1, 16), calibration_tokens=512, calibration_pictures=folder)
    with pytest.raises(UsageError, match="--calibration-pictures: got No such file"):
        plan_export(checkpoint, options)
    folder.mkdir()
    with pytest.raises(UsageError, match="got 0 pictures"):
        plan_export(checkpoint, options)
    for number, size in enumerate(((70, 45), (30, 30))):
        (folder / f"{number}.png").write_bytes(png(photo(*size, number)))
    export = plan_export(checkpoint, options)
    assert export.pictures is not None and export.pictures.name == "photos"
    assert [tile.shape for tile in export.pictures.tiles] == [(32, 32, 3)] * 4
    vocab, tiles = checkpoint.spec.vocab, export.survey_tokens
    assert sorted(tiles[tiles >= vocab]) == [*range(vocab, vocab + 16)]
    shaped = plan_export(Checkpoint.open(str(write_lfm2_vl(tmp_path / "lfm2_vl"))), options)
    assert shaped.pictures is not None
    assert [tile.shape for tile in shaped.pictures.tiles] == [(32, 48, 3), (32, 32, 3)]
    ids, vocab = shaped.survey_tokens, shaped.checkpoint.spec.vocab
    assert sorted(ids[ids >= vocab]) == [*range(vocab, vocab + 6 + 4)]
    text = Checkpoint.open(str(write_checkpoint(tmp_path / "text")))
    with pytest.raises(UsageError, match="expected a checkpoint with a vision encoder"):
        plan_export(text, options)


def test_commands_take_pictures(bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    file = tmp_path / "photo.png"
    file.write_bytes(png(photo(70, 45)))
    options = ["--image", str(file), "--max-new-tokens", "2"]
    assert run(["generate", str(bundle), "--prompt", "What?", *options]) == 0
    told = capfd.readouterr().err
    assert "photo.png: 70 x 45 pixels, 2 x 2 tiles and the whole, 20 tokens" in told
    assert "vision encoder: 5 tiles in" in told
    session = ["generate", str(bundle), "--prompt", "What?", *options, "--session", str(tmp_path / "session")]
    assert run(session) == 0 and run(session) == 0
    assert "[vision encoder: 0 tiles in 0.00 s, 5 known]" in capfd.readouterr().err  # the file has their rows
    assert run(["chat", str(bundle), "--message", "What?", *options]) == 0
    assert "vision encoder: 5 tiles in" in capfd.readouterr().err
    assert run(["info", str(bundle)]) == 0
    assert "tiles of 32 x 32 pixels become 4 tokens" in capfd.readouterr().out


def test_a_chat_shows_pictures_with_its_messages(
    bundle: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    """What is taken back, or does not fit, stays for the next message."""
    file = tmp_path / "photo.png"
    file.write_bytes(png(photo(70, 45)))
    shown = [f"/image {file}", "What?", "/undo", "And this?", f"/image {file}", "x" * 400, "/image", "More"]
    monkeypatch.setattr("sys.stdin", StringIO("\n".join([*shown, "/image nowhere.png", "/stats", ""])))
    assert run(["chat", str(bundle), "--max-new-tokens", "2", "--temperature", "0"]) == 0
    printed = capfd.readouterr()
    told = printed.err.splitlines()
    assert [line for line in told if line.startswith("[with the next message")] == [
        f"[with the next message: {count}]" for count in ("1 picture", "1 picture", "1 picture", "0 pictures")
    ]
    encoded = [line for line in told if line.startswith("[vision encoder")]
    assert "5 tiles in" in encoded[0] and encoded[1] == "[vision encoder: 0 tiles in 0.00 s, 5 known]"
    assert any("take its pictures away with /image" in line for line in told)
    assert any(line.startswith("edgekv: error: /image: got nowhere.png: No such file") for line in told)
    assert "[conversation: 2 turns; 4 messages]" in told


@pytest.mark.htp
@pytest.mark.parametrize(
    "write",
    variants(WRITES, [write_smolvlm, write_qwen2_5_vl, write_qwen3_vl, write_gemma3_vl]),
)
def test_the_emulator_gives_the_rows_of_the_cpu(write: Callable[[Path], Path], tmp_path: Path):
    """Every graph compiles in integers, the encoder with them, and the binary is what the engine loads."""
    recipe = msgspec.structs.replace(find_recipe("w8a16"), encoder_16bit=("vision.layers.*.fc?.weight",))
    options = export_options(context=96, ar=(1, 16), check_on_htp=True, recipe=recipe)
    bundle = exported(write(tmp_path / "checkpoint"), options, compiled=True)
    opened = open_bundle(bundle)
    assert opened.manifest.vision is not None and opened.manifest.htp_check == "integers-only"
    htp = HtpEngine.on(find("SM8650"), opened)
    assert htp.compiled[opened.path / opened.manifest.vision.file].parent.name == "SM8650"
    tile = _tile(opened)
    rows, wanted = (
        PictureEncoder(opened, engine).encode(tile).embeddings.astype(np.int64) for engine in (htp, CpuEngine(1))
    )
    error = np.square(rows - wanted).sum() / np.square(wanted - opened.manifest.encodings["embedding"].zero_point).sum()
    assert 10 * np.log10(1 / error) > 40


@pytest.mark.htp
@pytest.mark.parametrize("write", variants(WRITES, [write_smolvlm]))
def test_the_plugin_of_litert_compiles_an_encoder_into_one_context(write: Callable[[Path], Path], tmp_path: Path):
    options = export_options(context=192, ar=(1, 16), graph_format="tflite", kv_dtype="s8")
    bundle = shutil.copytree(exported(write(tmp_path / "checkpoint"), options), tmp_path / "bundle")
    record = compile_bundle(open_bundle(bundle), find("SM8650"))
    assert [binary.file for binary in record.binaries] == ["graphs.tflite", "vision.tflite"]
    assert _operators(bundle / "compiled" / "SM8650" / "vision.tflite") == {"vision": [b"DISPATCH_OP"]}


@pytest.mark.htp
@pytest.mark.parametrize("write", [write_smolvlm, pytest.param(write_internvl, marks=pytest.mark.thorough)])
def test_genie_reads_pictures_as_edgekv_does(
    write: Callable[[Path], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`write_genie` has libGenie run the pipeline on a drawn tile, and compares its tokens with those of the bundle."""
    bundle = exported(write(tmp_path / "checkpoint"), export_options(context=96, ar=(1, 16)))
    folder, file = tmp_path / "genie", tmp_path / "photo.png"
    assert run(["bundle", "genie", str(bundle), "-o", str(folder)]) == 0
    assert "the vision encoder" in (told := capsys.readouterr().out) and "Genie chooses edgekv's tokens" in told
    opened = open_genie_folder(folder)
    assert opened.manifest.checked
    assert {"vision_encoder.bin", "embedding_weights.raw", "image_encoder.json"} < opened.manifest.files.keys()
    for name in ("text_generator.json", "text_generator_shared.json"):
        assert json.loads((folder / name).read_text())["text-generator"]["embedding"]["type"] == "lut"
    pushed = open_payload(folder)
    assert "vision_encoder.bin" in pushed.binaries and "text_generator_shared.json" in pushed.names
    assert "text_generator.json" not in pushed.names  # it names binaries that stay here
    file.write_bytes(png(photo(32, 30)))
    assert run(["genie", "run", str(folder), "--prompt", "See", "--image", str(file), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out
    assert run(["bundle", "geniex", str(bundle), "-o", str(tmp_path / "geniex")]) != 0
    assert "text alone: edgekv writes no encoder of " in capsys.readouterr().err


@pytest.mark.htp
def test_a_pipeline_of_genie_continues_a_conversation_with_pictures(bundle: Path, tmp_path: Path):
    """A picture in each of two turns. Genie has not read the last token of an answer that its limit ends."""
    opened, ids, tiles, answer = open_bundle(bundle), list[int](), list[Any](), list[int]()
    write_genie(opened, tmp_path / "genie", GenieOptions(check=False, max_new_tokens=4))
    folder = open_genie_folder(tmp_path / "genie")
    vision = folder.vision()
    with GeniePipeline(folder.path, folder.nodes(), as_tokens=True) as genie:
        for number, text in enumerate(("See <image> and say:", " And this <image>?")):
            tiles.append(photo(32, 32, number))
            shown = TiledPicture((tiles[-1],), TileGrid((32, 32)))
            pieces = vision.pieces_of(text, [shown])
            ids += answer[:-1]
            for piece in pieces:
                is_text = isinstance(piece, str)
                ids += opened.tokenizer().encode(piece).ids if is_text else Tile(piece, (2, 2)).ids
            answer = []
            for tokens in genie.query([each if isinstance(each, str) else vision.input_of(each) for each in pieces]):
                answer += map(int, tokens)
    assert answer == own_tokens(opened, HtpEngine.on(find("SM8650"), opened), ids, 4, tiles=tiles)


@pytest.mark.htp
@pytest.mark.thorough
def test_a_sweep_on_a_cluster_has_the_encoder_in_its_bundles(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    checkpoint, text, folder = write_smolvlm(tmp_path / "checkpoint"), tmp_path / "text.txt", tmp_path / "sweep"
    text.write_text("def main(argv=None):\n    return 0\n" * 40)
    cluster = ["--scheduler", "local", "--workers", "1"]
    options = ["--recipes", "w8a16", "--contexts", "96", "--ar", "1,16", "--text", str(text)]
    assert run(["sweep", str(checkpoint), "-o", str(folder), *options, *cluster]) == 0, capsys.readouterr().err
    (bundle,) = (folder / "bundles").iterdir()
    assert open_bundle(bundle).manifest.vision is not None


@pytest.mark.htp
def test_genie_compares_the_rows_of_pictures(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(GenieVision, "input_of", lambda self, tile: np.zeros((16, 192), np.float32))
    with pytest.raises(EngineError, match="tokens behind a picture of Genie"):
        write_genie(open_bundle(bundle), tmp_path / "genie", GenieOptions())
    assert not (tmp_path / "genie").exists()


def test_the_page_takes_dropped_pictures(bundle: Path, chromium: Browser):
    with served(bundle) as server, new_chat(chromium, server) as chat:
        change_settings(chat, max_tokens=2, temperature=0)
        drop_files(chat, first=png(photo(70, 45)), second=png(photo(70, 45)))
        chat.wait("document.querySelectorAll('#dropped img').length === 2")
        say(chat, "What?", turns=2)
        assert chat.run("document.querySelectorAll('.user .pictures img').length") == 2
        assert chat.run("state.messages[1].figures.prompt") > 40
        assert "pictures" not in json.dumps(chat.run(KEPT))


def test_the_page_shows_a_large_transparent_picture_on_white(bundle: Path, chromium: Browser):
    """It is made smaller as a JPEG, which has no transparency."""
    noise = np.random.default_rng(0).integers(0, 256, (600, 600, 4), np.uint8)
    noise[..., 3] = 0
    content = png(noise)
    assert len(content) > 1 << 20
    with served(bundle) as server, new_chat(chromium, server) as chat:
        drop_files(chat, noise=content)
        chat.wait("document.querySelectorAll('#dropped img').length === 1")
        url = chat.run("document.querySelector('#dropped img').src")
    assert url.startswith("data:image/jpeg")
    assert (_read(b64decode(url.partition(",")[2])) > 250).all()


def test_the_page_says_what_is_no_picture(bundle: Path, chromium: Browser):
    """A file of another kind is not taken; one that the server refuses is named by it, however large."""
    with served(bundle) as server, new_chat(chromium, server) as chat:
        drop_files(chat, "text/plain", note=b"no picture")
        chat.wait(f"{ERROR} === 'These files are no pictures.'")
        for content, found in (
            (png(photo(70, 45))[:-40], "a damaged file"),
            (png(photo(70, 45), "TIFF") + bytes(1 << 20), "a file of another kind"),
            (b"", "a file of another kind"),
        ):
            drop_files(chat, "", odd=content)  # the browser does not know its kind
            chat.wait(f"dropped.length === 1 && {ERROR} === ''")
            say(chat, "What?")
            chat.wait(f"{IDLE} && {ERROR}.includes({found!r})")
            chat.run("keep([]), undefined")
            assert all("400" in message for message in chat.messages)
            chat.messages.clear()
        drop_files(chat, "", photo=png(photo(70, 45)))
        chat.wait("dropped.length === 1")


def test_a_photo_of_many_bytes_is_taken_as_a_file_is(bundle: Path):
    """By the API of a model that reads pictures, which others refuse; all of them together are limited."""
    noise = png(np.random.default_rng(0).integers(0, 256, (1400, 1400, 3), np.uint8))
    assert len(noise) > 5 << 20
    parts = [{"type": "image_url", "image_url": {"url": data_uri(noise)}}, {"type": "text", "text": "What?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 1}
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
    head += b"connection: close\r\ncontent-length: %d\r\n\r\n"
    with served(bundle, limits=Limits(large_bytes=10 << 20)) as server:
        assert b" 413 " in server.raw(head % (49 << 20))
        refused = server.raw(head % (11 << 20))
        assert b" 503 " in refused and b"beside those of other requests" in refused
        for _ in range(2):  # each takes nothing from the next
            status, answer = server.post("/v1/chat/completions", body)
            assert status == 200 and answer["usage"]["prompt_tokens"] > 20
    with served(exported_architecture("smollm3")) as server:
        assert b" 413 " in server.raw(head % (5 << 20))


def test_the_page_has_a_button_for_pictures_where_the_model_reads_them(
    bundle: Path, small_export: Path, chromium: Browser
):
    chosen = b64encode(png(photo(70, 45))).decode()
    with served(bundle) as server, new_chat(chromium, server) as chat:
        chat.wait("!document.getElementById('picture').hidden")
        chat.run(
            "(bytes => { const data = new DataTransfer(), files = document.getElementById('files');"
            " data.items.add(new File([bytes], '1.png', { type: 'image/png' }));"
            " files.files = data.files; files.dispatchEvent(new Event('change')); })"
            f"(Uint8Array.from(atob('{chosen}'), each => each.charCodeAt(0)))"
        )
        chat.wait("document.querySelectorAll('#dropped img').length === 1")
    with served(small_export) as server, new_chat(chromium, server) as chat:
        chat.wait("document.title !== 'edgekv'")
        assert chat.run("document.getElementById('picture').hidden")


@pytest.mark.parametrize(
    ("file", "fields", "words"),
    [
        ("config.json", {"vision_config": {"use_register_tokens": 4}}, ["vision_config: use_register_tokens: got 4"]),
        ("preprocessor_config.json", {"do_something_else": True}, ["preprocessor_config.json: do_something_else"]),
        ("preprocessor_config.json", {"rescale_factor": 1 / 127.5}, ["rescale_factor", "1/255"]),
        ("preprocessor_config.json", {"do_center_crop": True}, ["do_center_crop", "False"]),
    ],
    ids=["encoder", "processor", "scale", "crop"],
)
@pytest.mark.parametrize("write", WRITES)
def test_a_field_of_pictures_that_nothing_reads_is_refused_by_name(
    write: Callable[[Path], Path], file: str, fields: dict[str, Any], words: list[str], tmp_path: Path
):
    path = write(tmp_path) / file
    content = json.loads(path.read_text())
    for name, value in fields.items():
        content[name] = content[name] | value if isinstance(value, dict) else value
    path.write_text(json.dumps(content))
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(str(tmp_path))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_a_closed_model_frees_its_encoder(bundle: Path):
    model = edgekv.load(bundle)
    assert len(_tokens(model, pictures=[png(photo(40, 40))])[0]) == 6
    binding, picture = ref(model.pictures._rows.encoder._binding), model.open_picture(png(photo(50, 40)))
    model.close()
    gc.collect()
    assert binding() is None
    with pytest.raises(UsageError, match="model: got a closed model"):
        model.generate("See <image>", pictures=[picture])


def test_a_corpus_has_no_rows_of_pictures(model: Model, tmp_path: Path):
    """Their ids are hashes, beyond those of any token."""
    (tmp_path / "corpus").write_text("and say: nothing more")
    index = model.open_corpus(tmp_path / "corpus")
    said, picture = model.encode("and say:"), model.open_picture(png(photo(40, 40)))
    length, places = index.places(said, 4)
    assert length and index.places([*picture.tiles[0].ids, *said], 4) == (length, places)
    assert index.places(picture.tiles[0].ids, 4) == (0, [])
