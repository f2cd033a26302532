"""Exports of pieces: what is finished is not done again, and nothing stale or damaged is taken."""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from devices import find
from edgekv.bundle import COMPILED, Manifest, open_bundle, open_compiled
from edgekv.cli import run
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.system import parse_bytes
from edgekv.qnn import provider as qnn
from exporters import export, resources
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import compile_bundle
from exporters.export import ExportOptions, RunOptions, export_bundle
from exporters.pipeline import pieces
from exporters.pipeline.dask import run as distribute
from exporters.pipeline.inputs import LAYER, Inputs
from exporters.pipeline.layer_file import LayerFile
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.planning import Planner
from exporters.pipeline.serial import run_serial
from exporters.pipeline.store import RECORD, MissingPieceError, PieceRecord, PieceStore
from exporters.plan import plan_export
from exporters.quantize.effort import Effort
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import WeightRule, find_recipe
from exporters.quantize.reference import Reference
from exporters.quantize.windows import Room
from exporters.resources import full_disk_named, residual_every
from quant import products
from tests.support.checkpoints import write_checkpoint
from tests.support.processes import contents

LAYERS = 3
RECIPE = find_recipe("w4a16-lpbq32")
LAST_LAYER = "model.layers.2.*"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = write_checkpoint(tmp_path_factory.mktemp("checkpoint"), {"num_hidden_layers": LAYERS})
    return Checkpoint.open(str(folder))


def options(recipe=RECIPE):
    return ExportOptions(
        device=find("SM8650"),
        recipe=recipe,
        context=64,
        ar=(1, 16),
        check_on_htp=False,
        check_quality=False,
        calibration_tokens=256,
    )


def with_rule(recipe, rule):
    return msgspec.structs.replace(recipe, weights=(*recipe.weights, rule))


@dataclass
class Workplace:
    """Exports of one checkpoint into one folder."""

    checkpoint: Checkpoint
    folder: object
    steps: list = field(default_factory=list)

    def export(self, name="bundle", recipe=RECIPE, stop_after=None, force=False, **run) -> Manifest:
        """Export; `steps` is then the layers done, from the first that was told of."""
        self.steps = []

        def progress(stage, done, total):
            if stage == "quantize":
                self.steps.append(done)
                if done == stop_after:
                    raise KeyboardInterrupt

        chosen = RunOptions(cache_dir=self.folder / "cache", **run)
        target = self.folder / name
        return export_bundle(self.checkpoint, target, options(recipe), chosen, force=force, progress=progress)

    @property
    def pieces(self):
        return sorted((self.folder / "cache" / "pieces").glob("[!.]*"))

    def of_kind(self, kind):
        """The finished pieces of a kind, in the order in which they were made."""
        found = [each for each in self.pieces if json.loads((each / RECORD).read_bytes())["kind"] == kind]
        return sorted(found, key=lambda each: (each / RECORD).stat().st_mtime_ns)


@pytest.fixture
def work(checkpoint, tmp_path):
    return Workplace(checkpoint, tmp_path)


@pytest.mark.slow
def test_an_export_that_was_stopped_goes_on_where_it_was(work):
    whole = work.export("whole")
    assert work.steps == [0, 1, 2, 3] and work.pieces == []
    with pytest.raises(KeyboardInterrupt):
        work.export(stop_after=2)
    assert len(work.of_kind("layer")) == 2 and not (work.folder / "bundle").exists()
    assert work.export(resume=True) == whole
    assert work.steps == [2, 3] and work.pieces == []


@pytest.mark.slow
def test_a_layer_that_left_out_its_residual_is_done_again(work, monkeypatch):
    monkeypatch.setattr("exporters.export.residual_every", lambda *_: 2)
    whole = work.export("whole")
    for stopped, steps in ((1, [0, 1, 2, 3]), (2, [2, 3])):
        with pytest.raises(KeyboardInterrupt):
            work.export(stop_after=stopped)
        assert work.export("resumed", resume=True, force=stopped > 1) == whole and work.steps == steps
        assert contents(work.folder / "resumed") == contents(work.folder / "whole")


@pytest.mark.slow
def test_a_worker_goes_on_behind_a_lost_one_that_left_out_its_residual(checkpoint, tmp_path, monkeypatch):
    done, lost = [], 1

    class Worker:
        state = SimpleNamespace(nthreads=1)

        def log_event(self, topic, name):
            done.append(name)
            if len(done) == lost:
                raise KeyboardInterrupt

    monkeypatch.setattr(distribute, "get_worker", Worker)
    files = []
    for folder in ("whole", "lost"):
        store, planner = PieceStore(str(tmp_path / folder)), Planner(Identity.of(checkpoint), residual_every=2)
        planned = planner.export(plan_export(checkpoint, options())).decoder
        place, plan = Place.of(checkpoint), planner.plan
        run_serial(plan, planned.needs, Inputs(store, place), lambda *step: None, resume=True)
        chain = [planned.piece for planned in plan.pieces.values() if planned.piece.kind in ("layer", "head")]
        done.clear()
        lost = 1 if folder == "lost" else None
        with nullcontext() if lost is None else pytest.raises(KeyboardInterrupt):
            distribute.do_chain(chain, store, place, "done", 2, [])
        distribute._inputs.cache_clear()
        lost = None
        assert LayerFile.leaves_out_residual(store.folder / chain[0].name / LAYER)
        distribute.do_chain(chain, store, place, "done", 2, [])
        assert done[:3] == ([chain[0].name] * 2 + [chain[1].name] if folder == "lost" else names_of(chain)[:3])
        distribute._inputs.cache_clear()
        files.append({piece.name: contents(store.folder / piece.name / LAYER) for piece in chain})
    assert files[0] == files[1]


def names_of(pieces):
    return [piece.name for piece in pieces]


def test_the_residuals_of_an_export_take_half_a_gigabyte_or_as_much_as_its_bundle(checkpoint):
    spec = checkpoint.spec
    layer = 4 * spec.hidden
    assert residual_every(spec, 1024, 1, 0) == 1
    assert residual_every(spec, 2 * 500_000_000 // layer, 1, 0) == 2 * LAYERS
    assert residual_every(spec, 2 * 500_000_000 // layer, 2, 2_000_000_000) == LAYERS


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.exporters.pipeline.test_pipeline import *
stage, step = sys.argv[3], int(sys.argv[4])
def kill(name, done, total):
    if (name, done) == (stage, step):
        os.kill(os.getpid(), signal.SIGKILL)
run = RunOptions(cache_dir=Path(sys.argv[2]) / "cache", resume=True)
export_bundle(Checkpoint.open(sys.argv[1]), Path(sys.argv[2]) / "bundle", options(), run, progress=kill)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_an_export_that_is_killed_at_any_moment_goes_on_where_it_was(work):
    whole = work.export("whole")
    moments = [("read", 5), ("survey", 4), ("quantize", 1), ("quantize head", 1), ("write", 2), ("seal", 0)]
    for stage, step in moments:
        command = [sys.executable, "-c", KILLED, str(work.checkpoint.folder), str(work.folder), stage, str(step)]
        assert subprocess.run(command, check=False, timeout=120).returncode == -signal.SIGKILL, (stage, step)
        assert not (work.folder / "bundle").exists()
    assert work.export(resume=True) == whole and work.steps == []
    assert contents(work.folder / "bundle") == contents(work.folder / "whole")
    assert sorted(path.name for path in work.folder.iterdir()) == ["bundle", "cache", "whole"]
    assert [*(work.folder / "cache" / "pieces").glob(".partial*")] == []


@pytest.mark.slow
def test_without_resume_everything_is_done_anew(work):
    first = work.export(keep_pieces=True)
    assert work.export("again", keep_pieces=True) == first
    assert work.steps == [0, 1, 2, 3] and len(work.of_kind("layer")) == LAYERS


@pytest.mark.slow
def test_another_rule_for_a_layer_redoes_that_layer_and_those_behind_it(work):
    work.export(keep_pieces=True)
    other = with_rule(RECIPE, WeightRule(tensors=LAST_LAYER, dtype="int8"))
    changed = work.export("changed", other, resume=True, keep_pieces=True)
    assert work.steps == [2, 3]
    assert changed == work.export("whole", other, keep_pieces=True)
    work.export(
        "head", with_rule(RECIPE, WeightRule(tensors="lm_head.weight", dtype="int8", method="nearest")), resume=True
    )
    assert work.steps == [], "no layer is done again"


@pytest.mark.slow
def test_a_damaged_piece_is_made_anew(work):
    first = work.export(keep_pieces=True)
    for damage in ("tensors.safetensors", "layer.json"):
        layer = work.of_kind("layer")[1] / "layer" / damage
        content = bytearray(layer.read_bytes())
        content[-2] ^= 1
        layer.write_bytes(content)
        (work.of_kind("write")[0] / RECORD).unlink()
        shutil.rmtree(work.folder / "bundle")
        assert work.export(resume=True, keep_pieces=True) == first
        assert work.steps == [2, 3], "one layer is done again"


def seal(piece):
    """Give a piece that was changed the record that belongs to its files."""
    (piece / RECORD).unlink()
    record = PieceRecord.of(piece, piece.name, "layer", 0.0, None)
    (piece / RECORD).write_bytes(msgspec.json.encode(record))


def test_a_layer_that_was_forged_whole_is_refused_by_name(work):
    with pytest.raises(KeyboardInterrupt):
        work.export(stop_after=1)
    (layer,) = work.of_kind("layer")
    file = layer / "layer" / "layer.json"
    content = json.loads(file.read_bytes())
    places, ranged = content["places"], next(iter(content["ranges"]))
    matrices, (name, matrix) = places["matrices"], next(iter(places["matrices"].items()))

    def moved(**changes):
        return {"places": {**places, "matrices": {**matrices, name: {**matrix, **changes}}}}

    damages = [
        {"tensors": {**content["tensors"], "hidden": {**content["tensors"]["hidden"], "shape": [2, 2]}}},
        {"tensors": {key: each for key, each in content["tensors"].items() if key != "hidden"}},
        {"tensors": {**content["tensors"], "more": content["tensors"]["hidden"]}},
        moved(integers=10**9),
        moved(integers=-8),
        moved(dtype="object"),
        moved(rows=-1),
        moved(file="../../elsewhere.safetensors"),
        moved(file="missing.safetensors"),
        {"ranges": {**content["ranges"], ranged: {"low": 2.0, "high": 1.0}}},
        {"ranges": 3},
    ]
    for damage in damages:
        file.write_text(json.dumps(content | damage))
        assert work.of_kind("layer") == [layer]
        with pytest.raises(KeyboardInterrupt):  # its hash is another one
            work.export(resume=True, stop_after=1)
        assert work.steps == [0, 1], damage
        file.write_text(json.dumps(content | damage))
        seal(layer)
        with pytest.raises(UsageError, match=r"layer.*expected .*Remove the folder"):
            work.export(resume=True)
    file.write_text(json.dumps(content))
    seal(layer)
    with pytest.raises(KeyboardInterrupt):
        work.export(resume=True, stop_after=1)
    assert work.steps == [1]


@pytest.mark.slow
def test_a_layer_of_another_decoder_is_not_written(work):
    work.export(keep_pieces=True)
    file, (write,) = work.of_kind("layer")[1] / "layer" / "layer.json", work.of_kind("write")
    content = json.loads(file.read_bytes())
    matrices, tensors = content["places"]["matrices"], content["places"]["tensors"]
    (name, matrix), (norm, _) = next(iter(matrices.items())), next(iter(tensors.items()))
    damages = [
        {"matrices": {**matrices, name: {**matrix, "dtype": "int4"}}},
        {"matrices": {**matrices, name: {**matrix, "heads": 1}}},
        {"matrices": {**matrices, "other": matrix}},
        {"tensors": {key: each for key, each in tensors.items() if key != norm}},
    ]
    assert matrix["heads"] > 1 and matrix["dtype"] != "int4"
    for damage in damages:
        shutil.rmtree(work.folder / "bundle", ignore_errors=True)
        shutil.rmtree(write, ignore_errors=True)
        file.write_text(json.dumps(content | {"places": content["places"] | damage}))
        seal(file.parent.parent)
        with pytest.raises(UsageError, match=r"got other (matrices|norms).*expected those of its layer.*Remove"):
            work.export(resume=True, keep_pieces=True)
        assert not (work.folder / "bundle").exists() and work.of_kind("write") == []


@pytest.mark.slow
def test_clearing_the_cache_takes_nothing_from_an_export_that_runs(work):
    whole = work.export("whole")

    def clear(stage, done, total):
        if (stage, done) == ("quantize", LAYERS):
            shutil.rmtree(work.folder / "cache")

    run = RunOptions(cache_dir=work.folder / "cache")
    assert export_bundle(work.checkpoint, work.folder / "bundle", options(), run, progress=clear) == whole


def test_a_second_attempt_replaces_no_folder_of_others(work, monkeypatch):
    """It is made while an export puts its bundle together, whose pieces somebody has removed."""
    made, theirs = export.assemble, work.folder / "bundle" / "manifest.json"

    def assemble(*given, **options):
        theirs.parent.mkdir()
        theirs.write_text("theirs")
        monkeypatch.setattr(export, "assemble", made)
        raise MissingPieceError("piece", got="nothing", expected="a piece", fix="-")

    monkeypatch.setattr(export, "assemble", assemble)
    with pytest.raises(UsageError, match=r"output .*bundle: got .*exist"):
        work.export()
    assert [*theirs.parent.iterdir()] == [theirs] and theirs.read_text() == "theirs"


AT_ONCE = """
import sys
from pathlib import Path
from tests.exporters.pipeline.test_pipeline import *
target = Path(sys.argv[2])
run = RunOptions(cache_dir=target.parent / "cache", resume=True)
for number in range(2):
    export_bundle(Checkpoint.open(sys.argv[1]), target.with_name(f"{target.name}-{number}"), options(), run)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_exports_of_one_checkpoint_at_once_share_a_store(work):
    whole = work.export("whole")
    command = [sys.executable, "-c", AT_ONCE, str(work.checkpoint.folder)]
    targets = [work.folder / f"at-once-{number}" for number in range(2)]
    running = [subprocess.Popen([*command, str(each)], stderr=subprocess.PIPE, text=True) for each in targets]
    assert [child.communicate(timeout=180)[1] for child in running] == ["", ""]
    for each in targets:
        assert open_bundle(each.with_name(f"{each.name}-1")).manifest == whole


def test_a_graph_that_was_checked_is_not_checked_again(work, monkeypatch):
    checked, one = [], options()

    def found(models, device):
        checked.extend(model.name for model in models)
        return ["a node"]

    monkeypatch.setattr(pieces, "floating_nodes", found)  # the compiler takes seconds, and finds none

    def export(**changes):
        run = RunOptions(cache_dir=work.folder / "cache", resume=True)
        return export_bundle(work.checkpoint, work.folder / "b", replace(one, check_on_htp=True, **changes), run)

    with pytest.raises(EngineError, match="compute in float"):
        export()
    assert len(set(checked)) == len(checked) == 3
    assert export(allow_float=True).floating_nodes == ["a node"] * 3
    assert len(checked) == 3 and work.pieces == []


@dataclass
class Compilations:
    """What the compiler was given, as names of graphs; it stops before it is given more than `most` at once."""

    most: int = 1
    done: list = field(default_factory=list)


@pytest.fixture
def compilations(monkeypatch):
    counted, compile_graphs = Compilations(), pieces.compile_graphs

    def counting(device, models, folder, **rest):
        if len(models) > counted.most:
            raise KeyboardInterrupt
        counted.done.append(list(models))
        return compile_graphs(device, models, folder, **rest)

    monkeypatch.setattr(pieces, "compile_graphs", counting)
    return counted


@pytest.mark.htp
def test_binaries_that_are_finished_are_not_compiled_again(work, compilations):
    work.export()
    bundle, chip = open_bundle(work.folder / "bundle"), find("SM8650")
    run = RunOptions(cache_dir=work.folder / "cache", resume=True)
    with pytest.raises(KeyboardInterrupt):
        compile_bundle(bundle, chip, run)
    assert not (bundle.path / "compiled" / chip.soc).exists()
    assert sorted(compilations.done) == [["ar16_cl64"], ["ar1_cl64"]]
    compilations.most, peaks = 2, {}
    resumed = compile_bundle(bundle, chip, run, watch=peaks.__setitem__)
    assert compilations.done[2:] == [["ar1_cl64", "ar16_cl64"]]
    assert {*resumed.files, COMPILED} == {path.name for path in (bundle.path / "compiled" / chip.soc).iterdir()}
    assert peaks.keys() == {binary.file for binary in resumed.binaries} and work.pieces == []


@pytest.mark.thorough
@pytest.mark.htp
def test_an_export_that_stopped_while_it_compiled_takes_the_binaries_that_are_finished(work, compilations, monkeypatch):
    checked, floating_nodes = [], pieces.floating_nodes

    def counting(models, device):
        checked.extend(model.name for model in models)
        return floating_nodes(models, device)

    monkeypatch.setattr(pieces, "floating_nodes", counting)
    chosen = replace(options(), check_on_htp=True, compile=True)

    def export(name, resume):
        run = RunOptions(cache_dir=work.folder / "cache", resume=resume)
        return export_bundle(work.checkpoint, work.folder / name, chosen, run)

    with pytest.raises(KeyboardInterrupt):
        export("stopped", resume=False)
    assert not (work.folder / "stopped").exists() and sorted(compilations.done) == [["ar16_cl64"], ["ar1_cl64"]]
    compilations.most = 2
    resumed = export("resumed", resume=True)
    assert compilations.done[2:] == [["ar1_cl64", "ar16_cl64"]] and work.pieces == []
    assert checked == ["ar16_cl64_score.onnx.gz"]  # no binary holds it; the others were looked at while they compiled
    assert resumed.htp_check == "integers-only"
    compiled = open_compiled(open_bundle(work.folder / "resumed"), "SM8650", qnn.compiler())
    assert [binary.graphs for binary in compiled.manifest.binaries] == [1, 1, 2]


# Disks


@contextmanager
def files_of_at_most(size_bytes):
    """What a disk with so little room says, the system says of a file that is larger."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_for_pieces_is_named_and_nothing_is_left(work):
    match = r"while writing the piece layer; expected .*--resume"
    with files_of_at_most(60_000), pytest.raises(BundleError, match=match):
        work.export()
    assert [path.name for path in work.folder.iterdir()] == ["cache"] and work.of_kind("layer") == []
    assert [*(work.folder / "cache" / "pieces").glob(".partial*")] == []


@pytest.mark.slow
def test_a_disk_that_is_full_for_the_bundle_is_named_and_the_export_goes_on_later(work):
    whole = work.export("whole", keep_pieces=True)
    shutil.rmtree(work.of_kind("write")[0])
    graph = max(record.bytes for record in whole.files.values())
    with (
        files_of_at_most(graph - 1),
        pytest.raises(BundleError, match=r"while writing the piece write; expected .*--resume"),
    ):
        work.export(resume=True, keep_pieces=True)
    assert not (work.folder / "bundle").exists() and not [*work.folder.glob(".bundle*")]
    assert work.export(resume=True) == whole and work.steps == []


def test_an_array_that_numpy_writes_in_part_is_a_full_disk(tmp_path):
    said = pytest.raises(BundleError, match="a short write while writing an array")
    with files_of_at_most(20_000), said, full_disk_named(tmp_path, "an array"):
        np.save(tmp_path / "array.npy", np.zeros(5120, np.float32))


def test_a_disk_without_room_is_refused_before_anything_is_written(work, monkeypatch):
    monkeypatch.setattr(resources.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 10**5))
    with pytest.raises(BundleError, match=r"got 1MB free; expected \d+MB. Free some space"):
        work.export()
    assert not (work.folder / "bundle").exists() and work.pieces == []


def test_a_cache_directory_that_cannot_be_made_is_refused(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="--cache-dir"):
        export_bundle(checkpoint, tmp_path / "bundle", options(), RunOptions(cache_dir=tmp_path / "file"))


@pytest.mark.slow
def test_an_export_that_learns_goes_on_where_it_was(work):
    def export(name, **run):
        told = []

        def progress(stage, done, total):
            told.append((stage, done))
            if (stage, done) == stop:
                raise KeyboardInterrupt

        effort = Effort(3, descent_bits=4, weighs_attention=True, written_tokens=300)
        chosen = replace(options(), effort=effort)
        run = RunOptions(cache_dir=work.folder / "cache", **run)
        return export_bundle(work.checkpoint, work.folder / name, chosen, run, progress=progress), told

    stop = None
    whole, _ = export("whole")
    assert work.pieces == []
    assert {each.method for each in whole.recipe.weights} == {"attention", "descent", "gptq"}
    assert (whole.source.calibration_tokens, whole.source.generated_tokens) == (256 + 320, 320)  # windows of 64
    stop = ("quantize", 1)
    with pytest.raises(KeyboardInterrupt):
        export("bundle")
    stop = None
    found, told = export("bundle", resume=True)
    assert found == whole and work.pieces == []
    assert not [stage for stage, _ in told if stage.startswith("write text")]
    assert [done for stage, done in told if stage == "quantize"] == [1, 2, 3]


# RAM


def test_a_cap_that_one_layer_exceeds_is_refused_and_says_what_is_needed(work):
    with pytest.raises(UsageError, match=r"--max-ram: got 100MB; expected (\d+)MB for a layer") as caught:
        work.export(max_ram_bytes=100_000_000)
    needed = parse_bytes("--max-ram", caught.value.expected.split()[0])
    assert work.pieces == [] and work.export(max_ram_bytes=needed)


def test_a_cap_that_the_float_model_exceeds_is_refused(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint", {"vocab_size": 65536, "num_hidden_layers": 1})
    cap, chosen = RunOptions(max_ram_bytes=210_000_000), replace(options(), effort=Effort(3, 8, True, 64))
    with pytest.raises(UsageError, match=r"for the float model, which writes text for --effort.*, or a lower --effort"):
        export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", chosen, cap)
    assert not (tmp_path / "bundle").exists()


PEAK = """
import sys
from pathlib import Path
from edgekv.machine.system import peak_bytes
from tests.exporters.pipeline.test_pipeline import *
checkpoint, target = Checkpoint.open(sys.argv[1]), Path(sys.argv[2])
most = int(sys.argv[3])
export_bundle(checkpoint, target, options(), RunOptions(max_ram_bytes=most))
print(peak_bytes())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes",
    [
        {"intermediate_size": 1536},
        {"model_type": "olmoe", "intermediate_size": 384, "num_experts": 16, "num_experts_per_tok": 2},
    ],
    ids=["dense", "experts"],
)
def test_an_export_holds_the_cap_that_it_accepts(tmp_path, sizes):
    sizes = {"hidden_size": 512, "vocab_size": 8192, "num_hidden_layers": 1, **sizes}
    folder = write_checkpoint(tmp_path / "checkpoint", sizes, gain=1.0)
    with pytest.raises(UsageError) as caught:
        export_bundle(Checkpoint.open(str(folder)), tmp_path / "x", options(), RunOptions(max_ram_bytes=1))
    most = parse_bytes("--max-ram", caught.value.expected.split()[0])
    command = [sys.executable, "-c", PEAK, str(folder), str(tmp_path / "bundle"), str(most)]
    one_thread = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
    held = int(subprocess.run(command, capture_output=True, check=True, text=True, env=one_thread).stdout)
    assert most / 2 < held <= most


# The commands


def invoke(name, capsys, *arguments):
    code = run([name, *map(str, arguments)])
    return code, *capsys.readouterr()


def test_the_command_says_what_is_left_and_removes_it(work, capsys):
    work.export(keep_pieces=True)
    cache = ("--cache-dir", work.folder / "cache")
    left = json.loads(invoke("pieces", capsys, *cache, "--json")[1])
    assert left["pieces"] == len(work.pieces) > LAYERS and left["bytes"] > 100_000 and not left["cleared"]
    assert "removed" in invoke("pieces", capsys, *cache, "--clear")[1]
    assert json.loads(invoke("pieces", capsys, *cache, "--json")[1])["pieces"] == 0
    assert work.pieces == []


def test_an_export_that_stops_says_how_to_go_on(work, monkeypatch, capsys):
    fixed = ("--device", "SM8650", "--cache-dir", work.folder / "cache", "--context", 64, "--skip-htp-check")
    fixed += ("--no-quality-check", "--calibration-tokens", 256)
    arguments = (work.checkpoint.folder, "-o", work.folder / "bundle", *fixed)
    assert "MB for a layer" in invoke("export", capsys, *arguments, "--max-ram", "100MB")[2]
    with monkeypatch.context() as patch:
        patch.setattr(Quantizer, "head", interrupted)
        code, _, told = invoke("export", capsys, *arguments)
    assert code == 130 and "3 layers are finished. Run the same command with --resume" in told
    assert len(work.of_kind("layer")) == LAYERS
    assert "calibrated on 256 tokens" in invoke("export", capsys, *arguments, "--resume", "--max-ram", "1GB")[1]


def interrupted(self):
    raise KeyboardInterrupt


def test_windows_in_threads_give_what_they_give_one_after_another(tmp_path, monkeypatch):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, {"num_hidden_layers": 1})))
    tokens = np.arange(192).reshape(6, 32) % checkpoint.spec.vocab
    found = []
    for threads, room in ((1, None), (3, Room(10**9))):
        blas = products._Blas()
        vars(blas)["threads"] = threads
        monkeypatch.setattr(products, "_BLAS", blas)
        quantizer = Quantizer(checkpoint, tokens, 32, find_recipe("w4a16"), room=room)
        matrices, ranges = dict(quantizer.layer(0)), quantizer.take_ranges()
        found.append((matrices, ranges, np.stack([*quantizer.hidden])))
    (matrices, ranges, hidden), (others, other_ranges, other_hidden) = found
    np.testing.assert_array_equal(hidden, other_hidden)
    assert all(np.array_equal(matrices[name].integers, others[name].integers) for name in matrices)
    assert ranges.keys() == other_ranges.keys()
    for name, seen in ranges.items():
        assert (seen.low, seen.high) == (other_ranges[name].low, other_ranges[name].high)
        np.testing.assert_array_equal(seen.sample, other_ranges[name].sample)


@pytest.mark.parametrize(("recipe", "decoders"), [("w8a16", 1), ("w4a16", 2)])
def test_the_quantized_decoder_is_followed_where_it_drifts(tmp_path, recipe, decoders):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path)))
    tokens = np.arange(64).reshape(2, 32)
    quantizer = Quantizer(checkpoint, tokens, 32, find_recipe(recipe))
    for layer in range(checkpoint.spec.layers):
        dict(quantizer.layer(layer))
    assert quantizer.hidden.shape == (len(tokens), decoders, tokens.shape[1], checkpoint.spec.hidden)
    exact, *quantized = np.stack([*quantizer.hidden], axis=1)
    reference = Reference(checkpoint, 32).states(list(tokens))
    np.testing.assert_allclose(exact, reference, rtol=1e-4, atol=1e-4)
    assert all(not np.allclose(each, exact, rtol=1e-4, atol=1e-4) for each in quantized)
