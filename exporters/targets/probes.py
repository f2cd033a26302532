"""Probes for `edgekv doctor`: the runtimes and services that exporters write for."""

from __future__ import annotations

import ctypes
import json

from edgekv.doctor import Finding, require
from edgekv.doctor.samples import write_onnx_norm
from edgekv.errors import UsageError
from edgekv.machine.scratch import scratch_folder
from exporters.targets.aihub.account import connect
from exporters.targets.genai.folder import PACKAGE, check_version
from exporters.targets.genie.dialog import find_library


def genai() -> Finding:
    """onnxruntime-genai, in a version that runs our folders, loads a pipeline of one graph."""
    version = require(PACKAGE, "genai")
    check_version()
    import onnxruntime_genai

    stage = {"norm": {"filename": "norm.onnx", "inputs": ["x"], "outputs": ["y"]}}
    model = {"type": "decoder-pipeline", "context_length": 2, "vocab_size": 2, "decoder": {"pipeline": [stage]}}
    with scratch_folder("doctor") as folder:
        write_onnx_norm(folder / "norm.onnx")
        (folder / "genai_config.json").write_text(json.dumps({"model": model, "search": {}}))
        onnxruntime_genai.Model(str(folder))
    return Finding(status="works", detail=version)


def genie() -> Finding:
    """libGenie.so of Qualcomm's wheel is loaded and says its version."""
    package = require("onnxruntime-qnn", "htp")
    library = ctypes.CDLL(str(find_library()))
    numbers = (getattr(library, f"Genie_getApi{part}Version")() for part in ("Major", "Minor", "Patch"))
    return Finding(status="works", detail=f"Genie {'.'.join(map(str, numbers))} of {package}")


def aihub() -> Finding:
    """Qualcomm AI Hub: whether the client is configured, and if it is, which devices the service has."""
    version = require("qai-hub", "hub")
    try:
        account = connect()
    except UsageError as error:
        return Finding(status="not configured", detail=version, fix=error.fix)
    with account.asking("its devices") as client:
        devices = [device.name for device in client.get_devices()]
    names = list(dict.fromkeys(devices))
    detail = f"{version}: {len(names)} devices of {account.service}"
    return Finding(status="works", detail=detail, devices=names)
