"""Folders for GenieX: proven by Genie, which reads the same graphs, and by the rules of GenieX's loader."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError
from exporters.targets.geniex import read_as_geniex
from tests.support.checkpoints import NEWER, write_checkpoint, write_sinking
from tests.support.exports import export_options, exported, kept

pytestmark = [pytest.mark.htp, pytest.mark.thorough]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("geniex") / "checkpoint")


@pytest.fixture(scope="module")
def folder(checkpoint: Path) -> Path:
    """Two contexts and two parts; a second prefill graph and a verify graph, which GenieX has no use for."""
    options = {
        "context": (32, 64),
        "ar": (1, 4, 8),
        "splits": 2,
        "embedding": "graph",
        "head": "last",
        "draft_rows": (4,),
    }
    bundle = exported(checkpoint, export_options(**options))

    def make(folder: Path) -> None:
        assert run(["bundle", "geniex", str(bundle), "-o", str(folder / "My Model 1B"), "--no-bos"]) == 0

    return kept("geniex", ("exporters.targets.cli",), make, bundle) / "My Model 1B"


def test_geniex_reads_the_model(folder: Path) -> None:
    """`write_geniex` has Genie compare the tokens."""
    loaded = read_as_geniex(folder)
    assert (loaded.model_id, loaded.prefill, loaded.decode) == ("llama_v3_my_model_1b", 8, 1)
    assert (loaded.contexts, loaded.layers_of) == ((32, 64), ((0,), (1,)))
    assert (loaded.kv_heads, loaded.head_dim, loaded.vocab, loaded.bos) == (2, 16, 320, -1)
    there = {path.name for path in folder.iterdir()}
    texts = {"genie_config.json", "htp_backend_ext_config.json", "metadata.json", "geniex_bundle.json"}
    assert there == {*texts, *loaded.binaries, "tokenizer.json", "tokenizer_config.json"} and len(loaded.binaries) == 2


def test_names_and_shapes_are_those_of_the_binaries(folder: Path) -> None:
    graphs = json.loads((folder / "metadata.json").read_text())["model_files"]
    content = b"".join((folder / name).read_bytes() for name in read_as_geniex(folder).binaries)
    assert len(graphs) == 8
    for name, graph in graphs.items():
        assert content.count(name.encode()) == 3
        rows, context, part = map(int, re.fullmatch(r"[a-z]+_ar(\d+)_cl(\d+)_(\d)_of_2", name).groups())
        key, value = (graph["inputs"][f"past_{kind}_{part - 1}_in"] for kind in ("key", "value"))
        assert (key["shape"], value["shape"]) == ([2, 1, 16, context - rows], [2, 1, context - rows, 16])
        assert key["dtype"] == "uint8" and key["quantization_parameters"]["zero_point"] == 128
        assert graph["outputs"][f"past_key_{part - 1}_out"]["quantization_parameters"] == key["quantization_parameters"]


def _no_context(metadata: dict[str, Any]) -> None:
    metadata["model_files"] = {name: each for name, each in metadata["model_files"].items() if "_cl0" in name} | {
        "token_ar1_cl48_1_of_2": next(iter(metadata["model_files"].values()))
    }


def _per_head(metadata: dict[str, Any]) -> None:
    for graph in metadata["model_files"].values():
        graph["inputs"] = {name.replace("_0_in", "_0_h0_in"): each for name, each in graph["inputs"].items()}


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "GenieX: model_id: got gemma": lambda metadata: metadata.update(model_id="gemma"),
    "expected one for each": _no_context,
    "cache tensors: got .'past_key_0_h0_in'": _per_head,
    "model_files: got prompt_ar8_1_of_2; expected names such as": lambda metadata: metadata["model_files"].update(
        {"prompt_ar8_1_of_2": {}}
    ),
}


@pytest.mark.parametrize("message", CHANGES)
def test_what_geniex_would_misread_is_named(folder: Path, tmp_path: Path, message: str) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    metadata = json.loads((copied / "metadata.json").read_text())
    CHANGES[message](metadata)
    (copied / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(BundleError, match=message):
        read_as_geniex(copied)


def test_a_missing_binary_is_named(folder: Path, tmp_path: Path) -> None:
    copied = tmp_path / "copied"
    shutil.copytree(folder, copied)
    (name, _) = read_as_geniex(copied).binaries
    (copied / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: got no such file"):
        read_as_geniex(copied)


def test_what_geniex_cannot_express_is_refused(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sinking = exported(write_sinking(tmp_path / "sinking", NEWER), export_options(context=32, ar=(1, 8)))
    assert open_bundle(sinking).manifest.sink is not None
    single = exported(checkpoint, export_options(context=32, ar=(1,)))
    parts = exported(checkpoint, export_options(context=32, ar=(1, 8), splits=2))
    cases = {
        sinking: "sink: got a first token that is restored",
        single: "graphs: got only ar1_cl32; expected a prefill graph as well, which GenieX needs",
        parts: "Export it with --embedding graph --head last.",
    }
    for bundle, message in cases.items():
        assert run(["bundle", "geniex", str(bundle), "-o", str(tmp_path / "folder")]) != 0
        assert message in capsys.readouterr().err
        assert not (tmp_path / "folder").exists()
