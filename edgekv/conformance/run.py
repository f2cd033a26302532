"""A run of a kit: every part, each in a process of its own, and the report."""

from __future__ import annotations

import getpass
import platform
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
from packaging.version import InvalidVersion, Version

from devices import find
from devices.report import (
    FORMAT,
    DecodeResult,
    Failure,
    GraphResult,
    MissingMeasurement,
    Place,
    Report,
    Sample,
    SpeedResult,
    Verdict,
    Versions,
    impersonal,
    sealed,
)
from edgekv.conformance.graphs import IGNORES, WHOLE_ALONE, GraphJob, run_graph
from edgekv.conformance.journal import ATTEMPTS, Journal, Outcome
from edgekv.conformance.kit import Kit, KitModel, KitPart, is_named
from edgekv.conformance.models import DECODE_STRATEGIES, REGISTERED, ModelJob, decode, speeds, watch
from edgekv.errors import EngineError, UsageError
from edgekv.machine.child import CallFailedError, Child, ChildEndedError, Limits
from edgekv.machine.json_file import readable_json
from edgekv.machine.scratch import atomic_file
from edgekv.machine.system import MIB, format_bytes
from edgekv.qnn.library_fault import FOR_GRAPHS, check_libraries
from edgekv.qnn.this_chip import find_chip
from edgekv.qnn.vendor_libraries import Platform, package_place

ALLOWED_STEPS = 4
MINUTES = 10.0
_GRAPH_S, _MODEL_S = 300.0, 1800.0
_EMULATED_STEPS = 4
_ROOM_BYTES = 16 * MIB
_UNPACKED_BYTES = 128 * MIB
"""Room for the binaries of a model while it runs."""
_PACKAGE = "onnxruntime-qnn"

Progress = Callable[[str, int, int], None]
"""Called with a part's name, the number of finished parts, and the number of all."""
Job = TypeVar("Job")
Reply = TypeVar("Reply")
Item = TypeVar("Item")


class PartCrashedError(Exception):
    """The process of a part has ended, or gave no answer in time; the text says how."""


class LostDeviceError(EngineError):
    """The device is no longer there: the run ends, and goes on when it is called again."""


class Runner(Protocol):
    """What runs a kit's parts: this machine, or a phone."""

    @property
    def place(self) -> Place:
        """Whether an NPU computes."""

    @property
    def through(self) -> str:
        """How, for the report."""

    @property
    def strategies(self) -> Sequence[str]:
        """Update strategies of the cache to decode golden tokens with."""

    @property
    def measured(self) -> Sequence[str]:
        """Those whose speed is measured; or what runs graphs without a cache of edgekv's."""

    @property
    def unmeasured(self) -> Sequence[MissingMeasurement]:
        """What it cannot measure."""

    @property
    def names(self) -> Sequence[str]:
        """Of the device, such as a serial number: no report has them."""

    def prepare(self, kit: Kit) -> None:
        """Refuse a kit that cannot run here, and put it where it runs.

        Raises:
            EngineError: it is for another chip, or what runs it is missing or too old.
            LostDeviceError: the device is not there.
        """

    def versions(self) -> Versions:
        """Of what computes, after `prepare`."""

    def graph(self, job: GraphJob) -> GraphResult:
        """Run and compare a graph.

        Raises:
            EngineError: it was refused.
            PartCrashedError: the process ended.
            LostDeviceError: so did the device.
        """

    def decode(self, kit: Kit, model: KitModel, strategy: str, allowed_steps: int) -> DecodeResult:
        """Decode golden tokens; raises as `graph`."""

    def speeds(self, kit: Kit, model: KitModel, strategy: str) -> list[SpeedResult]:
        """Measure the graphs of a model; raises as `graph`."""

    def watch(self, kit: Kit, model: KitModel, seconds: float, take: Callable[[Sample], None]) -> None:
        """Temperature and clock while it decodes, told as they are read; raises as `graph`."""


@dataclass(frozen=True, slots=True)
class RunChoice:
    """What of a kit is run, and how.

    Attributes:
        parts: names of parts or of groups of them; empty for all.
        allowed_steps: difference up to which a result of 16 bits counts as right.
        minutes: of decoding, to watch temperature and clock; 0 for none.
    """

    parts: tuple[str, ...] = ()
    allowed_steps: int = ALLOWED_STEPS
    minutes: float = MINUTES

    def has(self, part: str) -> bool:
        """Whether a part is run."""
        return not self.parts or any(is_named(part, name) for name in self.parts)


@dataclass(frozen=True, slots=True)
class LocalRunner:
    """The HTP of this machine; on x86 its emulator. Each part has a process of its own.

    Attributes:
        run_graph: a module's function that runs a graph, in a child process.
        run_decode: likewise, that decodes golden tokens.
        steps: of each graph, to measure; the emulator, which measures nothing, runs four.
        on: this platform.
    """

    run_graph: Callable[[GraphJob], GraphResult] = run_graph
    run_decode: Callable[[ModelJob], DecodeResult] = decode
    steps: int = 32
    on: Platform = field(default_factory=Platform.here)

    @property
    def place(self) -> Place:
        return "npu" if self.on.has_npu else "emulator"

    @property
    def through(self) -> str:
        return f"{_PACKAGE}, edgekv's engine htp"

    @property
    def strategies(self) -> Sequence[str]:
        return DECODE_STRATEGIES

    @property
    def measured(self) -> Sequence[str]:
        return REGISTERED

    @property
    def unmeasured(self) -> Sequence[MissingMeasurement]:
        if self.place == "npu":
            return ()
        return (MissingMeasurement(what="registering addresses", reason="the emulator registers none"),)

    @property
    def names(self) -> Sequence[str]:
        return ()

    def versions(self) -> Versions:
        place = package_place(self.on)
        return Versions(
            edgekv=metadata.version("edgekv"),
            runtime=f"onnxruntime {metadata.version('onnxruntime')}",
            provider=f"{_PACKAGE} {metadata.version(_PACKAGE)}",
            qairt=", ".join(sorted(place.versions(self.on))) if place is not None else "",
            system=f"{platform.system()} {platform.machine()}",
            python=platform.python_version(),
        )

    def prepare(self, kit: Kit) -> None:
        chip = find_chip(self.on)
        check_chip(kit, None if chip is None else chip.soc)
        try:
            installed = metadata.version(_PACKAGE)
        except metadata.PackageNotFoundError:
            fix = 'Install it: pip install "edgekv[htp]"'
            raise EngineError(_PACKAGE, got="not installed", expected=kit.manifest.compiler, fix=fix) from None
        check_version(_PACKAGE, installed, kit.manifest.compiler.removeprefix(_PACKAGE))
        check_libraries(FOR_GRAPHS, kit.manifest.arch, self.on, chip)

    def graph(self, job: GraphJob) -> GraphResult:
        return _call(self.run_graph, job, _GRAPH_S)

    def decode(self, kit: Kit, model: KitModel, strategy: str, allowed_steps: int) -> DecodeResult:
        job = ModelJob(folder=str(kit.path), model=model, strategy=strategy, allowed_steps=allowed_steps)
        return _call(self.run_decode, job, _MODEL_S)

    def speeds(self, kit: Kit, model: KitModel, strategy: str) -> list[SpeedResult]:
        steps = self.steps if self.place == "npu" else min(self.steps, _EMULATED_STEPS)
        job = ModelJob(folder=str(kit.path), model=model, strategy=strategy, steps=steps)
        results = list[SpeedResult]()
        _stream(speeds, job, results.append, _MODEL_S)
        return results

    def watch(self, kit: Kit, model: KitModel, seconds: float, take: Callable[[Sample], None]) -> None:
        _stream(watch, ModelJob(folder=str(kit.path), model=model, seconds=seconds), take, seconds + _MODEL_S)


def check_chip(kit: Kit, soc: str | None) -> None:
    """Refuse a kit for another chip.

    Args:
        kit: the kit.
        soc: part number of the chip here; None if nothing says it.

    Raises:
        EngineError: it is another one.
    """
    made_for = kit.manifest.soc
    if soc is not None and soc != made_for:
        raise EngineError(
            str(kit.path.name),
            got=f"a kit for {made_for} (HTP V{kit.manifest.arch})",
            expected=f"one for {soc} (HTP V{find(soc).arch}), the chip here",
            fix=f"Make one: edgekv conformance make -o KIT --device {soc}",
        )


def check_version(what: str, installed: str, needed: str) -> None:
    """Refuse a runtime that is older than what compiled the kit.

    Raises:
        EngineError: it is older.
    """
    with suppress(InvalidVersion):
        if needed.strip() and Version(installed) < Version(needed.strip()):
            raise EngineError(
                what,
                got=installed,
                expected=f"{needed.strip()}, which compiled the kit, or newer",
                fix='Update it: pip install --upgrade "edgekv[htp]"',
            )


def _call(function: Callable[[Job], Reply], job: Job, seconds: float) -> Reply:
    try:
        with Child(Limits(timeout_s=seconds), is_waited_for=True) as child:
            return child.call(function, job)
    except ChildEndedError as error:
        raise PartCrashedError(error.ending) from None
    except CallFailedError as error:
        raise EngineError("a part of the kit", got=str(error), expected="results", fix="Report this.") from None


def _stream(
    function: Callable[[Job, Callable[[Item], None]], None], job: Job, take: Callable[[Item], None], seconds: float
) -> None:
    try:
        with Child(Limits(timeout_s=seconds), is_waited_for=True) as child:
            for item in child.stream(function, job):
                take(item)
    except ChildEndedError as error:
        raise PartCrashedError(error.ending) from None
    except CallFailedError as error:
        raise EngineError("a part of the kit", got=str(error), expected="results", fix="Report this.") from None


def run_kit(
    kit: Kit, runner: Runner, output: Path, choice: RunChoice = RunChoice(), progress: Progress = lambda *_: None
) -> Report:
    """Run a kit and write its report; finished parts of an interrupted run of the same kit are kept.

    Args:
        kit: the kit.
        runner: what runs it.
        output: the file of the report; it appears atomically.
        choice: what is run.
        progress: called for each part.

    Raises:
        UsageError: the report cannot be written, or no part has such a name.
        EngineError: the kit cannot run here, or the device was lost.
        BundleError: a file of the kit is damaged.
    """
    if not (parts := [(name, run) for name, run in _parts(kit, runner, choice) if choice.has(name)]):
        names = ", ".join(name for name, _ in _parts(kit, runner, choice))
        raise UsageError(
            "--parts", got=", ".join(choice.parts), expected=f"a part or a group of {names}", fix="Name one."
        )
    _check_room(output)
    runner.prepare(kit)
    options = f"{runner.place} {runner.through} {choice.allowed_steps} {choice.minutes}"
    journal, failures = Journal(output, f"{kit.manifest.seal} {options}"), list[Failure]()
    for done, (name, run) in enumerate(parts):
        progress(name, done, len(parts))
        if (failure := _run_part(journal, name, partial(run, journal), _Said(kit, runner, output))) is not None:
            failures.append(failure)
    progress("report", len(parts), len(parts))
    outcomes = [journal.outcomes[name] for name, _ in parts if name in journal.outcomes]
    samples = [sample for name, _ in parts for sample in journal.samples.get(name, [])]
    report = _made(kit, runner, choice, outcomes, samples, failures)
    _write(output, report)
    journal.remove()
    return report


def _run_part(journal: Journal, name: str, run: Callable[[], Outcome], said: _Said) -> Failure | None:
    """Run a part until it has a result or has crashed too often; why it has none."""
    while name not in journal.outcomes and journal.attempts(name) < ATTEMPTS:
        journal.begin(name)
        try:
            journal.finish(name, run())
        except PartCrashedError as error:
            journal.crash(name, said(str(error)))
        except LostDeviceError:
            raise
        except KeyboardInterrupt:
            journal.stop(name)
            raise
        except EngineError as error:
            journal.finish(name, Outcome(refusal=said(f"{error.field}: {error.got}")))
    outcome = journal.outcomes.get(name)
    if outcome is None:
        return Failure(part=name, attempts=journal.attempts(name), ending=journal.endings[name])
    return Failure(part=name, attempts=1, ending=outcome.refusal) if outcome.refusal else None


@dataclass(frozen=True, slots=True)
class _Said:
    """What a library says, for a report."""

    kit: Kit
    runner: Runner
    output: Path

    def __call__(self, text: str) -> str:
        names = [platform.node(), *self.runner.names]
        with suppress(Exception):  # no name is known: a container
            names.append(getpass.getuser())
        places = [self.kit.path, self.output.absolute().parent, Path(tempfile.gettempdir()), Path(sys.prefix)]
        with suppress(RuntimeError):  # no home
            places.append(Path.home())
            names.append(Path.home().name)
        return impersonal(text, names, places)


def _parts(kit: Kit, runner: Runner, choice: RunChoice) -> Iterator[tuple[str, Callable[[Journal], Outcome]]]:
    """All parts in order: graphs, golden tokens, speeds, and a long decode."""
    for part in kit.manifest.parts:
        yield part.name, partial(_graph, kit, runner, part, choice.allowed_steps)
    for model in kit.manifest.models:
        for strategy in runner.strategies:
            yield f"decode/{model.name}/{strategy}", partial(_decode, kit, runner, model, strategy, choice)
        for strategy in runner.measured:
            yield f"speed/{model.name}/{strategy}", partial(_speeds, kit, runner, model, strategy)
    if choice.minutes > 0:
        for model in kit.manifest.models[:1]:
            yield f"watch/{model.name}", partial(_watch, kit, runner, model, choice.minutes * 60)


def _graph(kit: Kit, runner: Runner, part: KitPart, allowed_steps: int, _: Journal) -> Outcome:
    job = GraphJob(folder=str(kit.path), soc=kit.manifest.soc, graph=part.graph, allowed_steps=allowed_steps)
    outcome = msgspec.structs.replace(runner.graph(job), name=part.name)
    if outcome.verdict != "wrong" or not part.layers:
        return Outcome(graphs=[outcome])
    for layer in part.layers:
        of_layer = runner.graph(msgspec.structs.replace(job, graph=layer))
        if of_layer.first is not None:
            return Outcome(graphs=[msgspec.structs.replace(outcome, first=of_layer.first)])
    note = outcome.note or WHOLE_ALONE
    return Outcome(graphs=[msgspec.structs.replace(outcome, note=note if note == IGNORES else WHOLE_ALONE)])


def _decode(kit: Kit, runner: Runner, model: KitModel, strategy: str, choice: RunChoice, _: Journal) -> Outcome:
    return Outcome(decode=[runner.decode(kit, model, strategy, choice.allowed_steps)])


def _speeds(kit: Kit, runner: Runner, model: KitModel, strategy: str, _: Journal) -> Outcome:
    return Outcome(speeds=runner.speeds(kit, model, strategy))


def _watch(kit: Kit, runner: Runner, model: KitModel, seconds: float, journal: Journal) -> Outcome:
    """Decode for what is left of the time: samples from before an interruption are kept."""
    part = f"watch/{model.name}"
    held = journal.samples.get(part, [])
    began_s = held[-1].at_s if held else 0.0

    def take(sample: Sample) -> None:
        journal.add_sample(part, msgspec.structs.replace(sample, at_s=began_s + sample.at_s))

    if began_s < seconds:
        runner.watch(kit, model, seconds - began_s, take)
    return Outcome()


def _unmeasured(kit: Kit, runner: Runner, samples: Sequence[Sample]) -> Iterator[MissingMeasurement]:
    yield from (MissingMeasurement(what=part, reason=reason) for part, reason in kit.manifest.left_out.items())
    yield from runner.unmeasured
    reason = "the system tells none" if samples else "there was no long decode"
    if all(sample.celsius is None for sample in samples):
        yield MissingMeasurement(what="temperature", reason=reason)
    if all(sample.mhz is None for sample in samples):
        yield MissingMeasurement(what="clock", reason=reason)


def _made(
    kit: Kit,
    runner: Runner,
    choice: RunChoice,
    outcomes: Sequence[Outcome],
    samples: Sequence[Sample],
    failures: Sequence[Failure],
) -> Report:
    graphs = [result for outcome in outcomes for result in outcome.graphs]
    names = {*kit.part_names}
    for failure in failures:
        if failure.part in names:
            verdict: Verdict = "crashed" if failure.attempts >= ATTEMPTS else "failed"
            graphs.append(GraphResult(name=failure.part, verdict=verdict, note=failure.ending))
    order = {name: number for number, name in enumerate(kit.part_names)}
    return sealed(
        Report(
            format=FORMAT,
            kit=kit.manifest.seal,
            soc=kit.manifest.soc,
            arch=kit.manifest.arch,
            place=runner.place,
            through=runner.through,
            month=datetime.now(UTC).strftime("%Y-%m"),
            allowed_steps=choice.allowed_steps,
            versions=runner.versions(),
            graphs=sorted(graphs, key=lambda result: order[result.name]),
            decode=[result for outcome in outcomes for result in outcome.decode],
            speeds=[result for outcome in outcomes for result in outcome.speeds],
            samples=list(samples),
            unmeasured=[*_unmeasured(kit, runner, samples)],
            predictions=kit.manifest.predictions,
            failures=list(failures),
        )
    )


def _check_room(output: Path) -> None:
    folder = output.absolute().parent
    if not folder.is_dir():
        raise UsageError("--output", got=f"no folder {folder}", expected="a folder that exists", fix="Make it first.")
    if output.is_dir():
        raise UsageError("--output", got="a folder", expected="a file", fix=f"Use {output / 'report.json'}.")
    temporary = Path(tempfile.gettempdir())
    for what, place, bytes_, fix in (
        ("--output", folder, _ROOM_BYTES, "give another place with -o"),
        (str(temporary), temporary, _UNPACKED_BYTES, "name another folder with the variable TMPDIR (Windows: TEMP)"),
    ):
        free = shutil.disk_usage(place).free
        if free < bytes_:
            fix = f"Free some space, or {fix}."
            raise UsageError(what, got=f"{format_bytes(free)} free", expected=format_bytes(bytes_), fix=fix)


def _write(output: Path, report: Report) -> None:
    try:
        with atomic_file(output) as partial_file:
            partial_file.write_bytes(readable_json(report))
    except OSError as error:
        fix = "Free some space, or give another place with -o; finished parts are kept."
        raise UsageError(str(output), got=error.strerror, expected="a file that can be written", fix=fix) from None
