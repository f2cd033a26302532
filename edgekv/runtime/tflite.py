"""tflite-runtime on memory that the KV cache owns.

Its Python package only copies. The C++ library can place a tensor on the caller's memory, by a method that is looked up
under its mangled name; 2.14.0 is the last version of the package, so the name will not change.
"""

from __future__ import annotations

import ctypes
import io
import math
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from edgekv.bundle import ENCODER, Bundle, GraphFormat
from edgekv.errors import EngineError, UsageError
from edgekv.kv.memory import ALIGNMENT_BYTES
from edgekv.machine.native_output import captured_output
from edgekv.runtime.binding import BatchInvariance
from edgekv.runtime.foreign_graph import CrashCheckedFiles, run_all
from edgekv.spec import GraphInterface, Port
from quant import WEIGHT_TYPES

TESTED = "2.14.0"

_INSTALL = 'Install it: pip install "edgekv[tflite]"'
_RUNNER = "_ZN6tflite4impl11Interpreter18GetSignatureRunnerEPKc"
_LAY_INPUT = "_ZN6tflite4impl15SignatureRunner33SetCustomAllocationForInputTensorEPKcRK22TfLiteCustomAllocationl"
_LAY_OUTPUT = "_ZN6tflite4impl15SignatureRunner34SetCustomAllocationForOutputTensorEPKcRK22TfLiteCustomAllocationl"


class TfliteEngine:
    """tflite-runtime on the CPU.

    Attributes:
        threads: threads per operation; None for the runtime's own choice.
    """

    graph_format: ClassVar[GraphFormat] = "tflite"

    name: Literal["tflite"] = "tflite"

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> TfliteEngine:
        _check_weights(bundle)
        return cls(threads)

    def __init__(self, threads: int | None = None, *, tried: bool = False) -> None:
        """Find the runtime.

        Args:
            tried: load files without testing them in a child process first.

        Raises:
            EngineError: it is missing, or another version.
        """
        try:
            version = metadata.version("tflite-runtime")
        except metadata.PackageNotFoundError:
            raise EngineError(
                "engine tflite",
                got="no package tflite_runtime",
                expected=f"tflite-runtime {TESTED}",
                fix=f"{_INSTALL}, or use --engine litert.",
            ) from None
        if version != TESTED:
            raise EngineError(
                "engine tflite",
                got=f"tflite-runtime {version}",
                expected=f"the tested version, {TESTED}",
                fix=_INSTALL,
            )
        self.threads = threads
        self._interpreters = CrashCheckedFiles(f"tflite-runtime {TESTED}", self._open, None if tried else run_graphs)

    @property
    def batch_invariance(self) -> BatchInvariance:
        """`unequal`: drafts are not verified."""
        return "unequal"

    @property
    def alignment_bytes(self) -> int:
        return ALIGNMENT_BYTES

    def load(self, file: Path, name: str) -> TfliteBinding:
        return TfliteBinding(self._interpreters.load(file), name)

    def encoder(self, file: Path) -> TfliteBinding:
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
        return list(self._interpreters.load(file).get_signature_list())

    def _open(self, file: Path) -> Any:
        """An interpreter. With numpy 2 importing the package succeeds, and this fails."""
        with captured_output() as output, redirect_stderr(io.StringIO()):
            try:
                from tflite_runtime.interpreter import Interpreter, OpResolverType

                return Interpreter(
                    str(file),
                    num_threads=self.threads,
                    # The delegate would run only the float nodes, and copy every tensor there and back.
                    experimental_op_resolver_type=OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES,
                )
            except Exception as error:  # SystemError, ImportError, AttributeError, ValueError, RuntimeError
                failure = str(error)
        if np.lib.NumpyVersion(np.__version__) >= "2.0.0":
            raise EngineError(
                "engine tflite",
                got=f"numpy {np.__version__}",
                expected=f"numpy below 2, for which tflite-runtime {TESTED} was built",
                fix='Install it: pip install "numpy<2". Or use --engine litert, which runs with both.',
            )
        raise EngineError(
            f"{file.name} on tflite-runtime",
            got=" ".join((failure or output.text).split()),
            expected="graphs that tflite-runtime loads",
            fix=f"Export the bundle again with this edgekv and tflite-runtime {TESTED}, or use --engine litert.",
        )


def _check_weights(bundle: Bundle) -> None:
    """Reject weights that tflite-runtime has no kernels for."""
    others = [weight for weight in bundle.manifest.recipe.weights if "tflite" not in WEIGHT_TYPES[weight.dtype].engines]
    if others:
        raise UsageError(
            "engine",
            got=f"tflite for a bundle with {others[0].dtype} weights, the first: {others[0].tensor}",
            expected="int8 weights, the only ones that tflite-runtime multiplies int16 by",
            fix="Use litert, or export with --recipe w8a16.",
        )


class _Allocation(ctypes.Structure):
    """TfLiteCustomAllocation."""

    _fields_ = (("data", ctypes.c_void_p), ("bytes", ctypes.c_size_t))


class TfliteBinding:
    """One signature of an interpreter; a `Binding`. Its tensors are in the caller's memory."""

    def __init__(self, interpreter: Any, name: str) -> None:
        self._details = interpreter.get_signature_runner(name)
        self._runtime = interpreter._interpreter  # the public methods know only the first signature
        self._subgraph: int = self._details._subgraph_index
        native = _native()
        self._runner = native.runner(interpreter._native_handle(), name.encode())
        self._lay_input, self._lay_output = native.lay_input, native.lay_output
        self._is_laid_out = False

    @property
    def reads_used_rows(self) -> bool:
        return False

    @property
    def takes_fewer(self) -> bool:
        return False

    @property
    def interface(self) -> GraphInterface:
        return GraphInterface(_ports(self._details.get_input_details()), _ports(self._details.get_output_details()))

    def inputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._lay(self._lay_input, names, math.prod(shape) * dtype.itemsize, addresses, offset_bytes)

    def outputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._lay(self._lay_output, names, math.prod(shape) * dtype.itemsize, addresses, offset_bytes)

    def release(self) -> None:
        pass

    def run(self) -> None:
        self.lay_out()
        self._runtime.Invoke(self._subgraph)

    def lay_out(self) -> None:
        """Apply what was bound since the last call; `run` calls this."""
        if not self._is_laid_out:
            self._runtime.AllocateTensors(self._subgraph)
            self._is_laid_out = True

    def _lay(
        self, lay: Any, names: Sequence[str], size_bytes: int, addresses: Sequence[int], offset_bytes: int
    ) -> None:
        self._is_laid_out = False
        allocation = _Allocation(None, size_bytes)
        by_reference = ctypes.byref(allocation)
        for name, address in zip(names, addresses, strict=True):
            allocation.data = address + offset_bytes
            if lay(self._runner, name.encode(), by_reference, 0):
                raise ValueError(f"{name}: got address {address + offset_bytes:#x}; expected a multiple of 64")


class _Native:
    """The methods of the runtime's library that its Python package does not offer."""

    def __init__(self) -> None:
        import tflite_runtime

        (path,) = Path(tflite_runtime.__file__).parent.glob("_pywrap*.so")
        library = ctypes.CDLL(str(path))
        self.runner = library[_RUNNER]
        self.runner.argtypes, self.runner.restype = [ctypes.c_void_p, ctypes.c_char_p], ctypes.c_void_p
        self.lay_input, self.lay_output = library[_LAY_INPUT], library[_LAY_OUTPUT]
        for lay in (self.lay_input, self.lay_output):
            lay.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_int64]


@lru_cache(maxsize=1)
def _native() -> _Native:
    return _Native()


def _ports(details: Mapping[str, Any]) -> tuple[Port, ...]:
    return tuple(
        Port(name, np.dtype(detail["dtype"]).name, tuple(int(n) for n in detail["shape"]))
        for name, detail in details.items()
    )


def run_graphs(file: str) -> None:
    """What a child process does to try a file; see `run_all`."""
    run_all(TfliteEngine(tried=True), Path(file))
