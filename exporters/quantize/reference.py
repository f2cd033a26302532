"""The decoder in float32 with numpy: the reference for quantized graphs, also used for calibration."""

from __future__ import annotations

import copy
import math
import threading
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from edgekv.graphs.decoder import SHARES_EPS, decoder_layer, head_inputs, head_logits, logits
from edgekv.graphs.delta_rule import UNIT_EPS, DeltaInputs, DeltaOps, between_blocks, recall
from edgekv.kv import KvTensor
from edgekv.pictures.positions import axis_positions
from edgekv.spec import LAYER_INPUTS_PORT, PICTURE_PLACES, TARGET_HIDDEN
from edgekv.spec.decoder import DecoderSpec
from edgekv.spec.geometry import CHECKPOINT_TOKENS
from edgekv.spec.linear import DeltaRule
from edgekv.spec.lora import LoraTarget
from edgekv.spec.rope import Rotation
from edgekv.spec.tensors import EMBEDDING, HEAD, HEAD_BIAS, LAYER_INPUTS, by_inputs, head_width
from exporters.checkpoint.columns import blocks_of_rows
from exporters.checkpoint.fold import Factors
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.tail import Tail
from quant.products import in_threads

Floats = NDArray[np.float32]
WINDOWS_AT_ONCE = 4
"""Windows whose values are computed at a time, if there are as many cores and memory for them."""
_STEP_TOKENS = CHECKPOINT_TOKENS // 2  # so that some steps find a tail

Observer = Callable[[str, Floats], None]

Changes = Mapping[tuple[int, LoraTarget], Factors]
"""What an adapter adds to projections, by layer."""

NO_CHANGES: Changes = MappingProxyType({})


class LayerInputs:
    """What layers read of the tokens of a text: the row of each token is computed once, and kept."""

    def __init__(self, tensors: Tensors) -> None:
        self._tensors = tensors
        self._ids: NDArray[np.int64] = np.zeros(0, np.int64)
        self._rows: Floats = np.zeros((0, 0), np.float32)

    def add(self, tokens: NDArray[Any]) -> None:
        """Compute the rows of tokens that are not known."""
        if self._tensors.spec.picture_layers:
            return  # of pictures alone, which are at hand
        new = np.setdiff1d(tokens, self._ids).astype(np.int64)
        if len(new):
            rows = self._tensors.tensor(LAYER_INPUTS, new)
            ids = np.concatenate([self._ids, new])
            order = np.argsort(ids)
            self._rows = np.concatenate([self._rows, rows])[order] if len(self._ids) else rows[order]
            self._ids = ids[order]

    def of(self, tokens: NDArray[Any], columns: slice) -> Floats:
        """Some columns of the rows of tokens `[...]`, `[..., columns]`."""
        if self._tensors.spec.picture_layers:
            return self._tensors.tensor(LAYER_INPUTS, tokens)[:, columns]
        self.add(tokens)
        return self._rows[np.searchsorted(self._ids, tokens), columns]


class Weights:
    """Tensors, each read once until it is dropped, by one thread at a time.

    Attributes:
        layer_inputs: what layers read of tokens; kept for good.
    """

    def __init__(self, checkpoint: Tensors) -> None:
        self._tensors = checkpoint
        self._read: dict[str, Floats] = {}
        self._reading = threading.Lock()
        self.layer_inputs = LayerInputs(checkpoint)

    def __getitem__(self, key: str) -> Floats:
        with self._reading:
            if key not in self._read:
                self._read[key] = self._tensors.tensor(key)
            return self._read[key]

    def embeddings(self, tokens: NDArray[Any]) -> Floats:
        """Rows of the embedding, or of pictures behind it, `[..., hidden]`; no others are read."""
        return self._tensors.tensor(EMBEDDING, tokens.reshape(-1)).reshape(*tokens.shape, -1)

    def picture_places(self, tokens: NDArray[Any]) -> NDArray[np.int64]:
        """Where tokens `[T]` stand in pictures; see `PICTURE_PLACES`."""
        return self._tensors.tensor(PICTURE_PLACES, tokens).astype(np.int64)

    def put(self, key: str, values: Floats) -> None:
        """Use other values of a tensor until it is dropped, such as some rows of the head."""
        self._read[key] = values

    def drop(self) -> None:
        """Free the tensors read so far, so that one layer is in memory at a time."""
        self._read.clear()


def _erf(x: Floats) -> Floats:
    """The error function, within 2e-7: formula 7.1.26 of Abramowitz and Stegun."""
    size = np.abs(x).astype(np.float64)
    t = 1 / (1 + 0.3275911 * size)
    series = t * (0.254829592 + t * (-0.284496736 + t * (1.421413741 + t * (-1.453152027 + t * 1.061405429))))
    erf: Floats = (np.sign(x) * (1 - series * np.exp(-size * size))).astype(np.float32)
    return erf


class NumpyBlocks:
    """What decoders and encoders have in common, on `[..., T, width]`; `BlockOps`."""

    def __init__(
        self, read: Callable[[str], Floats], head_width: Callable[[str], int], eps: float, observe: Observer | None
    ) -> None:
        """Args: read: a weight. head_width: of a projection's heads. eps: of norms. observe: see `NumpyOps`."""
        self._read = read
        self._head_width = head_width
        self._eps = eps
        self._observe = observe

    def linear(
        self,
        x: Floats,
        weight: str,
        name: str,
        *,
        bias: str | None = None,
        head: int | None = None,
        gain: float = 1.0,
    ) -> Floats:
        width = self._head_width(weight)
        rows = slice(None) if head is None else slice(head * width, (head + 1) * width)
        product = self.product(x, weight, rows, gain)
        if bias is None:
            return self._seen(name, product)
        product = self._seen(name + ".unbiased", product)
        return self._seen(name, product + self._read(bias)[rows] * np.float32(gain))

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        """`x @ weight.T * gain` for some rows of a matrix, its output channels."""
        product: Floats = x @ by_inputs(self._read(weight)[rows])
        if gain != 1:
            product *= np.float32(gain)
        return product

    def normalize(self, x: Floats, width: int, name: str) -> Floats:
        return self._normalized(x, name, self._eps)

    def _normalized(self, x: Floats, name: str, eps: float) -> Floats:
        variance = np.square(x).mean(-1, keepdims=True)
        return self._seen(name, x / np.sqrt(variance + np.float32(eps)))

    def add(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a + b)

    def gelu(self, x: Floats, name: str) -> Floats:
        inner = np.float32(math.sqrt(2 / math.pi)) * (x + np.float32(0.044715) * x * x * x)
        return self._seen(name, np.float32(0.5) * x * (1 + np.tanh(inner)))

    def exact_gelu(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.float32(0.5) * x * (1 + _erf(x * np.float32(0.5**0.5))))

    def sigmoid(self, x: Floats, name: str) -> Floats:
        sigmoid = np.negative(x)
        with np.errstate(over="ignore"):
            np.exp(sigmoid, out=sigmoid)
        sigmoid += 1
        return self._seen(name, np.reciprocal(sigmoid, out=sigmoid))

    def multiply(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a * b)

    def swap_halves(self, x: Floats, half: int) -> Floats:
        return np.roll(x, half, axis=-1)

    def join(self, parts: list[Floats], name: str) -> Floats:
        return self._seen(name, np.concatenate(parts, axis=-1))

    def scores(self, query: Floats, keys: Floats, name: str) -> Floats:
        return self._seen(name, query @ keys.swapaxes(-1, -2))

    def softmax(self, x: Floats, name: str) -> Floats:
        weights: Floats = x - x.max(-1, keepdims=True)
        np.exp(weights, out=weights)
        weights /= weights.sum(-1, keepdims=True)
        return weights

    def attend(self, weights: Floats, values: Floats, name: str) -> Floats:
        return self._seen(name, weights @ values)

    def _seen(self, name: str, value: Floats) -> Floats:
        if self._observe is not None:
            self._observe(name, value)
        return value


class NumpyOps(NumpyBlocks, DeltaOps[Floats]):
    """Runs the decoder on whole sequences, `[T, width]`, without a past: attention over all T tokens, or earlier ones.

    Several windows may take turns, layer by layer: see `begin`.

    Args:
        spec: the decoder.
        weights: its weights.
        tokens: T.
        context: the longest sequence that the rotary embedding is made for.
        observe: called with the name and value of every result.
        changes: what an adapter adds.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: Weights,
        tokens: int,
        context: int,
        observe: Observer | None = None,
        changes: Changes = NO_CHANGES,
    ) -> None:
        super().__init__(weights.__getitem__, partial(head_width, spec), spec.eps, observe)
        self._spec = spec
        self._changes = changes
        self._weights = weights
        # A drafter's token follows the one whose keys are the last it reads in another's cache.
        first = int(spec.target is not None and not spec.target.is_cached_apart)
        places = np.arange(first, first + tokens)[:, None]
        self._rotations = [_cos_sin(rope.rotation(context), places) for rope in spec.ropes]
        self._turned: tuple[Floats, Floats] | None = None
        self._context = context
        self._target_hidden: Floats = np.zeros((tokens, 0), np.float32)
        self._tail = Tail(0)
        self._window: tuple[Hashable, NDArray[Any]] = None, np.zeros(0, np.int64)
        self._shared: dict[tuple[Hashable, KvTensor], Floats] = {}
        windows = {spec.window(layer) for layer in range(spec.layers)}
        self._plain_masks = {window: _mask(tokens, window, both_sides=spec.bidirectional) for window in windows}
        self._masks = self._plain_masks

    def of_window(self, window: Hashable, tokens: NDArray[Any], observe: Observer | None) -> Self:
        """A copy that runs a window while others run others; arguments as for `begin`, and the observer of the copy."""
        ops = copy.copy(self)
        ops._observe = observe
        ops.begin(window, tokens)
        return ops

    def begin(self, window: Hashable, tokens: NDArray[Any]) -> None:
        """Run a window from now on: what its layers share is kept under its name.

        Args:
            window: its name.
            tokens: its ids `[T]`.
        """
        self._window = window, tokens
        self._turned, self._masks = None, self._plain_masks
        if not (pictured := tokens >= self._spec.vocab).any():
            return
        if self._spec.whole_pictures:
            moves = self._weights.picture_places(tokens)[:, 2]  # 0 but for the last row of a tile
            tiles = np.where(pictured, np.cumsum(moves) - moves, -1)
            self._masks = {window: _mask(len(tokens), window, tiles=tiles) for window in self._plain_masks}
        if self._spec.picture_axes:
            places = self._weights.picture_places(tokens)
            along = axis_positions(places)[:, self._spec.picture_axes]
            self._turned = _cos_sin(self._spec.rope.rotation(self._context), along)

    def embed(self, tokens: NDArray[Any], name: str) -> Floats:
        """Rows of the embedding, `[T, hidden]`, of the tokens of the window from now on."""
        self.begin(self._window[0], tokens)
        return self._seen(name, self._weights.embeddings(tokens))

    def fork(self, window: Hashable, source: Hashable) -> None:
        """Run another window with the same tokens from now on, which shares what layers of `source` have shared."""
        self._shared |= {(window, tensor): rows for (name, tensor), rows in [*self._shared.items()] if name == source}
        self._window = window, self._window[1]

    def layer_input(self, layer: int) -> Floats:
        width = self._spec.input_width
        return self._seen(LAYER_INPUTS_PORT, self.gathered(slice(layer * width, (layer + 1) * width)))

    def gathered(self, columns: slice) -> Floats:
        """What the host gathers for the tokens of the window, `[T, ...]`: some columns of all that layers read."""
        return self._weights.layer_inputs.of(self._window[1], columns)

    def adapt(
        self, y: Floats, x: Floats, layer: int, target: LoraTarget, name: str, *, head: int | None = None
    ) -> Floats:
        change = self._changes.get((layer, target))
        if change is None:
            return y
        width = self._spec.head_dim
        rows = slice(None) if head is None else slice(head * width, (head + 1) * width)
        return self._seen(name, y + (x @ change.right.T) @ change.left[rows].T)

    def side_by_side(self, parts: list[Floats]) -> Floats:
        return np.concatenate(parts, axis=-1)

    def rms_norm(self, x: Floats, weight: str, name: str, *, gain: float = 1.0) -> Floats:
        variance = np.square(x).mean(-1, keepdims=True)
        scale = 1 / np.sqrt(variance + np.float32(self._spec.eps))
        normed: Floats = x * scale
        normed *= self._weights[weight]
        if gain != 1:
            normed *= np.float32(gain)
        return self._seen(name, normed)

    def subtract(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a - b)

    def scale(self, x: Floats, factor: float, name: str) -> Floats:
        return self._seen(name, x * np.float32(factor))

    def scale_by(self, x: Floats, weight: str, name: str) -> Floats:
        return self._seen(name, x * self._weights[weight])

    def shift_by(self, x: Floats, weight: str, name: str) -> Floats:
        return self._seen(name, x + self._weights[weight])

    def chosen(self, x: Floats, count: int, name: str) -> Floats:
        mask = np.zeros_like(x)
        largest = np.argsort(-x, axis=-1, kind="stable")[..., :count]
        np.put_along_axis(mask, largest, np.float32(1), axis=-1)
        return self._seen(name, mask)

    def shares(self, x: Floats, name: str) -> Floats:
        total = self._seen(name + ".sum", x.sum(-1, keepdims=True))
        return self._seen(name, x / (total + np.float32(SHARES_EPS)))

    def tanh(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.tanh(x))

    def sqrt(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.sqrt(x))

    def sign(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.sign(x))

    def split(self, x: Floats, widths: Sequence[int]) -> list[Floats]:
        return np.split(x, np.cumsum(widths)[:-1], axis=-1)

    def slice(self, x: Floats, first: int, width: int) -> Floats:
        return x[..., first : first + width]

    def rotation(self, layer: int, heads: int) -> tuple[Floats, Floats]:
        rope = self._spec.rope_of(layer)
        assert rope is not None, "the decoder asks for rotated layers only"
        if self._turned is not None:
            return self._turned
        return self._rotations[self._spec.ropes.index(rope)]

    def append_to_cache(self, new: Floats, tensor: KvTensor) -> Floats:
        self._seen(tensor.past, new)
        if tensor.layer in self._spec.shared_layers:
            self._shared[self._window[0], tensor] = new
        return self._tail.append(tensor, new) if tensor.result == "tail" else new

    def read_target(self, hidden: Floats, rows: Mapping[KvTensor, Floats]) -> None:
        """What a drafter reads of its target in the window from now on.

        Args:
            hidden: the target's last hidden states `[..., T, H]`.
            rows: its keys and values `[..., T, D]`.
        """
        self._target_hidden = hidden
        self._shared |= {(self._window[0], tensor): values for tensor, values in rows.items()}

    def target_hidden(self) -> Floats:
        return self._seen(TARGET_HIDDEN, self._target_hidden)

    def give_hidden(self, x: Floats) -> None:
        """Nothing: nobody reads it."""

    def cached(self, tensor: KvTensor) -> Floats:
        return self._shared[self._window[0], tensor]

    def tap(self, rows: Floats, weight: str, tap: int, name: str) -> Floats:
        kernels = self._weights[weight]
        before = kernels.shape[-1] - 1 - tap
        shifted = np.zeros_like(rows)
        shifted[..., before:, :] = rows[..., : rows.shape[-2] - before, :]
        return self._seen(name, shifted * kernels[:, 0, tap])

    def recall(self, rule: DeltaRule, layer: int, new: DeltaInputs[Floats]) -> list[Floats]:
        """In steps, as graphs compute it, so that their results are observed."""
        tokens, outputs = new.keys[0].shape[-2], []
        self._tail = Tail(layer)
        for first in range(0, tokens, _STEP_TOKENS):
            chunk = slice(first, min(first + _STEP_TOKENS, tokens))
            parts = (
                [head[..., chunk, :] for head in heads]
                for heads in (new.queries, new.keys, new.values, new.strengths, new.decays)
            )
            self._tail.open(rule, new.keys[0], chunk.stop - chunk.start)
            if first >= CHECKPOINT_TOKENS:  # before, S is 0 whatever the text
                self._seen(KvTensor(layer, "recurrent", 0).past, self._tail.stored(KvTensor(layer, "recurrent", 0)))
            outputs.append(recall(self, rule, layer, DeltaInputs(*parts)))
            self._tail.commit(rule)
        return [np.concatenate(heads, axis=-2) for heads in zip(*outputs, strict=True)]

    @property
    def new_rows(self) -> int:
        return self._tail.tokens

    @property
    def by_row(self) -> bool:
        return False

    def observe_known(self, target: Floats, correction: Floats, name: str) -> None:
        self._seen(name, target - correction)

    def unit(self, x: Floats, width: int, name: str, *, gain: float = 1.0) -> Floats:
        length = np.sqrt(np.square(x).sum(-1, keepdims=True) + np.float32(UNIT_EPS))
        return self._seen(name, x / length * np.float32(gain))

    def relu(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.maximum(x, np.float32(0)))

    def exp(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.exp(x))

    def complement(self, x: Floats, of: float, name: str) -> Floats:
        return self._seen(name, np.float32(of) - x)

    def times(self, x: Floats, weight: str, at: int, name: str) -> Floats:
        return self._seen(name, x * self._weights[weight][at])

    def shift(self, x: Floats, weight: str, name: str) -> Floats:
        return self._seen(name, x + self._weights[weight])

    def stored(self, tensor: KvTensor) -> Floats:
        return self._tail.stored(tensor)

    def extended(self, rows: Floats, new: Floats, tensor: KvTensor) -> Floats:
        return np.concatenate([rows, new], axis=-2)

    def row(self, x: Floats, row: int) -> Floats:
        return x[..., row : row + 1, :]

    def together(self, rows: list[Floats], name: str) -> Floats:
        return np.concatenate(rows, axis=-2)

    def columns(self, x: Floats, stop: int) -> Floats:
        return x[..., : self._tail.past + stop]

    def new_columns(self, x: Floats) -> Floats:
        return x[..., self._tail.past :]

    def decay_sums(self, rows: Floats, name: str) -> Floats:
        return self._seen(name, self._tail.decay_sums(rows))

    def across(self, rows: Floats) -> Floats:
        return self._tail.seen(rows.swapaxes(-1, -2))

    def decays(self, sums: Floats, name: str) -> tuple[Floats, Floats]:
        decays = self._seen(name, np.exp(sums))
        return self._tail.seen(decays[..., :-1]), decays[..., -1:]

    def between_blocks(self, system: Floats, size: int) -> Floats:
        return system * between_blocks(system.shape[-1], size)

    def from_identity(self, x: Floats, name: str) -> Floats:
        return self._seen(name, np.eye(x.shape[-1], dtype=np.float32) - x)

    def masked(self, scores: Floats, layer: int, name: str) -> Floats:
        return scores + self._masks[self._spec.window(layer)]


def _cos_sin(rotation: Rotation, positions: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Of tokens at positions `[T, 1]`, or with one for each pair, `[T, R/2]`."""
    angles = positions * rotation.inverse_frequencies
    cos, sin = np.cos(angles) * rotation.attention_factor, np.sin(angles) * rotation.attention_factor
    both = np.concatenate([cos, cos], axis=1), np.concatenate([-sin, sin], axis=1)
    return both[0].astype(np.float32), both[1].astype(np.float32)


def _mask(
    tokens: int, window: int | None, *, both_sides: bool = False, tiles: NDArray[np.int64] | None = None
) -> Floats:
    """`[T, T]`, 0 where a token attends to another: itself and the window - 1 tokens before it, or on both sides.

    Args:
        tokens: T.
        window: None for all.
        both_sides: whether all attend to later ones.
        tiles: a number of each token, `[T]`, -1 for none: those of one number attend to each other.
    """
    distance = np.arange(tokens)[:, None] - np.arange(tokens)
    distance = np.abs(distance) if both_sides else distance
    seen = (distance >= 0) & (distance < (window or tokens))
    if tiles is not None:
        seen |= (tiles[:, None] == tiles) & (tiles >= 0) & (distance < (window or tokens))
    mask: Floats = np.where(seen, np.float32(0), np.float32(-np.inf))
    return mask


class Reference:
    """The checkpoint in float32.

    Layers run one after another over all windows, so that one layer's weights and one window's logits are in memory at
    a time.

    Args:
        tensors: the weights.
        context: the longest sequence that the rotary embedding is made for: the context of a bundle that is measured
            against it; None: the length of each window, as transformers does.
    """

    def __init__(self, tensors: Tensors, context: int | None = None) -> None:
        self._tensors = tensors
        self._context = context

    def logits(
        self,
        windows: Iterable[NDArray[Any]],
        *,
        observe: Observer | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each window of token ids `[T]`; every window begins at position 0.

        Args:
            windows: token ids; the windows may differ in length.
            observe: called with the name and value of every result.
            progress: called with the number of layers done.
        """
        return self.head(self.states(windows, observe=observe, progress=progress), observe=observe)

    def states(
        self,
        windows: Iterable[NDArray[Any]],
        *,
        observe: Observer | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> list[Floats]:
        """The last layer's output `[T, hidden]` for each window; arguments as for `logits`."""
        windows = [np.asarray(window) for window in windows]
        spec, weights = self._tensors.spec, Weights(self._tensors)
        ops = self._ops(weights, {len(window) for window in windows}, observe)
        if spec.layer_inputs:
            weights.layer_inputs.add(np.concatenate(windows))
        states = [ops[len(window)].embed(window, "embedding") for window in windows]
        for layer in range(spec.layers):
            weights.drop()

            def computed(numbered: tuple[int, Floats], layer: int = layer) -> Floats:
                number, state = numbered
                window = windows[number]
                return decoder_layer(ops[len(window)].of_window(number, window, observe), spec, layer, state)

            # An observer sees one window after another.
            at_once = WINDOWS_AT_ONCE if observe is None else 1
            states = list(in_threads(computed, [*enumerate(states)], at_once=at_once))
            if progress is not None:
                progress(layer + 1)
        return states

    def head(self, states: Iterable[Floats], *, observe: Observer | None = None) -> Iterator[Floats]:
        """Yield the logits `[T, V]` of each output `[T, hidden]` of the last layer."""
        weights = Weights(self._tensors)
        for state in states:
            ops = self._ops(weights, {len(state)}, observe)
            yield logits(ops[len(state)], self._tensors.spec, state)

    def head_blocks(self, states: Sequence[Floats]) -> Iterator[list[Floats]]:
        """The logits of `head`, some rows of the vocabulary at a time: `[T, rows]` of each output of the last layer.

        Neither the head nor the logits of a window are whole in memory.
        """
        weights, spec = Weights(self._tensors), self._tensors.spec
        ops = self._ops(weights, {len(state) for state in states}, None)
        inputs = [head_inputs(ops[len(state)], spec, state) for state in states]
        for rows in blocks_of_rows(spec.result_width):
            weights.put(HEAD, self._tensors.tensor(HEAD, rows))
            if "lm_head" in spec.biased:
                weights.put(HEAD_BIAS, self._tensors.tensor(HEAD_BIAS, rows))
            yield [head_logits(ops[len(x)], spec, x) for x in inputs]

    def _ops(self, weights: Weights, lengths: Iterable[int], observe: Observer | None) -> dict[int, NumpyOps]:
        return {n: NumpyOps(self._tensors.spec, weights, n, self._context or n, observe) for n in lengths}
