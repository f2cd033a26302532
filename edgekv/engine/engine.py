"""Engines: where the graphs of a bundle run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

import onnxruntime as ort

from devices import Device, find
from edgekv.bundle import Bundle, open_compiled
from edgekv.engine import qnn
from edgekv.errors import EngineError, UsageError

EngineName = Literal["cpu", "htp"]
ENGINES: tuple[EngineName, ...] = ("cpu", "htp")

_ERROR = 3


class Engine(Protocol):
    """Makes sessions of graphs."""

    @property
    def name(self) -> EngineName:
        """As users give it."""

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file.

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

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads", found=self.threads, wanted="at least 1", way_out="Give a positive number.")

    def session(self, graph: Path) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = _ERROR
        # Without it weights are dequantized in every step: no kernel multiplies u16 activations.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        try:
            return ort.InferenceSession(str(graph), options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions have no common base
            raise EngineError(
                f"{graph.name} on the CPU",
                found=" ".join(str(error).split()),
                wanted="a graph that ONNX Runtime loads",
                way_out="Export the bundle again, with this edgekv and this onnxruntime.",
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

    def session(self, graph: Path) -> ort.InferenceSession:
        return qnn.create_session(self.compiled.get(graph, graph), self.device)


def make_engine(name: str, *, bundle: Bundle, threads: int | None = None) -> Engine:
    """An engine by name.

    Args:
        name: one of `ENGINES`.
        bundle: what it shall run: `htp` targets its device, and loads what was compiled of it for that device.
        threads: matters to `cpu` alone.

    Raises:
        UsageError: no such engine, or an option that it does not have.
        EngineError: what the engine needs is not installed.
        BundleError: a compiled binary was changed.
        devices.UnknownDeviceError: no such device.
    """
    if name == "cpu":
        return CpuEngine(threads)
    if name == "htp":
        if threads is not None:
            raise UsageError("threads", found=threads, wanted="none with the engine htp", way_out="Leave it out.")
        device = find(bundle.manifest.device)
        return HtpEngine(device, _wrappers(bundle, device))
    names = " or ".join(ENGINES)
    raise UsageError("engine", found=repr(name), wanted=names, way_out=f"Use {names}.")


def _wrappers(bundle: Bundle, device: Device) -> Mapping[Path, Path]:
    compiled = open_compiled(bundle, device.soc, qnn.compiler())
    if compiled is None:
        return {}
    found = {bundle.graph_path(graph): compiled.wrapper(graph.name) for graph in bundle.manifest.graphs}
    return {graph: wrapper for graph, wrapper in found.items() if wrapper is not None}
