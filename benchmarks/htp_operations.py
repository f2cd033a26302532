"""How each operation of a layer differs between the HTP and the CPU engine, given the same integers.

    python -m benchmarks.htp_operations BUNDLE --text FILE [--layers 0,2] [--tokens 96]

The CPU engine runs the text up to the layer. Then every operation runs alone on both engines, on the integers that the
CPU has before it, so no difference is passed on. The table has, for each kind of operation: results, the share of equal
integers, the mean difference (HTP minus CPU: a bias shows truncation), its mean magnitude and the largest one.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from numpy.typing import NDArray
from onnx import helper
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from edgekv.bundle import open_bundle
from edgekv.errors import EdgeKVError
from edgekv.runtime import CpuEngine, HtpEngine
from edgekv.system import link_or_copy
from edgekv.text_file import read_text_file
from exporters.inspect.probe import Probe

Integers = NDArray[Any]
_NO_OPERATION = ("Split", "Concat", "Transpose", "Reshape", "Gather")  # they move integers


@dataclass(frozen=True, slots=True)
class Operations:
    """The operations of a graph, each with inputs and a result of its own.

    Attributes:
        model: its inputs and outputs are integers.
        kinds: for each output the kind of operation, and the tensor that it is in the whole graph.
    """

    model: onnx.ModelProto
    kinds: Mapping[str, tuple[str, str]]


class _Captured:
    """A session that keeps the integers of its last step."""

    def __init__(self, session: ort.InferenceSession, visible: int, values: dict[str, Integers]) -> None:
        self._session = session
        self._visible = visible
        self._values = values

    def get_inputs(self) -> list[ort.NodeArg]:
        inputs: list[ort.NodeArg] = self._session.get_inputs()
        return inputs

    def get_outputs(self) -> list[ort.NodeArg]:
        outputs: list[ort.NodeArg] = self._session.get_outputs()
        return outputs[: self._visible]

    def run(self, names: Sequence[str], feeds: Mapping[str, Integers]) -> list[Integers]:
        every = [output.name for output in self._session.get_outputs()]
        self._values.update(feeds)
        self._values.update(zip(every, self._session.run(every, dict(feeds)), strict=True))
        return [self._values[name] for name in names]


@dataclass(frozen=True, slots=True)
class CapturingEngine(CpuEngine):
    """The CPU engine; keeps the integers of one layer, and compares its operations with the HTP's.

    Attributes:
        graphs: the layers loaded so far.
        values: integers of the layer loaded last.
    """

    graphs: list[onnx.ModelProto] = field(default_factory=list)
    values: dict[str, Integers] = field(default_factory=dict)

    def session(self, graph: Path) -> Any:
        model = onnx.load(graph, load_external_data=False)
        visible = len(model.graph.output)
        shown = {output.name for output in model.graph.output}
        types = {each.name: each.data_type for each in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type == "QuantizeLinear" and node.output[0] not in shown:
                value = helper.make_tensor_value_info(node.output[0], types[node.input[2]], None)
                model.graph.output.append(value)
        self.graphs.append(model)
        self.values.clear()
        onnx.save(model, graph)
        return _Captured(CpuEngine.session(self, graph), visible, self.values)


def operations(model: onnx.ModelProto, values: Mapping[str, Integers]) -> Operations:
    """Take a graph apart; `values` are integers of its tensors, for types and shapes."""
    source = model.graph
    producers = {name: node for node in source.node for name in node.output}
    quantizers = {node.input[0]: node for node in source.node if node.op_type == "QuantizeLinear"}
    nodes: list[onnx.NodeProto] = []
    kinds: dict[str, tuple[str, str]] = {}
    for number, node in enumerate(source.node):
        before = producers.get(node.input[0])
        converts = node.op_type == "QuantizeLinear" and before is not None and before.op_type == "DequantizeLinear"
        if node.op_type in ("DequantizeLinear", *_NO_OPERATION) or (node.op_type == "QuantizeLinear" and not converts):
            continue
        inputs = []
        for name in node.input:
            producer = producers.get(name)
            if producer is not None and producer.op_type == "DequantizeLinear":
                nodes += _dequantized(producer, producers, f"__{number}")
                name = f"{name}__{number}"
            inputs.append(name)
        target = node if converts else quantizers[node.output[0]]
        result, own = target.output[0], f"{target.output[0]}__alone"
        kinds[own] = ("Convert" if converts else node.op_type, result)
        if converts:
            nodes.append(helper.make_node("QuantizeLinear", [inputs[0], *node.input[1:]], [own], name=own))
            continue
        computed = f"{node.output[0]}__{number}"
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        nodes.append(helper.make_node(node.op_type, inputs, [computed], name=computed, **attributes))
        nodes.append(helper.make_node("QuantizeLinear", [computed, *target.input[1:]], [own], name=own))
    read = {name for node in nodes for name in node.input}
    graph = helper.make_graph(
        nodes,
        "operations",
        [_port(name, value) for name, value in values.items() if name in read],
        [_port(own, values[result]) for own, (_, result) in kinds.items()],
        [each for each in source.initializer if each.name in read],
    )
    alone = helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
    return Operations(alone, kinds)


def _dequantized(node: onnx.NodeProto, producers: Mapping[str, onnx.NodeProto], suffix: str) -> list[onnx.NodeProto]:
    """The node again under another name, with those that dequantize its scales."""
    attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    found, inputs = [], list(node.input)
    scales = producers.get(node.input[1])
    if scales is not None:
        found = _dequantized(scales, producers, suffix)
        inputs[1] += suffix
    name = node.output[0] + suffix
    return [*found, helper.make_node("DequantizeLinear", inputs, [name], name=name, **attributes)]


def _port(name: str, value: Integers) -> onnx.ValueInfoProto:
    port: onnx.ValueInfoProto = helper.make_tensor_value_info(
        name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape
    )
    return port


def differences(
    taken: Operations, values: Mapping[str, Integers], cpu: CpuEngine, htp: HtpEngine, folder: Path
) -> dict[str, NDArray[np.int64]]:
    """HTP minus CPU, by kind of operation; the graph's weights lie in `folder`."""
    onnx.save(taken.model, path := folder / "operations.onnx")
    names = list(taken.kinds)
    feeds = {port.name: values[port.name] for port in taken.model.graph.input}
    one, other = (engine.session(path).run(names, feeds) for engine in (cpu, htp))
    found = defaultdict(list)
    for name, a, b in zip(names, one, other, strict=True):
        found[taken.kinds[name][0]].append((b.astype(np.int64) - a.astype(np.int64)).ravel())
    return {kind: np.concatenate(parts) for kind, parts in found.items()}


def operations_table(layer: int, found: Mapping[str, NDArray[np.int64]]) -> Table:
    """A row for each kind of operation."""
    table = Table(title=f"layer {layer}: HTP minus CPU, in steps of each result", box=SIMPLE)
    for column in ("operation", "results", "equal", "mean", "mean magnitude", "most"):
        table.add_column(column, justify="left" if column == "operation" else "right")
    for kind, steps in found.items():
        sizes = np.abs(steps)
        table.add_row(
            kind,
            f"{len(steps):,}",
            f"{(steps == 0).mean():.2%}",
            f"{steps.mean():.3f}",
            f"{sizes.mean():.3f}",
            str(sizes.max()),
        )
    return table


def compare(bundle: Path, text: str, layers: Sequence[int], tokens: int, folder: Path) -> dict[int, dict[str, Any]]:
    """The differences of each of these layers; weights are linked into `folder`.

    Raises:
        EdgeKVError: as `Probe`.
    """
    opened = open_bundle(bundle)
    sink = [] if opened.manifest.sink is None else opened.manifest.sink.tokens
    ids = [*sink, *opened.tokenizer().encode(text, add_special_tokens=False).ids][:tokens]
    cpu, htp = CapturingEngine(), HtpEngine.open(opened, None)
    probe, found = Probe(opened, cpu), {}
    for layer, _ in enumerate(probe.stages([np.array(ids)])):
        if layer in layers:
            taken = operations(cpu.graphs[layer], cpu.values)
            stored = (entry for each in taken.model.graph.initializer for entry in each.external_data)
            for name in {entry.value for entry in stored if entry.key == "location"}:
                if not (folder / name).exists():
                    link_or_copy(opened.path / name, folder / name)
            found[layer] = differences(taken, cpu.values, CpuEngine(), htp, folder)
        if layer == max(layers):
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path, help="a bundle of ONNX graphs")
    parser.add_argument("--text", type=Path, required=True, help="a UTF-8 text file")
    parser.add_argument("--layers", default="0,2", help="numbers of layers, comma-separated")
    parser.add_argument("--tokens", type=int, default=96)
    args = parser.parse_args()
    try:
        layers = [int(each) for each in args.layers.split(",")]
        text = read_text_file(args.text, "--text")
        with TemporaryDirectory(dir=args.bundle.parent, prefix=".edgekv-") as folder:
            for layer, found in compare(args.bundle, text, layers, args.tokens, Path(folder)).items():
                Console().print(operations_table(layer, found))
    except EdgeKVError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
