"""Checks that stacking the heads changed no integer: both graphs run on the same numbers, in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from devices import Device, find
from edgekv.bundle import Bundle, GraphRecord, Manifest, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import EdgeKVError, EngineError
from edgekv.machine.child import ChildEndedError, call
from edgekv.runtime import CpuEngine, HtpEngine
from edgekv.spec import IDS, LOGITS_INDEX
from exporters.graphs.qdq import stacked_new, stacked_past
from exporters.targets.prove import prove

Arrays = dict[str, NDArray[Any]]


class ProofJob(msgspec.Struct, frozen=True, kw_only=True):
    """Files of graphs with stacked heads, by the names of the bundle's graphs, and the part number of the chip to
    compile for; None for the CPU.
    """

    bundle: str
    graphs: dict[str, str]
    soc: str | None


def prove_integers(bundle: Bundle, graphs: Mapping[str, Path], device: Device | None) -> None:
    """Run every graph for one step on random integers, as it is in the bundle and with stacked heads.

    A compiler that accepts a graph may still miscompile it; onnxruntime-qnn 2.7.0 did.

    Args:
        bundle: with the original graphs.
        graphs: those with stacked heads, by the names of the originals.
        device: the chip to compile for and to emulate; None for the CPU.

    Raises:
        EngineError: an output differs, or a graph did not run.
    """
    files = {name: str(path) for name, path in graphs.items()}
    job = ProofJob(bundle=str(bundle.path), graphs=files, soc=device.soc if device else None)
    try:
        call(compare_integers, job)
        return
    except ChildEndedError as error:
        failure = error.ending
    except EdgeKVError as error:
        failure = f"{error.field}: {error.got}"
    raise EngineError(
        "graphs with stacked heads",
        got=failure,
        expected="the bundle's integers in one step",
        fix="Try another --ar, and please report this model; --skip-check leaves this check out.",
    )


def compare_integers(job: ProofJob) -> None:
    """Run both graphs of each pair in this process.

    Raises:
        EngineError: an output differs, or a graph did not run.
    """
    bundle = open_bundle(job.bundle, verify=False)
    engine = CpuEngine() if job.soc is None else HtpEngine.on(find(job.soc), bundle)
    records = {record.name: record for record in bundle.manifest.graphs}
    for name, file in job.graphs.items():
        computed, expected = _both(bundle, records[name], Path(file), engine)
        prove(name, computed, expected)


def _both(bundle: Bundle, record: GraphRecord, stacked: Path, engine: CpuEngine | HtpEngine) -> tuple[Arrays, Arrays]:
    """The outputs of the graph with stacked heads, and those of the bundle's graph, stacked."""
    manifest = bundle.manifest
    session = engine.session(bundle.graph_path(record))
    feeds = _random_feeds(session, manifest, record)
    expected = _stack(manifest, _run(session, _with_sink(bundle, feeds)), "new")
    del session  # one compiled graph in memory at a time
    session = engine.session(stacked)
    feeds = _stack(manifest, feeds, "past")
    computed = _run(session, {port.name: feeds[port.name] for port in session.get_inputs()})
    return computed, expected


def _random_feeds(session: ort.InferenceSession, manifest: Manifest, record: GraphRecord) -> Arrays:
    random = np.random.default_rng(0)
    feeds = {}
    for port in session.get_inputs():
        dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
        top = manifest.model.vocab if port.name == IDS else np.iinfo(dtype).max
        feeds[port.name] = random.integers(0, top, port.shape, dtype)
    if LOGITS_INDEX in feeds:
        feeds[LOGITS_INDEX][:] = record.ar - 1
    return feeds


def _with_sink(bundle: Bundle, feeds: Arrays) -> Arrays:
    """The same inputs with the sink in the first columns of the past, where graphs with stacked heads have it."""
    if (sink := read_sink(bundle)) is None:
        return feeds
    changed = {name: feeds[name].copy() for name in sink.rows}
    for tensor in bundle.manifest.geometry.names():
        past = changed[tensor.past][0, 0]
        if tensor.kind == "key" and bundle.manifest.key_layout == "columns":
            past = past.T
        past[: len(sink.tokens)] = sink.rows[tensor.past]
    return feeds | changed


def _stack(manifest: Manifest, arrays: Arrays, end: str) -> Arrays:
    """The tensors of heads joined as onnxruntime-genai has them; the others as they are."""
    rest, stacks = dict(arrays), dict[str, list[NDArray[Any]]]()
    for tensor in manifest.geometry.names():
        part = rest.pop(tensor.past if end == "past" else tensor.new)
        if tensor.kind == "key" and manifest.key_layout == "rows":
            part = part.swapaxes(2, 3)
        name = stacked_past if end == "past" else stacked_new
        stacks.setdefault(name(tensor.kind, tensor.layer), []).append(part)
    return rest | {name: np.concatenate(parts) for name, parts in stacks.items()}


def _run(session: ort.InferenceSession, feeds: Arrays) -> Arrays:
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))
