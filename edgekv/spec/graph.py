"""The interfaces of a decoder's graphs, for all code that writes, checks, binds or counts their inputs and outputs.

A new input is one line in `DecoderInterface._inputs`, and the code that fills it. All names are Genie's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.divided import boundary_ports
from edgekv.spec.geometry import ConvSpec, DeltaSpec, KeyLayout, Kind, KvDtype, KvTensor, LayerSpec, RowSpec
from edgekv.spec.layers import Geometry
from edgekv.spec.lora import LoraSlots
from edgekv.spec.parts import EMBEDDINGS, IDS, LOGITS, GraphRecord, PartRecord
from edgekv.spec.ports import GraphInterface, Port, PortKind
from quant import DTYPES, Dtype

MASK, LOGITS_INDEX = "attention_mask", "logits_index"
CONV_ROWS = "conv_rows"
FINAL_NORM_RESULT, TARGET_OUT_RESULT = "final_norm", "target_out"
"""The results of the last norm, and of a drafter's projection back to its target's width."""
LAYER_INPUTS_PORT = "per_layer_inputs"
TARGET_HIDDEN, LAST_HIDDEN = "target_hidden", "last_hidden"
"""The input of a drafter, and an output: a target's last hidden state, or a drafter's guess of the next one."""
_TYPE_NAMES = {dtype: form.name for dtype, form in DTYPES.items()}  # numpy makes the name anew each time
ROPE_SUFFIXES = ("", "_local")
"""Suffixes of the rotary inputs of `DecoderSpec.rope` and of `DecoderSpec.local_rope`."""

STEP_KINDS: frozenset[PortKind] = frozenset(
    {"ids", "embeddings", "layer_inputs", "mask", "cos", "sin", "conv_rows", "others", "logits_index", "target_hidden"}
)
"""The inputs that the host writes before a step. The others are in the cache or come from the previous part."""


def mask_name(window: int | None) -> str:
    """Name of the attention mask of layers that attend to this many tokens, including the current one; None for all."""
    return MASK if window is None else f"{MASK}_w{window}"


def rope_inputs(suffix: str) -> tuple[str, str]:
    """Names of the graph inputs for cosines and sines."""
    return "position_ids_cos" + suffix, "position_ids_sin" + suffix


@dataclass(frozen=True, slots=True)
class RotaryInputs:
    """The cosines and sines of one rotary embedding.

    Attributes:
        suffix: suffix of the names of the two inputs; see `ROPE_SUFFIXES`.
        pairs: R/2, half of the elements of a head that are rotated.
        layers: the layers that read them; None for all.
    """

    suffix: str
    pairs: int
    layers: frozenset[int] | None = None

    @property
    def names(self) -> tuple[str, str]:
        """Names of the graph inputs."""
        return rope_inputs(self.suffix)


@dataclass(frozen=True)
class DecoderInterface:
    """The interfaces of all graphs of one decoder.

    Attributes:
        hidden: width of the residual.
        outputs: width of what graphs give of a token; see `DecoderSpec.result_width`.
        cache: the cache that the largest graphs read.
        rotary: the rotary embeddings.
        activations: integer type of the activations.
        lora: the inputs for adapters; None if the graphs have none.
        cache_owners: see `DecoderSpec`.
        layer_inputs: width of what the host gathers for all layers of a token; 0 without.
        picture_layers: the first layers, which alone read it; 0 if all do.
        experts: of a layer with a mixture; 0 if none has.
        given_hidden: width of the hidden state that graphs give beside the logits; 0 if they give none.
        reads_hidden: whether they read one of the target's, of the same width.
        is_cached: whether they read and write rows of keys and values; else a step is a whole text.
    """

    hidden: int
    outputs: int
    cache: Geometry
    rotary: tuple[RotaryInputs, ...]
    activations: Dtype = "u16"
    lora: LoraSlots | None = None
    cache_owners: tuple[int, ...] = ()
    layer_inputs: int = 0
    given_hidden: int = 0
    reads_hidden: bool = False
    is_cached: bool = True
    picture_layers: int = 0
    experts: int = 0

    @classmethod
    def of(
        cls,
        spec: DecoderSpec,
        context: int,
        kv_dtype: KvDtype,
        key_layout: KeyLayout,
        activations: Dtype,
        lora: LoraSlots | None = None,
    ) -> DecoderInterface:
        """The interfaces of the graphs of a checkpoint.

        Args:
            context: S of the largest graphs.
            kv_dtype: integer type of the cache.
            key_layout: of the keys in the cache.
            activations: integer type of the activations.
            lora: the inputs for adapters.
        """
        rotary = tuple(
            RotaryInputs(suffix, rope.width // 2, frozenset(spec.layers_with(rope)))
            for suffix, rope in zip(ROPE_SUFFIXES, spec.ropes, strict=False)
        )
        cache = spec.cache(context, kv_dtype, key_layout)
        return cls(
            spec.hidden,
            spec.result_width,
            cache,
            rotary,
            activations,
            lora,
            spec.cache_owners,
            spec.gathered_width,
            spec.target.hidden if spec.target is not None else spec.hidden if spec.gives_hidden else 0,
            spec.target is not None,
            not spec.bidirectional,
            spec.picture_layers,
            0 if spec.experts is None else spec.experts.count,
        )

    def graph(self, graph: GraphRecord, part: PartRecord | None = None) -> GraphInterface:
        """The interface of one part of a graph for AR new tokens in a context of S.

        Inputs: `input_ids` [1, AR]; or `inputs_embeds` or `hidden_{L}` [1, 1, AR, hidden] (a separate head reads only
            the rows that need logits). Where there are layers: `attention_mask` [1, 1, AR, S] and, of layers that
        attend to W < S tokens, `attention_mask_w{W}` [1, 1, AR, P+AR]; `position_ids_cos` and `_sin` [1, 1, AR, R/2] of
        each rotary embedding; and each past [1, 1, P, D], keys as columns [1, 1, D, P], with P = S-AR, or
        min(W-1, S-AR), and each state of a convolution [1, 1, K-1, hidden]. Of a gated delta rule,
        `recurrent_state_{L}_in` [1, 1, key_dim, values], and the rows of its tail [1, 1, 64, width]. In verify graphs
        with states: `conv_rows` [(K-1) * AR], the row that a tap of a convolution reads for a token, by tap, of past,
        new and others' rows; and for each layer the others, [1, 1, (K-1) * AR, hidden], states of further sequences.
        With a gated delta rule there are no others. Where layers have inputs of their own: `per_layer_inputs`
        [1, 1, AR, layers * P]; or [1, 1, AR, layers * hidden] where the first layers add rows of pictures. Where a
        layer reads the cache of one in an earlier part: that past, and its new rows, under the name of the earlier
        part's output. In a drafter's graphs `target_hidden` [1, 1, AR, H], and the rows
        of the target's layers as if those were an earlier part. In graphs with slots: the A's and B's of
        `LoraSlots.tensors`. In prefill graphs whose last part has layers: `logits_index` [1]. Without a cache AR is S,
        P is 0, no past is read and no new row given. A part of a graph that is divided at its routers reads and gives
        `boundary_ports` too.

        Outputs: each new [1, 1, AR, D], keys as columns [1, 1, D, AR]; `last_hidden` [1, 1, AR, H] of a part with the
        last layer, if graphs give it; and `logits` [1, AR or 1, V] or `hidden_{L}`.

        Args:
            graph: AR, context and role.
            part: the part; None for the only one.
        """
        part = graph.part if part is None else part
        return GraphInterface(tuple(self._inputs(graph, part)), tuple(self._outputs(graph, part)))

    def parts(self, graph: GraphRecord) -> tuple[GraphInterface, ...]:
        """The interface of each part of a graph, in order."""
        return tuple(self.graph(graph, part) for part in graph.parts)

    def mask(self, layer: int) -> str:
        """Name of the attention mask of a layer."""
        return self.mask_of(self._attending[self.cache_layer(layer)])

    def cache_layer(self, layer: int) -> int:
        """As `DecoderSpec.cache_layer`."""
        return self.cache_owners[layer] if self.cache_owners else layer

    def borrowed(self, part: PartRecord) -> list[int]:
        """The layers of earlier parts whose caches the layers of a part read."""
        return sorted({self.cache_layer(layer) for layer in part.layers} - {*part.layers})

    def mask_of(self, group: RowSpec) -> str:
        """Name of the attention mask of a group of layers."""
        return mask_name(None if group.window == self.cache.context else group.window)

    def masks(self) -> dict[str, int | None]:
        """The attention masks by name, and how many tokens each covers, the current one included; None for all."""
        windows = {self.mask_of(group): group.window for group in self.cache.rows()}
        return {name: None if name == MASK else window for name, window in windows.items()}

    def mask_groups(self, groups: Sequence[LayerSpec]) -> dict[str, int]:
        """The attention masks by name, and the number of the first of these groups of layers that reads each."""
        first: dict[str, int] = {}
        for number, group in enumerate(groups):
            if isinstance(group, RowSpec):
                first.setdefault(self.mask_of(group), number)
        return first

    def rotary_of(self, layer: int) -> RotaryInputs | None:
        """The rotary embedding of a layer; None if it has none."""
        return next((rotary for rotary in self.rotary if rotary.layers is None or layer in rotary.layers), None)

    def tensors(self, layers: Iterable[int]) -> Iterator[KvTensor]:
        """The cache tensors of these layers, in the order of the graphs' inputs."""
        for layer in (number for number in layers if number in self._all_groups):
            for group in self._all_groups[layer]:
                for head in range(group.heads):
                    for kind in group.kinds:
                        yield KvTensor(layer, kind, head)

    def _inputs(self, graph: GraphRecord, part: PartRecord) -> Iterator[Port]:
        ar, rows = graph.ar, graph.ar if part.layers else graph.logit_rows
        owners = {layer: self.cache_layer(layer) for layer in part.layers}
        attending = [layer for layer, owner in owners.items() if owner in self._attending]
        masks = {self.mask(layer): self._past_rows(owners[layer], graph) for layer in attending}
        read = {self.rotary_of(layer) for layer in attending}
        if part.embeds:
            yield Port(IDS, "int32", (1, ar), "ids")
        else:
            kind: PortKind = "embeddings" if part.entry == EMBEDDINGS else "hidden"
            yield self._activation(kind, part.entry, (1, 1, rows, self.hidden))
        yield from (port for is_input, port in boundary_ports(part, self.hidden, self.experts) if is_input)
        if self.reads_hidden:
            yield self._activation("target_hidden", TARGET_HIDDEN, (1, 1, ar, self.given_hidden))
        if self.layer_inputs and part.layers and (not self.picture_layers or part.first_layer < self.picture_layers):
            yield self._activation("layer_inputs", LAYER_INPUTS_PORT, (1, 1, ar, self.layer_inputs))
        for mask, past_rows in masks.items():
            yield self._activation("mask", mask, (1, 1, ar, past_rows + ar), MASK)
        for rotary in (inputs for inputs in self.rotary if inputs in read):
            cos, sin = rotary.names
            yield self._activation("cos", cos, (1, 1, ar, rotary.pairs))
            yield self._activation("sin", sin, (1, 1, ar, rotary.pairs))
        for tensor in self.tensors(part.layers) if self.is_cached else ():
            yield self._cached("past", tensor, self._group_of(tensor).past_rows(graph.ar, graph.context))
        for tensor in self.tensors(self.borrowed(part)):
            yield self._cached("past", tensor, self._past_rows(tensor.layer, graph))
            yield self._cached("borrowed", tensor, ar)
        states = [layer for layer in part.layers if layer in self._with_states]
        if states and graph.role == "verify":
            rows = self._with_states[states[0]].state_rows * ar
            yield Port(CONV_ROWS, "int32", (rows,), "conv_rows")
            for tensor in () if self._has_delta_rule else self.tensors(states):
                yield self._cached("others", tensor, rows)
        if self.lora is not None:
            for layer in part.layers:
                for name, shape, encoding in self.lora.tensors(layer):
                    yield Port(name, "int16", shape, "lora", encoding)
        if part.head and part.layers and graph.role == "prefill":
            yield Port(LOGITS_INDEX, "int32", (1,), "logits_index")

    def _outputs(self, graph: GraphRecord, part: PartRecord) -> Iterator[Port]:
        for tensor in self.tensors(part.layers):
            if tensor.is_written and self.is_cached:
                yield self._cached("new", tensor, graph.ar)
        if self.given_hidden and part.ends(self.cache.layers):
            encoding = TARGET_OUT_RESULT if self.reads_hidden else FINAL_NORM_RESULT
            shape = (1, 1, graph.ar, self.given_hidden)
            yield self._activation("last_hidden", LAST_HIDDEN, shape, encoding)
        yield from (port for is_input, port in boundary_ports(part, self.hidden, self.experts) if not is_input)
        if part.head:
            yield self._activation("logits", LOGITS, (1, graph.logit_rows, self.outputs))
        else:
            yield self._activation("hidden", part.exit, (1, 1, graph.ar, self.hidden))

    def _activation(self, kind: PortKind, name: str, shape: tuple[int, ...], encoding: str | None = None) -> Port:
        return Port(name, _TYPE_NAMES[self.activations], shape, kind, encoding or name)

    def _cached(self, kind: Literal["past", "borrowed", "new", "others"], tensor: KvTensor, rows: int) -> Port:
        group, past = self._group_of(tensor), tensor.past
        name = past if kind == "past" else tensor.others if kind == "others" else tensor.new
        shape = group.shape(tensor.kind, rows)
        port_kind: PortKind = "state" if kind == "past" and tensor.result != "cache" else kind
        return Port(name, _TYPE_NAMES[group.kv_dtype], shape, port_kind, past)

    def _past_rows(self, layer: int, graph: GraphRecord) -> int:
        """Past rows that a layer with attention reads."""
        return self._attending[layer].past_rows(graph.ar, graph.context) if self.is_cached else 0

    def _group_of(self, tensor: KvTensor) -> LayerSpec:
        return self._by_kind[tensor.layer, tensor.kind]

    @property
    def _has_delta_rule(self) -> bool:
        return any(isinstance(group, DeltaSpec) for group in self.cache.groups())

    @cached_property
    def _attending(self) -> dict[int, RowSpec]:
        """The sizes of the layers that have keys and values."""
        return {
            layer: group for layer, groups in self._all_groups.items() for group in groups if isinstance(group, RowSpec)
        }

    @cached_property
    def _with_states(self) -> dict[int, ConvSpec]:
        """The sizes of the layers that have a state of a convolution."""
        return {
            layer: group
            for layer, groups in self._all_groups.items()
            for group in groups
            if isinstance(group, ConvSpec)
        }

    @cached_property
    def _by_kind(self) -> dict[tuple[int, Kind], LayerSpec]:
        """The sizes of a layer's tensors."""
        groups = ((layer, group) for layer, layer_groups in self._all_groups.items() for group in layer_groups)
        return {(layer, kind): group for layer, group in groups for kind in group.kinds}

    @cached_property
    def _all_groups(self) -> dict[int, list[LayerSpec]]:
        """The sizes of everything that is kept of each layer."""
        groups: dict[int, list[LayerSpec]] = {}
        for group in self.cache.groups():
            for layer in group.numbers or range(group.layers):
                groups.setdefault(layer, []).append(group)
        return groups
