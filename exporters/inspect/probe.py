"""Runs a bundle's score graph with every intermediate result as an output."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

from edgekv.bundle import Bundle
from edgekv.engine.sink import read_sink
from edgekv.errors import UsageError
from edgekv.kv import KvTensor, fold
from edgekv.machine.scratch import held_folder, remove_abandoned, scratch_folder
from edgekv.runtime import CpuEngine, Engine, HtpEngine
from edgekv.runtime.graph import rope_tables
from edgekv.spec import (
    CHECKPOINT_TOKENS,
    EMBEDDINGS,
    IDS,
    LAYER_INPUTS_PORT,
    GraphRecord,
    Kind,
    PartRecord,
    rope_inputs,
)
from exporters.capabilities import ONNX
from exporters.graphs.parts import all_rows, build_part, save_part
from exporters.graphs.qdq import GraphForm, QdqOps
from exporters.inspect.trace import Trace, merged
from exporters.quantize.reference import Floats
from quant import DTYPES, Encoding
from quant.products import in_threads

Integers = NDArray[Any]

_EMBEDDING = "embedding"
_ATTEND = 65535  # stands for 0.0 in ONNX graphs


@dataclass(frozen=True, slots=True)
class LayerGraph:
    """One layer of the score graph (the first includes the embedding), or its head.

    Attributes:
        part: what it is.
        built: the graph, with every result that has one row per token as an output.
        tensors: the cache tensors that it reads and writes.
    """

    part: PartRecord
    built: QdqOps
    tensors: Sequence[KvTensor]

    @property
    def is_first(self) -> bool:
        return self.part.entry in (IDS, EMBEDDINGS)

    @property
    def results(self) -> Mapping[str, Encoding]:
        """Encodings of the results by the names of the outputs, in order; the last one is for the next piece."""
        return self.built.results

    def save(self, bundle: Bundle, folder: Path) -> Path:
        """Write the piece into `folder`, with hard links to its weight files."""
        path = folder / f"{self.part.name}.onnx"
        save_part(self.built, path, bundle.path)
        return path


@contextmanager
def _folder_beside(bundle: Bundle) -> Iterator[Path]:
    """A temporary folder on the bundle's disk, for hard links; elsewhere if nothing can be written beside it."""
    with ExitStack() as resources:
        prefix = ".edgekv-probe"
        try:
            folder = resources.enter_context(held_folder(bundle.path.parent, prefix))
        except OSError:
            folder = resources.enter_context(scratch_folder("probe"))
        else:
            remove_abandoned(bundle.path.parent, prefix)
        yield folder


def layer_graphs(bundle: Bundle, record: GraphRecord, *, embeds: bool) -> list[LayerGraph]:
    """A graph as one piece per layer, the first one with the embeddings or without, and the head."""
    manifest, form = bundle.manifest, GraphForm(gives_results=True)
    layers, pieces = manifest.model.layers, []
    for first in range(layers + 1):
        part = PartRecord(
            name=f"piece_{first}",
            file="",
            first_layer=first,
            stop_layer=min(first + 1, layers),
            embeds=first == 0 and embeds,
            head=first == layers,
        )
        tensors = [*manifest.interface.tensors(part.layers)]
        pieces.append(LayerGraph(part, build_part(manifest, all_rows(record), part, form), tensors))
    return pieces


class _Dequantized(Mapping[str, Floats]):
    """Integers of results, which become floats when they are asked for."""

    def __init__(self, integers: Mapping[str, tuple[Encoding, Integers]]) -> None:
        self._integers = integers

    def __getitem__(self, name: str) -> Floats:
        encoding, values = self._integers[name]
        return encoding.dequantize(values)

    def __iter__(self) -> Iterator[str]:
        return iter(self._integers)

    def __len__(self) -> int:
        return len(self._integers)


class Probe:
    """The score graph of a bundle, run layer by layer on plain arrays.

    The past is copied from step to step and no memory is bound, so that a probe is independent of the KV cache and the
    runtime. One layer is loaded at a time.
    """

    def __init__(self, bundle: Bundle, engine: Engine, *, at_once: int = 1) -> None:
        """Split the graph into its layers.

        Args:
            bundle: whose graph it is.
            engine: where it runs.
            at_once: windows that `stages` runs at a time, each in a thread; only onnxruntime's CPU sessions can.

        Raises:
            BundleError: the bundle has TFLite graphs.
        """
        ONNX.check(bundle)
        assert isinstance(engine, CpuEngine | HtpEngine), "no other engine runs ONNX graphs"
        manifest = bundle.manifest
        record = manifest.graph("score")
        assert record is not None, "a bundle without a score graph is not opened"
        self._bundle = bundle
        self._engine = engine
        self._at_once = at_once
        self._record = record
        # ONNX Runtime would hold a float table; looked up here, the integers are the same.
        host_embeds = manifest.host_embeds or isinstance(engine, CpuEngine)
        self._pieces = layer_graphs(bundle, record, embeds=not host_embeds)
        interfaces = [manifest.interface.graph(all_rows(record), piece.part) for piece in self._pieces]
        self._inputs = {port.name: port for interface in interfaces for port in interface.inputs}
        self._layer_inputs = bundle.layer_inputs()
        self._windows = manifest.interface.masks()
        self._table = bundle.embeddings() if host_embeds else None
        self._ropes = rope_tables(manifest)
        self._sink = read_sink(bundle)
        self._rule = manifest.model.delta_rule
        self._is_cached = manifest.interface.is_cached

    @property
    def first(self) -> int:
        """The first position that the graph computes: the sink's tokens come before it."""
        return 0 if self._sink is None else len(self._sink.tokens)

    @property
    def engine(self) -> str:
        """Name of the engine."""
        return self._engine.name

    @property
    def encodings(self) -> Mapping[str, Encoding]:
        """Encoding of every result, by its name in traces."""
        kept = {name.removesuffix("_q"): encoding for piece in self._pieces for name, encoding in piece.results.items()}
        held = self._bundle.manifest.encodings
        if self._table is not None:
            kept[_EMBEDDING] = self._table.encoding
        return kept | {tensor.past: held[tensor.past] for p in self._pieces for tensor in p.tensors}

    def run(self, tokens: Sequence[int]) -> Trace:
        """Values of every result `[T - first, width]` for tokens from position `first` on.

        Args:
            tokens: from position 0 on, T of them; they begin with the sink.

        Raises:
            UsageError: more tokens than the context has, or none after the sink.
            EngineError: the engine refused the graph.
        """
        return merged(self.stages([np.asarray(tokens)]))

    def stages(self, windows: Sequence[NDArray[Any]]) -> Iterator[Trace]:
        """Like `run`, one layer at a time: for each layer, then the head, the values of every window.

        Args:
            windows: token ids `[T]`; each window begins at position 0, with the sink.

        Raises:
            UsageError: more tokens than the context has, or none after the sink.
            EngineError: the engine refused a layer.
        """
        context, first = self._record.context, self.first
        for window in windows:
            if not first < len(window) <= context:
                expected = f"{first + 1} to {context}, the context"
                raise UsageError("tokens", got=len(window), expected=expected, fix="Trace another number of tokens.")
        states: list[Integers] = [window[first:] for window in windows]
        held: list[dict[KvTensor, Integers]] = [{} for _ in windows]
        for piece in self._pieces:
            with _folder_beside(self._bundle) as scratch:
                session = self._engine.session(piece.save(self._bundle, scratch))

            def ran(number: int, piece: LayerGraph = piece, session: ort.InferenceSession = session) -> Trace:
                tokens = windows[number][first:]
                trace, states[number] = self._run(session, piece, states[number], tokens, held[number])
                return trace

            numbers = range(len(states))
            yield from map(ran, numbers) if self._at_once == 1 else in_threads(ran, numbers, at_once=self._at_once)
            del session, ran

    def _run(
        self,
        session: ort.InferenceSession,
        piece: LayerGraph,
        state: Integers,
        tokens: Integers,
        held: dict[KvTensor, Integers],
    ) -> tuple[Trace, Integers]:
        """Run a piece on a window's token ids `[T]` or states `[T, hidden]`; return its trace and its output.

        Args:
            session: of the piece.
            piece: to run.
            state: what it reads.
            tokens: ids of the window.
            held: rows of layers that later ones share, `[first + T, width]`.
        """
        manifest = self._bundle.manifest
        borrowed = [*manifest.interface.tensors(manifest.interface.borrowed(piece.part))]
        past = {tensor: self._first_rows(tensor) for tensor in piece.tensors if self._is_cached}
        rows: dict[str, list[Integers]] = {name: [] for name in piece.results}
        start = 0
        for stop in self._stops(len(state)):
            chunk, begin = state[start:stop], self.first + start
            gathered = None if self._layer_inputs is None else self._layer_inputs.rows(tokens[start:stop])
            start = stop
            shared = {tensor: (held[tensor][:begin], held[tensor][begin:]) for tensor in borrowed}
            outputs = self._step(session, piece, chunk, begin, past, gathered, shared)
            for name in rows:
                rows[name].append(_tokens_first(outputs[name])[: len(chunk)])
            for tensor in past:
                if tensor.is_written:
                    new = outputs[tensor.new][0, 0]
                    new = new.T if self._is_turned(tensor) else new
                    past[tensor] = np.concatenate((past[tensor], new[: len(chunk)]))
            if (self.first + stop) % CHECKPOINT_TOKENS == 0:
                self._make_checkpoints(past)
        held |= {tensor: rows for tensor, rows in past.items() if tensor.layer in manifest.model.shared_layers}
        results = {name: np.concatenate(parts) for name, parts in rows.items()}
        stage = {name.removesuffix("_q"): (piece.results[name], values) for name, values in results.items()}
        if piece.is_first and self._table is not None:
            stage[_EMBEDDING] = self._table.encoding, self._table.rows(state)
        for tensor, values in past.items():
            if tensor.is_written:
                stage[tensor.past] = manifest.encodings[tensor.past], values[self.first :]
        return _Dequantized(stage), [*results.values()][-1]

    def _step(
        self,
        session: ort.InferenceSession,
        piece: LayerGraph,
        chunk: Integers,
        position: int,
        past: Mapping[KvTensor, Integers],
        gathered: Integers | None,
        shared: Mapping[KvTensor, tuple[Integers, Integers]],
    ) -> dict[str, Integers]:
        manifest, n = self._bundle.manifest, len(chunk)
        source = piece.part.entry
        unset = {port.name for port in session.get_inputs()} - {source}
        feeds = {name: np.zeros(port.shape, port.dtype) for name, port in self._inputs.items() if name in unset}
        if source == IDS:
            feeds[IDS] = np.zeros((1, self._record.ar), np.int32)
            feeds[IDS][0, :n] = chunk
        else:
            rows = chunk if self._table is None or not piece.is_first else self._table.rows(chunk)
            feeds[source] = np.zeros((1, 1, self._record.ar, rows.shape[1]), rows.dtype)
            feeds[source][0, 0, :n] = rows
        for suffix, table in self._ropes.items():
            for name, rows in zip(rope_inputs(suffix), table.rows(position, n), strict=True):
                if name in unset:
                    feeds[name][0, 0, :n] = rows
        for name, window in self._windows.items():
            if name in feeds:
                _open(feeds[name][0, 0, :n], position, self._record.ar, window, both_sides=not self._is_cached)
        if LAYER_INPUTS_PORT in feeds and gathered is not None:
            feeds[LAYER_INPUTS_PORT][0, 0, :n] = gathered
        for tensor, held in [*past.items(), *((tensor, before) for tensor, (before, _) in shared.items())]:
            target = feeds[tensor.past][0, 0]
            target[:] = manifest.encodings[tensor.past].zero_point
            target = target.T if self._is_turned(tensor) else target
            if tensor.result == "tail":
                rows = held if tensor.kind == "recurrent" else held[position // CHECKPOINT_TOKENS * CHECKPOINT_TOKENS :]
                target[: len(rows)] = rows
                continue
            newest = held[max(0, len(held) - len(target)) :]
            target[len(target) - len(newest) :] = newest
        for tensor, (_, new) in shared.items():
            target = feeds[tensor.new][0, 0]
            (target.T if self._is_turned(tensor) else target)[:n] = new[:n]
        names = [output.name for output in session.get_outputs()]
        return dict(zip(names, session.run(names, feeds), strict=True))

    def _stops(self, tokens: int) -> list[int]:
        """Where steps of so many tokens after the first ones end.

        The first one ends at a multiple of AR, so that the last one has all of its past within the context. No step
        crosses a checkpoint.
        """
        ar, first, stop = self._record.ar, self.first, self.first + tokens
        ends = {*range(first - first % ar + ar, stop, ar), stop}
        if self._rule is not None:
            ends |= {*range(CHECKPOINT_TOKENS, stop, CHECKPOINT_TOKENS)}
        return [end - first for end in sorted(ends)]

    def _make_checkpoints(self, past: dict[KvTensor, Integers]) -> None:
        """Have S of a gated delta rule or Mamba-2 after all tokens, as the cache computes it: see `CheckpointGroup`."""
        rule, encodings = self._rule, self._bundle.manifest.encodings
        for tensor in [recurrent for recurrent in past if recurrent.kind == "recurrent"]:
            assert rule is not None, "the layer has one"

            def floats(kind: Kind, head: int = 0, layer: int = tensor.layer) -> Floats:
                held = KvTensor(layer, kind, head)
                return encodings[held.past].dequantize(past[held][-CHECKPOINT_TOKENS:])

            state, heads = encodings[tensor.past].dequantize(past[tensor]), range(rule.value_heads)
            folded = fold(
                state.reshape(rule.key_dim, rule.value_heads, -1).swapaxes(0, 1),
                floats("delta_key").reshape(CHECKPOINT_TOKENS, rule.key_heads, -1),
                floats("delta_value").reshape(CHECKPOINT_TOKENS, rule.value_heads, -1),
                np.concatenate([floats("decay", head) for head in heads], axis=-1),
                corrects=rule.corrects,
            )
            past[tensor] = encodings[tensor.past].quantize(folded.swapaxes(0, 1).reshape(state.shape))

    def _first_rows(self, tensor: KvTensor) -> Integers:
        """What the first step finds in the cache, `[first, width]`; all of S."""
        if self._sink is not None:
            return self._sink.rows[tensor.past]
        encoding = self._bundle.manifest.encodings[tensor.past]
        shape = self._inputs[tensor.past].shape
        rows = 0 if tensor.is_written else shape[-2]
        width = shape[-2 if self._is_turned(tensor) else -1]
        return np.full((rows, width), encoding.zero_point, DTYPES[encoding.dtype])

    def _is_turned(self, tensor: KvTensor) -> bool:
        return tensor.kind == "key" and self._bundle.manifest.key_layout == "columns"


def _open(mask: Integers, position: int, ar: int, window: int | None, *, both_sides: bool = False) -> None:
    """Open the mask `[n, P + AR]`: row i attends to the newest `window` tokens up to its own, or on both sides."""
    rows = np.arange(len(mask))[:, None]
    columns = np.arange(mask.shape[1]) - (mask.shape[1] - ar)  # 0 is the step's first token
    distance = rows - columns
    seen = (distance >= 0) & (columns >= -position)
    if both_sides:
        seen, distance = np.broadcast_to((columns >= 0) & (columns < len(mask)), mask.shape), np.abs(distance)
    mask[seen if window is None else seen & (distance < window)] = _ATTEND


def _tokens_first(values: Integers) -> Integers:
    return values.reshape(-1, values.shape[-1])
