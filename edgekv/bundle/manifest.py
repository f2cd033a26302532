"""The contract between exporters and runtime: the content of `manifest.json`."""

from __future__ import annotations

from typing import Literal

import msgspec

from edgekv.bundle.records import (
    EmbeddingRecord,
    FileRecord,
    GenerationRecord,
    Layers,
    ModelRecord,
    RecipeRecord,
    Record,
    RopeRecord,
    SinkRecord,
    SourceRecord,
    TokenRecord,
    Tokens,
)
from edgekv.spec import ROPE_SUFFIXES, DecoderInterface, GraphRecord, LoraSlots, PartRecord, Role, RotaryInputs
from edgekv.spec.geometry import Geometry, KeyLayout, KvDtype
from edgekv.spec.layers import LayeredGeometry
from quant import Encoding

MANIFEST = "manifest.json"

GraphFormat = Literal["onnx", "tflite"]
HtpCheck = Literal["integers-only", "float-allowed", "not-run"]


class Manifest(Record, frozen=True):
    """`manifest.json`.

    Attributes:
        format: version of this layout.
        producer: the program and version that wrote the bundle.
        device: part number of the target that the graphs were checked against.
        recipe: how every matrix was quantized.
        kv_dtype: integer type of the cache.
        key_layout: how graphs read and write keys; see `Geometry`.
        graph_format: format of the graphs' files.
        context: S of the largest graphs.
        local_rope: rotary embedding of the layers with an attention window, if it differs from the others'; its graph
            inputs are `position_ids_cos_local` and `position_ids_sin_local`.
        local_layers: the layers that have it.
        unrotated_layers: layers without a rotary embedding.
        htp_check: result of the HTP compiler's check at export.
        floating_nodes: QNN nodes that run in float, empty unless they were allowed.
        encodings: every activation and cache tensor of the graphs, by tensor name; cache tensors are listed under the
            names of their graph inputs. Weight scales are stored with the weights in `weights-*.safetensors`.
        files: every other file of the bundle.
        windows: tokens that each layer attends to, including the current one; null for the whole context. A shorter
            list is repeated; empty if all layers attend to the whole context.
        embedding: the table from which the host reads embeddings; null if the graphs look them up.
        generation: sampling defaults; null if the checkpoint has none.
        sink: the first tokens of every sequence, which no graph computes; null if the graphs compute all.
        lora: the inputs for adapters; null if the graphs have none.
    """

    format: int
    producer: str
    device: str
    recipe: RecipeRecord
    kv_dtype: KvDtype
    key_layout: KeyLayout
    context: Tokens
    model: ModelRecord
    rope: RopeRecord
    tokens: TokenRecord
    graphs: list[GraphRecord]
    htp_check: HtpCheck
    floating_nodes: list[str]
    encodings: dict[str, Encoding]
    source: SourceRecord
    files: dict[str, FileRecord]
    local_rope: RopeRecord | None = None
    local_layers: list[Layers] = msgspec.field(default_factory=list)
    unrotated_layers: list[Layers] = msgspec.field(default_factory=list)
    windows: list[Tokens | None] = msgspec.field(default_factory=list)
    graph_format: GraphFormat = "onnx"
    embedding: EmbeddingRecord | None = None
    generation: GenerationRecord | None = None
    sink: SinkRecord | None = None
    lora: LoraSlots | None = None

    @property
    def ropes(self) -> dict[str, RopeRecord]:
        """Every rotary embedding, by the suffix of its graph inputs' names; see `rope_inputs`."""
        records = (self.rope, self.local_rope)
        return {suffix: each for suffix, each in zip(ROPE_SUFFIXES, records, strict=True) if each is not None}

    @property
    def geometry(self) -> Geometry:
        """The sizes of a cache for the largest graphs whose layers all attend to the whole context."""
        return Geometry(
            layers=self.model.layers,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            context=self.context,
            kv_dtype=self.kv_dtype,
            key_layout=self.key_layout,
        )

    @property
    def cache_geometry(self) -> Geometry | LayeredGeometry:
        """The sizes of the cache that the largest graphs read."""
        plain = self.geometry
        if not self.windows:
            return plain
        return LayeredGeometry(
            plain.layers,
            plain.context,
            (plain.kv_heads,),
            (plain.head_dim,),
            self.windows,
            plain.kv_dtype,
            plain.key_layout,
        )

    @property
    def parts(self) -> list[PartRecord]:
        """The parts of all graphs, each once."""
        return [*{part.name: part for graph in self.graphs for part in graph.parts}.values()]

    @property
    def is_whole(self) -> bool:
        """Whether every graph is one part that reads token ids."""
        return all(graph.is_whole for graph in self.graphs)

    @property
    def contexts(self) -> list[int]:
        """S of the graphs, each once, ascending."""
        return sorted({graph.context for graph in self.graphs})

    def graph(self, role: Role) -> GraphRecord | None:
        """The graph of this role for the largest context and with the most tokens per inference, if there is one."""
        return max((g for g in self.graphs if g.role == role), key=lambda g: (g.context, g.ar), default=None)

    @property
    def interface(self) -> DecoderInterface:
        """The interface that all graphs share; its `graph` returns the inputs and outputs of one."""
        local = frozenset(self.local_layers)
        layers = frozenset(range(self.model.layers)) - local - frozenset(self.unrotated_layers), local
        return DecoderInterface(
            hidden=self.model.hidden,
            vocab=self.model.vocab,
            cache=self.cache_geometry,
            rotary=tuple(
                RotaryInputs(suffix, len(rope.inverse_frequencies), of)
                for (suffix, rope), of in zip(self.ropes.items(), layers, strict=False)
            ),
            activations="u16" if self.graph_format == "onnx" else "s16",
            lora=self.lora,
        )
