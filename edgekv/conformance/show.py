"""A report in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from devices.report import Difference, GraphResult, Report, ReportError, SpeedResult, read_report
from edgekv.errors import UsageError


def open_report(path: Path) -> Report:
    """A report of a file.

    Raises:
        UsageError: it cannot be read, is damaged, forged, or of another format.
    """
    fix = "Ask for the file again, or run the kit again."
    try:
        return read_report(path)
    except OSError as error:
        expected = "a report.json of edgekv conformance run"
        raise UsageError(str(path), got=error.strerror, expected=expected, fix=fix) from None
    except ReportError as error:
        raise UsageError(error.field, got=error.got, expected=error.expected, fix=fix) from None


def lines_of(report: Report) -> Iterator[str]:
    """The report for people."""
    where = "on the NPU" if report.place == "npu" else "on the emulator: nothing was measured on a device"
    yield f"{report.soc}, V{report.arch}, {where}; {report.month}: {report.verdict}"
    versions = report.versions
    qairt = f", QAIRT {versions.qairt}" if versions.qairt else ""
    yield f"  {report.through}; edgekv {versions.edgekv}, {versions.runtime}, {versions.provider}{qairt}"
    yield f"  {versions.system}, Python {versions.python}"
    counts = Counter(result.verdict for result in report.graphs)
    yield f"graphs: {', '.join(f'{count} {verdict}' for verdict, count in counts.items()) or 'none'}"
    for result in report.graphs:
        if result.verdict != "equal":
            yield f"  {result.name}: {in_words(result)}"
    for decode in report.decode:
        at = "" if decode.first_wrong is None else f", token {decode.first_wrong} is the first wrong one"
        row = f", cache differs from {decode.row}" if decode.row else ""
        steps = f", logits up to {decode.max_steps} steps apart" if decode.max_steps else ""
        note = f" ({decode.note})" if decode.note else ""
        name = f"decode {decode.model}, {decode.strategy}"
        yield f"{name}: {decode.verdict}, {decode.tokens} tokens{at}{steps}{row}{note}"
    for speed in report.speeds:
        expected = "; ".join(expectations(report, speed))
        yield (
            f"speed {speed.model}, {speed.strategy}, AR-{speed.ar}, context {speed.context}: "
            f"{speed.tokens_per_s:,.1f} tokens/s, {speed.step_us:,.0f} us a step ({speed.host_us:,.0f} outside the "
            f"runtime, the first {speed.first_us:,.0f}){f'; expected {expected}' if expected else ''}"
        )
    if report.place == "npu":
        yield from _registration(report)
    for gap in report.unmeasured:
        yield f"not measured: {gap.what}, because {gap.reason}"
    if report.samples:
        heat = [sample.celsius for sample in report.samples if sample.celsius is not None]
        clocks = [sample.mhz for sample in report.samples if sample.mhz is not None]
        speeds = [sample.tokens_per_s for sample in report.samples]
        told = f", {min(heat):.0f} to {max(heat):.0f} C" if heat else ", no temperature told"
        told += f", {min(clocks):,.0f} to {max(clocks):,.0f} MHz" if clocks else ", no clock told"
        yield f"long decode, {report.samples[-1].at_s:,.0f} s: {min(speeds):,.1f} to {max(speeds):,.1f} tokens/s{told}"
    for failure in report.failures:
        attempts = "1 attempt" if failure.attempts == 1 else f"{failure.attempts} attempts"
        yield f"skipped {failure.part} after {attempts}: {failure.ending}"


def in_words(result: GraphResult) -> str:
    """Why a graph is not equal."""
    text = f"{result.verdict}"
    if result.elements:
        text += f", up to {result.max_steps:,} steps in {result.differing:,} of {result.elements:,} integers"
    if result.first is not None:
        text += f"; {first_in_words(result.first)}"
    return text + (f"; {result.note}" if result.note else "")


def first_in_words(first: Difference) -> str:
    """The first operation that differs."""
    behind = f", {first.before} before it agrees" if first.before else ""
    return (
        f"the first operation that differs is {first.operation} of {first.graph} "
        f"({first.elements:,} of {first.of:,} integers, up to {first.max_steps:,} steps{behind})"
    )


def expectations(report: Report, speed: SpeedResult) -> Iterator[str]:
    """What was predicted for a speed."""
    for prediction in report.predictions:
        if (prediction.model, prediction.ar, prediction.context) == (speed.model, speed.ar, speed.context):
            yield f"{prediction.low:,.1f} to {prediction.high:,.1f} by {prediction.source}"


def _registration(report: Report) -> Iterator[str]:
    """What binding new addresses in each step costs, which a driver registers."""
    for moving in report.speeds:
        for fixed in report.speeds:
            same = (moving.model, moving.ar, moving.context) == (fixed.model, fixed.ar, fixed.context)
            if same and (moving.strategy, fixed.strategy) == ("pointer-shift", "slot"):
                more = moving.step_us - fixed.step_us
                yield f"registering addresses, {moving.model}, context {moving.context}: {more:+,.0f} us a step"
