"""Runs the HTP compiler in a child process, and finds nodes that compute in float."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from devices import Device, Proxy
from edgekv.errors import EngineError
from edgekv.machine.child import ChildEndedError, call
from edgekv.machine.graph_file import graph_name
from edgekv.machine.scratch import scratch_folder
from edgekv.qnn.worker import HtpJob, HtpStep, create_sessions

if TYPE_CHECKING:
    from edgekv.bundle import HtpCheck  # each child process would import it

_FLOAT_TYPES = {0x0232: "float32", 0x0216: "float16"}  # Qnn_DataType_t


def run_steps(device: Device | Proxy, steps: Sequence[HtpStep]) -> int:
    """Create the sessions in a child process.

    Returns:
        Peak RAM of the process, in bytes.

    Raises:
        EngineError: the compiler is missing, refused a graph, or crashed.
    """
    job = HtpJob(soc=device.soc, is_proxy=isinstance(device, Proxy), steps=list(steps))
    try:
        return call(create_sessions, job)
    except ChildEndedError as error:
        failure = f"the HTP compiler ended with {error.ending}"
    except EngineError as error:
        failure = str(error)
    names = ", ".join(Path(step.model).name for step in steps)
    raise EngineError(
        f"compiling {names} for {device.soc}",
        got=failure,
        expected="graphs that the HTP compiler accepts whole",
        fix="Install the tested compiler with `pip install edgekv[htp]`; if it is, please report this graph.",
    )


def floating_nodes(models: Sequence[Path], device: Device) -> list[str]:
    """The QNN nodes that would compute in float on this device, as `graph: node (operation, type)`.

    The provider silently computes in float where it cannot use integers, so its dump of the QNN graph is read. An
    empty list means integers only.

    Raises:
        EngineError: the compiler is missing or refused a graph.
    """
    _, nodes_of_graphs = run_and_lint(device, [HtpStep(model=str(model)) for model in models])
    return [node for nodes in nodes_of_graphs for node in nodes]


def float_verdict(float_nodes: Sequence[str], *, allow_float: bool) -> tuple[HtpCheck, list[str]]:
    """The outcome of the check that found these float nodes, and the nodes.

    Raises:
        EngineError: there are some, and they are not allowed.
    """
    if not float_nodes:
        return "integers-only", []
    if not allow_float:
        raise EngineError(
            "float check",
            got=f"{len(float_nodes)} nodes that compute in float, the first: {', '.join(float_nodes[:3])}",
            expected="integers only",
            fix="Report this model, or accept the slow nodes with --allow-float.",
        )
    return "float-allowed", list(float_nodes)


def run_and_lint(device: Device, steps: Sequence[HtpStep]) -> tuple[int, list[list[str]]]:
    """Create the sessions in a child process, and find nodes that compute in float.

    Returns:
        Peak RAM of the process, in bytes; and for each session its float nodes, named as by `floating_nodes`.

    Raises:
        EngineError: the compiler is missing, refused a graph, or crashed.
    """
    with scratch_folder("lint") as scratch:
        folders, dumping = [], []
        for number, step in enumerate(steps):
            folders.append(folder := scratch / str(number))
            folder.mkdir()
            options = step.provider_options | {"dump_json_qnn_graph": "1", "json_qnn_graph_dir": str(folder)}
            dumping.append(msgspec.structs.replace(step, provider_options=options))
        peak_bytes = run_steps(device, dumping)
        nodes_of_graphs = [
            [f"{graph_name(Path(step.model))}: {node}" for node in _floating_in(folder)]
            for step, folder in zip(steps, folders, strict=True)
        ]
    return peak_bytes, nodes_of_graphs


def _floating_in(folder: Path) -> list[str]:
    dumps = [path for path in sorted(folder.glob("*.json")) if not path.stem.endswith("_tensor_log")]
    if not dumps:
        raise EngineError(
            "float check",
            got="no dump of the QNN graph",
            expected="one from the HTP compiler",
            fix="Use the tested onnxruntime-qnn, `pip install edgekv[htp]`.",
        )
    nodes = []
    for path in dumps:
        graph = json.loads(path.read_text("utf-8"))["graph"]
        types = {name: tensor["data_type"] for name, tensor in graph["tensors"].items()}
        for name, node in graph["nodes"].items():
            touched = {types.get(tensor) for tensor in (*node["input_names"], *node["output_names"])}
            floats = [text for code, text in _FLOAT_TYPES.items() if code in touched]
            if floats:
                nodes.append(f"{name} ({node['type']}, {' and '.join(floats)})")
    return nodes
