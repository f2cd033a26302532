"""Temperature and clock, where a system tells them: files of the kernel's sysfs. Windows tells neither to a user."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from devices.report import PLAUSIBLE_C

# Documentation/ABI/testing/sysfs-class-thermal (millidegrees), -class-devfreq (Hz) and -devices-system-cpu (kHz).
TEMPERATURES = "sys/class/thermal/thermal_zone*/temp"
DEVICE_CLOCKS = "sys/class/devfreq/*/cur_freq"
CORE_CLOCKS = "sys/devices/system/cpu/cpu*/cpufreq/scaling_cur_freq"


@dataclass(frozen=True, slots=True)
class Sensors:
    """The hottest sensor, and the fastest clock in MHz: of a device such as the NPU, otherwise of a core."""

    celsius: float | None
    mhz: float | None


def read_sensors(root: Path = Path("/")) -> Sensors:
    """What the system tells now."""
    return of_numbers(lambda pattern: _numbers(root, pattern))


def of_numbers(numbers: Callable[[str], Iterator[float]]) -> Sensors:
    """The sensors of the numbers in the files of a pattern."""
    low, high = PLAUSIBLE_C
    heat = [value / 1e3 for value in numbers(TEMPERATURES) if low <= value / 1e3 <= high]
    clocks = [value / 1e6 for value in numbers(DEVICE_CLOCKS)] or [value / 1e3 for value in numbers(CORE_CLOCKS)]
    return Sensors(max(heat, default=None), max(clocks, default=None))


def _numbers(root: Path, pattern: str) -> Iterator[float]:
    for path in sorted(root.glob(pattern)):
        with suppress(OSError, ValueError):  # a sensor that is off cannot be read
            yield float(path.read_text("ascii"))
