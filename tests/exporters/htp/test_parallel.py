"""Compilers side by side: as many as their estimated RAM allows."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from functools import partial

import onnx
import pytest

from edgekv.bundle import open_bundle
from edgekv.machine.system import free_memory_bytes
from edgekv.plan import compile_bytes
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.htp.compile import device_parts
from exporters.pipeline.parallel import Job, compiler_bytes, side_by_side
from exporters.pipeline.place import Identity
from exporters.pipeline.planning import Planner
from exporters.plan import plan_export
from exporters.progress import silent
from exporters.quantize.recipe import find_recipe
from tests.support.exports import exported, small_options


def test_jobs_run_at_once_only_if_their_ram_is_free_together():
    running, most, lock = set[int](), [0], threading.Lock()

    def work(number: int) -> int:
        with lock:
            running.add(number)
            most[0] = max(most[0], len(running))
        time.sleep(0.05)
        with lock:
            running.remove(number)
        return number

    large = [Job(partial(work, number), free_memory_bytes() * 6 // 10) for number in range(3)]
    assert [*side_by_side(large, "test", silent)] == [0, 1, 2] and most == [1]
    meet = threading.Barrier(2)
    small = [Job(partial(meet.wait, 10), 1) for _ in range(2)]
    assert sorted(side_by_side(small, "test", silent)) == [0, 1], "both run, and wait for each other"


def test_a_job_that_needs_more_than_there_is_runs_alone():
    assert [*side_by_side([Job(lambda: 1, 10**18), Job(lambda: 2, 10**18)], "test", silent)] == [1, 2]


def test_the_ram_to_compile_follows_from_the_weights_that_the_graphs_name(tmp_path):
    def tensor(name: str, dtype: int, offset: int, length: int) -> onnx.TensorProto:
        made = onnx.TensorProto(name=name, data_type=dtype, data_location=onnx.TensorProto.EXTERNAL)
        for key, value in {"location": "weights", "offset": offset, "length": length}.items():
            made.external_data.add(key=key, value=str(value))
        return made

    matrices = [tensor("a", onnx.TensorProto.INT8, 0, 10**9), tensor("b", onnx.TensorProto.INT4, 10**9, 10**8)]
    graph = onnx.GraphProto(initializer=[*matrices, tensor("a again", onnx.TensorProto.INT8, 0, 10**9)])
    files = [tmp_path / "one.onnx", tmp_path / "two.onnx"]
    for file in files:
        onnx.save(onnx.ModelProto(graph=graph), file)
    size_bytes = files[0].stat().st_size
    assert compiler_bytes(files) == compile_bytes(11 * 10**8, size_bytes, 2, packed_bytes=10**8)
    assert compiler_bytes(files[:1]) == compile_bytes(11 * 10**8, size_bytes, 1, packed_bytes=10**8)


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16-lpbq32"])
@pytest.mark.parametrize("splits", [1, 2])
def test_a_plan_expects_the_ram_that_the_graphs_then_need(small_export, recipe, splits):
    options = replace(small_options(context=64, ar=(1, 8)), recipe=find_recipe(recipe), splits=splits)
    checkpoint, least = small_export.parent / "checkpoint", compile_bytes(0, 0, 1)
    bundle = open_bundle(exported(checkpoint, options))
    sets = device_parts(bundle.manifest.graphs, bundle.path)
    found = max(compiler_bytes([*models.values()]) for models in sets) - least
    opened = Checkpoint.open(str(checkpoint))
    planner = Planner(Identity.of(opened))
    planner.export(plan_export(opened, replace(options, check_on_htp=True, compile=True)))
    planned = max(each.ram_bytes for each in planner.plan.pieces.values() if each.piece.kind == "compile") - least
    assert planned == pytest.approx(found, rel=0.3)
