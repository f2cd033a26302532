"""Graph inputs and outputs bound to memory addresses, with little time in Python."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter_ns
from typing import Any, Protocol

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgekv.errors import BundleError
from edgekv.kv.memory import ALIGNMENT_BYTES, HeapMemory
from edgekv.runtime.background import BackgroundTask
from edgekv.runtime.mapped import MappedWeights
from edgekv.runtime.shared_memory import SharedAllocator, shared_device
from edgekv.spec import OPEN_ROWS, OPEN_TOKENS, GraphInterface, Port

# TensorProto.DataType: the runtime reads a number faster than a numpy type.
_ELEMENTS = {
    np.dtype(name): number for name, number in (("f4", 1), ("u1", 2), ("i1", 3), ("u2", 4), ("i2", 5), ("i4", 6))
}
_MANY = 64  # with fewer tensors, binding is faster than starting a background task
_LONG_NS = 2_000_000  # a run must take longer than binding hundreds of tensors


class _BindAll(Protocol):
    def __call__(
        self, names: Sequence[str], element: int, shape: Sequence[int], addresses: Sequence[int], offset_bytes: int
    ) -> None: ...


class Binding(Protocol):
    """A loaded graph and the memory that it reads and writes. The caller keeps bound memory alive."""

    @property
    def reads_used_rows(self) -> bool:
        """Whether past inputs and masks can be bound with fewer rows than `interface` tells."""

    @property
    def takes_fewer(self) -> bool:
        """Whether inputs and outputs can be bound with fewer new tokens than `interface` tells."""

    @property
    def interface(self) -> GraphInterface:
        """The inputs and outputs of the loaded graph."""

    def inputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        """Bind inputs of one type and shape, each `offset_bytes` past its address."""

    def outputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        """Bind outputs in the same way."""

    def run(self) -> None:
        """Run the graph on the bound memory."""

    def release(self) -> None:
        """Give memory back to the system that the next run can read again from files."""


def aligned_zeros(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    """An array of zeros, aligned to 64 bytes, which every runtime accepts."""
    memory = HeapMemory(math.prod(shape) * np.dtype(dtype).itemsize + ALIGNMENT_BYTES)
    aligned: NDArray[Any] = np.ndarray(tuple(shape), dtype, memory.buffer, memory.offset)
    aligned.fill(0)
    return aligned


@dataclass(frozen=True, slots=True)
class _Place:
    """Where tensors of one type and shape are bound: `offset_bytes` past each address."""

    is_output: bool
    names: Sequence[str]
    element: int
    shape: Sequence[int]
    addresses: Sequence[int]
    offset_bytes: int

    def is_at(self, other: _Place | None) -> bool:
        if other is self:
            return True
        if other is None or other.offset_bytes != self.offset_bytes:
            return False
        return other.shape == self.shape and other.addresses == self.addresses

    def next(self, earlier: _Place | None) -> _Place:
        """The expected place if the tensors move and grow again by as much as since `earlier`."""
        if earlier is None or earlier.addresses != self.addresses or self.is_at(earlier):
            return self
        shape = [max(1, 2 * now - before) for now, before in zip(self.shape, earlier.shape, strict=True)]
        return replace(self, offset_bytes=2 * self.offset_bytes - earlier.offset_bytes, shape=shape)


_Places = dict[str, _Place]  # by the first of their names


class _Bound:
    """One set of bindings of a session, and the addresses it is bound to."""

    def __init__(self, session: ort.InferenceSession, shared: SharedAllocator | None = None) -> None:
        self.io = session.io_binding()
        self._binders = _binders(self.io)
        self._shared = shared
        self._shared_binders = None if shared is None else _shared_binders(self.io)
        self._places: _Places = {}
        self._moving: BackgroundTask | None = None

    def move(self, places: Iterable[_Place]) -> None:
        """Bind the tensors whose addresses have changed."""
        for place in places:
            first = place.names[0]
            if place.is_at(self._places.get(first)):
                continue
            self._places.pop(first, None)
            is_shared = self._shared is not None and self._shared.holds(place.addresses[0])
            binders = self._shared_binders if is_shared and self._shared_binders else self._binders
            bind = binders[place.is_output]
            bind(place.names, place.element, place.shape, place.addresses, place.offset_bytes)
            self._places[first] = place

    def start_moving(self, places: Iterable[_Place]) -> None:
        """Start `move` in the background."""
        self._moving = BackgroundTask(lambda: self.move(places))

    def wait(self) -> None:
        """Wait until a move in the background is done."""
        if self._moving is not None:
            moving, self._moving = self._moving, None
            moving.wait()


class MemoryBinding:
    """The bindings of an ONNX Runtime session; a `Binding`.

    ONNX Runtime needs one call per tensor that moves. If many move in every step, two sets of bindings alternate: while
    the graph runs on one, the other is bound in the background to the expected addresses and shapes of the next step,
    extrapolated from the last two. Wrong guesses are bound again. Names that were bound together must always be bound
    together.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        weights: MappedWeights | None = None,
        shared: SharedAllocator | None = None,
    ) -> None:
        """Args: session: to bind. weights: that it maps, if they are known. shared: memory that is bound as shared."""
        self._session = session
        self._weights = weights
        self._shared = shared
        self._bound = _Bound(session, shared)
        self._other: _Bound | None = None
        self._wanted: _Places = {}
        self._last: _Places = {}
        self._run_ns = 0

    @property
    def reads_used_rows(self) -> bool:
        return self._has_size(OPEN_ROWS)

    @property
    def takes_fewer(self) -> bool:
        return self._has_size(OPEN_TOKENS)

    def _has_size(self, name: str) -> bool:
        return any(str(size).startswith(name) for port in self._session.get_inputs() for size in port.shape)

    @property
    def interface(self) -> GraphInterface:
        return GraphInterface(_ports(self._session.get_inputs()), _ports(self._session.get_outputs()))

    def inputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._wanted[names[0]] = _Place(False, names, _ELEMENTS[dtype], shape, addresses, offset_bytes)

    def outputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._wanted[names[0]] = _Place(True, names, _ELEMENTS[dtype], shape, addresses, offset_bytes)

    def run(self) -> None:
        bound = self._bound
        bound.wait()
        bound.move(self._wanted.values())
        if self._run_ns > _LONG_NS:
            self._look_ahead()
        began = perf_counter_ns()
        self._session.run_with_iobinding(bound.io)
        self._run_ns = perf_counter_ns() - began

    def release(self) -> None:
        if self._weights is not None:
            self._weights.release()

    def _look_ahead(self) -> None:
        """Bind the other set to the expected addresses of the next step, if enough tensors move."""
        ahead = [place.next(self._last.get(name)) for name, place in self._wanted.items()]
        pairs = zip(self._wanted.values(), ahead, strict=True)
        moving = sum(len(there.names) for here, there in pairs if there is not here)
        self._last = dict(self._wanted)
        if moving < _MANY:
            return
        other = self._other or _Bound(self._session, self._shared)
        self._bound, self._other = other, self._bound
        other.start_moving(ahead)


def _ports(found: Sequence[ort.NodeArg]) -> tuple[Port, ...]:
    ports = ((a.name, a.type.removeprefix("tensor(").rstrip(")"), a.shape) for a in found)
    return tuple(Port(name, dtype, tuple(_most(name, size) for size in shape)) for name, dtype, shape in ports)


def _most(name: str, size: int | str | None) -> int:
    """A size of a port; an open one is named after the most that it can be."""
    digits = str(size).removeprefix(OPEN_ROWS).removeprefix(OPEN_TOKENS)
    if not digits.isascii() or not digits.isdecimal():
        fix = "Export the bundle again."
        raise BundleError(f"graph: {name}", got=f"a dimension {size}", expected="a static size", fix=fix)
    return int(digits)


def _binders(io: ort.IOBinding) -> tuple[_BindAll, _BindAll]:
    """Uses the object that the public one wraps: 0.65 us per tensor instead of 2.7."""
    try:
        raw = io._iobinding
        device = ort.OrtDevice.make("cpu", 0)._get_c_device()
        return _raw(raw.bind_input, device), _raw(raw.bind_output, device)
    except AttributeError:
        return _public(io.bind_input), _public(io.bind_output)


def _shared_binders(io: ort.IOBinding) -> tuple[_BindAll, _BindAll]:
    """Binds memory that the HTP reaches too. The public object has no name for such memory."""
    raw, device = io._iobinding, shared_device()
    return _raw(raw.bind_input, device), _raw(raw.bind_output, device)


def _raw(bind: Any, device: object) -> _BindAll:
    def bind_all(
        names: Sequence[str], element: int, shape: Sequence[int], addresses: Sequence[int], offset_bytes: int
    ) -> None:
        for name, address in zip(names, addresses, strict=True):
            bind(name, device, element, shape, address + offset_bytes)

    return bind_all


def _public(bind: Any) -> _BindAll:
    def bind_all(
        names: Sequence[str], element: int, shape: Sequence[int], addresses: Sequence[int], offset_bytes: int
    ) -> None:
        for name, address in zip(names, addresses, strict=True):
            bind(name, "cpu", 0, element, shape, address + offset_bytes)

    return bind_all
