"""The decoder of a checkpoint: its sizes, and where its architecture differs from Llama's."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from edgekv.spec.geometry import KeyLayout, KvDtype, RowSpec
from edgekv.spec.layers import ConvolutionStates, Geometry, LayeredGeometry
from edgekv.spec.linear import DeltaRule
from edgekv.spec.rope import Rope
from edgekv.spec.sizes import (
    Decoder,
    LayerKind,
    LayerMatrix,
    attention_matrices,
    convolution_matrices,
    delta_matrices,
    expert_matrices,
    feed_forward_matrices,
    layer_input_matrices,
)

Activation = Literal["silu", "gelu", "gelu-tanh", "relu2", "xielu"]
QkNorm = Literal["head", "all-heads"]
Pairs = Literal["halves", "interleaved", "swapped"]
"""How checkpoints store both elements of each pair that a rotary embedding turns: R/2 rows apart, as here; beside each
other; or R/2 apart with the second half first."""
Parallel = Literal["one-norm", "two-norms"]
Mixer = Literal["attention", "convolution", "delta_rule"]
Vocabulary = Literal["apart", "shared", "turned"]
"""Where embeddings are: in a table `apart` from the head's matrix, or `shared` with it; `turned`: between the last norm
and the head, a matrix undoes what the head's own copy of the table had folded in."""

# Far above any model, they keep a forged manifest from causing endless work.
_Layers = Annotated[int, msgspec.Meta(ge=1, le=1 << 12)]
_Layer = Annotated[int, msgspec.Meta(ge=0, lt=1 << 12)]
_Width = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]
_Tokens = Annotated[int, msgspec.Meta(ge=1, le=1 << 27)]
_Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
_Number = Annotated[float, msgspec.Meta(ge=-1e12, le=1e12)]


class SplitChannel(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A channel x of the residual that stands for several equal ones, each x / sqrt(parts): it is stored once.

    Attributes:
        channel: its number.
        parts: how often norms of the residual read it; a power of 4.
    """

    channel: Annotated[int, msgspec.Meta(ge=0, lt=1 << 24)]
    parts: Annotated[int, msgspec.Meta(ge=2, le=1 << 20)]


class Convolution(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Layers with a gated short convolution in place of attention, as in LFM2 (arXiv 2511.23404).

    `out_proj(c * conv(b * x))`, where b, c and x are projections of the layer's input, and conv is causal, with a
    kernel for each channel.

    Attributes:
        layers: their numbers.
        kernel: K, the tokens that the convolution reads, including the current one.
        state_dtype: integer type of the rows that later steps read. Set by export.
    """

    layers: frozenset[_Layer]
    kernel: Annotated[int, msgspec.Meta(ge=2, le=1 << 10)]
    state_dtype: KvDtype = "u16"

    @property
    def stores_roots(self) -> bool:
        """Whether a state of 8 bits holds signed square roots, `sign(x) * sqrt(|x|)`.

        It is a product of two values, so that few elements are large, and even steps would be too wide for the others.
        """
        return self.state_dtype in ("u8", "s8")


class TargetState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a drafter reads of the model that it drafts for, its target.

    A drafter either reads the target's cache: then its layers are numbered after the target's, which have no weights
    here. Or it has a cache of its own, and reads the target's hidden state of every token.

    Attributes:
        layers: of the target, if the drafter reads their keys and values; 0 if it has a cache of its own.
        hidden: H, the width of the target's last hidden state, which is projected and added to the embeddings.
    """

    layers: Annotated[int, msgspec.Meta(ge=0, le=1 << 12)]
    hidden: _Width

    @property
    def is_cached_apart(self) -> bool:
        """Whether the drafter has a cache of its own. Then embedding and hidden state are normalized too."""
        return not self.layers


class LayerSizes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The sizes in which the layers of a decoder may differ.

    Attributes:
        kv_heads: key/value heads.
        head_dim: D, elements of a head.
        intermediate: width of the feed-forward.
    """

    kv_heads: _Width
    head_dim: _Width
    intermediate: _Width


class Experts(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Layers whose feed-forward is a mixture: a router weighs experts, of which each token has a few.

    Each expert is a gated feed-forward. With scores `s = score(router @ x)`, a token's experts are the `used` ones with
    the largest s, or s plus a stored correction; the other experts have the weight 0.

    Attributes:
        count: E, the experts of a layer.
        used: of each token.
        intermediate: width of an expert.
        layers: their numbers.
        score: `softmax` over all experts, or `sigmoid` of each (arXiv 2412.19437).
        normalized: whether a token's weights are divided by their sum; of `sigmoid` plus 1e-6.
        corrected: whether a stored number for each expert is added to the scores that choose, not to the weights.
        gain: multiplies the weights.
    """

    count: Annotated[int, msgspec.Meta(ge=2, le=1 << 10)]
    used: Annotated[int, msgspec.Meta(ge=1, le=1 << 10)]
    intermediate: _Width
    layers: frozenset[_Layer]
    score: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    corrected: bool = False
    gain: _Positive = 1.0

    def __post_init__(self) -> None:
        if self.used > self.count:
            raise ValueError(f"used: got {self.used}; expected at most {self.count} experts")


class DecoderSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder with grouped-query attention, gated feed-forward, RMSNorm and rotary embedding.

    Sizes come first. From `local_rope` on, the defaults are Llama's.

    Attributes:
        kv_heads: of the layers without sizes of their own; so are `head_dim` and `intermediate`. See `of_layer`.
        max_positions: the longest context that can be exported.
        bound_by: the field of `config.json` that sets it.
        query_gain: multiplies the scores, such as head_dim ** -0.5.
        local_rope: rotary embedding of the layers with an attention window, if they have their own.
        unrotated: layers without a rotary embedding.
        pairs: how checkpoints store the pairs of queries and keys; see `View.pairs`. Nothing else depends on it.
        windows: tokens that each layer attends to, including the current one; None for full attention; empty if no
            layer has a window.
        mixers_alone: layers without a feed-forward: they end behind attention, or what replaces it.
        feed_forwards_alone: layers without attention or what replaces it, so that they have no cache.
        limits: upper bounds of the windows, None for no bound; a shorter list is repeated. Set by export options.
        activation: activation function of the gate, or of what has none; `relu2` is the square of ReLU, `xielu` has
            two stored numbers of each layer (arXiv 2411.13010).
        gated: whether the feed-forward multiplies by a gate; without, it has up_proj and down_proj alone.
        biased: projections with a bias, such as `self_attn.q_proj`, or `lm_head`.
        qk_norm: RMSNorm of queries and keys before their rotation: over each head, over all heads together, or None.
            See `qk_norm_of`.
        qk_norm_last: whether queries and keys are normalized behind their rotation instead.
        qk_norm_rotated: whether layers without a rotary embedding have no norm of queries and keys.
        qk_norm_weights: whether it has weights; without, they are 1.
        layer_norms: whether norms of the residual take its mean away (LayerNorm). The decoder computes RMSNorm: what
            writes the residual is read without its mean.
        norm_biases: whether norms of the residual have biases, which are in the biases of what reads them.
        made_biases: projections whose bias comes from a norm alone: the checkpoint has none for them.
        norm_weights: whether the norms have weights; without, they are 1.
        parallel: whether attention and feed-forward read the same residual, by one norm or each by its own; None if
            the feed-forward reads the residual behind attention.
        embedding_norm: whether embeddings are divided by their root mean square before the first layer.
        pre_norms: whether the inputs of attention and feed-forward are normalized.
        post_norms: whether their outputs are normalized before they are added to the residual.
        attention_cap: scores become cap * tanh(scores / cap).
        logits_cap: the same for logits.
        embedding_gain: multiplies the embeddings.
        residual_gain: multiplies the outputs of attention and feed-forward.
        logits_gain: multiplies the logits.
        gains: what multiplies the results of projections of all layers, such as `mlp.down_proj`, or the channels of a
            convolution in front of Mamba-2: `linear_attn.values`, `linear_attn.keys` and `linear_attn.queries`.
        norm_offset: added to the stored weights of every norm.
        split: channels of the residual that norms read several times, in ascending order. Set by export.
        vocabulary: where embeddings are; see `Vocabulary`. Set by export.
        fused: projections that are stored as one matrix: q, k and v (`attention`), or those of each head after each
            other (`heads`); gate and up (`mlp`). `experts`: gate and up of all experts of a layer are one tensor
            `[E, 2 * intermediate, H]`, and down of all is another.
        convolution: the layers without attention; None if there are none.
        delta_rule: the layers with a gated delta rule or Mamba-2 in place of attention; None if there are none.
        experts: the layers with a mixture of experts for a feed-forward; None if there are none.
        layer_sizes: the sizes of each layer; empty if all are alike.
        cache_owners: by layer, the layer whose keys and values it reads; empty if each layer has its own.
        value_norm: whether values are divided by their root mean square.
        layer_inputs: P, the width of what the host gathers for each token and layer, which gates a branch of its own
            at the end of the layer; 0 without.
        picture_layers: behind each of so many first layers, rows of pictures are added to the residual, which the
            encoder makes behind layers of its own (DeepStack, arXiv 2406.04334). 0 if pictures are only embedded.
        picture_axes: for each pair of the rotary embedding, what it turns with: 0 the place in the text, or of a row of
            a picture 1 its row and 2 its column; empty if it is the place in the text for all.
        whole_pictures: whether the rows of a picture attend to each other on both sides, so that a step has all.
        layer_scalars: whether the residual is multiplied by a stored number at the end of each layer.
        head_gates: whether the output of each head is multiplied by the sigmoid of a projection of the layer's input.
        output_gates: whether every channel of the heads' outputs is. Checkpoints store the gates' matrix within q_proj.
        layer_table: whether tokens have inputs of layers of their own, which are added to what embeddings give; else
            those of embeddings are all.
        stored_names: parts of the tensors' names, and what checkpoints of the architecture have in their place.
        multimodal: whether the checkpoint includes a vision model, and the decoder's tensors have a prefix.
        target: of a drafter, what it reads of its target; None for a model of its own.
        gives_hidden: whether graphs also give the normalized result of the last layer, which drafters read. Set by
            export.
        bidirectional: whether tokens attend to those behind them too, within windows on both sides. A text is run as a
            whole, and nothing is cached.
        outputs: rows of the head's matrix where it gives no logits of the vocabulary: the width of an embedding, or the
            number of labels; None for logits. Before a checkpoint is read: that of its own projection, if it has one.
    """

    model_type: str
    layers: _Layers
    hidden: _Width
    heads: _Width
    kv_heads: _Width
    head_dim: _Width
    intermediate: _Width
    vocab: _Width
    max_positions: _Tokens
    eps: Annotated[float, msgspec.Meta(ge=0, le=1)]
    tied_head: bool
    rope: Rope
    query_gain: _Positive
    local_rope: Rope | None = None
    unrotated: frozenset[_Layer] = frozenset()
    pairs: Pairs = "halves"
    windows: tuple[_Tokens | None, ...] = ()
    mixers_alone: frozenset[_Layer] = frozenset()
    feed_forwards_alone: frozenset[_Layer] = frozenset()
    limits: tuple[_Tokens | None, ...] = ()
    activation: Activation = "silu"
    gated: bool = True
    biased: frozenset[str] = frozenset()
    qk_norm: QkNorm | None = None
    qk_norm_last: bool = False
    qk_norm_rotated: bool = False
    qk_norm_weights: bool = True
    layer_norms: bool = False
    norm_weights: bool = True
    norm_biases: bool = False
    made_biases: frozenset[str] = frozenset()
    parallel: Parallel | None = None
    embedding_norm: bool = False
    pre_norms: bool = True
    post_norms: bool = False
    attention_cap: _Positive | None = None
    logits_cap: _Positive | None = None
    embedding_gain: _Number = 1.0
    residual_gain: _Number = 1.0
    logits_gain: _Number = 1.0
    gains: Annotated[tuple[tuple[str, _Number], ...], msgspec.Meta(max_length=64)] = ()
    norm_offset: _Number = 0.0
    split: tuple[SplitChannel, ...] = ()
    vocabulary: Vocabulary = "apart"
    fused: frozenset[Literal["attention", "heads", "mlp", "experts"]] = frozenset()
    multimodal: bool = False
    bound_by: str = "max_position_embeddings"
    convolution: Convolution | None = None
    delta_rule: DeltaRule | None = None
    experts: Experts | None = None
    layer_sizes: tuple[LayerSizes, ...] = ()
    cache_owners: tuple[_Layer, ...] = ()
    value_norm: bool = False
    layer_inputs: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0
    picture_layers: Annotated[int, msgspec.Meta(ge=0, le=16)] = 0
    picture_axes: Annotated[tuple[Annotated[int, msgspec.Meta(ge=0, le=2)], ...], msgspec.Meta(max_length=1 << 12)] = ()
    whole_pictures: bool = False
    layer_scalars: bool = False
    head_gates: bool = False
    output_gates: bool = False
    layer_table: bool = True
    stored_names: tuple[tuple[str, str], ...] = ()
    target: TargetState | None = None
    gives_hidden: bool = False
    outputs: _Width | None = None
    bidirectional: bool = False

    def __post_init__(self) -> None:
        if self.bidirectional and (self.has_states or self.cache_owners or self.target is not None):
            raise ValueError("bidirectional: got true; expected layers with attention of their own alone")
        for name in ("windows", "layer_sizes", "cache_owners"):
            if len(values := getattr(self, name)) not in (0, self.layers):
                raise ValueError(f"{name}: got {len(values)}; expected none or {self.layers}, one for each layer")
        if self.target is not None and self.first_layer >= self.layers:
            raise ValueError(f"target: layers: got {self.first_layer}; expected less than {self.layers}")
        own = [self.of_layer(layer) for layer in self.own_layers] if self.target is not None else self._all_sizes
        if wrong := [sizes.kv_heads for sizes in own if self.heads % sizes.kv_heads]:
            raise ValueError(f"kv_heads: got {wrong[0]}; expected a divisor of {self.heads} heads")
        if foreign := [layer for layer in self.unrotated if layer >= self.layers]:
            raise ValueError(f"unrotated: got {foreign[0]}; expected layers below {self.layers}")
        if self.vocabulary != "apart" and not self.tied_head:
            raise ValueError(f"vocabulary: got {self.vocabulary}; expected apart, since the head is not tied")
        if self.outputs is not None and (self.tied_head or self.logits_cap is not None):
            raise ValueError(f"outputs: got {self.outputs}; expected logits of a head that is tied, or has a cap")
        if self.convolution is not None and not self.convolution.layers < {*range(self.layers)}:
            layers = sorted(self.convolution.layers)
            raise ValueError(f"convolution: layers: got {layers}; expected some below {self.layers}, and one without")
        if self.delta_rule is not None:
            self._check_delta_rule(self.delta_rule)
        if self.mixers_alone or self.feed_forwards_alone:
            self._check_layers_alone()
        if self.experts is not None:
            self._check_experts(self.experts)
        for layer in range(self.layers) if self.layer_sizes or self.cache_owners else (0,):
            self._check_layer(layer)
        if self.layer_norms and (self.post_norms or not self.pre_norms or self.shares_vocabulary):
            raise ValueError(
                "layer_norms: got true; expected pre_norms without post_norms, and a vocabulary that is not shared"
            )
        if self.activation in (("relu2", "xielu") if self.gated else ("silu",)):
            raise ValueError(f"activation: got {self.activation}, gated {self.gated}; expected silu with a gate alone")
        if self.parallel and (self.post_norms or not self.pre_norms):
            raise ValueError(f"parallel: got {self.parallel}; expected pre_norms without post_norms")
        if self.embedding_norm and self.shares_vocabulary:
            raise ValueError("embedding_norm: got true; expected a vocabulary that is not shared")
        if outside := [split.channel for split in self.split if split.channel >= self.hidden]:
            raise ValueError(f"split: channel: got {outside[0]}; expected channels below hidden = {self.hidden}")

    def _check_delta_rule(self, rule: DeltaRule) -> None:
        layers = {*range(self.layers)}
        if not rule.layers <= layers or not self.attention_layers:
            got, expected = sorted(rule.layers), f"some below {self.layers}, and one with attention"
            raise ValueError(f"delta_rule: layers: got {got}; expected {expected}")
        if rule.corrects and (rule.attends or rule.norm != "gated"):
            raise ValueError(f"delta_rule: norm: got {rule.norm}, attends {rule.attends}; expected gated and false")

    def _check_layers_alone(self) -> None:
        alone = self.mixers_alone | self.feed_forwards_alone
        both = self.mixers_alone & self.feed_forwards_alone
        if both or not alone <= {*range(self.layers)} or not self.attention_layers:
            got, expected = sorted(both or alone), f"some below {self.layers}, each in one, and one with attention"
            raise ValueError(f"mixers_alone, feed_forwards_alone: got {got}; expected {expected}")
        if not self.pre_norms or self.post_norms or self.parallel or self.layer_inputs or self.cache_owners:
            raise ValueError("mixers_alone: got some; expected pre_norms alone, and layers with caches of their own")

    def _check_experts(self, experts: Experts) -> None:
        if not experts.layers or not experts.layers <= {*range(self.layers)}:
            raise ValueError(f"experts: layers: got {sorted(experts.layers)}; expected some below {self.layers}")
        if not self.gated or self.activation != "silu" or any(name.startswith("mlp.") for name in self.biased):
            raise ValueError("experts: got a feed-forward without a gate, or with biases; expected SiLU and a gate")
        if self.layer_norms or self.post_norms or self.layer_inputs or self.target is not None:
            raise ValueError("experts: got LayerNorms, post-norms, inputs of layers or a drafter; expected none")

    def _check_layer(self, layer: int) -> None:
        sizes, owner = self.of_layer(layer), self.cache_layer(layer)
        ropes = self.ropes if not self.layer_sizes else tuple(filter(None, [self.rope_of(layer)]))
        if wrong := [rope.width for rope in ropes if rope.width > sizes.head_dim]:
            raise ValueError(f"rope: width: got {wrong[0]}; expected at most head_dim = {sizes.head_dim}")
        if owner == layer:
            return
        if owner > layer or self.cache_layer(owner) != owner:
            raise ValueError(f"cache_owners: got {owner} of layer {layer}; expected an earlier layer with a cache")
        cached = [
            (layer_sizes.kv_heads, layer_sizes.head_dim, self._own_window(number), self.mixers(number))
            for number, layer_sizes in ((layer, sizes), (owner, self.of_layer(owner)))
        ]
        if cached[0] != cached[1] or not self.has_attention(layer):
            raise ValueError(f"cache_owners: got {owner} of layer {layer}; expected a layer of the same kind and sizes")

    @property
    def _all_sizes(self) -> tuple[LayerSizes, ...]:
        return self.layer_sizes or (self.of_layer(0),)

    def of_layer(self, layer: int) -> LayerSizes:
        """The sizes of a layer."""
        if self.layer_sizes:
            return self.layer_sizes[layer]
        return LayerSizes(self.kv_heads, self.head_dim, self.intermediate)

    def has_experts(self, layer: int) -> bool:
        """Whether the feed-forward of a layer is a mixture of experts."""
        return self.experts is not None and layer in self.experts.layers

    def cache_layer(self, layer: int) -> int:
        """The layer whose keys and values a layer reads: itself, or the owner of a cache that it shares."""
        return self.cache_owners[layer] if self.cache_owners else layer

    def owns_cache(self, layer: int) -> bool:
        """Whether a layer writes rows of keys and values, or a state."""
        return self.cache_layer(layer) == layer and layer not in self.feed_forwards_alone

    @property
    def shared_layers(self) -> frozenset[int]:
        """The layers whose keys and values later layers read too."""
        return frozenset(owner for layer, owner in enumerate(self.cache_owners) if owner != layer)

    @property
    def first_without_cache(self) -> int | None:
        """The first of the last layers that own no cache: only the last token of a prompt needs them; None if none."""
        owners = [layer for layer in range(self.layers) if self.cache_layer(layer) == layer]
        return owners[-1] + 1 if owners[-1] + 1 < self.layers else None

    @property
    def first_layer(self) -> int:
        """The first layer with weights: of a drafter, the one after its target's."""
        return 0 if self.target is None else self.target.layers

    @property
    def own_layers(self) -> range:
        """The layers with weights."""
        return range(self.first_layer, self.layers)

    @property
    def sizes(self) -> Decoder:
        """The sizes that plans and estimates need."""
        kinds: dict[tuple[LayerMatrix, ...], list[int]] = {}
        for layer in self.own_layers:
            kinds.setdefault(self._matrices(layer), []).append(layer)
        return Decoder(
            layers=self.layers,
            hidden=self.hidden,
            heads=self.heads,
            kv_heads=max(sizes.kv_heads for sizes in self._all_sizes),
            head_dim=max(sizes.head_dim for sizes in self._all_sizes),
            intermediate=max(self._inner_width(layer) for layer in self.own_layers),
            vocab=self.vocab,
            tied_head=self.tied_head,
            kinds=tuple(LayerKind(tuple(numbers), kind) for kind, numbers in kinds.items()),
            convolutions=0 if self.convolution is None else len(self.convolution.layers),
            delta_rule=self.delta_rule,
            layer_inputs=self.layers * self.layer_inputs,
            first_without_cache=self.first_without_cache,
            outputs=self.outputs,
            experts=1 if self.experts is None else self.experts.count,
        )

    def _matrices(self, layer: int) -> tuple[LayerMatrix, ...]:
        sizes, hidden, mixers = self.of_layer(layer), self.hidden, self.mixers(layer)
        mixer: tuple[LayerMatrix, ...] = convolution_matrices(hidden) if "convolution" in mixers else ()
        if self.delta_rule is not None and "delta_rule" in mixers:
            mixer = delta_matrices(hidden, self.delta_rule)
        if "attention" in mixers:
            queries, keys = self.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
            gates = self.heads if self.head_gates else queries if self.output_gates else 0
            attention = attention_matrices(hidden, queries, keys, owns_cache=self.owns_cache(layer), gates=gates)
            mixer = (*mixer, *attention)
        if not self.has_feed_forward(layer):
            return mixer
        if self.experts is not None and self.has_experts(layer):
            return (*mixer, *expert_matrices(hidden, self.experts.intermediate, self.experts.count))
        inputs = layer_input_matrices(hidden, self.layer_inputs)
        return (*mixer, *feed_forward_matrices(hidden, sizes.intermediate, gated=self.gated), *inputs)

    def _inner_width(self, layer: int) -> int:
        """Width of a layer's feed-forward, of all experts together."""
        if self.experts is not None and self.has_experts(layer):
            return self.experts.count * self.experts.intermediate
        return self.of_layer(layer).intermediate

    @property
    def input_width(self) -> int:
        """Width of what a layer reads of all that the host gathers."""
        return self.layer_inputs or (self.hidden if self.picture_layers else 0)

    @property
    def gathered_width(self) -> int:
        """Width of what the host gathers of a token for all layers; 0 if they read none of it."""
        return self.input_width * (self.layers if self.layer_inputs else self.picture_layers)

    @property
    def result_width(self) -> int:
        """Rows of the head's matrix: logits of a token, elements of an embedding, or labels."""
        return self.vocab if self.outputs is None else self.outputs

    @property
    def shares_vocabulary(self) -> bool:
        """Whether the rows of the head's matrix are the embeddings."""
        return self.vocabulary != "apart"

    @property
    def head_gain(self) -> float:
        """Multiplies the last norm if the head's matrix has the gain of embeddings: nothing else can be folded in."""
        if not self.shares_vocabulary:
            return 1.0
        return self.logits_gain / self.embedding_gain / (self.logits_cap or 1.0)

    @property
    def copies(self) -> int:
        """Elements that norms of the residual read besides its channels."""
        return sum(split.parts - 1 for split in self.split)

    def group(self, layer: int) -> int:
        """Query heads of a layer that share one key/value head."""
        return self.heads // self.of_layer(layer).kv_heads

    def mixers(self, layer: int) -> tuple[Mixer, ...]:
        """How a layer mixes tokens: with attention, a short convolution, or a gated delta rule or Mamba-2.

        Two that read the same input, or none.
        """
        if layer in self.feed_forwards_alone:
            return ()
        if self.convolution is not None and layer in self.convolution.layers:
            return ("convolution",)
        if self.delta_rule is None or layer not in self.delta_rule.layers:
            return ("attention",)
        return ("delta_rule", "attention") if self.delta_rule.attends else ("delta_rule",)

    def has_attention(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return "attention" in self.mixers(layer)

    def has_feed_forward(self, layer: int) -> bool:
        """Whether a layer has a feed-forward."""
        return layer not in self.mixers_alone

    def mixer_width(self, layer: int, kind: Mixer) -> int:
        """Elements of what the projection behind a mixer reads."""
        if kind == "delta_rule" and self.delta_rule is not None:
            return self.delta_rule.values
        return self.hidden if kind == "convolution" else self.heads * self.of_layer(layer).head_dim

    def gain_of(self, name: str) -> float:
        """What multiplies the results of a projection; see `gains`."""
        return dict(self.gains).get(name, 1.0)

    def qk_norm_of(self, layer: int) -> QkNorm | None:
        """The norm of a layer's queries and keys."""
        return None if self.qk_norm_rotated and layer in self.unrotated else self.qk_norm

    @property
    def has_states(self) -> bool:
        """Whether some layers keep a state instead of keys and values of every token."""
        return self.convolution is not None or self.delta_rule is not None

    def cache_tensors(self, layer: int) -> int:
        """Number of tensors of keys and values, or of states, that a layer has in the cache."""
        states = 0 if self.delta_rule is None else 4 + self.delta_rule.value_heads
        counts = {
            "convolution": 1,
            "delta_rule": states,
            "attention": 2 * self.of_layer(layer).kv_heads if self.owns_cache(layer) else 0,
        }
        return sum(counts[kind] for kind in self.mixers(layer))

    @property
    def attention_layers(self) -> list[int]:
        """The layers with attention."""
        return [layer for layer in range(self.layers) if self.has_attention(layer)]

    def cache(self, context: int, kv_dtype: KvDtype, key_layout: KeyLayout) -> Geometry:
        """The sizes of a cache for graphs of a context of S.

        Raises:
            ValueError: no graph can have this context, such as one that a convolution's kernel exceeds.
        """
        windows, states = self.windows_in(context), self.convolution_states
        is_plain = not self.layer_sizes and not self.cache_owners and not self.feed_forwards_alone
        if not windows and states is None and is_plain:
            return RowSpec(self.layers, self.kv_heads, self.head_dim, context, kv_dtype, key_layout)
        if states is not None and states.kernel >= context:
            raise ValueError(f"context: got {context}; expected more than the kernel of {states.kernel} tokens")
        return LayeredGeometry(
            self.layers,
            context,
            tuple(sizes.kv_heads for sizes in self._all_sizes),
            tuple(sizes.head_dim for sizes in self._all_sizes),
            windows,
            kv_dtype,
            key_layout,
            states,
            self.delta_rule,
            frozenset(layer for layer in range(self.layers) if not self.owns_cache(layer)),
        )

    def with_states(self, dtype: KvDtype) -> DecoderSpec:
        """The same decoder, whose convolutions' states, if it has any, are of a type; see `Convolution.state_dtype`."""
        convolution, rule = self.convolution, self.delta_rule
        return msgspec.structs.replace(
            self,
            convolution=None if convolution is None else msgspec.structs.replace(convolution, state_dtype=dtype),
            delta_rule=None if rule is None else msgspec.structs.replace(rule, state_dtype=dtype),
        )

    @property
    def convolution_states(self) -> ConvolutionStates | None:
        """What convolutions keep, alone or before a gated delta rule."""
        if self.delta_rule is not None:
            rule = self.delta_rule
            return ConvolutionStates(rule.layers, rule.kernel, rule.channels, rule.state_dtype)
        if self.convolution is None:
            return None
        return ConvolutionStates(
            self.convolution.layers, self.convolution.kernel, self.hidden, self.convolution.state_dtype
        )

    def window(self, layer: int) -> int | None:
        """Tokens that a layer attends to, including the current one; None for all, and without attention.

        With attention to both sides, as many on each.
        """
        if not self.has_attention(layer):
            return None
        layer = self.cache_layer(layer)
        limit = self.limits[layer % len(self.limits)] if self.limits else None
        return min((window for window in (self._own_window(layer), limit) if window is not None), default=None)

    def windows_in(self, context: int) -> tuple[int | None, ...]:
        """The windows that are smaller than a context of S tokens, by layer; empty if there are none."""
        windows = [self.window(layer) for layer in range(self.layers)]
        narrow = [window if window is not None and window < context else None for window in windows]
        return () if narrow.count(None) == self.layers else tuple(narrow)

    @property
    def keys_cannot_move(self) -> str | None:
        """Why cached keys cannot be turned to other positions by one rotary embedding; None if they can."""
        if self.unrotated:
            return "layers without a rotary embedding"
        if self.local_rope is not None:
            return "layers with two rotary embeddings"
        return "norms of keys behind their rotary embedding" if self.qk_norm_last else None

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The rotary embedding, and the local one if there is one."""
        return (self.rope,) if self.local_rope is None else (self.rope, self.local_rope)

    def rope_of(self, layer: int) -> Rope | None:
        """The rotary embedding of a layer, or None."""
        if layer in self.unrotated or not self.has_attention(layer):
            return None
        return self.rope if self.local_rope is None or self._own_window(layer) is None else self.local_rope

    def shorter_texts(self, context: int) -> int | None:
        """The longest text that would be rotated by other factors on its own than in graphs for a longer context.

        Keys in a cache are rotated, so that one text has one set of factors. Graphs have those of their context
        (`longrope`); None if there is no such text.
        """
        contexts = (rope.original_context for rope in self.ropes)
        return min((original for original in contexts if original is not None and original < context), default=None)

    def layers_with(self, rope: Rope) -> list[int]:
        """The layers with this rotary embedding, one of `ropes`."""
        return [layer for layer in range(self.layers) if self.rope_of(layer) is rope]

    def _own_window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None
