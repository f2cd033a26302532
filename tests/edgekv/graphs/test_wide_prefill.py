"""Prompts on the CPU run in windows of as many tokens as there are, whatever AR the bundle's graphs have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs

import edgekv
from edgekv.bundle import Bundle, open_bundle
from edgekv.graphs.cpu_mode import CpuMode
from edgekv.graphs.source import wide_prefill
from edgekv.runtime import CpuEngine, StaticGraph
from edgekv.runtime.binding import Binding, MemoryBinding
from edgekv.runtime.mapped import MappedWeights
from tests.support.bundles import Arrays, any_step, as_loaded
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported

PROMPT = [*range(5, 34)]  # 29 tokens


def _loaded(model: edgekv.Model) -> dict[str, int]:
    """The steps of each graph that is loaded."""
    return {graph.record.name: graph.steps for graph in model.session._graphs.loaded}


def _run(binding: Binding, feeds: Arrays, outputs: Arrays) -> Arrays:
    for bind, arrays in ((binding.inputs, feeds), (binding.outputs, outputs)):
        for name, array in arrays.items():
            bind([name], array.dtype, array.shape, [array.ctypes.data])
    binding.run()
    return outputs


def _outputs(bundle: Bundle, files: list[str], feeds: Arrays, ar: int, mode: CpuMode) -> Arrays:
    """The results of AR tokens in a graph for as many or more, part after part."""
    graph = structs.replace(bundle.manifest.graph("prefill"), ar=ar)
    engine = CpuEngine(1, mode)
    ports = engine.as_run(bundle.manifest).interface.graph(graph).outputs
    made = {port.name: np.zeros(port.shape, port.dtype) for port in ports}
    held: Arrays = {}
    for file in files:
        binding = engine.load(bundle.path / file, "any")
        read, written = (
            {port.name for port in ports} for ports in (binding.interface.inputs, binding.interface.outputs)
        )
        shape = (1, 1, ar, bundle.manifest.model.hidden)
        outputs = {name: array for name, array in made.items() if name in written}
        outputs |= {name: np.zeros(shape, np.float32) for name in written - outputs.keys()}
        inputs = {name: array for name, array in (feeds | held).items() if name in read}
        if "logits" in written and "logits_index" not in read:
            (row,) = feeds["logits_index"]
            inputs = {name: np.ascontiguousarray(array[:, :, [row]]) for name, array in inputs.items()}
        held = _run(binding, as_loaded(binding, inputs), outputs)
    return made


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_a_window_has_the_bits_of_a_graph_of_its_size(small: Path, mode: CpuMode) -> None:
    bundle = open_bundle(small)
    graph = bundle.manifest.graph("prefill")
    assert graph is not None and graph.ar == 8
    (wide,) = wide_prefill(bundle.manifest)
    assert (wide.ar, wide.role, wide.context) == (32, "prefill", 64)
    feeds = any_step(bundle, graph)
    parts = ([part.file for part in each.parts] for each in (graph, wide))
    static, found = (_outputs(bundle, files, feeds, 8, mode) for files in parts)
    assert np.ptp(static["logits"]) > 1000
    assert [name for name in static if not np.array_equal(static[name], found[name])] == []


@pytest.mark.parametrize("tokens", [2, 3, 29, 32, 33, 40, 63])
def test_a_prompt_takes_as_few_steps_as_its_length_allows(small: Path, tokens: int) -> None:
    with edgekv.load(small, cpu_mode="fast") as model:
        (token,) = model.generate([*range(5, 5 + tokens)], 1, ignore_eos=True)
        steps = _loaded(model)
    alone = tokens % 32 == 1
    assert token.id >= 0 and steps.get("ar1_cl64_wide") == (tokens - alone + 31) // 32
    assert steps.get("ar1_cl64_appending", 0) == alone and "ar8_cl64" not in steps


def test_a_window_behind_others_sees_them(small: Path) -> None:
    """One token at a time, and in windows: the same keys and values but for roundings of a step."""
    rows = []
    for pieces in ([29], [8, 21], [13, 2, 14]):
        with edgekv.load(small, cpu_mode="exact16") as model:
            session, at = model.session, 0
            for piece in pieces:
                session.feed(PROMPT[at : at + piece])
                at += piece
            assert _loaded(model) == {"ar1_cl64_wide": len(pieces)}
            rows.append(session.cache.state.rows)
    for name, wanted in rows[0].items():
        for other in rows[1:]:
            assert np.abs(wanted.astype(int) - other[name].astype(int)).max() <= 3, name


@pytest.mark.parametrize(
    "options", [{}, {"cpu_mode": "emulate"}, {"cpu_mode": "fast", "policy": "sliding-window"}], ids=str
)
def test_elsewhere_prompts_run_in_the_bundles_graphs(small: Path, options: Any) -> None:
    """`emulate` has the bits of the exported graphs; where tokens leave, the size of steps decides which ones."""
    with edgekv.load(small, **options) as model:
        assert len([*model.generate(PROMPT, 1, ignore_eos=True)]) == 1
        assert _loaded(model)["ar8_cl64"] == 4 and not any("wide" in name for name in _loaded(model))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options", "window"),
    [
        ("gemma2", {}, 12),  # caps of scores
        ("gemma3", {}, 12),  # layers that attend to 24 tokens
        ("llama-2", {"splits": 2, "head": "own", "embedding": "host"}, 32),
        ("llama-2", {"kv_dtype": "s16", "ar": (1,)}, 32),  # no prefill graph at all
        ("qwen2", {"key_layout": "columns"}, 32),
    ],
)
def test_windows_of_other_bundles(tmp_path: Path, architecture: str, options: Any, window: int | None) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    folder = exported(checkpoint, export_options(**{"context": 64, "ar": (1, 8), **options}))
    assert {graph.ar for graph in wide_prefill(open_bundle(folder).manifest)} == ({window} if window else set())
    logits = []
    for mode in ("emulate", "exact16"):
        with edgekv.load(folder, cpu_mode=mode) as model:
            (token,) = model.generate(PROMPT, 1, ignore_eos=True, return_logits=True)
            logits.append(np.asarray(token.logits))
    noise = np.square(logits[1] - logits[0]).mean()
    assert 10 * np.log10(logits[0].var() / noise) > 25


def test_halves_of_rows_change_only_the_order_of_sums(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of as many rows as there can be, of an odd number, and of as few as there can be."""
    scored = []
    for rows in (8, 1000):
        monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / f"at most {rows} whole"))
        monkeypatch.setattr("edgekv.graphs.wide._MAX_WHOLE_ROWS", rows)
        with edgekv.load(small, cpu_mode="exact16", threads=1) as model:
            logits = [model.session.feed(PROMPT[at:to]).copy() for at, to in ((0, 24), (24, 27), (27, 29))]
            logits.append(model.session.feed([*range(60, 92)]).copy())
            scored.append(np.stack(logits).astype(float))
    noise = np.square(scored[1] - scored[0]).mean(axis=1)
    assert (10 * np.log10(scored[0].var(axis=1) / np.maximum(noise, 1e-9)) > 30).all()


@pytest.mark.parametrize(
    "architecture",
    [
        "smollm2",
        pytest.param("cohere", marks=pytest.mark.slow),  # attention and feed-forward read one norm
        pytest.param("qwen3_moe", marks=pytest.mark.slow),
        pytest.param("qwen3_5", marks=pytest.mark.slow),  # gates of heads, and a rule in place of attention
        pytest.param("falcon_h1", marks=pytest.mark.slow),  # two mixers
    ],
)
def test_the_last_layer_computes_the_row_that_the_head_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[architecture])
    folder = exported(checkpoint, export_options(context=64, ar=(1, 8)))
    scored, rows = [], []
    for number in (1, 8):
        monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / f"rows {number}"))
        if number > 1:
            monkeypatch.setattr("edgekv.graphs.wide.WideOps._reads_last_row", lambda ops, layer: False)
        with edgekv.load(folder, cpu_mode="fast", threads=1) as model:
            scored.append(
                np.stack([model.session.feed(PROMPT[at:to]).ravel() for at, to in ((0, 8), (8, 15), (15, 29))])
            )
            (graph,) = model.session._graphs.loaded
            hidden = graph._exits[f"hidden_{model.bundle.manifest.model.layers}"]
            rows.append(np.count_nonzero(hidden[0, 0, :14].any(axis=-1)))
    assert rows == [1, 14]
    assert np.abs(scored[0].astype(int) - scored[1]).max() <= 2, "attention to one row adds up in another order"


@pytest.mark.parametrize("mode", ["exact16", "fast"])
def test_parts_of_a_prompt_have_the_bits_of_the_whole(small: Path, mode: CpuMode, monkeypatch: Any) -> None:
    logits = []
    for divides in (True, False):
        if not divides:
            monkeypatch.setattr("edgekv.graphs.source._divided", lambda graph, has_head: graph)
        with edgekv.load(small, cpu_mode=mode, threads=1) as model:
            logits.append(model.session.feed(PROMPT).copy())
            (graph,) = model.session._graphs.loaded
            assert len(graph.record.parts) == (3 if divides else 1)
    assert np.array_equal(*logits)


def test_weights_of_a_prompt_and_of_decode_steps_are_never_in_memory_together(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = list[str]()
    monkeypatch.setattr(StaticGraph, "release", lambda graph: released.append(graph.record.name))
    with edgekv.load(small, cpu_mode="fast") as model:
        for turn in range(2):
            model.session.feed(PROMPT)
            assert released == ["ar1_cl64_appending"] * turn
            released.clear()
            for token in range(3):
                model.session.feed([token])
            assert released == ["ar1_cl64_wide"]
            released.clear()
            model.session.reset()


def test_parts_leave_memory_one_by_one_at_the_end_of_a_prompt(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Earlier windows leave them to the next one, and need no head."""
    events = list[tuple[str, int]]()
    run, release = MemoryBinding.run, MemoryBinding.release

    def noted(name: str, call: Callable[[MemoryBinding], None]) -> Callable[[MemoryBinding], None]:
        def note(binding: MemoryBinding) -> None:
            events.append((name, id(binding)))
            call(binding)

        return note

    monkeypatch.setattr(MemoryBinding, "run", noted("run", run))
    monkeypatch.setattr(MemoryBinding, "release", noted("release", release))
    with edgekv.load(small, cpu_mode="fast") as model:
        model.session.feed([*range(5, 37), *range(5, 20)])
    first, last = (binding for _, binding in events[:2])
    head = events[-1][1]
    assert len({first, last, head}) == 3
    assert events[:2] == [("run", first), ("run", last)]
    assert events[2:] == [(name, binding) for binding in (first, last, head) for name in ("run", "release")]


@pytest.mark.parametrize("is_short", [False, True])
def test_pages_leave_at_the_end_of_the_first_prompt_and_later_where_memory_is_short(
    small: Path, monkeypatch: pytest.MonkeyPatch, is_short: bool
) -> None:
    left = list[MappedWeights]()
    monkeypatch.setattr("edgekv.runtime.idle_memory.is_short_of_memory", lambda: is_short)
    with edgekv.load(small, cpu_mode="fast") as model:
        model.session._graphs.prepare("prefill", "decode")
        monkeypatch.setattr(MappedWeights, "release", lambda weights: left.append(weights))
        for prompt in range(3):
            model.session.feed(PROMPT)
            model.session.feed([7])
            # Those of decode steps before the prompt, and of each part of it: once it has run, and as an idle graph's.
            assert len(left) == (1 + 2 * 3 if is_short else 1 + 3 if prompt == 0 else 0)
            left.clear()
            model.session.reset()
