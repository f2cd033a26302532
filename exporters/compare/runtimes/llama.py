"""llama.cpp on a GGUF file, through llama-cpp-python."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from llama_cpp import Llama
from numpy.typing import NDArray

from exporters.compare.messages import Open


class LlamaModel:
    """A GGUF file. Logits of all tokens need another context than generation, where only the last ones are computed."""

    def __init__(self, asked: Open) -> None:
        self._asked = asked
        self._model = self._open(all_logits=True)
        self._has_all = True

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        model = self._ready(all_logits=True)
        model.eval(tokens)
        return np.array(model.scores[: len(tokens)])

    def generate(self, tokens: Sequence[int], new: int) -> Iterator[int]:
        model = self._ready(all_logits=False)
        run = tokens
        for _ in range(new):
            model.eval(run)
            token = model.sample(temp=0.0)
            yield token
            run = [token]

    def _ready(self, *, all_logits: bool) -> Llama:
        if all_logits != self._has_all:
            self._model.close()
            self._model, self._has_all = self._open(all_logits=all_logits), all_logits
        self._model.reset()
        return self._model

    def _open(self, *, all_logits: bool) -> Llama:
        threads = self._asked.threads
        return Llama(
            self._asked.path,
            n_ctx=self._asked.context,
            n_threads=threads,
            n_threads_batch=threads,
            n_gpu_layers=0,
            logits_all=all_logits,
            verbose=False,
        )


def load(asked: Open) -> LlamaModel:
    return LlamaModel(asked)
