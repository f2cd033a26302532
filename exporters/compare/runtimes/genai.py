"""onnxruntime-genai on a folder with `genai_config.json`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import onnxruntime_genai as genai
from numpy.typing import NDArray

from exporters.compare.messages import Open
from exporters.targets.genai.worker import register_providers


class GenaiModel:
    """A folder."""

    def __init__(self, asked: Open) -> None:
        register_providers()
        config = genai.Config(asked.path)
        if asked.threads is not None:
            options = f'{{"intra_op_num_threads": {asked.threads}}}'
            config.overlay(f'{{"model": {{"decoder": {{"session_options": {options}}}}}}}')
        self._model = genai.Model(config)
        self._context = asked.context

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        generator = self._generator()
        generator.append_tokens(np.array(tokens, np.int32))
        logits: NDArray[np.float32] = generator.get_output("logits")[0]
        if len(logits) == len(tokens):
            return logits
        generator, rows = self._generator(), []  # the graph gives the last token's logits alone
        for token in tokens:
            generator.append_tokens(np.array([token], np.int32))
            rows.append(generator.get_logits()[0, -1])
        return np.stack(rows)

    def generate(self, tokens: Sequence[int], new: int) -> Iterator[int]:
        generator = self._generator()
        generator.append_tokens(np.array(tokens, np.int32))
        for _ in range(new):
            generator.generate_next_token()
            yield int(generator.get_next_tokens()[0])

    def _generator(self) -> genai.Generator:
        parameters = genai.GeneratorParams(self._model)
        parameters.set_search_options(max_length=self._context, min_length=self._context)
        return genai.Generator(self._model, parameters)


def load(asked: Open) -> GenaiModel:
    return GenaiModel(asked)
