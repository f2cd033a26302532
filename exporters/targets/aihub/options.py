"""What AI Hub is asked for, in its own option syntax."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

import onnx

from edgekv.bundle import Bundle, GraphRecord
from edgekv.errors import BundleError

Runtime = Literal["qnn_dlc", "qnn_context_binary"]

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def graph_name(graph: GraphRecord) -> str:
    """The graph's name inside of a context binary: `{prompt|token}_ar{AR}_cl{CL}_{i}_of_{n}`, as Genie reads it."""
    kind = "token" if graph.role == "decode" else "prompt"
    return f"{kind}_ar{graph.ar}_cl{graph.context}_1_of_1"


@dataclass(frozen=True, slots=True)
class Ends:
    """The names of a graph's inputs and outputs in the order of the ONNX file, which is what the service goes by."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]

    @classmethod
    def of(cls, bundle: Bundle, graph: GraphRecord) -> Ends:
        """Read them.

        Raises:
            BundleError: a name would break the service's option syntax.
        """
        model = onnx.load(bundle.graph_path(graph), load_external_data=False)
        ends = cls(tuple(each.name for each in model.graph.input), tuple(each.name for each in model.graph.output))
        if wrong := [name for name in (*ends.inputs, *ends.outputs) if not _NAME.fullmatch(name)]:
            raise BundleError(
                f"{graph.file}: input or output",
                got=repr(wrong[0]),
                expected="letters, digits and underscores",
                fix="Export the bundle again with this edgekv.",
            )
        return ends


def compile_options(runtime: Runtime, graph: GraphRecord, ends: Ends, qairt: str | None) -> str:
    """Options of a compile job: outputs keep their names, and all but the ids stay quantized at the graph's ends."""
    outputs = ",".join(ends.outputs)
    return f"--target_runtime {runtime} --quantize_io --output_names {outputs} {enable(graph)}{_version(qairt)}"


def link_options(qairt: str | None) -> str:
    """Options of a link job; weights are shared by name and content without being asked for."""
    return _version(qairt).strip()


def run_options(graph: GraphRecord, qairt: str | None) -> str:
    """Options of a profile or inference job on a binary that may hold several graphs."""
    return enable(graph) + _version(qairt)


def enable(graph: GraphRecord) -> str:
    """The option that names a graph when it is made, and chooses it when it is run."""
    return f"--qnn_options context_enable_graphs={graph_name(graph)}"


def _version(qairt: str | None) -> str:
    return "" if qairt is None else f" --qairt_version {qairt}"
