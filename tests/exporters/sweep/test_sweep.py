"""Sweeps: the bytes of separate exports, each shared piece once, and refusals before any work."""

from __future__ import annotations

import json
import pickle
import re
import shutil
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from playwright.sync_api import Browser
from safetensors.numpy import load_file, save_file

from devices import find
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, CheckpointError, EngineError, ServiceError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import RunOptions, export_bundle
from exporters.options import LOCAL, Cluster, ExportOptions
from exporters.pipeline.dask.fitness import WorkerRequirements, versions
from exporters.pipeline.inputs import Inputs
from exporters.pipeline.piece import Plan
from exporters.pipeline.place import Identity, Place, open_checkpoint
from exporters.pipeline.planning import give_text
from exporters.pipeline.quality import Text
from exporters.pipeline.store import PieceRecord, PieceStore, store_in
from exporters.progress import Progress, silent
from exporters.quantize.recipe import find_recipe
from exporters.sweep.combination import Combination, combinations
from exporters.sweep.options import SweepOptions
from exporters.sweep.page import render_page
from exporters.sweep.result import Result, SweepReport, recommend, with_front
from exporters.sweep.sweep import RESULTS, run_sweep
from tests.exporters.inspect.test_page import Page
from tests.exporters.pipeline.test_pipeline import files_of_at_most
from tests.support.checkpoints import ARCHITECTURES, NEWER, write_checkpoint
from tests.support.processes import contents
from tests.support.serving import new_tab

TEXT = "def area(width, height):\n    return width * height\n" * 20
COMMON = ExportOptions(
    find("SM8650"),
    ar=(1, 16),
    calibration_tokens=512,
    check_on_htp=False,
    check_quality=False,
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sweep") / "checkpoint", NEWER)


def wanted(*, kv: tuple[str, ...] = ("u8",), devices: tuple[str, ...] = ("SM8650", "SM8750")) -> list[Combination]:
    recipes = [(name, find_recipe(name)) for name in ("w8a16", "w4a16")]
    return [*combinations(recipes, kv, [find(name) for name in devices], [(64,)])]  # type: ignore[arg-type]


def swept(
    folder: Path,
    checkpoint: Path,
    given: list[Combination],
    said: list[str] | None = None,
    *,
    store: str | None = None,
    progress: Progress = silent,
    estimate: bool = False,
    **changes,
) -> SweepReport:
    folder.mkdir(exist_ok=True)
    cluster = Cluster(**{"scheduler": LOCAL, "workers": 2, "say": ([] if said is None else said).append, **changes})
    text = Text("text.txt", TEXT, 200)
    return run_sweep(
        str(checkpoint), given, text, folder, COMMON, SweepOptions(store=store, estimate=estimate), cluster, progress
    )


@pytest.fixture(scope="module")
def done(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, SweepReport]:
    """Two recipes, two cache types, two chips, on two local workers."""
    folder = tmp_path_factory.mktemp("done")
    return folder, swept(folder, checkpoint, wanted(kv=("u8", "s16")))


@pytest.mark.slow
@pytest.mark.thorough
def test_bundles_are_those_of_separate_exports(checkpoint, done, tmp_path):
    folder, report = done
    given = wanted(kv=("u8", "s16"))
    assert [each.name for each in report.results] == [each.name for each in given]
    opened = Checkpoint.open(str(checkpoint))
    for each in (given[0], given[3], given[5]):
        export_bundle(opened, tmp_path / each.name, each.options(COMMON), RunOptions(cache_dir=tmp_path / "cache"))
        assert contents(folder / "bundles" / each.name) == contents(tmp_path / each.name)


@pytest.mark.htp
@pytest.mark.slow
def test_speed_is_an_axis_of_the_page(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulated for each combination; of chips that no simulated one stands for it stays unknown."""
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    report = swept(tmp_path / "sweep", checkpoint, wanted(devices=("SM8650", "SM8450")), estimate=True)
    known = {each.name: each.simulated for each in report.results}
    assert [name for name, found in known.items() if found is not None] == [name for name in known if "SM8650" in name]
    page = render_page(report)
    assert page.count("KL divergence against tokens a second, simulated for") == 1
    for each in report.results:
        span = None if each.simulated is None else each.simulated.span("decode")
        assert (span is None) == (each.device == "SM8450")
        if span is not None:
            assert f"{span[0]:,.0f} tokens/s simulated" in page and span[0] == span[1] > 0


@pytest.mark.htp
@pytest.mark.slow
def test_allowed_float_nodes_are_in_the_bundles(checkpoint, tmp_path, monkeypatch):
    """A check that found a node: its piece is changed in the store."""
    monkeypatch.setitem(globals(), "COMMON", replace(COMMON, check_on_htp=True))
    (given,) = wanted()[:1]
    swept(tmp_path, checkpoint, [given])
    for record in (tmp_path / "pieces").glob("*/piece.json"):
        if (found := msgspec.json.decode(record.read_bytes(), type=PieceRecord)).kind == "check":
            found = PieceRecord.of(tmp_path / "empty", found.name, "check", 0.0, ["ar1: a node"])
            record.write_bytes(msgspec.json.encode(found))
    with pytest.raises(EngineError, match="nodes that compute in float, the first: ar1: a node"):
        swept(tmp_path, checkpoint, [given])
    monkeypatch.setitem(globals(), "COMMON", replace(COMMON, check_on_htp=True, allow_float=True))
    (result,) = swept(tmp_path, checkpoint, [given]).results
    manifest = open_bundle(Path(result.bundle)).manifest
    assert manifest.htp_check == "float-allowed" and {*manifest.floating_nodes} == {"ar1: a node"}


@pytest.mark.slow
def test_a_model_with_states_is_swept_too(tmp_path):
    hybrid = write_checkpoint(tmp_path / "hybrid", ARCHITECTURES["lfm2"], gain=1.0)
    (given,) = combinations([("w8a16", find_recipe("w8a16"))], ("u8",), [find("SM8650")], [(64,)])
    report = swept(tmp_path / "sweep", hybrid, [given])
    assert [each.name for each in report.results] == [given.name]
    export_bundle(Checkpoint.open(str(hybrid)), tmp_path / "alone", given.options(COMMON))
    assert contents(tmp_path / "sweep" / "bundles" / given.name) == contents(tmp_path / "alone")


@pytest.mark.slow
def test_chips_share_all_pieces_but_the_compiled(done):
    _, report = done
    # a survey, 2 recipes x 2 caches x (layers, head, bundle, evaluation, quality by layer), token ids, a reference
    layers = len([loss for loss in report.results[0].layers if loss.place.isdecimal()])
    assert report.pieces == 1 + 4 * (layers + 1 + 3) + 2 == report.done
    assert report.separate_pieces == 8 * (1 + layers + 1 + 3 + 2)


@pytest.mark.slow
def test_a_finished_sweep_does_nothing_again(checkpoint, done):
    folder, report = done
    again = swept(folder, checkpoint, wanted(kv=("u8", "s16")), scheduler="tcp://127.0.0.1:9")
    assert again.done == 0 and again.results == report.results
    assert msgspec.json.decode((folder / RESULTS).read_bytes(), type=SweepReport) == again


def test_what_cannot_be_is_listed_before_work(checkpoint, tmp_path):
    given, said = wanted(kv=("u8", "s16"), devices=("SM8450", "SM8650")), []
    with pytest.raises(UsageError, match="2 of 8 that cannot be: w8a16-s16-SM8450-64, w4a16-s16-SM8450-64"):
        swept(tmp_path, checkpoint, given, said)
    assert [line.partition(": ")[0] for line in said] == ["refused", "refused"] and "V73" in said[0]
    assert not [*tmp_path.iterdir()]


def test_a_scheduler_that_does_not_answer(checkpoint, tmp_path):
    with pytest.raises(ServiceError, match=r"scheduler tcp://127.0.0.1:9: got .*expected a Dask scheduler"):
        swept(tmp_path, checkpoint, wanted()[:1], scheduler="tcp://127.0.0.1:9", workers=None)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_one_export_and_one_compilation_on_a_cluster(checkpoint, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path / "cache"))
    options = [
        "--device",
        "SM8650",
        "--context",
        "64",
        "--ar",
        "1,16",
        "--calibration-tokens",
        "512",
        "--no-quality-check",
    ]
    far = ["--compile", "--scheduler", "local"]
    for place, more in (("near", ["--compile"]), ("far", far)):
        assert run(["export", str(checkpoint), "-o", str(tmp_path / place), *options, *more]) == 0
    assert contents(tmp_path / "far") == contents(tmp_path / "near")
    assert store_in().pieces == 0
    for place, more in (("near", []), ("far", ["--scheduler", "local"])):
        assert run(["compile", str(tmp_path / place), "--device", "SM8750", *more]) == 0
    assert contents(tmp_path / "far") == contents(tmp_path / "near")
    assert run(["compile", str(tmp_path / "far"), "--device", "SM8550", "--scheduler", "tcp://127.0.0.1:9"]) == 1
    assert "expected a Dask scheduler that answers" in capsys.readouterr().err
    assert not (tmp_path / "far" / "compiled" / "SM8550").exists()


@pytest.mark.slow
def test_the_command_shows_the_answer(checkpoint, done, tmp_path, capsys):
    folder, report = done
    (tmp_path / "text.txt").write_text(TEXT)
    given = ["--recipes", "w8a16,w4a16", "--kv", "u8,s16", "--devices", "SM8650,SM8750", "--contexts", "64"]
    given += ["--ar", "1,16", "--calibration-tokens", "512", "--skip-htp-check", "--no-quality-check"]
    given += ["--scheduler", "tcp://127.0.0.1:9"]
    given += ["--text", str(tmp_path / "text.txt"), "--tokens", "200", "-o", str(folder), "--size-budget", "9MB"]
    assert run(["sweep", str(checkpoint), *given, "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [each["name"] for each in shown["results"]] == [each.name for each in report.results]
    assert run(["sweep", str(checkpoint), *given]) == 0
    lines = capsys.readouterr().out.splitlines()
    best = min(report.results[::2], key=lambda each: (each.evaluation.kl_nats, each.bytes))
    assert next(line for line in lines if line.startswith("  edgekv export")).strip() == best.command
    page = Page((folder / "sweep.html").read_text())
    assert not page.open and not page.links and all(each.name in page.text for each in report.results)
    assert page.text.count("\N{BLACK STAR}") == sum(each.on_front for each in report.results)


@pytest.mark.slow
def test_the_front_and_the_choice(done):
    _, report = done
    first = report.results[0]

    def other(name: str, kl: float, size: int) -> Result:
        quality = msgspec.structs.replace(first.evaluation, kl_nats=kl)
        return msgspec.structs.replace(first, name=name, evaluation=quality, bytes=size)

    results = with_front([other("small", 0.2, 10), other("worse", 0.3, 12), other("good", 0.1, 20)])
    assert [each.name for each in results if each.on_front] == ["small", "good"]
    near = with_front([other("u8", 0.2, 1_000_000), other("s16", 0.1, 1_000_400), other("best", 0.05, 1_010_000)])
    assert [each.name for each in near if each.on_front] == ["s16", "best"], "a few bytes buy no place on the front"
    assert [recommend(results, budget)[0].name for budget in (None, 15, 5)] == ["good", "small", None]
    assert recommend(results, None)[0].knee is None, "two points are a line"
    bent = [other("small", 0.2, 10), other("bend", 0.03, 12), other("good", 0.02, 20), other("worse", 0.1, 15)]
    assert recommend(bent, None)[0].knee == "bend"
    straight = [other("small", 0.2, 10), other("on", 0.062, 15), other("good", 0.02, 20)]
    assert recommend(straight, None)[0].knee is None, "0.01 of an axis below the line"
    hollow = [other("small", 0.2, 10), other("above", 0.19, 19), other("good", 0.02, 20)]
    assert recommend(hollow, None)[0].knee is None, "it is above the line"


@pytest.mark.slow
@pytest.mark.slow
def test_the_page_is_whole_on_a_laptop_and_on_a_phone(done, tmp_path: Path, chromium: Browser):
    (file := tmp_path / "sweep.html").write_text(render_page(done[1]))
    with new_tab(chromium) as tab:
        for width in (1366, 390):
            tab.resize(width, 800)
            tab.open(file.as_uri())
            assert tab.run("document.documentElement.scrollWidth") == width
            boxes = "[...document.querySelectorAll('figure, div, table, td, pre, svg')]"
            cut = f"{boxes}.filter(e => e.scrollWidth > e.clientWidth + 1 && e.clientWidth)"
            assert tab.run(f"{cut}.map(e => e.outerHTML.slice(0, 80))") == []
            beyond = f"{boxes}.filter(e => e.getBoundingClientRect().right > innerWidth + 1)"
            assert tab.run(f"{beyond}.map(e => e.outerHTML.slice(0, 80))") == []


def test_the_page_shows_one_front_for_chips_that_do_not_differ(done):
    _, report = done
    first, other = (next(each for each in report.results if each.device == soc) for soc in ("SM8650", "SM8750"))

    def with_quality(result: Result, name: str, kl: float, size: int) -> Result:
        quality = msgspec.structs.replace(result.evaluation, kl_nats=kl)
        return msgspec.structs.replace(result, name=f"{name}-{result.device}", evaluation=quality, bytes=size)

    shapes = [("small", 0.07, 4_100_000), ("worse", 0.08, 5_000_000), ("good", 0.0006, 7_900_000)]
    results = with_front([with_quality(chip, *shape) for shape in shapes for chip in (first, other)])
    page = render_page(msgspec.structs.replace(report, results=results, recommended=[]))
    assert page.count("<figcaption>SM8650, SM8750</figcaption>") == 1 and page.count('class="off"') == 1
    labels = set(re.findall(r">([0-9.e-]+)</text>", page.partition("Error by layer")[0]))
    assert {"4", "5", "6", "7", "8", "0.0005", "0.001", "0.01", "0.1"} <= labels
    results[0] = with_quality(first, "small", 0.07, 4_000_000)
    page = render_page(msgspec.structs.replace(report, results=results, recommended=[]))
    assert "<figcaption>SM8650</figcaption>" in page and "<figcaption>SM8750</figcaption>" in page


def test_a_checkpoint_at_a_url(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setenv("EDGEKV_CACHE_DIR", str(tmp_path))
    opened = open_checkpoint(f"file://{checkpoint}")
    assert opened.weights_sha256() == Checkpoint.open(str(checkpoint)).weights_sha256()
    assert opened.folder.is_relative_to(tmp_path) and opened.name == f"file://{checkpoint}"
    for url in (f"file://{tmp_path}/nothing", "nosuch://bucket"):
        with pytest.raises(CheckpointError, match="expected a folder or a GGUF file"):
            open_checkpoint(url)


def test_why_a_worker_does_not_fit(checkpoint, tmp_path):
    store, opened = PieceStore(str(tmp_path)), Checkpoint.open(str(checkpoint))
    store.make("probe", "test", lambda folder: None)
    place, identity = Place.of(opened), Identity.of(opened)
    fit = WorkerRequirements(versions(), place, identity, store, "probe", 1)
    assert fit.problems() == []
    other = write_checkpoint(tmp_path / "other", NEWER, seed=1)
    assert open_checkpoint(str(other)).config_sha256 == opened.config_sha256
    template = Path(shutil.copytree(checkpoint, tmp_path / "template"))
    (template / "chat_template.jinja").write_text("{{ messages[0].content }}")
    reasons = {
        "numpy .*; expected 0.1": replace(fit, versions=versions() | {"numpy": "0.1"}),
        "no such file or folder": replace(fit, place=replace(place, name="/none")),
        "another one, whose weights differ": replace(fit, place=replace(place, name=str(other))),
        "another one, whose templates differ": replace(fit, place=replace(place, name=str(template))),
        "pieces not seen": replace(fit, probe="other"),
        r"GB? free in .*; expected ": replace(fit, disk_bytes=10**18),
    }
    for reason, unfit in reasons.items():
        (found,) = unfit.problems()
        assert re.search(reason, found), found


def test_a_worker_that_lives_on_notices_files_that_change(checkpoint, tmp_path):
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    opened = Checkpoint.open(str(folder))
    place, identity = Place.of(opened), Identity.of(opened)
    place.proven(weights=identity.weights)
    shutil.copyfile(
        write_checkpoint(tmp_path / "other", NEWER, seed=1) / "model.safetensors", folder / "model.safetensors"
    )
    with pytest.raises(CheckpointError, match="another one, whose weights differ"):
        place.proven(weights=identity.weights)
    now = Identity.of(Checkpoint.open(str(folder)))
    assert place.proven(weights=now.weights).weights_sha256() == now.weights


def test_errors_travel_whole():
    error = UsageError("--kv", got="u9", expected=["u8"], fix="Use u8.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is UsageError and str(copy) == str(error) and copy.field == "--kv"


@pytest.mark.thorough
@pytest.mark.slow
def test_a_piece_that_fails_stops_the_sweep_with_its_error(checkpoint, tmp_path):
    broken = shutil.copytree(checkpoint, tmp_path / "broken")
    tensors = load_file(broken / "model.safetensors")
    tensors["model.norm.weight"][:] = np.nan
    save_file(tensors, broken / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight"):
        swept(tmp_path / "one", broken, wanted()[:1])
    report = swept(tmp_path / "all", broken, wanted()[:1], keep_going=True)
    assert not report.results and [each.name for each in report.failed] == ["w8a16-u8-SM8650-64"]
    assert "survey: " in report.failed[0].reason


@pytest.mark.slow
def test_a_disk_that_is_full_for_a_worker_is_named_and_the_sweep_goes_on_later(checkpoint, tmp_path):
    with (
        files_of_at_most(20_000),
        pytest.raises(BundleError, match=r"(too large|short write) while writing the piece \w+"),
    ):
        swept(tmp_path, checkpoint, wanted()[:1], workers=1)
    assert not [*(tmp_path / "pieces").glob(".partial-*")] and not (tmp_path / "bundles").exists()
    report = swept(tmp_path, checkpoint, wanted()[:1], workers=1)
    assert 0 < report.done < report.pieces and len(report.results) == 1


def test_line_ends_of_the_text_stay(tmp_path):
    store, plan, text = PieceStore(str(tmp_path)), Plan(), "one\r\ntwo\n"
    name = give_text(plan, text)
    store.make(name, "given", plan.sources[name])
    assert Inputs(store, None).text(name) == text
