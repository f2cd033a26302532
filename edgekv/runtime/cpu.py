"""ONNX Runtime on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import onnxruntime as ort

from edgekv.bundle import Bundle, GraphFormat
from edgekv.errors import EngineError, UsageError
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.merge import merged_bytes

_ERROR = 3


@dataclass(frozen=True, slots=True)
class CpuEngine:
    """ONNX Runtime on the CPU.

    Attributes:
        threads: threads per operation; None for ONNX Runtime's own choice.
    """

    graph_format: ClassVar[GraphFormat] = "onnx"

    threads: int | None = None
    name: Literal["cpu"] = "cpu"
    _sessions: dict[Path, ort.InferenceSession] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> CpuEngine:
        return cls(threads)

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
        """A session of an ONNX file with its nodes unchanged; `load` merges heads, with the same results.

        Raises:
            EngineError: the runtime refused the graph.
        """
        return self._session(graph, merge_heads=False)

    def _session(self, graph: Path, *, merge_heads: bool) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.log_severity_level = _ERROR
        # Otherwise weights are dequantized in every step: no kernel multiplies u16 activations.
        options.add_session_config_entry("session.disable_quant_qdq", "1")
        if self.threads is not None:
            options.intra_op_num_threads = self.threads
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(graph.parent))
        try:
            model = merged_bytes(graph) if merge_heads else str(graph)
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the runtime's exceptions have no common base
            raise EngineError(
                f"{graph.name} on the CPU",
                got=" ".join(str(error).split()),
                expected="a graph that ONNX Runtime loads",
                fix="Export the bundle again, with this edgekv and this onnxruntime.",
            ) from None
