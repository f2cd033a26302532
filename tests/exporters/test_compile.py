import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

import edgekv
from devices import find
from edgekv.bundle import open_bundle, open_compiled
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.graph_file import graph_name
from edgekv.qnn import provider as qnn
from edgekv.runtime import HtpEngine, make_engine
from edgekv.runtime.load_options import EngineOptions
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compile import BinaryChoice, compile_bundle
from exporters.export import ExportOptions, export_bundle
from exporters.htp.binary import check_chip
from exporters.quantize.recipe import find_recipe
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import small_options
from tests.support.thorough import variants

pytestmark = pytest.mark.htp


def record_of(folder):
    """What a bundle says of its binaries."""
    found = open_compiled(open_bundle(folder), "SM8650", qnn.compiler())
    assert found is not None
    return found.manifest


@pytest.fixture(scope="module")
def compiled(wide_on_htp):
    """The embedded model for SM8650, with the record of its binaries."""
    return wide_on_htp, record_of(wide_on_htp)


@pytest.fixture(scope="module")
def small_compiled(tmp_path_factory, small_on_htp):
    """A small random model, where the model does not matter, to write into."""
    folder = shutil.copytree(small_on_htp, tmp_path_factory.mktemp("small_compiled") / "bundle")
    return folder, record_of(folder)


def test_one_binary_for_each_graph_and_one_that_shares_weights(compiled):
    folder, record = compiled
    sizes = {binary.file: record.files[binary.file].bytes for binary in record.binaries}
    alone = [sizes[binary.file] for binary in record.binaries if binary.graphs == 1]
    (shared,) = (sizes[binary.file] for binary in record.binaries if binary.graphs == 2)
    assert len(alone) == 2 and shared < 0.6 * sum(alone)
    assert all((folder / "compiled" / "SM8650" / name).stat().st_size == size for name, size in sizes.items())


def test_the_binary_itself_says_which_chip_it_targets(compiled):
    folder, record = compiled
    assert (record.soc, record.arch, record.vtcm_bytes) == ("SM8650", 75, 8 << 20)
    binary = folder / "compiled" / "SM8650" / record.binaries[0].file
    with pytest.raises(EngineError, match=r"got SM8650, V75, 8 MiB VTCM; expected SM8750, V79"):
        check_chip(binary, find("SM8750"))


@pytest.mark.parametrize(
    "soc", variants(["SM8550", "SM8750", "SM8850", "SC8380XP", "QCS8550", "QCS6490"], ["SM8850", "SC8380XP", "QCS6490"])
)
def test_every_chip_of_the_catalogue_is_targeted_for_real(small_compiled, soc):
    """Read back from the binary that both graphs share."""
    record = compile_bundle(open_bundle(small_compiled[0]), find(soc), choice=BinaryChoice(per_graph=False))
    assert (record.soc, record.arch, len(record.binaries)) == (soc, find(soc).arch, 1)


@pytest.mark.thorough
def test_an_export_that_compiles_writes_the_bytes_of_an_export_that_is_compiled_later(tmp_path):
    """In another folder too, and each time."""
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "checkpoint")))
    options, peaks = small_options(context=64, ar=(1, 8), check_on_htp=True), {}
    made = export_bundle(checkpoint, tmp_path / "at-once", replace(options, compile=True), watch=peaks.__setitem__)
    assert made == export_bundle(checkpoint, tmp_path / "apart", options)
    assert made.htp_check == "integers-only"
    apart = compile_bundle(open_bundle(tmp_path / "apart"), find("SM8650"))
    opened = open_bundle(tmp_path / "at-once")
    at_once = open_compiled(opened, "SM8650", apart.compiler)
    assert at_once is not None and at_once.manifest.binaries == apart.binaries
    assert at_once.manifest.files == apart.files, "the same bytes"
    assert peaks.keys() == {binary.file for binary in apart.binaries}


@pytest.mark.parametrize("options", [{"graph_format": "tflite", "kv_dtype": "s8"}, {"check_on_htp": False}])
def test_compiling_at_once_needs_graphs_that_are_checked(options):
    with pytest.raises(UsageError, match=r"--compile: got .*; expected ONNX graphs, which are checked"):
        ExportOptions(device=find("SM8650"), recipe=find_recipe("w8a16"), compile=True, **options)


def test_a_compiled_bundle_still_opens(compiled):
    assert open_bundle(compiled[0]).manifest.device == "SM8650"


def test_compiling_again_needs_force(small_compiled, tmp_path):
    opened = open_bundle(shutil.copytree(small_compiled[0], tmp_path / "copy"))
    with pytest.raises(UsageError, match="--force"):
        compile_bundle(opened, find("SM8650"), choice=BinaryChoice(per_graph=False))
    assert (
        compile_bundle(opened, find("SM8650"), force=True, choice=BinaryChoice(per_graph=False)).binaries
        == small_compiled[1].binaries[-1:]
    )


def test_a_compiled_graph_runs_like_the_one_it_was_made_from(small_compiled):
    """In a child process: the library that loads context binaries can crash."""
    folder, record = small_compiled
    program = """
import sys, numpy as np
from pathlib import Path
from devices import find
from edgekv.qnn import provider as qnn
outputs = []
for path in sys.argv[1:]:
    session = qnn.create_session(Path(path), find("SM8650"))
    random = np.random.default_rng(0)
    feeds = {}
    for each in session.get_inputs():
        dtype = {"tensor(int32)": np.int32, "tensor(uint16)": np.uint16, "tensor(uint8)": np.uint8}[each.type]
        feeds[each.name] = random.integers(0, 200, each.shape).astype(dtype)
    outputs.append(dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds))))
assert set(outputs[0]) == set(outputs[1])
assert all((outputs[1][name] == value).all() for name, value in outputs[0].items())
print("equal")
"""
    wrapper = folder / "compiled" / "SM8650" / record.binaries[0].wrappers["ar1_cl64"]
    command = [sys.executable, "-c", program, str(folder / "ar1_cl64.onnx.gz"), str(wrapper)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[-1] == "equal"


def test_the_engine_loads_what_was_compiled_and_gives_the_same_tokens(small_compiled, tmp_path):
    folder, record = small_compiled
    shutil.copytree(folder, bare := tmp_path / "bare", ignore=shutil.ignore_patterns("compiled"))
    wrappers = {graph: name for b in record.binaries if b.graphs == 1 for graph, name in b.wrappers.items()}
    found = make_engine(open_bundle(folder), EngineOptions("htp")).compiled
    assert {graph_name(graph): wrapper.name for graph, wrapper in found.items()} == wrappers
    assert make_engine(open_bundle(bare), EngineOptions("htp")) == HtpEngine(find("SM8650"))
    texts = [
        [token.id for token in edgekv.load(each, engine="htp").generate("def main(", max_new_tokens=8)]
        for each in (folder, bare)
    ]
    assert texts[0] == texts[1]


def test_a_damaged_binary_is_refused_before_it_can_crash_anything(compiled, tmp_path):
    folder, record = compiled
    shutil.copytree(folder, copy := tmp_path / "copy")
    binary = copy / "compiled" / "SM8650" / record.binaries[0].file
    binary.write_bytes(binary.read_bytes()[:-1])
    with pytest.raises(BundleError, match=rf"{binary.name}: got sha256 .* edgekv compile BUNDLE --device SM8650"):
        make_engine(open_bundle(copy), EngineOptions("htp"))


def test_binaries_of_another_export_are_not_loaded(compiled, tmp_path):
    shutil.copytree(compiled[0], copy := tmp_path / "copy")
    with (copy / "manifest.json").open("a") as file:
        file.write("\n")
    assert make_engine(open_bundle(copy), EngineOptions("htp")).compiled == {}
