"""The KV cache of one sequence: geometry, update strategy, context policy and memory put together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path

from edgekv.errors import ContextFullError
from edgekv.kv.arena import Arena
from edgekv.kv.group import Group, HeldKeys
from edgekv.kv.growth import Footprint, Growth, single_layers
from edgekv.kv.policies.keydiff import mean_similarity
from edgekv.kv.policies.policy import Policy, PolicyName, SlidingWindow, check_layers, find_policy
from edgekv.kv.policies.rotation import KvEncoding, Rotation
from edgekv.kv.positions import Positions
from edgekv.kv.rows import RowArena
from edgekv.kv.state import CacheState, StateError, read_state, write_state
from edgekv.kv.stats import CacheStats
from edgekv.kv.strategies import make_strategy
from edgekv.kv.strategies.pointer_shift import DEFAULT_RESERVE
from edgekv.kv.strategies.strategy import Window
from edgekv.spec.geometry import Geometry
from edgekv.spec.layers import LayeredGeometry


class KVCache:
    """The past of one sequence, shared by graphs of several AR and of contexts up to the cache's own.

    A step is `window(ar)`, then the graph, which reads and writes the arenas where the windows say, then `commit(n)`
    for its n real tokens. Rows that the graph wrote for the other AR-n are garbage that later steps overwrite. Every
    call is checked before a byte moves: a refused call changes nothing.

    Layers that differ stand in groups, each with a strategy and memory of its own. The context policy speaks of the
    groups that attend to the whole context; one that attends to W tokens holds the newest W-1 under any policy.

    A graph of a smaller context works on the same memory: what it reads is a part of what the largest would read, so
    the graph of the next larger context takes over without a copy. Keys as columns are the exception: the context is
    the distance of their dimensions.

    With a `Growth` each layer that attends to the whole context is a group, whose memory is replaced by a larger one
    as tokens come. Sessions are still bound to the old memory, so it lives until the step ends. Memory never shrinks:
    after `reset` the next text finds it.

    Attributes:
        geometry: the sizes.
        ar: tokens per inference of the graphs, ascending.
        groups: layers that are alike; one group for a plain geometry that does not grow.
        encodings: what the integers of each tensor stand for, in the order of the groups' names; empty if unknown.
    """

    def __init__(
        self,
        geometry: Geometry | LayeredGeometry,
        *,
        ar: Iterable[int],
        strategy: str = "pointer-shift",
        reserve: Fraction | float = DEFAULT_RESERVE,
        policy: str | Policy = "fail",
        encodings: Sequence[KvEncoding] = (),
        growth: Growth | None = None,
    ) -> None:
        """Allocate an empty cache.

        Args:
            geometry: the sizes.
            ar: tokens per inference of each graph that will use the cache; 1 to S-1, less than each layer's window.
            strategy: one of `STRATEGIES`.
            reserve: memory of `pointer-shift`, in units of S-1 rows per tensor; above 1, at most 2.
            policy: `fail` (a context of S tokens in all), `sliding-window` (the S-1 newest tokens are held), or a
                `Sinks` or `KeyDiff`.
            encodings: of each tensor, in the order of the groups' names. States are checked against them, and the
                error of rotated keys is reported in real numbers; without them zero points are the geometry's.
            growth: how memory grows, with `slot` and `pointer-shift`, up to the geometry's context; None allocates
                all of it now.

        Raises:
            UsageError: an unknown strategy or policy, numbers out of range, `Sinks` over layers whose windows
                differ, or growth with another strategy, keys as columns, or more layers than it has tokens for;
                also what `RowArena` raises.
            ValueError: no AR, one out of range, a wrong number of encodings, or growth to another context.
        """
        geometries = geometry.groups()
        self.geometry = geometry
        self.ar = tuple(sorted(set(ar)))
        if not self.ar:
            raise ValueError("ar: got none; expected the tokens per inference of at least one graph")
        for each in geometries:
            for tokens in self.ar:
                each.past_rows(tokens, geometry.context)
        tensors = sum(each.tensors for each in geometries)
        if encodings and len(encodings) != tensors:
            raise ValueError(f"encodings: got {len(encodings)}; expected one for each of {tensors} tensors")
        self.encodings = tuple(encodings)
        self._policy = find_policy(policy)
        check_layers(self._policy, geometries, geometry.context, self.ar[-1])
        self._rotation = Rotation(self._policy.inverse_frequencies) if self._policy.inverse_frequencies else None
        self._growth = growth
        if growth is not None:
            growth.check(geometries, geometry.context, self.ar[-1], strategy)
            geometries = single_layers(geometries, geometry.context)
        self.groups = tuple(self._group(each, strategy, reserve) for each in geometries)
        self._wide = tuple(group for group in self.groups if group.geometry.context == geometry.context)
        self._footprint = Footprint(self.groups, self._wide, growth)
        self._open_ar: int | None = None
        self._positions = Positions()
        self._tokens_seen = 0
        self._steps = 0
        self._tokens_committed = 0
        self._evicted = 0
        self._is_prefix = True

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """The memory of all groups: for each one arena, or keys as columns, then values."""
        return tuple(arena for group in self.groups for arena in group.arenas)

    @property
    def arena(self) -> RowArena:
        """The memory of a cache whose tensors are all alike.

        Raises:
            ValueError: layers differ, or keys lie column by column, so that there are several arenas.
        """
        arenas = self.arenas
        if len(arenas) != 1 or not isinstance(arenas[0], RowArena):
            raise ValueError(f"arena: got {len(arenas)} arenas; expected one that holds all tensors row by row")
        return arenas[0]

    @property
    def policy(self) -> PolicyName:
        """The context policy."""
        return self._policy.name

    @property
    def length(self) -> int:
        """Tokens held: at most S, or S-1 with `sliding-window`. With `fail`, no step may run when there are S."""
        return self._positions.length

    @property
    def is_whole(self) -> bool:
        """Whether no token has left any layer, so that a rewind leaves what was there before."""
        return all(group.length == self._tokens_seen for group in self.groups)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows that hold a token; `stats.bytes_held` counts all that is allocated."""
        return sum(group.length * group.geometry.tensors * group.geometry.row_bytes for group in self.groups)

    @property
    def tokens_seen(self) -> int:
        """Tokens of the text so far; it grows past S where the policy allows."""
        return self._tokens_seen

    @property
    def is_prefix(self) -> bool:
        """Whether the tokens held are a text from its beginning on, each computed in sight of all before it."""
        return self._is_prefix

    @property
    def capacity(self) -> int:
        """The most tokens held."""
        return self._policy.capacity(self.geometry.context)

    @property
    def position(self) -> int:
        """Position of the next token, for its rotary embedding, once the window of its step is open.

        It is `tokens_seen`, unless the policy moves tokens to other positions.
        """
        return self._positions.next

    @property
    def positions(self) -> list[int]:
        """Position of each token held, oldest first."""
        return self._positions.listed()

    @property
    def stats(self) -> CacheStats:
        """Counters, as they stand now."""
        arenas = self.arenas
        return CacheStats(
            bytes_copied=sum(arena.bytes_copied for arena in arenas),
            copies=sum(arena.copies for arena in arenas),
            steps=self._steps,
            tokens=self._tokens_committed,
            bytes_held=self._footprint.bytes_held,
            peak_bytes=self._footprint.peak_bytes,
            reallocations=sum(group.reallocations for group in self.groups),
            evicted=self._evicted,
            requantization=self._rotation.cost if self._rotation else None,
        )

    def held_rows(self) -> list[int]:
        """The rows of the tokens held, oldest first, in the layers that attend to the whole context."""
        return self._wide[0].strategy.held_rows()

    def room(self, ar: int) -> bool:
        """Whether a step with the AR-`ar` graph may run now.

        Raises:
            ValueError: the cache was not made for such a graph.
        """
        self._check_ar(ar)
        return self._policy.admits(self.geometry.context, self.length, ar)

    def window(self, ar: int, context: int | None = None) -> tuple[Window, ...]:
        """Open a step with the AR-`ar` graph, which may copy rows, and say where it reads and writes in each group.

        A step that was opened before and not committed is dropped. Tokens that the policy evicts leave here. Memory
        that grows does so here.

        Args:
            ar: tokens per inference.
            context: S of the graph; None for the largest. A smaller one has room for the tokens held and AR new ones.

        Raises:
            ContextFullError: the policy is `fail` and there is no room.
            ValueError: the cache was not made for such a graph, or its context is too small.
        """
        if not self.room(ar):
            raise self._full(ar)
        most = self.geometry.context
        context = most if context is None else context
        if context != most and not self.length + ar <= context <= most:
            raise ValueError(f"context: got {context}; expected {self.length + ar}, tokens held and new, to {most}")
        if ages := self._policy.leaving(most, self.length, ar, self._similarity):
            self._evict(ages)
        if self.length < self._tokens_seen or self.length > most - ar:
            self._is_prefix = False  # the graph does not see all that came before
        self._footprint.free_outgrown()
        self._footprint.grow(self.length + ar, context)
        self._open_ar = ar
        return tuple([group.window(ar, context) for group in self.groups])

    def commit(self, n: int) -> None:
        """Keep the first n new rows of the step that is open, and close it.

        Raises:
            ValueError: no step is open, or n is not 0 to its AR.
        """
        if self._open_ar is None:
            raise ValueError(f"commit: got {n} tokens but no open step; expected a call of window(ar) before")
        if not 0 <= n <= self._open_ar:
            raise ValueError(f"commit: got {n} tokens; expected 0 to {self._open_ar}, the AR of the open step")
        evicted = max(0, self.length + n - self.capacity)
        self._is_prefix = self._is_prefix and not evicted
        self._positions.commit(n, evicted)
        for group in self.groups:
            group.commit(n, group.evicted_by(n))
        self._close()
        self._tokens_seen += n
        self._steps += 1
        self._tokens_committed += n

    def rewind(self, n: int) -> None:
        """Drop the n newest tokens, and the step that is open, if any. Tokens that left the window stay lost.

        Raises:
            ValueError: n is not 0 to `length`, or so many tokens were not held in a row: a layer's window is smaller,
                or a policy has evicted one between them.
        """
        most = min(self._positions.rewindable, *[group.length for group in self.groups])
        if not 0 <= n <= most:
            raise ValueError(f"rewind: got {n} tokens; expected 0 to {most}, the tokens held in a row")
        for group in self.groups:
            group.rewind(n)
        self._positions.rewind(n)
        self._close()
        self._tokens_seen -= n

    def reset(self) -> None:
        """Drop all tokens, and the step that is open, if any; the next token stands at position 0. Memory stays."""
        for group in self.groups:
            group.reset()
        self._positions.reset()
        self._close()
        self._tokens_seen = 0
        self._is_prefix = True

    def hold(self, tokens: int) -> None:
        """Hold the first `tokens` tokens of a text and no others; whoever says so writes their rows then.

        Raises:
            ValueError: the policy does not allow so many.
        """
        if not 0 <= tokens <= self.capacity:
            raise ValueError(f"hold: got {tokens} tokens; expected 0 to {self.capacity}")
        self.reset()
        self._footprint.grow(tokens, one_by_one=True)
        for group in self.groups:
            group.reset(min(tokens, group.capacity))
        self._positions.commit(tokens, 0)
        self._tokens_seen = tokens

    def expect(self, tokens: int) -> None:
        """Say that so many tokens come next, as of a prompt: an empty cache that grows has room for them at once.

        What holds tokens grows step by step. A layer has let go of its memory before the next one grows.
        """
        if self.length == 0:
            self._close()
            self._footprint.grow(tokens, one_by_one=True)

    @property
    def state(self) -> CacheState:
        """A copy of the tokens held and of where they stand in the text. The step that is open is no part of it."""
        return CacheState(
            sizes=self._sizes(),
            encodings=self._named_encodings(),
            positions=tuple(self._positions.listed()),
            position=self._positions.next,
            rewindable=self._positions.rewindable,
            tokens_seen=self._tokens_seen,
            rows={name: rows for group in self.groups for name, rows in group.read()},
        )

    def restore(self, state: CacheState) -> None:
        """Hold the tokens of a state and no others. The statistics go on.

        Raises:
            StateError: it is of another geometry or encoding, or holds more tokens than the policy allows.
        """
        for field, found, wanted in (
            ("geometry", state.sizes, self._sizes()),
            ("encodings", state.encodings, self._named_encodings()),
        ):
            if found != wanted:
                raise StateError(f"state: {field}", got=found, expected=wanted, fix="Use a cache of the same model.")
        for group in self.groups:
            group.check(state, len(state.positions) if group in self._wide else None)
        self._close()
        self._footprint.grow(len(state.positions), one_by_one=True)
        for group in self.groups:
            group.write(state.rows)
        self._positions.restore(state.positions, state.position, state.rewindable)
        self._tokens_seen = state.tokens_seen
        self._is_prefix = False

    def save(self, file: str | Path, *, fingerprint: str) -> None:
        """Write `state`; see `write_state`."""
        write_state(self.state, file, fingerprint=fingerprint)

    def load(self, file: str | Path, *, fingerprint: str) -> None:
        """Restore what `save` wrote, of a cache with any strategy and key layout.

        Raises:
            StateError: the file is damaged, or of another fingerprint, geometry or encoding; nothing is changed then.
        """
        self.restore(read_state(file, fingerprint=fingerprint))

    def _group(self, geometry: Geometry, strategy: str, reserve: Fraction | float) -> Group:
        is_wide = geometry.context == self.geometry.context
        policy = self._policy if is_wide else SlidingWindow()
        context = self._growth.contexts[0] if self._growth and is_wide else self.geometry.context
        # No closure over the cache: the last reference to it must free its memory.
        make = partial(make_strategy, strategy, max_ar=self.ar[-1], reserve=reserve)
        return Group(geometry, make, self.ar, policy.capacity(geometry.context), context)

    def _close(self) -> None:
        """End the step that is open, if any, and let go of what it outgrew."""
        self._open_ar = None
        self._footprint.free_outgrown()

    def _evict(self, ages: Sequence[int]) -> None:
        for group in self._wide:
            group.drop(ages)
        self._positions.drop(ages)
        self._evicted += len(ages)
        if self._rotation is not None:
            self._renumber(self._rotation)

    def _renumber(self, rotation: Rotation) -> None:
        moved = self._positions.renumber()
        ages = [age for age, by in enumerate(moved) if by]
        if not ages:
            return
        angles = rotation.angles([moved[age] for age in ages])
        for key in self._keys():
            rows = [key.rows[age] for age in ages]
            turned = rotation.turn(key.arena.read(key.tensor, rows), key.zero_point, key.scale, angles)
            key.arena.write(key.tensor, rows, turned)

    def _similarity(self) -> Sequence[float]:
        keys = ((key.arena.read(key.tensor, key.rows), key.zero_point) for key in self._keys())
        return [float(score) for score in mean_similarity(keys)]

    def _sizes(self) -> dict[str, object]:
        """What a state must agree with: everything but how keys lie."""
        layers = {
            str(number): [group.geometry.kv_heads, group.geometry.head_dim, group.geometry.context]
            for group in self.groups
            for number in group.geometry.numbers or range(group.geometry.layers)
        }
        return {"context": self.geometry.context, "kv_dtype": self.geometry.kv_dtype, "layers": layers}

    def _named_encodings(self) -> dict[str, tuple[float, int]]:
        names = [tensor.past for group in self.groups for tensor in group.geometry.names()]
        pairs = [(each.scale, each.zero_point) for each in self.encodings]
        return dict(zip(names, pairs, strict=True)) if pairs else {}

    def _keys(self) -> Iterator[HeldKeys]:
        """The keys of the layers that attend to the whole context, tensor by tensor."""
        start = 0
        for group in self.groups:
            if group in self._wide:
                yield from group.keys(self.encodings[start : start + group.geometry.tensors])
            start += group.geometry.tensors

    def _check_ar(self, ar: int) -> None:
        if ar not in self.ar:
            raise ValueError(f"ar: got {ar}; expected one of {', '.join(map(str, self.ar))}, as the cache was made")

    def _full(self, ar: int) -> ContextFullError:
        context, length = self.geometry.context, self.length
        smaller = [a for a in self.ar if self._policy.admits(context, length, a)]
        retry = f"Run a graph of at most {smaller[-1]} tokens per inference, choose" if smaller else "Choose"
        return ContextFullError(
            f"context of {context} tokens",
            got=f"{length} tokens held",
            expected=f"at most {context - ar} before a step of AR-{ar}",
            fix=f"{retry} the policy sliding-window, or export with a larger --context.",
        )
