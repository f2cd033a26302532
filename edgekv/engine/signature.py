"""The inputs and outputs that a graph must have, in names, types and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgekv.bundle import GraphRecord, Manifest, rope_inputs
from edgekv.errors import BundleError
from quant import DTYPES


@dataclass(frozen=True, slots=True)
class Port:
    """One input or output of a graph.

    Attributes:
        name: as in the graph.
        dtype: name of the numpy type.
        shape: all dimensions; graphs are static.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.name} {self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """What a graph of AR tokens in a context of S reads and writes (Genie's names and conventions).

    Attributes:
        inputs: `input_ids` [1, AR], `attention_mask` [1, 1, AR, S], `position_ids_cos` and `_sin`
            [1, 1, AR, R/2] of each rotary embedding, `logits_index` [1] of prefill graphs, and each past
            [1, 1, P, D], P = S-AR; keys as columns [1, 1, D, P]. Layers that attend to W < S tokens read
            P = min(W-1, S-AR) past rows, under a mask of their own, `attention_mask_w{W}` [1, 1, AR, P+AR].
        outputs: `logits` [1, AR or 1, V] and each new [1, 1, AR, D]; keys as columns [1, 1, D, AR].
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @classmethod
    def of(cls, manifest: Manifest, graph: GraphRecord) -> Signature:
        """What the manifest promises."""
        ar, head_dim = graph.ar, manifest.model.head_dim
        kv = DTYPES[manifest.kv_dtype].name
        groups = [(group, group.past_rows(ar, graph.context)) for group in manifest.cache_geometry.groups()]
        inputs = [Port("input_ids", "int32", (1, ar))]
        mask = DTYPES[manifest.encodings["attention_mask"].dtype].name
        for group, past_rows in groups:
            inputs.append(Port(manifest.mask(group.context), mask, (1, 1, ar, past_rows + ar)))
        for suffix, rope in manifest.ropes.items():
            for name in rope_inputs(suffix):
                pairs = len(rope.inverse_frequencies)
                inputs.append(Port(name, DTYPES[manifest.encodings[name].dtype].name, (1, 1, ar, pairs)))
        if graph.role == "prefill":
            inputs.append(Port("logits_index", "int32", (1,)))
        rows = ar if graph.role == "score" else 1
        outputs = [Port("logits", DTYPES[manifest.encodings["logits"].dtype].name, (1, rows, manifest.model.vocab))]
        for group, past_rows in groups:
            for tensor in group.names():
                past, new = (past_rows, head_dim), (ar, head_dim)
                if tensor.kind == "key" and manifest.key_layout == "columns":
                    past, new = past[::-1], new[::-1]
                inputs.append(Port(tensor.past, kv, (1, 1, *past)))
                outputs.append(Port(tensor.new, kv, (1, 1, *new)))
        return cls(tuple(inputs), tuple(outputs))

    def check(self, found: Signature, graph: GraphRecord) -> None:
        """Compare with what a loaded graph has.

        Raises:
            BundleError: an input or output is missing, unknown, or of another type or shape.
        """
        _compare(graph, "input", self.inputs, found.inputs)
        _compare(graph, "output", self.outputs, found.outputs)


def _compare(graph: GraphRecord, kind: str, wanted: Iterable[Port], found: Iterable[Port]) -> None:
    ports = {port.name: port for port in found}
    names = [port.name for port in wanted]
    way_out = "Export the bundle again with this edgekv."
    for port in wanted:
        if (other := ports.get(port.name)) != port:
            raise BundleError(f"{graph.file}: {kind}", found=other or "none", wanted=port, way_out=way_out)
    if unknown := sorted(ports.keys() - set(names)):
        raise BundleError(f"{graph.file}: {kind}", found=ports[unknown[0]], wanted="no further one", way_out=way_out)
