"""The child process behind `exporters.targets.genai.proof`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from devices import find
from edgekv.bundle import Bundle, GraphRecord, Manifest, open_bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import EdgeKVError
from edgekv.runtime import CpuEngine, HtpEngine
from edgekv.spec import IDS, LOGITS_INDEX
from exporters.graphs.qdq import stacked_new, stacked_past
from exporters.targets.genai.proof import ProofJob, ProofReply
from exporters.targets.prove import prove

Arrays = dict[str, NDArray[Any]]


def main() -> None:
    job = msgspec.json.decode(sys.stdin.buffer.read(), type=ProofJob)
    reply = ProofReply()
    try:
        _compare(job)
    except EdgeKVError as error:
        reply = ProofReply(error=f"{error.field}: {error.got}")
    Path(sys.argv[1]).write_bytes(msgspec.json.encode(reply))


def _compare(job: ProofJob) -> None:
    bundle = open_bundle(job.bundle, verify=False)
    engine = CpuEngine() if job.soc is None else HtpEngine.on(find(job.soc), bundle)
    records = {record.name: record for record in bundle.manifest.graphs}
    for graph in job.graphs:
        found, wanted = _both(bundle, records[graph.record], Path(graph.file), engine)
        prove(graph.record, found, wanted)


def _both(bundle: Bundle, record: GraphRecord, stacked: Path, engine: CpuEngine | HtpEngine) -> tuple[Arrays, Arrays]:
    """The outputs of the graph with stacked heads, and those of the bundle's graph, stacked."""
    manifest = bundle.manifest
    session = engine.session(bundle.graph_path(record))
    feeds = _random_feeds(session, manifest, record)
    wanted = _stack(manifest, _run(session, _with_sink(bundle, feeds)), "new")
    del session  # one compiled graph in memory at a time
    session = engine.session(stacked)
    feeds = _stack(manifest, feeds, "past")
    found = _run(session, {port.name: feeds[port.name] for port in session.get_inputs()})
    return found, wanted


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


if __name__ == "__main__":
    main()
