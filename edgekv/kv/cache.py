"""The KV cache of one sequence: geometry, update strategy, context policy and memory put together."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Literal

from edgekv.errors import ContextFullError, UsageError
from edgekv.kv.arena import Arena
from edgekv.kv.geometry import Geometry
from edgekv.kv.group import Group
from edgekv.kv.mirror import Mirror
from edgekv.kv.pointer_shift import DEFAULT_RESERVE, PointerShift
from edgekv.kv.policy import PolicyName, find_policy
from edgekv.kv.shift_concat import ShiftConcat
from edgekv.kv.slot import Slot
from edgekv.kv.stats import CacheStats
from edgekv.kv.strategy import Strategy
from edgekv.kv.window import Window

StrategyName = Literal["pointer-shift", "slot", "mirror", "shift-concat"]
STRATEGIES: tuple[StrategyName, ...] = ("pointer-shift", "slot", "mirror", "shift-concat")


def make_strategy(
    name: str, geometry: Geometry, *, max_ar: int, reserve: Fraction | float = DEFAULT_RESERVE
) -> Strategy:
    """An update strategy by name; `reserve` matters to `pointer-shift` alone.

    Raises:
        UsageError: no such strategy, `mirror` for keys as columns, or a reserve that is not above 1 and at most 2.
    """
    if name == "pointer-shift":
        return PointerShift(geometry, reserve, max_ar=max_ar)
    if name == "slot":
        return Slot(geometry, max_ar=max_ar)
    if name == "shift-concat":
        return ShiftConcat(geometry, max_ar=max_ar)
    if name == "mirror" and geometry.key_layout == "rows":
        return Mirror(geometry, max_ar=max_ar)
    if name == "mirror":
        raise UsageError(
            "update strategy",
            found="mirror with keys as columns",
            wanted="keys as rows",
            way_out="Use pointer-shift or slot, or export keys as rows.",
        )
    names = " or ".join(STRATEGIES)
    raise UsageError("update strategy", found=repr(name), wanted=names, way_out=f"Use {names}.")


class KVCache:
    """The past of one sequence, shared by graphs of several AR.

    A step is `window(ar)`, then the graph, which reads and writes the arena where the window says, then `commit(n)`
    for its n real tokens. Rows that the graph wrote for the other AR-n are garbage that later steps overwrite. Every
    call is checked before a byte moves: a refused call changes nothing.

    Attributes:
        geometry: the sizes.
        ar: tokens per inference of the graphs, ascending.
        stores: the memory: one store for all tensors, or keys as columns, then values.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        ar: Iterable[int],
        strategy: str = "pointer-shift",
        reserve: Fraction | float = DEFAULT_RESERVE,
        policy: str = "fail",
    ) -> None:
        """Allocate an empty cache.

        Args:
            geometry: the sizes.
            ar: tokens per inference of each graph that will use the cache; 1 to S-1.
            strategy: one of `STRATEGIES`.
            reserve: memory of `pointer-shift`, in units of S-1 rows per tensor; above 1, at most 2.
            policy: `fail` (a context of S tokens in all) or `sliding-window` (the S-1 newest tokens are held).

        Raises:
            UsageError: an unknown strategy or policy, or a reserve out of range.
            ValueError: no AR, or one out of range.
        """
        self.geometry = geometry
        self.ar = tuple(sorted(set(ar)))
        if not self.ar:
            raise ValueError("ar: found none; wanted the tokens per inference of at least one graph")
        for tokens in self.ar:
            geometry.past_rows(tokens)
        self._policy = find_policy(policy)
        self._capacity = self._policy.capacity(geometry.context)
        self._strategy = make_strategy(strategy, geometry, max_ar=self.ar[-1], reserve=reserve)
        self._group = Group(geometry, self._strategy, self.ar)
        self.stores = self._group.stores
        self._open_ar: int | None = None
        self._tokens_seen = 0
        self._steps = 0
        self._tokens_committed = 0

    @property
    def arena(self) -> Arena:
        """The memory of a cache whose tensors all lie row by row.

        Raises:
            ValueError: keys lie column by column, so that there are several stores.
        """
        (store,) = self.stores if len(self.stores) == 1 else (None,)
        if not isinstance(store, Arena):
            raise ValueError(f"arena: found {len(self.stores)} stores; wanted one that holds all tensors row by row")
        return store

    @property
    def policy(self) -> PolicyName:
        """The context policy."""
        return self._policy.name

    @property
    def length(self) -> int:
        """Tokens held: at most S with `fail` (then no step may run), S-1 with `sliding-window`."""
        return self._strategy.length

    @property
    def tokens_seen(self) -> int:
        """Absolute position of the next token; with `sliding-window` it grows past S."""
        return self._tokens_seen

    @property
    def stats(self) -> CacheStats:
        """Counters, as they stand now."""
        return CacheStats(
            bytes_copied=sum(store.bytes_copied for store in self.stores),
            copies=sum(store.copies for store in self.stores),
            steps=self._steps,
            tokens=self._tokens_committed,
            bytes_held=sum(store.bytes_held for store in self.stores),
        )

    def held_rows(self) -> list[int]:
        """The arena rows of the tokens held, oldest token first."""
        return self._strategy.held_rows()

    def room(self, ar: int) -> bool:
        """Whether a step with the AR-`ar` graph may run now.

        Raises:
            ValueError: the cache was not made for such a graph.
        """
        self._check_ar(ar)
        return self._policy.admits(self.geometry.context, self._strategy.length, ar)

    def window(self, ar: int) -> Window:
        """Open a step with the AR-`ar` graph, which may copy rows, and say where it reads and writes.

        A step that was opened before and not committed is dropped.

        Raises:
            ContextFullError: the policy is `fail` and there is no room.
            ValueError: the cache was not made for such a graph.
        """
        if not self.room(ar):
            raise self._full(ar)
        self._open_ar = ar
        return self._group.window(ar)

    def commit(self, n: int) -> None:
        """Keep the first n new rows of the step that is open, and close it.

        Raises:
            ValueError: no step is open, or n is not 0 to its AR.
        """
        if self._open_ar is None:
            raise ValueError(f"commit: found {n} tokens but no open step; wanted a call of window(ar) before")
        if not 0 <= n <= self._open_ar:
            raise ValueError(f"commit: found {n} tokens; wanted 0 to {self._open_ar}, the AR of the open step")
        evicted = max(0, self._strategy.length + n - self._capacity)
        self._group.commit(n, evicted)
        self._open_ar = None
        self._tokens_seen += n
        self._steps += 1
        self._tokens_committed += n

    def rewind(self, n: int) -> None:
        """Drop the n newest tokens, and the step that is open, if any. Tokens that left the window stay lost.

        Raises:
            ValueError: n is not 0 to `length`.
        """
        if not 0 <= n <= self._strategy.length:
            raise ValueError(f"rewind: found {n} tokens; wanted 0 to {self._strategy.length}, the tokens held")
        self._group.rewind(n)
        self._open_ar = None
        self._tokens_seen -= n

    def reset(self) -> None:
        """Drop all tokens, and the step that is open, if any; the next token stands at position 0."""
        self._group.reset()
        self._open_ar = None
        self._tokens_seen = 0

    def _check_ar(self, ar: int) -> None:
        if ar not in self.ar:
            raise ValueError(f"ar: found {ar}; wanted one of {', '.join(map(str, self.ar))}, as the cache was made")

    def _full(self, ar: int) -> ContextFullError:
        context, length = self.geometry.context, self._strategy.length
        smaller = [a for a in self.ar if self._policy.admits(context, length, a)]
        retry = f"Run a graph of at most {smaller[-1]} tokens per inference, choose" if smaller else "Choose"
        return ContextFullError(
            f"context of {context} tokens",
            found=f"{length} tokens held",
            wanted=f"at most {context - ar} before a step of AR-{ar}",
            way_out=f"{retry} the policy sliding-window, or export with a larger --context.",
        )
