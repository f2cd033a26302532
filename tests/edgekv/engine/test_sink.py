"""The first token of every sequence, whose keys and values are restored and never computed by a graph."""

from __future__ import annotations

import json
import shutil
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from safetensors.numpy import load_file, save_file
from tokenizers.processors import TemplateProcessing

import edgekv
from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.engine.saved import load_sequence, save_sequence
from edgekv.errors import BundleError, ContextFullError, UsageError
from edgekv.prefix import StoreConfig
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compare import ComparePlan, ContenderOptions, open_contender
from exporters.compare.comparison import text_windows
from exporters.export import export_bundle
from exporters.inspect.evaluate import evaluation_windows
from exporters.inspect.tally import Tally
from exporters.inspect.wikitext import Window, rolling_windows
from exporters.quantize.calibrate import calibration_windows, cut_windows
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import find_recipe
from exporters.quantize.reference import Reference
from exporters.quantize.sink import sink_candidates
from exporters.quantize.sink_request import SinkRequest
from tests.support.checkpoints import ARCHITECTURES, NEWER, WINDOW, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported, small_options
from tests.support.serving import served

BOS = 256
PROMPT = [BOS, *range(40, 100)]
WORDS = PROMPT[:50]  # ASCII, so that they are the tokens of their text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_sinking(tmp_path_factory.mktemp("sink"), NEWER)


@pytest.fixture(scope="module")
def sinking(checkpoint: Path) -> Path:
    return exported(checkpoint, export_options(context=(64, 128), ar=(1, 16), calibration_tokens=512))


@pytest.fixture(scope="module")
def plain(checkpoint: Path) -> Path:
    options = export_options(context=128, ar=(1, 16), calibration_tokens=512, sink=SinkRequest("none"))
    return exported(checkpoint, options)


@pytest.fixture(scope="module")
def several(checkpoint: Path) -> Path:
    sink = SinkRequest("tokens", tuple(PROMPT[:3]))
    return exported(checkpoint, export_options(context=128, ar=(1, 16), calibration_tokens=512, sink=sink))


def decoded(bundle: Path, prompt: list[int], **options: object) -> list[int]:
    with edgekv.load(bundle, threads=1, **options) as model:  # type: ignore[arg-type]
        return [token.id for token in model.generate(prompt, 12, ignore_eos=True)]


def until_eos(tokens: list[int]) -> list[int]:
    """Beam search ends with a token that ends texts."""
    return tokens[: next((at + 1 for at, token in enumerate(tokens) if token in (257, 258)), len(tokens))]


def token_sqnr_db(bundle: Path, checkpoint: Path, engine: str = "cpu") -> float:
    window = np.array(PROMPT)
    tally = Tally()
    with edgekv.load(bundle, engine, threads=1) as model:
        expected = next(Reference(Checkpoint.open(str(checkpoint)), 128).logits([window]))
        tally.add(Window.of(window), expected, model.score(PROMPT))
    return tally.evaluation("cpu", "").token_sqnr_db


def test_the_files_of_a_bundle_have_the_modes_of_new_files(sinking: Path, tmp_path: Path) -> None:
    """A service user reads them."""
    (tmp_path / "new").touch()
    modes = {path.name: path.stat().st_mode for path in sinking.rglob("*") if path.is_file()}
    assert {"heads.safetensors", "sink.safetensors"} <= modes.keys()
    assert set(modes.values()) == {(tmp_path / "new").stat().st_mode}


def test_export_finds_a_token_that_spans_the_ranges(sinking: Path, plain: Path, small: Path) -> None:
    record = open_bundle(sinking).manifest.sink
    assert record is not None
    assert record.tokens == [BOS]
    assert record.result in ("layers.0.mlp", "layers.0.down")
    assert record.ratio > 100
    assert open_bundle(plain).manifest.sink is None
    assert open_bundle(small).manifest.sink is None, "no token of a plain random model stands out"


def test_ranges_leave_the_sink_out(sinking: Path, plain: Path) -> None:
    kept, spanned = (open_bundle(each).manifest.encodings["layers.0.mlp_add"].scale for each in (sinking, plain))
    assert kept < spanned / 50


def test_a_sink_of_several_tokens_is_as_precise(several: Path, sinking: Path, checkpoint: Path) -> None:
    assert open_bundle(several).manifest.sink.tokens == PROMPT[:3]
    assert token_sqnr_db(several, checkpoint) > token_sqnr_db(sinking, checkpoint) - 1


def test_the_other_tokens_gain_precision(sinking: Path, plain: Path, checkpoint: Path) -> None:
    assert token_sqnr_db(sinking, checkpoint) > token_sqnr_db(plain, checkpoint) + 10


@pytest.mark.slow
def test_layers_with_a_window_lose_the_sink_as_the_model_does(tmp_path: Path) -> None:
    folder = write_sinking(tmp_path, ARCHITECTURES["mistral"])
    assert len(PROMPT) / 2 > WINDOW
    changes = {"context": 128, "ar": (1, 16), "calibration_tokens": 512}
    bundle = exported(folder, export_options(**changes))
    spanned = exported(folder, export_options(**changes, sink=SinkRequest("none")))
    assert open_bundle(bundle).manifest.sink is not None
    assert token_sqnr_db(bundle, folder) > token_sqnr_db(spanned, folder) + 10


def test_tflite_graphs_start_with_the_sink(checkpoint: Path, sinking: Path) -> None:
    options = export_options(context=128, ar=(1, 16), calibration_tokens=512, graph_format="tflite", kv_dtype="s8")
    found = token_sqnr_db(exported(checkpoint, options), checkpoint, "litert")
    assert found > token_sqnr_db(sinking, checkpoint) - 1


def test_the_sink_has_the_reference_s_logits(sinking: Path, checkpoint: Path) -> None:
    expected = next(Reference(Checkpoint.open(str(checkpoint)), 128).logits([np.array([BOS])]))
    step = open_bundle(sinking).manifest.encodings["logits"].scale
    with edgekv.load(sinking, threads=1) as model:
        np.testing.assert_allclose(model.score([BOS]), expected, atol=0.51 * step)
        (token,) = model.generate([BOS], 1, ignore_eos=True)
        assert token.id == expected[0].argmax()
        assert model.session.cache.length == 1


def test_a_text_without_the_sink_gets_it_in_front(sinking: Path) -> None:
    assert decoded(sinking, PROMPT[1:]) == decoded(sinking, PROMPT)
    with edgekv.load(sinking, threads=1) as model:
        np.testing.assert_array_equal(model.score(PROMPT[1:]), model.score(PROMPT)[1:])
        generation = model.generate(PROMPT[1:], 2)
        list(generation)
        assert list(generation.prompt) == PROMPT
        assert (generation.stats.cache.reused_tokens, generation.stats.cache.computed_tokens) == (1, len(PROMPT))
        with pytest.raises(ContextFullError, match="129 tokens"):
            model.generate([40] * 128, 1)


def test_a_server_promises_a_context_without_the_sink(sinking: Path) -> None:
    with served(sinking) as server:
        (listed,) = server.client().models.list().data
        assert listed.model_extra is not None
        fits = listed.model_extra["context_length"]
        body = {"max_tokens": 1, "prompt": [40] * fits}
        assert server.post("/v1/completions", body)[0] == 200
        assert server.post("/v1/completions", body | {"prompt": [40] * (fits + 1)})[0] == 400


def test_a_sink_of_several_tokens_has_the_bos_that_the_tokenizer_adds(several: Path, tmp_path: Path) -> None:
    shutil.copytree(several, bundle := tmp_path / "bundle")
    opened = open_bundle(bundle)
    tokenizer = opened.tokenizer()
    tokenizer.post_processor = TemplateProcessing(single="<|0|> $A", special_tokens=[("<|0|>", BOS)])
    tokenizer.save(str(bundle / "tokenizer.json"))
    with edgekv.load(Bundle(bundle, opened.manifest), threads=1) as model:
        assert model.encode("abc") == [BOS, 64, 65, 66]
        assert model.read("abc") == [*PROMPT[:3], 64, 65, 66]


def test_every_command_reads_a_text_that_begins_with_the_sink_as_it_is(
    sinking: Path, several: Path, checkpoint: Path, tmp_path: Path
) -> None:
    source, trace = Checkpoint.open(str(checkpoint)), tmp_path / "trace.npz"
    file = tmp_path / "text"
    for bundle, first in ((sinking, WORDS[:1]), (several, WORDS[:3])):
        manifest, written = open_bundle(bundle).manifest, set()
        for tokens in (WORDS, WORDS[len(first) :]):
            text = source.tokenizer.decode(tokens, skip_special_tokens=False)
            assert source.encode(text) == tokens
            (window,) = evaluation_windows(source, text, manifest, 100)
            assert window.inputs.tolist() == WORDS
            assert window.targets.tolist() == WORDS[len(first) :], "the sink is given"
            assert calibration_windows(tokens, 32, 32, first)[0].tolist() == WORDS[:32]
            with closing(open_contender(bundle, ContenderOptions())) as model:
                (window,) = text_windows(model, model, text, ComparePlan(tokens=100))
            assert window.inputs.tolist() == WORDS
            (window,) = rolling_windows(tokens, [257], 128, first)
            assert window.targets.tolist() == WORDS[len(first) :]
            file.write_text(text, "utf-8", newline="")
            options = ["--checkpoint", str(checkpoint), "--tokens", str(len(WORDS))]
            assert run(["trace", str(bundle), "-o", str(trace), "--text", str(file), *options]) == 0
            written.add(np.load(trace)["logits"].tobytes())
        assert len(written) == 1


@given(st.lists(st.integers(0, 2), min_size=2, max_size=40), st.lists(st.integers(0, 2), max_size=3), st.integers(1, 9))
def test_windows_hold_all_of_a_text_and_begin_alike(ids: list[int], first: list[int], room: int) -> None:
    with suppress(UsageError):  # nothing but first tokens
        windows = [each.tolist() for each in cut_windows(ids, max(1, len(first)) + room, first)]
        at = 0
        for window in windows:
            at += len(first) if ids[at : at + len(first)] == first else 0
            rest = ids[at : at + len(window) - len(first)]
            assert window == [*first, *rest]
            at += len(rest)
        assert len(ids) - at <= max(1, len(first))


@pytest.mark.parametrize("update", ["slot", "mirror", "pointer-shift", "shift-concat"])
def test_every_strategy_begins_with_the_sink(sinking: Path, update: str) -> None:
    assert decoded(sinking, PROMPT, kv_update=update) == decoded(sinking, PROMPT)


@pytest.mark.parametrize("growth", ["staggered", "together"])
def test_growing_memory_carries_the_sink_along(sinking: Path, growth: str) -> None:
    assert decoded(sinking, PROMPT, kv_growth=growth) == decoded(sinking, PROMPT)


def test_keys_as_columns_hold_the_same_sink(checkpoint: Path, sinking: Path) -> None:
    options = export_options(context=128, ar=(1, 16), calibration_tokens=512, key_layout="columns")
    assert decoded(exported(checkpoint, options), PROMPT) == decoded(sinking, PROMPT)


def test_a_stored_prefix_begins_with_the_sink(sinking: Path) -> None:
    expected = decoded(sinking, PROMPT)
    with edgekv.load(sinking, threads=1, prefix_cache=StoreConfig(tokens_per_block=16)) as model:
        for restored in (0, len(PROMPT) - 2):
            generation = model.generate(PROMPT, 12, ignore_eos=True)
            assert [token.id for token in generation] == expected
            assert generation.stats.cache.restored_tokens == restored, (
                "the sink is in the cache already, the last token runs"
            )
        (only,) = model.generate([BOS], 1, ignore_eos=True)
        assert only.id == decoded(sinking, [BOS])[0]


def test_sequences_and_beams_begin_with_the_sink(sinking: Path, tmp_path: Path) -> None:
    expected = decoded(sinking, PROMPT)
    file = tmp_path / "talk"
    with edgekv.load(sinking, threads=1) as model:
        assert [token.id for token in model.generate(PROMPT, 12, ignore_eos=True, sequence=1)] == expected
        other = [BOS, *range(200, 220)]
        assert [t.id for t in model.generate(other, 12, ignore_eos=True, sequence=1)] == decoded(sinking, other)
        assert save_sequence(model.engine, 1, file) == len(other) + 11
        model.sequences.get_or_create(2)
        assert save_sequence(model.engine, 2, tmp_path / "empty") == 0
        assert list(model.generate(PROMPT, num_beams=1, max_new_tokens=12).sequences[0].tokens) == until_eos(expected)
    with edgekv.load(sinking, threads=1) as model:
        assert load_sequence(model.engine, 1, file) == len(other) + 11
        assert [t.id for t in model.generate(other, 12, ignore_eos=True, sequence=1)] == decoded(sinking, other)


def test_policies_never_drop_the_sink(sinking: Path) -> None:
    for policy in ("sinks(1, 64)", "keydiff(64)"):
        with edgekv.load(sinking, threads=1, policy=policy) as model:
            row = {name: rows[0] for group in model.cache.groups for name, rows in group.snapshot().items()}
            for _ in model.generate(PROMPT, 150, ignore_eos=True):
                pass
            assert model.cache.stats.evicted > 0
            assert model.cache.positions[0] == 0
            for group in model.cache.groups:
                for name, rows in group.snapshot().items():
                    np.testing.assert_array_equal(rows[0], row[name])


@pytest.mark.parametrize(
    ("policy", "message"),
    [("sliding-window", r"its sink\); expected a policy that keeps them. Use sinks\(1, WINDOW\)")],
)
def test_a_policy_that_would_drop_the_sink_is_refused(sinking: Path, policy: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        edgekv.load(sinking, policy=policy)


@pytest.mark.slow
def test_a_wrong_file_of_the_sink_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bundle"
    export_bundle(Checkpoint.open(str(checkpoint)), folder, small_options(context=64, ar=(1, 16)))
    rows = load_file(folder / "sink.safetensors")
    rows["logits"] = rows["logits"][:, 1:]
    save_file(rows, folder / "sink.safetensors")
    with pytest.raises(BundleError, match=r"sink.safetensors: got .* bytes; expected"):
        edgekv.load(folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["sink"]["tokens"] == [BOS]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("never", "--sink: got 'never'; expected auto, none, or token ids such as 1. Use auto."),
        ("999", "--sink: got token 999; expected ids below 320"),
        ("7", "--sink: got token 7 first; expected 256, bos, with which texts begin"),
    ],
)
def test_a_sink_that_cannot_be_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wanted: str, message: str
) -> None:
    target = str(tmp_path / "out")
    assert run(
        [
            "export",
            str(checkpoint),
            "-o",
            target,
            "--device",
            "SM8650",
            "--context",
            "64",
            "--sink",
            wanted,
            "--skip-htp-check",
        ]
    )
    assert message in capsys.readouterr().err
    assert not Path(target).exists()


def test_windows_without_room_behind_the_sink_are_refused(
    several: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def refused(*arguments: object) -> str:
        assert run([str(each) for each in arguments]) == 2
        return capsys.readouterr().err.splitlines()[-1]  # behind the bar of a phase

    def message(field: str, length: int, least: int) -> str:
        wanted = f"expected at least {least}: the first {least - 1} of every text, and one more. Use {least} or more."
        return f"edgekv: error: {field}: got {length} tokens; {wanted}"

    export = ["export", checkpoint, "-o", tmp_path / "out", "--device", "SM8650", "--context", 64, "--skip-htp-check"]
    short = [*export, "--calibration-tokens", 2, "--sink"]
    assert refused(*short, "256,40") == message("--calibration-tokens", 2, 3)
    assert refused(*short, "256,40,41") == message("--calibration-tokens", 2, 4)
    (text := tmp_path / "text").write_text("Some text.")
    assert refused("compare", several, several, "--text", text, "--window", 2, "--new-tokens", 0) == message(
        "--window", 2, 4
    )
    moved = ["--checkpoint", checkpoint, "--tokens", 3]
    traced = refused("trace", several, "-o", tmp_path / "t.npz", "--text", text, *moved)
    assert traced == message("--tokens", 3, 4)


def test_texts_without_bos_begin_as_chats_or_with_eos(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "plain", {**NEWER, "bos_token_id": None})
    (folder / "generation_config.json").unlink()
    assert sink_candidates(Checkpoint.open(str(folder)), SinkRequest()) == (257,)
    (folder / "chat_template.jinja").write_text("A{% for m in messages %}{{ m['content'] }}{% endfor %}")
    chat = Checkpoint.open(str(folder))
    assert sink_candidates(chat, SinkRequest()) == (chat.encode("A")[0],)


def test_a_massive_token_behind_the_sink_widens_ranges_by_four_bits_at_most(checkpoint: Path) -> None:
    def widest(tokens: list[int]) -> float:
        quantizer = Quantizer(Checkpoint.open(str(checkpoint)), np.array([tokens]), 64, find_recipe("w8a16"), sink=1)
        dict(quantizer.layer(0))
        return quantizer.take_ranges()["layers.0.mlp"].absmax

    usual = widest([BOS, *range(40, 70)])
    assert 8 * usual < widest([BOS, BOS, *range(41, 70)]) < 32 * usual
    assert widest([BOS, 40, BOS, *range(42, 70)]) > 100 * usual
