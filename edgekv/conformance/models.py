"""Decoding golden tokens of a kit's bundle, and measuring its graphs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, perf_counter_ns

import msgspec
import numpy as np

from devices.report import DecodeResult, Sample, SpeedResult, Verdict
from edgekv.bundle import Bundle, GraphRecord, Manifest, open_bundle
from edgekv.conformance.graphs import with_prefix
from edgekv.conformance.kit import Arrays, KitModel, opened_model, read_arrays
from edgekv.conformance.sensors import read_sensors
from edgekv.engine.caches import CacheSetup
from edgekv.kv import STRATEGIES, KVCache
from edgekv.model import Model
from edgekv.runtime import Engine, make_engine
from edgekv.runtime.engine import run_by
from edgekv.runtime.graph import HostTables, StaticGraph, rope_tables
from edgekv.runtime.load_options import CacheOptions, EngineOptions

GOLDEN_TOKENS = 64
DECODE_STRATEGIES = tuple(STRATEGIES)
REGISTERED = ("slot", "pointer-shift")
"""One binds the same addresses in every step, the other binds new ones, which an NPU's driver must register."""

_HTP = EngineOptions("htp")
_SAMPLE_S = 10.0


class ModelJob(msgspec.Struct, frozen=True, kw_only=True):
    """What to do with a bundle of the kit in a child process.

    Attributes:
        folder: of the kit.
        model: the bundle.
        strategy: of the cache.
        allowed_steps: difference of logits up to which they count as right.
        steps: of each graph, to measure.
        seconds: of decoding, to watch temperature and clock.
    """

    folder: str
    model: KitModel
    strategy: str = "slot"
    allowed_steps: int = 0
    steps: int = 16
    seconds: float = 0.0


def open_htp(bundle: Bundle) -> Engine:
    """The HTP of this machine, or its emulator.

    Raises:
        EngineError: the runtime is missing.
    """
    return make_engine(bundle, _HTP)


def decode(job: ModelJob) -> DecodeResult:
    """Decode the golden tokens on the HTP of this machine, or its emulator; see `decode_on`."""
    return decode_on(open_htp, job)


def decode_on(open_engine: Callable[[Bundle], Engine], job: ModelJob) -> DecodeResult:
    """Decode the golden tokens greedily with a strategy of the cache; tokens, logits and cache rows are compared.

    The golden token is fed where another one came out, so that the rest is compared too.

    Args:
        open_engine: what runs the graphs of a bundle.
        job: the model and the strategy.

    Raises:
        EngineError: the runtime is missing or refused a graph.
    """
    golden, began = read_arrays(Path(job.folder, job.model.golden)), perf_counter_ns()
    with opened_model(Path(job.folder), job.model) as bundle, _model(bundle, open_engine, job.strategy) as model:
        model.prepare()
        load_ms = (perf_counter_ns() - began) / 1e6
        tokens, logits, rows = golden["tokens"].tolist(), golden["logits"], with_prefix(golden, "rows.")
        wrong, most = list[int](), 0
        for number, step in enumerate(_logits(model, golden["prompt"].tolist(), tokens)):
            gap = np.abs(step.astype(np.int64) - logits[number].astype(np.int64)).max()
            most = max(most, int(gap))
            if int(step.argmax()) != tokens[number]:
                wrong.append(number)
        held = held_rows(model)
    row, is_same = _first_row(held, rows, job.allowed_steps), not _first_row(held, rows, 0)
    is_wrong = bool(wrong or row) or most > job.allowed_steps
    verdict: Verdict = "wrong" if is_wrong else "equal" if is_same and not most else "within steps"
    return DecodeResult(
        model=job.model.name,
        strategy=job.strategy,
        verdict=verdict,
        tokens=len(tokens),
        first_wrong=wrong[0] if wrong else None,
        max_steps=most,
        row=row,
        load_ms=load_ms,
    )


def golden_arrays(bundle: Path, prompt: Sequence[int], count: int = GOLDEN_TOKENS) -> Arrays:
    """What `KitModel.golden` holds, computed by the HTP, or the emulator, of this machine.

    Raises:
        EngineError: the runtime is missing or refused a graph.
    """
    with _model(open_bundle(bundle, verify=False), open_htp, "slot") as model:
        logits = [model.session.feed(prompt).copy()]
        while len(logits) < count:
            logits.append(model.session.feed([int(logits[-1].argmax())]).copy())
        rows = held_rows(model)
    tokens = np.array([int(step.argmax()) for step in logits], np.int32)
    arrays = {"prompt": np.array(prompt, np.int32), "tokens": tokens, "logits": np.stack(logits)}
    return arrays | {f"rows.{name}": held for name, held in rows.items()}


def held_rows(model: Model) -> Arrays:
    """The rows of each tensor of a cache, oldest first, `[rows, D]`."""
    state = model.cache.state
    return {name: np.ascontiguousarray(rows) for name, rows in state.rows.items()}


def _logits(model: Model, prompt: Sequence[int], tokens: Sequence[int]) -> Sequence[np.ndarray]:  # type: ignore[type-arg]
    rows = [model.session.feed(prompt).copy()]
    rows += [model.session.feed([token]).copy() for token in tokens[:-1]]
    return rows


def _first_row(outputs: Arrays, expected: Arrays, allowed_steps: int) -> str:
    """The first row that is wrong: the one that was written first, in the first layer that has it."""
    differing = list[tuple[int, int, str]]()
    for number, (name, rows) in enumerate(expected.items()):
        held = outputs.get(name)
        if held is None or held.shape != rows.shape:
            return f"{name}, all rows"
        allowed = min(allowed_steps, 1) if rows.dtype.itemsize == 1 else allowed_steps
        gaps = np.abs(held.astype(np.int64) - rows.astype(np.int64)).reshape(len(rows), -1)
        wrong = np.flatnonzero((gaps > allowed).any(axis=1))
        if len(wrong):
            differing.append((int(wrong[0]), number, name))
    if not differing:
        return ""
    row, _, name = min(differing)
    return f"{name}, row {row}"


def _model(bundle: Bundle, open_engine: Callable[[Bundle], Engine], strategy: str) -> Model:
    engine = open_engine(bundle)
    return Model(bundle, engine, CacheSetup.read(bundle, engine, CacheOptions(kv_update=strategy)), None)


@dataclass(frozen=True, slots=True)
class _Stepper:
    """Steps of one graph. It reads its whole context, whatever the cache holds."""

    graph: StaticGraph
    cache: KVCache

    def step(self) -> None:
        """A step of AR tokens; the cache starts anew when the context of the graph is full."""
        ar, context = self.graph.ar, self.graph.record.context
        if not self.cache.room(ar) or self.cache.length + ar > context:
            self.cache.reset()
        windows = self.graph.window(ar)
        self.graph.run([1] * ar, windows, self.cache.position)
        self.cache.commit(ar)


def speeds(job: ModelJob, take: Callable[[SpeedResult], None]) -> None:
    """Measure each graph of the bundle; with another strategy than `slot`, those of one token alone.

    Raises:
        EngineError: the runtime is missing or refused a graph.
    """
    with opened_model(Path(job.folder), job.model) as bundle:
        engine = open_htp(bundle)
        setup = CacheSetup.read(bundle, engine, CacheOptions(kv_update=job.strategy))
        for record in measured_graphs(run_by(engine, bundle.manifest)):
            if record.ar == 1 or job.strategy == REGISTERED[0]:
                take(_speed(job, bundle, engine, setup, record))


def measured_graphs(manifest: Manifest) -> list[GraphRecord]:
    """The graphs of a model that generate: of each AR and context."""
    return [record for record in manifest.graphs if record.role in ("prefill", "decode")]


def _speed(job: ModelJob, bundle: Bundle, engine: Engine, setup: CacheSetup, record: GraphRecord) -> SpeedResult:
    stepper = _stepper(bundle, engine, setup, record)
    began = perf_counter_ns()
    stepper.step()
    first_ns = perf_counter_ns() - began
    before, began = stepper.graph.clock + type(stepper.graph.clock)(), perf_counter_ns()
    for _ in range(job.steps):
        stepper.step()
    spent_ns = perf_counter_ns() - began
    spent = stepper.graph.clock - before
    step_us = spent_ns / 1e3 / job.steps
    return SpeedResult(
        model=job.model.name,
        strategy=job.strategy,
        ar=record.ar,
        context=record.context,
        read_bytes=read_bytes(job.model, setup.manifest, record),
        steps=job.steps,
        first_us=first_ns / 1e3,
        step_us=step_us,
        host_us=max(0.0, step_us - spent.run_ns / 1e3 / job.steps),
        tokens_per_s=record.ar * 1e6 / step_us,
    )


def read_bytes(model: KitModel, manifest: Manifest, record: GraphRecord) -> int:
    """Weights and the past that a pass of a graph reads."""
    geometry = manifest.cache_geometry
    share = record.context / max(geometry.context, 1)
    past = sum(group.tensors * group.past_rows(record.ar) * group.row_bytes for group in geometry.groups())
    return model.weights_bytes + int(share * past)


def _stepper(bundle: Bundle, engine: Engine, setup: CacheSetup, record: GraphRecord) -> _Stepper:
    manifest = setup.manifest
    cache = setup.make()
    tables = HostTables(
        rope_tables(manifest), bundle.embeddings() if manifest.host_embeds else None, bundle.layer_inputs()
    )
    bindings = [engine.load(bundle.part_path(part), part.name) for part in record.parts]
    return _Stepper(StaticGraph(bindings, manifest, record, cache, tables), cache)


def watch(job: ModelJob, take: Callable[[Sample], None]) -> None:
    """Decode for a while; a sample of speed, temperature and clock every ten seconds.

    Raises:
        EngineError: the runtime is missing or refused a graph.
    """
    with opened_model(Path(job.folder), job.model) as bundle:
        engine = open_htp(bundle)
        setup = CacheSetup.read(bundle, engine, CacheOptions(kv_update=job.strategy))
        record = min((graph for graph in setup.manifest.graphs if graph.ar == 1), key=lambda graph: graph.context)
        stepper, began = _stepper(bundle, engine, setup, record), monotonic()
        at_s, steps = 0.0, 0
        while at_s < job.seconds:
            stepper.step()
            steps += 1
            now_s = monotonic() - began
            if now_s - at_s >= min(_SAMPLE_S, job.seconds):
                sensors = read_sensors()
                take(Sample(at_s=now_s, tokens_per_s=steps / (now_s - at_s), celsius=sensors.celsius, mhz=sensors.mhz))
                at_s, steps = now_s, 0
