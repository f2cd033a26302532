"""Forms of a layer of experts on the HTP, as the compiler simulates them: which one a mixture should be exported in.

`python -m benchmarks.experts [--rows 1,8,32,128] [--kept FILE]` prints a table for each model and proxy. Weights are
random, of the real sizes; figures do not depend on their values. Each line of FILE is one simulated graph: a second run
takes it from there.

The forms, for a layer of E experts of which the router chooses k for each token:

- `all`: one graph computes every expert with static weights, and multiplies each by its weight, 0 where it is not
  chosen. Simulated with 4 experts; a layer has E / 4 times as many.
- `expert`: a graph for each expert with static weights. The host routes, and runs the graphs of chosen experts.
- `operands`: one graph whose matrices are uint8 inputs; the host routes, and binds the addresses of a chosen expert's
  integers, for each chosen expert once.
- `operands of k`: the same for all k experts of a token at once: one call a layer. It is the graph that
  `edgekv compile --experts operands` writes, in which the scales of columns are inputs too.
- `gathered`: a graph that gathers the k experts of a token from stacked uint8 constants by the router's indices.
  Simulated with as few experts as there are to choose from, plus 4.

Where tokens choose alike often, the number of experts that a pass reads is smaller: here choices are independent. What
a call costs on a device is not in the simulated figures: `at ... us a call` adds it, and the last column says below
which cost a form is faster than `all` of the same type (of int8 for uint8). The default, 200 us, was measured by clpeak
with onnxruntime-qnn on a Snapdragon X (V73): 196 us for a trivial graph, 203 for a product of 256 x 256
(https://github.com/krrishnarraj/clpeak/issues/197). A call of onnxruntime alone is measured here, on the CPU.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper
from rich.console import Console
from rich.table import Table

from devices.simulated import QCS9100, SA8797, Proxy
from edgekv.errors import EngineError
from edgekv.machine.scratch import scratch_folder
from edgekv.spec import EXPERT_INPUT, EXPERT_SHARES, EXPERT_SUM, ExpertSteps, expert_ports
from exporters.graphs.divided import expert_graph
from exporters.graphs.nodes import QdqNodes, Tensor
from exporters.htp.estimate import simulate
from quant import Encoding

_RESULT = Encoding("u16", 2e-4, 32768)
_SHARE = Encoding("u16", 1 / 65535, 0)
_OPERAND = Encoding("u8", 1e-3, 128)
_SIGMOID = Encoding("u16", 1 / 65536, 0)
_RESULTS = (
    *(EXPERT_INPUT, EXPERT_SUM, "gate", "up", "silu", "mlp", "expert"),
    *("gate_product", "up_product", "down_product"),
)
_SIMULATED = 4  # experts of the form `all`
_NAMES = {"int8": "int8", "int4": "int4", "u8": "uint8"}
_ALONE = {"all": "expert", "operands": "operands"}
_TOGETHER = {"operands": "operands of k", "gathered": "gathered"}
_CALLS = 2000


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a model.

    Attributes:
        hidden: width of the residual.
        inner: width of an expert.
        experts: of a layer.
        used: experts of each token.
        layers: with experts.
    """

    name: str
    hidden: int
    inner: int
    experts: int
    used: int
    layers: int

    def touched(self, rows: int) -> float:
        """How many experts of a layer a number of tokens choose together, if each chooses independently."""
        return self.experts * (1 - (1 - self.used / self.experts) ** rows)

    @property
    def weights(self) -> int:
        """Elements of an expert's matrices."""
        return 3 * self.hidden * self.inner


MIXTURES = (
    Mixture("LFM2-8B-A1B", 2048, 1792, 32, 4, 22),
    Mixture("Granite-3.1-1B-A400M", 1024, 512, 32, 8, 24),
)


@dataclass(frozen=True, slots=True)
class Case:
    """A graph to simulate.

    Attributes:
        form: see the module.
        weights: int8 or int4, static ones; u8 for operands.
        rows: tokens.
        experts: in the graph.
    """

    form: str
    weights: str
    rows: int
    experts: int


class _Graph:
    """The graph of a layer's experts: `sum_e share_e * down_e(silu(gate_e x) * up_e x)`."""

    def __init__(self, mixture: Mixture, case: Case) -> None:
        self._mixture, self._case = mixture, case
        self._nodes = QdqNodes({})
        self._inputs: list[onnx.ValueInfoProto] = []
        self._stored: list[onnx.TensorProto] = []
        self._random = np.random.default_rng(0)

    def model(self) -> onnx.ModelProto:
        """The model, with its constants inside."""
        case, mixture, nodes = self._case, self._mixture, self._nodes
        if case.form == "operands" and case.rows == 1:
            encodings = dict.fromkeys(_RESULTS, _RESULT) | {"sigmoid": _SIGMOID, EXPERT_SHARES: _SHARE}
            ports = expert_ports(mixture.hidden, mixture.inner, case.experts)
            steps = ExpertSteps(gate=1e-3, up=1e-3, down=1e-3)
            return onnx.load_from_string(expert_graph(*ports, encodings, steps))
        x = self._input("x", _RESULT, [1, 1, case.rows, mixture.hidden])
        total: Tensor | None = None
        for expert in range(case.experts):
            share = self._input(f"share_{expert}", _SHARE, [1, 1, case.rows, 1])
            inner = self._inner(x, expert)
            weighed = nodes.emit("Mul", [inner.name, share.name], "weighed", _RESULT)
            down = self._product(weighed, expert, "down", (mixture.inner, mixture.hidden))
            total = down if total is None else nodes.emit("Add", [total.name, down.name], "total", _RESULT)
        assert total is not None
        nodes.quantize(total.name, "result", _RESULT)
        shape = [1, 1, case.rows, mixture.hidden]
        outputs = [helper.make_tensor_value_info("result", TensorProto.UINT16, shape)]
        graph = helper.make_graph(nodes.nodes, "experts", self._inputs, outputs, [*nodes.constants, *self._stored])
        made: onnx.ModelProto = helper.make_model(
            graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11, producer_name="edgekv"
        )
        return made

    def _inner(self, x: Tensor, expert: int) -> Tensor:
        nodes, sizes = self._nodes, (self._mixture.hidden, self._mixture.inner)
        gate, up = (self._product(x, expert, name, sizes) for name in ("gate", "up"))
        sigmoid = nodes.emit("Sigmoid", [gate.name], "sigmoid", Encoding("u16", 1 / 65536, 0))
        silu = nodes.emit("Mul", [gate.name, sigmoid.name], "silu", _RESULT)
        return nodes.emit("Mul", [silu.name, up.name], "inner", _RESULT)

    def _product(self, x: Tensor, expert: int, name: str, sizes: tuple[int, int]) -> Tensor:
        matrix = {"operands": self._operand, "gathered": self._gathered}.get(self._case.form, self._static)
        return self._nodes.emit("MatMul", [x.name, matrix(expert, name, sizes)], name, _RESULT)

    def _static(self, expert: int, name: str, sizes: tuple[int, int]) -> str:
        floats, zeros = f"{name}_{expert}_floats", []
        if self._case.weights == "int4":
            nibbles = self._random.integers(0, 256, sizes[0] * sizes[1] // 2, np.uint8)
            stored = helper.make_tensor(f"{name}_{expert}", TensorProto.INT4, sizes, nibbles.tobytes(), raw=True)
            zeros = [self._nodes.zeros(TensorProto.INT4, [sizes[1]])]
        else:
            integers = self._random.integers(-127, 128, sizes, np.int8)
            stored = numpy_helper.from_array(integers, f"{name}_{expert}")
        steps = self._random.uniform(1e-3, 2e-3, sizes[1]).astype(np.float32)
        self._stored += [stored, numpy_helper.from_array(steps, f"{name}_{expert}_scale")]
        self._nodes.node("DequantizeLinear", [stored.name, f"{name}_{expert}_scale", *zeros], [floats], axis=1)
        return floats

    def _operand(self, expert: int, name: str, sizes: tuple[int, int]) -> str:
        return self._input(f"{name}_{expert}", _OPERAND, [*sizes]).name

    def _gathered(self, expert: int, name: str, sizes: tuple[int, int]) -> str:
        """The matrix of the expert with this place among the chosen ones."""
        table, nodes = f"{name}_table", self._nodes
        if not any(stored.name == table for stored in self._stored):
            count = self._case.experts + _SIMULATED
            integers = self._random.integers(0, 256, (count, *sizes), np.uint8)
            self._stored.append(numpy_helper.from_array(integers, table))
            nodes.dequantize(table, f"{table}_floats", _OPERAND)
        index = f"chosen_{expert}"
        if not any(given.name == index for given in self._inputs):
            self._inputs.append(helper.make_tensor_value_info(index, TensorProto.INT32, [1]))
        return nodes.emit("Gather", [f"{table}_floats", index], f"{name}_gathered", _OPERAND, axis=0).name

    def _input(self, name: str, encoding: Encoding, shape: list[int]) -> Tensor:
        element = TensorProto.UINT8 if encoding.dtype == "u8" else TensorProto.UINT16
        self._inputs.append(helper.make_tensor_value_info(name, element, shape))
        return self._nodes.dequantize(name, f"{name}_floats", encoding)


class Costs:
    """Simulated microseconds of graphs, kept in a file."""

    def __init__(self, kept: Path | None, say: Callable[[str], None]) -> None:
        """Start with what the file has."""
        self._kept, self._say = kept, say
        self._known: dict[str, float | None] = {}
        if kept is not None and kept.exists():
            for line in kept.read_text("utf-8").splitlines():
                row = json.loads(line)
                self._known[row["key"]] = row["us"]

    def us(self, mixture: Mixture, proxy: Proxy, case: Case) -> float | None:
        """Of one call; None if the compiler refuses the graph, or has no cost for one of its operations."""
        key = json.dumps([mixture.name, proxy.soc, *asdict(case).values()])
        if key not in self._known:
            us, note = self._simulated(mixture, proxy, case)
            self._known[key] = us
            self._say(f"{key}: {us} us {note}")
            if self._kept is not None:
                with self._kept.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({"key": key, "us": us, "note": note}) + "\n")
        return self._known[key]

    def _simulated(self, mixture: Mixture, proxy: Proxy, case: Case) -> tuple[float | None, str]:
        with scratch_folder("experts") as folder:
            model = folder / "experts.onnx"
            onnx.save(_Graph(mixture, case).model(), model)
            try:
                costs = simulate([model], proxy)[0].costs
            except EngineError as error:  # a refusal is a result
                return None, " ".join(str(error).split())[:300]
        if costs.missing_ops:
            return None, f"{costs.missing_ops} operations without costs"
        moved = f"{costs.moved_bytes / 1e6:.1f} MB, of them {costs.spilled_bytes / 1e6:.1f} spilled"
        return costs.us, moved


@dataclass(frozen=True, slots=True)
class Line:
    """A form's costs for a pass over some tokens.

    Attributes:
        calls: of the HTP that a layer adds to those of the decoder's own graph.
        read_bytes: of experts' weights, in all layers.
        us: of a layer; None if it is not known.
        gain_us: by which `all` takes longer for a layer.
    """

    form: str
    calls: float
    read_bytes: float
    us: float | None
    gain_us: float | None = None


def lines(mixture: Mixture, proxy: Proxy, rows: int, costs: Costs) -> Iterator[Line]:
    """The forms, for a pass over a number of tokens."""
    touched = mixture.touched(rows)
    width = {"int8": 1.0, "int4": 0.5, "u8": 1.0}

    def read(experts: float, weights: str) -> float:
        return experts * mixture.weights * width[weights] * mixture.layers

    def times(us: float | None, count: float) -> float | None:
        return None if us is None else us * count

    alone = dict[str, float | None]()

    def line(form: str, weights: str, calls: float, experts: float, us: float | None) -> Line:
        whole = alone["int8" if weights == "u8" else weights]
        gain = None if us is None or whole is None or not calls else whole - us
        return Line(f"{form}, {_NAMES[weights]}", calls, read(experts, weights), us, gain)

    for weights in ("int8", "int4"):
        found = costs.us(mixture, proxy, Case("all", weights, rows, _SIMULATED))
        alone[weights] = times(found, mixture.experts / _SIMULATED)
        yield line("all", weights, 0, mixture.experts, alone[weights])
    for form, weights in ("all", "int8"), ("all", "int4"), ("operands", "u8"):
        found = costs.us(mixture, proxy, Case(form, weights, rows, 1))
        yield line(_ALONE[form], weights, 1 + touched, touched, times(found, touched))
    if rows == 1:
        for form, calls in ("operands", 2), ("gathered", 0):
            found = costs.us(mixture, proxy, Case(form, "u8", 1, mixture.used))
            yield line(_TOGETHER[form], "u8", calls, mixture.used, found)


def call_us() -> float:
    """Microseconds of the fastest call of a graph of one sum, with bound memory, on this CPU."""
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        [helper.make_node("Add", ["a", "a"], ["b"])],
        "call",
        [value("a", TensorProto.FLOAT, [8])],
        [value("b", TensorProto.FLOAT, [8])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    binding = session.io_binding()
    binding.bind_cpu_input("a", np.ones(8, np.float32))
    binding.bind_output("b", "cpu")
    times = []
    for _ in range(_CALLS):
        began = perf_counter()
        session.run_with_iobinding(binding)
        times.append(perf_counter() - began)
    return 1e6 * min(times)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="Forms of a layer of experts on the HTP, simulated.")
    parser.add_argument("--rows", default="1,8,32,128", help="tokens of a pass")
    parser.add_argument("--call-us", type=float, default=200.0, help="what a call costs")
    parser.add_argument("--kept", type=Path, help="file that keeps what was simulated")
    given = parser.parse_args()
    console = Console()
    costs = Costs(given.kept, lambda text: console.print(text, highlight=False, markup=False))
    for mixture in MIXTURES:
        for proxy in (QCS9100, SA8797):
            columns = (
                "tokens",
                "form",
                "calls a layer",
                "MB a pass",
                "us a layer",
                "ms a pass",
                "tokens/s",
                f"at {given.call_us:g} us a call",
                "call us <",
            )
            table = Table(title=f"{mixture.name}, {proxy.soc} (V{proxy.arch}): experts alone, simulated")
            for column in columns:
                table.add_column(column, justify="left" if column == "form" else "right")
            for rows in map(int, given.rows.split(",")):
                for line in lines(mixture, proxy, rows, costs):
                    figures = ["-"] * 4
                    if line.us is not None:
                        pass_us = line.us * mixture.layers
                        called_us = pass_us + mixture.layers * line.calls * given.call_us
                        figures = [f"{line.us:,.0f}", f"{pass_us / 1e3:.1f}"]
                        figures += [f"{rows * 1e6 / total_us:,.0f}" for total_us in (pass_us, called_us)]
                    calls = f"{line.calls:.3g}"
                    limit = "" if line.gain_us is None else f"{max(0, line.gain_us / line.calls):,.0f}"
                    table.add_row(str(rows), line.form, calls, f"{line.read_bytes / 1e6:,.0f}", *figures, limit)
            console.print(table)
    console.print(f"A call of onnxruntime on this CPU, a graph of one sum: {call_us():.1f} us at least")


if __name__ == "__main__":
    main()
