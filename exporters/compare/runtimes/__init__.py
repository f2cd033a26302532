"""Other runtimes, as the child process uses them. Each module imports its package."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from exporters.compare.messages import Open, RuntimeName

_MODULES: dict[RuntimeName, str] = {
    "llama-cpp-python": "llama",
    "onnxruntime-genai": "genai",
    "openvino": "openvino",
}


class ForeignModel(Protocol):
    """A model that another runtime has loaded."""

    def logits(self, tokens: Sequence[int]) -> NDArray[np.float32]:
        """The logits after each of the tokens, `[T, V]`, from an empty cache."""

    def generate(self, tokens: Sequence[int], new: int) -> Iterator[int]:
        """Compute the tokens from an empty cache, and yield `new` others that follow, greedily."""


def load(asked: Open) -> ForeignModel:
    """Load a model. Errors are the runtime's own."""
    module = import_module(f"{__name__}.{_MODULES[asked.runtime]}")
    make: Callable[[Open], ForeignModel] = module.load
    return make(asked)
