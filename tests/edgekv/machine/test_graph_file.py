"""Files of graphs."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgekv.errors import BundleError
from edgekv.machine.graph_file import graph_content, graph_name, loadable, plain_name, write_graph

CONTENT = b"a node of a layer, " * 1000
DAMAGE = {
    "cut short": lambda stored: stored[:-9],
    "not compressed": lambda stored: CONTENT,
    "a changed byte": lambda stored: stored[:20] + bytes([stored[20] ^ 255]) + stored[21:],
}


@pytest.mark.parametrize("name", ["ar1_cl64.onnx", "ar1_cl64.onnx.gz"])
def test_a_graph_is_read_as_it_was_written(tmp_path: Path, name: str) -> None:
    write_graph(CONTENT, tmp_path / name)
    assert graph_content(tmp_path / name) == CONTENT
    assert ((tmp_path / name).stat().st_size < len(CONTENT)) == name.endswith(".gz")
    assert loadable(tmp_path / name) == (CONTENT if name.endswith(".gz") else str(tmp_path / name))
    assert (plain_name(name), graph_name(tmp_path / name)) == ("ar1_cl64.onnx", "ar1_cl64")


def test_a_compressed_graph_tells_no_name_time_or_system(tmp_path: Path) -> None:
    for folder in (tmp_path / "a", tmp_path / "b"):
        folder.mkdir()
        write_graph(CONTENT, folder / f"{folder.name}.onnx.gz")
    one, two = ((tmp_path / name / f"{name}.onnx.gz").read_bytes() for name in "ab")
    assert one == two
    flags, time, system = one[3], one[4:8], one[9]
    assert (flags, time, system) == (0, bytes(4), 255)  # RFC 1952: no name, no time, an unknown system


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_graph_is_refused_by_name(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "ar1_cl64.onnx.gz"
    write_graph(CONTENT, path)
    path.write_bytes(DAMAGE[damage](path.read_bytes()))
    with pytest.raises(BundleError, match=r"graph: ar1_cl64\.onnx\.gz: got .*; expected a compressed ONNX file"):
        graph_content(path)
