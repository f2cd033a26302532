"""Answers of a small trained model that reads two digits, in integers."""

from __future__ import annotations

from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import ExifTags, Image
from playwright.sync_api import Browser

from benchmarks.pictures import compare_answers
from edgekv.cli import run
from models.shapes import QUESTION, drawn
from tests.support.exports import export_options, exported
from tests.support.picture_models import data_uri
from tests.support.serving import NAME, TURNS, change_settings, drop_files, new_chat, say, served

MODEL = Path(__file__).parents[3] / "models" / "shapes-360k"
PICTURES = 50


@pytest.mark.slow
def test_answers_in_integers_are_those_of_the_float_model():
    """A shape, its colour and the number below it: of at least 98 %, token for token."""
    same, right = compare_answers(exported(MODEL, export_options(context=128, ar=(1, 32))), PICTURES)
    assert same >= 0.98 * PICTURES and right >= 0.98 * PICTURES


def test_a_chip_without_products_of_16_bits_is_refused_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """By the export, and for a bundle that was exported for another chip by `compile`."""
    bundle = exported(MODEL, export_options(context=128, ar=(1, 32)))
    for command in (
        ["export", str(MODEL), "-o", str(tmp_path / "out"), "--device", "QCS6490", "--context", "128"],
        ["compile", str(bundle), "--device", "QCS6490"],
    ):
        assert run(command) == 2
        said = " ".join(capsys.readouterr().err.split())
        assert "--device: got QCS6490 (V68); expected V73 or later: products of a vision encoder" in said
    assert not (tmp_path / "out").exists()


def _saved(picture: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    picture.save(file, kind, **options)
    return file.getvalue()


def _turned(picture: Image.Image) -> bytes:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6  # shown turned to the right
    return _saved(picture.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=exif)


def _gray16(picture: Image.Image) -> bytes:
    return _saved(Image.fromarray(np.asarray(picture.convert("L")).astype(np.uint16) * 257), "PNG")


def _transparent(picture: Image.Image) -> bytes:
    """White where it is, it is clear: what is below is black."""
    pixels = np.asarray(picture)
    clear = (pixels > 225).all(-1, keepdims=True)
    return _saved(Image.fromarray(np.concatenate([pixels * ~clear, (~clear * 255).astype(np.uint8)], 2)), "PNG")


def _animated(picture: Image.Image) -> bytes:
    others = [Image.fromarray(drawn(number)[0]) for number in (3, 4)]
    return _saved(picture, "WEBP", save_all=True, append_images=others, lossless=True)


ODD: dict[str, Callable[[Image.Image], bytes]] = {
    "turned by EXIF": _turned,
    "16 bits of gray": _gray16,
    "CMYK": lambda picture: _saved(picture.convert("CMYK"), "JPEG", quality=95),
    "transparent": _transparent,
    "animated": _animated,
    "huge": lambda picture: _saved(picture.resize((6400, 6400), Image.Resampling.NEAREST), "PNG"),
}


def _is_right(answer: str, words: str, kind: str) -> bool:
    """Whether all words are right; of a gray picture, those behind the colour."""
    expected = words.split()[2:] if "gray" in kind else words.split()
    return answer.split()[-len(expected) :] == expected


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_the_page_reads_odd_pictures_as_people_do(kind: str, chromium: Browser):
    """As they are, and above a size at which the browser makes them smaller: what is behind a picture is none of it."""
    bundle, (pixels, words) = exported(MODEL, export_options(context=128, ar=(1, 32))), drawn(9)
    content = ODD[kind](Image.fromarray(pixels))
    with served(bundle) as server:
        for file in (content, content + bytes(1 << 20)):
            with new_chat(chromium, server) as chat:
                change_settings(chat, max_tokens=24, temperature=0)
                drop_files(chat, odd=file)
                chat.wait("document.querySelectorAll('#dropped img').length === 1")
                assert chat.run("dropped[0].startsWith('data:image/jpeg')") == (file is not content or "JPEG" in kind)
                say(chat, QUESTION, turns=2)
                assert _is_right(chat.run(TURNS)[1][1], words, kind), chat.run(TURNS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ODD)
def test_commands_and_servers_read_odd_pictures_as_people_do(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """The digits can be read in them, and so can the colour, but of gray."""
    bundle, (pixels, words) = exported(MODEL, export_options(context=128, ar=(1, 32))), drawn(9)
    content, file = ODD[kind](Image.fromarray(pixels)), tmp_path / "odd"
    file.write_bytes(content)

    def is_right(answer: str | None) -> bool:
        return answer is not None and _is_right(answer, words, kind)

    assert run(["chat", str(bundle), "--message", QUESTION, "--image", str(file), "--temperature", "0"]) == 0
    assert is_right(capsys.readouterr().out.strip())
    with served(bundle) as server:
        client, url = server.client(), data_uri(content)
        parts: Any = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": QUESTION}]
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": parts}], max_tokens=24, temperature=0.0
        )
        assert is_right(answer.choices[0].message.content)
        shown: Any = {"type": "input_image", "detail": "auto", "image_url": url}
        asked: Any = [{"role": "user", "content": [shown, {"type": "input_text", "text": QUESTION}]}]
        response = client.responses.create(model=NAME, input=asked, max_output_tokens=24, temperature=0.0)
        assert is_right(response.output_text)
