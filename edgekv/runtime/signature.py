"""The inputs and outputs that a graph must have, in names, types and shapes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from edgekv.bundle import IDS, LOGITS, GraphRecord, Manifest, PartRecord, rope_inputs
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
    """What a graph of AR tokens in a context of S, or one part of it, reads and writes (Genie's conventions).

    Attributes:
        inputs: `input_ids` [1, AR], or `inputs_embeds` or `hidden_{L}` [1, 1, AR, hidden] of a part that goes on
            from there (a head by itself reads the one row that it is bound to); `attention_mask` [1, 1, AR, S],
            `position_ids_cos` and `_sin` [1, 1, AR, R/2] of each rotary embedding, `logits_index` [1] of prefill
            graphs whose head stands behind layers; and each past [1, 1, P, D], P = S-AR; keys as columns
            [1, 1, D, P]. Layers that attend to W < S tokens read P = min(W-1, S-AR) past rows, under a mask of their
            own, `attention_mask_w{W}` [1, 1, AR, P+AR].
        outputs: `logits` [1, AR or 1, V], or `hidden_{L}`; and each new [1, 1, AR, D]; keys as columns [1, 1, D, AR].
    """

    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]

    @classmethod
    def of(cls, manifest: Manifest, graph: GraphRecord, part: PartRecord | None = None) -> Signature:
        """What the manifest promises of one of a graph's parts; None for the only one."""
        part = graph.part if part is None else part
        ar, model = graph.ar, manifest.model
        kv = DTYPES[manifest.kv_dtype].name

        def activation(name: str, *shape: int) -> Port:
            return Port(name, DTYPES[manifest.encodings[name].dtype].name, shape)

        rows = ar if graph.role == "score" else 1
        entry_rows = ar if part.layers else rows
        inputs = [
            Port(IDS, "int32", (1, ar)) if part.embeds else activation(part.entry, 1, 1, entry_rows, model.hidden)
        ]
        groups = [
            (manifest.mask(group.context), group.past_rows(ar, graph.context), tensors)
            for group in manifest.cache_geometry.groups()
            if (tensors := [tensor for tensor in group.names() if tensor.layer in part.layers])
        ]
        mask = DTYPES[manifest.encodings["attention_mask"].dtype].name
        inputs += [Port(name, mask, (1, 1, ar, past_rows + ar)) for name, past_rows, _ in groups]
        for suffix, rope in manifest.ropes_of(part.layers).items():
            pairs = len(rope.inverse_frequencies)
            inputs += [activation(name, 1, 1, ar, pairs) for name in rope_inputs(suffix)]
        if part.head and part.layers and graph.role == "prefill":
            inputs.append(Port("logits_index", "int32", (1,)))
        if part.head:
            outputs = [activation(LOGITS, 1, rows, model.vocab)]
        else:
            outputs = [activation(part.exit, 1, 1, ar, model.hidden)]
        for _, past_rows, tensors in groups:
            for tensor in tensors:
                past, new = (past_rows, model.head_dim), (ar, model.head_dim)
                if tensor.kind == "key" and manifest.key_layout == "columns":
                    past, new = past[::-1], new[::-1]
                inputs.append(Port(tensor.past, kv, (1, 1, *past)))
                outputs.append(Port(tensor.new, kv, (1, 1, *new)))
        return cls(tuple(inputs), tuple(outputs))

    def check(self, found: Signature, file: str) -> None:
        """Compare with what a loaded graph has; `file` names it.

        Raises:
            BundleError: an input or output is missing, unknown, or of another type or shape.
        """
        _compare(file, "input", self.inputs, found.inputs)
        _compare(file, "output", self.outputs, found.outputs)


def _compare(file: str, kind: str, wanted: Iterable[Port], found: Iterable[Port]) -> None:
    ports = {port.name: port for port in found}
    names = [port.name for port in wanted]
    fix = "Export the bundle again with this edgekv."
    for port in wanted:
        if (other := ports.get(port.name)) != port:
            raise BundleError(f"{file}: {kind}", got=other or "none", expected=port, fix=fix)
    if unknown := sorted(ports.keys() - set(names)):
        raise BundleError(f"{file}: {kind}", got=ports[unknown[0]], expected="no further one", fix=fix)
