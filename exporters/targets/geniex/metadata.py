"""`metadata.json`: the graphs of a folder, as Qualcomm AI Hub's models describe theirs and GenieX reads them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from exporters.targets.genie.ports import GeniePort, GeniePorts

METADATA = "metadata.json"
FAMILY = "llama_v3_"
"""GenieX chooses its code by the beginning of `model_id`; this one's reads all it needs from the folder."""

_DTYPES = {"u8": "uint8", "s8": "int8", "u16": "uint16", "s16": "int16"}


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    scale: float
    zero_point: int


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Shape and type of an input or output."""

    shape: list[int]
    dtype: str
    quantization_parameters: Quantization | None = None


class GraphSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Inputs and outputs of one part of a graph, by name."""

    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]


class GenieNotes(msgspec.Struct, frozen=True, kw_only=True):
    supports_vision: bool = False


class Metadata(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file.

    Attributes:
        model_id: begins with the family whose code GenieX runs.
        runtime: what the folder is for.
        precision: the recipe.
        tool_versions: what compiled.
        model_files: graphs by their names in the binaries.
        genie: no vision.
    """

    model_id: str
    runtime: str = "genie"
    precision: str
    tool_versions: dict[str, str]
    model_files: dict[str, GraphSpec]
    genie: GenieNotes = GenieNotes()


def graph_specs(graphs: Mapping[str, GeniePorts]) -> dict[str, GraphSpec]:
    """What `model_files` says of graphs."""
    return {
        name: GraphSpec(inputs=_specs(ports.inputs), outputs=_specs(ports.outputs)) for name, ports in graphs.items()
    }


def _specs(ports: Iterable[GeniePort]) -> dict[str, TensorSpec]:
    found = {}
    for port in ports:
        if (encoding := port.encoding) is None:
            found[port.name] = TensorSpec(shape=list(port.shape), dtype="int32")
        else:
            quantization = Quantization(scale=encoding.scale, zero_point=encoding.zero_point)
            shape, dtype = list(port.shape), _DTYPES[encoding.dtype]
            found[port.name] = TensorSpec(shape=shape, dtype=dtype, quantization_parameters=quantization)
    return found
