"""Calibration text that the float model writes itself, for learning how to round.

GPTQ fits the integers of a matrix to the second moments of its inputs. On a short text it also fits what is particular
to that text: after 15,000 tokens, the output error of a 4-bit `down_proj` with 1,536 inputs is 1.4 to 1.6 times as
large on other text. The model's own samples are as varied as what it was trained on (Liu et al. 2023, arXiv
2305.17888).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.graphs.delta_rule import DeltaInputs, recall
from edgekv.kv import KvTensor
from edgekv.spec.linear import DeltaRule
from edgekv.spec.tensors import by_inputs
from exporters.checkpoint.tensors import Tensors
from exporters.quantize.calibrate import CHAT_SHARE
from exporters.quantize.reference import Floats, NumpyOps, Weights
from exporters.quantize.tail import Tail
from quant.products import in_threads

WINDOWS_AT_ONCE = 32

_TEXT_TOKENS = 128
"""Least tokens of each text that is written. A window holds several: more at a time take less time each."""
_TEXTS_AT_ONCE = 64
_SUMMED = 256  # probabilities, before one of their sums is drawn


@dataclass(frozen=True, slots=True)
class Beginnings:
    """How windows of written text begin, each with all of `first`.

    The model writes both sides of a conversation where a window has only what stands before a user's first message (Xu
    et al. 2024, arXiv 2406.08464).

    Attributes:
        first: the tokens at the start of each window.
        text: ids that stand for text, one of which follows at random.
        special: other ids that the model may write, as chats have them. What ends a document is none of them: few
            texts go on behind it, and there it can be as massive as a first token, so that ranges would lose bits.
        chat: the tokens that follow instead in a fifth of the windows; empty if the model has no chat template.
    """

    first: tuple[int, ...]
    text: Sequence[int]
    special: Sequence[int] = ()
    chat: tuple[int, ...] = ()

    def drawn(self, windows: int, random: np.random.Generator) -> list[list[int]]:
        """The tokens given of each window, text before chats."""
        starts = random.choice(list(self.text), windows)
        chats = windows // CHAT_SHARE if self.chat else 0
        texts = [[*self.first, int(start)] for start in starts[: windows - chats]]
        return texts + [[*self.first, *self.chat] for _ in range(chats)]


def generated_windows(
    tensors: Tensors,
    beginnings: Beginnings,
    number: int,
    windows: int,
    length: int,
    progress: Callable[[int, int], None],
) -> NDArray[np.int64]:
    """Windows of texts, `[windows, T]`: behind the tokens given what the model samples.

    A window has several texts, each written as if it were alone. Only the first has the tokens with which windows
    begin.

    Args:
        tensors: the exact weights; all of them are in memory while it writes.
        beginnings: the tokens given.
        number: of this batch, the random seed.
        windows: their number, at most `WINDOWS_AT_ONCE`.
        length: T of a window.
        progress: called with the number of tokens written, and of all.
    """
    first = beginnings.first
    texts_per_window = texts_of(length, 2 * len(beginnings.chat))
    written = -(-(length - len(first)) // texts_per_window)
    random, weights = np.random.default_rng(number), Weights(tensors)
    drawn = beginnings.drawn(windows * texts_per_window, random)
    groups = [slice(start, start + _TEXTS_AT_ONCE) for start in range(0, len(drawn), _TEXTS_AT_ONCE)]
    done = [0] * len(groups)

    def told(group: int, position: int) -> None:
        done[group] = position
        progress(sum(done), len(groups) * (len(first) + written))

    def texts(group: int) -> NDArray[np.int64]:
        own = np.random.default_rng((number, group))
        known = drawn[groups[group]]
        return _texts(tensors, weights, beginnings, known, len(first) + written, own, partial(told, group))

    rows = np.concatenate([*in_threads(texts, range(len(groups)))])[:, len(first) :]
    beginning = np.tile(np.array(first, np.int64), (windows, 1))
    joined: NDArray[np.int64] = np.concatenate([beginning, rows.reshape(windows, -1)], axis=1)[:, :length]
    return joined


def texts_of(length: int, least: int = 0) -> int:
    """Texts of a window of `length` tokens, of at least `least` tokens each."""
    return max(1, length // max(_TEXT_TOKENS, least))


def _texts(
    tensors: Tensors,
    weights: Weights,
    beginnings: Beginnings,
    drawn: Sequence[Sequence[int]],
    length: int,
    random: np.random.Generator,
    progress: Callable[[int], None],
) -> NDArray[np.int64]:
    """Texts `[texts, length]` that begin with the tokens drawn."""
    spec = tensors.spec
    refused = np.full(spec.vocab, -np.inf, np.float32)
    refused[[*beginnings.text, *beginnings.special]] = 0
    longest, least = max(map(len, drawn)), min(map(len, drawn))
    tokens = np.zeros((len(drawn), max(longest, length)), np.int64)
    for row, known in zip(tokens, drawn, strict=True):
        row[: len(known)] = known
    ends = np.array([*map(len, drawn)])
    ops = _DecodeOps(tensors, weights, len(drawn), length)
    for position in range(length - 1):
        ops.position = position
        ops.begin(0, tokens[:, position, None])
        hidden = ops.embed(tokens[:, position, None], "embedding")
        for layer in range(spec.layers):
            hidden = decoder_layer(ops, spec, layer, hidden)
        if position + 1 >= least:
            scores = logits(ops, spec, hidden)[:, 0]
            scores += refused
            sampled = _sampled(scores, random)
            tokens[:, position + 1] = np.where(position + 1 >= ends, sampled, tokens[:, position + 1])
        progress(position + 2)
    return tokens[:, :length]


def text_tokens(tokenizer: Tokenizer, vocab: int) -> list[int]:
    """The ids of a tokenizer below `vocab` that stand for text, without special tokens."""
    special = set(tokenizer.get_added_tokens_decoder())
    return sorted({token for token in tokenizer.get_vocab().values() if token < vocab} - special)


class _DecodeOps(NumpyOps):
    """Decodes a token of each of several sequences, `[sequences, 1, width]`, with a KV cache.

    Attributes:
        position: of the token.
    """

    def __init__(self, tensors: Tensors, weights: Weights, sequences: int, length: int) -> None:
        super().__init__(tensors.spec, weights, length, length)
        self.position = 0
        self._shape = (sequences, length)
        self._cache: dict[KvTensor, Floats] = {}
        self._tails: dict[int, Tail] = {}
        self._multiplied: tuple[Floats | None, dict[str, Floats]] = None, {}

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        """One product for all sequences and for all heads; otherwise numpy reads the matrix once for each."""
        if self._multiplied[0] is not x:
            self._multiplied = x, {}
        products = self._multiplied[1]
        if weight not in products:
            products[weight] = (x[:, 0] @ by_inputs(self._weights[weight]))[:, None]
        product = products[weight][..., rows]
        return product * np.float32(gain) if gain != 1 else product

    def fold_heads(self, heads: list[Floats], names: Sequence[str] = ()) -> list[Floats]:
        """As rows: their scores are one product for each sequence."""
        return [np.concatenate(heads, axis=-2)]

    def unfold_heads(self, folded: list[Floats], heads: int) -> list[Floats]:
        return np.split(folded[0], heads, axis=-2)

    def rotation(self, layer: int, heads: int) -> tuple[Floats, Floats]:
        cos, sin = super().rotation(layer, heads)
        here = slice(self.position, self.position + 1)
        return cos[here], sin[here]

    def append_to_cache(self, new: Floats, tensor: KvTensor) -> Floats:
        """The rows within the layer's attention window."""
        if tensor.result == "tail":
            return self._tail.append(tensor, new)
        if tensor not in self._cache:
            self._cache[tensor] = np.zeros((*self._shape, new.shape[-1]), np.float32)
        self._cache[tensor][:, self.position] = new[:, 0]
        return self.cached(tensor)

    def cached(self, tensor: KvTensor) -> Floats:
        window, stop = self._spec.window(tensor.layer), self.position + 1
        return self._cache[tensor][:, max(0, stop - (window or stop)) : stop]

    def tap(self, rows: Floats, weight: str, tap: int, name: str) -> Floats:
        kernels = self._weights[weight]
        at = rows.shape[1] - (kernels.shape[-1] - tap)
        row = rows[:, at, None] if at >= 0 else np.zeros_like(rows[:, :1])
        return self._seen(name, row * kernels[:, 0, tap])

    def recall(self, rule: DeltaRule, layer: int, new: DeltaInputs[Floats]) -> list[Floats]:
        """The token continues the tail of its layer."""
        self._tail = self._tails.setdefault(layer, Tail(layer))
        self._tail.open(rule, new.keys[0], 1)
        values = recall(self, rule, layer, new)
        self._tail.commit(rule)
        return values

    def masked(self, scores: Floats, layer: int, name: str) -> Floats:
        return scores


def _sampled(scores: Floats, random: np.random.Generator) -> NDArray[np.int64]:
    """A token for each row of logits `[sequences, V]`, at temperature 1: a block of the vocabulary, then one of it."""
    chances = np.zeros((len(scores), -(-scores.shape[1] // _SUMMED) * _SUMMED), np.float32)
    for row, chance in zip(scores, chances[:, : scores.shape[1]], strict=True):  # in a core's cache
        np.subtract(row, row.max(), out=chance)
        np.exp(chance, out=chance)
    likely = chances.reshape(len(scores), -1, _SUMMED)
    sums = likely.sum(-1).cumsum(-1, dtype=np.float64)
    drawn = random.random((len(scores), 1)) * sums[:, -1:]
    blocks = _first_above(sums, drawn)
    rows = np.arange(len(scores))
    before = np.where(blocks > 0, sums[rows, blocks - 1], 0.0)
    tokens: NDArray[np.int64] = blocks * _SUMMED
    tokens += _first_above(likely[rows, blocks].cumsum(-1, dtype=np.float64), drawn - before[:, None])
    return tokens


def _first_above(sums: NDArray[np.float64], drawn: NDArray[np.float64]) -> NDArray[np.int64]:
    """The first place in each row of growing sums that exceeds a number `[rows, 1]` below the last of them."""
    below: NDArray[np.float64] = np.minimum(drawn, np.nextafter(sums[:, -1:], 0))
    places: NDArray[np.int64] = (sums <= below).sum(-1)
    return places
