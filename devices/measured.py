"""Speed that conformance runs measured on devices: the reports in `devices/reports`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from devices.device import Device
from devices.report import Report, ReportError, SpeedResult, read_report
from devices.speed import Span

FOLDER = Path(__file__).with_name("reports")
_BANDWIDTH_BYTES = 64 << 20
"""Smaller models are bound by the passes themselves, not by what they read."""


@dataclass(frozen=True, slots=True)
class MeasuredSpeed:
    """What reports say of a chip.

    Attributes:
        soc: its part number.
        reports: their names, which are the evidence.
        pass_s: the fastest pass of one token, seconds.
        gb_per_s: bandwidth at which a pass of one token reads weights and cache, 10^9 bytes a second; None if no
            measured model is large enough to say it.
        speeds: all of them, by the name of their report.
    """

    soc: str
    reports: tuple[str, ...]
    pass_s: float
    gb_per_s: Span | None
    speeds: Sequence[tuple[str, SpeedResult]]

    @property
    def evidence(self) -> str:
        """For messages: `measured on SM8750 (report NAME)`."""
        named = f"report{'s' if len(self.reports) > 1 else ''} {', '.join(self.reports)}"
        return f"measured on {self.soc} ({named})"


def measured_speed(device: Device, folder: Path | None = None) -> MeasuredSpeed | None:
    """What the reports of NPUs that computed right say of a chip; None if there is none.

    Args:
        device: the chip.
        folder: of the reports; None for `devices/reports`.

    Raises:
        ReportError: a report in the folder is damaged or forged.
    """
    fitting = {
        name: report
        for name, report in _reports(folder or FOLDER).items()
        if report.soc == device.soc and report.place == "npu" and report.verdict in ("equal", "within steps")
    }
    speeds = [(name, speed) for name, report in fitting.items() for speed in report.speeds]
    steps = [speed for _, speed in speeds if speed.ar == 1]
    if not steps:
        return None
    rates = [step.read_bytes / step.step_us / 1e3 for step in steps if step.read_bytes >= _BANDWIDTH_BYTES]
    return MeasuredSpeed(
        soc=device.soc,
        reports=tuple(dict.fromkeys(name for name, _ in speeds)),
        pass_s=min(step.step_us for step in steps) / 1e6,
        gb_per_s=Span(min(rates), max(rates)) if rates else None,
        speeds=speeds,
    )


@cache
def _reports(folder: Path) -> Mapping[str, Report]:
    """All reports, by the names of their files."""
    reports = {}
    for path in sorted(folder.glob("*.json")):
        try:
            reports[path.stem] = read_report(path)
        except OSError as error:
            raise ReportError(path.name, str(error.strerror), "a report that can be read") from None
    return reports
