"""Gemma 3: averaged patches, and rows of a picture that attend to each other, as transformers does."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from openai import OpenAI

import edgekv
from edgekv.bundle import open_bundle
from edgekv.draft import Speculation
from edgekv.engine.session import CacheUse
from edgekv.errors import ContextFullError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.model import Model
from edgekv.pictures import PictureEncoder, cut_tiles, encoder_inputs, row_places
from edgekv.prefix import StoreConfig
from edgekv.runtime.cpu import CpuEngine
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.rotate import ResidualRotation
from exporters.inspect.encoder import measure_encoder
from exporters.quantize.encoder import NumpyEncoder, encode
from exporters.quantize.reference import Reference
from tests.support.exports import export_options, exported
from tests.support.picture_models import SIZES, data_uri, photo, png, write_gemma3_vl
from tests.support.serving import NAME, served

GOLDEN = {
    name.removeprefix("gemma3_vl_"): value
    for name, value in np.load(Path(__file__).parents[2] / "golden" / "pictures.npz").items()
    if name.startswith("gemma3_vl_")
}
PLACE = "<start_of_image>"
PROMPT = f"See {PLACE} and {PLACE} say: what are they?"
FILES = [png(photo(*size, number)) for number, size in enumerate(SIZES)]
ROWS = 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_gemma3_vl(tmp_path_factory.mktemp("vlm") / "gemma3")))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_gemma3_vl(tmp_path_factory.mktemp("vlm") / "gemma3")
    return exported(folder, export_options(context=192, ar=(1, 16), draft_rows=(8,)))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with edgekv.load(bundle) as model:
        yield model


def _tiles(checkpoint: Checkpoint, count: int) -> list[NDArray[np.uint8]]:
    vision = checkpoint.vision
    assert vision is not None
    pictures = [photo(*size, number) for number, size in enumerate(SIZES[:count])]
    return [cut_tiles(picture, vision.pictures, vision.spec.image).tiles[0] for picture in pictures]


def _db(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / max(np.square(found - wanted).sum(), 1e-9)))


def test_pixels_are_those_of_transformers(checkpoint: Checkpoint):
    vision = checkpoint.vision
    assert vision is not None
    for tile, wanted in zip(_tiles(checkpoint, len(SIZES)), GOLDEN["pixels"], strict=True):
        shown = encoder_inputs(tile, vision.spec, vision.pictures).patches
        patches = wanted.reshape(3, 2, 4, 8, 2, 4, 8).transpose(1, 4, 2, 5, 0, 3, 6)
        assert np.abs(shown - patches.reshape(shown.shape)).max() < 1e-6


def test_rows_and_logits_are_those_of_transformers(checkpoint: Checkpoint):
    """A prompt with two pictures, whose layers have a window and none."""
    vision, spec, ids = checkpoint.vision, checkpoint.spec, GOLDEN["ids"].copy()
    assert vision is not None and spec.whole_pictures
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in _tiles(checkpoint, 2)]
    rows = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown))
    assert np.abs(rows - GOLDEN["rows"]).max() < 1e-4 * np.abs(GOLDEN["rows"]).max()
    pictured = ids == vision.pictures.token_id
    ids[pictured] = spec.vocab + np.arange(pictured.sum())
    places = np.concatenate([row_places(2, 2)] * 2)
    (logits,) = Reference(checkpoint.with_pictures(PicturedRows(rows, places))).logits([ids])
    assert np.abs(logits - GOLDEN["logits"]).max() < 1e-4 * np.ptp(GOLDEN["logits"])


def test_rows_in_integers_are_those_of_transformers(bundle: Path, checkpoint: Checkpoint):
    opened, wanted = open_bundle(bundle), GOLDEN["rows"]
    rotation = opened.manifest.recipe.rotation
    if rotation != "none":
        wanted = ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(wanted)
    modes: tuple[CpuMode, ...] = ("emulate", "fast")
    exact, fast = (
        np.concatenate(
            [
                opened.manifest.encodings["embedding"].dequantize(
                    PictureEncoder(opened, CpuEngine(1, mode=mode)).encode(tile).embeddings
                )
                for tile in _tiles(checkpoint, 2)
            ]
        )
        for mode in modes
    )
    assert _db(exact, wanted) > 30 and _db(fast, exact) > 30
    assert min(layer.rows.mean_db for layer in measure_encoder(opened, checkpoint)) > 24


@pytest.mark.parametrize("mode", ["emulate", "fast"])
def test_the_bundle_reads_pictures_as_transformers_does(bundle: Path, mode: CpuMode):
    with edgekv.load(bundle, cpu_mode=mode) as model:
        generation = model.generate(PROMPT, max_new_tokens=1, temperature=0.0, return_logits=True, pictures=FILES[:2])
        logits = next(generation).logits
    assert logits is not None and generation.stats.prompt_tokens == len(GOLDEN["ids"])
    assert _db(logits, GOLDEN["logits"][-1]) > 20


def _last(model: Model, prompt: str, pictures: list[bytes], **options: Any) -> tuple[NDArray[np.float32], CacheUse]:
    """The logits behind a prompt, and what was done with the cache."""
    options = {"max_new_tokens": 1, "temperature": 0.0, "return_logits": True} | options
    generation = model.generate(prompt, pictures=pictures, **options)
    logits = [token.logits for token in generation][-1]
    assert logits is not None
    return logits, generation.stats.cache


def test_no_step_cuts_a_picture(bundle: Path, tmp_path: Path):
    """Wherever a picture stands, and however many tokens a step has, its rows see each other."""
    other = exported(write_gemma3_vl(tmp_path / "gemma3"), export_options(context=192, ar=(1, 6)))
    with edgekv.load(bundle, cpu_mode="emulate") as long, edgekv.load(other, cpu_mode="emulate") as short:
        for before in range(16):
            prompt = "a" * before + f"{PLACE}{PLACE} end"
            first, second = (_last(model, prompt, FILES[:2])[0] for model in (long, short))
            assert _db(first, second) > 65, before  # 41 to 59 where steps cut one


@pytest.mark.parametrize("mode", ["emulate", "fast"])
def test_a_cache_that_goes_on_or_is_rewound_gives_what_an_empty_one_gives(mode: CpuMode, tmp_path: Path):
    """To the bit, where steps end beside pictures too; and a prefix on disk. With a window that holds all tokens."""
    bundle = exported(write_gemma3_vl(tmp_path / "gemma3", window=128), export_options(context=192, ar=(1, 16)))
    store = StoreConfig(tokens_per_block=8, disk_folder=tmp_path / "prefixes")
    prompt = f"{'a' * 58}{PLACE} what are they?"  # `fast` would end a step within the picture, at 64
    longer = f"{prompt} And {PLACE} too, or something else altogether?"
    with edgekv.load(bundle, cpu_mode=mode, prefix_cache=store, reproducible=True) as model:
        first, second = (_last(model, *asked)[0] for asked in ((prompt, FILES[:1]), (longer, FILES[:2])))
    with edgekv.load(bundle, cpu_mode=mode, reproducible=True) as model:
        assert np.array_equal(_last(model, prompt, FILES[:1], sequence=1)[0], first)
        found, cache = _last(model, longer, FILES[:2], sequence=1)
        assert np.array_equal(found, second) and cache.reused_tokens > 64
        assert np.array_equal(_last(model, prompt, FILES[:1], sequence=1)[0], first)
        found, cache = _last(model, prompt, FILES[2:3], sequence=1)
        assert np.array_equal(found, _last(model, prompt, FILES[2:3])[0]) and cache.reused_tokens < 64
        assert not np.array_equal(found, first)
    with edgekv.load(bundle, cpu_mode=mode, prefix_cache=store, reproducible=True) as model:
        found, cache = _last(model, longer, FILES[:2])
        assert np.array_equal(found, second) and cache.restored_tokens >= (48 if mode == "emulate" else 0)


@pytest.mark.parametrize("kv_update", ["shift-concat", "pointer-shift", "slot", "mirror"])
def test_every_update_strategy_reads_pictures(bundle: Path, model: Model, kv_update: str):
    with edgekv.load(bundle, kv_update=kv_update) as other:
        assert np.array_equal(_last(other, PROMPT, FILES[:2])[0], _last(model, PROMPT, FILES[:2])[0])


def test_drafts_behind_a_picture_give_the_same_answer(bundle: Path):
    with edgekv.load(bundle, cpu_mode="emulate") as model:
        wanted = _last(model, PROMPT, FILES[:2], max_new_tokens=8)[0]
        drafted = _last(model, PROMPT, FILES[:2], max_new_tokens=8, speculate=Speculation("lookup"))[0]
        assert np.array_equal(drafted, wanted)


def test_requests_beside_each_other_get_the_answers_that_they_get_alone(bundle: Path):
    """Their prompts are run in pieces, by turns."""
    texts = [[0], [1, 2], [3, 0, 1]]

    def ask(client: OpenAI, numbers: list[int]) -> str | None:
        shown = ({"type": "image_url", "image_url": {"url": data_uri(FILES[number])}} for number in numbers)
        parts: Any = [*shown, {"type": "text", "text": "What are they, and what is the longest of them all?"}]
        answer = client.chat.completions.create(
            model=NAME, messages=[{"role": "user", "content": parts}], max_tokens=6, temperature=0.0
        )
        assert answer.usage is not None and answer.usage.prompt_tokens > 4 * len(numbers)
        return answer.choices[0].message.content

    with served(bundle) as server, ThreadPoolExecutor(3) as threads:
        client = server.client()
        alone = [ask(client, numbers) for numbers in texts]
    with served(bundle) as server, ThreadPoolExecutor(3) as threads:
        client = server.client()
        assert [*threads.map(lambda numbers: ask(client, numbers), texts)] == alone


def test_steps_that_would_cut_a_picture_are_refused(tmp_path: Path):
    folder = write_gemma3_vl(tmp_path / "gemma3")
    with pytest.raises(UsageError, match=r"--ar: got 1,2; expected one of 4 or more: .*Use --ar 1,4\."):
        exported(folder, export_options(context=96, ar=(1, 2)))


def test_a_picture_that_the_context_has_no_room_for_is_refused(bundle: Path, tmp_path: Path):
    with edgekv.load(bundle) as model, pytest.raises(ContextFullError):
        model.generate(f"{PLACE}" * 40, pictures=[FILES[0]] * 40)
