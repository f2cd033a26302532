"""Engines: where the graphs of a bundle run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import onnxruntime as ort

from devices import Device, find
from edgekv.bundle import Bundle, GraphFormat, open_compiled
from edgekv.errors import EngineError, UsageError
from edgekv.runtime import qnn
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.merge import merged
from edgekv.runtime.tflite import TfliteEngine
from quant import WEIGHT_TYPES

EngineName = Literal["cpu", "htp", "litert", "tflite"]
ENGINES: dict[EngineName, GraphFormat] = {"cpu": "onnx", "htp": "onnx", "litert": "tflite", "tflite": "tflite"}
"""The engines, and which graphs they run."""

_ERROR = 3
_Sessions = dict[Path, ort.InferenceSession]


class Engine(Protocol):
    """Loads the graphs of a bundle."""

    @property
    def name(self) -> EngineName:
        """As users give it."""

    @property
    def alignment_bytes(self) -> int:
        """Memory that is bound must begin on a boundary of so many bytes."""

    def load(self, file: Path, name: str) -> Binding:
        """The graph of this name in a file, ready to be bound. A file that is loaded again is held in memory once.

        Raises:
            EngineError: the runtime is missing or refused the graph.
        """


@dataclass(frozen=True, slots=True)
class CpuEngine:
    """ONNX Runtime on the CPU.

    Attributes:
        threads: threads of one operation; None leaves it to ONNX Runtime.
    """

    threads: int | None = None
    name: Literal["cpu"] = "cpu"
    _sessions: _Sessions = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads", got=self.threads, expected="at least 1", fix="Give a positive number.")

    @property
    def alignment_bytes(self) -> int:
        return 1

    def load(self, file: Path, name: str) -> Binding:
        if file not in self._sessions:
            self._sessions[file] = self._session(file, merge_heads=True)
        return MemoryBinding(self._sessions[file])

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file, node by node as it stands; `load` makes a faster one with the same bits.

        Raises:
            EngineError: the runtime refused the graph.
        """
        return self._session(graph, merge_heads=False)

    def _session(self, graph: Path, *, merge_heads: bool) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = _ERROR
        # Without it weights are dequantized in every step: no kernel multiplies u16 activations.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        try:
            model = merged(graph).SerializeToString() if merge_heads else str(graph)
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions have no common base
            raise EngineError(
                f"{graph.name} on the CPU",
                got=" ".join(str(error).split()),
                expected="a graph that ONNX Runtime loads",
                fix="Export the bundle again, with this edgekv and this onnxruntime.",
            ) from None


@dataclass(frozen=True, slots=True)
class HtpEngine:
    """Qualcomm's HTP: the emulator on x86, the NPU on a Snapdragon.

    Attributes:
        device: the target.
        compiled: wrappers of context binaries that hold one graph each, by the graphs that they were compiled from;
            other graphs are compiled when their session is made.
    """

    device: Device
    compiled: Mapping[Path, Path] = field(default_factory=dict)
    name: Literal["htp"] = "htp"
    _sessions: _Sessions = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def alignment_bytes(self) -> int:
        return 1

    def load(self, file: Path, name: str) -> Binding:
        if file not in self._sessions:
            self._sessions[file] = self.session(file)
        return MemoryBinding(self._sessions[file])

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file, or of what it was compiled to.

        Raises:
            EngineError: the runtime is missing or refused the graph.
        """
        return qnn.create_session(self.compiled.get(graph, graph), self.device)


def make_engine(name: str, *, bundle: Bundle, threads: int | None = None) -> Engine:
    """An engine by name.

    Args:
        name: one of `ENGINES`.
        bundle: what it shall run: `htp` targets its device, and loads what was compiled of it for that device.
        threads: of one operation; not for `htp`.

    Raises:
        UsageError: no such engine, one for other graphs, or an option that it does not have.
        EngineError: what the engine needs is not installed, or another version.
        BundleError: a compiled binary was changed.
        devices.UnknownDeviceError: no such device.
    """
    graph_format = bundle.manifest.graph_format
    runnable = " or ".join(engine for engine, runs in ENGINES.items() if runs == graph_format)
    if name not in ENGINES:
        names = " or ".join(ENGINES)
        raise UsageError("engine", got=repr(name), expected=names, fix=f"Use {runnable}.")
    if ENGINES[name] != graph_format:
        raise UsageError(
            "engine",
            got=f"{name} for a bundle of {graph_format} graphs",
            expected=runnable,
            fix=f"Use {runnable}, or export with --format {ENGINES[name]}.",
        )
    if threads is not None and threads < 1:
        raise UsageError("threads", got=threads, expected="at least 1", fix="Give a positive number.")
    if name == "htp":
        if threads is not None:
            raise UsageError("threads", got=threads, expected="none with the engine htp", fix="Leave it out.")
        device = find(bundle.manifest.device)
        return HtpEngine(device, _wrappers(bundle, device))
    if name == "litert":
        return LitertEngine(threads)
    if name == "tflite":
        _check_weights(bundle)
        return TfliteEngine(threads)
    return CpuEngine(threads)


def _check_weights(bundle: Bundle) -> None:
    """That tflite-runtime has kernels for a bundle's weights."""
    others = [each for each in bundle.manifest.recipe.weights if "tflite" not in WEIGHT_TYPES[each.dtype].engines]
    if others:
        raise UsageError(
            "engine",
            got=f"tflite for a bundle with {others[0].dtype} weights, the first: {others[0].tensor}",
            expected="int8 weights, the only ones that tflite-runtime multiplies int16 by",
            fix="Use litert, or export with --recipe w8a16.",
        )


def _wrappers(bundle: Bundle, device: Device) -> Mapping[Path, Path]:
    compiled = open_compiled(bundle, device.soc, qnn.compiler())
    if compiled is None:
        return {}
    found = {bundle.part_path(part): compiled.wrapper(part.name) for part in bundle.manifest.parts}
    return {part: wrapper for part, wrapper in found.items() if wrapper is not None}
