"""Qwen3-VL: whole pictures with rows behind several layers, and positions of rows and columns, as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from numpy.typing import NDArray
from openai import BadRequestError

import edgekv
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.conversation import Conversation
from edgekv.draft import Speculation
from edgekv.engine.request import Request
from edgekv.errors import CheckpointError, UsageError
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.model import Model
from edgekv.pictures import PictureEncoder, PositionOffsets, axis_positions, cut_tiles, encoder_inputs, row_places
from edgekv.pictures.positions import FIRST_ID
from edgekv.pictures.tiles import tile_grid
from edgekv.runtime.cpu import CpuEngine
from edgekv.spec import LAYER_INPUTS_PORT
from edgekv.text import SamplingParams
from edgekv.text.output import Token
from exporters.checkpoint.checkpoint import Checkpoint, PicturedRows
from exporters.checkpoint.rotate import ResidualRotation
from exporters.inspect.encoder import measure_encoder
from exporters.quantize.encoder import NumpyEncoder, encode
from exporters.quantize.reference import Reference
from tests.support.exports import export_options, exported
from tests.support.picture_models import SHAPED_SIZES, data_uri, photo, png, write_qwen3_vl
from tests.support.serving import NAME, served

GOLDEN = {
    name.removeprefix("qwen3_vl_"): value
    for name, value in np.load(Path(__file__).parents[2] / "golden" / "pictures.npz").items()
    if name.startswith("qwen3_vl_")
}
PLACE = "<|vision_start|><|image_pad|><|vision_end|>"
PROMPT = f"See {PLACE} and {PLACE} say:"
FILES = [png(photo(*size, number)) for number, size in enumerate(SHAPED_SIZES)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return Checkpoint.open(str(write_qwen3_vl(tmp_path_factory.mktemp("vlm") / "qwen3_vl")))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_qwen3_vl(tmp_path_factory.mktemp("vlm") / "qwen3_vl")
    return exported(folder, export_options(context=192, ar=(1, 16), draft_rows=(8,)))


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[Model]:
    with edgekv.load(bundle) as model:
        yield model


def _tiles(checkpoint: Checkpoint, count: int = 2) -> list[NDArray[np.uint8]]:
    vision = checkpoint.vision
    assert vision is not None
    pictures = [photo(*size, number) for number, size in enumerate(SHAPED_SIZES[:count])]
    return [cut_tiles(picture, vision.pictures, vision.spec.image).tiles[0] for picture in pictures]


def _places(checkpoint: Checkpoint) -> NDArray[np.int64]:
    assert checkpoint.vision is not None
    grids = [checkpoint.vision.spec.grid_of(*tile.shape[1::-1]) for tile in _tiles(checkpoint)]
    return np.concatenate([row_places(*grid) for grid in grids])


def _db(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(10 * np.log10(np.square(wanted).sum() / np.square(found - wanted).sum()))


@pytest.mark.parametrize("number", range(len(SHAPED_SIZES)))
def test_patches_are_those_of_transformers(checkpoint: Checkpoint, number: int):
    """There a patch has two frames, both of the same picture."""
    vision, size = checkpoint.vision, SHAPED_SIZES[number]
    assert vision is not None
    picture = cut_tiles(photo(*size, number), vision.pictures, vision.spec.image)
    wanted = GOLDEN[f"pixels{number}"].reshape(-1, 3, 2, 8, 8)[:, :, 0]
    found = encoder_inputs(picture.tiles[0], vision.spec, vision.pictures).patches
    assert found.shape[0] == wanted.shape[0]
    assert np.abs(found - wanted.reshape(found.shape)).max() < 1e-6
    assert picture.grid == tile_grid(size, vision.pictures, vision.spec.image)
    assert [edge // 8 for edge in picture.tiles[0].shape[:2]] == GOLDEN[f"grid{number}"][1:].tolist()


def test_rows_positions_and_logits_are_those_of_transformers(checkpoint: Checkpoint):
    """A prompt with two pictures: what is embedded, what is added behind layers, and where text goes on."""
    vision, spec, ids = checkpoint.vision, checkpoint.spec, GOLDEN["ids"].copy()
    assert vision is not None and spec.picture_layers == 2
    shown = [encoder_inputs(tile, vision.spec, vision.pictures) for tile in _tiles(checkpoint)]
    rows, places = np.concatenate(encode(NumpyEncoder(vision), vision.spec, shown)), _places(checkpoint)
    assert rows.shape == GOLDEN["rows"].shape
    for kind in range(3):
        block = slice(kind * spec.hidden, (kind + 1) * spec.hidden)
        wanted = GOLDEN["rows"][:, block]
        assert np.abs(rows[:, block] - wanted).max() < 1e-4 * np.abs(wanted).max()
    pictured = ids == vision.pictures.token_id
    of_tokens = np.zeros((len(ids), 3), np.int64)
    of_tokens[:, 2], of_tokens[pictured] = 1, places
    assert np.array_equal(axis_positions(of_tokens), GOLDEN["positions"])
    ids[pictured] = spec.vocab + np.arange(pictured.sum())
    (logits,) = Reference(checkpoint.with_pictures(PicturedRows(rows, places))).logits([ids])
    assert np.abs(logits - GOLDEN["logits"]).max() < 1e-4 * np.ptp(GOLDEN["logits"])


def _encoded(opened: Bundle, tile: NDArray[np.uint8], mode: CpuMode) -> NDArray[Any]:
    """What is embedded, and what is added behind layers, `[rows, 3 * hidden]`."""
    rows, encodings = PictureEncoder(opened, CpuEngine(1, mode=mode)).encode(tile), opened.manifest.encodings
    assert rows.behind is not None
    parts = encodings["embedding"].dequantize(rows.embeddings), encodings[LAYER_INPUTS_PORT].dequantize(rows.behind)
    return np.concatenate(parts, axis=1)


def test_rows_in_integers_are_those_of_transformers(bundle: Path, checkpoint: Checkpoint):
    opened = open_bundle(bundle)
    rotation, wanted = opened.manifest.recipe.rotation, GOLDEN["rows"]
    if rotation != "none":
        turned = ResidualRotation(checkpoint.spec, checkpoint.tensor, rotation).rotated(wanted.reshape(-1, 64))
        wanted = turned.reshape(wanted.shape)
    exact, fast = (
        np.concatenate([_encoded(opened, tile, mode) for tile in _tiles(checkpoint)]) for mode in ("emulate", "fast")
    )
    for kind in range(3):
        block = slice(64 * kind, 64 * (kind + 1))
        assert _db(exact[:, block], wanted[:, block]) > 30
        assert _db(fast[:, block], exact[:, block]) > 30
    assert min(layer.rows.mean_db for layer in measure_encoder(opened, checkpoint)) > 24


@pytest.mark.parametrize("mode", ["emulate", "fast"])
def test_the_bundle_reads_pictures_as_transformers_does(bundle: Path, mode: CpuMode):
    """In integers of 8 bits, of a random model that amplifies every rounding."""
    with edgekv.load(bundle, cpu_mode=mode) as model:
        generation = model.generate(PROMPT, max_new_tokens=1, temperature=0.0, return_logits=True, pictures=FILES[:2])
        logits = next(generation).logits
    assert logits is not None and generation.stats.prompt_tokens == len(GOLDEN["ids"])
    assert _db(logits, GOLDEN["logits"][-1]) > 20


def _answer(model: Model, prompt: str, pictures: list[bytes], **options: Any) -> tuple[list[int], int]:
    options = {"max_new_tokens": 8, "temperature": 0.0, "ignore_eos": True} | options
    generation = model.generate(prompt, pictures=pictures, **options)
    return [token.id for token in generation], generation.stats.cache.reused_tokens


def test_a_cache_that_goes_on_or_is_rewound_has_the_same_positions(model: Model):
    """A text behind a picture, within one, and behind another in its place, in caches that have their beginnings."""
    longer = f"{PROMPT} And {PLACE} too?"
    fresh = [_answer(model, prompt, files)[0] for prompt, files in ((PROMPT, FILES[:2]), (longer, FILES[:3]))]
    answers, reused = zip(
        _answer(model, PROMPT, FILES[:2], sequence=1),
        _answer(model, longer, FILES[:3], sequence=1),  # goes on
        _answer(model, PROMPT, FILES[:2], sequence=1),  # back to before the third picture
        strict=True,
    )
    assert [*answers] == [*fresh, fresh[0]] and reused[0] == 0 and min(reused[1:]) > 40
    other = [FILES[0], FILES[3]]
    wanted = _answer(model, PROMPT, other)[0]
    found, reused = _answer(model, PROMPT, other, sequence=1)
    assert found == wanted != fresh[0] and reused < 30


def test_a_prefix_of_a_picture_has_the_same_positions(bundle: Path, tmp_path: Path):
    """Blocks end within pictures; what follows them is computed at positions that the rows before have moved."""
    with edgekv.load(bundle, prefix_cache=tmp_path) as model:
        wanted = _answer(model, PROMPT, FILES[:2])[0]
    with edgekv.load(bundle, prefix_cache=tmp_path) as model:
        generation = model.generate(PROMPT, max_new_tokens=8, temperature=0.0, ignore_eos=True, pictures=FILES[:2])
        assert [token.id for token in generation] == wanted and generation.stats.cache.restored_tokens >= 16


def test_drafts_behind_a_picture_are_verified_at_its_positions(bundle: Path):
    with edgekv.load(bundle, cpu_mode="emulate") as model:
        wanted = _answer(model, PROMPT, FILES[:2])[0]
        assert _answer(model, PROMPT, FILES[:2], speculate=Speculation("lookup"))[0] == wanted


@pytest.mark.parametrize("kv_update", ["shift-concat", "pointer-shift", "slot", "mirror"])
def test_every_update_strategy_reads_pictures(bundle: Path, model: Model, kv_update: str):
    with edgekv.load(bundle, kv_update=kv_update) as other:
        assert _answer(other, PROMPT, FILES[:2]) == _answer(model, PROMPT, FILES[:2])


def test_a_conversation_goes_on_behind_a_picture(model: Model):
    """Its second turn has a picture too, and gets what the whole text gets in an empty cache."""
    conversation = Conversation(model, params=SamplingParams(temperature=0.0, max_new_tokens=8))
    for number in range(2):
        answer = conversation.say("What?", [model.open_picture(FILES[number])])
        tokens = [token.id for token in answer]
    first, second = conversation.messages[1]["content"], len(tokens)
    assert second and isinstance(first, str) and answer.stats.cache.reused_tokens > 20


def test_openai_clients_send_pictures(bundle: Path):
    """Unmodified, by both kinds of requests; too many are counted before any is decoded."""

    def parts(*numbers: int) -> Any:
        urls = [data_uri(FILES[number]) for number in numbers]
        return [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": "What?"}]

    with served(bundle) as server:
        client = server.client()
        messages: list[Any] = [{"role": "user", "content": parts(0, 1)}]
        first = client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, temperature=0.0)
        said = first.choices[0].message.content
        assert first.usage is not None and first.usage.prompt_tokens > 15 + 16
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": parts(2)}]
        second = client.chat.completions.create(model=NAME, messages=messages, max_tokens=6, temperature=0.0)
        assert second.usage is not None and second.usage.prompt_tokens > first.usage.prompt_tokens + 9
        shown: Any = {"type": "input_image", "detail": "auto", "image_url": data_uri(FILES[0])}
        asked: Any = [{"role": "user", "content": [shown, {"type": "input_text", "text": "What?"}]}]
        assert client.responses.create(model=NAME, input=asked, max_output_tokens=4).usage
        damaged = data_uri(FILES[0][:-40])  # its header is whole: that it cannot be decoded is never seen
        urls: Any = [{"type": "image_url", "image_url": {"url": damaged}}] * 20
        with pytest.raises(BadRequestError, match="tokens") as refusal:
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": urls}])
        assert "damaged" not in str(refusal.value)
        with pytest.raises(BadRequestError, match="a damaged file"):
            client.chat.completions.create(model=NAME, messages=[{"role": "user", "content": urls[:1]}])
    with edgekv.load(bundle) as model:
        messages = [{"role": "user", "content": [{"type": "image", "picture": number} for number in range(2)]}]
        messages[0]["content"].append({"type": "text", "text": "What?"})
        generation = model.generate(messages=messages, pictures=FILES[:2], max_new_tokens=6, temperature=0.0)
        assert "".join(token.text for token in generation) == said


def test_a_policy_that_renumbers_tokens_is_refused_with_pictures(bundle: Path):
    with edgekv.load(bundle, policy="sinks(4,64)") as model:
        assert [*model.generate("See", max_new_tokens=2, temperature=0.0)]
        with pytest.raises(UsageError, match="context policy sinks"):
            model.generate(PROMPT, pictures=FILES[:2])


def test_a_prompt_without_a_place_has_pictures_with_their_marks_in_front(model: Model):
    generation = model.generate("Say:", max_new_tokens=1, temperature=0.0, pictures=FILES[:1])
    assert generation.stats.prompt_tokens == len(model.encode(f"{PLACE}Say:")) - 1 + 15
    assert str(generation.pictures[0]) == "100 x 60 pixels, shown as 80 x 48, 15 tokens"


def test_pictures_get_the_nearest_of_the_sizes_of_an_export(tmp_path: Path):
    """One graph for all: smaller ones have inputs that no patch sees."""
    folder = write_qwen3_vl(tmp_path / "qwen3_vl")
    options = export_options(context=96, ar=(1, 16), picture_sizes=((48, 48), (96, 48), (48, 96)))
    bundle = exported(folder, options)
    vision = open_bundle(bundle).manifest.vision
    assert vision is not None and vision.shown == "pictures of 48 x 48 or 96 x 48 or 48 x 96 pixels"
    assert vision.encoder.patches == 72 and vision.encoder.rows == 18
    for size, whole in (((400, 390), (48, 48)), ((100, 60), (96, 48)), ((30, 90), (48, 96)), ((1, 1), (48, 48))):
        assert tile_grid(size, vision.pictures, vision.encoder.image).whole == whole
    with edgekv.load(bundle) as model:
        picture = model.open_picture(FILES[0])
        assert str(picture) == "100 x 60 pixels, shown as 96 x 48, 18 tokens"
        assert len(_answer(model, f"See {PLACE}:", FILES[:1])[0]) == 8


@pytest.mark.parametrize(
    ("sizes", "found"),
    [
        (((50, 48),), "50x48; expected multiples of 16 pixels. Use 48x48"),
        (((4096, 4096),), "262,144 patches; expected at most 262,144 pixels"),
    ],
)
def test_sizes_that_no_picture_can_have_are_refused(checkpoint: Checkpoint, sizes: Any, found: str):
    assert checkpoint.vision is not None
    with pytest.raises(UsageError, match=f"--picture-sizes: got {found}"):
        checkpoint.vision.with_sizes(sizes)


@pytest.mark.parametrize("listed", ["448", "448x", "0x448", "448x448,448x448", "9000x48", "448x448;896x448"])
def test_a_list_of_sizes_is_read_or_refused(listed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run(["export", str(tmp_path), "-o", str(tmp_path / "out"), "--picture-sizes", listed]) == 2
    assert "--picture-sizes" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"vision_config": {"deepstack_visual_indexes": [2, 0]}}, "deepstack_visual_indexes: .*ascending"),
        ({"vision_config": {"deepstack_visual_indexes": [0, 9]}}, "deepstack_visual_indexes: .*from 0 to 3"),
        ({"vision_config": {"out_hidden_size": 32}}, "out_hidden_size: got 32; expected 64"),
        ({"vision_config": {"temporal_patch_size": 1}}, "temporal_patch_size: got 1; expected 2"),
        ({"vision_config": {"num_position_embeddings": 24}}, "num_position_embeddings: got 24; expected the square"),
        ({"vision_config": {"hidden_act": "relu"}}, "hidden_act: got 'relu'"),
        ({"text_config": {"rope_parameters": {"mrope_section": [4, 4, 4]}}}, "mrope_section: got .*together 8"),
        ({"text_config": {"rope_parameters": {"mrope_interleaved": False}}}, "mrope_interleaved: got False"),
    ],
)
def test_what_another_encoder_has_is_refused(change: dict[str, Any], found: str, tmp_path: Path):
    folder = write_qwen3_vl(tmp_path)
    config = json.loads((folder / "config.json").read_text())
    for name, fields in change.items():
        for field, value in fields.items():
            own = config[name].get(field)
            config[name][field] = {**own, **value} if isinstance(own, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=found):
        Checkpoint.open(str(folder))


_TEXTS = st.lists(st.one_of(st.just((0, 0)), st.tuples(st.integers(1, 4), st.integers(1, 4))), max_size=8)


@given(_TEXTS, st.lists(st.integers(0, 60), max_size=6))
def test_positions_are_counted_the_same_from_any_cut(pieces: list[tuple[int, int]], cuts: list[int]):
    """What is behind any beginning is what all tokens up to there give."""
    tokens, places = list[int](), list[NDArray[np.int64]]()
    for rows, columns in pieces:
        added = row_places(rows, columns) if rows else np.array([[0, 0, 1]])
        tokens += [FIRST_ID + len(tokens) + at if rows else 7 for at in range(len(added))]
        places.append(added)
    every = np.concatenate([np.zeros((0, 3), np.int64), *places])
    offsets = PositionOffsets(lambda id: every[id - FIRST_ID].tolist())
    for cut in [*cuts, len(tokens)]:
        beginning = tokens[: min(cut, len(tokens))]
        assert offsets.of(beginning) == int(every[: len(beginning), 2].sum()) - len(beginning)


def test_parts_behind_the_first_layers_read_no_rows_of_pictures(model: Model, tmp_path: Path):
    """Only those with layers that add some have the input."""
    folder = write_qwen3_vl(tmp_path / "qwen3_vl", layers=4)
    options = export_options(context=192, ar=(1, 16))
    whole, split = (exported(folder, each) for each in (options, replace(options, splits=4)))
    manifest = open_bundle(split).manifest
    named = [
        [port.name for port in interface.inputs if port.kind == "layer_inputs"]
        for interface in manifest.interface.parts(manifest.graphs[0])
    ]
    assert named[:2] == [[LAYER_INPUTS_PORT]] * 2 and len(named) > 3 and not any(named[2:])
    with edgekv.load(whole) as one, edgekv.load(split) as four:
        assert _answer(one, PROMPT, FILES[:2]) == _answer(four, PROMPT, FILES[:2])


@pytest.mark.htp
def test_sequences_of_a_pass_have_positions_of_their_own(bundle: Path):
    """Rows of pictures have moved each text by another number."""
    with edgekv.load(bundle, "htp") as model:
        pictures, engine = [model.open_picture(file) for file in FILES[:3]], model.engine
        prompts = [f"See {PLACE}" + " and say" * number for number in range(3)]
        alone = [_answer(model, prompt, [file])[0] for prompt, file in zip(prompts, FILES, strict=False)]
        model.sequences.clear()
        params, found = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True), dict[Any, list[int]]()
        engine.shares_passes = True
        added = []
        for at, (prompt, picture) in enumerate(zip(prompts, pictures, strict=True)):
            text = model.pictures.expanded(prompt, [picture], "prompt")
            tokens = model.pictures.put(model.encode(text), [picture])
            added.append(engine.add(Request(tokens, params, cache=at, pictures=(picture,))))
        while engine.running or engine.waiting:
            for sequence, event in engine.step():
                assert isinstance(event, Token)
                found.setdefault(sequence, []).append(event.id)
        assert [found[sequence] for sequence in added] == alone and model.batch.passes
