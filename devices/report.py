"""The report of a conformance run on a device: what ran, where it differs, how fast it is. One JSON file.

A report has no personal data: no serial numbers, no paths, no names of users or machines. Its seal is the SHA-256 of
all else, so that damage is found; figures that no chip can reach, and records that contradict themselves, are refused
too. Nobody can prove by a file that a run took place: who adds a report to `devices/reports` vouches for it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

import msgspec

from devices.device import Device
from devices.lookup import UnknownDeviceError, find

FORMAT = 1
"""Incremented when a field is changed or removed."""

LARGEST_BYTES = 8 << 20
PLAUSIBLE_C = (-40.0, 150.0)
"""Of a sensor; others say what is not a temperature, or nothing."""
Verdict = Literal["equal", "within steps", "wrong", "failed", "crashed"]
"""`failed`: the runtime refused the graph; `crashed`: its process ended, or gave no answer in time, twice."""
Place = Literal["npu", "emulator"]

_PERSONAL = re.compile(
    r"(?:^|[\s'\"(=:])(?:/(?:home|Users|root|tmp|data|mnt|media|work|var|opt)/|[A-Za-z]:\\|\\\\)", re.I
)
_PATH = re.compile(r"(?:[A-Za-z]:)?(?:[\\/]+[^\s'\"():;,\\/]+)*[\\/]+([^\s'\"():;,\\/]*)")
_QUOTED = re.compile(r"""(['"])(?:[A-Za-z]:)?[\\/][^'"]*[\\/]([^'"\\/]*)\1""")
"""A path in quotes, which may have spaces."""
_TIME_SHARE = 0.02
_OVER_PEAK = 1.05

Text = Annotated[str, msgspec.Meta(max_length=400)]
Count = Annotated[int, msgspec.Meta(ge=0)]
Amount = Annotated[float, msgspec.Meta(ge=0)]


class ReportError(ValueError):
    """A report that is damaged, forged, or of another format.

    Attributes:
        field: what is wrong.
        got: what was found.
        expected: what is right.
    """

    def __init__(self, field: str, got: object, expected: str) -> None:
        super().__init__(f"{field}: got {got}; expected {expected}")
        self.field = field
        self.got = got
        self.expected = expected


class _Record(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of a report."""


class Versions(_Record, frozen=True):
    """What computed.

    Attributes:
        edgekv: its version.
        runtime: what ran the graphs, with its version, such as `onnxruntime 1.31.1`.
        provider: Qualcomm's package or programs, with their version.
        qairt: version of Qualcomm's libraries; empty if they do not say it.
        system: operating system and processor, such as `Linux aarch64`.
        python: of the process that ran the kit.
    """

    edgekv: Text
    runtime: Text
    provider: Text
    qairt: Text
    system: Text
    python: Text


class Difference(_Record, frozen=True):
    """The first operation whose integers differ by more steps than allowed.

    Attributes:
        operation: name of its result, as in traces: `layers.0.attention`.
        graph: the graph in which it was found: that of a layer.
        case: number of the inputs.
        elements: how many elements of the result differ.
        of: its elements.
        max_steps: the largest difference, in steps of its encoding.
        before: the result before it, which agrees; empty if it is the first.
    """

    operation: Text
    graph: Text
    case: Count
    elements: Count
    of: Count
    max_steps: Count
    before: Text


class GraphResult(_Record, frozen=True):
    """The comparison of one graph.

    Attributes:
        name: of the part of the kit.
        verdict: the outcome.
        elements: integers compared, of all cases.
        differing: those that differ.
        max_steps: the largest difference, in steps.
        first: the first operation that differs; None unless the verdict is `wrong`, or if only the whole graph differs.
        load_ms: time to load the graph; 0 if it was not measured.
        run_us: mean time of a run, with copies of inputs and outputs; 0 if it was not measured.
        note: what is known besides: a refusal, how a process ended, inputs that are ignored.
    """

    name: Text
    verdict: Verdict
    elements: Count = 0
    differing: Count = 0
    max_steps: Count = 0
    first: Difference | None = None
    load_ms: Amount = 0.0
    run_us: Amount = 0.0
    note: Text = ""


class DecodeResult(_Record, frozen=True):
    """Golden tokens with one update strategy of the cache.

    Attributes:
        model: its name.
        strategy: of the cache, or the runtime that has its own.
        verdict: the outcome; tokens, logits and cache rows are compared.
        tokens: decoded.
        first_wrong: number of the first token that differs; None if none does.
        max_steps: the largest difference of a logit, in steps.
        row: the first row of the cache that differs, such as `past_key_0_h1_in, row 17`; empty if none does.
        load_ms: time to load the graphs; 0 if it was not measured.
        note: what is known besides.
    """

    model: Text
    strategy: Text
    verdict: Verdict
    tokens: Count = 0
    first_wrong: Count | None = None
    max_steps: Count = 0
    row: Text = ""
    load_ms: Amount = 0.0
    note: Text = ""


class SpeedResult(_Record, frozen=True):
    """The speed of one graph of a model, at the end of its context.

    Attributes:
        model: its name.
        strategy: of the cache; `qnn-net-run` if that program ran the graph, without a cache.
        ar: tokens per inference.
        context: S, tokens.
        read_bytes: weights and cache that a pass reads.
        steps: counted.
        first_us: the first step, which registers memory; with `qnn-net-run` it loads the graph too.
        step_us: mean time of a step; with `qnn-net-run` it reads inputs from files.
        host_us: that part of it which is not spent in the runtime; 0 with `qnn-net-run`.
        tokens_per_s: AR tokens in that time.
    """

    model: Text
    strategy: Text
    ar: Annotated[int, msgspec.Meta(ge=1)]
    context: Annotated[int, msgspec.Meta(ge=1)]
    read_bytes: Count
    steps: Count
    first_us: Amount
    step_us: Amount
    host_us: Amount
    tokens_per_s: Amount


class Sample(_Record, frozen=True):
    """The state of the device during a long decode.

    Attributes:
        at_s: seconds of decoding, without those of interruptions.
        tokens_per_s: since the sample before.
        celsius: the hottest sensor; None if the system tells none.
        mhz: the fastest clock; None likewise.
    """

    at_s: Amount
    tokens_per_s: Amount
    celsius: float | None = None
    mhz: Amount | None = None


class MissingMeasurement(_Record, frozen=True):
    """What the run could not measure.

    Attributes:
        what: such as `registering addresses`.
        reason: why not.
    """

    what: Text
    reason: Text


class Prediction(_Record, frozen=True):
    """What was expected before the run.

    Attributes:
        source: `plan`: bandwidth of published decoders; `estimate`: the compiler's simulation.
        model: its name.
        ar: tokens per inference.
        context: S, tokens.
        low: tokens per second, the lowest.
        high: the highest.
    """

    source: Literal["plan", "estimate"]
    model: Text
    ar: Count
    context: Count
    low: Amount
    high: Amount


class Failure(_Record, frozen=True):
    """A part of the run without a result.

    Attributes:
        part: its name.
        attempts: how often it was tried.
        ending: how its process ended, or what the runtime said.
    """

    part: Text
    attempts: Count
    ending: Text


class Report(_Record, frozen=True):
    """`report.json`.

    Attributes:
        format: version of this layout.
        kit: SHA-256 of the kit's list of files.
        soc: part number of the chip that the kit was compiled for.
        arch: its HTP version.
        place: whether an NPU computed, or the emulator on x86.
        through: how the graphs were run.
        month: of the run, such as `2026-11`.
        allowed_steps: up to this difference a result of 16 bits is `within steps`; one of 8 bits, up to 1.
        versions: of everything.
        graphs: comparisons of graphs.
        decode: golden tokens.
        speeds: of the graphs of models.
        samples: of temperature, clock and speed during a long decode.
        unmeasured: what the run could not measure.
        predictions: for the same graphs.
        failures: parts that crashed twice or were refused.
        seal: SHA-256 of all other fields; see `sealed`.
    """

    format: int
    kit: Text
    soc: Text
    arch: int
    place: Place
    through: Text
    month: Annotated[str, msgspec.Meta(pattern=r"^\d{4}-\d{2}$")]
    allowed_steps: Count
    versions: Versions
    graphs: list[GraphResult]
    decode: list[DecodeResult]
    speeds: list[SpeedResult]
    samples: list[Sample]
    unmeasured: list[MissingMeasurement]
    predictions: list[Prediction]
    failures: list[Failure]
    seal: str = ""

    @property
    def verdict(self) -> Verdict:
        """The worst of all parts; a part without a result, such as a measurement, failed."""
        order: tuple[Verdict, ...] = ("equal", "within steps", "wrong", "failed", "crashed")
        verdicts = [*(graph.verdict for graph in self.graphs), *(decode.verdict for decode in self.decode)]
        verdicts += ["failed" for _ in self.failures]
        return max(verdicts, key=order.index) if verdicts else "failed"


_REPORTS = msgspec.json.Decoder(Report)


def sealed(report: Report) -> Report:
    """The report with its seal.

    Raises:
        ReportError: a text in it says a path.
    """
    check_impersonal(report)
    return msgspec.structs.replace(report, seal=_seal(report))


def _seal(report: Report) -> str:
    return sha256(msgspec.json.encode(msgspec.structs.replace(report, seal=""))).hexdigest()


def impersonal(text: str, names: Iterable[str] = (), places: Iterable[PurePath] = ()) -> str:
    """A text of a library for a report: one line, paths without their folders, and without some names.

    Args:
        text: the text.
        names: such as those of user and machine.
        places: folders, in whose names there may be spaces.
    """
    shortened = " ".join(text.split())
    for parts in sorted((place.parts for place in places), key=len, reverse=True):
        if len(parts) > 1:
            folder = r"[\\/]+".join(re.escape(part.rstrip("\\/")) for part in parts)
            shortened = re.sub(rf"{folder}(?![^\s\\/'\":;,)])", "", shortened, flags=re.IGNORECASE)
    for name in sorted(filter(None, names), key=len, reverse=True):
        shortened = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "...", shortened, flags=re.IGNORECASE)
    shortened = _QUOTED.sub(r"\1\2\1", shortened)
    return _PATH.sub(r"\1", shortened)[:400]


def read_report(path: Path) -> Report:
    """A report of a file.

    Raises:
        ReportError: it is damaged, forged, of another format, or names what it must not.
        OSError: it cannot be read.
    """
    if path.stat().st_size > LARGEST_BYTES:
        raise ReportError(path.name, f"{path.stat().st_size} bytes", f"at most {LARGEST_BYTES}")
    return decode_report(path.read_bytes(), path.name)


def decode_report(raw: bytes, name: str = "report") -> Report:
    """A report of its JSON; see `read_report`."""
    try:
        record = msgspec.json.decode(raw)
        version = record.get("format") if isinstance(record, dict) else None
        if version != FORMAT:
            raise ReportError(f"{name}: format", version, f"{FORMAT}, which this edgekv reads")
        report = _REPORTS.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise ReportError(name, str(error) or "values nested too deeply", "what edgekv conformance run wrote") from None
    if report.seal != _seal(report):
        raise ReportError(f"{name}: seal", report.seal or "none", "the SHA-256 of the content: it was changed")
    for field, got, expected in _contradictions(report):
        raise ReportError(f"{name}: {field}", got, expected)
    check_impersonal(report)
    return report


def check_impersonal(report: Report) -> None:
    """Refuse a report with a path in it.

    Raises:
        ReportError: there is one.
    """
    for text in _texts(msgspec.to_builtins(report)):
        if _PERSONAL.search(text):
            raise ReportError("report", repr(text[:80]), "no path of a machine")


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _contradictions(report: Report) -> Iterator[tuple[str, object, str]]:
    """Field, value and what is right, of what no run can have given."""
    try:
        device = find(report.soc)
    except UnknownDeviceError:
        yield "soc", report.soc, "a chip of the catalogue"
        return
    if (report.soc, report.arch) != (device.soc, device.arch):
        yield "soc, arch", f"{report.soc}, V{report.arch}", f"{device.soc}, V{device.arch}"
    for result in report.graphs:
        at, limit = f"graphs, {result.name}", report.allowed_steps
        exact, near = result.max_steps == 0 and result.differing == 0, 0 < result.max_steps <= limit
        if result.differing > result.elements:
            yield at, f"{result.differing} of {result.elements} elements", "no more than there are"
        if result.verdict in ("equal", "within steps") and not result.elements:
            yield at, f"{result.verdict} without an element", "integers that were compared"
        if (result.verdict == "equal" and not exact) or (result.verdict == "within steps" and not near):
            yield at, f"{result.verdict}, {result.max_steps} steps in {result.differing} elements", "what these are"
        if result.verdict == "wrong" and not result.differing:
            yield at, "wrong without an element", "elements that differ"
    for decode in report.decode:
        if decode.verdict in ("equal", "within steps") and (decode.first_wrong is not None or not decode.tokens):
            yield f"decode, {decode.strategy}", f"{decode.verdict}, token {decode.first_wrong} wrong", "one of them"
    for speed in report.speeds:
        yield from _impossible(speed, device)
    times = [sample.at_s for sample in report.samples]
    if times != sorted(set(times)):
        yield "samples", "times that do not ascend", "each sample after the one before"
    for sample in report.samples:
        if sample.celsius is not None and not PLAUSIBLE_C[0] <= sample.celsius <= PLAUSIBLE_C[1]:
            yield f"samples, {sample.at_s:.0f} s", f"{sample.celsius:g} C", "{:g} to {:g}".format(*PLAUSIBLE_C)


def _impossible(speed: SpeedResult, device: Device) -> Iterator[tuple[str, object, str]]:
    at = f"speeds, {speed.model} AR-{speed.ar}, context {speed.context}"
    figures = (speed.first_us, speed.step_us, speed.host_us, speed.tokens_per_s)
    if not all(map(math.isfinite, figures)) or min(speed.step_us, speed.tokens_per_s) <= 0 or not speed.steps:
        yield at, f"{speed.steps} steps of {speed.step_us} us", "steps that took time"
        return
    said = speed.ar * 1e6 / speed.step_us
    if abs(said - speed.tokens_per_s) > _TIME_SHARE * said:
        yield at, f"{speed.tokens_per_s:.1f} tokens/s at {speed.step_us:.0f} us a step", f"{said:.1f}"
    reached = speed.read_bytes / speed.step_us / 1e3
    if speed.read_bytes > device.vtcm_mb << 20 and reached > _OVER_PEAK * device.dram_gb_per_s:
        yield at, f"{reached:.0f} GB/s", f"at most {device.dram_gb_per_s:.0f}, the peak of {device.soc}'s DRAM"
