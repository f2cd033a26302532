"""What a run has finished, kept in a file beside its report, so that it goes on after a crash or a restart."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import msgspec

from devices.report import DecodeResult, GraphResult, Sample, SpeedResult
from edgekv.errors import UsageError
from edgekv.machine.decoding import DECODERS
from edgekv.machine.system import MIB, read_file

ATTEMPTS = 2
"""A part that ended its process, or the device, so often is skipped."""

_LIMIT_BYTES = 64 * MIB


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What a part of a run has found."""

    graphs: list[GraphResult] = []
    decode: list[DecodeResult] = []
    speeds: list[SpeedResult] = []
    refusal: str = ""


class _Line(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A line of the file: whose it is, that a part begins, how it ended, or what it has found."""

    run: str = ""
    begins: str = ""
    stopped: str = ""
    crashed: str = ""
    ending: str = ""
    part: str = ""
    sample: Sample | None = None
    outcome: Outcome | None = None


class Journal:
    """The file of one run. Every line is flushed to disk, so that a restart of the device loses none.

    Attributes:
        outcomes: of finished parts.
        samples: of a long decode, by its part; those that were taken before an interruption too.
        endings: how the process of a part ended last.
    """

    def __init__(self, report: Path, run: str) -> None:
        """Read what an earlier run of the same kit has left; that of another run is replaced.

        Args:
            report: the file of the report.
            run: names kit, device and options.

        Raises:
            UsageError: the folder cannot be written.
        """
        self._file = report.with_name(f"{report.name}.part")
        self._begun: Counter[str] = Counter()
        self.outcomes: dict[str, Outcome] = {}
        self.samples: dict[str, list[Sample]] = {}
        self.endings: dict[str, str] = {}
        lines = self._read()
        if lines and lines[0].run == run:
            for line in lines[1:]:
                self._take(line)
        else:
            with self._writing():
                self._file.unlink(missing_ok=True)
            self._add(_Line(run=run))

    def attempts(self, part: str) -> int:
        """How often a part has begun."""
        return self._begun[part]

    def begin(self, part: str) -> None:
        """A part begins. If nothing follows, the device went down."""
        self._add(_Line(begins=part))

    def stop(self, part: str) -> None:
        """The user has stopped a part, which is no attempt."""
        self._add(_Line(stopped=part))

    def add_sample(self, part: str, sample: Sample) -> None:
        """A part that is not finished has a sample."""
        self._add(_Line(part=part, sample=sample))

    def crash(self, part: str, ending: str) -> None:
        """The process of a part has ended, but not this one."""
        self._add(_Line(crashed=part, ending=ending))

    def finish(self, part: str, outcome: Outcome) -> None:
        """A part has a result."""
        self._add(_Line(part=part, outcome=outcome))

    def remove(self) -> None:
        """The report is written."""
        self._file.unlink(missing_ok=True)

    def _take(self, line: _Line) -> None:
        if line.begins:
            self._begun[line.begins] += 1
            self.endings[line.begins] = "the device or this program stopped while it ran"
        elif line.stopped:
            self._begun[line.stopped] -= 1
        elif line.crashed:
            self.endings[line.crashed] = line.ending
        elif line.sample is not None:
            self.samples.setdefault(line.part, []).append(line.sample)
        elif line.outcome is not None:
            self.outcomes[line.part] = line.outcome

    def _add(self, line: _Line) -> None:
        with self._writing(), self._file.open("ab") as file:
            file.write(msgspec.json.encode(line) + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self._take(line)

    def _read(self) -> list[_Line]:
        """The lines; a last one that was cut off is left out."""
        try:
            content = read_file(self._file, _LIMIT_BYTES)
        except OSError:
            return []
        lines = list[_Line]()
        for raw in content.splitlines():
            try:
                lines.append(DECODERS[_Line].decode(raw))
            except (msgspec.MsgspecError, UnicodeDecodeError):
                break
        if len(lines) < len(content.splitlines()):  # what follows must not be joined to it
            with self._writing():
                self._file.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
        return lines

    def _writing(self) -> _Writing:
        return _Writing(self._file)


class _Writing:
    """Names the file in errors of the system."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> None:
        """Nothing to prepare."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError):
            fix = "Free some space, or give another place with -o; finished parts are kept."
            raise UsageError(
                str(self._file), got=error.strerror, expected="a file that can be written", fix=fix
            ) from None
