"""What is asked of the child process that runs another runtime."""

from __future__ import annotations

from typing import Literal

import msgspec

RuntimeName = Literal["llama-cpp-python", "onnxruntime-genai", "openvino"]


class Open(msgspec.Struct, frozen=True, kw_only=True):
    """Load a model.

    Attributes:
        runtime: the package that runs it.
        path: its file or folder.
        context: the most tokens of a sequence.
        threads: of one operation; None leaves it to the runtime.
    """

    runtime: RuntimeName
    path: str
    context: int
    threads: int | None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """Write the logits after each of these tokens, float32 `[T, V]`, to a file of numpy's format."""

    tokens: list[int]
    file: str


class Measure(msgspec.Struct, frozen=True, kw_only=True):
    """Compute these tokens and generate `new` others, timed."""

    tokens: list[int]
    new: int
