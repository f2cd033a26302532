"""Compiling the graphs of a `.tflite` file into one context for a chip, with LiteRT's Qualcomm plugin.

The plugin is a program in LiteRT's package and runs as a child process. It loads QNN's libraries, which are taken from
onnxruntime-qnn: the package meant for the plugin downloads them from Qualcomm during its installation.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from importlib import metadata, util
from pathlib import Path
from typing import Any

import flatbuffers

from devices import Device
from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import run_program
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.vendor_libraries import Platform

SOCS = frozenset(["SA8255", "SA8295", "SM8350", "SM8450", "SM8475", "SM8550", "SM8650", "SM8750", "SM8845", "SM8850"])
"""What the plugin of ai-edge-litert 2.3 compiles for."""

_PACKAGES = ("ai_edge_litert", "onnxruntime_qnn")
_COMPILES_ON = Platform("linux", "x86_64")
_DISPATCH = b"DISPATCH_OP"
_REFUSED = re.compile(r"LiteRT Op #\d+ '(\w+)' \(code=\d+\) is not supported")
_ERROR = re.compile(r"ERROR: \[[^\]]*\] ?(.+)")
_SHOWN = 3


def compile_tflite(source: Path, target: Path, graphs: Sequence[str], device: Device) -> None:
    """Compile these signatures of a file into one context that shares their weights.

    Args:
        source: a file that `write_tflite` wrote.
        target: the file to write: the same signatures, each one operator that calls the context.
        graphs: the signatures.
        device: the chip.

    Raises:
        UsageError: the plugin does not know the chip.
        EngineError: a package is missing, or the plugin refused an operator, failed or crashed.
    """
    if device.soc not in SOCS:
        raise UsageError(
            "--device",
            got=f"{device.soc} for TFLite graphs",
            expected=f"one that LiteRT's plugin knows: {', '.join(sorted(SOCS))}",
            fix="Export with --format onnx, which compiles for every chip of the catalogue.",
        )
    if Platform.here() != _COMPILES_ON:
        here = Platform.here()
        raise EngineError(
            "compiling TFLite graphs",
            got=f"{here.system} on {here.machine}",
            expected=f"{_COMPILES_ON.system} on {_COMPILES_ON.machine}, where LiteRT's plugin was tested",
            fix="Compile there; the compiled file is for the device alone.",
        )
    litert, libraries = map(_package, _PACKAGES)
    with scratch_folder("litert") as folder:
        _link_libraries(libraries, folder)
        graph = folder / "graphs.tflite"
        graph.write_bytes(_for_htp(source, graphs))
        done = run_program(
            [
                str(litert / "tools" / "apply_plugin_main"),
                "--cmd=apply",
                f"--model={graph}",
                f"--o={target}",
                "--soc_manufacturer=Qualcomm",
                f"--soc_model={device.soc}",
                f"--libs={litert / 'vendors' / 'qualcomm' / 'compiler'}",
                "--qualcomm_enable_weight_sharing=true",
            ],
            environment={"LD_LIBRARY_PATH": os.pathsep.join([str(folder), str(litert)])},
        )
    cause = _cause(done.output)
    if not done.succeeded or not target.is_file():
        raise _refusal(device, cause or done.ending, "a context binary")
    for name, operators in _operators(target).items():
        if operators != [_DISPATCH]:
            got = f"{len(operators)} operators left in {name}" + (f"; {cause}" if cause else "")
            raise _refusal(device, got, "all operators in one partition")


def compiler() -> str:
    """The packages that compile, with their versions.

    Raises:
        EngineError: one is missing.
    """
    for name in _PACKAGES:
        _package(name)
    return " with ".join(f"{name} {metadata.version(name)}" for name in ("ai-edge-litert", "onnxruntime-qnn"))


def _package(name: str) -> Path:
    spec = util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        raise EngineError(
            "compiling TFLite graphs",
            got=f"no package {name}",
            expected="LiteRT's plugin and the QNN libraries that it loads",
            fix='Install them: pip install "edgekv[litert,htp]"',
        )
    return Path(spec.submodule_search_locations[0])


def _link_libraries(package: Path, folder: Path) -> None:
    """Link the libraries that the plugin loads into one folder."""
    bundled = package.parent / f"{package.name}.libs"
    for library in (*package.glob("libQnn*.so"), *bundled.glob("*")):
        (folder / library.name).symlink_to(library)
    stand_in = folder / "libQnnLpai.so"
    if not stand_in.exists():  # the plugin is linked against a backend that it calls only for other chips
        stand_in.symlink_to(package / "libQnnSaver.so")


def _for_htp(source: Path, graphs: Sequence[str]) -> bytes:
    """The file with only these signatures, in operators that QNN supports.

    CAST from int8 to int16 becomes QUANTIZE, which is equivalent because both tensors have the same scale:
    tflite-runtime lacks this QUANTIZE kernel, and QNN lacks CAST.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.ModelT.InitFromObj(schema.Model.GetRootAs(source.read_bytes(), 0))
    kept = [signature for signature in model.signatureDefs if signature.signatureKey.decode() in graphs]
    model.subgraphs = [model.subgraphs[signature.subgraphIndex] for signature in kept]
    for index, signature in enumerate(kept):
        signature.subgraphIndex = index
    model.signatureDefs = kept
    for code in model.operatorCodes:
        if code.builtinCode == schema.BuiltinOperator.CAST:
            code.builtinCode = code.deprecatedBuiltinCode = schema.BuiltinOperator.QUANTIZE
    builder = flatbuffers.Builder(source.stat().st_size)
    builder.Finish(model.Pack(builder), b"TFL3")
    return bytes(builder.Output())


def _operators(file: Path) -> dict[str, list[Any]]:
    """The operators of each subgraph: the names of custom ones, the numbers of others."""
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(file.read_bytes(), 0)
    operators: dict[str, list[Any]] = {}
    for index in range(model.SubgraphsLength()):
        subgraph = model.Subgraphs(index)
        codes = [model.OperatorCodes(subgraph.Operators(i).OpcodeIndex()) for i in range(subgraph.OperatorsLength())]
        operators[subgraph.Name().decode()] = [code.CustomCode() or code.BuiltinCode() for code in codes]
    return operators


def _cause(log: str) -> str:
    """The operators that the plugin refused, or else its first errors."""
    refused = list(dict.fromkeys(_REFUSED.findall(log)))
    if refused:
        return f"refused: {', '.join(refused)}"
    return "; ".join(list(dict.fromkeys(" ".join(line.split()) for line in _ERROR.findall(log)))[:_SHOWN])


def _refusal(device: Device, got: str, expected: str) -> EngineError:
    return EngineError(
        f"compiling TFLite graphs for {device.soc}",
        got=got,
        expected=expected,
        fix='Install the tested compiler with `pip install "edgekv[litert,htp]"`; if it is, please report this.',
    )
