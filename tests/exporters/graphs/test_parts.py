"""Graphs that are built from a bundle: those that it holds, and the forms that other runtimes want."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.bundle import Bundle, open_bundle
from edgekv.runtime import CpuEngine
from exporters.graphs.parts import build_part, save_part, stored_graph, weight_files
from exporters.lora.options import LoraOptions
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported, exported_architecture
from tests.support.thorough import variants

EXPORTS: dict[str, dict[str, Any]] = {
    "whole": {"draft_rows": (4,)},
    "keys in columns, 16 bits": {"key_layout": "columns", "kv_dtype": "s16"},
    "divided": {"splits": 2},
    "4 bits": {"recipe": "w4a16-lpbq32"},
    "slots": {"lora": LoraOptions(rank=8)},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPORTS)
def test_a_part_is_built_as_it_was_exported(name: str, tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    _check_parts(open_bundle(exported(checkpoint, export_options(context=32, ar=(1, 8), **EXPORTS[name]))))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(ARCHITECTURES, {"llama-biased", "gemma3", "gemma4", "lfm3", "qwen3_5"}))
def test_a_part_of_every_architecture_is_built_as_it_was_exported(name: str) -> None:
    _check_parts(open_bundle(exported_architecture(name)))


def _check_parts(bundle: Bundle) -> None:
    for graph in bundle.manifest.graphs:
        for part in graph.parts:
            built = build_part(bundle.manifest, graph, part).finish()
            assert built == stored_graph(bundle.part_path(part))


def test_keys_in_columns_are_those_of_an_export_with_this_layout(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    rows, columns = (
        open_bundle(exported(checkpoint, export_options(context=32, ar=(1, 8), key_layout=each)))
        for each in ("rows", "columns")
    )
    record = rows.manifest.graph("decode")
    assert record is not None
    built = build_part(rows.manifest, record, record.part, key_layout="columns")
    assert built.finish() == stored_graph(columns.graph_path(record))
    save_part(built, tmp_path / "graph.onnx", rows.path)
    assert {path.name for path in tmp_path.iterdir()} >= {"graph.onnx", *weight_files(built.finish())}
    found, wanted = (CpuEngine().session(path) for path in (tmp_path / "graph.onnx", columns.graph_path(record)))
    random = np.random.default_rng(0)
    feeds = {}
    for port in wanted.get_inputs():
        dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
        feeds[port.name] = random.integers(0, 100, port.shape, dtype)
    assert all(np.array_equal(a, b) for a, b in zip(found.run(None, feeds), wanted.run(None, feeds), strict=True))
