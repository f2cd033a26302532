"""A static graph on bound memory: tokens and a cache window in, logits out."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import GraphRecord, Manifest
from edgekv.errors import EngineError
from edgekv.kv import KVCache, Window
from edgekv.kv.memory import aligned_zeros
from edgekv.runtime.adapter import NO_ADAPTER, AdapterMemory
from edgekv.runtime.binding import Binding, BoundPart
from edgekv.runtime.expert_operands import RoutedExperts
from edgekv.spec import (
    CONV_ROWS,
    FLOAT,
    LAST_HIDDEN,
    LAYER_INPUTS_PORT,
    LOGITS_INDEX,
    MASK,
    STEP_KINDS,
    TARGET_HIDDEN,
    LayerSpec,
    rope_inputs,
)
from quant import DTYPES, Encoding

_ROW_BLOCK = 64  # other sizes cost time when they are bound


@dataclass(slots=True)
class StepTimes:
    """Sums over steps.

    Attributes:
        steps: steps run.
        run_ns: time within the runtime, ns.
        host_ns: all other time of the steps: inputs, bindings, copies of the cache, ns.
    """

    steps: int = 0
    run_ns: int = 0
    host_ns: int = 0

    def __add__(self, other: StepTimes) -> StepTimes:
        return StepTimes(self.steps + other.steps, self.run_ns + other.run_ns, self.host_ns + other.host_ns)

    def __sub__(self, earlier: StepTimes) -> StepTimes:
        return StepTimes(self.steps - earlier.steps, self.run_ns - earlier.run_ns, self.host_ns - earlier.host_ns)


class Embeddings(Protocol):
    """What the host looks embeddings up in: the bundle's table, or one with rows of pictures too."""

    def rows(self, tokens: Sequence[int]) -> NDArray[Any]:
        """The embeddings of tokens as graphs read them, `[T, hidden]`."""


@dataclass(frozen=True, slots=True)
class HostTables:
    """What the host looks up for the tokens of a step.

    Attributes:
        ropes: see `rope_tables`.
        embeddings: of tokens, if the graph reads them instead of ids.
        layer_inputs: see `Bundle.layer_inputs`; of a decoder that adds rows of pictures, those.
        positions: of some tokens along the three axes of `DecoderSpec.picture_axes`, `[T, 3]`, from that of the first
            on; None if they follow each other. None if all always do.
        whole: which tokens of a step attend to each other on both sides; None if none ever do.
    """

    ropes: Mapping[str, RopeTable]
    embeddings: Embeddings | None = None
    layer_inputs: Embeddings | None = None
    positions: Callable[[Sequence[int]], NDArray[np.int64] | None] | None = None
    whole: Callable[[Sequence[int]], list[slice]] | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A new token of a step, where tokens do not simply follow each other: of some sequence, and what it sees of it.

    Attributes:
        token: its id.
        position: absolute position.
        columns: past columns of its sequence; None for all that a token at its position sees.
        rows: new rows of its sequence, with its own.
        states: of the layers that have some, `[N, K-1, H]`, if it follows another sequence than the cache's.
    """

    token: int
    position: int
    columns: Sequence[int] | None
    rows: Sequence[int]
    states: NDArray[Any] | None = None


def whole_texts(texts: Sequence[Sequence[int]]) -> list[Row]:
    """The tokens of texts beside each other; each sees all of its own text, before it and behind it."""
    rows = list[Row]()
    for text in texts:
        own = range(len(rows), len(rows) + len(text))
        rows += [Row(token, position, [], own) for position, token in enumerate(text)]
    return rows


def tree_rows(tokens: Sequence[int], parents: Sequence[int], position: int) -> list[Row]:
    """Tokens that branch; each sees what is before it.

    Args:
        tokens: ids.
        parents: row of the token before each, lower than its own; -1 for the last one in the cache.
        position: absolute position of a token behind the cache.
    """
    rows: list[Row] = []
    for at, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        before = () if parent < 0 else rows[parent].rows
        rows.append(Row(token, position + len(before), None, (*before, at)))
    return rows


class StaticGraph:
    """A graph whose inputs and outputs are bound once. A step writes the small inputs and moves the cache's windows.

    Its parts run in order. The output of one part is the input of the next, in memory that both are bound to.

    Attributes:
        record: the graph's entry in the manifest.
        ar: tokens per inference.
        context: S.
        steps: steps run.
        clock: sums over steps, which other graphs may share; the caller that moves the cache adds that time.
        row_block: steps read the cache's rows in use, in a multiple of this number; 0 if they read all. It is 1 where
            drafts are verified: then a token is in the same column of all graphs.
        takes_fewer: whether a step has as many rows as tokens, instead of AR.
        appends: whether it writes new rows to the cache itself, behind those in use, all of which it reads.
    """

    def __init__(
        self,
        bindings: Sequence[Binding],
        manifest: Manifest,
        record: GraphRecord,
        cache: KVCache,
        tables: HostTables,
        adapter: AdapterMemory = NO_ADAPTER,
        clock: StepTimes | None = None,
    ) -> None:
        """Bind a loaded graph to a cache.

        Args:
            bindings: of its parts, in order.
            manifest: of the bundle.
            record: the graph's entry in the manifest.
            cache: see `use`.
            tables: what the host looks up.
            adapter: see `adapt`; graphs without slots need none.
            clock: counts its steps; None for one of its own.

        Raises:
            BundleError: the graph's inputs or outputs do not match the manifest.
        """
        self.record = record
        self.ar = record.ar
        self.context = record.context
        self.steps = 0
        self.clock = StepTimes() if clock is None else clock
        self.takes_fewer = any(binding.takes_fewer for binding in bindings)
        decoder = manifest.interface
        groups = [group.geometry for group in cache.groups] if decoder.is_cached else []
        self._inputs = StepInputs(manifest, record, tables, takes_fewer=self.takes_fewer, groups=groups)
        interfaces = [
            interface.with_hidden_like(binding.interface)
            for binding, interface in zip(bindings, decoder.parts(record), strict=True)
        ]
        own = ("hidden", "logits", "last_hidden", "expert")
        own_ports = [port for interface in interfaces for port in interface.outputs if port.kind in own]
        own_ports += [port for interface in interfaces for port in interface.inputs if port.kind == "expert"]
        exits = {
            port.name: aligned_zeros(port.shape, "float32" if port.dtype == FLOAT else port.dtype) for port in own_ports
        }
        stop = manifest.model.first_without_cache or manifest.model.layers
        self._parts = [
            BoundPart(
                binding,
                part,
                interface,
                self._inputs.arrays | exits,
                self._inputs.groups,
                decoder.borrowed(part),
                is_needed=part.first_layer < stop,
            )
            for binding, part, interface in zip(bindings, record.parts, interfaces, strict=True)
        ]
        self._logits = exits[interfaces[-1].exit.name][0]
        self._hidden = exits[LAST_HIDDEN][0, 0] if LAST_HIDDEN in exits else None
        self._hidden_is_needed = manifest.model.first_without_cache is None
        self._ran_all = False
        reads_used_rows = all(part.reads_used_rows for part in self._parts)
        self.appends = any(part.appends for part in self._parts)
        self.row_block = 0 if not reads_used_rows else _ROW_BLOCK if manifest.graph("verify") is None else 1
        if self.appends:
            self.row_block = 1
        self._before_next_run: Callable[[], None] | None = None
        self._experts: RoutedExperts | None = None
        self._exits = exits
        self.use(cache)
        self.adapt(adapter)

    def route(self, experts: RoutedExperts) -> None:
        """Compute experts between parts that end at a router; see `DividedPart`."""
        experts.use(self._exits)
        self._experts = experts

    @property
    def logits(self) -> NDArray[Any]:
        """The logits of the last step that computed them, as integers `[rows, V]`, valid until the next step.

        One row, for the last token; graphs of the roles `score` and `verify` return one for each token of the step.
        """
        rows: NDArray[Any] = self._logits[: self._inputs.filled]
        return rows

    @property
    def hidden(self) -> NDArray[Any] | None:
        """The last hidden state of each token of the last step, as integers `[tokens, H]`; None if it gave none."""
        if self._hidden is None or not (self._ran_all or self._hidden_is_needed):
            return None
        rows: NDArray[Any] = self._hidden[: self._inputs.filled]
        return rows

    @property
    def target_hidden(self) -> NDArray[Any]:
        """Where a drafter's graph reads its target's last hidden state, `[AR, H]`."""
        rows: NDArray[Any] = self._inputs.arrays[TARGET_HIDDEN][0, 0]
        return rows

    def release(self) -> None:
        """Give memory back to the system that the next step can read again from files."""
        for part in self._parts:
            part.release()

    def use(self, cache: KVCache) -> None:
        """Use another cache of the same geometry from the next step on."""
        self._cache = cache
        for part in self._parts:
            part.use(cache)

    def adapt(self, memory: AdapterMemory) -> None:
        """Read adapters from this memory from the next step on; nothing is compiled or loaded."""
        for part in self._parts:
            part.adapt(memory)
        self._adapter = memory  # keeps the memory alive

    def window(self, tokens: int, *, reads_all: bool = False) -> tuple[Window, ...]:
        """Open a step of so many tokens in the cache; see `KVCache.window`.

        Args:
            tokens: 1 to AR.
            reads_all: whether the step reads all rows; one with `run_rows` does.

        Raises:
            ContextFullError: the cache has no room for a step of this graph.
        """
        rows = tokens if self.takes_fewer else self.ar
        windows = self._cache.window(rows, self.record.context, 0 if reads_all else self.row_block)
        return self._cache.append_in_place() if self.appends else windows

    def without_past(self) -> tuple[Window, ...]:
        """The windows of a step that reads and writes no cache."""
        count = 1 + max(self._inputs.groups.values(), default=0)
        return (Window(self.ar, 0, 0, 0, in_place=False, first=0, stop=0),) * count

    def before_next_run(self, call: Callable[[], None]) -> None:
        """Call something once before the next step overwrites the logits of the last one."""
        self._before_next_run = call

    def run(
        self,
        tokens: Sequence[int],
        windows: Sequence[Window],
        position: int,
        *,
        rows: Sequence[Row] = (),
        logits: bool = True,
    ) -> None:
        """Run tokens on open windows of the cache; the caller commits the new rows.

        Args:
            tokens: 1 to AR.
            windows: where the graph reads and writes in each group of the cache.
            position: absolute position of the first one. After `window`, since a policy that evicts tokens there can
                change it.
            rows: of the tokens, if they do not follow each other; see `run_rows`.
            logits: whether the logits are needed; without them, the last parts without a cache do not run.

        Raises:
            EngineError: the runtime failed; the cache is as it was before the step.
        """
        started = perf_counter_ns()
        if not 1 <= len(tokens) <= self.ar:
            raise ValueError(f"tokens: got {len(tokens)}; expected 1 to {self.ar}")
        if self._before_next_run is not None:
            call, self._before_next_run = self._before_next_run, None
            call()
        if rows:
            self._inputs.write_rows(rows, windows)
        else:
            self._inputs.write(tokens, position, windows)
        parts = self._parts if logits else [part for part in self._parts if part.is_needed]
        self._ran_all = len(parts) == len(self._parts)
        releases = self.takes_fewer and logits  # a prompt's last step, behind which all leaves
        for part in parts:
            part.bind(windows, len(tokens))
        entered = perf_counter_ns()
        try:
            for part in parts:
                part.run()
                if part.routed_layer is not None and self._experts is not None:
                    self._experts.run(part.routed_layer)
                if releases:
                    part.release()
        except Exception as error:  # the runtimes' exceptions have no common base
            raise EngineError(
                f"running {self.record.name}",
                got=" ".join(str(error).split()),
                expected="a step",
                fix="Try another --engine; if it runs there, report this graph.",
            ) from None
        clock = self.clock
        clock.run_ns += perf_counter_ns() - entered
        clock.host_ns += entered - started
        clock.steps += 1
        self.steps += 1

    def run_rows(self, rows: Sequence[Row], windows: Sequence[Window]) -> None:
        """As `run`, of rows that say what they see: of several sequences, or of one that branches.

        Raises:
            EngineError: as `run`.
        """
        self.run([row.token for row in rows], windows, rows[0].position, rows=rows)


class StepInputs:
    """Token ids or embeddings, masks, cosines and sines, and `logits_index` of an AR step.

    Attributes:
        arrays: by name. Of a mask, a step uses the first elements: a row for each token, as wide as the step's window.
        groups: the group of the cache that each mask belongs to.
        filled: tokens of the last step.
    """

    def __init__(
        self,
        manifest: Manifest,
        record: GraphRecord,
        tables: HostTables,
        *,
        takes_fewer: bool = False,
        groups: Sequence[LayerSpec] = (),
    ) -> None:
        """Allocate.

        Args:
            manifest: of the bundle.
            tables: what the host looks up.
            takes_fewer: whether the graph has no row without a token.
            groups: the layers that the windows of a step are of, which grow apart in some caches; those of the
                bundle's cache by default.
        """
        self._takes_fewer = takes_fewer
        decoder = manifest.interface
        inputs = [port for part in decoder.parts(record) for port in part.inputs if port.kind in STEP_KINDS]
        self.arrays: dict[str, NDArray[Any]] = {port.name: aligned_zeros(port.shape, port.dtype) for port in inputs}
        self.filled = 0
        self._table = embeddings = tables.embeddings
        pad = manifest.tokens.pad or 0
        self._pad = np.asarray(pad) if embeddings is None else embeddings.rows([pad])[0]
        entry = self.arrays[inputs[0].name]
        self._entry = entry[0] if embeddings is None else entry[0, 0]
        self._gathered = (
            [] if tables.layer_inputs is None else [(tables.layer_inputs, self.arrays[LAYER_INPUTS_PORT][0, 0])]
        )
        self._pad_token = pad
        if LAYER_INPUTS_PORT in self.arrays:
            self.arrays[LAYER_INPUTS_PORT][:] = manifest.encodings[LAYER_INPUTS_PORT].zero_point
        self._positions, self._whole = tables.positions, tables.whole
        self._axes = np.array(manifest.model.picture_axes, np.int64)
        self._rotary = [
            (table, *(self.arrays[name][0, 0] for name in names))
            for suffix, table in tables.ropes.items()
            if (names := rope_inputs(suffix))[0] in self.arrays
        ]
        self._index = self.arrays.get(LOGITS_INDEX)
        others = [self.arrays[port.name][0, 0] for port in inputs if port.kind == "others"]
        self._taps = ConvolutionRows(self.arrays[CONV_ROWS], others, record.ar) if CONV_ROWS in self.arrays else None
        self.groups: Mapping[str, int] = {
            name: group
            for name, group in decoder.mask_groups(groups or decoder.cache.groups()).items()
            if name in self.arrays
        }
        reach = {} if decoder.is_cached else decoder.masks()
        self._masks = [
            (group, AttentionMask(self.arrays[name][0, 0], manifest.encodings[MASK], reach.get(name)))
            for name, group in self.groups.items()
        ]

    def write(self, tokens: Sequence[int], position: int, windows: Sequence[Window]) -> None:
        """Write a step; see `StaticGraph.run`."""
        n, before = len(tokens), self._invalidate()
        along = None if self._positions is None else self._positions(tokens)
        for table, cos, sin in self._rotary:
            if along is None:
                cos[:n], sin[:n] = table.rows(position, n)
            else:
                cos[:n], sin[:n] = table.rows_along(position + along[:, self._axes])
        together = [] if self._whole is None else self._whole(tokens)
        for group, mask in self._masks:
            mask.write(n, windows[group], together)
        if self._taps is not None:
            self._taps.write()
        self._write_entry(tokens, before)

    def write_rows(self, rows: Sequence[Row], windows: Sequence[Window]) -> None:
        """Write a step whose tokens do not follow each other; see `StaticGraph.run_rows`."""
        before = self._invalidate()
        along = [self._along(row, rows) for row in rows]
        for table, cos, sin in self._rotary:
            for at, row in enumerate(rows):
                places = along[at]
                one = table.rows(row.position, 1) if places is None else table.rows_along(places[:, self._axes])
                cos[at], sin[at] = one
        for group, mask in self._masks:
            mask.write_rows(rows, windows[group])
        if self._taps is not None:
            self._taps.write_rows(rows)
        self._write_entry([row.token for row in rows], before)

    def _along(self, row: Row, rows: Sequence[Row]) -> NDArray[np.int64] | None:
        """Its positions along all axes, `[1, 3]`, if it or a new row before it is one of a picture."""
        if self._positions is None:
            return None
        along = self._positions([rows[new].token for new in row.rows])
        return None if along is None else row.position - (len(row.rows) - 1) + along[-1:]

    def _invalidate(self) -> int:
        """Have a step that does not end leave nothing that the next one takes for written; return `filled`."""
        before, self.filled = self.filled, 0
        return before

    def _write_entry(self, tokens: Sequence[int], before: int) -> None:
        """Write ids or embeddings, and what rows without a token read if there were others in the step before."""
        n = len(tokens)
        self._entry[:n] = tokens if self._table is None else self._table.rows(tokens)
        for gathered, rows in self._gathered:
            rows[:n] = gathered.rows(tokens)
        if n == before:
            self.filled = n
            return
        if not self._takes_fewer:
            # Rows without a token: their results are not used.
            self._entry[n:] = self._pad
            for gathered, rows in self._gathered:
                rows[n:] = gathered.rows([self._pad_token])
            for table, cos, sin in self._rotary:
                cos[n:], sin[n:] = table.rows(0, 1)
        if self._index is not None:
            self._index[0] = n - 1
        self.filled = n


class ConvolutionRows:
    """Which row each tap of a convolution reads for each new token, `[K-1, AR]`: tap j the one K-1-j tokens before it.

    Rows are those of the cache's state, then the new ones, then the states of other sequences, K-1 for each new token.
    The last tap reads the token's own row in any case.
    """

    def __init__(self, rows: NDArray[Any], others: Sequence[NDArray[Any]], ar: int) -> None:
        """Use this memory.

        Args:
            rows: contiguous; the new tokens follow each other.
            others: the states of other sequences, `[(K-1) * AR, H]` of each layer.
            ar: tokens per inference.
        """
        self._rows = rows.reshape(-1, ar)
        self._others = others
        self._past = len(self._rows)
        self._are_linear = False
        self.write()

    def write(self) -> None:
        """Write the rows of a step whose tokens follow each other."""
        if not self._are_linear:
            self._rows[:] = np.arange(self._rows.shape[1]) + np.arange(self._past)[:, None]
            self._are_linear = True

    def write_rows(self, rows: Sequence[Row]) -> None:
        """Write the taps of a step whose tokens do not follow each other."""
        self._are_linear = False
        past, ar = self._rows.shape
        for token, row in enumerate(rows):
            start = 0
            if row.states is not None:
                place = past * token
                for memory, state in zip(self._others, row.states, strict=True):
                    memory[place : place + past] = state
                start = past + ar + place
            path = [*range(start, start + past), *(past + new for new in row.rows)]
            self._rows[:, token] = path[-1 - past : -1]


class AttentionMask:
    """A graph's mask, `[AR, P + AR]`: a row for each new token, columns for the past rows and then the new tokens.

    An element is 0.0 where the row attends to the column, and the encoding's minimum where it does not. Rows without a
    token attend to the new rows up to their own. A row that attended to nothing would average over all columns, also
    those of rows that hold no token: then other rows, rounded over the range of all, would depend on what was there.
    """

    def __init__(self, rows: NDArray[Any], encoding: Encoding, reach: int | None = None) -> None:
        """Use memory.

        Args:
            rows: the memory, contiguous.
            encoding: of the mask.
            reach: tokens that a row attends to on each side, its own included, if its text is whole in a step; None
                for all that `Row` says.
        """
        self._reach = reach
        self._memory = rows.reshape(-1)
        self._rows = rows
        self._most = self._ar = len(rows)
        self._past = rows.shape[1] - self._ar
        self._open, self._closed = encoding.zero_point, encoding.limits[0]
        self._causal = np.where(np.tri(self._ar, dtype=bool), self._open, self._closed).astype(rows.dtype)
        self._filled = 0

    def write(self, tokens: int, window: Window, together: Sequence[slice] = ()) -> None:
        """Write the mask of a step of `tokens` tokens.

        Args:
            tokens: 1 to AR.
            window: of the layers.
            together: new tokens that attend to each other on both sides.
        """
        if (window.columns, window.ar) != (self._past, self._ar):
            self._reshape(window)
        rows = self._rows
        rows[:tokens, : self._past] = self._closed
        rows[:tokens, window.first : window.stop] = self._open
        for row in range(self._ar - len(window.leaving), tokens):
            rows[row, window.unseen(row)] = self._closed
        if tokens != self._filled:
            rows[tokens:, : self._past] = self._closed
            rows[:, self._past :] = self._causal[: self._ar, : self._ar]
            self._filled = tokens
        for new in together:
            rows[new, self._past + new.start : self._past + new.stop] = self._open
            self._filled = 0  # the next step writes all rows

    def write_rows(self, seen: Sequence[Row], window: Window) -> None:
        """Write the mask of a step whose tokens do not follow each other."""
        if (window.columns, window.ar) != (self._past, self._ar):
            self._reshape(window)
        rows = self._rows
        before, self._filled = self._filled, 0  # the next step writes all rows
        rows[: len(seen)] = self._closed
        for at, row in enumerate(seen):
            if row.columns is None:
                rows[at, window.first : window.stop] = self._open
                rows[at, window.unseen(len(row.rows) - 1)] = self._closed
            else:
                rows[at, row.columns] = self._open
            reach = self._reach
            new = row.rows if reach is None else [new for new in row.rows if abs(new - at) < reach]
            rows[at, [self._past + row for row in new]] = self._open
        if len(seen) != before:
            rows[len(seen) :, : self._past] = self._closed
            rows[len(seen) :, self._past :] = self._causal[len(seen) : self._ar, : self._ar]

    def _reshape(self, window: Window) -> None:
        """Take the rows of a window, and its width."""
        assert window.ar <= self._most, "a window of this graph"
        width = window.columns + window.ar
        self._filled = 0
        self._rows = self._memory[: window.ar * width].reshape(window.ar, width)
        self._past, self._ar = window.columns, window.ar


Table = NDArray[Any]


_MAX_POSITIONS = 1 << 16
"""Of a table that grows: texts that go on for ever, and files that say so, take no memory for their positions."""


class RopeTable:
    """Rows of cosines and sines, `[positions, R/2]`, in the encodings of the graph's inputs.

    An element is trunc(attention_factor * cos(position * frequency) / scale + zero_point) in float64, with the scale
    rounded to float32 as in the graph. It truncates as Genie does, so that both produce the same bits. Positions
    can exceed those of training: attention depends only on differences of positions, which stay below S.
    """

    def __init__(
        self,
        inverse_frequencies: Sequence[float] | NDArray[np.float64],
        cos: Encoding,
        sin: Encoding,
        *,
        positions: int = 1,
        attention_factor: float = 1.0,
    ) -> None:
        self._frequencies = np.asarray(inverse_frequencies, np.float64)
        self._encodings = (cos, sin)
        self._factor = attention_factor
        self._cos, self._sin = self._compute(0, positions)

    def rows(self, position: int, count: int) -> tuple[Table, Table]:
        """Cosines and sines `[count, R/2]` from `position` on; the table grows up to `_MAX_POSITIONS`."""
        if (end := position + count) > len(self._cos):
            if end > _MAX_POSITIONS:
                return self._compute(position, end)
            more = self._compute(len(self._cos), min(max(end, 2 * len(self._cos)), _MAX_POSITIONS))
            self._cos, self._sin = (np.concatenate(pair) for pair in zip((self._cos, self._sin), more, strict=True))
        return self._cos[position:end], self._sin[position:end]

    def rows_along(self, positions: NDArray[np.int64]) -> tuple[Table, Table]:
        """Cosines and sines of tokens whose pairs have positions of their own, `[T, R/2]`."""
        return self._turned(positions.astype(np.float64) * self._frequencies)

    def _compute(self, start: int, stop: int) -> tuple[Table, Table]:
        return self._turned(np.arange(start, stop, dtype=np.float64)[:, None] * self._frequencies)

    def _turned(self, angles: NDArray[np.float64]) -> tuple[Table, Table]:
        cos, sin = self._encodings
        return _truncate(self._factor * np.cos(angles), cos), _truncate(self._factor * np.sin(angles), sin)


def rope_tables(manifest: Manifest) -> dict[str, RopeTable]:
    """A table for every rotary embedding of a bundle, by the suffix of its inputs' names, for one context."""
    tables = {}
    for suffix, rotation in manifest.rotations.items():
        cos, sin = (manifest.encodings[name] for name in rope_inputs(suffix))
        tables[suffix] = RopeTable(
            rotation.inverse_frequencies,
            cos,
            sin,
            positions=manifest.context,
            attention_factor=rotation.attention_factor,
        )
    return tables


def _truncate(real: NDArray[np.float64], encoding: Encoding) -> Table:
    steps = np.trunc(real / np.float64(np.float32(encoding.scale)) + encoding.zero_point)
    table: Table = np.clip(steps, *encoding.limits).astype(DTYPES[encoding.dtype])
    return table
