"""Graphs whose ports are not those of the manifest, in bundles whose hashes are right."""

from __future__ import annotations

import shutil
import sys
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

import edgekv
from edgekv.bundle import FileRecord, open_bundle, write_manifest
from edgekv.errors import BundleError
from edgekv.machine.graph_file import write_graph
from exporters.graphs.parts import stored_graph


@pytest.mark.parametrize("size", [-1, "batch", "rows_", "rows_x", "", 10**12], ids=repr)
def test_a_dimension_that_is_not_static_is_refused(
    small_export: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int | str
) -> None:
    """By an engine that runs the bundle's own graphs, as the CPU's does without the package that builds others."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    bundle = open_bundle(shutil.copytree(small_export, tmp_path / "bundle"))
    files = dict(bundle.manifest.files)
    for graph in bundle.manifest.graphs:
        path = bundle.path / graph.parts[0].file
        model = stored_graph(path)
        dimension = next(
            each for each in model.graph.input if each.name.startswith("past_")
        ).type.tensor_type.shape.dim[2]
        if isinstance(size, int):
            dimension.dim_value = size
        else:
            dimension.dim_param = size
        content = model.SerializeToString()
        write_graph(content, path)
        stored = path.read_bytes()
        files[graph.parts[0].file] = FileRecord(bytes=len(stored), sha256=sha256(stored).hexdigest())
    write_manifest(bundle.path, msgspec.structs.replace(bundle.manifest, files=files))
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(edgekv.EdgeKVError) as caught, edgekv.load(bundle.path) as model:
        list(model.generate([3, 4, 5], max_new_tokens=1))
    assert "bug" not in str(caught.value) and len(str(caught.value)) < 2000


@pytest.mark.parametrize("mode", ["emulate", "fast"])
def test_a_missing_encoding_is_refused_by_name(small_export: Path, tmp_path: Path, mode: str) -> None:
    """`fast` rounds only what is stored; `emulate` needs the encoding of every result."""
    bundle = open_bundle(shutil.copytree(small_export, tmp_path / "damaged"))
    encodings = {name: each for name, each in bundle.manifest.encodings.items() if name != "layers.0.silu"}
    write_manifest(bundle.path, msgspec.structs.replace(bundle.manifest, encodings=encodings))
    with edgekv.load(bundle.path, cpu_mode=mode) as model:
        if mode == "fast":
            assert len([*model.generate([3, 4, 5], max_new_tokens=1)]) == 1
            return
        with pytest.raises(BundleError, match=r"encodings: got none of layers\.0\.silu; expected one for each"):
            [*model.generate([3, 4, 5], max_new_tokens=1)]
