"""Names of graphs, as Genie reads them: `prompt_ar32_cl512_1_of_1`.

Genie takes the order of the parts of a split model from the end of the name. ONNX Runtime chooses the names of
compiled graphs and has no option for them, so they are replaced in the binary by names of the same length.
"""

from __future__ import annotations

import re
from mmap import mmap
from pathlib import Path

import onnx_ir as ir

from edgekv.bundle import CompiledBinary
from edgekv.errors import EngineError
from exporters.graphs.models import load_model, save_model

_PART = re.compile(r"_\d+_of_\d+$")
_PLACES = 3  # places of a graph's name in a binary of the tested compiler


def graph_name(ar: int, context: int) -> str:
    """The name without its part: `token_ar1_cl512` or `prompt_ar32_cl512`."""
    return f"{'token' if ar == 1 else 'prompt'}_ar{ar}_cl{context}"


def part_name(graph: str, part: int, parts: int) -> str:
    """The name of one of several parts, counted from 1; the name of a whole graph does not change."""
    return graph if parts == 1 else f"{graph}_{part}_of_{parts}"


def name_graphs(folder: Path, binary: CompiledBinary, *, pad_number: bool = False) -> dict[str, str]:
    """Give the graphs of a binary, and its wrappers, the names under which the wrappers are listed.

    Args:
        folder: has the binary and its wrappers.
        binary: the binary.
        pad_number: pad the context's number with zeros in front, which is read as the same number.

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
            end = found[0] if (found := _PART.search(graph)) else "_1_of_1"
            name = _padded(graph.removesuffix(end), len(given) - len(end), pad_number=pad_number) + end
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


def _padded(name: str, length: int, *, pad_number: bool) -> str:
    if not pad_number:
        return name.ljust(length, "_")
    before, mark, number = name.rpartition("_cl")
    return before + mark + number.zfill(length - len(before + mark))


def _places(content: mmap, text: bytes) -> list[int]:
    """The offsets at which a text stands in a file."""
    found: list[int] = []
    while (place := content.find(text, found[-1] + len(text) if found else 0)) >= 0:
        found.append(place)
    return found
