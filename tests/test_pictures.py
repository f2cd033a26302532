"""Pictures: decoded, cut, encoded and placed in prompts as transformers does."""

from __future__ import annotations

import gc
import json
import shutil
import sys
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from dataclasses import replace
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any, Literal
from weakref import ref

import msgspec
import numpy as np
import pytest
from openai import BadRequestError, OpenAI
from PIL import Image
from playwright.sync_api import Browser

import edgekv
from devices import find
from edgekv.bundle import open_bundle
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
    Tile,
    TiledPicture,
    TileGrid,
    apart,
    cut_tiles,
    expand,
    normalized,
    open_tiles,
    patches_of,
    read_picture,
)
from edgekv.prefix import StoreConfig
from edgekv.runtime.cpu import CpuEngine
from edgekv.runtime.htp import HtpEngine
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.tflite import TfliteEngine
from edgekv.spec import PictureSpec, low_of
from edgekv.spec.chat import ChatTemplates
from edgekv.text import SamplingParams
from edgekv.text.tools import render_with_tools
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.vision import VisionEncoder
from exporters.compile import compile_bundle
from exporters.htp.compile_tflite import _operators
from exporters.inspect.encoder import measure_encoder
from exporters.prepared import prepare
from exporters.quantize.encoder import encode
from exporters.quantize.pictures import drawn_picture
from exporters.quantize.recipe import find_recipe
from exporters.targets.android.push import open_payload
from exporters.targets.genie.folder import GenieVision, open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.pictures import GeniePipeline, pieces_of
from exporters.targets.genie.write import write_genie
from exporters.targets.prove import own_tokens
from tests.chat_page import KEPT, change_settings, new_chat, say
from tests.checkpoints import as_saved, write_checkpoint
from tests.exports import export_options, exported, exported_architecture
from tests.picture_models import SIZES, photo, png, write_internvl, write_smolvlm
from tests.serving import NAME, served
from tests.thorough import variants

GOLDEN = np.load(Path(__file__).parent / "golden" / "pictures.npz")
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
    numbered=True,
)


def data_uri(content: bytes) -> str:
    """A picture as clients send it."""
    return f"data:image/png;base64,{b64encode(content).decode()}"


def _bomb(width: int, height: int) -> bytes:
    """A PNG of a few hundred bytes that says it is this large."""
    small = png(np.zeros((1, 1, 3), np.uint8))
    header = b"IHDR" + width.to_bytes(4) + height.to_bytes(4) + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4) + small[33:]


def _animated() -> bytes:
    file = BytesIO()
    first, *others = (Image.fromarray(photo(16, 16, number)) for number in range(3))
    first.save(file, "GIF", save_all=True, append_images=others)
    return file.getvalue()


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> VisionEncoder:
    found = Checkpoint.open(str(write_smolvlm(tmp_path_factory.mktemp("vlm") / "smolvlm"))).vision
    assert found is not None
    return found


def _rows(vision: VisionEncoder, picture: TiledPicture) -> np.ndarray[Any, Any]:
    return np.concatenate(encode(vision, [patches_of(tile, vision.spec, vision.pictures) for tile in picture.tiles]))


def _pixels(vision: VisionEncoder, picture: TiledPicture) -> np.ndarray[Any, Any]:
    return np.stack([normalized(tile, vision.pictures).transpose(2, 0, 1) for tile in picture.tiles])


def _written(vision: VisionEncoder, picture: TiledPicture) -> str:
    tiles = tuple(Tile(tile, vision.spec.rows) for tile in picture.tiles)
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


WRITERS = {"smolvlm": write_smolvlm, "internvl": write_internvl, "internvl-unbiased": write_unbiased}
SAVED = json.loads((Path(__file__).parent / "golden" / "saved.json").read_text())


@pytest.mark.parametrize("name", WRITERS)
def test_the_encoder_reads_what_transformers_saves(name: str, tmp_path: Path):
    """The rows are those of the test below, whose files have the names of transformers' classes."""
    expected = Checkpoint.open(str(WRITERS[name](tmp_path / "written"))).vision
    found = Checkpoint.open(str(as_saved(WRITERS[name](tmp_path / "saved"), SAVED[name]))).vision
    assert expected is not None and found is not None
    picture = cut_tiles(photo(*SIZES[0]), found.pictures, found.spec.image)
    assert np.array_equal(_rows(found, picture), _rows(expected, picture))


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
        (_bomb(60_000, 60_000), "60,000 x 60,000 pixels|far more"),
        (_bomb(8_000, 8_000), "8,000 x 8,000 pixels"),
        (_animated(), "an animated GIF"),
    ],
)
def test_bad_pictures_are_refused_by_name(content: bytes, found: str):
    with pytest.raises(UsageError, match=found):
        read_picture(content, "picture")


def test_odd_pictures_are_read_as_they_look():
    pixels = photo(40, 24)
    turned = Image.Exif()
    turned[0x0112] = 6  # shown turned by 90 degrees
    assert read_picture(png(pixels, exif=turned), "p").shape == (40, 24, 3)
    cmyk = BytesIO()
    Image.fromarray(pixels).convert("CMYK").save(cmyk, "JPEG", quality=95)
    assert np.abs(read_picture(cmyk.getvalue(), "p").astype(int) - pixels).mean() < 12
    gray = np.linspace(0, 65535, 64, dtype=np.uint16).reshape(8, 8)
    assert (read_picture(png(gray), "p")[..., 0] == gray >> 8).all()
    clear = np.zeros((4, 4, 4), np.uint8)
    assert (read_picture(png(clear), "p") == 255).all()  # what is transparent is on white
    for width, height in ((1, 1), (20_000, 1), (1, 20_000)):
        picture = cut_tiles(np.zeros((height, width, 3), np.uint8), PICTURES, 512)
        assert picture.tiles[-1].shape == (512, 512, 3) and len(picture.tiles) in (5, 17)


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
    monkeypatch.setattr(apart, "_LIMITS", replace(apart._LIMITS, timeout_s=0.001))
    with pytest.raises(UsageError, match=r"a picture whose decoding ended with no answer within 0\.001 s"):
        open_tiles(file, "picture", PICTURES, 512)


@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux limits the memory of a process")
def test_the_memory_of_a_picture_is_limited():
    """Few bytes of many pixels, within the limit of pixels; libwebp takes two copies of them beside Pillow's."""
    content = BytesIO()
    Image.new("RGBA", (8192, 4096), (1, 2, 3, 4)).save(content, "WEBP", lossless=True, method=0)
    assert len(content.getvalue()) < 100
    with pytest.raises(UsageError, match="a picture that takes more memory; expected one that is decoded in 1,024 MiB"):
        open_tiles(content.getvalue(), "picture", PICTURES, 512)


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
        ask(client, f"data:image/jpeg;base64,{encoded}", detail="low")
        assert counts[0] > 20 and counts[0] - 16 > counts[-1] > 4  # one tile of five
        with pytest.raises(BadRequestError, match=r"image_url.detail: got 'most'; expected auto, low or high"):
            ask(client, f"data:image/jpeg;base64,{encoded}", detail="most")
        for url, found in {
            "https://example.org/picture.png": "the server fetches nothing",
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


def test_a_bundle_of_text_refuses_pictures():
    with edgekv.load(exported_architecture("smollm3")) as model, pytest.raises(UsageError, match="reads text alone"):
        model.generate("What?", pictures=[png(photo(8, 8))])


@pytest.mark.parametrize("write", [write_smolvlm, write_internvl])
@pytest.mark.parametrize(("mode", "least_db"), [("exact16", 45), ("fast", 30 if multiplies_integers() else 28)])
def test_each_mode_of_the_cpu_gives_the_rows(
    write: Callable[[Path], Path], mode: CpuMode, least_db: float, tmp_path: Path
):
    """Against `emulate`; `fast` rounds the results of norms to 8 bits."""
    bundle = open_bundle(exported(write(tmp_path / "checkpoint"), export_options(context=96, ar=(1, 16))))
    engines, tile = (CpuEngine(1, mode=mode), CpuEngine(1)), photo(32, 32)
    rows, wanted = (PictureEncoder(bundle, engine).encode(tile).astype(np.int64) for engine in engines)
    noise = np.square(rows - wanted).sum(-1)
    power = np.square(wanted - bundle.manifest.encodings["embedding"].zero_point).sum(-1)
    assert (10 * np.log10(power / np.maximum(noise, 1))).min() > least_db


@pytest.mark.slow
@pytest.mark.parametrize("write", variants([write_smolvlm, write_internvl], [write_smolvlm]))
@pytest.mark.parametrize("kind", [LitertEngine, pytest.param(TfliteEngine, marks=pytest.mark.numpy1)])
def test_an_encoder_of_a_tflite_bundle_gives_the_rows_of_emulate(
    write: Callable[[Path], Path], kind: type[LitertEngine | TfliteEngine], tmp_path: Path
):
    """Both have int8 weights and activations of 16 bits, here with zero point 0."""
    checkpoint, options = write(tmp_path / "checkpoint"), export_options(context=192, ar=(1, 16))
    onnx = open_bundle(exported(checkpoint, options))
    bundle = open_bundle(exported(checkpoint, replace(options, graph_format="tflite", kv_dtype="s8")))
    rows, wanted = (
        opened.manifest.encodings["embedding"].dequantize(PictureEncoder(opened, engine).encode(photo(32, 32)))
        for opened, engine in ((bundle, kind()), (onnx, CpuEngine(1)))
    )
    assert {"graphs.tflite", "vision.tflite"} < bundle.manifest.files.keys()
    assert (10 * np.log10(np.square(wanted).sum(-1) / np.square(rows - wanted).sum(-1))).min() > 55
    prefix, token = ("internvl_", "<IMG_CONTEXT>") if write is write_internvl else ("", "<image>")
    with edgekv.load(bundle.path, kind.name) as model:
        generation = model.generate(
            f"See {token} and say:",
            max_new_tokens=1,
            temperature=0.0,
            return_logits=True,
            pictures=[png(photo(*SIZES[0]))],
        )
        logits, float_logits = next(generation).logits, GOLDEN[prefix + "logits"][-1]
    assert logits is not None
    assert 10 * np.log10(np.square(float_logits).sum() / np.square(logits - float_logits).sum()) > 20


@pytest.mark.parametrize(
    ("write", "rotation"),
    [(write_smolvlm, "hadamard"), (write_smolvlm, "principal"), (write_internvl, "hadamard")],
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
    levels = [each["rows"]["least_db"] for each in layers]
    assert levels[0] > max(levels[1:]) and min(levels) > 25
    opened, source = open_bundle(bundle), Checkpoint.open(str(checkpoint))
    vision = source.vision
    assert opened.manifest.recipe.rotation == rotation and vision is not None
    patches = patches_of(drawn_picture(99, 32), vision.spec, vision.pictures)
    (wanted,), rows = encode(vision, [patches]), PictureEncoder(opened, CpuEngine(1)).encode(drawn_picture(99, 32))
    wanted = ResidualRotation(source.spec, source.tensor, rotation).rotated(wanted)
    noise = np.square(opened.manifest.encodings["embedding"].dequantize(rows) - wanted).sum(-1)
    assert levels[-1] == pytest.approx((10 * np.log10(np.square(wanted).sum(-1) / noise)).min(), abs=0.2)


@pytest.mark.parametrize("write", [write_smolvlm, write_internvl])
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
        measured.append((bundle.manifest.vision, layers[-1].rows.least_db))
        tile = photo(32, 32)
        rows, wanted = (PictureEncoder(bundle, CpuEngine(1, mode=mode)).encode(tile) for mode in ("exact16", "emulate"))
        assert np.abs(rows.astype(int) - wanted).max() < 0.01 * np.ptp(wanted)
    (plain, plain_db), (wide, wide_db) = measured
    assert wide_db > plain_db + 12  # what is left is the rounding of activations, most in the means of InternVL
    assert not plain.encoder.wide and len(wide.encoder.wide) == len(
        [n for n in plain.weights.matrices if "_mean" not in n]
    )
    assert wide.weights.matrices[low_of(wide.encoder.wide[0])].dtype == "int8"
    assert run(["info", str(bundle.path)]) == 0
    assert f"w8a16 with {len(wide.encoder.wide)} matrices at 16 bits" in capsys.readouterr().out.replace("\n", " ")


def test_a_recipe_that_names_no_matrix_of_an_encoder_is_refused(tmp_path: Path):
    recipe = msgspec.structs.replace(find_recipe("w8a16"), encoder_16bit=("vision.layers.7.*",))
    options = export_options(context=96, ar=(1, 16), recipe=recipe)
    with pytest.raises(UsageError, match=r"encoder_16bit: got 'vision.layers.7.\*'; expected a pattern that matches"):
        prepare(Checkpoint.open(str(write_smolvlm(tmp_path / "smolvlm"))), options)
    with pytest.raises(UsageError, match="got encoder_16bit; expected a checkpoint with a vision encoder"):
        prepare(Checkpoint.open(str(write_checkpoint(tmp_path / "text"))), options)


def test_an_encoder_is_calibrated_on_a_folder(tmp_path: Path):
    checkpoint, folder = Checkpoint.open(str(write_smolvlm(tmp_path / "checkpoint"))), tmp_path / "photos"
    options = export_options(context=96, ar=(1, 16), calibration_tokens=512, calibration_pictures=folder)
    with pytest.raises(UsageError, match="--calibration-pictures: got No such file"):
        prepare(checkpoint, options)
    folder.mkdir()
    with pytest.raises(UsageError, match="got 0 pictures"):
        prepare(checkpoint, options)
    for number, size in enumerate(((70, 45), (30, 30))):
        (folder / f"{number}.png").write_bytes(png(photo(*size, number)))
    prepared = prepare(checkpoint, options)
    assert prepared.pictures is not None and prepared.pictures.name == "photos"
    assert prepared.pictures.tiles.shape == (4, 32, 32, 3)
    vocab, tiles = checkpoint.spec.vocab, prepared.survey_tokens
    assert sorted(tiles[tiles >= vocab]) == [*range(vocab, vocab + 16)]
    text = Checkpoint.open(str(write_checkpoint(tmp_path / "text")))
    with pytest.raises(UsageError, match="expected a checkpoint with a vision encoder"):
        prepare(text, options)


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
@pytest.mark.parametrize("write", variants([write_smolvlm, write_internvl], [write_smolvlm]))
def test_the_emulator_gives_the_rows_of_the_cpu(write: Callable[[Path], Path], tmp_path: Path):
    """Every graph compiles in integers, the encoder with them, and the binary is what the engine loads."""
    recipe = msgspec.structs.replace(find_recipe("w8a16"), encoder_16bit=("vision.layers.*.fc?.weight",))
    options = export_options(context=96, ar=(1, 16), check_on_htp=True, recipe=recipe)
    bundle = exported(write(tmp_path / "checkpoint"), options, compiled=True)
    opened = open_bundle(bundle)
    assert opened.manifest.vision is not None and opened.manifest.htp_check == "integers-only"
    htp = HtpEngine.on(find("SM8650"), opened)
    assert htp.compiled[opened.path / opened.manifest.vision.file].parent.name == "SM8650"
    tile = photo(32, 32)
    rows, wanted = (PictureEncoder(opened, engine).encode(tile).astype(np.int64) for engine in (htp, CpuEngine(1)))
    error = np.square(rows - wanted).sum() / np.square(wanted - opened.manifest.encodings["embedding"].zero_point).sum()
    assert 10 * np.log10(1 / error) > 40


@pytest.mark.htp
@pytest.mark.parametrize("write", variants([write_smolvlm, write_internvl], [write_smolvlm]))
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
    assert "GenieX runs no encoder of " in capsys.readouterr().err


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
            pieces = pieces_of(text, [shown], vision.encoder.rows, vision.pictures)
            ids += answer[:-1]
            for piece in pieces:
                is_text = isinstance(piece, str)
                ids += opened.tokenizer().encode(piece).ids if is_text else Tile(piece, vision.encoder.rows).ids
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
    dropped = b64encode(png(photo(70, 45))).decode()
    with served(bundle) as server, new_chat(chromium, server) as chat:
        change_settings(chat, max_tokens=2, temperature=0)
        chat.run(
            "(bytes => { const data = new DataTransfer();"
            " for (const name of ['1.png', '2.png']) data.items.add(new File([bytes], name, { type: 'image/png' }));"
            " document.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true })); })"
            f"(Uint8Array.from(atob('{dropped}'), each => each.charCodeAt(0)))"
        )
        chat.wait("document.querySelectorAll('#dropped img').length === 2")
        say(chat, "What?", turns=2)
        assert chat.run("document.querySelectorAll('.user .pictures img').length") == 2
        assert chat.run("state.messages[1].figures.prompt") > 40
        assert "pictures" not in json.dumps(chat.run(KEPT))


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
@pytest.mark.parametrize("write", [write_smolvlm, write_internvl])
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
