"""What the CPU's graph of a part is built from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import structs

from edgekv.bundle import ENCODER, GraphRecord, Manifest, PartRecord, VisionRecord, WeightPlaces
from edgekv.spec import KeyLayout, KvDtype, RowSpec
from quant import Encoding

WIDE_ROWS = 256
"""Most tokens of a step: from here on, attention takes as much longer as all else gets shorter."""
CHOSEN = "experts_chosen"
"""An output `[layers with experts, E]`, float32: 1 for each expert that a row has chosen, else 0."""
BUILT_KEYS: KeyLayout = "rows"
"""Key layout of graphs that are built here, whatever the bundle's is: a step can then read the rows in use alone, where
columns have a stride for each number of past tokens."""
_HEAD_MULTIPLE = 8
_MIDDLES: dict[KvDtype, int] = {"u8": 128, "s8": 0}


@dataclass(frozen=True, slots=True)
class PartSource:
    """A part of a graph of a bundle.

    Attributes:
        folder: of the bundle.
        manifest: of the bundle.
        graph: with this part: the one that verifies, whose rows are computed as single ones, or the first.
        part: the part.
        takes_fewer: whether steps can have fewer tokens than AR.
        appends: whether it writes new keys and values directly behind the past ones, in the memory of these.
        tells_experts: whether it has the output `CHOSEN`.
    """

    folder: Path
    manifest: Manifest
    graph: GraphRecord
    part: PartRecord
    takes_fewer: bool = False
    appends: bool = False
    tells_experts: bool = False

    @classmethod
    def of(
        cls,
        folder: Path,
        manifest: Manifest,
        file: str,
        wide: Sequence[GraphRecord] = (),
        appending: Sequence[GraphRecord] = (),
        divide: Callable[[GraphRecord], GraphRecord] = lambda graph: graph,
    ) -> PartSource:
        """The part that is stored in a file, or would be.

        Args:
            folder: of the bundle.
            manifest: of the bundle.
            wide: graphs that the bundle does not have; see `wide_prefill`.
            appending: further ones; see `appending_decode`.
            divide: gives the graph in the parts in which it is run.

        Raises:
            ValueError: there is none.
        """
        graphs = (*manifest.graphs, *wide, *appending)
        using = [
            (graph, run, part) for graph in graphs for run in [divide(graph)] for part in run.parts if part.file == file
        ]
        if not using:
            raise ValueError(f"file: got {file}; expected a graph of the bundle {folder}")
        graph, run, part = next((use for use in using if use[0].role == "verify"), using[0])
        return cls(folder, manifest, run, part, graph in wide, graph in appending)

    @property
    def name(self) -> str:
        """Name of the part."""
        return self.part.name

    @property
    def weights(self) -> WeightPlaces:
        """Of the bundle."""
        return self.manifest.weights

    @property
    def file(self) -> Path:
        """The part's ONNX file, for the HTP."""
        return self.folder / self.part.file

    @property
    def expert_layers(self) -> list[int]:
        """The layers of the part that have experts."""
        return [layer for layer in self.part.layers if self.manifest.model.has_experts(layer)]

    @property
    def content(self) -> bytes:
        """All that a graph is built from, but for the content of weights: equal for equal graphs."""
        manifest, graph = self.manifest, self.graph
        said = (manifest.model, manifest.encodings, manifest.weights, manifest.lora)
        cache = manifest.context, manifest.kv_dtype, manifest.key_layout
        sizes = graph.ar, graph.context, graph.role, self.takes_fewer, self.appends, self.tells_experts
        return msgspec.json.encode((said, cache, sizes, self.part), order="deterministic")


@dataclass(frozen=True, slots=True)
class EncoderSource:
    """A vision encoder of a bundle.

    Attributes:
        folder: of the bundle.
        vision: in its manifest.
    """

    folder: Path
    vision: VisionRecord

    @property
    def name(self) -> str:
        """Of its graph."""
        return ENCODER

    @property
    def weights(self) -> WeightPlaces:
        """Of the encoder."""
        return self.vision.weights

    @property
    def content(self) -> bytes:
        """As that of a part."""
        return msgspec.json.encode(self.vision, order="deterministic")


Source = PartSource | EncoderSource


def built_manifest(manifest: Manifest) -> Manifest:
    """A manifest that says how graphs that are built here read keys."""
    return manifest if manifest.key_layout == BUILT_KEYS else structs.replace(manifest, key_layout=BUILT_KEYS)


def wide_prefill(manifest: Manifest) -> list[GraphRecord]:
    """A prefill graph for each context that the bundle does not have, for engines that build graphs.

    It takes any number of tokens up to AR. Its layers are in two parts at least, and its head is one: weights of a
    prompt have up to twice the bits of a decode step's, and need not all be in memory at its end.
    """
    contexts, windows = manifest.contexts, [window for window in manifest.windows if window is not None]
    ar = min(WIDE_ROWS, contexts[0] // 2, *(window // 2 for window in windows))
    if ar < 2:
        return []
    decode = [graph for graph in manifest.graphs if graph.role == "decode"]
    model = manifest.model
    has_head = not model.gives_hidden and model.target is None
    return [structs.replace(_variant(_divided(graph, has_head), "wide"), ar=ar, role="prefill") for graph in decode]


def _divided(graph: GraphRecord, has_head: bool) -> GraphRecord:
    """A graph whose layers are in two parts instead of one.

    Args:
        has_head: whether a head within that part is one of its own too.
    """
    whole = [part for part in graph.parts if part.layers]
    if len(whole) > 1 or len(whole[0].layers) == 1:
        return graph
    (part,) = whole
    middle, stop, head = (part.first_layer + part.stop_layer) // 2, part.stop_layer, part.head and has_head
    parts = [
        structs.replace(part, name=f"{part.name}_first", stop_layer=middle, head=False),
        structs.replace(part, name=f"{part.name}_last", first_layer=middle, embeds=False, head=part.head and not head),
    ]
    if head:
        name = f"{part.name}_wide_head"
        parts.append(
            PartRecord(name=name, file=f"{name}.onnx", first_layer=stop, stop_layer=stop, embeds=False, head=True)
        )
    at = graph.parts.index(part)
    return structs.replace(graph, parts=[*graph.parts[:at], *parts, *graph.parts[at + 1 :]])


def appending_decode(manifest: Manifest) -> list[GraphRecord]:
    """Decode graphs that append keys and values to the cache themselves, for a manifest with a `signed_cache`."""
    return [_variant(graph, "appending") for graph in manifest.graphs if graph.role == "decode" and graph.ar == 1]


def divided_by_experts(graph: GraphRecord, with_experts: frozenset[int]) -> GraphRecord:
    """A graph whose parts have at most one layer of experts each, so that experts can leave memory between them."""
    return structs.replace(graph, parts=[piece for part in graph.parts for piece in _pieces(part, with_experts)])


def _pieces(part: PartRecord, with_experts: frozenset[int]) -> Iterator[PartRecord]:
    stops = [layer + 1 for layer in part.layers if layer in with_experts]
    stops = [*stops[:-1], part.stop_layer]  # what is behind the last layer of experts goes with it
    for first, stop in zip([part.first_layer, *stops], stops, strict=False):
        is_first, is_last = first == part.first_layer, stop == part.stop_layer
        name = part.name if is_first and is_last else f"{part.name}_layers{first}to{stop}"
        yield structs.replace(
            part,
            name=name,
            file=part.file.replace(part.name, name, 1),
            first_layer=first,
            stop_layer=stop,
            embeds=part.embeds and is_first,
            head=part.head and is_last,
        )


def _variant(graph: GraphRecord, kind: str) -> GraphRecord:
    """A graph with other layers; a part that is only a head reads a single row, and is shared."""
    parts = [
        structs.replace(part, name=f"{part.name}_{kind}", file=f"{part.name}_{kind}.onnx") if part.layers else part
        for part in graph.parts
    ]
    return structs.replace(graph, name=f"{graph.name}_{kind}", parts=parts)


def can_append(manifest: Manifest) -> bool:
    """Whether `GroupQueryAttention` computes the attention of all layers: see `AppendingOps`.

    It reads keys and values of int8 around 0, and all past tokens. Rows of its operands are multiples of 8 bytes wide.
    Drafters and their targets share rows, and adapters bring rows of a sink, as the bundle's integers.
    """
    model, groups = manifest.model, manifest.cache_geometry.groups()
    if manifest.sink is not None and manifest.lora is not None:
        return False
    if model.target is not None or model.bidirectional or model.cache_owners:
        return False
    if model.attention_cap is not None or model.head_gates:
        return False
    if manifest.graph("verify") is not None or len(groups) != 1:
        return False
    (group,) = groups
    if not isinstance(group, RowSpec) or group.window != manifest.context or group.head_dim % _HEAD_MULTIPLE:
        return False
    encodings = [manifest.encodings.get(tensor.past) for tensor in group.names()]
    return group.kv_dtype in _MIDDLES and all(
        encoding is not None and encoding.zero_point == _MIDDLES[group.kv_dtype] for encoding in encodings
    )


def signed_cache(manifest: Manifest) -> Manifest:
    """A manifest whose keys and values are int8 around 0 instead of uint8 around 128: each integer is 128 less."""
    encodings = {
        tensor.past: Encoding("s8", manifest.encodings[tensor.past].scale, 0)
        for tensor in manifest.cache_geometry.names()
    }
    return structs.replace(manifest, kv_dtype="s8", encodings=manifest.encodings | encodings)
