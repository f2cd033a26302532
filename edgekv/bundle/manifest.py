"""The contract between exporters and runtime: the content of `manifest.json`."""

from __future__ import annotations

from typing import Literal

from edgekv.bundle.formats import GraphFormat
from edgekv.bundle.records import (
    EmbeddingQuality,
    FileRecord,
    GenerationRecord,
    QualityRecord,
    RankingQuality,
    RecipeRecord,
    Record,
    SinkRecord,
    SourceRecord,
    TargetRecord,
    TokenRecord,
    Tokens,
)
from edgekv.bundle.vision import VisionRecord
from edgekv.bundle.weights import WeightPlaces
from edgekv.spec import (
    EMBEDDINGS,
    ROPE_SUFFIXES,
    DecoderInterface,
    DecoderSpec,
    GraphRecord,
    LoraSlots,
    PartRecord,
    Role,
    Rotation,
    Task,
)
from edgekv.spec.geometry import KeyLayout, KvDtype, RowSpec
from edgekv.spec.layers import Geometry
from quant import Dtype, Encoding

MANIFEST = "manifest.json"

HtpCheck = Literal["integers-only", "float-allowed", "not-run"]


class Manifest(Record, frozen=True):
    """`manifest.json`.

    Attributes:
        format: version of this layout.
        producer: the program and version that wrote the bundle.
        device: part number of the target that the graphs were checked against.
        recipe: how every matrix was quantized.
        kv_dtype: integer type of the cache.
        key_layout: how graphs read and write keys; see `RowSpec`.
        graph_format: format of the graphs' files.
        context: S of the largest graphs.
        model: the decoder that the graphs compute: with the attention windows of the export, and the residual's
            channels that it split.
        htp_check: result of the HTP compiler's check at export.
        floating_nodes: QNN nodes that run in float, empty unless they were allowed.
        encodings: every activation and cache tensor of the graphs, by tensor name; cache tensors are listed under the
            names of their graph inputs.
        files: every other file of the bundle.
        weights: the places of the weights of ONNX graphs; TFLite graphs have theirs in their file.
        generation: sampling defaults; null if the checkpoint has none.
        sink: the first tokens of every sequence, which no graph computes; null if the graphs compute all.
        lora: the inputs for adapters; null if the graphs have none.
        quality: what the export lost, on each text; empty if it was not measured.
        vision: the encoder of pictures; null if the bundle reads text alone.
        target: of a drafter, the bundle that it was made for; null for a model of its own.
        task: what the model gives if it writes no text; null for a model that does.
        task_quality: what the export of such a model lost; null if it was not measured.
    """

    format: int
    producer: str
    device: str
    recipe: RecipeRecord
    kv_dtype: KvDtype
    key_layout: KeyLayout
    context: Tokens
    model: DecoderSpec
    tokens: TokenRecord
    graphs: list[GraphRecord]
    htp_check: HtpCheck
    floating_nodes: list[str]
    encodings: dict[str, Encoding]
    source: SourceRecord
    files: dict[str, FileRecord]
    weights: WeightPlaces = WeightPlaces()
    graph_format: GraphFormat = "onnx"
    generation: GenerationRecord | None = None
    sink: SinkRecord | None = None
    lora: LoraSlots | None = None
    quality: tuple[QualityRecord, ...] = ()
    vision: VisionRecord | None = None
    target: TargetRecord | None = None
    task: Task | None = None
    task_quality: EmbeddingQuality | RankingQuality | None = None

    @property
    def rotations(self) -> dict[str, Rotation]:
        """Every rotary embedding, by the suffix of its graph inputs' names; see `rope_inputs`."""
        ropes = zip(ROPE_SUFFIXES, self.model.ropes, strict=False)
        return {suffix: rope.rotation(self.context) for suffix, rope in ropes}

    @property
    def windows(self) -> tuple[int | None, ...]:
        """Tokens that each layer attends to, if any layer attends to less than the context; see `DecoderSpec`."""
        return self.model.windows_in(self.context)

    @property
    def geometry(self) -> RowSpec:
        """The sizes of a cache for the largest graphs whose layers all attend to the whole context."""
        return RowSpec(
            layers=self.model.layers,
            kv_heads=self.model.kv_heads,
            head_dim=self.model.head_dim,
            window=self.context,
            kv_dtype=self.kv_dtype,
            key_layout=self.key_layout,
        )

    @property
    def cache_geometry(self) -> Geometry:
        """The sizes of the cache that the largest graphs read."""
        return self.model.cache(self.context, self.kv_dtype, self.key_layout)

    @property
    def parts(self) -> list[PartRecord]:
        """The parts of all graphs, each once."""
        return [*{part.name: part for graph in self.graphs for part in graph.parts}.values()]

    @property
    def graph_files(self) -> list[str]:
        """The files of all graphs, each once, with that of the vision encoder."""
        encoder = [] if self.vision is None else [self.vision.file]
        return [*dict.fromkeys(part.file for part in self.parts), *encoder]

    @property
    def is_whole(self) -> bool:
        """Whether every graph is one part that reads token ids."""
        return all(graph.is_whole for graph in self.graphs)

    @property
    def host_embeds(self) -> bool:
        """Whether the host looks up embeddings, instead of the graphs."""
        return any(part.entry == EMBEDDINGS for part in self.parts)

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
        activations: Dtype = "u16" if self.graph_format == "onnx" else "s16"
        return DecoderInterface.of(
            self.model, self.context, self.kv_dtype, self.key_layout, activations, lora=self.lora
        )
