from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime as ort
import pytest

from edgekv.bundle import (
    FORMAT,
    MANIFEST,
    GraphRecord,
    Manifest,
    SourceRecord,
    TokenRecord,
    file_hashes,
    open_bundle,
    read_manifest,
    record_files,
    rehashing,
    write_manifest,
)
from edgekv.bundle.formats import SEAL, seal_of
from edgekv.cli import run
from edgekv.errors import BundleError
from edgekv.machine.graph_file import graph_content, plain_name
from edgekv.spec import DecoderSpec, Rope
from quant import Encoding
from tests.support.bundles import change_manifest, int8_recipe, places_in_one_file, replace_in_manifest

GRAPH, WEIGHTS = "ar1_cl8.onnx.gz", "weights.bin"
U8 = Encoding(dtype="u8", scale=0.5, zero_point=128)
U16 = Encoding(dtype="u16", scale=0.5, zero_point=32768)

SPEC = DecoderSpec(
    model_type="llama",
    layers=1,
    hidden=4,
    heads=1,
    kv_heads=1,
    head_dim=4,
    intermediate=8,
    vocab=16,
    max_positions=8,
    eps=1e-5,
    tied_head=True,
    rope=Rope("default", 10000.0, 4, {}),
    query_gain=0.5,
)
PLACES = places_in_one_file(SPEC, WEIGHTS)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The least bundle that can exist: one graph file, one cache tensor of each kind."""
    (tmp_path / GRAPH).write_bytes(b"a graph")
    (tmp_path / "tokenizer.json").write_bytes(b"{}")
    (tmp_path / WEIGHTS).write_bytes(bytes(max(extent.offset + extent.bytes for _, _, extent in PLACES.extents())))
    write_manifest(tmp_path, _manifest(tmp_path))
    return tmp_path


def _manifest(folder: Path) -> Manifest:
    cache = {f"past_{kind}_0_h0_in": U8 for kind in ("key", "value")}
    names = "embedding", "attention_mask", "logits", "position_ids_cos", "position_ids_sin"
    return Manifest(
        format=FORMAT,
        producer="a test",
        device="SM8650",
        recipe=int8_recipe(SPEC),
        kv_dtype="u8",
        key_layout="rows",
        context=8,
        model=SPEC,
        tokens=TokenRecord(bos=None, eos=[1], pad=None),
        graphs=[GraphRecord.whole("ar1_cl8", GRAPH, layers=1, ar=1, context=8, role="decode")],
        htp_check="not-run",
        floating_nodes=[],
        encodings=dict.fromkeys(names, U16) | cache,
        source=SourceRecord(checkpoint="/nowhere", weights_sha256="0", calibration="none", calibration_tokens=0),
        files=record_files(folder),
        weights=PLACES,
    )


def test_a_bundle_is_found_as_it_was_written(folder: Path) -> None:
    bundle = open_bundle(folder)
    assert bundle.manifest == _manifest(folder)
    assert bundle.graph_path(bundle.manifest.graphs[0]).read_bytes() == b"a graph"


def test_the_exported_bundle_is_whole(bundle: Path) -> None:
    assert open_bundle(bundle).tokenizer().encode("import os").ids


def test_unpacked_graphs_beside_the_weights_are_ignored(small: Path) -> None:
    """As `gunzip -k` leaves them, for tools that read plain ones."""
    graphs = open_bundle(small).manifest.graph_files
    for file in graphs:
        (small / plain_name(file)).write_bytes(graph_content(small / file))
    assert open_bundle(small).manifest.graph_files == graphs
    ort.InferenceSession(small / plain_name(graphs[0]), providers=["CPUExecutionProvider"])


def test_a_changed_byte_of_an_exported_bundle_is_refused(bundle: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(bundle, tmp_path / "copy")
    weights = sorted(copy.glob("*.safetensors"))[-1]
    raw = bytearray(weights.read_bytes())
    raw[-1] ^= 1
    weights.write_bytes(raw)
    with pytest.raises(BundleError, match=rf"{weights.name}: got sha256 \w+; expected sha256 \w+\. Export"):
        open_bundle(copy)


_rewrite = replace_in_manifest


def _drop_seal(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    del content[SEAL]
    (folder / MANIFEST).write_text(json.dumps(content))


def _link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _grow(path: Path) -> None:
    with path.open("r+b") as file:
        file.truncate(1 << 40)


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
        lambda f: _rewrite(f, f'"format": {FORMAT}', f'"format": {FORMAT - 1}'),
        f"format: got {FORMAT - 1}; expected {FORMAT}. Export",
    ),
    "an unknown field": (lambda f: _rewrite(f, '"recipe"', '"receipt"'), "receipt"),
    "a byte without a new seal": (
        lambda f: (f / MANIFEST).write_text((f / MANIFEST).read_text().replace("10000.0", "10001.0")),
        r"manifest.json: seal: got '\w{64}'; expected \w{64}, for what the manifest says",
    ),
    "no seal": (lambda f: _drop_seal(f), "manifest.json: seal: got none"),
    "a manifest of deep lists": (lambda f: (f / MANIFEST).write_text('{"a": ' * 100_000), "values nested too deeply"),
    "a number without end": (lambda f: (f / MANIFEST).write_text('{"format": ' + "1" * 5000 + "}"), "out of range"),
    "a format that is no number": (lambda f: (f / MANIFEST).write_text('{"format": [3]}'), "format: got .3.; expected"),
    "another kind of JSON": (lambda f: (f / MANIFEST).write_text("[]"), "Expected `object`, got `array`"),
    "a manifest without end": (
        lambda f: _link(f / MANIFEST, "/dev/zero"),
        "manifest.json: got a device",
    ),
    "a manifest that nobody writes": (lambda f: _fifo(f / MANIFEST), "manifest.json: got a FIFO, not a regular file"),
    "a huge manifest": (lambda f: _grow(f / MANIFEST), "manifest.json: got file of .* more than the limit of 67.1 MB"),
    "a graph without end": (lambda f: _link(f / GRAPH, "/dev/zero"), f"{GRAPH}: got no regular file; expected a file"),
    "a graph that nobody writes": (lambda f: _fifo(f / GRAPH), f"{GRAPH}: got no regular file; expected a file of 7"),
    "10^9 layers": (lambda f: _rewrite(f, '"layers": 1', '"layers": 1000000000'), r"<= 4096 - at `\$.model.layers`"),
    "10^9 layers of a part": (lambda f: _rewrite(f, '"stop_layer": 1', '"stop_layer": 1000000000'), "<= 4096"),
    "many heads": (
        lambda f: change_manifest(f, lambda content: content["model"].update(heads=16000000, kv_heads=16000000)),
        "encodings: got 7; expected at",
    ),
    "10^12 tokens": (lambda f: _rewrite(f, '"max_positions": 8', '"max_positions": 1000000000000'), "<= 134217728"),
    "a name with a zero byte": (lambda f: _rewrite(f, '"tokenizer.json": {', '"a\\u0000b": {'), "expected plain paths"),
    "a negative base": (lambda f: _rewrite(f, "10000.0", "-10000.0"), r"> 0.0 - at `\$.model.rope.theta`"),
    "endless frequencies": (
        lambda f: _rewrite(f, "10000.0", "1e-300"),
        r"model: rope: got 1 to 1e\+150; expected frequencies",
    ),
    "a rotation wider than a head": (
        lambda f: _rewrite(f, '"width": 4', '"width": 6'),
        "width: got 6; expected at most",
    ),
    "a rotation without its numbers": (
        lambda f: _rewrite(f, '"rope_type": "default"', '"rope_type": "linear"'),
        "parameters: got none; expected factor",
    ),
    "a factor of nothing": (
        lambda f: change_manifest(
            f, lambda content: content["model"]["rope"].update(rope_type="linear", parameters={"factor": 0.0})
        ),
        "model: rope: got ",
    ),
    "an odd rotation": (lambda f: _rewrite(f, '"width": 4', '"width": 3'), r"multiple of 2 - at `\$.model.rope.width`"),
    "windows of other layers": (
        lambda f: change_manifest(f, lambda content: content["model"].update(windows=[4, None])),
        "windows: got 2; expected none or 1",
    ),
    "heads that cannot share": (
        lambda f: change_manifest(f, lambda content: content["model"].update(heads=3, kv_heads=2)),
        "kv_heads: got 2; expected a divisor of 3 heads",
    ),
    "an unknown field of the model": (lambda f: _rewrite(f, '"eps"', '"epsilon"'), "epsilon"),
    "a field of another type": (lambda f: _rewrite(f, '"context": 8', '"context": "8"'), "Expected `int`, got `str`"),
    "a size that cannot be": (lambda f: _rewrite(f, '"layers": 1', '"layers": 0'), r">= 1 - at `\$.model.layers`"),
    "an encoding too few": (lambda f: _rewrite(f, '"logits": {', '"logit": {'), "encodings: got none of logits"),
    "a file too few": (lambda f: (f / GRAPH).unlink(), f"{GRAPH}: got no such file; expected a file of 7 bytes"),
    "a file cut short": (lambda f: (f / GRAPH).write_bytes(b"a gra"), f"{GRAPH}: got 5 bytes; expected 7 bytes"),
    "a changed byte": (lambda f: (f / GRAPH).write_bytes(b"a grAph"), f"{GRAPH}: got sha256"),
    "a graph too many": (lambda f: (f / "b.onnx.gz").write_bytes(b""), "b.onnx.gz: got a file that the manifest"),
    "a graph that is no file of it": (lambda f: _rewrite(f, f'"file": "{GRAPH}"', '"file": "x"'), "file: got 'x'"),
    "a file of somewhere else": (
        lambda f: _rewrite(f, '"tokenizer.json": {', '"../tokenizer.json": {'),
        "files: got '../tokenizer.json'; expected plain paths",
    ),
}


def _moves(name: str, **changes: object) -> Callable[[Path], object]:
    """Another place of a weight."""

    def move(content: dict[str, Any]) -> None:
        places = content["weights"]
        (places["matrices"] if name in places["matrices"] else places["tensors"])[name].update(changes)

    return lambda folder: change_manifest(folder, move)


UP, NORM = "model.layers.0.mlp.up_proj.weight", "model.norm.weight"
PLACED: dict[str, tuple[Callable[[Path], object], str]] = {
    "outside of its file": (_moves(UP, scales=1 << 30), f"weights: {UP}: got bytes 1073741824 to .* expected at most"),
    "over another weight": (
        _moves(NORM, offset=9),
        rf"got bytes from \d+ on of {WEIGHTS}; expected those behind",
    ),
    "in no file": (_moves(UP, file="other"), f"weights: {UP}: file: got 'other'; expected a file that `files` lists"),
    "of another type": (_moves(UP, dtype="int4"), rf"weights: {UP}: got int4 \[8, 4\]; expected int8 \[8, 4\]"),
    "of another shape": (_moves(UP, columns=9), rf"weights: {UP}: got int8 \[9, 4\]; expected int8 \[8, 4\]"),
    "a norm of another shape": (_moves(NORM, shape=[2, 2]), rf"weights: {NORM}: got \[2, 2\]; expected \[4\]"),
    "heads that do not divide it": (_moves(UP, heads=3), "heads: got 3; expected a divisor of 8 columns"),
    "blocks of a type without": (_moves(UP, block_scales=8), "block_scales: expected none with int8"),
    "missing": (
        lambda f: change_manifest(f, lambda content: content["weights"]["matrices"].pop(UP)),
        f"weights: {UP}: got none; expected int8",
    ),
    "unknown": (
        lambda f: change_manifest(
            f, lambda content: content["weights"]["tensors"].update(x=content["weights"]["tensors"][NORM])
        ),
        "weights: got x; expected weights of the decoder",
    ),
}


@pytest.mark.parametrize("name", PLACED)
def test_a_weight_in_a_wrong_place_is_refused_by_name(folder: Path, name: str) -> None:
    change, message = PLACED[name]
    change(folder)
    with pytest.raises(BundleError, match=message):
        read_manifest(folder)


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_bundle_is_refused_by_name(folder: Path, name: str) -> None:
    damage, message = DAMAGE[name]
    damage(folder)
    with pytest.raises(BundleError, match=message):
        open_bundle(folder)


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"nothing there; expected a bundle's folder\. Make one with: edgekv export"):
        open_bundle(tmp_path / "none")
    with pytest.raises(FileNotFoundError):
        open_bundle(tmp_path / "none")


def test_a_mistyped_bundle_is_told_its_neighbour(folder: Path) -> None:
    with pytest.raises(BundleError, match=rf"nothing there.*Did you mean {re.escape(str(folder))}\?"):
        open_bundle(folder.with_name(folder.name[:-1]))


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
    assert "compiled/ar1.bin" not in open_bundle(folder).manifest.files


# The seal


@pytest.mark.slow
def test_a_flipped_bit_of_the_manifest_is_refused_or_changes_nothing(bundle: Path, tmp_path: Path) -> None:
    raw = (bundle / MANIFEST).read_bytes()
    manifest = read_manifest(bundle)
    flips = random.Random(8)
    refused = 0
    for _ in range(400):
        damaged = bytearray(raw)
        damaged[flips.randrange(len(raw))] ^= 1 << flips.randrange(8)
        (tmp_path / MANIFEST).write_bytes(damaged)
        try:
            assert read_manifest(tmp_path) == manifest
        except BundleError:
            refused += 1
    assert refused > 300


def test_a_flipped_bit_of_a_number_is_refused_by_the_seal(bundle: Path, tmp_path: Path) -> None:
    """Where every other check passes: a digit of a gain, a base, a scale."""
    text = (bundle / MANIFEST).read_text()
    for name in ("query_gain", "theta", "scale"):
        at = text.index(f'"{name}"')
        while text[at] not in "123456789":
            at += 1
        changed = text[:at] + chr(ord(text[at]) ^ 2) + text[at + 1 :]
        (tmp_path / MANIFEST).write_text(changed)
        with pytest.raises(BundleError, match=r"manifest.json: seal: got"):
            read_manifest(tmp_path)


def test_the_seal_is_of_the_content_not_of_its_layout(folder: Path) -> None:
    content = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps(content, sort_keys=True))
    assert read_manifest(folder) == _manifest(folder)
    seal = content.pop(SEAL)
    assert seal == seal_of(dict(reversed(content.items())))


# Versions


def test_a_field_of_a_newer_edgekv_asks_for_an_upgrade(folder: Path) -> None:
    change_manifest(folder, lambda content: content.update(a_new_field=1))
    with pytest.raises(BundleError, match=r"unknown field `a_new_field`.*pip install -U edgekv"):
        open_bundle(folder)


# Hashes that are remembered


@pytest.fixture
def settled(folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle, written long enough ago, and a cache folder of its own."""
    monkeypatch.setattr("edgekv.bundle.verified._SETTLED_NS", -1)
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path_factory.mktemp("hashes")))
    return folder


def _computed(folder: Path) -> int:
    with file_hashes() as hashes:
        for name in read_manifest(folder).files:
            hashes.sha256_of(folder / name)
        return hashes.computed


def test_a_file_is_hashed_once(settled: Path) -> None:
    assert _computed(settled) == 3
    assert _computed(settled) == 0
    with rehashing():
        assert _computed(settled) == 3
    assert _computed(settled) == 0


def test_a_changed_file_is_hashed_again_even_if_its_date_is_set_back(settled: Path) -> None:
    open_bundle(settled)
    before = (settled / GRAPH).stat()
    (settled / GRAPH).write_bytes(b"a grAph")
    os.utime(settled / GRAPH, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(BundleError, match=f"{GRAPH}: got sha256"):
        open_bundle(settled)


def test_a_file_that_was_just_written_is_not_trusted_to_its_date(
    settled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgekv.bundle.verified._SETTLED_NS", 1 << 62)
    assert _computed(settled) == 3
    assert _computed(settled) == 3


def test_verify_hashes_what_is_known_again(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that returns another byte changes no time stamp."""
    monkeypatch.setattr("edgekv.bundle.verified._SETTLED_NS", -1)
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    weights = small / "weights-head.safetensors"
    raw = weights.read_bytes()
    weights.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
    with file_hashes() as hashes:
        right = read_manifest(small).files[weights.name].sha256
        hashes.sha256_of(weights)
        ((key, known),) = hashes.known.items()
        hashes.known[key] = msgspec.structs.replace(known, sha256=right)
    command = ["generate", str(small), "--prompt", "ab", "--max-new-tokens", "1"]
    assert run([*command, "--rehash"]) == 1
    assert f"{weights.name}: got sha256" in capsys.readouterr().err
    with file_hashes() as hashes:
        hashes.known[key] = msgspec.structs.replace(known, sha256=right)
        hashes.computed = 1
    assert run(command) == 0  # what one call forces ends with it


@pytest.mark.parametrize("content", [b"", b"no JSON", b'{"1:2": 3}', b"[" * 100_000])
def test_a_damaged_memory_is_ignored(settled: Path, content: bytes) -> None:
    open_bundle(settled)
    (Path(os.environ["EDGEKV_CACHE_DIR"]) / "hashes.json").write_bytes(content)
    assert _computed(settled) == 3


def test_a_cache_folder_that_cannot_be_written_costs_only_time(settled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(settled / GRAPH))
    assert _computed(settled) == 3
    assert _computed(settled) == 3


# Folders of other kinds


@pytest.mark.parametrize(
    ("file", "given", "message"),
    [
        ("config.json", "", r"got a checkpoint; .* edgekv export \S+ -o BUNDLE --device DEVICE"),
        ("model.safetensors", "model.safetensors", r"got a file of weights \(.safetensors\); .* edgekv export"),
        ("model-q4.gguf", "model-q4.gguf", r"got a file of weights \(.gguf\); .* edgekv export \S+gguf -o"),
        ("model-q4.gguf", "", r"got a folder of GGUF files; .* edgekv export \S+gguf -o"),
        ("genie_config.json", "", r"got a folder for Genie; .* edgekv genie run"),
        ("genai_config.json", "", r"got a folder for onnxruntime-genai; .* edgekv genai run"),
        ("compiled.json", "", r"got the compiled binaries of a bundle; .* Give the bundle: "),
        ("adapter_config.json", "", r"got a LoRA adapter without its base model; .* edgekv export BASE --lora"),
        ("manifest.json", "manifest.json", r"got the manifest of a bundle; .* Give its folder"),
        ("notes.txt", "notes.txt", r"got a file; expected a bundle's folder"),
    ],
)
def test_what_is_no_bundle_is_named_with_the_command_for_it(
    tmp_path: Path, file: str, given: str, message: str
) -> None:
    (tmp_path / file).write_text("{}")
    with pytest.raises(BundleError, match=message):
        open_bundle(tmp_path / given)
