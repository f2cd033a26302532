from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from edgekv.bundle import MANIFEST, open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError
from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported


def _lines(bundle: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert run(["info", str(bundle)]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == str(bundle)
    return {line[2:16].strip(): line[17:] for line in lines}


def _json(bundle: Path, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert run(["info", str(bundle), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def test_a_plain_bundle(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines, manifest = _lines(small, capsys), open_bundle(small).manifest
    assert lines["context"] == str(manifest.context)
    for name in ("verify", "chat template", "sink", "adapter slots", "adapters", "compiled for"):
        assert lines[name] == "none", name
    assert lines["checks"].endswith("not checked on the HTP compiler for SM8650")
    assert lines["recipe"].startswith("w8a16: ") and " matrices int8 (gptq)" in lines["recipe"]


def test_the_bytes_of_all_parts_are_those_of_the_folder(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (small / "notes.txt").write_text("not of the bundle")
    found = _json(small, capsys)
    sizes = {path.name: path.stat().st_size for path in small.rglob("*") if path.is_file()}
    assert sum(found["bytes"].values()) == sum(sizes.values()) - sizes["notes.txt"]
    assert found["bytes"]["layers"] == sum(size for name, size in sizes.items() if name.startswith("weights-layer"))
    assert found["bytes"]["graphs"] == sum(size for name, size in sizes.items() if name.endswith(".onnx.gz"))
    assert found["files_verified"] == len(sizes) - 2  # the manifest and the notes


def test_a_bundle_for_drafts_and_adapters_with_a_sink(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from exporters.lora.options import LoraOptions

    checkpoint = write_sinking(tmp_path / "checkpoint", NEWER)
    lora = LoraOptions(4, ("q", "v"))
    options = export_options(context=(64, 128), ar=(1, 16), draft_rows=(8,), calibration_tokens=512, lora=lora)
    bundle = shutil.copytree(exported(checkpoint, options), tmp_path / "bundle")
    (bundle / "adapters" / "broken").mkdir(parents=True)
    (bundle / "adapters" / "broken" / "adapter.json").write_text("{}")
    lines, found = _lines(bundle, capsys), _json(bundle, capsys)
    assert (lines["context"], lines["AR"], lines["verify"]) == ("64, 128", "1, 16", "8")
    assert (found["contexts"], found["ar"], found["verify"]) == ([64, 128], [1, 16], [8])
    assert lines["sink"].endswith(", restored, not computed") and len(found["sink"]) == 1
    assert lines["adapter slots"] == "rank 4, q, v" and found["lora_targets"] == ["q", "v"]
    assert lines["adapters"].startswith("broken (cannot be used: adapters/broken/adapter.json: seal: ")
    assert found["adapters"][0]["name"] == "broken" and found["adapters"][0]["rank"] is None


def test_layers_with_states_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"])
    lines = _lines(exported(checkpoint, export_options(context=64, ar=(1, 8), state_bits=8)), capsys)
    assert lines["states"] == "3 layers with convolutions of 3 tokens, rows of 64 in u8"


def test_a_chat_template_is_named(talking: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert _lines(talking, capsys)["chat template"] == "default"


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.slow
def test_only_binaries_of_this_export_count_as_compiled(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["compile", str(small), "--device", "SM8650"]) == 0
    capsys.readouterr()
    (chip,) = _json(small, capsys)["compiled"]
    record = small / "compiled" / "SM8650" / "compiled.json"
    binaries = [path for path in record.parent.iterdir() if path != record]
    assert (chip["soc"], chip["htp"]) == ("SM8650", 75)
    assert chip["bytes"] == sum(path.stat().st_size for path in binaries)
    assert _lines(small, capsys)["compiled for"].startswith("SM8650 (V75, ")
    other = json.loads(record.read_text()) | {"bundle_sha256": "0" * 64}
    record.write_text(json.dumps(other))
    assert _lines(small, capsys)["compiled for"] == "none"


def _flip(bundle: Path) -> None:
    path = next(bundle.glob("weights-layer-*"))
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def _age(bundle: Path) -> None:
    manifest = json.loads((bundle / MANIFEST).read_text())
    (bundle / MANIFEST).write_text(json.dumps(manifest | {"format": 1}))


@pytest.mark.parametrize("damage", [_flip, _age, shutil.rmtree])
def test_a_broken_old_or_missing_bundle_is_refused_as_everywhere(
    damage: Any, small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    damage(small)
    with pytest.raises(BundleError) as refused:
        open_bundle(small)
    for options in ([], ["--json"]):
        assert run(["info", str(small), *options]) == refused.value.exit_code
        printed = capsys.readouterr()
        assert printed.out == "" and printed.err == f"edgekv: error: {refused.value}\n"
