"""Encodings of a decoder's results from the values observed in calibration."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

from edgekv.errors import UsageError
from edgekv.graphs.decoder import decoder_layer, drafter_input, logits
from edgekv.graphs.delta_rule import DeltaInputs, DeltaOps
from edgekv.spec import (
    LAYER_INPUTS_PORT,
    LOGITS,
    MASK,
    ROPE_SUFFIXES,
    RULES,
    TARGET_HIDDEN,
    UNOBSERVED,
    DecoderSpec,
    DeltaRule,
    EncodingTypes,
    KvTensor,
    LoraTarget,
    Result,
    ResultKind,
    mask_depth,
    mask_encoding,
    rope_inputs,
    rotary_encoding,
)
from quant import Encoding, Range

_HEAD = re.compile(r".*\.h\d+")


def decoder_results(spec: DecoderSpec) -> Mapping[str, Result]:
    """Every result of a decoder that has an encoding, by name, in the order in which they are computed."""
    ops = ResultRecorder()
    hidden = drafter_input(ops, spec, ops.embed("embedding"))
    for layer in spec.own_layers:
        hidden = decoder_layer(ops, spec, layer, hidden)
    last = logits(ops, spec, hidden)
    ops.share_encodings()
    return ops.results | {LOGITS: replace(ops.results[last], sources=(last,))}


def projection_results(spec: DecoderSpec) -> Mapping[tuple[int, LoraTarget], tuple[str, ...]]:
    """Names of the results of each projection, of all heads or of each one, by layer."""
    ops = ResultRecorder()
    hidden = ops.embed("embedding")
    for layer in range(spec.layers):
        hidden = decoder_layer(ops, spec, layer, hidden)
    return {at: tuple(names) for at, names in ops.projections.items()}


def choose_encodings(
    results: Mapping[str, Result], ranges: Mapping[str, Range], attention_factors: Sequence[float], types: EncodingTypes
) -> dict[str, Encoding]:
    """An encoding for every result of a decoder and every input of its graphs.

    Args:
        results: see `decoder_results`.
        ranges: observed values of each result.
        attention_factors: attention factors of the rotary embeddings.
        types: integer types of activations and cache.
    """
    masked = (result.sources for result in results.values() if result.kind == "masked")
    depth = mask_depth(ranges[source] for sources in masked for source in sources)
    encodings = result_encodings(results, ranges, types, depth)
    encodings[MASK] = mask_encoding(depth, types)
    for suffix, factor in zip(ROPE_SUFFIXES, attention_factors, strict=False):
        encodings |= dict.fromkeys(rope_inputs(suffix), rotary_encoding(factor, types))
    return encodings


def result_encodings(
    results: Mapping[str, Result], ranges: Mapping[str, Range], types: EncodingTypes, depth: float = 0.0
) -> dict[str, Encoding]:
    """An encoding for each result, from the observed values, the types and the depth of the mask.

    Raises:
        UsageError: the calibration text gave no value of a result.
    """

    def seen(result: Result) -> Range:
        if result.kind in UNOBSERVED:
            return Range(0.0, 1.0)
        together = Range()
        for source in result.sources:
            observed = ranges.get(source)
            if observed is None or not observed.is_seen:
                raise UsageError(
                    "calibration",
                    got=f"no value of {source}",
                    expected="values of every result, which its encoding follows from",
                    fix="Give a longer calibration text, or more --calibration-tokens.",
                )
            together.cover(observed)
        return together

    encodings = dict[str, Encoding]()
    for name, result in results.items():
        if result.scaled is None:
            encodings[name] = RULES[result.kind](seen(result), types, depth)
        else:
            source, factor = result.scaled
            encodings[name] = encodings[source].times(factor)
    return encodings


class ResultRecorder(DeltaOps[str]):
    """Runs a decoder on names instead of values: each operation records its result and returns the name.

    Attributes:
        results: by name, in order.
        projections: names of the results of each projection, by layer.
    """

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.projections: dict[tuple[int, LoraTarget], list[str]] = {}
        self._folded: list[Sequence[str]] = []

    def share_encodings(self) -> None:
        """Give results of heads that may be folded the ranges of all of them."""
        heads = {name: names for names in self._folded for name in names}
        for name, result in self.results.items():
            if (match := _HEAD.match(name)) is not None and match[0] in heads:
                sources = (first + name[match.end() :] for first in heads[match[0]])
                self.results[name] = replace(result, sources=tuple(sources))

    def embed(self, name: str) -> str:
        """The rows of the embedding table."""
        return self._record("embedding", name)

    def linear(
        self, x: str, weight: str, name: str, *, bias: str | None = None, head: int | None = None, gain: float = 1.0
    ) -> str:
        if bias is not None:
            self._record("linear", name + ".unbiased")
        return self._record("linear", name)

    def adapt(self, y: str, x: str, layer: int, target: LoraTarget, name: str, *, head: int | None = None) -> str:
        self.projections.setdefault((layer, target), []).append(name)
        return y

    def normalize(self, x: str, width: int, name: str) -> str:
        return self._record("norm", name)

    def rms_norm(self, x: str, weight: str, name: str, *, gain: float = 1.0) -> str:
        return self._record("norm", name)

    def add(self, a: str, b: str, name: str) -> str:
        return self._record("sum", name)

    def subtract(self, a: str, b: str, name: str) -> str:
        return self._record("sum", name)

    def multiply(self, a: str, b: str, name: str) -> str:
        return self._record("product", name)

    def scale(self, x: str, factor: float, name: str) -> str:
        self._record("product", name)
        self.results[name] = replace(self.results[name], scaled=(x, factor))
        return name

    def scale_by(self, x: str, weight: str, name: str) -> str:
        return self._record("sum", name)

    def shift_by(self, x: str, weight: str, name: str) -> str:
        return self._record("sum", name)

    def chosen(self, x: str, count: int, name: str) -> str:
        return self._record("sigmoid", name)

    def shares(self, x: str, name: str) -> str:
        self._record("sum", name + ".sum")
        return self._record("sigmoid", name)

    def layer_input(self, layer: int) -> str:
        return self._record("gathered", LAYER_INPUTS_PORT)

    def target_hidden(self) -> str:
        return self._record("gathered", TARGET_HIDDEN)

    def give_hidden(self, x: str) -> None:
        """Nothing: it has its name."""

    def cached(self, tensor: KvTensor) -> str:
        return tensor.past

    def sigmoid(self, x: str, name: str) -> str:
        return self._record("sigmoid", name)

    def tanh(self, x: str, name: str) -> str:
        return self._record("tanh", name)

    def sqrt(self, x: str, name: str) -> str:
        return self._record("product", name)

    def sign(self, x: str, name: str) -> str:
        return self._record("tanh", name)

    def gelu(self, x: str, name: str) -> str:
        return self._record("gelu", name)

    def exact_gelu(self, x: str, name: str) -> str:
        return self._record("gelu", name)

    def split(self, x: str, widths: Sequence[int]) -> list[str]:
        return [x] * len(widths)

    def slice(self, x: str, first: int, width: int) -> str:
        return x

    def join(self, parts: list[str], name: str) -> str:
        first = self.results[parts[0]]
        return self._record(first.kind, name, first.sources)

    def rotation(self, layer: int, heads: int) -> tuple[str, str]:
        return "cos", "sin"

    def swap_halves(self, x: str, half: int) -> str:
        return x

    def append_to_cache(self, new: str, tensor: KvTensor) -> str:
        if tensor.kind == "delta_value":  # cached as they are
            self.results[new] = Result("tail", (tensor.past,))
        return self._record(tensor.result, tensor.past)

    def tap(self, rows: str, weight: str, tap: int, name: str) -> str:
        return self._record("product", name)

    def recall(self, rule: DeltaRule, layer: int, new: DeltaInputs[str]) -> list[str]:
        known = {*self.results}
        outputs = super().recall(rule, layer, new)
        for name in {*self.results} - known:
            self.results[name] = replace(self.results[name], by_chunk=True)
        self._cover_undecayed(rule, layer)
        if not rule.corrects:
            self._keep_integers(layer, new)
        return outputs

    def _cover_undecayed(self, rule: DeltaRule, layer: int) -> None:
        """Give what is left of a checkpoint's results, `e^G S^T q`, the range of `S^T q`, which is never smaller.

        Where a head decays fast, few tokens behind a checkpoint have anything left, and calibration sees few of those.
        """
        for kind in ("held", "known") if rule.corrects else ("held",):
            for head in range(rule.value_heads):
                whole, left = (f"layers.{layer}.delta.{name}.h{head}" for name in (kind, kind + "_left"))
                self.results[left] = replace(self.results[left], sources=(whole,))

    def _keep_integers(self, layer: int, new: DeltaInputs[str]) -> None:
        """Have what Mamba-2 caches computed in its encoding there; that of decays is that of steps times their rate.

        Each decay has the integer of its step, with another sign, so that no graph rounds it in its own way.
        """
        self.results[new.keys[0]] = Result("tail", (KvTensor(layer, "delta_key", 0).past,))
        for head, (step, decay) in enumerate(zip(new.strengths, new.decays, strict=True)):
            self.results[step] = Result("tail", (step,))
            self.results[decay] = Result("tail", (KvTensor(layer, "decay", head).past,))

    def observe_known(self, target: str, correction: str, name: str) -> None:
        """Nothing: it has its name."""

    @property
    def new_rows(self) -> int:
        return 4  # as few as have every kind of result

    @property
    def by_row(self) -> bool:
        return False

    def unit(self, x: str, width: int, name: str, *, gain: float = 1.0) -> str:
        return self._record("norm", name)

    def relu(self, x: str, name: str) -> str:
        return self._record("relu", name)

    def exp(self, x: str, name: str) -> str:
        return self._record("share", name)

    def complement(self, x: str, of: float, name: str) -> str:
        return self._record("sum", name)

    def times(self, x: str, weight: str, at: int, name: str) -> str:
        return self._record("product", name)

    def shift(self, x: str, weight: str, name: str) -> str:
        return self._record("sum", name)

    def stored(self, tensor: KvTensor) -> str:
        return self._record("tail", tensor.past)

    def extended(self, rows: str, new: str, tensor: KvTensor) -> str:
        return rows

    def row(self, x: str, row: int) -> str:
        return x

    def together(self, rows: list[str], name: str) -> str:
        return name

    def columns(self, x: str, stop: int) -> str:
        return x

    def new_columns(self, x: str) -> str:
        return x

    def decay_sums(self, rows: str, name: str) -> str:
        return self._record("decay_sum", name)

    def across(self, rows: str) -> str:
        return rows

    def decays(self, sums: str, name: str) -> tuple[str, str]:
        return self._record("sigmoid", name), name

    def between_blocks(self, system: str, size: int) -> str:
        return system

    def from_identity(self, x: str, name: str) -> str:
        return self._record("sum", name)

    def scores(self, query: str, keys: str, name: str) -> str:
        return self._record("scores", name)

    def masked(self, scores: str, layer: int, name: str) -> str:
        return self._record("masked", name, (scores,))

    def fold_heads(self, heads: list[str], names: Sequence[str] = ()) -> list[str]:
        self._folded.append(names)
        return heads

    def softmax(self, x: str, name: str) -> str:
        return self._record("softmax", name)

    def attend(self, weights: str, values: str, name: str) -> str:
        return self._record("attended", name)

    def _record(self, kind: ResultKind, name: str, sources: tuple[str, ...] = ()) -> str:
        first = self.results.setdefault(name, Result(kind, sources or (name,)))
        if RULES[first.kind] is not RULES[kind]:
            raise ValueError(f"{name}: got a result of kind {kind}; expected the rule of {first.kind}")
        return name
