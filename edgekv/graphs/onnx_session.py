"""Sessions of ONNX Runtime on the CPU."""

from __future__ import annotations

from pathlib import Path

import onnxruntime as ort

from edgekv.machine.graph_file import WEIGHTS_FOLDER

PROVIDERS = ["CPUExecutionProvider"]
_ERROR = 3


def session_options(weights: Path, threads: int | None = None) -> ort.SessionOptions:
    """The options of every session.

    Args:
        weights: the folder with the model's external weights.
        threads: of one operation; None leaves it to the runtime.
    """
    options = ort.SessionOptions()
    options.log_severity_level = _ERROR
    # Otherwise weights are dequantized in every step: no kernel multiplies u16 activations.
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    # Threads wait actively within a step, not between steps.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    options.add_session_config_entry(WEIGHTS_FOLDER, str(weights))
    return options
