"""How fast the graphs of a bundle would be on a chip, by the HTP compiler's simulation of chips that stand for it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from devices import Device, NoProxyError, Proxy, proxies_for
from edgekv import qnn
from edgekv.bundle import Bundle, GraphRecord, PartRecord
from edgekv.errors import UsageError
from edgekv.htp_options import HtpOptions
from edgekv.scratch import scratch_folder
from edgekv.spec import Role
from exporters.compile import open_store
from exporters.graphs.parts import build_part, save_part
from exporters.htp.compile import COMPILER_DEFAULTS
from exporters.htp.estimate import Simulation, options_on
from exporters.htp.schedule import UNITS, Unit
from exporters.options import RunOptions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.parallel import compiler_bytes
from exporters.pipeline.piece import Plan
from exporters.pipeline.pieces import EstimatePiece, read_estimate
from exporters.pipeline.serial import run_serial
from exporters.progress import Progress, silent

EQUAL_SHARE = 0.08
"""Times that differ by less are called equal: the simulation is no finer."""

_PLAIN = RunOptions()
_SLICE_LAYERS = 2
_WHOLE_PARAMETERS = 300_000_000
"""In layers; larger decoders are compiled in slices."""

PUBLISHED = (
    "Published decode speed of the same chips was 0.9 to 1.9 times the simulated one, prefill 0.35 to 0.46 times: "
    "the host, its calls and the DRAM of a real device are not in it"
)


class GraphEstimate(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated speed of a graph on one proxy.

    Attributes:
        graph: its name.
        role: what it is for.
        ar: tokens per inference.
        context: S, tokens.
        proxy: part number of the simulated chip.
        us: microseconds of a run, all parts together.
        low_us: the lower estimate.
        high_us: the upper estimate.
        tokens_per_s: AR tokens in that time; None if the figures are void.
        moved_bytes: between DRAM and VTCM.
        gb_per_s: that over the time, 10^9 bytes a second.
        bound: the busiest unit: memory, HVX, HMX, or the thread that issues operations.
        busy: the share of time that each unit is busy.
        spilled_bytes: intermediate results that do not fit the VTCM.
        missing_ops: operations without costs; above 0, all figures are void.
    """

    graph: str
    role: Role
    ar: int
    context: int
    proxy: str
    us: float
    low_us: float
    high_us: float
    tokens_per_s: float | None
    moved_bytes: int
    gb_per_s: float
    bound: str
    busy: dict[Unit, float]
    spilled_bytes: int
    missing_ops: int


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated speed of a bundle on a chip. Nothing was measured.

    Attributes:
        source: the bundle.
        device: part number of the chip.
        proxies: part numbers of the chips that stand for it.
        compiler: the package that simulates, with its version.
        vtcm_mb: tightly coupled memory that graphs may use, MiB.
        optimization: level of the compiler; None for its own, 2.
        is_sliced: whether times are sums of slices of layers.
        graphs: each graph on each proxy.
        notes: how far to trust it.
    """

    source: str
    device: str
    proxies: list[str]
    compiler: str
    vtcm_mb: int
    optimization: int | None
    is_sliced: bool
    graphs: list[GraphEstimate]
    notes: list[str]


@dataclass(frozen=True, slots=True)
class _Binary:
    """Graphs that are compiled together.

    Attributes:
        files: their ONNX files, by the name of the graph that each belongs to.
        times: how often it runs in a run of these graphs.
    """

    files: Mapping[str, Path]
    times: int = 1


def estimate_bundle(
    bundle: Bundle,
    device: Device,
    run: RunOptions = _PLAIN,
    *,
    in_slices: bool | None = None,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> Estimate:
    """Simulate every graph that ships, in binaries as `edgekv compile` writes them.

    Results are kept in the cache folder, by the content of the graphs, the compiler, the chip and the options.

    Args:
        bundle: what to estimate.
        device: the chip.
        run: where results are kept.
        in_slices: compile slices of two layers and the head, and add their times; None for large models alone.
        progress: called for each binary.
        options: of the compiler.

    Raises:
        UsageError: no chip stands for this one, or the bundle has no graphs for the HTP.
        EngineError: the compiler is missing, crashed, or writes something else.
    """
    proxies = _checked(bundle, device, options)
    manifest, compiler = bundle.manifest, qnn.compiler()
    graphs = [graph for graph in manifest.graphs if graph.role != "score"]
    if in_slices is None:
        in_slices = manifest.model.sizes.all_layer_parameters > _WHOLE_PARAMETERS
    store, plan = open_store(run), Plan()
    inputs = Inputs(store, None, progress)
    planned = list[tuple[Proxy, _Binary, str]]()
    with scratch_folder("slices") as scratch:
        binaries = [*(_slices(bundle, graphs, scratch) if in_slices else _whole(bundle, graphs))]
        for binary in binaries:
            folder = next(iter(binary.files.values())).parent
            names = tuple(path.name for path in binary.files.values())
            hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in binary.files.values()]
            # Not the weights: their values change no schedule.
            given = plan.give(_nothing, "graphs", names, hashes)
            inputs.adopt(given, folder)
            for proxy in proxies:
                piece = EstimatePiece(given, names, proxy.soc, compiler, options_on(proxy, device, options))
                planned.append((proxy, binary, plan.put(piece, compiler_bytes([*binary.files.values()]))))
        run_serial(plan, [name for _, _, name in planned], inputs, progress, resume=True)
    found = []
    for graph in graphs:
        for proxy in proxies:
            costs = [
                (binary.times, read_estimate(store, name)[[*binary.files].index(graph.name)])
                for on, binary, name in planned
                if on is proxy and graph.name in binary.files
            ]
            found.append(_summed(graph, proxy, costs))
    return Estimate(
        source=str(bundle.path),
        device=device.soc,
        proxies=[proxy.soc for proxy in proxies],
        compiler=compiler,
        vtcm_mb=options.vtcm_mb or device.vtcm_mb,
        optimization=options.optimization,
        is_sliced=in_slices,
        graphs=found,
        notes=[*_notes(device, proxies, in_slices, found)],
    )


def _checked(bundle: Bundle, device: Device, options: HtpOptions) -> Sequence[Proxy]:
    options.check_for_compiling(device)
    if bundle.manifest.graph_format == "tflite":
        raise UsageError(
            str(bundle.path),
            got="TFLite graphs",
            expected="ONNX graphs, which the HTP compiler simulates",
            fix="Export with --format onnx.",
        )
    try:
        return proxies_for(device)
    except NoProxyError as error:
        fix = "No chip of this HTP version can be estimated; `edgekv plan` gives its bandwidth."
        raise UsageError("--device", got=error.got, expected=error.expected, fix=fix) from None


def _whole(bundle: Bundle, graphs: Sequence[GraphRecord]) -> Iterator[_Binary]:
    """A binary for each part of all graphs."""
    stages: dict[range, dict[str, PartRecord]] = {}
    for graph in graphs:
        for part in graph.parts:
            stages.setdefault(part.layers, {})[graph.name] = part
    for parts in stages.values():
        yield _Binary({name: bundle.path / part.file for name, part in parts.items()})


def _slices(bundle: Bundle, graphs: Sequence[GraphRecord], folder: Path) -> Iterator[_Binary]:
    """A binary for each kind of pair of layers, and one for the head; equal ones are compiled once."""
    layers = bundle.manifest.model.layers
    ranges = [range(at, min(at + _SLICE_LAYERS, layers)) for at in range(0, layers, _SLICE_LAYERS)]
    kinds, counts = dict[tuple[str, ...], range](), Counter[tuple[str, ...]]()
    for covered in ranges:
        form = tuple(_form(bundle, graph, covered) for graph in graphs)
        kinds.setdefault(form, covered)
        counts[form] += 1
    for form, covered in kinds.items():
        yield _Binary(_write(bundle, graphs, covered, folder), counts[form])
    yield _Binary(_write(bundle, graphs, range(layers, layers), folder))


def _part(graph: GraphRecord, layers: range, *, head: bool) -> PartRecord:
    name = f"{graph.name}_l{layers.start}" if layers else f"{graph.name}_head"
    return PartRecord(
        name=name, file=f"{name}.onnx", first_layer=layers.start, stop_layer=layers.stop, embeds=False, head=head
    )


def _write(bundle: Bundle, graphs: Sequence[GraphRecord], layers: range, folder: Path) -> dict[str, Path]:
    place = folder / str(layers.start)
    place.mkdir()
    files = {}
    for graph in graphs:
        part = _part(graph, layers, head=not layers)
        files[graph.name] = place / part.file
        save_part(build_part(bundle.manifest, graph, part), files[graph.name], bundle.path)
    return files


def _form(bundle: Bundle, graph: GraphRecord, layers: range) -> str:
    """A hash of what a graph of these layers does, whichever layers and values they are."""
    model = build_part(bundle.manifest, graph, _part(graph, layers, head=False)).finish()
    digest = hashlib.sha256()
    for node in model.graph.node:
        attributes = b"".join(sorted(each.SerializeToString() for each in node.attribute))
        digest.update(f"{node.op_type}\0".encode() + attributes)
    for tensor in model.graph.initializer:
        digest.update(f"{tensor.data_type}{[*tensor.dims]}".encode())
    for port in model.graph.input:
        digest.update(port.type.SerializeToString())
    return digest.hexdigest()


def _summed(graph: GraphRecord, proxy: Proxy, simulated: Sequence[tuple[int, Simulation]]) -> GraphEstimate:
    def total(figure: Callable[[Simulation], float]) -> float:
        return sum(times * figure(each) for times, each in simulated)

    us, missing = total(lambda each: each.costs.us), int(total(lambda each: each.costs.missing_ops))
    moved = int(total(lambda each: each.costs.moved_bytes))
    busy = dict.fromkeys(UNITS, 0.0)
    for times, each in simulated:
        for unit, share in each.schedule.busy().items():
            busy[unit] += times * each.costs.us * share / us
    largest = max(UNITS, key=lambda unit: busy[unit])
    return GraphEstimate(
        graph=graph.name,
        role=graph.role,
        ar=graph.ar,
        context=graph.context,
        proxy=proxy.soc,
        us=us,
        low_us=total(lambda each: each.costs.low_us),
        high_us=total(lambda each: each.costs.high_us),
        tokens_per_s=None if missing else graph.ar * 1e6 / us,
        moved_bytes=moved,
        gb_per_s=moved / us / 1e3,
        bound="memory" if largest == "DMA" else largest,
        busy=busy,
        spilled_bytes=int(total(lambda each: each.costs.spilled_bytes)),
        missing_ops=missing,
    )


def _notes(device: Device, proxies: Sequence[Proxy], in_slices: bool, graphs: Sequence[GraphEstimate]) -> Iterator[str]:
    named = " and ".join(f"{proxy.soc} (V{proxy.arch})" for proxy in proxies)
    stands = "stands" if len(proxies) == 1 else "stand"
    yield f"Simulated by the HTP compiler, not measured: {named} {stands} for {device.soc} (V{device.arch})"
    yield PUBLISHED
    yield f"Times that differ by less than {EQUAL_SHARE:.0%} are equal"
    if in_slices:
        yield f"Sums of slices of {_SLICE_LAYERS} layers and of the head"
    for graph in graphs:
        if graph.missing_ops:
            yield f"{graph.graph} on {graph.proxy}: void, {graph.missing_ops} operations have no costs"


def _nothing(folder: Path) -> None:
    """Graphs are read where they are."""
