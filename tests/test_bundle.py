from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from edgekv.bundle import (
    FORMAT,
    MANIFEST,
    GraphRecord,
    Manifest,
    ModelRecord,
    RecipeRecord,
    RopeRecord,
    SourceRecord,
    TokenRecord,
    open_bundle,
    read_manifest,
    record_files,
    write_manifest,
)
from edgekv.errors import BundleError
from quant import Encoding

GRAPH = "ar1_cl8.onnx"
U8 = Encoding(dtype="u8", scale=0.5, zero_point=128)
U16 = Encoding(dtype="u16", scale=0.5, zero_point=32768)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least bundle that can exist: one graph file, one cache tensor of each kind."""
    (tmp_path / GRAPH).write_bytes(b"a graph")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    write_manifest(tmp_path, _manifest(tmp_path))
    return tmp_path


def _manifest(folder: Path) -> Manifest:
    cache = {f"past_{kind}_0_h0_in": U8 for kind in ("key", "value")}
    return Manifest(
        format=FORMAT,
        producer="a test",
        device="SM8650",
        recipe=RecipeRecord(name="w8a16", rotation="none", weights=[]),
        kv_dtype="u8",
        key_layout="rows",
        context=8,
        model=ModelRecord(
            model_type="llama",
            layers=1,
            hidden=4,
            heads=1,
            kv_heads=1,
            head_dim=4,
            intermediate=8,
            vocab=16,
            max_positions=8,
        ),
        rope=RopeRecord(rope_type="default", theta=10000.0, parameters={}, inverse_frequencies=[1.0, 0.01]),
        tokens=TokenRecord(bos=None, eos=[1], pad=None),
        graphs=[GraphRecord.whole("ar1_cl8", GRAPH, layers=1, ar=1, context=8, role="decode")],
        htp_check="not-run",
        floating_nodes=[],
        encodings={"attention_mask": U16, "logits": U16, "position_ids_cos": U16, "position_ids_sin": U16, **cache},
        source=SourceRecord(checkpoint="/nowhere", weights_sha256="0", calibration="none", calibration_tokens=0),
        files=record_files(folder),
    )


def test_a_bundle_is_found_as_it_was_written(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert bundle.manifest == _manifest(folder)
    assert bundle.graph_path(bundle.manifest.graphs[0]).read_bytes() == b"a graph"


def test_the_exported_bundle_is_whole(bundle: Path) -> None:
    assert open_bundle(bundle).tokenizer().encode("import os").ids


def test_a_changed_byte_of_an_exported_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    weights = sorted(copy.glob("*.safetensors"))[-1]
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(BundleError, match=rf"{weights.name}: got sha256 \w+; expected sha256 \w+\. Export"):
        open_bundle(copy)


def _rewrite(folder: Path, old: str, new: str) -> None:
    text = (folder / MANIFEST).read_text()
    assert old in text
    (folder / MANIFEST).write_text(text.replace(old, new))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda f: (f / MANIFEST).unlink(), "manifest.json: got No such file"),
    "a manifest cut short": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text()[:-9]),
        "manifest.json: got .* expected whole JSON",
    ),
    "a manifest that is not text": (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), "manifest.json: got "),
    "a newer format": (
        lambda f: _rewrite(f, f'"format": {FORMAT}', f'"format": {FORMAT + 1}'),
        f"format: got {FORMAT + 1}; expected {FORMAT}. Install a newer edgekv",
    ),
    "an older format": (
        lambda f: _rewrite(f, f'"format": {FORMAT}', '"format": 0'),
        f"format: got 0; expected {FORMAT}. Export",
    ),
    "an unknown field": (lambda f: _rewrite(f, '"recipe"', '"receipt"'), "receipt"),
    "a field of another type": (lambda f: _rewrite(f, '"context": 8', '"context": "8"'), "Expected `int`, got `str`"),
    "a size that cannot be": (lambda f: _rewrite(f, '"layers": 1', '"layers": 0'), "model: got layers: got 0"),
    "an encoding too few": (lambda f: _rewrite(f, '"logits": {', '"logit": {'), "encodings: got none of logits"),
    "a file too few": (lambda f: (f / GRAPH).unlink(), f"{GRAPH}: got no such file; expected a file of 7 bytes"),
    "a file cut short": (lambda f: (f / GRAPH).write_bytes(b"a gra"), f"{GRAPH}: got 5 bytes; expected 7 bytes"),
    "a changed byte": (lambda f: (f / GRAPH).write_bytes(b"a grAph"), f"{GRAPH}: got sha256"),
    "a graph too many": (lambda f: (f / "other.onnx").write_bytes(b""), "other.onnx: got a file that the manifest"),
    "a graph that is no file of it": (lambda f: _rewrite(f, f'"file": "{GRAPH}"', '"file": "x"'), "file: got 'x'"),
    "a file of somewhere else": (
        lambda f: _rewrite(f, '"tokenizer.json": {', '"../tokenizer.json": {'),
        "files: got '../tokenizer.json'; expected plain paths",
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_bundle_is_refused_by_name(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(BundleError, match=message):
        open_bundle(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nothing there; expected a bundle's folder\. Make one with: edgekv export"):
        open_bundle(tmp_path / "none")


def test_a_bundle_without_a_decode_graph_is_refused(folder: Path) -> None:
    manifest = msgspec.structs.replace(_manifest(folder), graphs=[])
    write_manifest(folder, manifest)
    with pytest.raises(BundleError, match="expected a graph of role `decode`"):
        read_manifest(folder)


def test_sizes_are_checked_even_without_the_hashes(folder: Path) -> None:
    (folder / GRAPH).write_bytes(b"a grAph")
    open_bundle(folder, verify=False)
    (folder / GRAPH).write_bytes(b"a graph!")
    with pytest.raises(BundleError, match="8 bytes"):
        open_bundle(folder, verify=False)


def test_what_lies_in_folders_of_the_bundle_is_not_its_own(folder: Path) -> None:
    (folder / "compiled").mkdir()
    (folder / "compiled" / "ar1.bin").write_bytes(b"")
    open_bundle(folder)
