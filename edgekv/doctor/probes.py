"""Probes of edgekv's own engines. Each runs in a child process; see `worker`."""

from __future__ import annotations

import platform

import numpy as np

from devices import find
from edgekv.doctor.finding import Finding, require
from edgekv.doctor.samples import onnx_norm_case, tflite_model, write_onnx_norm
from edgekv.errors import EngineError
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.this_chip import find_chip
from edgekv.qnn.vendor_libraries import Platform
from edgekv.runtime import CpuEngine, HtpEngine

_EMULATED_SOC = "SM8650"
_TOLERANCE = 8  # steps of 65536: the HTP computes the root in fixed point
_EMULATED = ("x86_64", "amd64")


def cpu() -> Finding:
    """ONNX Runtime runs an operation of the exported graphs' operator set."""
    version = require("onnxruntime")
    _run_norm(CpuEngine())
    return Finding(status="works", detail=version)


def htp() -> Finding:
    """Qualcomm's provider compiles and runs an operation of the exported graphs' operator set."""
    version = require("onnxruntime-qnn", "htp")
    device = find_chip(Platform.here()) or find(_EMULATED_SOC)
    _run_norm(HtpEngine(device))
    where = "emulated" if platform.machine().lower() in _EMULATED else "on the NPU"
    return Finding(status="works", detail=f"{version}, {where}: compiled for {device.soc}")


def litert() -> Finding:
    """LiteRT loads a model."""
    version = require("ai-edge-litert", "litert")
    from ai_edge_litert.compiled_model import CompiledModel

    CompiledModel.from_buffer(tflite_model())
    return Finding(status="works", detail=version)


def tflite() -> Finding:
    """tflite-runtime creates an interpreter. With numpy 2 importing it succeeds, and this fails."""
    version = require("tflite-runtime", "tflite")
    try:
        from tflite_runtime.interpreter import Interpreter

        Interpreter(model_content=tflite_model()).allocate_tensors()
    except Exception as error:  # SystemError, ImportError, AttributeError
        if np.lib.NumpyVersion(np.__version__) < "2.0.0":
            raise
        return Finding(
            status="broken",
            detail=f"{version} with numpy {np.__version__}: it was built for numpy below 2, and creating an "
            f"interpreter fails with {type(error).__name__}",
            fix='Install an older one: pip install "numpy<2". LiteRT runs with both: pip install "edgekv[litert]"',
        )
    return Finding(status="works", detail=f"{version}, numpy {np.__version__}")


def _run_norm(engine: CpuEngine | HtpEngine) -> None:
    """Run the sample graph.

    Raises:
        EngineError: the engine refused the graph, or computed something else.
    """
    x, reference = onnx_norm_case()
    with scratch_folder("doctor") as scratch:
        path = scratch / "norm.onnx"
        write_onnx_norm(path)
        (result,) = engine.session(path).run(["y"], {"x": x})
    if np.abs(result.astype(int) - reference).max() > _TOLERANCE:
        raise EngineError(
            f"engine {engine.name}: an RMS norm",
            got=result[0, :4].tolist(),
            expected=reference[0, :4].tolist(),
            fix='Install the tested versions: pip install "edgekv[htp]"',
        )
