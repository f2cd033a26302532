"""The options of AI Hub jobs, in AI Hub's syntax."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from exporters.targets.graph_names import GraphName

if TYPE_CHECKING:
    from edgekv.bundle import GraphRecord
    from edgekv.spec import GraphInterface

Runtime = Literal["qnn_dlc", "qnn_context_binary"]


def graph_name(graph: GraphRecord) -> str:
    """The graph's name inside of a context binary."""
    return str(GraphName.of("aihub", graph))


def compile_options(runtime: Runtime, graph: GraphRecord, ports: GraphInterface, qairt: str | None) -> str:
    """Options of a compile job: outputs keep their names; all inputs and outputs but the ids stay quantized."""
    outputs = ",".join(port.name for port in ports.outputs)
    return f"--target_runtime {runtime} --quantize_io --output_names {outputs} {enable(graph)}{_version(qairt)}"


def link_options(qairt: str | None) -> str:
    """Options of a link job. The linker always shares weights of equal name and content."""
    return _version(qairt).strip()


def run_options(graph: GraphRecord, qairt: str | None) -> str:
    """Options of a profile or inference job on a binary that may hold several graphs."""
    return enable(graph) + _version(qairt)


def enable(graph: GraphRecord) -> str:
    """The option that names a graph when it is compiled and selects it when it is run."""
    return f"--qnn_options context_enable_graphs={graph_name(graph)}"


def _version(qairt: str | None) -> str:
    return "" if qairt is None else f" --qairt_version {qairt}"
