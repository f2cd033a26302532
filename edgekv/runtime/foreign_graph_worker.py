"""The child process of `edgekv.runtime.foreign_graph`."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import numpy as np

from edgekv.errors import EngineError
from edgekv.kv.memory import aligned_zeros
from edgekv.runtime.binding import Binding
from edgekv.runtime.foreign_graph import Refusal, Trial
from edgekv.runtime.litert import LitertEngine
from edgekv.runtime.tflite import TfliteEngine


def main() -> None:
    trial = msgspec.json.decode(sys.stdin.buffer.read(), type=Trial)
    refusal: Refusal | None = None
    try:
        _run_all(trial)
    except EngineError as error:
        refusal = Refusal(field=error.field, got=str(error.got), expected=str(error.expected), fix=error.fix)
    except Exception as error:  # the runtimes' exceptions have no common base
        refusal = Refusal(
            field=f"{Path(trial.file).name} on {trial.engine}",
            got=" ".join(str(error).split()) or type(error).__name__,
            expected="graphs that load and run",
            fix="Export the bundle again with this edgekv.",
        )
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(refusal))


def _run_all(trial: Trial) -> None:
    kind = LitertEngine if trial.engine == "litert" else TfliteEngine
    engine, file = kind(tried=True), Path(trial.file)
    for name in engine.graph_names(file):
        _run(engine.load(file, name))


def _run(graph: Binding) -> None:
    """One step on zeros."""
    alive = []
    interface = graph.interface
    for ports, bind in ((interface.inputs, graph.inputs), (interface.outputs, graph.outputs)):
        for port in ports:
            alive.append(array := aligned_zeros(port.shape, port.dtype))
            bind([port.name], np.dtype(port.dtype), port.shape, [array.ctypes.data])
    graph.run()


if __name__ == "__main__":
    main()
