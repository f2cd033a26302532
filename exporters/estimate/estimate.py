"""How fast the graphs of a bundle would be on a chip, by the HTP compiler's simulation of chips that stand for it."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Literal, cast

import onnx
from msgspec import structs

from devices import Device, NoProxyError, Proxy, proxies_for
from edgekv.bundle import ENCODER, Bundle, GraphFormat, GraphRecord, PartRecord
from edgekv.errors import UsageError
from edgekv.machine.scratch import scratch_folder
from edgekv.plan.estimate import EQUAL_SHARE, Estimate, GraphEstimate
from edgekv.plan.options import DEFAULT_KEY_LAYOUT, PlanOptions
from edgekv.plan.speed import find_measured
from edgekv.qnn import provider as qnn
from edgekv.qnn.options import FASTEST, HtpOptions
from edgekv.spec import (
    CONFIG,
    DecoderInterface,
    DecoderSpec,
    EncoderSpec,
    EncodingTypes,
    KeyLayout,
    KvDtype,
    PictureSpec,
    Vocabulary,
    describe,
    encoder_family,
    read_config,
)
from edgekv.spec.encoders.processor import read_processor
from exporters.checkpoint.rotate import applied_rotation, shared_vocabulary
from exporters.estimate.encoder import encoder_slices, write_random_encoder
from exporters.graphs.onnx import plan_graphs
from exporters.graphs.parts import build_layers, build_part, save_part, with_boundaries
from exporters.graphs.qdq import QdqOps
from exporters.graphs.random_weights import RandomWeights
from exporters.graphs.split import Split
from exporters.htp.compile import COMPILER_DEFAULTS, DEFAULT_LEVEL, with_level
from exporters.htp.estimate import Simulation, options_on
from exporters.htp.schedule import UNITS, Event
from exporters.options import RunOptions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.parallel import compiler_bytes
from exporters.pipeline.piece import Plan
from exporters.pipeline.pieces import EstimatePiece, read_estimate
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import store_in
from exporters.progress import Progress, silent
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.recipe import Recipe, find_recipe
from exporters.resources import full_disk_named
from quant import Encoding, Range

_PLAIN = RunOptions()
_LEVELS = (1, 2, 3)
_SLICE_LAYERS = 2
_MIN_SHARE = 0.02
_REACH = 8.0  # of every result of a decoder that was not calibrated
_WHOLE_LAYERS = 8
"""Decoders of more are compiled in slices, which have eight layers together: the time grows faster than their number.
"""

PUBLISHED = (
    "Published decode speed of the same chips was 0.8 to 1.6 times the simulated one, prefill 0.28 to 0.35 times: "
    "the host, its calls and the DRAM of a real device are not in it"
)


@dataclass(frozen=True, slots=True)
class _Decoder:
    """A decoder whose graphs can be built of any layers.

    Attributes:
        name: for messages.
        layers: their number.
        graphs: that ship.
        build: makes a part of a graph.
        weights: writes or links the files of weights that parts point into.
    """

    name: str
    layers: int
    graphs: Sequence[GraphRecord]
    build: Callable[[GraphRecord, PartRecord], QdqOps]
    weights: Path


@dataclass(frozen=True, slots=True)
class _Encoder:
    """A vision encoder, whose run takes a tile; see `GraphEstimate`."""

    ar: int
    name: str = ENCODER
    role: Literal["encoder"] = "encoder"
    context: int = 0


@dataclass(frozen=True, slots=True)
class _Binary:
    """Graphs that are compiled together.

    Attributes:
        files: their ONNX files, by the name of the graph that each belongs to.
        times: how often its time counts in that of these graphs; see `_slices`.
    """

    files: Mapping[str, Path]
    times: int = 1


@dataclass(frozen=True, slots=True)
class ScheduledEstimate:
    """An estimate, and the schedules that it was made of.

    Attributes:
        estimate: the figures.
        layers: the events during a layer, by graph and proxy.
    """

    estimate: Estimate
    layers: Mapping[tuple[str, str], Sequence[Event]]


def estimate_bundle(
    bundle: Bundle,
    device: Device,
    run: RunOptions = _PLAIN,
    *,
    in_slices: bool | None = None,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> Estimate:
    """The figures of `simulate_bundle`."""
    return simulate_bundle(bundle, device, run, in_slices=in_slices, progress=progress, options=options).estimate


def simulate_bundle(
    bundle: Bundle,
    device: Device,
    run: RunOptions = _PLAIN,
    *,
    in_slices: bool | None = None,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> ScheduledEstimate:
    """Simulate every graph that ships, the vision encoder too, in binaries as `edgekv compile` writes them.

    Results are kept in the cache folder, by the content of the graphs, the compiler, the chip and the options.

    Args:
        bundle: what to estimate.
        device: the chip.
        run: where results are kept.
        in_slices: compile slices of two and four layers and the head, and add their times; None where that is less.
        progress: called for each binary.
        options: of the compiler.

    Raises:
        UsageError: no chip stands for this one, or the bundle has no graphs for the HTP.
        EngineError: the compiler is missing, crashed, or writes something else.
    """
    check_estimate(device, bundle.manifest.graph_format)
    proxies, manifest = _proxies(device, options), bundle.manifest
    graphs = [graph for graph in manifest.graphs if graph.role != "score"]
    if in_slices is None:
        in_slices = manifest.model.layers > _WHOLE_LAYERS
    decoder = _Decoder(str(bundle.path), manifest.model.layers, graphs, partial(build_part, manifest), bundle.path)
    runs: list[GraphRecord | _Encoder] = [*graphs]
    with scratch_folder("slices") as scratch, full_disk_named(scratch, "slices of graphs"):
        binaries = [*(_slices(decoder, scratch) if in_slices else _whole(bundle, graphs))]
        if manifest.vision is not None:
            runs.append(_Encoder(manifest.vision.encoder.rows))
            binaries.append(_Binary({ENCODER: bundle.path / manifest.vision.file}))
        simulated = _simulated(runs, binaries, proxies, device, run, progress, options)
    return _made(bundle.path.name, device, proxies, simulated, options, in_slices=in_slices)


def estimate_config(
    path: Path,
    device: Device,
    graphs: PlanOptions,
    *,
    key_layout: KeyLayout = DEFAULT_KEY_LAYOUT,
    run: RunOptions = _PLAIN,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> Estimate:
    """Simulate the graphs that a checkpoint would have, from its `config.json` alone: in slices, of random weights.

    Args:
        path: a `config.json`, or a folder that has one.
        device: the chip.
        graphs: their context, recipe, type of the cache and tokens per inference.
        key_layout: of the keys in the cache.
        run: where results are kept.
        progress: called for each binary.
        options: of the compiler.

    Raises:
        UsageError: no chip stands for this one, or the recipe chooses types by the weights.
        CheckpointError: the `config.json` cannot be read, or is of no known architecture.
        EngineError: the compiler is missing, crashed, or writes something else.
        BundleError: the disk of temporary files is full.
    """
    types = find_recipe(graphs.recipe)
    if types.mean_bits is not None or types.keep_stored:
        raise UsageError(
            "--recipe",
            got=f"{graphs.recipe}, which chooses types by the weights",
            expected="a recipe with a type for each matrix",
            fix="Use --recipe w4a16, or export it, and use edgekv estimate on the bundle.",
        )
    file = path / CONFIG if path.is_dir() else path
    config = read_config(file)
    spec = describe(config)
    types.check(spec)
    family, encoder = encoder_family(config), None
    if family is not None:
        processor = read_processor(file.parent, is_needed=False)
        encoder = family.describe(config, processor), family.pictures(config, processor)
        spec = spec if family.decoder is None else family.decoder(config, spec)
    planned = plan_graphs(graphs.ar, (graphs.context,), Split.whole(spec.layers))
    records = [graph for graph in planned if graph.role != "score"]
    interface = DecoderInterface.of(spec, graphs.context, cast(KvDtype, graphs.kv), key_layout, "u16")
    estimate = estimate_spec(spec, types, records, interface, device, run, progress=progress, options=options)
    if encoder is not None:
        tile = _estimate_encoder(*encoder, device, run, progress, options)
        estimate = structs.replace(estimate, graphs=[*estimate.graphs, *tile])
    return structs.replace(estimate, source=str(path))


def _estimate_encoder(
    spec: EncoderSpec,
    pictures: PictureSpec,
    device: Device,
    run: RunOptions,
    progress: Progress,
    options: HtpOptions,
) -> list[GraphEstimate]:
    """A tile on each proxy, in encoders of few layers; see `encoder_slices`."""
    with scratch_folder("slices") as scratch, full_disk_named(scratch, "slices of graphs"):
        binaries = list[_Binary]()
        for number, (part, times) in enumerate(encoder_slices(spec)):
            file = scratch / str(number) / f"{ENCODER}.onnx"
            file.parent.mkdir()
            write_random_encoder(part, pictures, file)
            binaries.append(_Binary({ENCODER: file}, times))
        simulated = _simulated(
            [_Encoder(spec.rows)], binaries, _proxies(device, options), device, run, progress, options
        )
    return [graph for graph, _ in simulated]


def estimate_spec(
    spec: DecoderSpec,
    recipe: Recipe,
    graphs: Sequence[GraphRecord],
    interface: DecoderInterface,
    device: Device,
    run: RunOptions = _PLAIN,
    *,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> Estimate:
    """Simulate graphs of a decoder in slices, of random weights in the types of a recipe.

    Args:
        spec: the decoder. Its vocabulary is where an export with the recipe would have it.
        recipe: of the integer types, with a rule for each matrix.
        graphs: which to simulate, in one binary.
        interface: of the graphs.
        device: the chip.
        run: where results are kept.
        progress: called for each binary.
        options: of the compiler.

    Raises:
        UsageError: no chip stands for this one.
        EngineError: the compiler is missing, crashed, or writes something else.
    """
    recipe = recipe.for_decoder(spec.sizes)
    vocabulary: Vocabulary = "apart"
    if recipe.shares_vocabulary(spec):
        vocabulary = shared_vocabulary(applied_rotation(spec, recipe.rotation))
        recipe = recipe.sharing_vocabulary(vocabulary)
    spec = structs.replace(spec, vocabulary=vocabulary)
    proxies, weights = _proxies(device, options), RandomWeights(spec, recipe)
    encodings = _made_up_encodings(spec, interface.cache.context, interface.cache.kv_dtype)

    def build(graph: GraphRecord, part: PartRecord) -> QdqOps:
        return build_layers(QdqOps(graph, part, interface, spec, encodings, weights), graph, part)

    with scratch_folder("slices") as scratch, full_disk_named(scratch, "slices of graphs"):
        weights.write(scratch)
        binaries = [*_slices(_Decoder(recipe.name, spec.layers, graphs, build, scratch), scratch)]
        simulated = _simulated(graphs, binaries, proxies, device, run, progress, options)
    return _made(recipe.name, device, proxies, simulated, options, in_slices=True).estimate


def fastest_level(
    bundle: Bundle,
    device: Device,
    graphs: Sequence[str],
    run: RunOptions = _PLAIN,
    *,
    progress: Progress = silent,
    options: HtpOptions = COMPILER_DEFAULTS,
) -> int:
    """The level of optimization with the shortest simulated schedules of graphs that are compiled into one binary.

    Slices are simulated at each level. Of levels that are equal, the default wins.

    Args:
        bundle: has the graphs.
        device: the chip.
        graphs: their names.
        run: where results are kept.
        progress: called for each binary.
        options: of the compiler.

    Raises:
        UsageError: no chip stands for this one, or the bundle has no graphs for the HTP.
        EngineError: the compiler is missing, crashed, or writes something else.
    """
    check_estimate(device, bundle.manifest.graph_format)
    proxies, manifest = _proxies(device, options), bundle.manifest
    records = [graph for graph in manifest.graphs if graph.name in graphs]
    decoder = _Decoder(str(bundle.path), manifest.model.layers, records, partial(build_part, manifest), bundle.path)
    times = dict[int, float]()
    with scratch_folder("slices") as scratch, full_disk_named(scratch, "slices of graphs"):
        binaries = [*_slices(decoder, scratch)]
        for level in _LEVELS:
            chosen = replace(options, optimization=level)
            simulated = _simulated(records, binaries, proxies, device, run, progress, chosen)
            times[level] = math.prod(graph.us for graph, _ in simulated) ** (1 / len(simulated))
    best = min(times, key=lambda level: times[level])
    is_equal = times[DEFAULT_LEVEL] - times[best] < EQUAL_SHARE * times[DEFAULT_LEVEL]
    return DEFAULT_LEVEL if is_equal else best


def _level(options: HtpOptions) -> int:
    level = with_level(options).optimization
    assert isinstance(level, int), "the level is found before"
    return level


def _made_up_encodings(spec: DecoderSpec, context: int, kv: KvDtype) -> dict[str, Encoding]:
    """Encodings of a decoder on which nothing was calibrated: all results have one range."""
    results, seen = decoder_results(spec), Range(-_REACH, _REACH)
    states: KvDtype = "u16" if spec.convolution_states is None else spec.convolution_states.dtype
    factors = [rope.rotation(context).attention_factor for rope in spec.ropes]
    sources = {source for result in results.values() for source in result.sources}
    encodings = choose_encodings(results, dict.fromkeys(sources, seen), factors, EncodingTypes("u16", kv, states))
    return with_boundaries(spec, encodings)


def _simulated(
    graphs: Sequence[GraphRecord | _Encoder],
    binaries: Sequence[_Binary],
    proxies: Sequence[Proxy],
    device: Device,
    run: RunOptions,
    progress: Progress,
    options: HtpOptions,
) -> list[tuple[GraphEstimate, Sequence[Event]]]:
    """Each graph on each proxy, the times of its binaries added; and a layer of the most frequent one."""
    compiler, store, plan = qnn.compiler(), store_in(run.cache_dir), Plan()
    store.check()
    inputs, planned = Inputs(store, None, progress), list[tuple[Proxy, _Binary, str]]()
    for binary in binaries:
        names = tuple(path.name for path in binary.files.values())
        hashes = [hashlib.sha256(path.read_bytes()).hexdigest() for path in binary.files.values()]
        # Not the weights: their values change no schedule.
        names_and_hashes = plan.give(_nothing, "graphs", names, hashes)
        inputs.adopt(names_and_hashes, next(iter(binary.files.values())).parent)
        for proxy in proxies:
            on_proxy = with_level(options_on(proxy, device, options))
            piece = EstimatePiece(names_and_hashes, names, proxy.soc, compiler, on_proxy)
            planned.append((proxy, binary, plan.put(piece, compiler_bytes([*binary.files.values()]))))
    run_serial(plan, [name for _, _, name in planned], inputs, progress, resume=True)
    simulated = list[tuple[GraphEstimate, Sequence[Event]]]()
    for graph in graphs:
        for proxy in proxies:
            costs = [
                (binary.times, read_estimate(store, name)[[*binary.files].index(graph.name)])
                for on, binary, name in planned
                if on is proxy and graph.name in binary.files
            ]
            _, most = max(costs, key=lambda cost: (len(cost[1].schedule.layer()), cost[1].costs.us))
            simulated.append((_summed(graph, proxy, costs), most.schedule.layer()))
    return simulated


def _made(
    source: str,
    device: Device,
    proxies: Sequence[Proxy],
    simulated: Sequence[tuple[GraphEstimate, Sequence[Event]]],
    options: HtpOptions,
    *,
    in_slices: bool,
) -> ScheduledEstimate:
    graphs = [graph for graph, _ in simulated]
    estimate = Estimate(
        source=source,
        device=device.soc,
        proxies=[proxy.soc for proxy in proxies],
        compiler=qnn.compiler(),
        vtcm_mb=options.vtcm_mb or device.vtcm_mb,
        optimization=_level(options),
        is_sliced=in_slices,
        graphs=graphs,
        notes=[*_notes(device, proxies, in_slices, graphs)],
    )
    return ScheduledEstimate(estimate, {(graph.graph, graph.proxy): layer for graph, layer in simulated})


def check_estimate(device: Device, graph_format: GraphFormat) -> None:
    """Refuse what cannot be simulated, before anything is done.

    Raises:
        UsageError: no chip stands for this one, or the graphs are not for the HTP compiler.
    """
    if graph_format == "tflite":
        raise UsageError(
            "estimate",
            got="TFLite graphs",
            expected="ONNX graphs, which the HTP compiler simulates",
            fix="Export with --format onnx.",
        )
    _proxies(device, COMPILER_DEFAULTS)


def _proxies(device: Device, options: HtpOptions) -> Sequence[Proxy]:
    options.check_for_compiling(device)
    if options.optimization == FASTEST:
        fix = "Compile the bundle with it, and estimate with the level that compiled.json records."
        raise UsageError("htp optimization", got=FASTEST, expected="1 to 3", fix=fix)
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


def _slices(decoder: _Decoder, folder: Path) -> Iterator[_Binary]:
    """A binary for each kind of pair of layers, one for the last pair with the head; equal ones are compiled once.

    A slice begins and ends with what overlaps with its neighbours in the whole. What each joint saves is known from the
    most frequent two pairs and the four layers of both, and counts once for each joint: so the times of binaries may be
    below 0.
    """
    layers = decoder.layers
    ranges = [range(at, min(at + _SLICE_LAYERS, layers)) for at in range(0, layers, _SLICE_LAYERS)]
    # What is one form in one graph is in all others.
    graph = decoder.graphs[0]
    forms = [_form(decoder.build(graph, _part(graph, layers)).finish()) for layers in ranges]
    counts, joints = Counter(forms), len(ranges) - 1
    kinds = dict(reversed([*zip(forms, ranges, strict=True)]))
    if joints:
        neighbours = [*pairwise(forms)]
        (both, _), *_ = Counter(neighbours).most_common(1)
        at = neighbours.index(both)
        for form in both:
            counts[form] -= joints
        yield _Binary(_write(decoder, range(ranges[at].start, ranges[at + 1].stop), folder), joints)
    counts[forms[-1]] -= 1
    for form, covered in kinds.items():
        if counts[form]:
            yield _Binary(_write(decoder, covered, folder), counts[form])
    yield _Binary(_write(decoder, ranges[-1], folder, head=True))


def _part(graph: GraphRecord, layers: range, *, head: bool = False) -> PartRecord:
    """Some layers of a graph, with the head or without."""
    name = f"{graph.name}_l{layers.start}-{layers.stop}" + ("_head" if head else "")
    first, stop = layers.start, layers.stop
    return PartRecord(name=name, file=f"{name}.onnx", first_layer=first, stop_layer=stop, embeds=False, head=head)


def _write(decoder: _Decoder, layers: range, folder: Path, *, head: bool = False) -> dict[str, Path]:
    place = folder / (f"{layers.start}-{layers.stop}" + ("-head" if head else ""))
    place.mkdir()
    files = {}
    for graph in decoder.graphs:
        part = _part(graph, layers, head=head)
        files[graph.name] = place / part.file
        save_part(decoder.build(graph, part), files[graph.name], decoder.weights)
    return files


def _form(model: onnx.ModelProto) -> str:
    """A hash of what a graph does, whichever layers and values it has."""
    digest = hashlib.sha256()
    for node in model.graph.node:
        attributes = b"".join(sorted(attribute.SerializeToString() for attribute in node.attribute))
        digest.update(f"{node.op_type}\0".encode() + attributes)
    for tensor in model.graph.initializer:
        if math.prod(tensor.dims) > 1:  # equal scalars, such as scales, are one: their number depends on values
            digest.update(f"{tensor.data_type}{[*tensor.dims]}".encode())
    for port in model.graph.input:
        digest.update(port.type.SerializeToString())
    return digest.hexdigest()


def _summed(graph: GraphRecord | _Encoder, proxy: Proxy, simulated: Sequence[tuple[int, Simulation]]) -> GraphEstimate:
    def total(figure: Callable[[Simulation], float]) -> float:
        return sum(times * figure(part) for times, part in simulated)

    us, missing = total(lambda part: part.costs.us), sum(part.costs.missing_ops for _, part in simulated)
    moved = int(total(lambda part: part.costs.moved_bytes))
    busy = dict[str, float](dict.fromkeys(UNITS, 0.0))
    for times, part in simulated:
        for unit, share in part.schedule.busy().items():
            busy[unit] += times * part.costs.us * share / us
    largest = max(UNITS, key=lambda unit: busy[unit])
    return GraphEstimate(
        graph=graph.name,
        role=graph.role,
        ar=graph.ar,
        context=graph.context,
        proxy=proxy.soc,
        us=us,
        low_us=total(lambda part: part.costs.low_us),
        high_us=total(lambda part: part.costs.high_us),
        tokens_per_s=None if missing else graph.ar * 1e6 / us,
        moved_bytes=moved,
        gb_per_s=moved / us / 1e3,
        bound="memory" if largest == "DMA" else largest,
        busy=busy,
        spilled_bytes=max(0, int(total(lambda part: part.costs.spilled_bytes))),
        missing_ops=missing,
        parts=_mean_shares(simulated, "part"),
        operations=_mean_shares(simulated, "kind"),
    )


def _mean_shares(simulated: Sequence[tuple[int, Simulation]], field: Literal["kind", "part"]) -> dict[str, float]:
    """Shares of the sum, largest first.

    Empty if one is negative: what a joint saves is a difference of slices, whose traces must name operations alike.
    """
    shares, us = dict[str, float](), 0.0
    for times, part in simulated:
        us += times * part.costs.us
        for name, share in part.schedule.shares(field).items():
            shares[name] = shares.get(name, 0.0) + times * part.costs.us * share
    if min(shares.values(), default=0.0) < -_MIN_SHARE * us:
        return {}
    return {name: max(0.0, shares[name] / us) for name in sorted(shares, key=lambda name: -shares[name])}


def _notes(device: Device, proxies: Sequence[Proxy], in_slices: bool, graphs: Sequence[GraphEstimate]) -> Iterator[str]:
    named = " and ".join(f"{proxy.soc} (V{proxy.arch})" for proxy in proxies)
    stands = "stands" if len(proxies) == 1 else "stand"
    yield f"Simulated by the HTP compiler, not measured: {named} {stands} for {device.soc} (V{device.arch})"
    yield PUBLISHED
    yield f"Times that differ by less than {EQUAL_SHARE:.0%} are equal"
    if in_slices:
        yield f"Sums of slices of {_SLICE_LAYERS} and {2 * _SLICE_LAYERS} layers and of the head"
    if (measured := find_measured(device)) is not None:
        for report, speed in measured.speeds:
            which = f"{speed.model}, AR-{speed.ar}, context {speed.context}, {speed.strategy}"
            yield f"Measured on {device.soc} (report {report}): {which}: {speed.tokens_per_s:,.1f} tokens/s"
    for graph in graphs:
        if not graph.parts:
            yield f"{graph.graph} on {graph.proxy}: its parts are not known, as its slices differ"
        if graph.missing_ops:
            yield f"{graph.graph} on {graph.proxy}: void, {graph.missing_ops} operations have no costs"


def _nothing(folder: Path) -> None:
    """Graphs are read where they are."""
