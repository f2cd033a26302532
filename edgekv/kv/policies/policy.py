"""Context policies: what happens when the context is full."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Protocol

from edgekv.errors import UsageError
from edgekv.spec.geometry import RowSpec

PolicyName = Literal["fail", "sliding-window", "sinks", "keydiff"]


class Policy(Protocol):
    """Defines how many tokens a cache holds in a context of S, and which ones to evict for a step that has no room."""

    @property
    def name(self) -> PolicyName:
        """The policy as users write it."""

    @property
    def inverse_frequencies(self) -> tuple[float, ...]:
        """Frequencies of the rotary embedding, R/2 of them, if tokens move to other positions; else empty."""

    @property
    def evicts(self) -> bool:
        """Whether a step that has no room may run, because tokens are evicted for it."""

    def check(self, geometry: RowSpec, max_ar: int) -> None:
        """Reject a policy that cannot work with these graphs.

        Raises:
            UsageError: numbers that leave no room for a step.
        """

    def keeping(self, tokens: int) -> Policy:
        """The same policy, never evicting the first `tokens` tokens.

        Raises:
            UsageError: it evicts the oldest tokens.
        """

    def capacity(self, context: int) -> int:
        """Maximum number of tokens held; the oldest are evicted when more are committed."""

    def leaving(self, length: int, similarity: Callable[[], Sequence[float]]) -> Sequence[int]:
        """Ages of the tokens to evict before a step that has no room, ascending.

        Args:
            length: tokens held.
            similarity: of the key of each token held to the mean key, -1 to 1; costly.
        """


@dataclass(frozen=True, slots=True)
class Fail:
    """A context of S tokens in total. No held token ever falls out of a graph's window.

    An AR-N graph sees S-N tokens of the past, so it may run while at most that many are held. The AR-1 graph computes
    the S-th token; no graph computes more.
    """

    name: Literal["fail"] = "fail"
    inverse_frequencies: tuple[float, ...] = ()
    evicts: ClassVar[bool] = False

    def check(self, geometry: RowSpec, max_ar: int) -> None:
        pass

    def keeping(self, tokens: int) -> Fail:
        return self

    def capacity(self, context: int) -> int:
        return context

    def leaving(self, length: int, similarity: Callable[[], Sequence[float]]) -> Sequence[int]:
        return ()


@dataclass(frozen=True, slots=True)
class SlidingWindow:
    """The S-1 newest tokens are held, and every step may run: it sees the S-AR newest of them."""

    name: Literal["sliding-window"] = "sliding-window"
    inverse_frequencies: tuple[float, ...] = ()
    evicts: ClassVar[bool] = True

    def check(self, geometry: RowSpec, max_ar: int) -> None:
        pass

    def keeping(self, tokens: int) -> SlidingWindow:
        raise UsageError(
            "context policy sliding-window",
            got=f"a bundle whose first {tokens} tokens stay in the cache (its sink)",
            expected="a policy that keeps them",
            fix=f"Use sinks({tokens}, WINDOW) or keydiff(BUDGET), or export with --sink none.",
        )

    def capacity(self, context: int) -> int:
        return context - 1

    def leaving(self, length: int, similarity: Callable[[], Sequence[float]]) -> Sequence[int]:
        return ()


@dataclass(frozen=True, slots=True)
class Sinks:
    """When a step has no room, all tokens but the first and the newest are evicted (arXiv 2309.17453).

    The remaining tokens are renumbered from position 0, so that no position exceeds S: their keys are rotated by
    the difference and rounded again. Keys move only when the freed rows, S - AR - tokens - window, are used up, so
    with a smaller window a key is rounded fewer times.

    Attributes:
        tokens: number of first tokens kept; at least 1.
        window: number of newest tokens kept; at least 1, and with `tokens` at most S less the largest AR.
        inverse_frequencies: R/2 of them, for the R rotated elements of a key: the angle of pair i at position p is
            p * inverse_frequencies[i].
    """

    tokens: int
    window: int
    inverse_frequencies: tuple[float, ...]
    name: Literal["sinks"] = "sinks"
    evicts: ClassVar[bool] = True

    def check(self, geometry: RowSpec, max_ar: int) -> None:
        most = geometry.past_rows(max_ar)
        if self.tokens < 1 or self.window < 1 or self.tokens + self.window > most:
            raise UsageError(
                "context policy sinks",
                got=f"{self.tokens} first and {self.window} newest tokens",
                expected=f"at least 1 of each, and {most} together at most, so that a step of AR-{max_ar} has room",
                fix="Use about half of the context for the newest tokens.",
            )
        if not 2 <= 2 * len(self.inverse_frequencies) <= geometry.head_dim:
            raise UsageError(
                "context policy sinks",
                got=f"{len(self.inverse_frequencies)} inverse frequencies",
                expected=f"1 to {geometry.head_dim / 2:g}, half of head_dim",
                fix="Take those of the bundle's manifest.",
            )

    def keeping(self, tokens: int) -> Sinks:
        if self.tokens < tokens:
            raise UsageError(
                "context policy sinks",
                got=f"{self.tokens} first tokens",
                expected=f"at least {tokens}, the sink of the bundle",
                fix=f"Use sinks({tokens}, {self.window}).",
            )
        return self

    def capacity(self, context: int) -> int:
        return context

    def leaving(self, length: int, similarity: Callable[[], Sequence[float]]) -> Sequence[int]:
        return range(self.tokens, length - self.window)


@dataclass(frozen=True, slots=True)
class KeyDiff:
    """When a step has no room, the tokens whose keys are most similar to the mean key are evicted (arXiv 2504.15364).

    A token is evicted from all tensors, so its similarity is the mean over layers and heads. Tokens keep their
    absolute positions.

    Attributes:
        budget: number of tokens kept; at most S less the largest AR.
        recent: number of newest tokens always kept; 1 to `budget`.
        first: number of first tokens always kept.
    """

    budget: int
    recent: int
    first: int = 0
    name: Literal["keydiff"] = "keydiff"
    inverse_frequencies: tuple[float, ...] = ()
    evicts: ClassVar[bool] = True

    def check(self, geometry: RowSpec, max_ar: int) -> None:
        most = geometry.past_rows(max_ar)
        if not 1 <= self.recent <= self.budget - self.first <= most - self.first:
            kept = f", {self.first} of them first" if self.first else ""
            raise UsageError(
                "context policy keydiff",
                got=f"a budget of {self.budget} tokens, {self.recent} of them recent{kept}",
                expected=f"1 to {most} tokens, so that a step of AR-{max_ar} has room, and at least 1 recent one",
                fix="Use about half of the context, and an eighth of that for the recent ones.",
            )

    def keeping(self, tokens: int) -> KeyDiff:
        return replace(self, first=tokens)

    def capacity(self, context: int) -> int:
        return context

    def leaving(self, length: int, similarity: Callable[[], Sequence[float]]) -> Sequence[int]:
        scores = similarity()
        # Of equally similar tokens the older ones are evicted.
        ranked = sorted(range(self.first, length - self.recent), key=lambda age: -scores[age])
        return sorted(ranked[: length - self.budget])


POLICIES: tuple[Policy, ...] = (Fail(), SlidingWindow())


def find_policy(policy: str | Policy) -> Policy:
    """The policy of this name. `Sinks` and `KeyDiff` have parameters; `parse_policy` reads those too.

    Raises:
        UsageError: there is none.
    """
    if not isinstance(policy, str):
        return policy
    for known in POLICIES:
        if known.name == policy:
            return known
    names = " or ".join(known.name for known in POLICIES)
    raise UsageError(
        "context policy",
        got=repr(policy),
        expected=f"{names}, or a Sinks or KeyDiff of edgekv.kv",
        fix=f"Use {names}, or Sinks(tokens, window, inverse_frequencies).",
    )


def check_layers(policy: Policy, geometries: Sequence[RowSpec], context: int, max_ar: int) -> None:
    """Reject a policy that does not fit these layers.

    Args:
        policy: the policy.
        geometries: of the layers with attention: to others the positions of tokens are no matter.
        context: S.
        max_ar: the most tokens per inference of the graphs.

    Raises:
        UsageError: naming the layers, or what `Policy.check` names.
    """
    narrow = [geometry for geometry in geometries if geometry.window != context]
    for geometry in geometries:
        if geometry.window == context:
            policy.check(geometry, max_ar)
    attending = instead = ""
    if (
        narrow and policy.inverse_frequencies
    ):  # a layer with a smaller window has evicted tokens, which have no new position
        attending, instead = "all attend", "fail, sliding-window or keydiff"
    elif len(narrow) == len(geometries) and policy.name == "keydiff":
        attending, instead = "in part attend", "fail or sliding-window"
    if attending:
        raise UsageError(
            f"context policy {policy.name}",
            got=f"layers that attend to {narrow[0].window} tokens of {context}",
            expected=f"layers that {attending} to the whole context",
            fix=f"Use {instead}.",
        )
