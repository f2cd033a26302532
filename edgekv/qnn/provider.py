"""Sessions on Qualcomm's execution provider: the x86 emulator of the HTP here, the NPU on a Snapdragon."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from types import MappingProxyType

import onnxruntime as ort

from devices import Device, Proxy
from edgekv.errors import EngineError
from edgekv.machine.graph_file import WEIGHTS_FOLDER, is_compressed, loadable
from edgekv.machine.native_output import NativeOutput, captured_output
from edgekv.qnn.vendor_libraries import SKEL_VARIABLE, Platform, search_paths

EP_NAME = "QNNExecutionProvider"

_WARNING = 2  # the cause of a refusal is logged as a warning, and only there
_CAUSE = re.compile(r"backendValidateOpConfig\(\) failed|Unsupported nodes in QNN EP|Failed to|failed|QNN_\w*ERROR")
_SHOWN_LINES = 3
_NOTHING: Mapping[str, str] = MappingProxyType({})
_INSTALL = 'Install it: pip install "edgekv[htp]"'


def create_session(
    model_path: Path,
    device: Device | Proxy,
    *,
    session_config: Mapping[str, str] = _NOTHING,
    provider_options: Mapping[str, str] = _NOTHING,
) -> ort.InferenceSession:
    """Compile a whole graph for a device; no node falls back to the CPU.

    Output of the vendor's libraries is kept off the terminal.

    Args:
        model_path: an ONNX file, which may be compressed, or the wrapper of a context binary.
        device: the target. Only its `soc_model` is passed on, which determines everything else.
        session_config: further entries of ONNX Runtime's session configuration.
        provider_options: further options of the provider.

    Raises:
        EngineError: `onnxruntime_qnn` is missing or fails to start, or the graph was refused.
    """
    provider = _provider()
    options = ort.SessionOptions()
    options.log_severity_level = _WARNING
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    weights = {WEIGHTS_FOLDER: str(model_path.parent.absolute())} if is_compressed(model_path) else {}
    for key, value in {**weights, **session_config}.items():
        options.add_session_config_entry(key, value)
    target = {"backend_path": provider.backend_path, "soc_model": str(device.soc_model), **provider_options}
    with captured_output() as output:
        try:
            options.add_provider_for_devices([provider.device], target)
            return ort.InferenceSession(loadable(model_path), options)
        except Exception as error:  # the runtime's exceptions have no common base
            failure = str(error)
    raise EngineError(
        f"{model_path.name} on {device.soc}",
        got=_cause(failure, output),
        expected=f"a graph that the HTP (V{device.arch}) runs completely",
        fix="Export it again with this edgekv; if it stays refused, report the nodes named here.",
    )


def compiler() -> str:
    """The compiler's package and version, as recorded beside binaries.

    Raises:
        EngineError: it is not installed.
    """
    try:
        return f"onnxruntime-qnn {metadata.version('onnxruntime-qnn')}"
    except metadata.PackageNotFoundError:
        raise _missing() from None


class _Provider:
    """The registered provider: its device, and the path of its backend library."""

    def __init__(self, device: ort.OrtEpDevice, backend_path: str) -> None:
        self.device = device
        self.backend_path = backend_path


@lru_cache(maxsize=1)
def _provider() -> _Provider:
    """Registered once per process: the runtime refuses a second registration."""
    try:
        import onnxruntime_qnn as qnn
    except ImportError:
        raise _missing() from None
    on = Platform.here()
    folder = Path(qnn.get_qnn_htp_path()).parent
    if (skels := search_paths(folder, on).get(SKEL_VARIABLE)) is not None:
        os.environ[SKEL_VARIABLE] = skels
    failure = f"no device of {EP_NAME}"
    with captured_output() as output:
        try:
            if not _ep_devices():
                ort.register_execution_provider_library(EP_NAME, qnn.get_library_path())
            if devices := _ep_devices():
                return _Provider(best_device(devices), qnn.get_qnn_htp_path())
        except Exception as error:  # as above
            failure = str(error)
    raise EngineError(
        "engine htp",
        got=_cause(failure, output),
        expected=f"onnxruntime and onnxruntime_qnn in versions that fit (found {ort.__version__}, {qnn.__version__})",
        fix=_INSTALL,
    )


def _missing() -> EngineError:
    if (on := Platform.here()).system in ("android", "macos"):
        return EngineError(
            "engine htp",
            got=f"{on.system}, for which Qualcomm's provider has no wheel",
            expected="Linux or Windows, on a Snapdragon or x86-64",
            fix="Use --engine cpu here, or run this command there.",
        )
    return EngineError(
        "engine htp", got="no package onnxruntime_qnn", expected="Qualcomm's execution provider", fix=_INSTALL
    )


def best_device(devices: Sequence[ort.OrtEpDevice]) -> ort.OrtEpDevice:
    """The NPU among the devices that the provider offers, which may name the GPU and the processor first."""
    npu = ort.OrtHardwareDeviceType.NPU
    return next((device for device in devices if device.device.type == npu), devices[0])


def _ep_devices() -> list[ort.OrtEpDevice]:
    return [device for device in ort.get_ep_devices() if device.ep_name == EP_NAME]


def _cause(failure: str, output: NativeOutput) -> str:
    """The runtime's message says little; the log names the node."""
    lines = [line for line in output.complaints() if _CAUSE.search(line)]
    more = f" (and {len(lines) - _SHOWN_LINES} more lines)" if len(lines) > _SHOWN_LINES else ""
    return "; ".join([" ".join(failure.split()), *lines[:_SHOWN_LINES]]) + more
