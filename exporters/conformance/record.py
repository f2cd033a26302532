"""Expected integers: every graph of a part of a kit, run on the emulator in a child process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime as ort

from devices import find
from edgekv.bundle import open_bundle
from edgekv.conformance.models import golden_arrays
from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.machine.tensor_file import decode_tensors, encode_tensors
from edgekv.qnn.provider import create_session
from edgekv.runtime.htp import HtpEngine
from exporters.inspect.probe import Probe

CASES = 2
"""With other inputs each, so that a runtime that ignores them is found."""
TOKENS = 40
_LAST_ROW = "logits_index"

Arrays = dict[str, np.ndarray[Any, Any]]


class CutJob(msgspec.Struct, frozen=True, kw_only=True):
    """An operation of a layer.

    Attributes:
        layer: name of the layer's graph.
        wider: an ONNX file of the layer that gives the operation's inputs too.
        wrapper: of its binary.
        cases: the file to write.
    """

    layer: str
    wider: str
    wrapper: str
    cases: str


class FamilyJob(msgspec.Struct, frozen=True, kw_only=True):
    """The graphs of a family, compiled.

    Attributes:
        bundle: of the model.
        soc: part number of the chip.
        layers: wrappers of its layers' graphs, by name.
        cases: the files to write for them.
        whole: wrapper of the graph as it ships.
        whole_cases: the file to write for it.
        cuts: operations.
    """

    bundle: str
    soc: str
    layers: dict[str, str]
    cases: dict[str, str]
    whole: str
    whole_cases: str
    cuts: list[CutJob]


class _Recorded:
    """A session that keeps what it was given and gave."""

    def __init__(self, session: ort.InferenceSession) -> None:
        self._session = session
        self.runs: list[tuple[Arrays, Arrays]] = []

    def get_inputs(self) -> Any:
        return self._session.get_inputs()

    def get_outputs(self) -> Any:
        return self._session.get_outputs()

    def run(self, names: list[str], feeds: Arrays) -> list[np.ndarray[Any, Any]]:
        outputs: list[np.ndarray[Any, Any]] = self._session.run(names, feeds)
        self.runs.append((dict(feeds), dict(zip(names, outputs, strict=True))))
        return outputs


class _Recorder(HtpEngine):
    """An engine whose sessions are those of a kit, and are recorded."""

    __slots__ = ("recorded", "wrappers")

    recorded: dict[str, _Recorded]
    wrappers: Mapping[str, str]

    @classmethod
    def of(cls, soc: str, wrappers: Mapping[str, str]) -> _Recorder:
        """Args: wrappers: by the names of graphs."""
        engine = cls(find(soc))
        object.__setattr__(engine, "wrappers", wrappers)
        object.__setattr__(engine, "recorded", {})
        return engine

    def session(self, graph: Path) -> Any:
        session = _Recorded(create_session(Path(self.wrappers[graph.stem]), self.device))
        self.recorded[graph.stem] = session
        return session


def record_family(job: FamilyJob) -> dict[str, list[str]]:
    """Run a family's graphs, and write their cases.

    Returns:
        The names of the outputs of each file that was written.

    Raises:
        EngineError: the emulator is missing or refused a graph.
    """
    bundle, device = open_bundle(job.bundle, verify=False), find(job.soc)
    engine = _Recorder.of(job.soc, job.layers)
    vocab = bundle.manifest.model.vocab
    tokens = np.random.Generator(np.random.PCG64(7)).integers(0, min(vocab, 256), TOKENS)
    Probe(bundle, engine).run(tokens.tolist())
    written = dict[str, list[str]]()
    runs = {name: recorded.runs[-CASES:] for name, recorded in engine.recorded.items()}
    for name, file in job.cases.items():
        written[file] = _write(file, runs[name])
    whole = create_session(Path(job.whole), device)
    written[job.whole_cases] = _write(job.whole_cases, _whole_runs(whole, runs))
    for cut in job.cuts:
        wider = ort.InferenceSession(cut.wider, session_options(Path(cut.wider).parent), providers=PROVIDERS)
        session = create_session(Path(cut.wrapper), device)
        names = [port.name for port in session.get_inputs()]
        cases = list[tuple[Arrays, Arrays]]()
        for feeds, _ in runs[cut.layer]:
            computed = [name for name in names if name not in feeds]
            values = dict(zip(computed, wider.run(computed, feeds), strict=True)) if computed else {}
            inputs = {name: feeds[name] if name in feeds else values[name] for name in names}
            cases.append((inputs, _run(session, inputs)))
        written[cut.cases] = _write(cut.cases, cases)
    return written


def _whole_runs(
    whole: ort.InferenceSession, runs: Mapping[str, list[tuple[Arrays, Arrays]]]
) -> list[tuple[Arrays, Arrays]]:
    """The steps of the layers, in the graph of all of them."""
    recorded, ports = list[tuple[Arrays, Arrays]](), {port.name: port for port in whole.get_inputs()}
    for case in range(CASES):
        feeds: Arrays = {}
        for steps in runs.values():
            feeds |= {name: array for name, array in steps[case][0].items() if name in ports}
        if _LAST_ROW in ports:
            feeds[_LAST_ROW] = np.full(ports[_LAST_ROW].shape, _rows(feeds) - 1, np.int32)
        recorded.append((feeds, _run(whole, feeds)))
    return recorded


def _rows(feeds: Arrays) -> int:
    """Tokens per inference."""
    return max(feeds[name].shape[-1] for name in feeds if name == "input_ids")


def _run(session: ort.InferenceSession, feeds: Arrays) -> Arrays:
    names = [port.name for port in session.get_outputs()]
    return dict(zip(names, session.run(names, feeds), strict=True))


def _write(file: str, runs: list[tuple[Arrays, Arrays]]) -> list[str]:
    arrays: Arrays = {}
    for case, (feeds, outputs) in enumerate(runs):
        arrays |= {f"in.{case}.{name}": array for name, array in feeds.items()}
        arrays |= {f"out.{case}.{name}": array for name, array in outputs.items()}
    Path(file).write_bytes(encode_tensors(arrays))
    return [*runs[0][1]]


class EncoderJob(msgspec.Struct, frozen=True, kw_only=True):
    """A compiled vision encoder, a safetensors file of `in.CASE.NAME` or none for noise, and the file to write."""

    soc: str
    wrapper: str
    cases: str
    inputs: str = ""


def record_encoder(job: EncoderJob) -> list[str]:
    """Run an encoder on these inputs, or on pictures of noise; returns the names of its outputs."""
    session, random = create_session(Path(job.wrapper), find(job.soc)), np.random.Generator(np.random.PCG64(7))
    if job.inputs:
        arrays = decode_tensors(Path(job.inputs).read_bytes()).arrays
        ports = [port.name for port in session.get_inputs()]
        fed = [{port: arrays[f"in.{case}.{port}"] for port in ports} for case in range(CASES)]
        return _write(job.cases, [(feeds, _run(session, feeds)) for feeds in fed])
    runs = []
    for _ in range(CASES):
        feeds: Arrays = {}
        for port in session.get_inputs():
            dtype = np.dtype(port.type.removeprefix("tensor(").rstrip(")"))
            limits = np.iinfo(dtype)
            feeds[port.name] = random.integers(limits.min, limits.max, port.shape, dtype, endpoint=True)
        runs.append((feeds, _run(session, feeds)))
    return _write(job.cases, runs)


class GoldenJob(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle, the prompt as token ids, how many tokens to decode, and the file to write."""

    bundle: str
    prompt: list[int]
    tokens: int
    file: str


def record_golden(job: GoldenJob) -> int:
    """Decode golden tokens; returns their number."""
    arrays = golden_arrays(Path(job.bundle), job.prompt, job.tokens)
    Path(job.file).write_bytes(encode_tensors(arrays))
    return len(arrays["tokens"])
