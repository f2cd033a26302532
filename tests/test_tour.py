"""The tour's one file does what the product does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

import edgekv
from docs.tour.nano_edgekv import CHECKPOINT, PREFILL, Cache, Model, S
from tests.support.pages import ROOT

FILE = ROOT / "docs" / "tour" / "nano_edgekv.py"
RECIPE = """{"weights": [{"tensors": "*", "dtype": "int8", "method": "nearest"}], "activations": "u16",
"rotation": "none", "outlier_channels": "keep"}"""
PROMPTS = ("def main(", "for i in range(", "raise ValueError(", "# Copyright")  # whose tokens are not nearly tied


@pytest.mark.slow
def test_it_prints_the_text_of_the_product_with_the_same_recipe(tmp_path: Path) -> None:
    recipe, bundle = tmp_path / "simple.json", tmp_path / "bundle"
    recipe.write_text(RECIPE)
    options = f"--device SM8650 --recipe {recipe} --context {S} --ar 1,32 --skip-htp-check --no-quality-check -q"
    command = [sys.executable, "-m", "edgekv", "export", str(CHECKPOINT), "-o", str(bundle), *options.split()]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    with edgekv.load(bundle) as product:
        for prompt in PROMPTS:
            expected = product.generate(prompt, max_new_tokens=48)
            assert Model().generate(prompt) == "".join(token.text for token in expected), prompt


def test_its_tokens_are_those_of_the_checkpoints_tokenizer() -> None:
    text = (CHECKPOINT / "heldout.txt").read_text("utf-8")[:50_000]
    expected = Tokenizer.from_file(str(CHECKPOINT / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    tokenizer = Model().tokenizer
    assert tokenizer.encode(text) == expected
    assert tokenizer.decode(expected) == text


@pytest.mark.slow
def test_moving_the_window_back_changes_no_text() -> None:
    """A buffer with little room behind the window is moved every few tokens, one of 2(S-1) rows not at all."""
    moved, shifted = Model(), Model()
    moved.cache = Cache([*moved.cache.index], moved.checkpoint.head_dim, rows=S - 1 + PREFILL)
    assert moved.generate("def main(", 64) == shifted.generate("def main(", 64)
    assert (moved.cache.copies > 1, shifted.cache.copies) == (True, 0)


def test_it_is_short() -> None:
    assert len(FILE.read_text("utf-8").splitlines()) <= 400
