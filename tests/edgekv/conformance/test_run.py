"""A run of a kit: parts in processes of their own, a journal, and refusals before anything runs. No compiler."""

from __future__ import annotations

import errno
import json
import lzma
import os
import platform
import re
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import pytest

from devices import find
from devices.report import GraphResult, Report, Sample, Versions, read_report
from edgekv.conformance import run as running
from edgekv.conformance.graphs import GraphJob
from edgekv.conformance.kit import KIT, Kit, KitModel, open_kit, pack_binaries, unpack_binaries
from edgekv.conformance.run import LocalRunner, LostDeviceError, PartCrashedError, RunChoice, run_kit
from edgekv.conformance.sensors import read_sensors
from edgekv.conformance.show import lines_of, open_report
from edgekv.errors import BundleError, EngineError, UsageError
from edgekv.machine.tensor_file import encode_tensors
from edgekv.qnn.vendor_libraries import Platform
from tests.support.kits import VERSIONS, crashes_at_b, plain, plain_kit, report, sealed_again, speed, tells_names

NO_WATCH = RunChoice(minutes=0)


class Restart(BaseException):
    """The device restarts: nothing of the program runs any more."""


class Stub(LocalRunner):
    """Runs graphs in this process; what a test may change: what happens at a part."""

    __slots__ = ("ran", "stops")

    ran: list[str]
    stops: dict[str, list[BaseException]]

    @classmethod
    def make(cls, **stops: list[BaseException]) -> Stub:
        runner = cls()
        object.__setattr__(runner, "ran", [])
        object.__setattr__(runner, "stops", {f"operation/{name}": errors for name, errors in stops.items()})
        return runner

    @property
    def strategies(self) -> Sequence[str]:
        return ()

    def versions(self) -> Versions:
        return VERSIONS

    @property
    def measured(self) -> Sequence[str]:
        return ()

    def prepare(self, kit: Kit) -> None:
        """Nothing: no compiler is installed here."""

    def graph(self, job: GraphJob) -> GraphResult:
        self.ran.append(job.graph.name)
        if errors := self.stops.get(job.graph.name):
            raise errors.pop(0)
        return plain(job)


@pytest.fixture
def kit(tmp_path: Path) -> Kit:
    return plain_kit(tmp_path / "kit")


def verdicts(found: Report) -> dict[str, str]:
    return {result.name: result.verdict for result in found.graphs}


def test_a_run_writes_a_report_that_can_be_read(kit: Kit, tmp_path: Path) -> None:
    found = run_kit(kit, Stub.make(), tmp_path / "report.json", NO_WATCH)
    assert read_report(tmp_path / "report.json") == found
    assert verdicts(found) == dict.fromkeys(["operation/a", "operation/b", "family/c"], "equal")
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["kit", "report.json"]


def test_a_graph_that_ends_its_process_is_named_and_the_others_run(kit: Kit, tmp_path: Path) -> None:
    runner = LocalRunner(run_graph=crashes_at_b)
    choice = RunChoice(("operation", "family"), minutes=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalRunner, "prepare", lambda self, kit: None)
        patch.setattr(LocalRunner, "versions", lambda self: VERSIONS)
        found = run_kit(kit, runner, tmp_path / "report.json", choice)
    assert verdicts(found) == {"operation/a": "equal", "operation/b": "crashed", "family/c": "equal"}
    assert [(each.part, each.attempts, each.ending[:7]) for each in found.failures] == [("operation/b", 2, "SIGSEGV")]
    assert "skipped operation/b after 2 attempts: SIGSEGV" in "\n".join(lines_of(found))


def test_an_interrupted_run_goes_on_after_the_last_finished_part(kit: Kit, tmp_path: Path) -> None:
    first = Stub.make(b=[KeyboardInterrupt()])
    with pytest.raises(KeyboardInterrupt):
        run_kit(kit, first, tmp_path / "report.json", NO_WATCH)
    second = Stub.make()
    found = run_kit(kit, second, tmp_path / "report.json", NO_WATCH)
    assert (first.ran, second.ran) == (["operation/a", "operation/b"], ["operation/b", "family/c"])
    assert set(verdicts(found).values()) == {"equal"}


def test_a_part_that_restarts_the_device_twice_is_skipped(kit: Kit, tmp_path: Path) -> None:
    """A device that goes down leaves the beginning of a part, and perhaps half a line."""
    for _ in range(2):
        with pytest.raises(Restart):
            run_kit(kit, Stub.make(b=[Restart()]), tmp_path / "report.json", NO_WATCH)
        with (tmp_path / "report.json.part").open("ab") as file:
            file.write(b'{"part":"operation/b","outc')
    last = Stub.make()
    found = run_kit(kit, last, tmp_path / "report.json", NO_WATCH)
    assert last.ran == ["family/c"]
    assert verdicts(found) == {"operation/a": "equal", "operation/b": "crashed", "family/c": "equal"}
    assert found.failures[0].ending == "the device or this program stopped while it ran"


def test_a_part_that_its_user_stops_is_never_skipped(kit: Kit, tmp_path: Path) -> None:
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_kit(kit, Stub.make(b=[KeyboardInterrupt()]), tmp_path / "report.json", NO_WATCH)
    found = run_kit(kit, Stub.make(), tmp_path / "report.json", NO_WATCH)
    assert set(verdicts(found).values()) == {"equal"} and not found.failures


class Watched(Stub):
    """Samples every minute of a long decode, and stops after a few of them."""

    __slots__ = ("asked", "stop_after")

    asked: list[float]
    stop_after: list[BaseException | None]

    @classmethod
    def ending(cls, *endings: BaseException | None) -> Watched:
        """Args: endings: of each call, after two samples; None: it takes all."""
        runner = cls.make()
        assert isinstance(runner, Watched)
        object.__setattr__(runner, "asked", [])
        object.__setattr__(runner, "stop_after", [*endings])
        return runner

    def watch(self, kit: Kit, model: KitModel, seconds: float, take: Callable[[Sample], None]) -> None:
        self.asked.append(seconds)
        ending = self.stop_after.pop(0)
        for number in range(1, 3 if ending is not None else int(seconds / 60) + 1):
            take(Sample(at_s=60.0 * number, tokens_per_s=50.0, celsius=40.0))
        if ending is not None:
            raise ending


def test_a_long_decode_goes_on_where_it_was_interrupted(tmp_path: Path) -> None:
    """By its user, by a restart of the device, and by a crash of its process: ten minutes are ten minutes."""
    kit, output = plain_kit(tmp_path / "kit", models=["large"]), tmp_path / "report.json"
    runner = Watched.ending(KeyboardInterrupt(), Restart(), PartCrashedError("SIGSEGV"), None)
    choice = RunChoice(("watch",), minutes=10)
    for ending in (KeyboardInterrupt, Restart):
        with pytest.raises(ending):
            run_kit(kit, runner, output, choice)
    found = run_kit(kit, runner, output, choice)
    assert runner.asked == [600.0, 480.0, 360.0]
    assert [sample.at_s for sample in found.samples] == [60.0 * number for number in range(1, 7)]
    assert [(each.part, each.ending) for each in found.failures] == [("watch/large", "SIGSEGV")]
    patient = Watched.ending(KeyboardInterrupt(), KeyboardInterrupt(), Restart(), None)
    for ending in (KeyboardInterrupt, KeyboardInterrupt, Restart):
        with pytest.raises(ending):
            run_kit(kit, patient, output, choice)
    found = run_kit(kit, patient, output, choice)
    assert [sample.at_s for sample in found.samples] == [60.0 * number for number in range(1, 11)]
    assert not found.failures and "temperature" not in (gaps := [each.what for each in found.unmeasured])
    assert "clock" in gaps


def test_what_was_not_measured_is_named(kit: Kit, tmp_path: Path) -> None:
    found = run_kit(kit, Stub.make(), tmp_path / "report.json", NO_WATCH)
    reasons = {each.what: each.reason for each in found.unmeasured}
    registering = {} if found.place == "npu" else {"registering addresses": "the emulator registers none"}
    assert reasons == registering | dict.fromkeys(("temperature", "clock"), "there was no long decode")
    assert "not measured: temperature, because there was no long decode" in "\n".join(lines_of(found))


def test_a_report_has_no_name_and_no_path_of_what_a_runtime_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user, a home and a kit whose names have spaces, in what a graph prints before it crashes and in refusals."""
    home = tmp_path / "Ann Lee"
    kit = plain_kit(home / "my kit", ["operation/refused", "operation/b"])
    for name, value in {"LOGNAME": "annlee", "HOME": str(home)}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(LocalRunner, "prepare", lambda self, kit: None)
    monkeypatch.setattr(LocalRunner, "versions", lambda self: VERSIONS)
    monkeypatch.setattr(LocalRunner, "names", property(lambda self: ("R5CX",)))
    found = run_kit(kit, LocalRunner(run_graph=tells_names), home / "report.json", RunChoice(("operation",), minutes=0))
    text = (home / "report.json").read_text()
    assert set(verdicts(found).values()) == {"failed", "crashed"}
    said = [each.ending for each in found.failures]
    assert all(each.endswith(": no room for 'a_qnn.bin' and x.so of ... at ... on ...") for each in said), said
    assert not re.search(r"\bann\b|lee|R5CX|my kit|/tmp|home", text, re.IGNORECASE)
    assert platform.node() not in text


def test_a_lost_device_ends_the_run_and_a_refused_graph_does_not(kit: Kit, tmp_path: Path) -> None:
    lost = LostDeviceError("adb", got="device offline", expected="a phone", fix="Reconnect it.")
    refused = EngineError("b.onnx on SM8750", got="error 1002 at /home/ann/b.onnx", expected="a graph", fix="Report.")
    with pytest.raises(LostDeviceError):
        run_kit(kit, Stub.make(a=[lost]), tmp_path / "report.json", NO_WATCH)
    found = run_kit(kit, Stub.make(b=[refused]), tmp_path / "report.json", NO_WATCH)
    assert verdicts(found) == {"operation/a": "equal", "operation/b": "failed", "family/c": "equal"}
    assert found.failures[0].ending == "b.onnx on SM8750: error 1002 at b.onnx"


def test_what_another_kit_has_finished_is_not_taken(kit: Kit, tmp_path: Path) -> None:
    other = plain_kit(tmp_path / "other", ["operation/a", "operation/d"])
    with pytest.raises(KeyboardInterrupt):
        run_kit(other, Stub.make(d=[KeyboardInterrupt()]), tmp_path / "report.json", NO_WATCH)
    runner = Stub.make()
    run_kit(kit, runner, tmp_path / "report.json", NO_WATCH)
    assert runner.ran == ["operation/a", "operation/b", "family/c"]


def test_parts_are_chosen_by_name_or_group(kit: Kit, tmp_path: Path) -> None:
    runner = Stub.make()
    run_kit(kit, runner, tmp_path / "report.json", RunChoice(("family",), minutes=0))
    assert runner.ran == ["family/c"]
    for unknown in ("fam/x", "operation/", "famil"):
        with pytest.raises(UsageError, match=f"--parts: got {unknown}; expected a part or a group of operation/a, ope"):
            run_kit(kit, runner, tmp_path / "report.json", RunChoice((unknown,), minutes=0))


# Bad input


@pytest.mark.parametrize("name", ["graphs/1_qnn.bin", "graphs/1.safetensors", "graphs/1.onnx"])
def test_a_file_that_was_changed_on_the_way_is_named(kit: Kit, name: str) -> None:
    content = bytearray((kit.path / name).read_bytes())
    content[-1] ^= 1
    (kit.path / name).write_bytes(content)
    with pytest.raises(BundleError, match=f"{name}: got another content; expected the {len(content)} bytes"):
        open_kit(kit.path)
    (kit.path / name).write_bytes(content[:-1])
    with pytest.raises(BundleError, match=f"{name}: got {len(content) - 1} bytes"):
        open_kit(kit.path)
    (kit.path / name).unlink()
    with pytest.raises(BundleError, match=f"{name}: got No such file"):
        open_kit(kit.path)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda text: text.replace("operation/a", "operation/z"), "seal"),
        (lambda text: text.replace('"format": 1', '"format": 2'), "format: got 2; expected 1"),
        (lambda text: text[: len(text) // 2], KIT),
        (lambda text: "[" * 100_000, KIT),
        (lambda text: "", KIT),
    ],
)
def test_a_damaged_list_of_files_is_refused(kit: Kit, change: object, named: str) -> None:
    text = (kit.path / KIT).read_text()
    (kit.path / KIT).write_text(change(text))  # type: ignore[operator]
    with pytest.raises(BundleError, match=named):
        open_kit(kit.path)


def test_paths_out_of_the_kit_are_refused(kit: Kit) -> None:
    content = json.loads((kit.path / KIT).read_text())
    files = {"../report.json": content["files"].pop("graphs/0.onnx")} | content["files"]
    graph = msgspec.structs.replace(kit.manifest.parts[0].graph, wrapper="../report.json")
    parts = [msgspec.structs.replace(kit.manifest.parts[0], graph=graph)]
    from edgekv.conformance.kit import KitManifest, seal_kit

    manifest = msgspec.convert(content | {"files": files, "parts": msgspec.to_builtins(parts)}, KitManifest)
    (kit.path / KIT).write_bytes(seal_kit(manifest))
    with pytest.raises(BundleError, match=r"'\.\./report\.json'; expected paths within the kit"):
        open_kit(kit.path)


def test_no_kit_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match=r"got no kit\.json; expected a kit of edgekv conformance make"):
        open_kit(tmp_path)


class _Machine(NamedTuple):
    """What a device says of itself."""

    chip: str | None
    package: str | None


@pytest.mark.parametrize(
    ("machine", "named"),
    [
        (_Machine("SC8380XP", "2.7.0"), r"got a kit for SM8750 \(HTP V79\); expected one for SC8380XP \(HTP V73\)"),
        (_Machine("SM8750", "2.6.1"), r"onnxruntime-qnn: got 2\.6\.1; expected 2\.7\.0, which compiled the kit"),
        (_Machine("SM8750", None), "onnxruntime-qnn: got not installed"),
    ],
)
def test_a_device_that_cannot_run_a_kit_is_told(
    kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: _Machine, named: str
) -> None:
    def version(package: str) -> str:
        if machine.package is None:
            raise running.metadata.PackageNotFoundError(package)
        return machine.package

    chip = None if machine.chip is None else find(machine.chip)
    monkeypatch.setattr(running, "find_chip", lambda on: chip)
    monkeypatch.setattr(running.metadata, "version", version)
    with pytest.raises(EngineError, match=named):
        run_kit(kit, LocalRunner(on=Platform("linux", "arm64")), tmp_path / "report.json", NO_WATCH)
    assert [path.name for path in tmp_path.iterdir()] == ["kit"]


def test_a_full_disk_is_said_before_and_during_a_run(kit: Kit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        usage = shutil.disk_usage(tmp_path)
        patch.setattr(running.shutil, "disk_usage", lambda path: usage._replace(free=1000))
        with pytest.raises(UsageError, match=r"--output: got 1\.0 kB free; expected 16\.8 MB"):
            run_kit(kit, Stub.make(), tmp_path / "report.json", NO_WATCH)
        temporary = Path(running.tempfile.gettempdir())
        patch.setattr(
            running.shutil, "disk_usage", lambda path: usage._replace(free=1000 if path == temporary else 1e9)
        )
        with pytest.raises(UsageError, match=rf"{temporary}: got 1\.0 kB free; .* with the variable TMPDIR"):
            run_kit(kit, Stub.make(), tmp_path / "report.json", NO_WATCH)

    class Filling(Stub):
        __slots__ = ()

        def graph(self, job: GraphJob) -> GraphResult:
            if job.graph.name == "operation/b":
                monkeypatch.setattr(os, "fsync", full)
            return super().graph(job)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(
        UsageError, match=r"report\.json\.part: got No space left on device; .* finished parts are kept"
    ):
        run_kit(kit, Filling.make(), tmp_path / "report.json", NO_WATCH)
    monkeypatch.undo()
    runner = Stub.make()
    found = run_kit(kit, runner, tmp_path / "report.json", NO_WATCH)
    assert "operation/a" not in runner.ran and set(verdicts(found).values()) == {"equal"}


@pytest.mark.parametrize("place", ["missing/report.json", "kit"])
def test_a_report_that_cannot_be_written_is_said_first(kit: Kit, tmp_path: Path, place: str) -> None:
    runner = Stub.make()
    with pytest.raises(UsageError, match="--output"):
        run_kit(kit, runner, tmp_path / place, NO_WATCH)
    assert runner.ran == []


def test_a_kit_may_be_changed_on_purpose(kit: Kit) -> None:
    """What the tests of faults do."""
    (kit.path / "graphs/0_qnn.bin").write_bytes(b"another")
    assert sealed_again(kit.path).manifest.files["graphs/0_qnn.bin"].bytes == 7


def test_the_packed_binaries_of_a_model_are_what_they_were(tmp_path: Path) -> None:
    content = {"SM8750/a_qnn.bin": bytes(range(256)) * 4096, "SM8750/compiled.json": b"{}"}
    for name, raw in content.items():
        (file := tmp_path / "bundle/compiled" / name).parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(raw)
    packed = tmp_path / "binaries.safetensors.xz"
    pack_binaries(tmp_path / "bundle", packed)
    assert not (tmp_path / "bundle/compiled").exists() and packed.stat().st_size < 10_000
    names = unpack_binaries(packed, tmp_path / "again")
    assert {name: (tmp_path / "again" / name).read_bytes() for name in names} == {
        f"compiled/{name}": raw for name, raw in content.items()
    }
    outside = lzma.compress(encode_tensors({"../x.bin": np.zeros(1, np.uint8)}))
    for damaged, named in ((packed.read_bytes()[:-9], "got "), (b"text", "got "), (outside, r"'\.\./x\.bin'")):
        packed.write_bytes(damaged)
        with pytest.raises(BundleError, match=named):
            unpack_binaries(packed, tmp_path / "third")
    assert not (tmp_path / "x.bin").exists()


# Reports in words


def test_a_report_in_words_puts_predictions_beside_what_was_measured() -> None:
    from devices.report import Prediction, Sample

    found = report(
        speeds=[speed(), speed(strategy="pointer-shift", step_us=18_000.0, tokens_per_s=1e6 / 18_000)],
        predictions=[Prediction(source="plan", model="large", ar=1, context=1024, low=40.0, high=70.0)],
        samples=[Sample(at_s=10, tokens_per_s=60, celsius=40.5, mhz=1200), Sample(at_s=20, tokens_per_s=50)],
    )
    text = "\n".join(lines_of(found))
    assert "SM8750, V79, on the NPU; 2026-11: equal" in text
    assert "62.5 tokens/s, 16,000 us a step" in text and "expected 40.0 to 70.0 by plan" in text
    assert "registering addresses, large, context 1024: +2,000 us a step" in text
    emulated = "\n".join(lines_of(msgspec.structs.replace(found, place="emulator")))
    assert "on the emulator: nothing was measured on a device" in emulated and "registering" not in emulated
    assert "long decode, 20 s: 50.0 to 60.0 tokens/s, 40 to 40 C, 1,200 to 1,200 MHz" in text


def test_a_damaged_report_is_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(UsageError, match="format: got None; expected 1"):
        open_report(tmp_path / "report.json")
    with pytest.raises(UsageError, match="got No such file"):
        open_report(tmp_path / "none.json")


def test_sensors_of_linux_and_of_a_system_without_any(tmp_path: Path) -> None:
    for name, content in {
        "sys/class/thermal/thermal_zone0/temp": "41500",
        "sys/class/thermal/thermal_zone1/temp": "52000\n",
        "sys/class/thermal/thermal_zone2/temp": "-274000",
        "sys/class/thermal/thermal_zone3/temp": "",
        "sys/class/devfreq/cdsp/cur_freq": "1100000000",
        "sys/devices/system/cpu/cpu0/cpufreq/scaling_cur_freq": "3300000",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert (read_sensors(tmp_path).celsius, read_sensors(tmp_path).mhz) == (52.0, 1100.0)
    assert (read_sensors(tmp_path / "none").celsius, read_sensors(tmp_path / "none").mhz) == (None, None)
