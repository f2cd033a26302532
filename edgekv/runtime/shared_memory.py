"""Memory that the processor and the HTP share, from the allocator of Qualcomm's provider.

The provider registers such memory with the HTP when it is first bound at an address, so that nothing is copied between
the two. It knows its own allocations only: memory of `rpcmem_alloc` that another one made is refused.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import onnxruntime as ort

from edgekv.errors import EngineError
from edgekv.kv.memory import ALIGNMENT_BYTES, Memory

# As the provider describes its allocator (OrtDevice): memory of the processor, accessible to the device of a vendor.
_CPU, _HOST_ACCESSIBLE, _QUALCOMM, _FIRST = 0, 5, 0x5143, 0


@cache
def shared_device() -> Any:
    """What ONNX Runtime calls such memory."""
    from onnxruntime.capi.onnxruntime_pybind11_state import OrtDevice

    return OrtDevice(_CPU, _HOST_ACCESSIBLE, _QUALCOMM, _FIRST)


class SharedMemory:
    """One allocation of the provider, freed with the last array on it; see `Memory`."""

    def __init__(self, value: Any, size_bytes: int) -> None:
        """Args: value: the OrtValue that owns it. size_bytes: its size."""
        self.address: int = value.data_ptr()
        self.offset = 0
        self.held_bytes = size_bytes
        self.buffer: Any = (ctypes.c_uint8 * size_bytes).from_address(self.address)
        ctypes.memset(self.address, 0, size_bytes)


class SharedAllocator:
    """Allocates shared memory, and knows which addresses are in it."""

    def __init__(self, session: Callable[[], ort.InferenceSession]) -> None:
        """Args: session: one of the provider, with its allocator enabled; asked for when memory is first allocated."""
        self._session = session
        self._held: dict[int, tuple[int, Any]] = {}

    def __call__(self, size_bytes: int) -> Memory:
        """Allocate.

        Raises:
            EngineError: the provider has no such allocator, no memory, or memory that starts at an odd place.
        """
        try:
            value = self._session()._sess.create_ortvalue_from_shape_and_type([size_bytes], np.uint8, shared_device())
            memory = SharedMemory(value, size_bytes)
        except EngineError:
            raise
        except Exception as error:  # the runtime's exceptions have no common base
            raise _refused(" ".join(str(error).split()), size_bytes) from None
        if memory.address % ALIGNMENT_BYTES:
            raise _refused(f"memory at {memory.address:#x}", size_bytes)
        self._held[memory.address] = size_bytes, value
        release = weakref.finalize(memory.buffer, self._held.pop, memory.address)
        release.atexit = False  # arrays may outlive it there
        return memory

    def holds(self, address: int) -> bool:
        """Whether an address is in memory that was allocated here and not freed."""
        return any(first <= address < first + size for first, (size, _) in self._held.items())


def _refused(got: str, size_bytes: int) -> EngineError:
    return EngineError(
        "htp shared-memory",
        got=got,
        expected=f"{size_bytes} bytes on a boundary of {ALIGNMENT_BYTES}, from the allocator of Qualcomm's provider",
        fix="Leave shared-memory out, or export with a smaller --context.",
    )
