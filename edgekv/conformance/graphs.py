"""Running a graph of a kit, and comparing what it gives with the expected integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from time import perf_counter_ns

import msgspec
import numpy as np

from devices import find
from devices.report import Difference, GraphResult, Verdict
from edgekv.conformance.kit import Arrays, KitGraph, read_arrays, unpack
from edgekv.machine.scratch import scratch_folder

IGNORES = "ignores its inputs: two of them gave the same results"
WHOLE_ALONE = "each layer alone is right: only the whole graph differs"

Run = Callable[[Mapping[str, np.ndarray]], Arrays]  # type: ignore[type-arg]
"""Runs a graph once: outputs of inputs, by name."""


class GraphJob(msgspec.Struct, frozen=True, kw_only=True):
    """A graph to run in a child process.

    Attributes:
        folder: of the kit.
        soc: part number of the chip.
        graph: the graph.
        allowed_steps: difference up to which a result of 16 bits counts as right; one of 8 bits, up to 1.
    """

    folder: str
    soc: str
    graph: KitGraph
    allowed_steps: int


def run_graph(job: GraphJob) -> GraphResult:
    """Run all cases of a graph on the HTP, or the emulator, and compare.

    Raises:
        EngineError: the runtime is missing or refused the graph.
    """
    began = perf_counter_ns()
    with open_graph(job) as run:
        return compare(job, run, load_ms=(perf_counter_ns() - began) / 1e6)


@contextmanager
def open_graph(job: GraphJob) -> Iterator[Run]:
    """A session of the graph's binary.

    Raises:
        EngineError: the runtime is missing or refused the graph.
        BundleError: the binary is damaged.
    """
    from edgekv.qnn.provider import create_session  # with ONNX Runtime

    with scratch_folder("conformance") as scratch:
        wrapper, _ = (unpack(Path(job.folder, file), scratch) for file in (job.graph.wrapper, job.graph.binary))
        session = create_session(wrapper, find(job.soc))
        results = job.graph.results
        yield lambda feeds: dict(zip(results, session.run(results, dict(feeds)), strict=True))


def compare(job: GraphJob, run: Run, *, load_ms: float = 0.0) -> GraphResult:
    """Run all cases and compare; the first result that is wrong is named, in the order of computation.

    Args:
        job: the graph.
        run: runs it.
        load_ms: time that loading it took.
    """
    graph, cases = job.graph, read_arrays(Path(job.folder, job.graph.cases))
    times, outputs_of_cases = list[int](), list[Arrays]()
    elements = differing = most = 0
    first: Difference | None = None
    for case in range(graph.count):
        feeds = with_prefix(cases, f"in.{case}.")
        began = perf_counter_ns()
        outputs = run(feeds)
        times.append(perf_counter_ns() - began)
        outputs_of_cases.append(outputs)
        before = ""
        for name in graph.results:
            expected, computed = cases[f"out.{case}.{name}"], outputs[name]
            steps, wrong = _steps(computed, expected)
            elements, differing, most = elements + expected.size, differing + wrong, max(most, steps)
            if steps > _allowed(job, expected) and first is None:
                first = Difference(
                    operation=name.removesuffix("_q"),
                    graph=graph.name,
                    case=case,
                    elements=wrong,
                    of=expected.size,
                    max_steps=steps,
                    before=before,
                )
            before = name.removesuffix("_q")
    verdict: Verdict = "wrong" if first is not None else "within steps" if most else "equal"
    return GraphResult(
        name=graph.name,
        verdict=verdict,
        elements=elements,
        differing=differing,
        max_steps=most,
        first=first,
        load_ms=load_ms,
        run_us=fmean(times) / 1e3,
        note=IGNORES if verdict == "wrong" and _ignores(cases, outputs_of_cases, graph) else "",
    )


def read_cases(job: GraphJob) -> tuple[list[Arrays], list[Arrays]]:
    """Inputs and expected outputs of all cases, for a runtime that runs them at once.

    Raises:
        BundleError: the file of the cases is damaged.
    """
    cases = read_arrays(Path(job.folder, job.graph.cases))
    numbers = range(job.graph.count)
    return [[with_prefix(cases, f"{kind}.{number}.") for number in numbers] for kind in ("in", "out")]  # type: ignore[return-value]


def _allowed(job: GraphJob, expected: np.ndarray) -> int:  # type: ignore[type-arg]
    """Steps of 8 bits are 256 times as large as those of 16."""
    return min(job.allowed_steps, 1) if expected.dtype.itemsize == 1 else job.allowed_steps


def with_prefix(arrays: Arrays, prefix: str) -> Arrays:
    """The arrays whose names begin so, without it."""
    return {name.removeprefix(prefix): array for name, array in arrays.items() if name.startswith(prefix)}


def _steps(computed: np.ndarray, expected: np.ndarray) -> tuple[int, int]:  # type: ignore[type-arg]
    """The largest difference, and the number of elements that differ; all of them if shape or type differ."""
    if computed.shape != expected.shape or computed.dtype != expected.dtype:
        return 1 << 16, expected.size
    gaps = np.abs(computed.astype(np.int64) - expected.astype(np.int64))
    return int(gaps.max(initial=0)), int(np.count_nonzero(gaps))


def _ignores(cases: Arrays, outputs_of_cases: list[Arrays], graph: KitGraph) -> bool:
    """Whether all cases gave one result where other ones were expected."""

    def are_equal(name: str, arrays: list[np.ndarray]) -> bool:  # type: ignore[type-arg]
        return all(np.array_equal(arrays[0], other) for other in arrays[1:])

    if graph.count < 2:
        return False
    are_all_equal = all(are_equal(name, [outputs[name] for outputs in outputs_of_cases]) for name in graph.results)
    expected = all(
        are_equal(name, [cases[f"out.{case}.{name}"] for case in range(graph.count)]) for name in graph.results
    )
    return are_all_equal and not expected
