"""A line on standard error for each request."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter

LEFT = 499
"""The status of a request whose client left before its answer began; it is never sent."""


@dataclass(slots=True)
class RequestRecord:
    """What the log says of a request.

    Attributes:
        status: of HTTP; `LEFT` before an answer has begun.
        error: code of the error that it was answered with; None if there was none.
        prompt_tokens: each prompt once; None if it never got to the model.
        cached_tokens: those of them that were not computed; None before the answer has ended.
        generated_tokens: of all answers.
        first_token_s: from the request to its first token; None before that.
        began: in seconds of `perf_counter`.
    """

    status: int = LEFT
    error: str | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    generated_tokens: int = 0
    first_token_s: float | None = None
    began: float = field(default_factory=perf_counter)

    @property
    def has_begun(self) -> bool:
        """Whether an answer has begun."""
        return self.status != LEFT

    def count_token(self) -> None:
        """Count a generated token."""
        self.generated_tokens += 1
        if self.first_token_s is None:
            self.first_token_s = perf_counter() - self.began

    def line(self, method: str, path: str) -> str:
        """The line, without the time of day."""
        parts = [f"{method} {path} {self.status}"]
        if not self.has_begun:
            parts.append("client left")
        if self.error is not None:
            parts.append(self.error)
        if self.prompt_tokens is not None:
            cached = "" if self.cached_tokens is None else f" ({self.cached_tokens} cached)"
            parts.append(f"{self.prompt_tokens} tokens in{cached}")
            parts.append(f"{self.generated_tokens} out")
        if self.first_token_s is not None:
            parts.append(f"first token {self.first_token_s * 1e3:.0f} ms")
        parts.append(f"total {(perf_counter() - self.began) * 1e3:.0f} ms")
        return ", ".join(parts)


def write_line(line: str) -> None:
    """Write a line with the time of day. A standard error that nobody reads any more is no reason to fail."""
    with suppress(OSError, ValueError):
        print(time.strftime("%Y-%m-%d %H:%M:%S"), line, file=sys.stderr, flush=True)
