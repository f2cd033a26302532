"""The decoder in float32 with numpy: what every quantized graph is measured against, and what calibrates it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edgekv.kv import KvTensor
from exporters.checkpoint import Checkpoint
from exporters.decoder import decoder_layer, logits
from exporters.spec import DecoderSpec

Floats = NDArray[np.float32]
Observer = Callable[[str, Floats], None]


class Weights:
    """Tensors of a checkpoint, each read once until it is dropped."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._read: dict[str, Floats] = {}

    def __getitem__(self, key: str) -> Floats:
        if key not in self._read:
            self._read[key] = self._checkpoint.tensor(key)
        return self._read[key]

    def drop(self) -> None:
        """Forget what was read: one layer in memory at a time."""
        self._read.clear()


class NumpyOps:
    """Carries the decoder out on whole sequences, `[T, width]`, with no past: causal attention over T tokens."""

    def __init__(self, spec: DecoderSpec, weights: Weights, tokens: int, observe: Observer | None = None) -> None:
        self._spec = spec
        self._weights = weights
        self._observe = observe
        angles = np.arange(tokens)[:, None] * spec.rope.inverse_frequencies(spec.head_dim)
        self.cos: Floats = np.cos(angles).astype(np.float32)
        self.sin: Floats = np.sin(angles).astype(np.float32)
        self._mask: Floats = np.triu(np.full((tokens, tokens), -np.inf, np.float32), 1)

    def embed(self, tokens: NDArray[Any], name: str) -> Floats:
        """Rows of the embedding, `[T, hidden]`."""
        return self._seen(name, self._weights["model.embed_tokens.weight"][tokens])

    def linear(self, x: Floats, weight: str, name: str, *, head: int | None = None, gain: float = 1.0) -> Floats:
        matrix = self._weights[weight]
        if head is not None:
            width = self._spec.head_dim
            matrix = matrix[head * width : (head + 1) * width]
        return self._seen(name, x @ matrix.T * np.float32(gain))

    def rms_norm(self, x: Floats, weight: str, name: str) -> Floats:
        variance = np.square(x).mean(-1, keepdims=True)
        scale = 1 / np.sqrt(variance + np.float32(self._spec.eps))
        normed: Floats = x * scale * self._weights[weight]
        return self._seen(name, normed)

    def add(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a + b)

    def subtract(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a - b)

    def multiply(self, a: Floats, b: Floats, name: str) -> Floats:
        return self._seen(name, a * b)

    def sigmoid(self, x: Floats, name: str) -> Floats:
        with np.errstate(over="ignore"):
            return self._seen(name, 1 / (1 + np.exp(-x)))

    def halves(self, x: Floats) -> tuple[Floats, Floats]:
        middle = x.shape[-1] // 2
        return x[..., :middle], x[..., middle:]

    def join(self, parts: list[Floats], name: str) -> Floats:
        return self._seen(name, np.concatenate(parts, axis=-1))

    def remember(self, new: Floats, tensor: KvTensor) -> Floats:
        return self._seen(tensor.past, new)

    def scores(self, query: Floats, keys: Floats, name: str) -> Floats:
        return self._seen(name, query @ keys.T)

    def masked(self, scores: Floats, name: str) -> Floats:
        return scores + self._mask

    def softmax(self, x: Floats, name: str) -> Floats:
        weights: Floats = np.exp(x - x.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        return weights

    def attend(self, weights: Floats, values: Floats, name: str) -> Floats:
        return self._seen(name, weights @ values)

    def _seen(self, name: str, value: Floats) -> Floats:
        if self._observe is not None:
            self._observe(name, value)
        return value


class Reference:
    """The checkpoint in float32.

    Layers run one after another over all windows, so that one layer's weights are in memory at a time, and so
    are the logits of one window.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

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
        windows = [np.asarray(window) for window in windows]
        spec, weights = self._checkpoint.spec, Weights(self._checkpoint)
        ops = {n: NumpyOps(spec, weights, n, observe) for n in {len(window) for window in windows}}
        states = [ops[len(window)].embed(window, "embedding") for window in windows]
        for layer in range(spec.layers):
            weights.drop()
            states = [decoder_layer(ops[len(state)], spec, layer, state) for state in states]
            if progress is not None:
                progress(layer + 1)
        weights.drop()
        for state in states:
            yield logits(ops[len(state)], self._checkpoint.head_key, state)
