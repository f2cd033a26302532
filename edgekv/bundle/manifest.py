"""The contract between exporters and runtime: the content of `manifest.json`, with the type and range of each field.

The ranges are far above any model. They keep a forged or damaged manifest from causing endless work.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgekv.spec import ROPE_SUFFIXES, DecoderInterface, GraphRecord, PartRecord, Role, RotaryInputs
from edgekv.spec.geometry import Geometry, KeyLayout, KvDtype
from edgekv.spec.layers import LayeredGeometry
from quant import Encoding, Method, WeightDtype

MANIFEST = "manifest.json"

RotationName = Literal["none", "hadamard"]
KeyScalingName = Literal["none", "pairs"]
HeadsName = Literal["none", "aligned"]
NeuronScalingName = Literal["none", "equal"]
OutlierChannels = Literal["keep", "split"]
GraphFormat = Literal["onnx", "tflite"]
MatrixMethod = Method | Literal["stored"]
"""How integers were chosen: by rounding, or by whoever quantized the checkpoint."""
HtpCheck = Literal["integers-only", "float-allowed", "not-run"]


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]  # -1 is a padding id of some checkpoints
_Layers = Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=0, le=1 << 24)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Frequency = Annotated[float, msgspec.Meta(ge=0, le=1e3)]
_Factor = Annotated[float, msgspec.Meta(gt=0, le=1e3)]
_Sha256 = Annotated[str, msgspec.Meta(max_length=64)]


class _Part(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class FileRecord(_Part, frozen=True):
    """Size and hash of one file of the bundle."""

    bytes: Count
    sha256: _Sha256


class ModelRecord(_Part, frozen=True):
    """The sizes of the decoder."""

    model_type: str
    layers: _Layers
    hidden: _Width
    heads: _Width
    kv_heads: _Width
    head_dim: _Width
    intermediate: _Width
    vocab: _Width
    max_positions: _Tokens


class RopeRecord(_Part, frozen=True):
    """Rotary embedding, resolved: a runtime needs only the frequencies.

    Attributes:
        rope_type: as in the checkpoint (`default`, `linear`, `llama3`, `longrope`).
        theta: the base.
        parameters: the type's own parameters, for runtimes that compute the table themselves.
        inverse_frequencies: R/2 values; the angle of pair i at position p is p * inverse_frequencies[i]. The pairs are
            (i, i + R/2); the elements of a head from R to D stay as they are.
        attention_factor: multiplies every cosine and sine.
    """

    rope_type: str
    theta: _Positive
    parameters: dict[str, float | list[float]]
    inverse_frequencies: list[_Frequency]
    attention_factor: _Factor = 1.0


class TokenRecord(_Part, frozen=True):
    """Special token ids; `bos` and `pad` may be absent."""

    bos: TokenId | None
    eos: list[TokenId]
    pad: TokenId | None


class GenerationRecord(_Part, frozen=True):
    """Default sampling parameters from the checkpoint's generation_config.json.

    Attributes:
        temperature: 0 is greedy, as `do_sample: false` says.
        top_k: None for all tokens.
        top_p: None for all tokens.
        min_p: 0 for none.
        repetition_penalty: 1 for none.
        max_new_tokens: None if not given.
        ignored: names of the fields that are not supported.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    ignored: list[str] = []


class EmbeddingRecord(_Part, frozen=True):
    """The embedding table that the host reads, uint16 `[V, hidden]`, encoded as `inputs_embeds`.

    Attributes:
        file: a safetensors file of the bundle.
        tensor: its name there.
    """

    file: str
    tensor: str


class SinkRecord(_Part, frozen=True):
    """The tokens at the start of every sequence that no graph computes.

    Their keys and values were computed in float; a runtime writes them into a cache before its first step.

    Attributes:
        tokens: ids, n of them. A text that does not begin with them gets them put in front.
        file: a safetensors file of the bundle: integers `[n, D]` by the names of the graphs' cache inputs, and
            `logits`, `[n, V]`.
        result: the result whose range the tokens would span.
        ratio: of the greatest magnitudes there, these tokens to all others.
    """

    tokens: list[TokenId]
    file: str
    result: str
    ratio: Annotated[float, msgspec.Meta(ge=0, le=1e12)]


class StoredRecord(_Part, frozen=True):
    """What became of the matrices of a quantized checkpoint.

    Attributes:
        format: how they are stored, such as `gptq, int4 in groups of 128`.
        kept: number of matrices whose integers were carried over.
        integers: number of their integers.
        changed_integers: how many of these differ, because scales of groups were rounded to LPBQ's.
        error_db: energy of the change of the kept matrices relative to their own; null if there is none.
        quantized_anew: number of matrices that were dequantized and quantized anew, by reason.
    """

    format: str
    kept: Count
    integers: Count
    changed_integers: Count
    error_db: float | None
    quantized_anew: dict[str, Count]


class AdapterRecord(_Part, frozen=True):
    """A LoRA adapter that was merged into the weights.

    Attributes:
        folder: absolute.
        sha256: hash of its configuration and weights.
        scale: multiplies what it adds.
    """

    folder: str
    sha256: _Sha256
    scale: Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]


class SourceRecord(_Part, frozen=True):
    """The checkpoint that the bundle was made from.

    Attributes:
        checkpoint: the folder or hub id that was given, made absolute if it is a folder.
        weights_sha256: hash of its weights and adapters, so that a reference is never computed from another model.
        calibration: name of the calibration text.
        calibration_tokens: number of its tokens that were run.
        stored: what became of quantized matrices; null for a checkpoint of floats.
        adapters: merged into the weights, in order.
    """

    checkpoint: str
    weights_sha256: str
    calibration: str
    calibration_tokens: Count
    stored: StoredRecord | None = None
    adapters: list[AdapterRecord] = []


class WeightRecord(_Part, frozen=True):
    """How a matrix was quantized.

    Attributes:
        tensor: its name in the checkpoint.
        dtype: integer type.
        method: how the integers were chosen.
    """

    tensor: str
    dtype: WeightDtype
    method: MatrixMethod


class ChannelRecord(_Part, frozen=True):
    """A channel of the residual that several represent.

    Attributes:
        channel: its number in the checkpoint.
        parts: number of channels, each 1 / sqrt(parts) of it.
    """

    channel: Annotated[int, msgspec.Meta(ge=0, le=1 << 20)]
    parts: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]


class RecipeRecord(_Part, frozen=True):
    """The recipe as it was applied.

    Attributes:
        name: as requested.
        rotation: of the residual stream, folded into the weights.
        value_rotation: of each head's values, folded likewise.
        key_scaling: `pairs` equalizes the range of the pairs of a head's keys, folded likewise.
        heads: `aligned` turns and scales keys and values of each head so that they fill the integers of the cache,
            folded likewise; `heads.safetensors` has the transforms.
        neuron_scaling: `equal` equalizes the columns of `down_proj`, folded into `up_proj`.
        weights: every matrix; the embedding table and norms have 16 bits.
        outlier_channels: whether outlier channels of the residual were to be split.
        split_channels: those that were, in ascending order.
    """

    name: str
    rotation: RotationName
    weights: list[WeightRecord]
    value_rotation: RotationName = "none"
    key_scaling: KeyScalingName = "none"
    neuron_scaling: NeuronScalingName = "none"
    outlier_channels: OutlierChannels = "keep"
    split_channels: list[ChannelRecord] = msgspec.field(default_factory=list)
    heads: HeadsName = "none"


class Manifest(_Part, frozen=True):
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
    """

    format: int
    producer: str
    device: str
    recipe: RecipeRecord
    kv_dtype: KvDtype
    key_layout: KeyLayout
    context: _Tokens
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
    local_layers: list[_Layers] = []
    unrotated_layers: list[_Layers] = []
    windows: list[_Tokens | None] = []
    graph_format: GraphFormat = "onnx"
    embedding: EmbeddingRecord | None = None
    generation: GenerationRecord | None = None
    sink: SinkRecord | None = None

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
        )
