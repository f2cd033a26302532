"""Names of graphs within binaries of ONNX Runtime, which chooses them and has no option for them.

So they are replaced by names of the same length.
"""

from __future__ import annotations

from mmap import mmap
from pathlib import Path

import onnx_ir as ir

from edgekv.bundle import CompiledBinary
from edgekv.errors import EngineError
from exporters.graphs.models import load_model, save_model
from exporters.targets.graph_names import GraphName

_PLACES = 3  # places of a graph's name in a binary of the tested compiler


def name_graphs(folder: Path, binary: CompiledBinary, *, pads_number: bool = False) -> dict[str, str]:
    """Give the graphs of a binary, and its wrappers, the names under which the wrappers are listed.

    Args:
        folder: has the binary and its wrappers.
        binary: the binary.
        pads_number: pad the context's number with zeros in front, which is read as the same number.

    Returns:
        The full names, which end in the part and are padded to the length of those they replace: with underscores
        before the part, unless the number is padded.

    Raises:
        EngineError: a name is not where the tested compiler puts it.
    """
    names: dict[str, str] = {}
    with (folder / binary.file).open("r+b") as file, mmap(file.fileno(), 0) as content:  # gigabytes
        for graph, wrapper_file in binary.wrappers.items():
            wrapper = load_model(folder / wrapper_file)
            (node,) = wrapper.graph
            given = node.attributes["partition_name"].as_string()
            wanted = GraphName.parse(graph)
            assert wanted is not None, "wrappers are listed by such names"
            name = wanted.padded(len(given), pads_number=pads_number)
            places = _places(content, given.encode())
            if len(places) != _PLACES or len(name) != len(given):
                raise EngineError(
                    f"{binary.file}: name of {graph}",
                    got=f"{given} in {len(places)} places",
                    expected=f"a name of {len(name)} characters in {_PLACES}",
                    fix='Use the tested onnxruntime-qnn: pip install "edgekv[htp]"',
                )
            for place in places:
                content[place : place + len(given)] = name.encode()
            node.name = name
            node.attributes.add(ir.AttrString("partition_name", name))
            save_model(wrapper, folder / wrapper_file)
            names[graph] = name
    return names


def _places(content: mmap, text: bytes) -> list[int]:
    """The offsets of a text in a file."""
    found: list[int] = []
    while (place := content.find(text, found[-1] + len(text) if found else 0)) >= 0:
        found.append(place)
    return found
