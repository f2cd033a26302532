"""Context policies: what happens when the context is full."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from edgekv.errors import UsageError

PolicyName = Literal["fail", "sliding-window"]


class Policy(Protocol):
    """Says how many tokens a cache for a context of S tokens holds, and which steps may run."""

    @property
    def name(self) -> PolicyName:
        """As users give it."""

    def capacity(self, context: int) -> int:
        """The most tokens held; the oldest leave when more are committed."""

    def admits(self, context: int, length: int, ar: int) -> bool:
        """Whether an AR-`ar` step may run while `length` tokens are held."""


@dataclass(frozen=True, slots=True)
class Fail:
    """A context of S tokens in all. No token that is held ever falls out of a graph's window.

    An AR-N graph sees S-N tokens of the past, so it may run while at most that many are held. The AR-1 graph
    computes the S-th token, and no graph a further one.
    """

    name: Literal["fail"] = "fail"

    def capacity(self, context: int) -> int:
        return context

    def admits(self, context: int, length: int, ar: int) -> bool:
        return length <= context - ar


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The S-1 newest tokens are held, and every step may run: it sees the S-AR newest of them."""

    name: Literal["sliding-window"] = "sliding-window"

    def capacity(self, context: int) -> int:
        return context - 1

    def admits(self, context: int, length: int, ar: int) -> bool:
        return True


POLICIES: tuple[Policy, ...] = (Fail(), SlidingWindow())


def find_policy(name: str) -> Policy:
    """The policy of this name.

    Raises:
        UsageError: there is none.
    """
    for policy in POLICIES:
        if policy.name == name:
            return policy
    names = " or ".join(policy.name for policy in POLICIES)
    raise UsageError("context policy", found=repr(name), wanted=names, way_out=f"Use {names}.")
