"""Conformance kits for tests, the faults of devices, and reports."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from devices import find
from devices.report import FORMAT as REPORT_FORMAT, DecodeResult, GraphResult, Report, SpeedResult, Versions, sealed
from edgekv.bundle import record_files
from edgekv.conformance.graphs import GraphJob, compare, open_graph
from edgekv.conformance.kit import (
    FORMAT,
    KIT,
    Arrays,
    Kit,
    KitGraph,
    KitManifest,
    KitModel,
    KitPart,
    open_kit,
    pack,
    seal_kit,
)
from edgekv.conformance.models import ModelJob, decode
from edgekv.errors import EngineError
from edgekv.kv import KVCache
from edgekv.machine.graph_file import write_graph
from edgekv.machine.tensor_file import encode_tensors
from exporters.graphs.parts import stored_graph

SOC = "SM8750"
CODE = ("exporters.conformance.make", "exporters.conformance.record")
"""What makes kits."""
VERSIONS = Versions(
    edgekv="0.1.0",
    runtime="onnxruntime 1.31.1",
    provider="onnxruntime-qnn 2.7.0",
    qairt="2.51.0",
    system="Linux aarch64",
    python="3.11.7",
)


def speed(**changes: Any) -> SpeedResult:
    """A model of 800 MB that is read at 50 GB/s."""
    values = {
        "model": "large",
        "strategy": "slot",
        "ar": 1,
        "context": 1024,
        "read_bytes": 800_000_000,
        "steps": 32,
        "first_us": 20_000.0,
        "step_us": 16_000.0,
        "host_us": 100.0,
        "tokens_per_s": 62.5,
    }
    return SpeedResult(**(values | changes))  # type: ignore[arg-type]


def report(**changes: Any) -> Report:
    """A report of an NPU where all is right."""
    graphs = [GraphResult(name="family/llama", verdict="equal", elements=100)]
    decoded = [DecodeResult(model="large", strategy="slot", verdict="equal", tokens=64)]
    values: dict[str, Any] = {
        "format": REPORT_FORMAT,
        "kit": "0" * 64,
        "soc": SOC,
        "arch": 79,
        "place": "npu",
        "through": "a test",
        "month": "2026-11",
        "allowed_steps": 4,
        "versions": VERSIONS,
        "graphs": graphs,
        "decode": decoded,
        "speeds": [speed()],
        "samples": [],
        "unmeasured": [],
        "predictions": [],
        "failures": [],
    }
    return sealed(Report(**(values | changes)))


def plain_kit(
    folder: Path, names: Iterable[str] = ("operation/a", "operation/b", "family/c"), models: Iterable[str] = ()
) -> Kit:
    """A kit whose binaries and models nothing loads: each graph gives its input, plus 1."""
    (folder / "graphs").mkdir(parents=True)
    parts = []
    for number, name in enumerate(names):
        files = [f"graphs/{number}{end}" for end in (".onnx", "_qnn.bin", ".safetensors")]
        for file in files[:2]:
            (folder / file).write_bytes(b"v2.51.0.260929181845")
        arrays: Arrays = {}
        for case in range(2):
            values = np.arange(8, dtype=np.uint16) * (case + 1) + number
            arrays |= {f"in.{case}.x": values, f"out.{case}.x_q": values, f"out.{case}.y_q": values + np.uint16(1)}
        (folder / files[2]).write_bytes(encode_tensors(arrays))
        graph = KitGraph(name=name, wrapper=files[0], binary=files[1], cases=files[2], count=2, results=["x_q", "y_q"])
        parts.append(KitPart(name=name, kind="operation", graph=graph))
    manifest = KitManifest(
        format=FORMAT, producer="edgekv", soc=SOC, arch=79, compiler="onnxruntime-qnn 2.7.0", qairt="2.51.0",
        parts=parts, models=[_plain_model(folder, name) for name in models], predictions=[], left_out={},
        files=record_files(folder),
    )  # fmt: skip
    (folder / KIT).write_bytes(seal_kit(manifest))
    return open_kit(folder)


def _plain_model(folder: Path, name: str) -> KitModel:
    (folder / f"{name}.golden.safetensors").write_bytes(encode_tensors({"tokens": np.zeros(1, np.int32)}))
    return KitModel(name=name, folder=name, golden=f"{name}.golden.safetensors", weights_bytes=0)


def sealed_again(folder: Path, **changes: Any) -> Kit:
    """A kit whose files were changed on purpose, with a manifest that lists them as they are."""
    manifest = msgspec.json.decode((folder / KIT).read_bytes(), type=KitManifest)
    (folder / KIT).unlink()
    manifest = msgspec.structs.replace(manifest, files=record_files(folder), **changes)
    (folder / KIT).write_bytes(seal_kit(manifest))
    return open_kit(folder)


# What a device may do wrong. The functions run in child processes.


def plain(job: GraphJob) -> GraphResult:
    """What a device gives for the graphs of `plain_kit`."""
    return compare(job, _plus_one)


def crashes_at_b(job: GraphJob) -> GraphResult:
    if job.graph.name.endswith("b"):
        os.kill(os.getpid(), signal.SIGSEGV)
    return plain(job)


def tells_names(job: GraphJob) -> GraphResult:
    """Says whose machine this is, as a library may, and refuses a graph or crashes."""
    said = (
        f"no room for '{job.folder}/graphs/a_qnn.bin' and {Path.home()}/x.so of annlee at R5CX on {os.uname().nodename}"
    )
    if job.graph.name.endswith("refused"):
        raise EngineError("a graph", got=said, expected="room", fix="Free some.")
    print(said, flush=True)
    os.kill(os.getpid(), signal.SIGSEGV)
    return plain(job)


def wrong_then_crashes(job: GraphJob) -> GraphResult:
    """A wrong graph whose layers take the process down."""
    if "piece" in job.graph.name:
        os.kill(os.getpid(), signal.SIGSEGV)
    return narrow_mask(job)


def _plus_one(feeds: Arrays) -> Arrays:
    return {"x_q": feeds["x"], "y_q": feeds["x"] + np.uint16(1)}


def with_inputs(change: Callable[[Arrays], Arrays], job: GraphJob) -> GraphResult:
    """Run a graph of the emulator on other inputs than it is given."""
    with open_graph(job) as run:
        return compare(job, lambda feeds: run(change(dict(feeds))))


def stale_row(job: GraphJob) -> GraphResult:
    """A cache row that was not written: the newest key of the first head is still the one before."""

    def change(feeds: Arrays) -> Arrays:
        if (name := "past_key_0_h0_in") in feeds:
            rows = feeds[name].copy()
            rows[..., -1, :] = rows[..., -2, :]
            feeds[name] = rows
        return feeds

    return with_inputs(change, job)


def narrow_mask(job: GraphJob) -> GraphResult:
    """A mask that leaves the newest token of the past out."""

    def change(feeds: Arrays) -> Arrays:
        if (name := "attention_mask") in feeds:
            mask = feeds[name].copy()
            mask[..., mask.shape[-1] - mask.shape[-2] - 1] = 0
            feeds[name] = mask
        return feeds

    return with_inputs(change, job)


def ignores_inputs(job: GraphJob) -> GraphResult:
    """Every run computes the inputs of the first one."""
    first: Arrays = {}

    def change(feeds: Arrays) -> Arrays:
        if not first:
            first.update(feeds)
        return first

    return with_inputs(change, job)


STALE_ROW = 30


def stale_cache(job: ModelJob) -> DecodeResult:
    """One row of the first tensor keeps what the row before it has: with one strategy of the cache alone."""
    commit = KVCache.commit

    def forgetful(cache: KVCache, kept: Any) -> None:
        commit(cache, kept)
        rows = cache.held_rows()
        if len(rows) == STALE_ROW + 1:
            cache.arena.array[0, rows[-1]] = cache.arena.array[0, rows[-2]]

    if job.strategy == "pointer-shift":
        KVCache.commit = forgetful  # type: ignore[method-assign]
    return decode(job)


# Devices that compute something else: other binaries.


def wrong_scale(model: onnx.ModelProto) -> onnx.ModelProto:
    """Twice the scale where the first layer's SiLU is quantized."""
    for node in model.graph.node:
        if node.op_type == "QuantizeLinear" and node.output[0] == "layers.0.silu_q":
            held = next(each for each in model.graph.initializer if each.name == node.input[1])
            model.graph.initializer.append(numpy_helper.from_array(_doubled(held), "wrong_scale"))
            node.input[1] = "wrong_scale"
    return model


def _doubled(scale: onnx.TensorProto) -> np.ndarray[Any, Any]:
    values = numpy_helper.to_array(scale)
    return np.multiply(values, 2, dtype=values.dtype)


def swapped_heads(model: onnx.ModelProto) -> onnx.ModelProto:
    """The first two heads of the first layer change places where they are joined."""
    for node in model.graph.node:
        if node.op_type == "Concat" and [*node.input[:2]] == ["layers.0.attention", "layers.0.attention.2"]:
            node.input[0], node.input[1] = node.input[1], node.input[0]
    return model


def write_faulty(folder: Path, change: Callable[[onnx.ModelProto], onnx.ModelProto]) -> None:
    """The binaries of the family llama, whose graphs were changed."""
    from exporters.conformance.make import Family

    family = Family("llama", find(SOC), folder, folder / "scratch")
    graphs = family.graphs([])
    for path in graphs.models.values():
        model = stored_graph(path)
        path.unlink()
        write_graph(change(model).SerializeToString(), path)
    for wrapper in family.compiled(graphs).values():
        pack(wrapper.with_name(f"{wrapper.stem}_qnn.bin"))
    shutil.rmtree(folder / "scratch")
