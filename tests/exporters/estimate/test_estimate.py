"""Speed on the HTP by the compiler's simulation, which needs no device."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

import edgekv
from devices import CATALOGUE, NoProxyError, find, measured, proxies_for
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine import child
from edgekv.plan import PlanOptions
from edgekv.spec import KeyLayout
from exporters.estimate import estimate_bundle, estimate_config, simulate_bundle
from exporters.estimate.estimate import _Decoder, _form, _part, _slices, check_estimate
from exporters.graphs.parts import build_part
from exporters.htp import estimate as simulation
from exporters.htp.costs import read_costs
from exporters.htp.estimate import Simulation
from exporters.htp.schedule import Schedule
from exporters.options import RunOptions
from exporters.pipeline import pieces
from tests.exporters.pipeline.test_pipeline import files_of_at_most
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported, small_options
from tests.support.kits import report
from tests.support.picture_models import (
    SMALL,
    write_gemma3_vl,
    write_gemma4_vl,
    write_internvl,
    write_lfm2_vl,
    write_qwen2_5_vl,
    write_qwen3_vl,
    write_smolvlm,
)
from tests.support.thorough import variants


def write_long_smolvlm(folder: Path) -> Path:
    return write_smolvlm(folder, SMALL | {"num_hidden_layers": 7})


PROFILE = """Msg Timestamp,Message,Time,Unit of Measurement,Timing Source,Event Level,Event Identifier
0,FINALIZE,446822,US,BACKEND,ROOT,QNN (finalize) time
0,BACKEND,0,US,BACKEND,ROOT,Performance Estimates
0,BACKEND,279029,CYCLES,BACKEND,SUB-EVENT,Simulated (Accelerator exec cycles)
0,BACKEND,186,US,BACKEND,SUB-EVENT,Simulated (Accelerator exec time us)
0,BACKEND,170,US,BACKEND,SUB-EVENT,Simulated (Accelerator exec time us (lower estimate))
0,BACKEND,204,US,BACKEND,SUB-EVENT,Simulated (Accelerator exec time us (upper estimate))
0,BACKEND,5124096,BYTES,BACKEND,SUB-EVENT,Input Fill
0,BACKEND,0,BYTES,BACKEND,SUB-EVENT,Intermediate Fill
0,BACKEND,0,BYTES,BACKEND,SUB-EVENT,Intermediate Spill
0,BACKEND,311296,BYTES,BACKEND,SUB-EVENT,Output Spill
0,BACKEND,30,US,BACKEND,SUB-EVENT,Missing Ops (Number of Ops with no Costs associated)
"""
"""What the provider wrote of a graph, without lines that nobody reads; 30 operations have no costs."""


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that the tests of all workers share: each simulation is done once."""
    mine = tmp_path_factory.getbasetemp()
    return (mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "estimates"


@pytest.mark.htp
def test_every_graph_that_ships_has_a_speed_on_each_proxy(bundle: Path, cache: Path) -> None:
    opened = open_bundle(bundle)
    found = estimate_bundle(opened, find("SM8750"), RunOptions(cache_dir=cache))
    shipped = [graph.name for graph in opened.manifest.graphs if graph.role != "score"]
    assert [(each.graph, each.proxy) for each in found.graphs] == [
        (name, proxy) for name in shipped for proxy in ("QCS9100", "SA8797")
    ]
    for each in found.graphs:
        assert each.low_us < each.us < each.high_us
        assert each.tokens_per_s == pytest.approx(each.ar * 1e6 / each.us)
        assert each.moved_bytes > 0 and each.missing_ops == 0
    assert "not measured" in found.notes[0] and "SM8750 (V79)" in found.notes[0]


@pytest.mark.htp
def test_an_estimate_is_kept_by_content_beside_reports(
    bundle: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened, run = open_bundle(bundle), RunOptions(cache_dir=cache)
    first = estimate_bundle(opened, find("SM8650"), run)
    monkeypatch.setattr(simulation, "run_steps", None)  # compiles no more
    assert estimate_bundle(opened, find("SM8650"), run) == first
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports/galaxy.json").write_bytes(msgspec.json.encode(report(soc="SM8650", arch=75)))
    monkeypatch.setattr(measured, "FOLDER", tmp_path / "reports")
    beside = estimate_bundle(opened, find("SM8650"), run)
    (note,) = set(beside.notes) - set(first.notes)
    assert note.startswith("Measured on SM8650 (report galaxy): large, AR-1") and beside.graphs == first.graphs


def test_a_joint_is_measured_where_layers_are_as_most_are(tmp_path: Path) -> None:
    """The layers at both ends have 8 bits: what their joints save says little about the others."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint", {"num_hidden_layers": 12, "vocab_size": 512})
    opened = open_bundle(exported(checkpoint, small_options("w4a16", context=64, ar=(1, 8))))
    (decode,) = (graph for graph in opened.manifest.graphs if graph.role == "decode")
    decoder = _Decoder("12 layers", 12, [decode], partial(build_part, opened.manifest), opened.path)
    times = {file.parent.name: binary.times for binary in _slices(decoder, tmp_path) for file in binary.files.values()}
    assert times == {"2-6": 5, "0-2": 1, "2-4": -6, "10-12-head": 1}


@pytest.mark.htp
@pytest.mark.parametrize(("key_layout", "within"), [("rows", 0.03), ("columns", 0.05)])
def test_slices_add_up_to_the_whole(embedded: Path, cache: Path, key_layout: KeyLayout, within: float) -> None:
    """So large decoders are estimated without compiling them."""
    opened = open_bundle(exported(embedded, export_options(context=128, ar=(1, 32), key_layout=key_layout)))
    run = RunOptions(cache_dir=cache)
    whole = estimate_bundle(opened, find("SM8650"), run, in_slices=False)
    summed = estimate_bundle(opened, find("SM8650"), run, in_slices=True)
    assert summed.is_sliced and not whole.is_sliced
    for a, b in zip(whole.graphs, summed.graphs, strict=True):
        assert b.us == pytest.approx(a.us, rel=within)


def test_layers_that_differ_in_values_alone_are_compiled_once(bundle: Path) -> None:
    """Scales that happen to be equal are one tensor of a graph."""
    opened = open_bundle(bundle)
    (graph,) = (each for each in opened.manifest.graphs if each.role == "decode")
    pairs = [build_part(opened.manifest, graph, _part(graph, layers)).finish() for layers in (range(2), range(2, 4))]
    assert len({len(each.graph.initializer) for each in pairs}) == 2
    assert len({_form(each) for each in pairs}) == 1


@pytest.mark.htp
def test_a_compiler_that_hangs_is_ended(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "0.05")
    with pytest.raises(EngineError, match="no answer within"):
        estimate_bundle(open_bundle(bundle), find("SM8650"), RunOptions(cache_dir=tmp_path))


@pytest.mark.htp
def test_a_compiler_that_crashes_is_named_and_nothing_is_kept(bundle: Path, tmp_path: Path) -> None:
    """A signal ends the child while it compiles; the next estimate begins anew. Nothing is written into the bundle."""
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    before = sorted(copy.iterdir())
    for path in (copy, *before):
        path.chmod(0o555 if path.is_dir() else 0o444)
    opened, run = open_bundle(copy), RunOptions(cache_dir=tmp_path / "cache")
    with ThreadPoolExecutor(1) as pool:
        crash = pool.submit(_crash_a_compiler)
        with pytest.raises(EngineError, match="SIGSEGV"):
            estimate_bundle(opened, find("SM8650"), run)
        crash.result()
    assert estimate_bundle(opened, find("SM8650"), run).span("decode") is not None
    assert sorted(copy.iterdir()) == before


def _crash_a_compiler() -> None:
    """Send SIGSEGV to the first child that has loaded the compiler."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in tuple(child._running):
            with suppress(OSError):
                if "libQnnHtp.so" in Path(f"/proc/{process.pid}/maps").read_text():
                    os.kill(process.pid, signal.SIGSEGV)
                    return
        time.sleep(0.01)
    raise AssertionError("no compiler was started")


def test_graphs_of_another_format_are_refused() -> None:
    with pytest.raises(UsageError, match=r"got TFLite graphs; expected ONNX graphs, which the HTP compiler simulates"):
        check_estimate(find("SM8650"), "tflite")


def test_chips_stand_for_their_htp_version() -> None:
    for device in CATALOGUE:
        if device.arch < 73:
            with pytest.raises(NoProxyError, match=f"V{device.arch}"):
                proxies_for(device)
        else:
            assert all(proxy.arch <= 81 for proxy in proxies_for(device))
    assert [proxy.soc for proxy in proxies_for(find("SM8650"))] == ["QCS9100"]
    assert [proxy.soc for proxy in proxies_for(find("SM8850"))] == ["SA8797"]
    assert [proxy.soc for proxy in proxies_for(find("SM8750"))] == ["QCS9100", "SA8797"]


def test_a_chip_without_a_proxy_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match=r"SM8450 \(V69\).*V73, V75, V79, V81"):
        estimate_bundle(open_bundle(bundle), find("SM8450"))


def test_operations_without_costs_are_counted(tmp_path: Path) -> None:
    (tmp_path / "costs.csv").write_text(PROFILE)
    (costs,) = read_costs(tmp_path / "costs.csv", 1)
    assert (costs.us, costs.cycles, costs.missing_ops) == (186, 279029, 30)
    assert costs.moved_bytes == 5124096 + 311296


@pytest.mark.htp
@pytest.mark.slow
def test_bundles_of_many_graphs_are_estimated(tmp_path: Path) -> None:
    """Together, as they ship, each has the figures that it has beside one other graph."""
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    bundle = open_bundle(exported(checkpoint, export_options(context=64, ar=(1, 4, 8), key_layout="rows")))
    models = [bundle.graph_path(graph) for graph in bundle.manifest.graphs if graph.role != "score"]
    together = [each.costs.cycles for each in simulation.simulate(models, proxies_for(find("SM8650"))[0])]
    pairs = [simulation.simulate(models[at : at + 2], proxies_for(find("SM8650"))[0]) for at in range(2)]
    assert together == [pairs[0][0].costs.cycles, pairs[1][0].costs.cycles, pairs[1][1].costs.cycles]


@pytest.mark.parametrize(
    ("content", "graphs", "named"),
    [
        ("", 1, "an empty file"),
        ("Time,Level\n1,2\n", 1, "Time, Level"),
        (PROFILE.replace("time us)", "time ns)", 1), 1, "no us"),
        (PROFILE.replace("279029,CYCLES", "279029,US"), 1, "279029 US"),
        (PROFILE.replace(",186,US", ",fast,US"), 1, "fast US"),
        (PROFILE + "0,BACKEND,0\n", 1, "a line of 3 columns"),
        (PROFILE, 2, "estimates of 1 graphs for 2"),
        (PROFILE.partition("0,BACKEND")[0], 1, "estimates of 0 graphs"),
    ],
)
def test_a_profile_of_another_form_gives_no_figure(tmp_path: Path, content: str, graphs: int, named: str) -> None:
    (tmp_path / "costs.csv").write_text(content)
    with pytest.raises(EngineError, match=named):
        read_costs(tmp_path / "costs.csv", graphs)


def test_a_missing_profile_gives_no_figure(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="No such file"):
        read_costs(tmp_path / "costs.csv", 1)


@pytest.mark.htp
def test_every_cycle_is_some_parts(bundle: Path, cache: Path) -> None:
    """Of the whole decoder, and of one layer: its operations are those of attention, feed-forward and norms."""
    simulated = simulate_bundle(open_bundle(bundle), find("SM8650"), RunOptions(cache_dir=cache))
    for graph in simulated.estimate.graphs:
        assert sum(graph.parts.values()) == pytest.approx(1)
        assert sum(graph.operations.values()) == pytest.approx(1)
        assert {"attention", "feed-forward", "norms", "head", "embedding"} <= graph.parts.keys()
        assert "other" not in graph.parts
        assert graph.bound in ("memory", "HVX", "HMX", "issue")
        layer = simulated.layers[graph.graph, graph.proxy]
        computed = {event.part for event in layer if event.unit == "HMX"}
        assert computed == {"attention", "feed-forward"}


@pytest.mark.htp
@pytest.mark.parametrize(
    "write", variants([write_smolvlm, write_internvl, write_lfm2_vl, write_qwen2_5_vl], [write_lfm2_vl])
)
def test_a_vision_encoder_has_a_time_for_a_tile(write: Callable[[Path], Path], tmp_path: Path) -> None:
    opened = open_bundle(exported(write(tmp_path / "checkpoint"), export_options(context=96, ar=(1, 16))))
    simulated = simulate_bundle(opened, find("SM8650"), RunOptions(cache_dir=tmp_path))
    *graphs, encoder = simulated.estimate.graphs
    assert opened.manifest.vision is not None and all(graph.role != "encoder" for graph in graphs)
    assert (encoder.graph, encoder.role, encoder.ar) == ("vision", "encoder", opened.manifest.vision.encoder.rows)
    assert encoder.low_us < encoder.us < encoder.high_us and encoder.missing_ops == 0
    assert {"attention", "feed-forward", "norms", "patches", "projector"} <= encoder.parts.keys()
    assert "other" not in encoder.parts
    assert simulated.layers["vision", encoder.proxy]


@pytest.mark.htp
def test_the_page_needs_nothing_else(
    bundle: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "speed.html"
    call = ["estimate", str(bundle), "--device", "SM8650", "--cache-dir", str(cache)]
    assert run([*call, "--html", str(page), "--against", str(bundle), "--ops"]) == 0
    text, printed = page.read_text(), capsys.readouterr().out
    assert "http://" not in text and "https://" not in text and "<script" not in text
    assert text.count("<svg") == 2 and "HMX" in text and "feed-forward" in text
    assert text.count(">equal<") == 2, "the same bundle"
    assert printed.count("this one: equal") == 2 and "Softmax" in printed and "not measured" in printed
    assert run([*call, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["graphs"][0]["tokens_per_s"] > 0 and found["proxies"] == ["QCS9100"]


def test_a_page_of_something_else_stays(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "mine.html"
    page.write_text("mine")
    assert run(["estimate", str(bundle), "--device", "SM8650", "--html", str(page)]) == 2
    assert "something else" in capsys.readouterr().err and page.read_text() == "mine"


@pytest.mark.htp
def test_a_plan_simulates_from_the_config_alone(bundle: Path, embedded: Path, cache: Path) -> None:
    """Graphs of random weights take the time of those that an export writes, to the 8 % that are equal."""
    made = estimate_config(
        embedded,
        find("SM8650"),
        PlanOptions(context=128),
        key_layout=open_bundle(bundle).manifest.key_layout,
        run=RunOptions(cache_dir=cache),
    )
    exported = estimate_bundle(open_bundle(bundle), find("SM8650"), RunOptions(cache_dir=cache), in_slices=True)
    for planned, graph in zip(made.graphs, exported.graphs, strict=True):
        assert (planned.graph, planned.role) == (graph.graph, graph.role)
        assert planned.us == pytest.approx(graph.us, rel=0.08)


@pytest.mark.htp
@pytest.mark.parametrize(
    "write", variants([write_long_smolvlm, write_qwen3_vl, write_gemma3_vl, write_gemma4_vl], [write_long_smolvlm])
)
def test_a_plan_has_the_time_of_a_tile(write: Callable[[Path], Path], tmp_path: Path) -> None:
    """From the configuration alone, where there are more layers of encoders of fewer."""
    folder, run = write(tmp_path / "checkpoint"), RunOptions(cache_dir=tmp_path)
    made = estimate_config(folder, find("SM8650"), PlanOptions(context=96, ar=(1, 16)), run=run)
    opened = open_bundle(exported(folder, export_options(context=96, ar=(1, 16))))
    shipped = estimate_bundle(opened, find("SM8650"), run)
    planned, encoder = (graphs[-1] for graphs in (made.graphs, shipped.graphs))
    assert (planned.graph, planned.role, planned.ar) == ("vision", "encoder", encoder.ar)
    assert planned.us == pytest.approx(encoder.us, rel=0.15)


@pytest.mark.htp
def test_a_plan_has_what_pictures_add_to_the_decoder(tmp_path: Path) -> None:
    """Rows of DeepStack behind the first layers, as graphs of an export have them."""
    folder, run = write_qwen3_vl(tmp_path / "checkpoint", layers=6), RunOptions(cache_dir=tmp_path)
    made = estimate_config(folder, find("SM8650"), PlanOptions(context=96, ar=(1, 16)), run=run)
    opened = open_bundle(exported(folder, export_options(context=96, ar=(1, 16))))
    shipped = estimate_bundle(opened, find("SM8650"), run, in_slices=True)
    text_config = json.loads((folder / "config.json").read_text())["text_config"]
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
    (tmp_path / "config.json").write_text(json.dumps(text_config | rope | {"model_type": "qwen3"}))
    text = estimate_config(tmp_path, find("SM8650"), PlanOptions(context=96, ar=(1, 16)), run=run)
    for planned, graph, alone in zip(made.graphs[:-1], shipped.graphs[:-1], text.graphs, strict=True):
        assert (planned.graph, planned.role) == (graph.graph, graph.role)
        assert planned.us == pytest.approx(graph.us, rel=0.2)  # of so small a decoder
        assert alone.us < planned.us


@pytest.mark.parametrize("recipe", ["front-5", "as-stored"])
def test_a_recipe_that_follows_the_weights_is_refused(embedded: Path, recipe: str) -> None:
    with pytest.raises(UsageError, match="chooses types by the weights"):
        estimate_config(embedded, find("SM8650"), PlanOptions(context=128, recipe=recipe, ar=(1,)))


@pytest.mark.htp
def test_a_program_estimates_with_one_call(
    bundle: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And `edgekv compile --estimate` says the same of what it has compiled."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(cache))
    found = edgekv.estimate(bundle, "Snapdragon 8 Gen 3")
    assert found.device == "SM8650" and found.span("decode") is not None
    copy = shutil.copytree(bundle, tmp_path / "bundle")
    command = ["compile", str(copy), "--device", "SM8650", "--no-per-graph-binaries", "--estimate", "--json"]
    assert run(command) == 0
    printed = json.loads(capsys.readouterr().out)
    assert [each["us"] for each in printed["estimate"]["graphs"]] == [each.us for each in found.graphs]
    assert printed["estimate"]["optimization"] == printed["binaries"][0]["optimization"] == 3


def test_a_package_that_is_missing_is_named(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "entry_points", lambda **_: ())
    with pytest.raises(EngineError, match=r"no estimator.*edgekv\[export,htp\]"):
        edgekv.estimate(bundle, "SM8650")


def test_a_disk_that_is_full_is_named(embedded: Path, tmp_path: Path) -> None:
    """Of temporary files; and nothing is left."""
    with files_of_at_most(1 << 20), pytest.raises(BundleError, match="while writing slices of graphs"):
        estimate_config(
            embedded,
            find("SM8650"),
            PlanOptions(context=128, ar=(1,)),
            run=RunOptions(cache_dir=tmp_path),
        )
    assert not [*tmp_path.glob("pieces/*")]


def test_a_graph_with_operations_without_costs_is_void(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """No figure of it is shown, whatever the profile says."""
    (tmp_path / "costs.csv").write_text(PROFILE)
    (costs,) = read_costs(tmp_path / "costs.csv", 1)
    monkeypatch.setattr(pieces, "simulate", lambda models, *_: [Simulation(costs, Schedule((), 4))] * len(models))
    command = ["estimate", str(bundle), "--device", "SM8650", "--cache-dir", str(tmp_path / "cache")]
    assert run(command) == 0
    printed = capsys.readouterr().out
    assert printed.count("void") == 4 and "30 operations have no costs" in printed and "186" not in printed
    assert run([*command, "--json"]) == 0
    assert {each["tokens_per_s"] for each in json.loads(capsys.readouterr().out)["graphs"]} == {None}
