"""Answers of a small trained model that reads two digits, in integers."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.pictures import compare_answers
from edgekv.cli import run
from tests.support.exports import export_options, exported

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
