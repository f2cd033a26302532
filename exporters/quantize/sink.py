"""The sink: the token at position 0, which most queries attend to and whose activations are by far the largest.

One static range for a tensor would span that one token: in SmolLM2-135M its residual reaches 24,900, that of all other
tokens 150. (Massive activations: Sun et al. 2024, arXiv 2402.17762; attention sinks: Xiao et al. 2023, arXiv
2309.17453.) So the integer graphs never compute it. Its keys, values and logits are computed here in float, and a
runtime writes them into every cache before the first step (PrefixQuant, Chen et al. 2024, arXiv 2410.05265).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file

from edgekv.errors import UsageError
from edgekv.spec import EMBEDDING, LOGITS, DecoderSpec, by_inputs
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.decoder import decoder_layer, logits
from exporters.quantize.encodings import decoder_results
from exporters.quantize.reference import Floats, NumpyOps, Observer, Tensors, Weights
from quant import Encoding

SINK_FILE = "sink.safetensors"

SPANS = 4.0
"""A token whose magnitudes are above this multiple of the others' costs their 16-bit steps more than two bits."""

_TOKENS = 128
_HEAD_ROWS_AT_ONCE = 8192
_PER_QUERY = frozenset({"cache", "scores", "masked"})
"""Kinds whose values at a position also depend on other tokens, or that have ranges of their own."""


_MODES: dict[str, Literal["auto", "none"]] = {"auto": "auto", "none": "none"}


@dataclass(frozen=True, slots=True)
class SinkWanted:
    """The `--sink` of an export.

    Attributes:
        mode: `auto`: the token at position 0 if it spans the ranges; `none`; or `tokens`.
        tokens: ids, with the mode `tokens`.
    """

    mode: Literal["auto", "none", "tokens"] = "auto"
    tokens: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SinkWanted:
        """Read the option.

        Raises:
            UsageError: neither `auto`, `none` nor token ids.
        """
        if text in _MODES:
            return cls(_MODES[text])
        ids = text.split(",")
        if not all(each.strip().isascii() and each.strip().isdigit() and len(each) < 10 for each in ids):
            wanted = "auto, none, or token ids such as 1"
            raise UsageError("--sink", got=repr(text), expected=wanted, fix="Use auto.")
        return cls("tokens", tuple(int(each) for each in ids))


@dataclass(frozen=True, slots=True)
class Outlier:
    """How far the sink exceeds all other tokens.

    Attributes:
        result: name of the result in which it does so most.
        ratio: of the greatest magnitudes, sink to others.
    """

    result: str
    ratio: float


@dataclass(frozen=True, slots=True)
class FloatSink:
    """The sink's values in float.

    Attributes:
        tokens: ids, n of them.
        outlier: how far they exceed all other tokens.
        rows: keys and values `[n, D]`, by the name of the graph input that reads them.
        logits: after each token, `[n, V]`.
    """

    tokens: tuple[int, ...]
    outlier: Outlier
    rows: Mapping[str, Floats] = field(repr=False)
    logits: Floats = field(repr=False)

    def write(self, folder: Path, encodings: Mapping[str, Encoding]) -> None:
        """Write the integers of rows and logits, in the encodings of a bundle, to `SINK_FILE`."""
        values = {**self.rows, LOGITS: self.logits}
        save_file({name: encodings[name].quantize(each) for name, each in values.items()}, folder / SINK_FILE)


def first_tokens(checkpoint: Checkpoint, wanted: SinkWanted) -> tuple[int, ...]:
    """The tokens at the start of every text: those asked for, or bos, or where texts have none, how chats begin.

    Raises:
        UsageError: ids outside of the vocabulary, or not the bos with which texts begin.
    """
    special, vocab = checkpoint.special, checkpoint.spec.vocab
    if wanted.mode == "none":
        return () if special.bos is None else (special.bos,)
    if wanted.mode == "tokens":
        if wrong := [token for token in wanted.tokens if token >= vocab]:
            found = f"token {wrong[0]}"
            raise UsageError("--sink", got=found, expected=f"ids below {vocab}", fix="Use the checkpoint's tokens.")
        if special.bos is not None and wanted.tokens[0] != special.bos:
            found, expected = f"token {wanted.tokens[0]} first", f"{special.bos}, bos, with which texts begin"
            raise UsageError("--sink", got=found, expected=expected, fix=f"Use --sink {special.bos}, or auto.")
        return wanted.tokens
    if special.bos is not None:
        return (special.bos,)
    if checkpoint.chat is not None and (opening := _opening(checkpoint)) is not None:
        return (opening,)
    return special.eos[:1]


def choose_sink(
    tensors: Tensors, window: NDArray[Any], context: int, wanted: SinkWanted, tokens: Sequence[int]
) -> FloatSink | None:
    """The sink of a model, or None: not wanted, or its values do not span the ranges of the others.

    Args:
        tensors: the weights, with all that is folded into them.
        window: token ids of a calibration text, which begin with `tokens`.
        context: the context length of the rotary embedding.
        wanted: the option.
        tokens: those at the start of every text; see `first_tokens`.
    """
    if wanted.mode == "none" or not tokens:
        return None
    found = find_sink(tensors, window, context, tokens)
    return found if wanted.mode == "tokens" or found.outlier.ratio > SPANS else None


def _opening(checkpoint: Checkpoint) -> int | None:
    """The token with which the chat template begins every conversation; None if it fails."""
    assert checkpoint.chat is not None
    try:
        text = checkpoint.chat.render([{"role": "user", "content": "Hello"}])
        return next(iter(checkpoint.encode(text)), None)
    except UsageError:
        return None


def find_sink(tensors: Tensors, window: NDArray[Any], context: int, tokens: Sequence[int]) -> FloatSink:
    """Run the exact decoder on the start of a text.

    Args:
        tensors: the weights, with all that is folded into them.
        window: token ids of a calibration text, which begin with `tokens`.
        context: the context length of the rotary embedding.
        tokens: the sink's, n of them.

    Returns:
        The values of the first n tokens, and how far they exceed those of the others.
    """
    window, spec = window[: max(_TOKENS, 2 * len(tokens))], tensors.spec
    survey = _Survey(spec, len(tokens))
    weights = Weights(tensors)
    ops = _PartialOps(tensors, weights, len(window), context, survey.observe)
    hidden = ops.embed(window, "embedding")
    for layer in range(spec.layers):
        weights.drop()
        hidden = decoder_layer(ops, spec, layer, hidden)
    weights.drop()
    last = logits(_PartialOps(tensors, weights, len(tokens), context), spec, tensors.head_key, hidden[: len(tokens)])
    return FloatSink(tuple(tokens), survey.outlier, survey.rows, last)


class _Survey:
    """Collects what is needed of the results of a decoder on `[T, width]`."""

    def __init__(self, spec: DecoderSpec, tokens: int) -> None:
        self.outlier = Outlier("embedding", 0.0)
        self.rows: dict[str, Floats] = {}
        self._results = decoder_results(spec)
        self._tokens = tokens

    def observe(self, name: str, values: Floats) -> None:
        kind = self._results[name].kind
        if kind == "cache":
            self.rows[name] = values[: self._tokens].copy()
        elif kind not in _PER_QUERY:
            largest = np.abs(values).max(axis=-1)
            others = float(largest[self._tokens :].max())
            ratio = float(largest[: self._tokens].max()) / max(others, float(np.finfo(np.float32).tiny))
            if ratio > self.outlier.ratio:
                self.outlier = Outlier(name, ratio)


class _PartialOps(NumpyOps):
    """Reads a few rows of the embedding table, and the head some rows at a time: neither is in memory as a whole."""

    def __init__(
        self, tensors: Tensors, weights: Weights, tokens: int, context: int, observe: Observer | None = None
    ) -> None:
        self._tensors = tensors
        super().__init__(tensors.spec, weights, tokens, context, observe)

    def embed(self, tokens: NDArray[Any], name: str) -> Floats:
        return self._seen(name, self._tensors.tensor(EMBEDDING, tokens))

    def product(self, x: Floats, weight: str, rows: slice, gain: float) -> Floats:
        if weight != self._tensors.head_key:
            return super().product(x, weight, rows, gain)
        vocab = self._spec.vocab
        parts = (slice(at, min(at + _HEAD_ROWS_AT_ONCE, vocab)) for at in range(0, vocab, _HEAD_ROWS_AT_ONCE))
        columns = [x @ by_inputs(self._tensors.tensor(weight, part)) * np.float32(gain) for part in parts]
        return np.concatenate(columns, axis=-1)
