"""The execution providers that onnxruntime-genai may use."""

from __future__ import annotations

import onnxruntime_genai as genai


def register_providers() -> None:
    """Tell onnxruntime-genai of Qualcomm's, where it is installed."""
    try:
        import onnxruntime_qnn as qnn
    except ImportError:
        return  # a folder for the CPU needs none
    genai.register_execution_provider_library(qnn.get_ep_name(), qnn.get_library_path())
