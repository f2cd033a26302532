"""The KV cache of one sequence: geometry, update strategy, context policy and memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction

from edgekv.errors import ContextFullError
from edgekv.kv.arena import Arena, Rows
from edgekv.kv.cache_memory import CacheMemory
from edgekv.kv.delta_group import CheckpointGroup, TailGroup
from edgekv.kv.eviction import Eviction
from edgekv.kv.growth import AT_ONCE, Allocation
from edgekv.kv.policies.policy import Policy, PolicyName, check_layers, find_policy
from edgekv.kv.policies.rotation import KvEncoding, Requantization
from edgekv.kv.rows import RowArena, RowGroup
from edgekv.kv.sink import Sink
from edgekv.kv.state import CacheState, StateError
from edgekv.kv.state_group import StateGroup
from edgekv.kv.strategies.strategy import Window
from edgekv.spec.geometry import CHECKPOINT_TOKENS
from edgekv.spec.layers import Geometry


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the cache was created; `reset` and `rewind` subtract nothing.

    Attributes:
        bytes_copied: bytes that the cache itself has copied, of all tensors; rows that a graph writes in place
            are not copied, and keys that a policy rotates are counted below.
        copies: copies of one range of rows in all tensors: slides of a pointer-shift, writes of a slot, moves of a
            group of layers to larger memory.
        steps: steps committed.
        tokens: tokens committed.
        bytes_held: bytes allocated, including scratch and alignment.
        peak_bytes: maximum bytes allocated; more than `bytes_held` if memory grew.
        reallocations: how often the memory of a layer was replaced by a larger one.
        evicted: tokens that the policy evicted from the layers that attend to the whole context.
        requantization: rounding error of rotating keys, if the policy does so.
    """

    bytes_copied: int
    copies: int
    steps: int
    tokens: int
    bytes_held: int
    peak_bytes: int
    reallocations: int = 0
    evicted: int = 0
    requantization: Requantization | None = None


class KVCache:
    """The keys and values of one sequence, shared by graphs of several AR and contexts.

    A step is `window(ar)`, then the graph, which reads and writes the arenas at the windows, then `commit(n)` for its n
    real tokens. Later steps overwrite the other AR-n rows. Every call checks its arguments before it changes anything.
    One that is interrupted while it moves rows leaves the cache `dirty`: only `reset`, `hold` and `restore` are
    accepted then.

    Layers that differ are in separate groups, each with its own strategy and memory. The context policy applies to
    the groups that attend to the whole context; a group with a window of W tokens always keeps the newest W-1.

    Graphs of a smaller context use the same memory, so switching to the next larger context copies nothing. Keys as
    columns are the exception, because the context is the stride between their dimensions.

    With a `Growth`, each layer that attends to the whole context is a group whose memory is reallocated when it is
    outgrown. The old memory is kept until the step ends, because sessions are still bound to it. Memory never shrinks.

    Attributes:
        geometry: the sizes.
        ar: tokens per inference of the graphs, ascending.
        policy: the context policy.
        capacity: maximum number of tokens held.
        groups: groups of equal layers; one group for a plain geometry that does not grow.
        row_groups: those of them with attention, which have a row per token.
        encodings: encoding of each tensor, in the order of the groups' names; empty if unknown.
        sink: the tokens that an empty cache holds; None if it holds none.
        dirty: whether a change was interrupted, so that rows may not be those of the tokens that the cache counts.
        is_prefix: whether the tokens held are the whole text so far, each computed with all previous tokens visible.
        revision: number of changes of what is held.
    """

    def __init__(
        self,
        geometry: Geometry,
        *,
        ar: Iterable[int],
        strategy: str | None = None,
        reserve: Fraction | float | None = None,
        policy: str | Policy = "fail",
        encodings: Sequence[KvEncoding] = (),
        sink: Sink | None = None,
        allocation: Allocation = AT_ONCE,
    ) -> None:
        """Allocate an empty cache.

        Args:
            geometry: the sizes.
            ar: tokens per inference of each graph that will use the cache; 1 to S-1, below each layer's window.
            strategy: one of `STRATEGIES`; None for `default_strategy`.
            reserve: memory of `pointer-shift`, in units of S-1 rows per tensor; above 1, at most 2; None for 2.
            policy: `fail`, `sliding-window`, or a `Sinks` or `KeyDiff`.
            encodings: encoding of each tensor, in the order of the groups' names. Saved states are checked against
                them, and the error of rotated keys is reported in real numbers. Without them, zero points are the
                geometry's.
            sink: tokens that every sequence begins with; they count as tokens held and are never dropped from layers
                that attend to the whole context.
            allocation: where memory comes from, all of it now or as it is needed.

        Raises:
            UsageError: an unknown strategy or policy, numbers out of range, `Sinks` over layers whose windows
                differ, a policy that would drop the sink, or a growth that does not fit; also what `RowArena` raises.
            ValueError: no AR, one out of range, a wrong number of encodings, or growth to another context.
        """
        self.geometry = geometry
        self._context = geometry.context
        self.ar = tuple(sorted(set(ar)))
        if not self.ar:
            raise ValueError("ar: got none; expected the tokens per inference of at least one graph")
        if encodings and len(encodings) != (tensors := geometry.tensors):
            raise ValueError(f"encodings: got {len(encodings)}; expected one for each of {tensors} tensors")
        self.encodings = tuple(encodings)
        self.sink = sink
        chosen = find_policy(policy) if sink is None else find_policy(policy).keeping(len(sink.tokens))
        check_layers(chosen, geometry.rows(), geometry.context, self.ar[-1])
        self.policy: PolicyName = chosen.name
        self.capacity = chosen.capacity(geometry.context)
        self._evicts = chosen.evicts
        self._first = 0 if sink is None else len(sink.tokens)
        self._memory = CacheMemory(geometry, self.ar, strategy, reserve, chosen, allocation, self.encodings)
        self.groups = self._memory.groups
        self.row_groups = self._memory.rows
        self._states = [group for group in self.groups if isinstance(group, StateGroup | TailGroup | CheckpointGroup)]
        self._has_checkpoints = any(isinstance(group, CheckpointGroup) for group in self.groups)
        self._open_ar: int | None = None
        self._positions = Positions()
        self._eviction = Eviction(chosen, self._memory, self.encodings)
        self._steps = 0
        self._tokens_committed = 0
        self.is_prefix = True
        self.revision = 0
        self.dirty = False
        self.reset()

    @property
    def arenas(self) -> tuple[Arena, ...]:
        """Memory of all groups: one arena each, or two (keys as columns, then values)."""
        return self._memory.arenas

    @property
    def arena(self) -> RowArena:
        """The only arena of keys and values; ValueError if layers with attention differ or keys are columns."""
        arenas = [arena for group in self.row_groups for arena in group.arenas]
        if len(arenas) != 1 or not isinstance(arenas[0], RowArena):
            raise ValueError(f"arena: got {len(arenas)} arenas; expected one that holds all keys and values row by row")
        return arenas[0]

    @property
    def newest_states(self) -> Rows | None:
        """A copy of the states that the next token reads, `[N, K-1, H]`; None without layers that have some."""
        first = self._states[0] if self._states else None
        return first.newest() if isinstance(first, StateGroup) else None

    @property
    def length(self) -> int:
        """Tokens held: at most S, or S-1 with `sliding-window`. With `fail`, no step may run when there are S."""
        return self._positions.length

    @property
    def is_whole(self) -> bool:
        """Whether no layer has evicted a token, so that a rewind restores an earlier state."""
        return all(group.can_rewind(0, self._positions.seen) for group in self.groups)

    @property
    def used_bytes(self) -> int:
        """Bytes of the rows in use; `bytes_held` counts all allocated bytes."""
        return sum(group.nbytes for group in self.groups)

    @property
    def bytes_held(self) -> int:
        """Bytes allocated."""
        return self._memory.bytes_held

    @property
    def tokens_seen(self) -> int:
        """Tokens of the text so far; it grows past S where the policy allows."""
        return self._positions.seen

    @property
    def position(self) -> int:
        """Position of the next token, valid once its window is open: `tokens_seen` unless the policy moves tokens."""
        return self._positions.next

    @property
    def positions(self) -> list[int]:
        """Position of each token held, oldest first."""
        return self._positions.listed()

    @property
    def stats(self) -> CacheStats:
        """Counters."""
        memory, rotation = self._memory, self._eviction.rotation
        return CacheStats(
            bytes_copied=sum([arena.bytes_copied for arena in memory.arenas]),
            copies=sum([arena.copies for arena in memory.arenas]),
            steps=self._steps,
            tokens=self._tokens_committed,
            bytes_held=memory.bytes_held,
            peak_bytes=memory.peak_bytes,
            reallocations=sum([group.reallocations for group in memory.groups]),
            evicted=self._eviction.evicted,
            requantization=None if rotation is None else rotation.cost,
        )

    def held_rows(self) -> list[int]:
        """The rows of the tokens held, oldest first, in the layers that attend to the whole context."""
        return self._memory.wide[0].strategy.held_rows()

    def room(self, ar: int) -> bool:
        """Whether an AR-`ar` step may run now. Raises ValueError if the cache was not made for so many tokens."""
        if not 1 <= ar <= self.ar[-1]:
            raise ValueError(f"ar: got {ar}; expected 1 to {self.ar[-1]}, as the cache was made")
        return self._evicts or self.length <= self._context - ar

    def refusal(self, ar: int) -> ContextFullError:
        """The error of an AR-`ar` step that has no room."""
        return self._eviction.refusal(self._context, self.length, self.ar, ar)

    @property
    def step_tokens(self) -> int:
        """The most tokens that the next step can keep: up to the next checkpoint, if layers have some."""
        if not self._has_checkpoints:
            return self.ar[-1]
        return CHECKPOINT_TOKENS - self._positions.seen % CHECKPOINT_TOKENS

    @property
    def room_tokens(self) -> int | None:
        """How many more tokens can be run; None if the policy makes room."""
        return None if self._evicts else self._context - self.length

    @property
    def appends(self) -> bool:
        """Whether graphs can append to it themselves: all layers attend, and the next row of each is free."""
        return all(isinstance(group, RowGroup) and group.appends for group in self.groups)

    def append_in_place(self) -> tuple[Window, ...]:
        """The windows of the open AR-1 step for a graph that appends to the cache itself."""
        return tuple(group.append_in_place() for group in self.row_groups)

    def window(self, ar: int, context: int | None = None, block: int = 0) -> tuple[Window, ...]:
        """Open a step of the AR-`ar` graph: evict, grow and copy as needed; return its windows, one per group.

        An open step that was not committed is dropped.

        Args:
            ar: tokens per inference.
            context: S of the graph; None for the largest. It must have room for the tokens held and AR new ones.
            block: past rows are read up to the last one in use, in a multiple of this number; 0 to read all.

        Raises:
            ContextFullError: the policy is `fail` and there is no room.
            ValueError: the cache is dirty or was not made for so many tokens, or its context is too small.
        """
        self._check_clean("window")
        if not self.room(ar):
            raise self.refusal(ar)
        most, context = self._context, context or self._context
        if context != most and not self.length + ar <= context <= most:
            raise ValueError(f"context: got {context}; expected {self.length + ar}, tokens held and new, to {most}")
        positions = self._positions
        self.dirty = True
        if positions.length > most - ar:
            self._make_room()
        if positions.length < positions.seen or positions.length > most - ar:
            self.is_prefix = False  # the graph does not see all previous tokens
        if self._memory.grows:
            self._memory.free_outgrown()
            self._memory.grow(positions.length + ar, context)
        self._open_ar = ar
        windows = []
        for group in self.groups:
            windows.append(group.window(ar, context, block))
        self.dirty = False
        return tuple(windows)

    def commit(self, kept: int | Sequence[int]) -> None:
        """Append new rows of the step that is open, and close it.

        Args:
            kept: how many of the first rows; or which rows, ascending. Those behind a gap are copied together first.

        Raises:
            ValueError: the cache is dirty, no step is open, or it does not have these rows.
        """
        self._check_clean("commit")
        if self._open_ar is None:
            raise ValueError(f"commit: got {kept} but no open step; expected a call of window(ar) before")
        if not isinstance(kept, int) and [*kept] != sorted({*kept} & {*range(self._open_ar)}):
            raise ValueError(f"commit: got rows {kept}; expected ascending ones below {self._open_ar}, the AR")
        n = kept if isinstance(kept, int) else len(kept)
        most = min(self._open_ar, self.step_tokens)
        if not 0 <= n <= most:
            raise ValueError(f"commit: got {n} tokens; expected 0 to {most}, the AR of the open step or `step_tokens`")
        self.dirty = True
        if not isinstance(kept, int):
            self._compact(kept)
        evicted = max(0, self.length + n - self.capacity)
        self.is_prefix = self.is_prefix and not evicted
        self._positions.commit(n, evicted)
        self._eviction.evicted += evicted
        for group in self.groups:
            group.commit(n)
        self._close()
        self._steps += 1
        self._tokens_committed += n
        self.dirty = False

    def append(self, rows: Sequence[Rows]) -> None:
        """Append a token whose keys, values and states were computed elsewhere.

        Args:
            rows: `[N, D]` of each of `arenas`, a row of each tensor.

        Raises:
            ContextFullError: the policy is `fail` and there is no room.
            ValueError: the cache is dirty.
        """
        for place, new in zip(self.new_row(self.window(1), 0), rows, strict=True):
            place[:] = new
        self.commit(1)

    def new_row(self, windows: Sequence[Window], at: int) -> list[Rows]:
        """Where graphs write a new row of the open step, `[N, D]` in each of `arenas`; see `Arena`."""
        pairs = zip(self.groups, windows, strict=True)
        return [arena.new_row(window, at) for group, window in pairs for arena in group.arenas]

    def rewind(self, n: int) -> None:
        """Drop the n newest tokens, and the open step if any. Evicted tokens are not restored.

        Raises:
            ValueError: the cache is dirty, or n is above the tokens held in a row, which a layer's window, an eviction
                or the sink limits.
        """
        self._check_clean("rewind")
        most = min(self._positions.rewindable, self.length - self._first, *[group.length for group in self.groups])
        if not 0 <= n <= most:
            raise ValueError(f"rewind: got {n} tokens; expected 0 to {most}, the tokens held in a row")
        self.dirty = True
        for group in self.groups:
            group.rewind(n)
        self._positions.rewind(n)
        self._close()
        self.dirty = False

    def rewind_to(self, n: int) -> int:
        """Drop all but the first n tokens of the text; return how many are left, which are fewer where rows are gone.

        Tokens that a layer's window or the policy evicted do not come back, and a state only goes back as far as its
        tail. Then nothing is left but the sink, and the caller runs the others again.

        Raises:
            ValueError: the cache is dirty, or n is above the tokens of the text.
        """
        self._check_clean("rewind_to")
        seen = self._positions.seen
        if not 0 <= n <= seen:
            raise ValueError(f"rewind_to: got {n} tokens; expected 0 to {seen}, those of the text")
        if n == seen:
            return n
        if n <= self._first or not all(group.can_rewind(seen - n, seen) for group in self.groups):
            self.reset()
            return self._first
        self.rewind(seen - n)
        return n

    def reset(self) -> None:
        """Drop all tokens but the sink, and the open step if any. Memory stays allocated."""
        with self.hold(self._first):
            if self.sink is not None:
                for group in self.groups:
                    group.restore(self.sink.rows)

    @contextmanager
    def hold(self, tokens: int) -> Iterator[None]:
        """Hold the first `tokens` tokens of a text, whose rows the block writes; at most `capacity`.

        The cache stays dirty if the block does not end.
        """
        if not 0 <= tokens <= self.capacity:
            raise ValueError(f"hold: got {tokens} tokens; expected 0 to {self.capacity}")
        self.dirty = True
        self._close()
        self._memory.grow(tokens, one_by_one=True)
        for group in self.groups:
            group.reset(tokens)
        self._positions.reset(tokens)
        self.is_prefix = True
        yield
        self.dirty = False

    def expect(self, tokens: int) -> None:
        """Prepare for a prompt: an empty cache grows for all of its tokens, one layer after the other."""
        self._check_clean("expect")
        if self.length == self._first:
            self.dirty = True
            self._close()
            self._memory.grow(tokens, one_by_one=True)
            self.dirty = False

    @property
    def max_state_bytes(self) -> int:
        """Bytes that the rows of a state can have at most."""
        specs = [group.geometry for group in self.groups]
        return sum(spec.tensors * spec.read_rows * spec.row_bytes for spec in specs)

    @property
    def state(self) -> CacheState:
        """A copy of the rows and positions of the tokens held, without the open step; ValueError if it is dirty."""
        self._check_clean("state")
        positions = self._positions
        return CacheState(
            sizes=self._sizes,
            encodings=self._named_encodings,
            positions=tuple(positions.listed()),
            position=positions.next,
            rewindable=positions.rewindable,
            tokens_seen=positions.seen,
            rows={name: rows for group in self.groups for name, rows in group.snapshot().items()},
        )

    def restore(self, state: CacheState) -> None:
        """Replace the content by a saved state. Statistics continue.

        Raises:
            StateError: the state has another geometry or encoding, or tokens or positions that the policy never has.
        """
        self.check_state(state)
        self.dirty = True
        self._close()
        self._memory.grow(len(state.positions), one_by_one=True)
        for group in self.groups:
            group.restore(state.rows)
        self._positions.restore(state.positions, state.position, state.rewindable)
        self._positions.seen = state.tokens_seen
        self.is_prefix = False
        self.dirty = False

    @property
    def has_states(self) -> bool:
        """Whether some layers have a state."""
        return bool(self._states)

    def states(self, tokens: int) -> dict[str, Rows] | None:
        """A copy of the states after the first `tokens` tokens of the text; None if a tail no longer has them."""
        self._check_clean("states")
        seen = self._positions.seen
        if not all(group.can_rewind(seen - tokens, seen) for group in self._states):
            return None
        return {name: rows for group in self._states for name, rows in group.snapshot(seen - tokens).items()}

    def load_states(self, states: Mapping[str, Rows]) -> None:
        """Have these states, within a block of `hold`.

        Raises:
            StateError: they are of another model, or not after as many tokens; nothing has changed.
        """
        for group in self._states:
            group.check(states, self._positions.seen)
        for group in self._states:
            group.restore(states)

    @property
    def _sizes(self) -> dict[str, object]:
        """What a state and a cache must agree on: all sizes but the key layout."""
        layers = dict[str, list[list[object]]]()  # a layer may keep several kinds of tensors
        for spec in (group.geometry for group in self.groups):
            for number in spec.numbers or range(spec.layers):
                layers.setdefault(str(number), []).append([spec.heads, spec.width, spec.read_rows, *spec.kinds])
        return {"context": self._context, "kv_dtype": self.geometry.kv_dtype, "layers": layers}

    @property
    def _named_encodings(self) -> dict[str, tuple[float, int]]:
        """Scale and zero point by the name of the graph input; empty if they are unknown."""
        names = [tensor.past for group in self.groups for tensor in group.geometry.names()]
        pairs = [(encoding.scale, encoding.zero_point) for encoding in self.encodings]
        return dict(zip(names, pairs, strict=True)) if pairs else {}

    def check_state(self, state: CacheState) -> None:
        """Refuse a state that this cache cannot continue.

        Raises:
            StateError: as `restore`.
        """
        for field, held_part, expected in (
            ("geometry", state.sizes, self._sizes),
            ("encodings", state.encodings, self._named_encodings),
        ):
            if held_part != expected:
                raise StateError(
                    f"state: {field}", got=held_part, expected=expected, fix="Use a cache of the same model."
                )
        held, seen = len(state.positions), state.tokens_seen
        for part, number, least, most in (
            ("tokens_seen", seen, held, seen if self._evicts else held),
            ("position", state.position, held, seen),
            ("rewindable", state.rewindable, 0, held),
        ):
            if not least <= number <= most:
                limits = f"{least} to {most}, for {held} tokens held with the context policy {self.policy}"
                raise StateError(f"state: {part}", got=number, expected=limits, fix="Run the prompt again.")
        for group in self._states:
            group.check(state.rows, seen)
        for rows in self.row_groups:
            rows.check(state.rows, held if rows in self._memory.wide else None)

    def _make_room(self) -> None:
        """Evict the tokens that the policy selects; if it keeps positions below S, renumber and rotate the others."""
        ages = self._eviction.make_room(self.length)
        if ages:
            self._positions.drop(ages)
            if self._eviction.rotation is not None:
                self._eviction.rotate(self._positions.renumber())

    def _check_clean(self, what: str) -> None:
        if self.dirty:
            raise ValueError(f"{what}: got a dirty cache, whose last change was interrupted; expected reset() before")

    def _compact(self, kept: Sequence[int]) -> None:
        """Have the kept rows of the open step at its first ones."""
        gap = next((at for at, row in enumerate(kept) if row != at), len(kept))
        if gap < len(kept):
            for group in self.groups:
                group.compact(gap, kept[gap:])

    def _close(self) -> None:
        """Close the open step, if any, and free the memory that it outgrew: what is held changes."""
        self.revision += 1
        self._open_ar = None
        if self._memory.grows:
            self._memory.free_outgrown()


class Positions:
    """The positions of the tokens held, at which their keys were rotated.

    They ascend and the newest are consecutive, so only those before a gap are listed.

    Attributes:
        length: tokens held.
        next: position of the next token.
        seen: tokens of the text so far.
        rewindable: number of newest tokens that can be dropped without crossing an evicted one.
    """

    __slots__ = ("_older", "length", "next", "rewindable", "seen")

    def __init__(self) -> None:
        self.reset()

    def reset(self, tokens: int = 0) -> None:
        """Hold the first tokens of a text, at their own positions."""
        self.restore(range(tokens), tokens, tokens)
        self.seen = tokens

    def restore(self, positions: Sequence[int], next_position: int, rewindable: int) -> None:
        """Restore earlier values of `listed`, `next` and `rewindable`."""
        length = len(positions)
        start = length
        while start and positions[start - 1] == next_position - (length - start) - 1:
            start -= 1
        self.next = next_position
        self.rewindable = rewindable
        self.length = length
        self._older = list(positions[:start])

    def listed(self) -> list[int]:
        """Position of each token held, oldest first."""
        return [*self._older, *range(self.next - (self.length - len(self._older)), self.next)]

    def commit(self, tokens: int, evicted: int) -> None:
        """Append tokens and evict the oldest."""
        self.next += tokens
        self.seen += tokens
        self.length += tokens - evicted
        self.rewindable = min(self.rewindable + tokens, self.length)
        if self._older:
            del self._older[:evicted]

    def rewind(self, tokens: int) -> None:
        """Drop the newest tokens, at most `rewindable`."""
        self.next -= tokens
        self.seen -= tokens
        self.length -= tokens
        self.rewindable -= tokens

    def drop(self, ages: Sequence[int]) -> None:
        """Drop the tokens of these ages, ascending and at least one; the others keep their positions."""
        gone = set(ages)
        kept = [position for age, position in enumerate(self.listed()) if age not in gone]
        self.restore(kept, self.next, min(self.rewindable, self.length - 1 - ages[-1]))

    def renumber(self) -> list[int]:
        """Renumber the tokens held from position 0; return the shift of each token."""
        moved = [age - position for age, position in enumerate(self.listed())]
        self.restore(range(self.length), self.length, self.rewindable)
        return moved
