from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, strategies as st

from edgekv.bundle import GraphRecord, Manifest, open_bundle
from edgekv.engine import Graphs, Session
from edgekv.engine.session import choose_ar
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.kv import KVCache
from edgekv.runtime import CpuEngine, binding, make_engine
from edgekv.runtime.binding import MemoryBinding, _Place, _public
from edgekv.runtime.graph import RopeTable
from edgekv.runtime.load_options import EngineOptions
from quant import Encoding

UNIT = Encoding("u16", 2 / 65535, 32768)


@pytest.fixture(scope="module")
def manifest(bundle: Path) -> Manifest:
    return open_bundle(bundle).manifest


@pytest.fixture(scope="module")
def decode(manifest: Manifest) -> GraphRecord:
    record = manifest.graph("decode")
    assert record is not None
    return record


@pytest.fixture(scope="module")
def session(bundle: Path, decode: GraphRecord) -> ort.InferenceSession:
    return CpuEngine(threads=1).session(bundle / decode.file)


@given(st.integers(1, 100), st.integers(0, 127))
def test_the_min_graph_that_takes_all_is_chosen(remaining: int, length: int) -> None:
    ar = choose_ar(remaining, (1, 8, 32), lambda ar: length <= 128 - ar)
    assert ar == 1 or length <= 128 - ar
    if length <= 96:
        assert ar == (1 if remaining == 1 else 8 if remaining <= 8 else 32)


def test_without_room_the_single_step_says_so() -> None:
    assert choose_ar(5, (1, 32), lambda ar: False) == 1


@given(st.integers(0, 300), st.integers(1, 40))
def test_a_rope_table_that_grew_is_the_one_computed_at_once(position: int, count: int) -> None:
    frequencies = [1.0, 0.1, 0.01]
    grown, whole = (RopeTable(frequencies, UNIT, UNIT, positions=n) for n in (1, 400))
    for found, wanted in zip(grown.rows(position, count), whole.rows(position, count), strict=True):
        assert np.array_equal(found, wanted)


def test_rope_truncates_as_genie_does() -> None:
    scale = float(np.float32(UNIT.scale))
    cos, sin = RopeTable([1.0], UNIT, UNIT, positions=4).rows(0, 4)
    assert cos[:, 0].tolist() == [int(np.cos(p) / scale + 32768) for p in range(4)]
    assert sin[:, 0].tolist() == [int(np.sin(p) / scale + 32768) for p in range(4)]


def test_a_cosine_just_below_one_is_cut_at_the_scale_that_the_graph_holds() -> None:
    """1/32767 rounds down to float32, so that the slow frequencies of llama3 reach the last step."""
    cos, _ = RopeTable([1e-6], *[Encoding("u16", 1 / 32767, 32768)] * 2, positions=2).rows(1, 1)
    assert cos.tolist() == [[65535]]


def test_the_graph_has_what_the_manifest_promises(
    session: ort.InferenceSession, manifest: Manifest, decode: GraphRecord
) -> None:
    manifest.interface.graph(decode).check(MemoryBinding(session).interface, decode.file)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("head_dim", 128, r"input: got past_key_0_h0_in uint8 \[1, 1, 127, 64\]; expected past_key_0_h0_in"),
        ("vocab", 7, r"output: got logits uint16 \[1, 1, 4096\]; expected logits uint16 \[1, 1, 7\]"),
        ("layers", 3, r"input: got past_key_3_h0_in .* expected no further one"),
    ],
)
def test_a_graph_of_another_model_is_refused(
    session: ort.InferenceSession, manifest: Manifest, decode: GraphRecord, field: str, value: int, message: str
) -> None:
    other = msgspec.structs.replace(manifest, model=msgspec.structs.replace(manifest.model, **{field: value}))
    part = msgspec.structs.replace(decode.part, stop_layer=other.model.layers)
    with pytest.raises(BundleError, match=f"{decode.file}: {message}"):
        other.interface.graph(decode, part).check(MemoryBinding(session).interface, decode.file)


def test_both_ways_to_bind_give_the_same_bits(
    session: ort.InferenceSession, manifest: Manifest, decode: GraphRecord
) -> None:
    """The fast one uses what the runtime does not promise to keep; without it the public one is used."""
    logits = []
    for public in (False, True):
        bindings = MemoryBinding(session)
        if public:
            io = bindings._bound.io
            bindings._bound._binders = (_public(io.bind_input), _public(io.bind_output))
        interface = manifest.interface.graph(decode)
        arrays = {port.name: np.ones(port.shape, port.dtype) for port in (*interface.inputs, *interface.outputs)}
        for port in interface.inputs:
            array = arrays[port.name]
            bindings.inputs([port.name], array.dtype, array.shape, [array.ctypes.data])
        for port in interface.outputs:
            array = arrays[port.name]
            bindings.outputs([port.name], array.dtype, array.shape, [array.ctypes.data])
        bindings.run()
        logits.append(arrays["logits"])
    assert np.array_equal(*logits)
    assert logits[0].std() > 0


@pytest.mark.slow
def test_bindings_that_are_moved_ahead_change_nothing(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache goes back, slides and is left for another one, none of which is foreseen."""
    engine, opened = CpuEngine(threads=1), open_bundle(bundle)
    geometry = opened.manifest.geometry
    logits = []
    for many in (10**9, 1):
        monkeypatch.setattr(binding, "_MANY", many)
        monkeypatch.setattr(binding, "_LONG_NS", -1)
        caches = [KVCache(geometry, ar=(1, 32), reserve=1.05, policy="sliding-window") for _ in range(2)]
        graphs = Graphs(opened, engine, caches[0])
        sessions = [Session(each, graphs) for each in caches]
        rows = []
        for cache, steps in ((0, 100), (1, 20), (0, 30)):
            for step in range(steps):
                rows.append(sessions[cache].feed([step]).copy())
                if step % 13 == 5:
                    caches[cache].rewind(3)
        assert caches[0].stats.bytes_copied > 0
        logits.append(np.array(rows))
    assert np.array_equal(*logits)


def test_a_broken_graph_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "graph.onnx").write_bytes(b"not a graph")
    with pytest.raises(EngineError, match=r"graph.onnx on the CPU: got .*Protobuf"):
        CpuEngine().session(tmp_path / "graph.onnx")


@pytest.mark.slow
def test_a_missing_provider_tells_how_to_install_it(bundle: Path) -> None:
    code = f"""
import sys
sys.modules["onnxruntime_qnn"] = None  # as if it were not installed
from edgekv.cli import run
sys.exit(run(["generate", {str(bundle)!r}, "--prompt", "x", "--engine", "htp"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        'got no package onnxruntime_qnn; expected Qualcomm\'s execution provider. Install it: pip install "edgekv[htp]"'
        in done.stderr
    )


@pytest.mark.slow
def test_the_runtime_writes_no_file_and_reports_to_nobody(small: Path, tmp_path: Path) -> None:
    """ONNX Runtime's telemetry leaves a device id, a database and a session file; a CI variable would hide that."""
    home, temporary = tmp_path / "home", tmp_path / "tmp"
    home.mkdir()
    temporary.mkdir()
    kept = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "EDGEKV_CACHE_DIR") if name in os.environ}
    command = [sys.executable, "-m", "edgekv", "generate", str(small), "--prompt", "ab", "--max-new-tokens", "2"]
    environment = kept | {"HOME": str(home), "TMPDIR": str(temporary), "PYTHONDONTWRITEBYTECODE": "1"}
    subprocess.run(command, env=environment, cwd=temporary, check=True, capture_output=True)
    assert not [*home.rglob("*"), *temporary.rglob("*")]


ANOTHER = """
from edgekv.runtime import CpuEngine
class Another:
    graph_format = "onnx"
    def open(bundle, threads):
        print("opened with", threads)
        return CpuEngine(threads)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_an_installed_package_adds_an_engine(small: Path, tmp_path: Path) -> None:
    info = tmp_path / "another-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: another\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[edgekv.engines]\nanother = another:Another\nbroken = no_such_module:Engine\ncpu = another:NotThis\n"
    )
    (tmp_path / "another.py").write_text(ANOTHER)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}

    def generate(engine: str, *more: str) -> subprocess.CompletedProcess[str]:
        options = ["--prompt", "ab", "--max-new-tokens", "2", "--threads", "1", "--engine", engine, *more]
        command = [sys.executable, "-m", "edgekv", "generate", str(small), *options]
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    assert generate("another").stdout == "opened with 1\n" + generate("cpu", "--cpu-mode", "emulate").stdout
    assert "engine broken: got ModuleNotFoundError" in generate("broken").stderr
    assert "got 'none'; expected cpu or htp or litert or tflite or another or broken" in generate("none").stderr
    assert "Use cpu or htp or another." in generate("none").stderr


@pytest.mark.parametrize("threads", [0, -1, 1 << 31])
def test_a_number_of_threads_is_one_that_a_machine_can_have(small: Path, threads: int) -> None:
    with pytest.raises(UsageError, match=r"threads: got -?[0-9]+; expected 1 to 1024"):
        make_engine(open_bundle(small), EngineOptions("cpu", threads=threads))


def test_a_window_that_grows_by_a_row_in_each_step_is_foreseen() -> None:
    before, now, later = (_Place(False, ["past"], 2, [1, 1, rows, 8], [64], 16) for rows in (5, 6, 7))
    assert now.next(before) == later and now.next(now) is now
    moved = _Place(False, ["past"], 2, [1, 1, 6, 8], [128], 16)
    assert moved.next(before) is moved, "other memory says nothing about the next step"
