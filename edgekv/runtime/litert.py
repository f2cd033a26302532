"""LiteRT's compiled models on memory that the KV cache owns, through the public Python API and one call of its C API.

The Python package creates tensor buffers on the caller's memory only with one dimension and without int16; the C
library has neither limit.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from edgekv.bundle import ENCODER, Bundle, GraphFormat
from edgekv.errors import EngineError
from edgekv.kv.memory import ALIGNMENT_BYTES
from edgekv.machine.native_output import captured_output
from edgekv.qnn.vendor_libraries import Platform
from edgekv.runtime.binding import BatchInvariance
from edgekv.runtime.foreign_graph import CrashCheckedFiles, run_all
from edgekv.spec import GraphInterface, Port

TESTED = "2.3.0"

_INSTALL = 'Install it: pip install "edgekv[litert]"'
_TENSOR_TYPE_BYTES = 512  # more than LiteRtRankedTensorType, which is opaque here
_CAPSULE = b"LiteRtTensorBuffer"


class LitertEngine:
    """LiteRT on the CPU.

    Attributes:
        threads: threads per operation; None for LiteRT's own choice.
    """

    graph_format: ClassVar[GraphFormat] = "tflite"

    name: Literal["litert"] = "litert"

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> LitertEngine:
        return cls(threads)

    def __init__(self, threads: int | None = None, *, tried: bool = False) -> None:
        """Find the runtime.

        Args:
            tried: load files without testing them in a child process first.

        Raises:
            EngineError: it is missing, or not a version that can be bound to memory of the caller.
        """
        _library()
        self.threads = threads
        runtime = f"ai-edge-litert {metadata.version('ai-edge-litert')}"
        self._models = CrashCheckedFiles(runtime, self._open, None if tried else run_graphs)

    @property
    def batch_invariance(self) -> BatchInvariance:
        """`unequal`: drafts are not verified."""
        return "unequal"

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENT_BYTES

    def load(self, file: Path, name: str) -> LitertBinding:
        return LitertBinding(self._models.load(file), name)

    def encoder(self, file: Path) -> LitertBinding:
        """A vision encoder.

        Raises:
            EngineError: as `load`.
        """
        return self.load(file, ENCODER)

    def graph_names(self, file: Path) -> list[str]:
        """The names of the graphs in a file.

        Raises:
            EngineError: as `load`.
        """
        return list(self._models.load(file).get_signature_list())

    def _open(self, file: Path) -> Any:
        from ai_edge_litert.compiled_model import CompiledModel, CpuKernelMode, CpuOptions, HardwareAccelerator, Options

        # The delegate would run only the float nodes, and copy every tensor there and back.
        cpu = CpuOptions(num_threads=self.threads or 0, kernel_mode=CpuKernelMode.BUILTIN)
        options = Options(hardware_accelerators=HardwareAccelerator.CPU, cpu_options=cpu)
        with captured_output() as output:
            try:
                return CompiledModel.from_file(str(file), options=options)
            except Exception as error:  # the runtime's exceptions have no common base
                failure = str(error)
        raise EngineError(
            f"{file.name} on LiteRT",
            got=" ".join((failure or output.text).split()),
            expected="graphs that LiteRT loads",
            fix=f"Export the bundle again, with this edgekv and ai-edge-litert {TESTED}.",
        )


class LitertBinding:
    """One signature of a compiled model; a `Binding`. LiteRT works on the caller's memory; nothing is copied."""

    def __init__(self, model: Any, name: str) -> None:
        self._model = model
        self._name = name
        self._index: int = model.get_signature_index(name)
        listed = model.get_signature_list()[name]
        inputs = {tensor: model.create_input_buffer_by_name(name, tensor) for tensor in listed["inputs"]}
        outputs = {tensor: model.create_output_buffer_by_name(name, tensor) for tensor in listed["outputs"]}
        self._inputs, self._outputs = _LentBuffers(inputs), _LentBuffers(outputs)
        self._has_run = False

    @property
    def reads_used_rows(self) -> bool:
        return False

    @property
    def takes_fewer(self) -> bool:
        return False

    @property
    def interface(self) -> GraphInterface:
        inputs = self._model.get_input_tensor_details(self._name)
        outputs = self._model.get_output_tensor_details(self._name)
        return GraphInterface(_ports(inputs), _ports(outputs))

    def inputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._inputs.lend(names, _bytes_of(dtype, shape), addresses, offset_bytes)

    def outputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._outputs.lend(names, _bytes_of(dtype, shape), addresses, offset_bytes)

    def release(self) -> None:
        pass

    def run(self) -> None:
        if self._has_run:
            self._model.run_by_index(self._index, self._inputs.slots, self._outputs.slots)
            return
        with captured_output():  # LiteRT creates another environment at its first run, and logs it at length
            self._model.run_by_index(self._index, self._inputs.slots, self._outputs.slots)
        self._has_run = True


class _Slot:
    """A stand-in for LiteRT's tensor buffer: `run_by_index` accepts anything with its capsule."""

    __slots__ = ("capsule", "handle", "tensor_type")

    def __init__(self, buffer: Any) -> None:
        """Copy the type of a buffer that LiteRT created, and free the buffer."""
        library = _library()
        self.tensor_type = ctypes.create_string_buffer(_TENSOR_TYPE_BYTES)
        library.check(library.tensor_type(library.pointer(buffer.capsule, _CAPSULE), self.tensor_type))
        buffer.destroy()
        self.capsule: object = None
        self.handle: ctypes.c_void_p | None = None


class _LentBuffers:
    """The tensor buffers of all inputs, or all outputs, in the order of the signature."""

    def __init__(self, buffers: Mapping[str, Any]) -> None:
        self._library = _library()
        self._by_name = {name: _Slot(buffer) for name, buffer in buffers.items()}
        self.slots = list(self._by_name.values())

    def lend(self, names: Sequence[str], size_bytes: int, addresses: Sequence[int], offset_bytes: int) -> None:
        """Let LiteRT use the memory at these addresses until the next call.

        Raises:
            ValueError: an address is not a multiple of 64.
        """
        library = self._library
        create, destroy, wrap = library.create, library.destroy, library.wrap
        for name, address in zip(names, addresses, strict=True):
            if (address + offset_bytes) % ALIGNMENT_BYTES:
                raise ValueError(f"{name}: got address {address + offset_bytes:#x}; expected a multiple of 64")
            slot, handle = self._by_name[name], ctypes.c_void_p()
            library.check(create(slot.tensor_type, address + offset_bytes, size_bytes, None, ctypes.byref(handle)))
            if slot.handle is not None:
                destroy(slot.handle)
            slot.handle, slot.capsule = handle, wrap(handle, _CAPSULE, None)

    def addresses(self) -> dict[str, int]:
        """The address of each tensor, as LiteRT reports it."""
        addresses, library = {}, self._library
        for name, slot in self._by_name.items():
            address = ctypes.c_void_p()
            library.check(library.host_memory(slot.handle, ctypes.byref(address)))
            addresses[name] = address.value or 0
        return addresses

    def __del__(self) -> None:
        for slot in self.slots:
            if slot.handle is not None:
                self._library.destroy(slot.handle)


class _Library:
    """The calls of LiteRT's C API that its Python package lacks."""

    def __init__(self, path: Path) -> None:
        native = ctypes.CDLL(str(path))
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self.create = native.LiteRtCreateTensorBufferFromHostMemory
        self.create.argtypes = [pointer, pointer, size, pointer, pointer]
        self.destroy = native.LiteRtDestroyTensorBuffer
        self.destroy.argtypes, self.destroy.restype = [pointer], None
        self.tensor_type = native.LiteRtGetTensorBufferTensorType
        self.tensor_type.argtypes = [pointer, pointer]
        self.host_memory = native.LiteRtGetTensorBufferHostMemory
        self.host_memory.argtypes = [pointer, pointer]
        self.wrap = ctypes.pythonapi.PyCapsule_New
        self.wrap.argtypes, self.wrap.restype = [pointer, ctypes.c_char_p, pointer], ctypes.py_object
        self.pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self.pointer.argtypes, self.pointer.restype = [ctypes.py_object, ctypes.c_char_p], pointer

    def check(self, status: int) -> None:
        if status:
            raise RuntimeError(f"LiteRT refused a tensor buffer with status {status}")


@lru_cache(maxsize=1)
def _library() -> _Library:
    try:
        import ai_edge_litert
    except ImportError:
        raise EngineError("engine litert", got="no package ai_edge_litert", expected="LiteRT", fix=_INSTALL) from None
    try:
        return _Library(Path(ai_edge_litert.__file__).parent / f"libLiteRt{Platform.here().suffix}")
    except (OSError, AttributeError) as error:
        raise EngineError(
            "engine litert",
            got=f"ai-edge-litert {metadata.version('ai-edge-litert')}: {error}",
            expected=f"the tested version, {TESTED}",
            fix=_INSTALL,
        ) from None


def _bytes_of(dtype: np.dtype[Any], shape: Sequence[int]) -> int:
    return math.prod(shape) * dtype.itemsize


def _ports(details: Mapping[str, Any]) -> tuple[Port, ...]:
    return tuple(Port(name, detail["dtype"], tuple(detail["shape"])) for name, detail in details.items())


def run_graphs(file: str) -> None:
    """What a child process does to try a file; see `run_all`."""
    run_all(LitertEngine(tried=True), Path(file))
