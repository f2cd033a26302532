"""The calibration text: prose, a fifth of it as chats in the checkpoint's template."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edgekv.cli import run
from edgekv.spec.chat import ChatTemplates
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.plan import plan_export
from exporters.quantize.calibrate import as_chats, default_calibration, default_chats, rendered
from exporters.quantize.scripts import unseen_scripts
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.exports import small_options

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
TEXT = "One. Two. Three.\n\nNo second sentence\n\nFour. Five.\n\nSix. Seven."


def test_a_paragraph_becomes_a_question_and_an_answer() -> None:
    templates = ChatTemplates(templates={"default": TEMPLATE})
    whole = "<user>One.</s><assistant>Two. Three.</s><user>Four.</s><assistant>Five.</s>"
    assert rendered(templates, as_chats(TEXT, 20)) == whole
    assert rendered(templates, as_chats(TEXT, 1000)) == whole + "<user>Six.</s><assistant>Seven.</s>"
    refusing = ChatTemplates(templates={"default": "{{ raise_exception('no') }}"})
    assert rendered(refusing, default_chats()) == ""


@pytest.mark.parametrize("tokens", [512, 2048])
def test_a_fifth_of_the_tokens_are_chats(tmp_path: Path, tokens: int) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", NEWER)
    options = small_options(context=64, ar=(1, 16), calibration_tokens=tokens)
    plain = plan_export(Checkpoint.open(str(folder)), options).survey_tokens
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    opened = Checkpoint.open(str(folder))
    mixed = plan_export(opened, options).survey_tokens
    assert mixed.shape == plain.shape
    share = tokens // 5 // 64
    np.testing.assert_array_equal(mixed[: len(plain) - share], plain[: len(plain) - share])
    texts = [opened.tokenizer.decode(window.tolist(), skip_special_tokens=False) for window in mixed]
    assert ["<assistant>" in text or "<user>" in text for text in texts[:-share]] == [False] * (len(plain) - share)
    assert "<user>" in "".join(texts[-share:])
    assert texts[-1] not in default_calibration()


def test_a_text_that_is_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", NEWER)
    command = ["export", str(folder), "--device", "SM8650", "--skip-htp-check", "--no-quality-check", "-q"]
    command += ["--context", "64", "--ar", "1,16"]
    assert run([*command, "-o", str(tmp_path / "a"), "--calibration-tokens", "64"]) == 0
    assert "edgekv: warning: calibration: got 64 tokens; expected at least" in capsys.readouterr().err
    assert run([*command, "-o", str(tmp_path / "b"), "--calibration-tokens", "512"]) == 0
    assert "warning" not in capsys.readouterr().err


def test_scripts_that_a_text_lacks_are_named() -> None:
    tokens = ["the", " on", "мир", " да", "12", "\n", "好", "ende"]
    assert unseen_scripts(default_calibration(), tokens) == {"CYRILLIC": 2 / 6, "CJK": 1 / 6}
    assert unseen_scripts("Hello, мир и да, 你好", tokens) == {}
    assert unseen_scripts("Hello", ["one", "two"]) == {}


def test_a_text_of_one_language_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, text = write_checkpoint(tmp_path / "checkpoint", NEWER), tmp_path / "text.txt"
    text.write_text("мир и война " * 400)
    command = ["export", str(folder), "--device", "SM8650", "--skip-htp-check", "--no-quality-check", "-q"]
    command += ["--context", "64", "--ar", "1,16", "--calibration-tokens", "512"]
    assert run([*command, "-o", str(tmp_path / "a"), "--calibration", str(text)]) == 0
    assert (
        "calibration: text.txt text has no letters of some scripts of the vocabulary (latin" in capsys.readouterr().err
    )
