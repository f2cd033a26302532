"""What is asked of the child process that runs another runtime, and what it answers."""

from __future__ import annotations

from typing import Literal

import msgspec

from exporters.compare.contender import Timing

RuntimeName = Literal["llama-cpp-python", "onnxruntime-genai", "openvino"]


class Open(msgspec.Struct, frozen=True, kw_only=True, tag="open"):
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


class Score(msgspec.Struct, frozen=True, kw_only=True, tag="score"):
    """Write the logits after each of these tokens, float32 `[T, V]`, to a file of numpy's format."""

    tokens: list[int]
    file: str


class Measure(msgspec.Struct, frozen=True, kw_only=True, tag="measure"):
    """Compute these tokens and generate `new` others, timed."""

    tokens: list[int]
    new: int


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What any request is answered with.

    Attributes:
        timing: of `Measure`.
        error: what the runtime said if it failed.
    """

    timing: Timing | None = None
    error: str | None = None


Request = Open | Score | Measure
