"""Edgekv's own engines, each tried by constructing a session. Run in child processes: see `worker`."""

from __future__ import annotations

import platform

import numpy as np

from devices import find
from edgekv.doctor.finding import Finding, require
from edgekv.doctor.samples import onnx_sum_case, tflite_model, write_onnx_sum
from edgekv.errors import EngineError
from edgekv.runtime import CpuEngine, HtpEngine
from edgekv.scratch import scratch_folder

_SOC = "SM8650"
_EMULATED = ("x86_64", "amd64")


def cpu() -> Finding:
    """ONNX Runtime runs an integer operation."""
    version = require("onnxruntime")
    _run_sum(CpuEngine())
    return Finding(status="works", detail=version)


def htp() -> Finding:
    """Qualcomm's provider compiles an integer operation and runs it."""
    version = require("onnxruntime-qnn", "htp")
    _run_sum(HtpEngine(find(_SOC)))
    where = "emulated" if platform.machine().lower() in _EMULATED else "on the NPU"
    return Finding(status="works", detail=f"{version}, {where}: compiled for {_SOC}")


def litert() -> Finding:
    """LiteRT opens a model."""
    version = require("ai-edge-litert", "litert")
    from ai_edge_litert.compiled_model import CompiledModel

    CompiledModel.from_buffer(tflite_model())
    return Finding(status="works", detail=version)


def tflite() -> Finding:
    """tflite-runtime makes an interpreter. Importing it proves nothing: with numpy 2 that succeeds too."""
    version = require("tflite-runtime", "tflite")
    try:
        from tflite_runtime.interpreter import Interpreter

        Interpreter(model_content=tflite_model()).allocate_tensors()
    except Exception as error:  # SystemError, ImportError, AttributeError
        if np.lib.NumpyVersion(np.__version__) < "2.0.0":
            raise
        return Finding(
            status="broken",
            detail=f"{version} with numpy {np.__version__}: it was built for numpy below 2, and fails with "
            f"{type(error).__name__} when an interpreter is made; importing it succeeds",
            fix='Install an older one: pip install "numpy<2". LiteRT runs with both: pip install "edgekv[litert]"',
        )
    return Finding(status="works", detail=f"{version}, numpy {np.__version__}")


def _run_sum(engine: CpuEngine | HtpEngine) -> None:
    """Run the sample graph.

    Raises:
        EngineError: the engine refused the graph, or computed something else.
    """
    x, wanted = onnx_sum_case()
    with scratch_folder("doctor") as scratch:
        path = scratch / "sum.onnx"
        write_onnx_sum(path)
        (found,) = engine.session(path).run(["y"], {"x": x})
    if not np.array_equal(found, wanted):
        raise EngineError(
            f"engine {engine.name}: a sum",
            got=found[0, :4].tolist(),
            expected=wanted[0, :4].tolist(),
            fix='Install the tested versions: pip install "edgekv[htp]"',
        )
