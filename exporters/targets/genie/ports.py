"""Inputs and outputs of graphs as Genie wants them, and graph files with them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
from msgspec import structs

from edgekv.bundle import GraphRecord, Manifest, PartRecord
from edgekv.errors import BundleError
from edgekv.spec import EMBEDDINGS, MASK, Port
from exporters.graphs.models import encoding, load_model, readers, sizes
from exporters.graphs.qdq import UNREAD, UNREAD_STATE, unsigned, with_whole_states
from quant import Encoding

_RANK = 4
_HEAD = re.compile(r"(?<=\d)_h\d+(?=_(?:in|out)$)")  # past_key_0_h1_in
_AGAIN = "Genie would load it and generate noise: export the bundle again with this edgekv."


@dataclass(frozen=True, slots=True)
class GeniePort:
    """One input or output.

    Attributes:
        name: the name that Genie looks up.
        shape: all dimensions, with ones in front up to four, as Genie counts them.
        encoding: of the integers, its scale as float32 holds it; None for token ids, which are int32.
    """

    name: str
    shape: tuple[int, ...]
    encoding: Encoding | None

    @classmethod
    def of(cls, name: str, shape: tuple[int, ...], encoding: Encoding | None) -> GeniePort:
        """A port of any rank up to four; the scale is rounded to float32, as graphs and binaries hold it."""
        if encoding is not None:
            encoding = Encoding(encoding.dtype, float(np.float32(encoding.scale)), encoding.zero_point)
        return cls(name, (1,) * (_RANK - len(shape)) + shape, encoding)

    def __str__(self) -> str:
        if self.encoding is None:
            return f"{self.name} int32 {list(self.shape)}"
        at = f"scale {self.encoding.scale:.9g}, zero point {self.encoding.zero_point}"
        return f"{self.name} {self.encoding.dtype} {list(self.shape)}, {at}"


@dataclass(frozen=True, slots=True)
class GeniePorts:
    """All inputs and outputs of one part of a graph of AR tokens in a context of S.

    Attributes:
        inputs: `input_ids` [1, AR], `inputs_embeds` [1, 1, AR, hidden], or the hidden state of the part before,
            under the same name. Where there are layers: `attention_mask` [1, 1, AR, S], in which Genie writes 65535 to
            attend and 0 to mask; `position_ids_cos` and `_sin` [1, 1, AR, D/2]; of every head the past keys
            [1, 1, D, S-AR] and values [1, 1, S-AR, D], cleared to the middle of their type. Of layers with a state the
            K-1 rows before the next token, [1, 1, K-1, H], likewise, and a recurrent state that no operation reads.
        outputs: `logits` [1, AR, V], or the hidden state for the next part; the new keys [1, 1, D, AR] and values
            [1, 1, AR, D] in the encodings of the past.
    """

    inputs: tuple[GeniePort, ...]
    outputs: tuple[GeniePort, ...]

    @classmethod
    def of(
        cls,
        manifest: Manifest,
        graph: GraphRecord,
        part: PartRecord,
        embeddings: Encoding | None = None,
        *,
        unsigned_adapters: bool = False,
    ) -> GeniePorts:
        """The required ports of a part of a graph of this bundle.

        Args:
            manifest: of the bundle.
            graph: the graph.
            part: the part.
            embeddings: with these, the first part reads them.
            unsigned_adapters: inputs for adapters are as `GraphForm` says.
        """
        encodings = dict(manifest.encodings)
        if embeddings is not None:
            encodings[EMBEDDINGS] = embeddings
            part = structs.replace(part, embeds=False)
        decoder = manifest.interface
        columns = replace(decoder, cache=replace(decoder.cache, key_layout="columns"))
        # Genie selects the row of the last token itself, from the logits of all.
        ports = columns.graph(structs.replace(graph, role="score"), part)
        if manifest.model.convolution is not None:
            ports, encodings[UNREAD_STATE] = with_whole_states(ports), UNREAD

        def genie_port(port: Port) -> GeniePort:
            encoding = None if port.encoding is None else encodings[port.encoding]
            if port.kind == "lora" and unsigned_adapters and encoding is not None:
                encoding = unsigned(encoding)
            return GeniePort.of(port.name, port.shape, encoding)

        return cls(tuple(map(genie_port, ports.inputs)), tuple(map(genie_port, ports.outputs)))

    def stacked(self, axis: int = 0) -> GeniePorts:
        """The same with one tensor for all heads of a layer, in the encoding of the first head.

        Args:
            axis: of the heads. Graphs have `[heads, 1, ...]`, which Genie reports as `[1, heads, ...]`.
        """
        return GeniePorts(_stacked(self.inputs, axis), _stacked(self.outputs, axis))

    def check_encodings(self, where: str) -> None:
        """Reject encodings in which Genie's fixed integers would mean something else.

        Raises:
            BundleError: naming the first such tensor.
        """
        for port in self.inputs:
            if port.encoding is None:
                continue
            dtype, zero_point = port.encoding.dtype, port.encoding.zero_point
            if port.name == MASK and (dtype, zero_point) != ("u16", 65535):
                raise BundleError(where, got=port, expected="u16 with zero point 65535", fix=_AGAIN)
            if port.name.startswith(("past_", "conv_state_")) and zero_point != sum(port.encoding.limits, 1) // 2:
                raise BundleError(where, got=port, expected="the middle of its type as zero point", fix=_AGAIN)

    def compare(self, where: str, actual: GeniePorts) -> None:
        """Reject a graph that differs.

        Raises:
            BundleError: naming the first tensor that is missing, unknown, or of another shape or encoding.
        """
        _compare(f"{where}: input", self.inputs, actual.inputs)
        _compare(f"{where}: output", self.outputs, actual.outputs)


def _stacked(ports: Sequence[GeniePort], axis: int) -> tuple[GeniePort, ...]:
    heads: dict[str, list[GeniePort]] = {}
    for port in ports:
        heads.setdefault(_HEAD.sub("", port.name), []).append(port)
    stacked = []
    for name, (first, *others) in heads.items():
        shape = list(first.shape)
        if name.startswith("past_"):
            shape[axis] = 1 + len(others)
        stacked.append(GeniePort(name, tuple(shape), first.encoding))
    return tuple(stacked)


def _compare(field: str, expected: Iterable[GeniePort], actual: Iterable[GeniePort]) -> None:
    there = {port.name: port for port in actual}
    for port in expected:
        if (other := there.pop(port.name, None)) != port:
            raise BundleError(field, got=other or f"no {port.name}", expected=port, fix=_AGAIN)
    for port in there.values():
        raise BundleError(field, got=port, expected="no further one", fix=_AGAIN)


def read_ports(path: Path) -> GeniePorts:
    """The ports of a graph that dequantizes its inputs first and quantizes its outputs last."""
    graph = load_model(path).graph
    return GeniePorts(
        tuple(_port(value, readers(value)) for value in graph.inputs),
        tuple(_port(value, [value.producer()]) for value in graph.outputs),
    )


def _port(value: ir.Value, nodes: Iterable[ir.Node | None]) -> GeniePort:
    quantization = next((encoding(node) for node in nodes if node is not None), None)
    return GeniePort.of(str(value.name), tuple(sizes(value)), quantization)
