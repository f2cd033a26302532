"""Runs the decoder on calibration text and quantizes each matrix on the inputs of the quantized model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError
from edgekv.graphs.decoder import (
    add_feed_forward,
    add_layer_input,
    add_mixer,
    drafter_input,
    embedding_inputs,
    feed_forward,
    feed_forward_inputs,
    gated_layer_input,
    head_inputs,
    head_logits,
    last_norm,
    mixer,
    mixer_inputs,
    routed,
    target_inputs,
)
from edgekv.kv import KvTensor
from edgekv.plan import window_bytes
from edgekv.spec import TARGET_OUT_RESULT, DecoderInterface
from edgekv.spec.decoder import DecoderSpec, Mixer
from edgekv.spec.lora import LoraGroup, lora_reach
from edgekv.spec.tensors import (
    CONVOLUTION_INPUTS,
    EMBEDDING,
    EMBEDDING_IN,
    HEAD,
    HEAD_BIAS,
    HEAD_TURN,
    TARGET_FRAME,
    TARGET_IN,
    TARGET_OUT,
    by_inputs,
    by_outputs,
    delta_inputs,
    expert_of,
    expert_projection,
    layer_of,
)
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.attention import WINDOWS, attention_costs, projection_name
from exporters.quantize.encodings import decoder_results
from exporters.quantize.recipe import Recipe
from exporters.quantize.reference import NO_CHANGES, WINDOWS_AT_ONCE, Changes, Floats, NumpyOps, Weights
from exporters.quantize.table import Table, rounded_rows
from exporters.quantize.windows import ChosenRows, Difference, OwnColumns, Room, TokenRows, Windows
from quant import (
    FITTED,
    LARGEST,
    Grid,
    LayerInputs,
    Method,
    QuantizedWeight,
    Range,
    WeightDtype,
    quantize,
    quantize_per_channel,
)
from quant.products import in_threads

_MAX_AT_START = 16.0
_LONGEST_AT_START = 4.0
FEED_FORWARD_END = 4
"""The group of matrices behind the feed-forward."""

_OWN_CACHE = ("self_attn.k_proj", "self_attn.v_proj")
BEHIND_MIXER: Mapping[Mixer, str] = {
    "attention": "self_attn.o_proj",
    "convolution": "conv.out_proj",
    "delta_rule": "linear_attn.out_proj",
}
"""The projections back to the residual."""
ADDED_GROUPS = (1, 3)
"""Those whose outputs are added to the residual."""

_MADE_UP = 0.5  # of the error of the residual: what predicts it on one text does not all do so on others


class QuantizedMatrices(Protocol):
    """Quantized matrices by name, so that none needs to stay in memory."""

    def __getitem__(self, key: str) -> QuantizedWeight: ...


def groups(spec: DecoderSpec) -> int:
    """How many times the matrices of a layer read something else."""
    return 6 if spec.layer_inputs else FEED_FORWARD_END


def names(spec: DecoderSpec, layer: int, group: int) -> list[str]:
    """Names of the matrices of a layer that have the same inputs; groups are in the order of computation.

    Of experts, those of one group read the inputs of the router, or parts of the joined inner products; behind two
    mixers, parts of what both give. Groups of what a layer has not are empty.
    """
    read_by_mixers, behind_mixers = list[str](), list[str]()
    for kind in spec.mixers(layer):
        reads, writes = _mixer_matrices(spec, layer, kind)
        read_by_mixers += reads
        behind_mixers.append(writes)
    mixer_group: tuple[Sequence[str], ...] = read_by_mixers, behind_mixers
    feed_forward_groups: tuple[Sequence[str], ...]
    feed_forward_groups = ((*(("mlp.gate_proj",) if spec.gated else ()), "mlp.up_proj"), ("mlp.down_proj",))
    if not spec.has_feed_forward(layer):
        feed_forward_groups = (), ()
    if spec.experts is not None and spec.has_experts(layer):
        read, *written = (
            [
                expert_projection(expert, projection)
                for expert in range(spec.experts.count)
                for projection in projections
            ]
            for projections in (("gate_proj", "up_proj"), ("down_proj",))
        )
        feed_forward_groups = (("mlp.router", *read), *written)
    projections = (*mixer_group, *feed_forward_groups, ("per_layer_input_gate",), ("per_layer_projection",))[group]
    return [f"model.layers.{layer}.{projection}.weight" for projection in projections]


def _mixer_matrices(spec: DecoderSpec, layer: int, kind: Mixer) -> tuple[Sequence[str], str]:
    """The matrices that read the input of a mixer, and the one behind it."""
    if kind == "convolution":
        return CONVOLUTION_INPUTS, BEHIND_MIXER[kind]
    if kind == "delta_rule" and spec.delta_rule is not None:
        return delta_inputs(spec.delta_rule), BEHIND_MIXER[kind]
    own = _OWN_CACHE if spec.owns_cache(layer) else ()
    gates = ("self_attn.g_proj",) if spec.head_gates or spec.output_gates else ()
    return ("self_attn.q_proj", *own, *gates), BEHIND_MIXER[kind]


def lora_groups(spec: DecoderSpec, layer: int) -> tuple[LoraGroup, ...]:
    """The projections of an adapter that read the inputs of each group of matrices; none read those of later groups."""
    if spec.mixers(layer) == ("convolution",):
        return "conv_in", "conv_out", "gate_up", "down"
    return "qkv", "o", "gate_up", "down"


def needs_quantized_pass(recipe: Recipe) -> bool:
    """Whether calibration runs the quantized decoder too.

    With 8 bits, and where nothing is fitted to its inputs, the exact one stands for both.
    """
    return any(rule.dtype != "int8" and rule.method != "nearest" for rule in recipe.weights)


class PairedOps(NumpyOps):
    """Runs the exact decoder and the quantized one side by side on a window, `[2, T, width]`.

    With `[1, T, width]` only the one of `quantized`, on which ranges are observed. The first tokens, the sink, stay
    exact in both, and only the ranges of the cache include them: no graph computes them. The token behind the sink is
    observed apart, see `_first_measured`.

    Attributes:
        exact: the weights before quantization.
        quantized: matrices quantized so far, dequantized to `[out, in]`.
        ranges: observed values of each result.
        starts: those of the token behind the sink.
        first: the first position that is not observed apart; see `_first_measured`.
        decoders: 2, or 1.
    """

    def __init__(
        self,
        tensors: Tensors,
        tokens: int,
        context: int,
        sink: int = 0,
        decoders: int = 2,
        changes: Changes = NO_CHANGES,
    ) -> None:
        self.decoders = decoders
        self.exact = Weights(tensors)
        self.quantized: dict[str, Floats] = {}
        self.ranges: dict[str, Range] = {}
        self.starts: dict[str, Range] = {}
        self._sink = sink
        self.first = _first_measured(sink, tokens)
        self._results = decoder_results(tensors.spec)
        self._sampled: list[tuple[str, Floats]] | None = None
        super().__init__(tensors.spec, self.exact, tokens, context, self._observe_range, changes)

    def apart(self, window: int, tokens: NDArray[Any]) -> PairedOps:
        """`of_window`, where what the copy observes is its own, until `take` has it."""
        ops = self.of_window(window, tokens, None)
        ops.ranges, ops.starts, ops._sampled = {}, {}, []
        ops._observe = ops._observe_range
        return ops

    def take(self, ops: PairedOps) -> None:
        """Observe what a copy has seen, and let go of it. Samples depend on the order of windows."""
        for name, values in ops._sampled or ():
            self._observe_range(name, values)
        for own, seen in ((self.ranges, ops.ranges), (self.starts, ops.starts)):
            for name, observed in seen.items():
                own.setdefault(name, Range()).cover(observed)
        ops._sampled, ops._observe = None, self._observe  # its own method would keep it until cycles are looked for

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        quantized = by_inputs(self.quantized[weight][rows])
        product = np.empty((*x.shape[:-1], quantized.shape[1]), np.float32)
        np.matmul(x[-1], quantized, out=product[-1])
        if len(x) == 2:
            np.matmul(x[0], by_inputs(self.exact[weight][rows]), out=product[0])
            product[1, : self._sink] = product[0, : self._sink]
        if gain != 1:
            product *= np.float32(gain)
        return product

    def gathered(self, columns: slice) -> Floats:
        """Exact, and as the host looks them up; the sink stays exact."""
        exact = super().gathered(slice(None))
        if self._spec.picture_layers:  # the host has them in 16 bits
            return np.stack([exact[:, columns]] * self.decoders)
        rounded = rounded_rows(exact)
        exactly = self._window[1] >= self._spec.vocab  # rows of pictures, in 16 bits
        exactly[: self._sink] = True
        rounded[exactly] = exact[exactly]
        return np.stack([exact[:, columns], rounded[:, columns]][: self.decoders])

    def shared_rows(self, layer: int) -> dict[str, list[Floats]]:
        """The keys and values of a layer that later ones read, `[2 or 1, T, D]` of each window, by their names."""
        tensors = sorted(
            {tensor for _, tensor in self._shared if tensor.layer == layer}, key=lambda tensor: tensor.past
        )
        windows = range(len({window for window, _ in self._shared}))  # they ended in any order
        return {tensor.past: [self._shared[window, tensor] for window in windows] for tensor in tensors}

    def share(self, tensor: KvTensor, windows: Iterable[Floats]) -> None:
        """Take what `shared_rows` gave of a tensor."""
        self._shared |= {(window, tensor): rows for window, rows in enumerate(windows)}

    def take_ranges(self) -> dict[str, Range]:
        """The ranges observed since the last call."""
        taken, self.ranges = self.ranges, {}
        starts, self.starts = self.starts, {}
        for name, start in starts.items():
            taken[name].widen(start, _MAX_AT_START)
        return taken

    def observe_lengths(self, name: str, windows: Iterable[Floats]) -> None:
        """Observe the lengths of vectors, `[2 or 1, T, in]`: columns of length 1 that multiply them give no more."""
        lengths = np.stack([np.linalg.norm(window[-1], axis=-1) for window in windows])
        longest = float(lengths[..., self.first :].max())
        if self.first:
            longest = max(longest, min(float(lengths[..., self.first - 1].max()), _LONGEST_AT_START * longest))
        self.ranges[name] = Range(0.0, max(longest, self.ranges[name].high if name in self.ranges else 0.0))

    def drop(self) -> None:
        """Free the weights that were used."""
        self.exact.drop()
        self.quantized.clear()

    def _observe_range(self, name: str, values: Floats) -> None:
        """Widen the range of a result.

        Raises:
            CheckpointError: the values overflow.
        """
        is_cache = self._results[name].kind in ("cache", "state")
        if is_cache and self._sampled is not None:
            self._sampled.append((name, values[-1:].copy()))
            return
        seen = self.ranges.setdefault(name, Range())
        has_all = is_cache or self._results[name].by_chunk
        try:
            seen.observe(values[-1] if has_all else values[-1, self.first :], keep_sample=is_cache)
            if self._sink < self.first and not has_all:
                self.starts.setdefault(name, Range()).observe(values[-1, self._sink : self.first])
        except ValueError:
            raise CheckpointError(
                f"weights: the result {name}",
                got=f"values from {values[-1].min():.3g} to {values[-1].max():.3g} on the calibration text",
                expected=f"at most {LARGEST:.0e} in magnitude",
                fix="The weights before it are too large: the training or a conversion failed. Use another checkpoint.",
            ) from None


class Quantizer:
    """Runs the decoder once, with the weights of one layer in memory and the values of all windows in files.

    A layer runs in pieces that end before each group of matrices. Their inputs are collected from all windows, the
    matrices are quantized, and the windows continue, as many at a time as there is room for. So the text may be long:
    memory holds the values of one window at least.

    With matrices of 8 bits the two decoders hardly differ, so the exact one stands for both and half of the work is
    saved.

    Attributes:
        hidden: `[windows, 2, T, hidden]`, the residual of the exact decoder and of the quantized one, or
            `[windows, 1, T, hidden]`.
        recipe: type and method of each matrix that comes next.
        unreached: experts that no token of the text has chosen, as `LAYER.EXPERT`: their matrices are quantized by
            their weights alone.
    """

    def __init__(
        self,
        tensors: Tensors,
        tokens: NDArray[Any],
        context: int,
        recipe: Recipe,
        sink: int = 0,
        *,
        follows: bool | None = None,
        folder: Path | None = None,
        room: Room | None = None,
    ) -> None:
        """Start with the embeddings.

        Args:
            tensors: the exact weights.
            tokens: ids of the calibration text `[windows, T]`.
            context: the longest sequence that the rotary embedding is made for.
            recipe: type and method of each matrix.
            sink: number of first tokens of each window that no graph computes; they stay exact.
            follows: run the quantized decoder too; None for what `needs_quantized_pass` says of the recipe.
            folder: on the disk for the values of windows; None for that of temporary files.
            room: in memory for them; None for none.

        Raises:
            OSError: the disk is full.
        """
        self._tensors = tensors
        self._spec = tensors.spec
        self.recipe = recipe
        self._follows = needs_quantized_pass(recipe) if follows is None else follows
        self._ops = PairedOps(tensors, tokens.shape[1], context, sink, 2 if self._follows else 1)
        self._tokens = tokens
        if tensors.spec.layer_inputs:
            self._ops.exact.layer_inputs.add(tokens)
        self._context = context
        self._known_costs: dict[str, Floats] = {}
        self._routes: tuple[int, list[NDArray[np.intp]]] = -1, []
        self.unreached: list[str] = []
        self._folder = folder
        self._room = room
        self._at_once = 1
        if room is not None:
            values_bytes = window_bytes(tensors.spec.sizes, tokens.shape[1])
            self._at_once += room.take(values_bytes, WINDOWS_AT_ONCE - 1, self)
        self._ops.ranges["embedding"] = Range()
        self.hidden = self._stored(self._embedded(row, sink) for row in tokens)

    def enter(self, hidden: Floats, rows: Mapping[KvTensor, Floats]) -> Iterator[tuple[str, QuantizedWeight]]:
        """Add what a drafter reads of its target to the embeddings; yields the matrices that project both, by name.

        Args:
            hidden: the target's last hidden states, `[windows, T, H]`.
            rows: its keys and values, `[windows, T, D]`.
        """
        ops, spec, decoders = self._ops, self._spec, self.hidden.shape[1]
        paired = self._stored(np.stack([window] * decoders) for window in hidden)
        inputs = {TARGET_IN: paired}
        if spec.target is not None and spec.target.is_cached_apart:
            yield self._entered(TARGET_FRAME, paired)
            states = self._stored(target_inputs(ops, spec, window) for window in paired)
            embedded = self._stored(embedding_inputs(ops, spec, window) for window in self.hidden)
            inputs = {EMBEDDING_IN: embedded, TARGET_IN: states}
        for name, x in inputs.items():
            yield self._entered(name, x)

        def entered(window: int) -> Floats:
            ops.begin(window, self._tokens[window])
            seen = {tensor: np.stack([windows[window]] * decoders) for tensor, windows in rows.items()}
            ops.read_target(paired[window], seen)
            return drafter_input(ops, spec, self.hidden[window])

        self.hidden = self._stored(map(entered, range(len(self._tokens))))
        ops.drop()

    def read_target(self, rows: Mapping[KvTensor, Floats]) -> None:
        """Take the keys and values of a drafter's target, `[windows, T, D]`, for a quantizer that was not entered."""
        for tensor, windows in rows.items():
            self._ops.share(tensor, (np.stack([window] * self.hidden.shape[1]) for window in windows))

    def _entered(self, name: str, x: Windows) -> tuple[str, QuantizedWeight]:
        """A matrix that reads x, quantized and in use."""
        weight = self.quantized(name, self.inputs(x), x)
        self.use(name, weight)
        return name, weight

    def layer(self, layer: int) -> Iterator[tuple[str, QuantizedWeight]]:
        """Run the residual through the next layer; yields its matrices by name."""
        x = self.run_to(layer, 0)
        for group in range(groups(self._spec)):
            if group_names := names(self._spec, layer, group):
                inputs = self.inputs(x, group)
                for name in group_names:
                    weight = self.quantized(name, self._inputs_of(name, inputs, x), x)
                    self.use(name, weight)
                    yield name, weight
                del inputs, weight  # their memory is for the next results
            x = self.run_to(layer, group + 1, x)

    def run_to(self, layer: int, group: int, x: Windows | None = None) -> Windows:
        """Run from the inputs of one group of matrices to those of the next.

        Args:
            layer: number of the layer.
            group: the group of matrices to run to, see `names`; after the last, to the end of the layer. The matrices
                of the group before it are in use; `hidden` is the residual before attention, before feed-forward for
                groups 3 and 4, and behind it for 5 and 6. Groups 2, 4 and 6 replace it.
            x: inputs of the group before it; none for group 0.

        Returns:
            `[windows, 2 or 1, T, in]`, the inputs of the group; at the end of the layer, the residual.

        Raises:
            OSError: the disk is full.
        """
        if x is None:
            inputs = self._run(layer, mixer_inputs, self.hidden)
        elif group == 1:
            inputs = self._run(layer, mixer, x)
        elif group == 2:
            before = self.hidden
            self.hidden = self._run(layer, add_mixer, before, x)
            read = before if self._spec.parallel else self.hidden
            inputs = self._run(layer, feed_forward_inputs, read)
        elif group == 3:
            inputs = self._run(layer, feed_forward, x)
        elif group == FEED_FORWARD_END:
            self.hidden = self._run(layer, add_feed_forward, self.hidden, x)
            return self.hidden
        elif group == 5:
            return self._run(layer, gated_layer_input, x)
        else:
            self.hidden = self._run(layer, add_layer_input, self.hidden, x)
            return self.hidden
        self._ops.observe_lengths(lora_reach(layer, lora_groups(self._spec, layer)[group]), inputs)
        return inputs

    def shared_rows(self, layer: int) -> dict[str, Floats]:
        """The keys and values of a layer that later ones read, `[2 or 1, windows, T, D]`, by their names."""
        return {name: np.stack(rows, axis=1) for name, rows in self._ops.shared_rows(layer).items()}

    def share(self, rows: Mapping[str, Floats]) -> None:
        """Take what `shared_rows` gave, for a quantizer that has not run the layer."""
        tensors = DecoderInterface.of(self._spec, self._spec.max_positions, "u8", "rows", "u16").tensors(
            self._spec.shared_layers
        )
        for tensor in (tensor for tensor in tensors if tensor.past in rows):
            self._ops.share(tensor, np.moveaxis(rows[tensor.past], 1, 0))

    def _inputs_of(self, name: str, inputs: LayerInputs, x: Windows) -> LayerInputs | None:
        """The inputs of a matrix among those of its group: of an expert's, those of the tokens that have chosen it.

        Of one behind two mixers, the columns of its own.

        Returns:
            None for an expert that no token has chosen.
        """
        expert, experts = expert_of(name), self._spec.experts
        if expert is None or experts is None:
            return self._own_columns(name, inputs, x)
        layer = int(name.split(".")[2])
        if self._routes[0] != layer:
            self._routes = layer, self._tokens_of_experts(layer, experts.count, x)
        tokens = self._routes[1][expert]
        if not len(tokens):
            if (unreached := f"{layer}.{expert}") not in self.unreached:
                self.unreached.append(unreached)
            return None
        width = x.shape[3]
        columns = slice(0, width)
        if name.endswith(".down_proj.weight"):
            width = experts.intermediate
            columns = slice(expert * width, (expert + 1) * width)
        exact, *quantized = (ChosenRows(rows, tokens, columns, width) for rows in self._measured(x))
        return LayerInputs(exact, quantized[0] if quantized else exact)

    def _own_columns(self, name: str, inputs: LayerInputs, x: Windows) -> LayerInputs:
        """The inputs of a matrix; behind two mixers they are columns of what both give, and compensate nothing else."""
        layer = layer_of(name)
        kinds = () if layer is None else self._spec.mixers(layer)
        behind = [kind for kind in kinds if name.endswith(f".{BEHIND_MIXER[kind]}.weight")]
        if layer is None or len(kinds) < 2 or not behind:
            return inputs
        widths = [self._spec.mixer_width(layer, kind) for kind in kinds]
        at = kinds.index(behind[0])
        first, width = sum(widths[:at]), widths[at]
        exact, *quantized = self._measured(x)
        columns = [OwnColumns(rows, first, width) for rows in (exact, *quantized)]
        return LayerInputs(columns[0], columns[-1])

    def _tokens_of_experts(self, layer: int, experts: int, x: Windows) -> list[NDArray[np.intp]]:
        """The tokens, of those that count, that choose each expert of the exact decoder; the router is in use."""
        chosen = [routed(self._ops, self._spec, layer, window)[1][0][self._ops.first :] for window in x]
        together = np.concatenate(chosen)
        return [np.flatnonzero(together[:, expert]) for expert in range(experts)]

    def quantized(self, name: str, inputs: LayerInputs | None, x: Windows) -> QuantizedWeight:
        """A matrix, quantized on its inputs.

        Args:
            name: of the matrix.
            inputs: see `inputs`; None to round it by its weights alone.
            x: the same as `[windows, 2 or 1, T, in]`.
        """
        rule = self.recipe.rule(name)
        if rule.method == "stored":
            return self._tensors.integers(name)
        if inputs is None:
            return quantize(by_inputs(self._ops.exact[name]), rule.dtype, "nearest", None)
        outputs = self._costs(name, x) if rule.method == "attention" else None
        return quantize(by_inputs(self._ops.exact[name]), rule.dtype, rule.method, inputs, outputs=outputs)

    def _costs(self, name: str, x: Windows) -> Floats:
        """See `attention_costs`: of some windows of the exact decoder."""
        if name not in self._known_costs:
            layer = int(name.split(".")[2])
            some = (x[window][0] for window in range(0, len(x), -(-len(x) // WINDOWS)))
            costs = attention_costs(self._spec, self._ops.exact, layer, some, self._context, self._ops.first)
            self._known_costs = {projection_name(layer, projection): cost for projection, cost in costs.items()}
        return self._known_costs[name]

    def use(self, name: str, weight: QuantizedWeight | None) -> None:
        """Run with a quantized matrix from now on; None if the exact one stands for it."""
        exact = self._ops.exact[name]
        self._ops.quantized[name] = by_outputs(weight.dequantize()) if self._follows and weight is not None else exact

    def candidates(
        self, layer: int, types: Mapping[str, Sequence[WeightDtype]]
    ) -> dict[str, dict[WeightDtype, QuantizedWeight]]:
        """The matrices of the next layer by name and type; the residual runs through the exact ones."""
        candidates, x = {}, self.run_to(layer, 0)
        for group in range(groups(self._spec)):
            if group_names := names(self._spec, layer, group):
                inputs = self.inputs(x, group)
                for name in group_names:
                    weight, method = by_inputs(self._ops.exact[name]), self._quick_method(name)
                    own = self._inputs_of(name, inputs, x)
                    method = "nearest" if own is None else method
                    candidates[name] = {dtype: quantize(weight, dtype, method, own) for dtype in types[name]}
                    self.use(name, None)
                del inputs
            x = self.run_to(layer, group + 1, x)
        self.take_ranges()
        return candidates

    def head_candidates(self, types: Sequence[WeightDtype]) -> dict[str, dict[WeightDtype, QuantizedWeight]]:
        """The head by type, behind the layers; nothing without types."""
        if not types:
            return {}
        ops, spec, method = self._ops, self._spec, self._quick_method(HEAD)
        inputs = self.inputs(self._stored(head_inputs(ops, spec, window) for window in self.hidden))
        parts: dict[WeightDtype, list[QuantizedWeight]] = {dtype: [] for dtype in types}
        for rows in blocks_of_rows(spec.result_width):
            weight = by_inputs(self._tensors.tensor(HEAD, rows))
            for dtype, blocks in parts.items():
                blocks.append(quantize(weight, dtype, method, inputs))
        ops.drop()
        self.take_ranges()
        return {HEAD: {dtype: _joined(blocks) for dtype, blocks in parts.items()}}

    def _quick_method(self, name: str) -> Method:
        """That by which types of a matrix are compared."""
        method = self.recipe.rule(name).method
        assert method != "stored", "stored integers have one type"
        # With GPTQ types compare as with what improves on it, in a fraction of the time.
        return "gptq" if method in FITTED else method

    def head(self) -> Iterator[tuple[str, QuantizedWeight]]:
        """The matrices behind the layers by name. A head whose rows are the embeddings too has the grid of the `Table`.

        The head is quantized and observed some rows of the vocabulary at a time.
        """
        ops, spec, key = self._ops, self._spec, HEAD
        rule = self.recipe.rule(key)
        if spec.vocabulary == "turned":
            turn = self._turn()
            ops.quantized[HEAD_TURN] = by_outputs(turn.dequantize())
            yield HEAD_TURN, turn
        if spec.target is not None:
            x = self._stored(last_norm(ops, spec, window) for window in self.hidden)
            back = self.quantized(TARGET_OUT, self.inputs(x), x)
            self.use(TARGET_OUT, back)
            for normed in x:
                ops.linear(normed[-1:], TARGET_OUT, TARGET_OUT_RESULT)
            yield TARGET_OUT, back
        inputs, table = None, self._table if spec.shares_vocabulary else None
        if rule.method not in ("nearest", "stored"):
            # Rows that are embeddings too make up for nothing: what turns their inputs does.
            decoders = slice(None) if table is None else slice(-1, None)
            inputs = self.inputs(self._stored(head_inputs(ops, spec, window[decoders]) for window in self.hidden))
        integers = np.empty((spec.hidden, spec.result_width), np.int8)
        ends = self._stored(head_inputs(ops, spec, window[-1:]) for window in self.hidden)
        grids = []
        for rows in blocks_of_rows(spec.result_width):
            if rule.method == "stored":
                part = self._tensors.integers(key, rows)
            else:
                grid = None if table is None else table.grid(rows)
                part = quantize(by_inputs(self._tensors.tensor(key, rows)), rule.dtype, rule.method, inputs, grid)
            integers[:, rows] = part.integers
            grids.append(part.grid)
            ops.quantized[key] = by_outputs(part.dequantize())
            if "lm_head" in spec.biased:
                ops.exact.put(HEAD_BIAS, self._tensors.tensor(HEAD_BIAS, rows))
            for end in ends:
                head_logits(ops, spec, end)
        ops.drop()
        yield key, QuantizedWeight(integers, Grid.joined(grids))

    def take_ranges(self) -> dict[str, Range]:
        """The ranges observed since the last call."""
        return self._ops.take_ranges()

    def inputs(self, x: Windows, group: int | None = None) -> LayerInputs:
        """`[windows, 2 or 1, T, in]` as the inputs of a group of matrices, or of those behind the layers (None).

        The outputs of some are added to the residual: they partly compensate its error.
        """
        exact, *quantized = self._measured(x)
        if not quantized:
            return LayerInputs(exact, exact)
        missing = None
        if group in ADDED_GROUPS and not self._spec.post_norms:
            whole, rounded = self._measured(self.hidden)
            missing = Difference(whole, rounded, np.float32(_MADE_UP / self._spec.residual_gain))
        return LayerInputs(exact, quantized[0], missing)

    def _measured(self, x: Windows) -> list[TokenRows]:
        """The rows of each decoder at the positions that count."""
        return [x.decoder(number, self._ops.first) for number in range(x.shape[1])]

    def _turn(self) -> QuantizedWeight:
        """The matrix in front of the head, quantized: with the identity it stands for the one that x is turned by."""
        turn = by_inputs(self._tensors.tensor(HEAD_TURN))
        rule = self.recipe.rule(HEAD_TURN)
        if rule.method == "nearest":
            return quantize_per_channel(turn)
        assert rule.method != "stored", "no checkpoint has it"
        x = self._stored(last_norm(self._ops, self._spec, window) for window in self.hidden)
        identity = np.eye(len(turn), dtype=np.float32)
        whole, inputs = self.inputs(x).making_up(turn + identity)
        return quantize(whole - identity, rule.dtype, rule.method, inputs)

    @cached_property
    def _table(self) -> Table:
        return Table.of(self._tensors)

    def _embedded(self, tokens: NDArray[Any], sink: int) -> Floats:
        """The embeddings of a window, `[2 or 1, T, hidden]`: exact, and as graphs look them up behind the sink."""
        exact = self._tensors.tensor(EMBEDDING, tokens)
        self._ops.ranges["embedding"].observe(exact[sink:])
        if not self._follows:
            return exact[None]
        return np.stack([exact, np.concatenate([exact[:sink], self._table.embeddings(tokens[sink:])])])

    def _stored(self, windows: Iterable[Floats]) -> Windows:
        """Values `[2 or 1, T, width]` of each window, in order."""
        return Windows.of(windows, len(self._tokens), self._folder, self._room)

    def _of_windows(self, step: Callable[[PairedOps, int], Floats]) -> Windows:
        """What a function gives for each window, with operations of its own; several windows run at a time."""

        def made(window: int) -> tuple[PairedOps, Floats]:
            ops = self._ops.apart(window, self._tokens[window])
            with np.errstate(over="ignore", invalid="ignore"):  # `PairedOps` names what overflows
                return ops, step(ops, window)

        def observed() -> Iterator[Floats]:
            for ops, values in in_threads(made, range(len(self._tokens)), at_once=self._at_once):
                self._ops.take(ops)
                del ops  # it holds its window's activations while the next one is computed
                yield values
                del values

        return self._stored(observed())

    def _run(self, layer: int, step: Callable[..., Floats], *states: Windows) -> Windows:
        """Run a piece of the decoder on every window of `states`, then free the weights."""
        spec = self._spec
        results = self._of_windows(lambda ops, window: step(ops, spec, layer, *(state[window] for state in states)))
        self._ops.drop()
        return results


def _joined(parts: Sequence[QuantizedWeight]) -> QuantizedWeight:
    """Some columns after others."""
    return QuantizedWeight(
        np.concatenate([part.integers for part in parts], axis=1), Grid.joined([part.grid for part in parts])
    )


def _first_measured(sink: int, tokens: int) -> int:
    """The first position of a window of this many tokens that counts in full for ranges and GPTQ's sums.

    The token behind the sink can be massive too: in SmolLM2-135M 1,039 where no later one exceeds 13. A range for it
    would leave the others 6 bits less, so it is clipped where it exceeds them by more than `_MAX_AT_START` times.
    """
    return min(sink + 1, tokens - 1) if sink else 0
