"""The records that a manifest is made of, with the type and range of each field.

The ranges are far above any model. They keep a forged or damaged manifest from causing endless work.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgekv.spec import Vocabulary
from quant import Method, WeightDtype

RotationName = Literal["none", "hadamard", "principal"]
ValueRotationName = Literal["none", "hadamard"]
KeyScalingName = Literal["none", "pairs"]
HeadsName = Literal["none", "aligned"]
NeuronScalingName = Literal["none", "equal", "norm"]
OutlierChannels = Literal["keep", "split"]
MatrixMethod = Method | Literal["stored"]
"""How integers were chosen: by a rounding method, or taken from a quantized checkpoint."""


Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 40)]
TokenId = Annotated[int, msgspec.Meta(ge=-1, lt=1 << 24)]  # -1 is a padding id of some checkpoints
Layer = Annotated[int, msgspec.Meta(ge=0, lt=1 << 12)]
Tokens = Annotated[int, msgspec.Meta(ge=0, le=1 << 27)]
_Sha256 = Annotated[str, msgspec.Meta(max_length=64)]


class Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a manifest; a field that it does not know is refused."""


class FileRecord(Record, frozen=True):
    """Size and hash of one file of the bundle."""

    bytes: Count
    sha256: _Sha256


class TokenRecord(Record, frozen=True):
    """Special token ids; `bos` and `pad` may be absent."""

    bos: TokenId | None
    eos: list[TokenId]
    pad: TokenId | None


class GenerationRecord(Record, frozen=True):
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


class SinkRecord(Record, frozen=True):
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


class StoredRecord(Record, frozen=True):
    """What became of the matrices of a quantized checkpoint.

    Attributes:
        format: how they are stored, such as `gptq, int4 in groups of 128`.
        kept: number of matrices whose integers were carried over.
        integers: number of their integers.
        changed_integers: how many of these differ, because scales of groups were rounded to LPBQ's.
        error_db: energy of the change of the kept matrices relative to their own; null if there is none.
        quantized_anew: number of matrices that were dequantized and quantized again, by reason.
    """

    format: str
    kept: Count
    integers: Count
    changed_integers: Count
    error_db: float | None
    quantized_anew: dict[str, Count]


class AdapterRecord(Record, frozen=True):
    """A LoRA adapter that was merged into the weights.

    Attributes:
        folder: absolute.
        sha256: hash of its configuration and weights.
        scale: multiplies what it adds.
    """

    folder: str
    sha256: _Sha256
    scale: Annotated[float, msgspec.Meta(ge=-1e3, le=1e3)]


class SourceRecord(Record, frozen=True):
    """The checkpoint that the bundle was made from.

    Attributes:
        checkpoint: the folder or hub id that was given, made absolute if it is a folder.
        weights_sha256: hash of its weights and adapters, so that a reference is never computed from another model.
        calibration: name of the calibration text.
        calibration_tokens: number of tokens that were run.
        generated_tokens: how many of them the float model wrote itself, to learn the rounding of weights.
        stored: what became of quantized matrices; null for a checkpoint of floats.
        adapters: merged into the weights, in order.
        unreached_experts: those that no token of the calibration text has chosen, as `LAYER.EXPERT`: they are quantized
            by their weights alone.
    """

    checkpoint: str
    weights_sha256: str
    calibration: str
    calibration_tokens: Count
    stored: StoredRecord | None = None
    adapters: list[AdapterRecord] = []
    generated_tokens: Count = 0
    unreached_experts: list[str] = []


class TargetRecord(Record, frozen=True):
    """The bundle that a drafter reads the cache or the hidden states of.

    Attributes:
        weights_sha256: hash of its checkpoint's weights.
        heads_sha256: hash of what was folded into its keys and values; null if nothing was, or the drafter reads none.
        rotation: of its residual.
        vocabulary: where its embeddings are; with the rotation it decides what form its hidden states have.
    """

    weights_sha256: str
    heads_sha256: str | None = None
    rotation: RotationName = "none"
    vocabulary: Vocabulary = "apart"


class QualityRecord(Record, frozen=True):
    """How close a bundle is to its float model on a text, measured at the end of the export.

    Attributes:
        text: `prose`, `chat`, or `template`: the tokens of the chat that its template adds. `short`: how close the
            float model with the rotation of the bundle's context is to that with the one of short texts (`longrope`).
        tokens: number of tokens predicted.
        kl_nats: mean Kullback-Leibler divergence of the float model's next-token distribution from the bundle's, nats.
        kl_max_nats: the largest divergence of a token, nats.
        top1_agreement: share of positions with the same most likely token.
        min_token_sqnr_db: lowest SQNR of a token's logits, dB.
    """

    text: Literal["prose", "chat", "template", "short"]
    tokens: Tokens
    kl_nats: float
    kl_max_nats: float
    top1_agreement: float
    min_token_sqnr_db: float

    def __str__(self) -> str:
        others = {"template": "the chat's template", "short": "short texts, by the rotation of long ones"}
        what = f"of {others.get(self.text, self.text)}"
        return (
            f"{self.tokens} tokens {what}: KL {self.kl_nats:.2g} nats a token, {self.kl_max_nats:.2g} at "
            f"most; top-1 {self.top1_agreement:.1%}, least token {self.min_token_sqnr_db:.1f} dB"
        )


class EmbeddingQuality(Record, frozen=True, tag="embedding"):
    """How close the embeddings of a bundle are to those of its float model, measured at the end of the export.

    Half of the texts look for the other halves of their passages among all of these.

    Attributes:
        texts: their number.
        cosine: mean cosine of an embedding with that of the float model.
        min_cosine: the lowest.
        same_first: share of the searches whose nearest text is that of the float model.
    """

    texts: Count
    cosine: float
    min_cosine: float
    same_first: float

    def __str__(self) -> str:
        return (
            f"{self.texts} texts: cosine {self.cosine:.5f} with the float model, {self.min_cosine:.5f} at least; "
            f"same nearest text {self.same_first:.1%}"
        )


class RankingQuality(Record, frozen=True, tag="ranking"):
    """How close the scores of a bundle are to those of its float model, measured at the end of the export.

    Attributes:
        pairs: of a query and a document.
        difference: mean of the differences.
        max_difference: the largest.
        same_first: share of the queries with the same best document.
    """

    pairs: Count
    difference: float
    max_difference: float
    same_first: float

    def __str__(self) -> str:
        return (
            f"{self.pairs} pairs: scores differ from the float model's by {self.difference:.2g}, by "
            f"{self.max_difference:.2g} at most; same best document {self.same_first:.1%}"
        )


class WeightRecord(Record, frozen=True):
    """How a matrix was quantized.

    Attributes:
        tensor: its name in the checkpoint.
        dtype: integer type.
        method: how the integers were chosen.
    """

    tensor: str
    dtype: WeightDtype
    method: MatrixMethod


class RecipeRecord(Record, frozen=True):
    """The recipe as it was applied.

    Attributes:
        name: as requested.
        rotation: of the residual stream, folded into the weights.
        value_rotation: of each head's values, folded into `v_proj` and `o_proj`.
        key_scaling: `pairs` equalizes the range of the pairs of a head's keys, folded into `q_proj` and `k_proj`.
        heads: `aligned` rotates and scales keys and values of each head so that they fill the integers of the cache,
            folded into the same matrices; `heads.safetensors` has the transforms.
        neuron_scaling: `equal` equalizes the range of the columns of `down_proj`, and `norm` their norm, folded into
            `up_proj`.
        weights: every matrix; the embedding table and norms have 16 bits.
        outlier_channels: whether outlier channels of the residual were to be split; the model lists those that were.
    """

    name: str
    rotation: RotationName
    weights: list[WeightRecord]
    value_rotation: ValueRotationName = "none"
    key_scaling: KeyScalingName = "none"
    neuron_scaling: NeuronScalingName = "none"
    outlier_channels: OutlierChannels = "keep"
    heads: HeadsName = "none"
