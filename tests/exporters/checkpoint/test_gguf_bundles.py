"""GGUF files of other architectures with an attention sink become bundles that generate and are measured."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.exporters.checkpoint.test_gguf import ALTERED
from tests.support.checkpoints import ARCHITECTURES, CONFIG, write_sinking
from tests.support.foreign_files import write_gguf

BOS = CONFIG["bos_token_id"]
TEXT = "def main():\n    return sum(range(10))\n" * 20
SHORT = ["--device", "SM8650", "--context", "64", "--ar", "1,16", "--calibration-tokens", "512"]


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "kind", "on_htp"),
    [
        pytest.param("qwen3", "Q8_0", True, marks=pytest.mark.htp),
        ("gemma3", "Q4_1", False),
    ],
)
def test_a_file_with_a_sink_becomes_a_bundle(
    tmp_path: Path, name: str, kind: str, on_htp: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_sinking(tmp_path / "checkpoint", ARCHITECTURES[name] | ALTERED.get(name, {}))
    file, bundle, text = tmp_path / "model.gguf", tmp_path / "bundle", tmp_path / "text"
    write_gguf(folder, file, kind)
    text.write_text(TEXT)
    check = [] if on_htp else ["--skip-htp-check"]
    assert run(["export", str(file), "-o", str(bundle), *SHORT, *check]) == 0
    assert "restored, not computed" in capsys.readouterr().out

    manifest = open_bundle(bundle).manifest
    assert manifest.model.model_type == ARCHITECTURES[name]["model_type"]
    assert manifest.sink is not None and manifest.sink.tokens == [BOS]
    assert (manifest.htp_check, manifest.floating_nodes) == ("integers-only" if on_htp else "not-run", [])

    assert run(["eval", str(bundle), "--text", str(text), "--tokens", "120", "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert measured["tokens"] == 120
    assert measured["token_sqnr_db"] > 25, measured

    with edgekv.load(bundle, threads=1) as model:
        generation = model.generate("def main", max_new_tokens=6, ignore_eos=True)
        tokens = [token.id for token in generation]
        whole = np.array([*generation.prompt, *tokens[:-1]])
        assert whole[0] == BOS
        expected = next(Reference(Checkpoint.open(str(file)), 64).logits([whole]))[-6:]
        chosen = expected[np.arange(6), tokens]
        assert (expected.max(axis=-1) - chosen < 0.02 * np.ptp(expected)).all(), "greedy in float, but for near ties"
        if on_htp:
            assert run(["eval", str(bundle), "--text", str(text), "--tokens", "60", "--engine", "htp", "--json"]) == 0
            found = json.loads(capsys.readouterr().out)
            assert found["token_sqnr_db"] > 25
