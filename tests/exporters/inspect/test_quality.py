"""What every export says it lost: the bundle against the float model, on prose and on a chat."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import QualityRecord, open_bundle
from edgekv.cli import run
from exporters.checkpoint import columns
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.evaluate import evaluate
from exporters.inspect.held_out import HeldOutChat, held_out_chat, held_out_prose
from exporters.inspect.wikitext import Window
from exporters.pipeline.quality import ReferencePiece, StoredLogits
from exporters.quantize.recipe import Recipe, WeightRule
from exporters.quantize.reference import Reference
from tests.support.checkpoints import NEWER, write_sinking
from tests.support.exports import ROOT, export_options, exported

EMBEDDED = ROOT / "models" / "stdlib-4m"
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
SMALL = {"context": 64, "ar": (1, 16), "calibration_tokens": 256, "check_quality": True}


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_sinking(tmp_path_factory.mktemp("talker") / "checkpoint", NEWER)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def measured(bundle: Path) -> tuple[QualityRecord, ...]:
    return open_bundle(bundle).manifest.quality


@pytest.mark.parametrize("changes", [{}, {"graph_format": "tflite", "kv_dtype": "s8"}])
def test_an_export_says_what_eval_finds(talker: Path, changes: dict[str, str]) -> None:
    bundle, opened = exported(talker, export_options(**SMALL | changes)), Checkpoint.open(str(talker))
    texts, found = {"prose": held_out_prose(), "chat": held_out_chat(opened.chat)}, measured(bundle)
    assert [(each.text, each.tokens) for each in found[:2]] == [("prose", 512), ("chat", 256)]
    with edgekv.load(bundle, engine="litert" if changes else "cpu") as model:
        for each in found[:2]:
            wanted = evaluate(model, opened, texts[each.text], "", tokens=each.tokens)
            assert each.kl_nats == pytest.approx(wanted.kl_nats, rel=0.06)
            assert each.top1_agreement == pytest.approx(wanted.top1_agreement, abs=3e-3)  # a near tie
            assert each.min_token_sqnr_db == pytest.approx(wanted.min_token_sqnr_db, abs=0.06)


def test_the_reference_holds_some_rows_of_the_head_at_a_time(
    talker: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(columns, "_ROWS_AT_ONCE", 100)
    opened, tokens = Checkpoint.open(str(talker)), [np.arange(20), np.arange(33)]
    windows = [Window.of(each) for each in tokens]
    text = SimpleNamespace(decoder=SimpleNamespace(spec=opened.spec), context=64, windows=lambda inputs: windows)
    ReferencePiece((text,)).make(tmp_path, SimpleNamespace(exact=lambda exact: opened))  # type: ignore[arg-type]
    for found, wanted in zip(StoredLogits(tmp_path).logits(tokens), Reference(opened, 64).logits(tokens), strict=True):
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@pytest.mark.parametrize("first", [(), (300,), (300, 301)])
def test_tokens_of_the_template_are_those_outside_of_messages(talker: Path, first: tuple[int, ...]) -> None:
    opened = Checkpoint.open(str(talker))
    chat = HeldOutChat.of(opened.tokenizer, opened.chat)
    assert chat is not None
    texts = ["".join(opened.tokenizer.decode([chat.ids[place]]) for place in chat.template)]
    for length in (64, 2048):
        windows = chat.windows(length, first, tokens=len(chat.ids))
        marked = [each.window.targets[each.of_template].tolist() for each in windows]
        texts.append(opened.tokenizer.decode([token for each in marked for token in each]))
    whole = "<user></s><assistant></s>" * 3
    assert texts[0] == whole
    assert texts[2] in (whole, whole[1:]), "the first token of a text without a sink is given"
    assert len(texts[1]) > 0.9 * len(whole)


def test_eval_and_compare_have_rows_for_chats(talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle, text = exported(talker, export_options(**SMALL)), tmp_path / "text.txt"
    text.write_text(held_out_prose())
    (chat, template) = measured(bundle)[1:]
    assert template.text == "template" and 20 < template.tokens < chat.tokens / 2
    assert run(["eval", str(bundle), "--text", str(text), "--json"]) == 0
    of_eval = json.loads(capsys.readouterr().out)["chat"]
    assert (
        run(
            [
                "compare",
                str(talker),
                str(bundle),
                "--text",
                str(text),
                "--window",
                "64",
                "--new-tokens",
                "0",
                "--json",
                "--cpu-mode",
                "emulate",
            ]
        )
        == 0
    )
    of_compare = json.loads(capsys.readouterr().out)["chat"]
    for found in (of_eval, of_compare):
        assert [(each["text"], each["tokens"]) for each in found] == [("chat", 256), ("template", template.tokens)]
        for each, wanted in zip(found, (chat, template), strict=True):
            assert each["kl_nats"] == pytest.approx(wanted.kl_nats, rel=0.15)
    assert run(["eval", str(bundle), "--text", str(text), "--tokens", "100"]) == 0
    shown = capsys.readouterr().out
    assert "  chat            0." in shown and "  chat's template 0." in shown


def test_a_model_without_a_template_is_measured_on_prose(capsys: pytest.CaptureFixture[str]) -> None:
    bundle = exported(EMBEDDED, export_options(check_quality=True))
    (found,) = measured(bundle)
    assert found.kl_nats < 0.002
    assert run(["info", str(bundle)]) == 0
    assert f"quality        {found}" in capsys.readouterr().out


def test_a_broken_choice_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = shutil.copytree(EMBEDDED, tmp_path / "checkpoint")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] *= 8  # logits far apart: a small error chooses another token
    save_file(tensors, source / "model.safetensors")
    rules = (WeightRule(tensors="*", dtype="int4", method="nearest"),)
    Recipe(name="", weights=rules, activations="u16", rotation="none").write(recipe := tmp_path / "nearest.json")
    command = ["export", str(source), "--device", "SM8650", "--skip-htp-check", "--calibration-tokens", "512", "-q"]
    assert run([*command, "-o", str(tmp_path / "a"), "--recipe", str(recipe)]) == 0
    assert "edgekv: warning: quality: KL divergence " in capsys.readouterr().err
    assert measured(tmp_path / "a")[0].kl_nats > 0.2
    assert run([*command, "-o", str(tmp_path / "b"), "--no-quality-check"]) == 0
    assert measured(tmp_path / "b") == () and "quality" not in capsys.readouterr().out
    assert run(["info", str(tmp_path / "b")]) == 0
    assert "not measured at export" in capsys.readouterr().out
