"""The HTP compiler's simulated schedule of a graph: which unit does what, when, and for which part of the model."""

from __future__ import annotations

import json
import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Literal

import msgspec

from edgekv.errors import EngineError
from edgekv.machine.decoding import DECODERS
from exporters.htp.costs import each_once

Unit = Literal["HVX", "HMX", "DMA", "issue"]
UNITS: tuple[Unit, ...] = ("HVX", "HMX", "DMA", "issue")
"""Vector threads; the matrix unit; transfers between DRAM and VTCM; the thread that starts and awaits the others."""

_THREADS = re.compile(r"(FG|HVX|HMX|DMA|HVX_DMA) ?(\d*):")
_UNITS: Mapping[str, Unit] = {"FG": "issue", "HVX": "HVX", "HMX": "HMX", "DMA": "DMA", "HVX_DMA": "DMA"}
_STARTS = b'"traceEvents"'
_HOUSEKEEPING = re.compile(r"^default_(\w+) \((.*)\)$")
_MARKS = {"RmsNorm": re.compile(r"^q::rmsnorm", re.IGNORECASE), "Softmax": re.compile(r"^q::softmax", re.IGNORECASE)}

_PARTS = tuple(
    (re.compile(pattern), part)
    for pattern, part in (
        (r"norm(_\d+|\.\d+)?$", "norms"),
        (r"^layers\.\d+\.conv\b|^conv_", "convolution"),
        (r"^layers\.\d+\.delta|^(delta|decay|recurrent)", "delta rule"),
        (r"^layers\.\d+\.(gate|up|down|mlp|silu|sigmoid|gelu|fc)", "feed-forward"),
        (r"^layers\.\d+\.layer_", "layer inputs"),
        (r"^layers\.\d+\.|^probabilities|^(key|value)_\d", "attention"),
        (r"^(head|logits|last_hidden)", "head"),
        (r"^embedding|^per_layer", "embedding"),
        (r"^(patches|places|entry)", "patches"),
        (r"^(merged|centered|center|with_means|projector|rows)", "projector"),
    )
)
_LAYER = re.compile(r"(?:layers\.|[a-z_]+_)(\d+)")
_Place = tuple[str, int]
_UNKNOWN: _Place = "other", -1
_BORDERS, _BORDER = (2, 3), ("inputs and outputs", -1)
"""The numbers of the operations that read inputs of the graph, such as the cache, and write its outputs."""


class Event(msgspec.Struct, frozen=True, array_like=True):
    """An operation on a unit.

    Attributes:
        unit: where.
        thread: which of the unit's threads, from 0 on.
        start: cycle.
        cycles: how long.
        kind: of operation.
        part: of the decoder.
        layer: of the decoder; -1 outside of layers, and if it is not known.
        bytes: that a transfer moves.
    """

    unit: Unit
    thread: int
    start: int
    cycles: int
    kind: str
    part: str
    layer: int
    bytes: int = 0


class Schedule(msgspec.Struct, frozen=True):
    """One simulated run of a graph.

    Attributes:
        events: by their start.
        hvx_threads: vector threads of the chip.
    """

    events: tuple[Event, ...]
    hvx_threads: int

    @property
    def cycles(self) -> int:
        """The end of the last event."""
        return max((event.start + event.cycles for event in self.events), default=0)

    def busy(self) -> dict[Unit, float]:
        """The share of time that each unit is busy: of all its threads on average; of transfers, of any."""
        end, total = self.cycles or 1, Counter[Unit]()
        for event in self.events:
            total[event.unit] += event.cycles
        total["DMA"] = _covered(event for event in self.events if event.unit == "DMA")
        return {unit: total[unit] / end / (self.hvx_threads if unit == "HVX" else 1) for unit in UNITS}

    def layer(self) -> tuple[Event, ...]:
        """The events during one layer, from its first norm to that of the next: of several, one in the middle.

        Empty if layers are not known.
        """
        begins = dict[int, int]()
        for event in self.events:
            if event.layer >= 0 and event.part == "norms" and event.unit == "HVX":
                begins.setdefault(event.layer, event.start)
        if not begins:
            return ()
        at = sorted(begins)[(len(begins) - 1) // 2]
        first, last = begins[at], begins.get(at + 1, self.cycles)
        return tuple(one for one in self.events if one.start < last and one.start + one.cycles > first)

    def shares(self, field: Literal["kind", "part"]) -> dict[str, float]:
        """The share of time of each kind of operation or part of the model, largest first; they add up to 1.

        Each moment is divided among the operations that compute then, on HVX and HMX; where none does, among transfers;
        where there are none either, it counts as waiting.
        """
        edges = sorted(
            edge
            for at, event in enumerate(self.events)
            if event.cycles and event.unit != "issue"
            for edge in ((event.start, 1, at), (event.start + event.cycles, 0, at))
        )
        running, cycles, last = set[int](), defaultdict[str, float](float), 0
        for moment, begins, at in edges:
            if moment > last:
                computing = [number for number in running if self.events[number].unit != "DMA"]
                counted = computing or [*running]
                for number in counted:
                    cycles[getattr(self.events[number], field)] += (moment - last) / len(counted)
                if not counted:
                    cycles["waiting"] += moment - last
                last = moment
            (running.add if begins else running.discard)(at)
        if self.cycles > last:
            cycles["waiting"] += self.cycles - last
        total = sum(cycles.values()) or 1.0
        return {name: cycles[name] / total for name in sorted(cycles, key=lambda name: -cycles[name])}


class _Arguments(msgspec.Struct):
    id: str = "0x0"
    dmabytes: int = 0


class _TraceEvent(msgspec.Struct):
    name: str
    ph: str
    tid: int = 0
    ts: int = 0
    dur: int = 0
    args: msgspec.Raw = msgspec.Raw(b"{}")


class _Trace(msgspec.Struct):
    events: list[_TraceEvent] = msgspec.field(name="traceEvents")


class _ThreadName(msgspec.Struct):
    name: str = ""


def read_schedules(log: Path, graphs: Sequence[Path]) -> list[Schedule]:
    """The schedules of the graphs of one binary, in the order of its sessions.

    As in the profile, each but the last is there twice; see `each_once`.

    Args:
        log: the trace of the first session.
        graphs: for each graph, the folder with the compiler's dump of it.

    Raises:
        EngineError: a file is missing, or has another form.
    """
    try:
        content = log.read_bytes()
        traces = [*_traces(content)]
        orders = [_composition(folder) for folder in graphs]
    except (OSError, msgspec.MsgspecError, ValueError, KeyError, IndexError) as error:
        raise _other_form(f"{type(error).__name__}: {error}") from None
    if (once := each_once(traces, len(graphs))) is None:
        raise _other_form(f"traces of {len(traces)} graphs for {len(graphs)}")
    schedules = []
    for trace, nodes in zip(once, orders, strict=True):
        schedules.append(_schedule(trace, nodes))
    return schedules


def _traces(content: bytes) -> Iterator[_Trace]:
    """The Chrome traces in a log: JSON among binary fields."""
    decoder, at = DECODERS[_Trace], 0
    while (begin := content.find(_STARTS, at)) >= 0:
        start = content.rfind(b"{", 0, begin)
        end = content.find(b"\0", start)
        end = content.rfind(b"}", start, end if end >= 0 else len(content)) + 1
        yield decoder.decode(content[start:end])
        at = end


def _composition(folder: Path) -> list[tuple[str, str]]:
    """Names and types of the QNN nodes of a graph, in the order in which they were composed.

    Tensors are numbered in that order, but for outputs of the graph, which are numbered before.
    """
    (dump,) = (path for path in folder.glob("*.json") if not path.stem.endswith("_tensor_log"))
    graph = json.loads(dump.read_text("utf-8"))["graph"]
    numbers = {name: int(tensor["id"]) for name, tensor in graph["tensors"].items()}

    def order(item: tuple[str, Mapping[str, object]]) -> int:
        names = [*item[1]["input_names"], *item[1]["output_names"]]  # type: ignore[misc]
        return max(numbers[name] for name in names)

    return [(name, str(node["type"])) for name, node in sorted(graph["nodes"].items(), key=order)]


def _place(node: str, kind: str) -> _Place | None:
    """The part of the model and the layer that a QNN node belongs to; None if its name does not say."""
    name = re.sub(r"(_f)?_node$|_q(Reshape)?$", "", node).removeprefix("vision.")
    part = next((part for pattern, part in _PARTS if pattern.search(name)), None)
    if kind == "RmsNorm":
        part = "norms"
    match = _LAYER.match(name)
    return None if part is None else (part, int(match[1]) if match else -1)


def _schedule(trace: _Trace, nodes: Sequence[tuple[str, str]]) -> Schedule:
    units = dict[int, tuple[Unit, int]]()
    for event in trace.events:
        if event.ph == "M" and event.name == "thread_name":
            name = DECODERS[_ThreadName].decode(event.args).name
            if (match := _THREADS.fullmatch(name)) is None:
                raise _other_form(f"a thread {name!r}")
            units[event.tid] = _UNITS[match[1]], max(0, int(match[2] or 0) - (match[1] in ("HVX", "HMX")))
    timed = [event for event in trace.events if event.ph == "X"]
    arguments = [DECODERS[_Arguments].decode(event.args) for event in timed]
    operations = [int(argument.id, 16) & 0xFFFFFFFF for argument in arguments]
    parts = _parts_of(operations, [event.name for event in timed], nodes)
    events = []
    for event, arguments_, operation in zip(timed, arguments, operations, strict=True):
        if event.tid not in units:
            raise _other_form(f"an event of thread {event.tid}, which has no name")
        unit, thread = units[event.tid]
        match = _HOUSEKEEPING.fullmatch(event.name)
        if unit == "issue" and match is None:
            unit = "HMX"
        kind = event.name if match is None else match[2] if unit == "DMA" else match[1].replace("_", " ")
        kind = kind.removeprefix("q::").removeprefix("*")
        moved = arguments_.dmabytes if unit == "DMA" else 0
        part, layer = _BORDER if operation in _BORDERS else parts[operation]
        events.append(Event(unit, thread, event.ts, event.dur, kind, part, layer, moved))
    threads = sum(unit == "HVX" for unit, _ in units.values())
    return Schedule(tuple(sorted(events, key=lambda event: event.start)), threads)


def _parts_of(operations: Sequence[int], names: Sequence[str], nodes: Sequence[tuple[str, str]]) -> dict[int, _Place]:
    """The part and the layer of each operation.

    Operations are numbered in the order of composition, with numbers for constants between them. Norms and softmaxes
    mark places in it: the n-th of the schedule is the n-th of the graph.
    """
    seen = {kind: set[int]() for kind in _MARKS}
    for operation, name in zip(operations, names, strict=True):
        for kind, pattern in _MARKS.items():
            if pattern.match(name):
                seen[kind].add(operation)
    marks = [(0, -1)]
    for kind, operations_of_kind in seen.items():
        marked = [at for at, (_, node_kind) in enumerate(nodes) if node_kind == kind]
        if len(marked) == len(operations_of_kind):
            marks += zip(sorted(operations_of_kind), marked, strict=True)
    marks.sort()
    marks.append((max(operations, default=0) + 1, len(nodes)))
    if any(node > after for (_, node), (_, after) in pairwise(marks)):
        return dict.fromkeys(operations, _UNKNOWN)
    places, numbers = [_place(*node) for node in nodes], [number for number, _ in marks]
    result = dict[int, _Place]()
    for operation in {*operations}:
        at = bisect_right(numbers, operation) - 1
        (number, node), (number_after, node_after) = marks[at], marks[at + 1]
        if operation == number and node >= 0:
            result[operation] = places[node] or _UNKNOWN
            continue
        between = [place for place in places[node + 1 : node_after] if place is not None]
        if not between:
            result[operation] = _UNKNOWN
            continue
        # One part, or in the proportion of the nodes of several.
        share = (operation - number) / (number_after - number)
        result[operation] = between[min(len(between) - 1, int(share * len(between)))]
    return result


def _covered(events: Iterator[Event]) -> int:
    """Cycles in which at least one of these runs."""
    total = last = 0
    for event in events:  # by their start
        end = event.start + event.cycles
        total += max(0, end - max(last, event.start))
        last = max(last, end)
    return total


def _other_form(got: str) -> EngineError:
    return EngineError(
        "trace of the HTP compiler",
        got=got,
        expected="a schedule of each graph, as onnxruntime-qnn 2.7.0 writes it",
        fix="Use the tested version: pip install edgekv[htp].",
    )
