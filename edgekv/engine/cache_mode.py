"""Cache modes: which sequences keep their keys and values between steps, and in how much memory."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, get_args

from edgekv.errors import UsageError
from edgekv.kv import KVCache
from edgekv.machine.system import free_memory_bytes, parse_bytes

ModeName = Literal["always", "long-sequence-only", "adaptive", "disabled"]

_PERCENTAGE = re.compile(r"(\d{1,30}(?:\.\d{1,30})?) ?%")
_FORM = re.compile(r"([a-z-]+)(?:\(([^()]*)\))?")
_WANTED = "always, long-sequence-only(TOKENS), adaptive or disabled; always and adaptive take a budget, as in "
_EXAMPLES = "adaptive(64MiB) or adaptive(25%)"


@dataclass(frozen=True, slots=True)
class CacheMode:
    """Which sequences are kept from step to step, and in how much memory; the others are recomputed in every step.

    `always` keeps each until it is dropped, and refuses a new one beyond the budget. `adaptive` keeps each while memory
    lasts, then evicts the least recently used. `long-sequence-only` keeps those above a threshold; shorter ones need no
    memory. `disabled` keeps none: a baseline for benchmarks.

    Attributes:
        name: one of them.
        threshold_tokens: prompt and generated tokens of the longest sequence that `long-sequence-only` recomputes, at
            least 1; 0 of the other modes.
        budget: memory of all caches together: bytes, at least 1; or a fraction of the memory that would be free without
            caches, above 0 and at most 1, which shrinks as other programs use memory. None for no limit, or with
            `adaptive` for half of it.
        free_bytes: reads the free memory.
    """

    name: ModeName = "always"
    threshold_tokens: int = 0
    budget: int | Fraction | None = None
    free_bytes: Callable[[], int] = free_memory_bytes

    def __post_init__(self) -> None:
        if self.name not in get_args(ModeName):
            raise UsageError("cache mode", got=repr(self.name), expected=_WANTED + _EXAMPLES, fix="Use always.")
        if self.name == "adaptive" and self.budget is None:
            object.__setattr__(self, "budget", Fraction(1, 2))
        if self.budget is not None and self.name not in ("always", "adaptive"):
            fix = "Leave it out, or choose always or adaptive."
            raise UsageError("memory budget", got=f"one with the cache mode {self.name}", expected="none", fix=fix)
        if self.budget is not None:
            _checked(self.budget)
        if self.name == "long-sequence-only" and self.threshold_tokens < 1:
            expected, fix = "a threshold of at least 1 token", "Use always to keep every sequence."
            raise UsageError("cache mode", got=self, expected=expected, fix=fix)

    def __str__(self) -> str:
        if self.name == "long-sequence-only":
            return f"{self.name}({self.threshold_tokens})"
        return self.name if self.budget is None else f"{self.name}({_budget_text(self.budget)})"

    @classmethod
    def parse(cls, text: str) -> CacheMode:
        """A cache mode as users write it.

        `always`, `always(64MiB)`, `long-sequence-only(256)`, `adaptive`, `adaptive(64MiB)`, `adaptive(25%)` (of the
        free memory) or `disabled`.

        Raises:
            UsageError: it is none of these.
        """
        match = _FORM.fullmatch(text.strip())
        name: Any = match[1] if match else ""
        argument = match[2] if match else None
        if name in ("always", "adaptive"):
            return cls(name, budget=None if argument is None else parse_budget(argument))
        if name == "long-sequence-only" and argument is not None and re.fullmatch(r"[0-9]{1,18}", argument.strip()):
            return cls(name, int(argument))
        if name == "disabled" and argument is None:
            return cls(name)
        raise UsageError("cache mode", got=repr(text), expected=_WANTED + _EXAMPLES, fix="Use always.")

    @property
    def keeps_all(self) -> bool:
        """Whether no sequence is recomputed in every step."""
        return self.name in ("always", "adaptive")

    @property
    def evicts(self) -> bool:
        """Whether the least recently used sequences are evicted when the budget is used up."""
        return self.name == "adaptive"

    def keeps(self, tokens: int) -> bool:
        """Whether the keys and values of a sequence of this length are kept."""
        return self.name != "disabled" and tokens > self.threshold_tokens

    def allowance_bytes(self, held_bytes: int) -> int | None:
        """Maximum bytes of all caches together, of which so many are allocated already; None for no limit.

        Raises:
            EngineError: the system does not report the memory that the budget depends on.
        """
        if isinstance(self.budget, Fraction):
            return int(self.budget * (self.free_bytes() + held_bytes))
        return self.budget

    def check(self, cache: KVCache) -> None:
        """Reject recomputation where it would change results.

        Keys and values computed while since evicted tokens were visible differ from recomputed ones, and a step of AR
        tokens that starts after S-AR sees fewer past tokens than single steps.

        Raises:
            UsageError: recomputed sequences may become so long that tokens leave a graph's window.
        """
        safe = cache.geometry.context - cache.ar[-1]
        if cache.policy == "fail" or (self.name != "disabled" and self.threshold_tokens <= safe):
            return
        raise UsageError(
            f"cache mode {self}",
            got=f"the context policy {cache.policy}",
            expected=f"fail, or at most {safe} tokens computed again",
            fix="Choose the policy fail, or keep the sequence: always, adaptive, or a lower threshold.",
        )


def parse_budget(text: str) -> int | Fraction:
    """A budget as users write it: `64MiB`, `1.5GB`, `1000000` or `25%` (of the free memory).

    Raises:
        UsageError: it is none of these.
    """
    if match := _PERCENTAGE.fullmatch(text.strip()):
        return _checked(Fraction(match[1]) / 100)
    try:
        limit_bytes = parse_bytes("memory budget", text)
    except UsageError:
        expected = "bytes with or without a unit such as MiB, or a percentage of the free memory"
        raise UsageError("memory budget", got=repr(text), expected=expected, fix="Use 64MiB or 50%.") from None
    return _checked(limit_bytes)


def _checked(budget: int | Fraction) -> int | Fraction:
    if isinstance(budget, Fraction):
        if not 0 < budget <= 1:
            got = _budget_text(budget)
            raise UsageError("memory budget", got=got, expected="above 0%, at most 100%", fix="Use 50%.")
    elif budget < 1:
        raise UsageError("memory budget", got=budget, expected="at least 1 byte", fix="Use 64MiB or more.")
    return budget


def _budget_text(budget: int | Fraction) -> str:
    return f"{float(budget * 100):g}%" if isinstance(budget, Fraction) else str(budget)
