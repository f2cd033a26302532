"""Tables of hosted devices and of jobs."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from exporters.targets.aihub.fetch import Fetched
from exporters.targets.aihub.hosted import HostedDevice
from exporters.targets.aihub.ledger import JobRecord

_FILE_COLUMNS = 200


class HostedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A hosted device, and what edgekv can do with it.

    Attributes:
        name: as the service calls it.
        os: version of its operating system.
        soc: part number; None if the chip is not in the catalogue.
        arch: HTP version.
        kv_dtypes: cache types that its HTP supports; empty without QNN.
        shares_weights: linked graphs can share weights on it.
    """

    name: str
    os: str
    soc: str | None
    arch: int | None
    kv_dtypes: list[str]
    shares_weights: bool

    @classmethod
    def of(cls, device: HostedDevice) -> HostedRow:
        chip = device.chip
        usable = chip is not None and device.runs_qnn
        return cls(
            name=device.name,
            os=device.os,
            soc=None if chip is None else chip.soc,
            arch=None if chip is None else chip.arch,
            kv_dtypes=[kv for kv in ("u8", "s16") if usable and chip is not None and chip.supports_kv(kv)],
            shares_weights=device.shares_weights,
        )


class HubReport(msgspec.Struct, frozen=True, kw_only=True):
    """What a command has done.

    Attributes:
        bundle: the folder.
        jobs: jobs of the command.
        devices: fetched results of each device.
    """

    bundle: str
    jobs: list[JobRecord]
    devices: list[Fetched]


def show_devices(rows: Sequence[HostedRow]) -> None:
    table = Table("device", "OS", "chip", "HTP", "cache", "shares weights")
    for row in rows:
        arch = "" if row.arch is None else f"V{row.arch}"
        table.add_row(
            row.name, row.os, row.soc or "unknown", arch, ", ".join(row.kv_dtypes), "yes" if row.shares_weights else ""
        )
    _console().print(table)


def show_report(report: HubReport) -> None:
    results = {(device.device, job): text for device in report.devices for job, text in _results(device).items()}
    table = Table("device", "chip", "job", "graph", "state", "result")
    order = {"compile": 0, "link": 1, "profile": 2, "infer": 3}
    for record in sorted(report.jobs, key=lambda r: (r.slug, order.get(r.kind, 9), r.graphs)):
        result = record.reason or results.get((record.device or "", record.id or ""), record.id or "")
        table.add_row(
            record.device, record.soc, record.kind, "\n".join(record.graphs), record.state, result, end_section=False
        )
    console = _console()
    console.print(table)
    for device in report.devices:
        slug = next(record.slug for record in report.jobs if record.device == device.device)
        console.print(f"{report.bundle}/hub/{slug}", soft_wrap=True)
    ready = [each for each in report.devices if each.artefacts and not each.comparisons]
    if ready:
        names = shlex.quote(",".join(each.device for each in ready))
        console.print(f"next: edgekv hub infer {shlex.quote(report.bundle)} --devices {names}", soft_wrap=True)


def _results(device: Fetched) -> dict[str, str]:
    """The result of each job, by its id."""
    texts = {}
    for artefact in device.artefacts:
        texts[artefact.job] = f"{artefact.file}, {device.files[artefact.file].bytes / 1e6:.2f} MB"
    for profile in device.profiles:
        memory = "" if profile.peak_bytes is None else f", {profile.peak_bytes / 1e6:.1f} MB"
        units = ", ".join(f"{count} layers on {unit}" for unit, count in sorted(profile.layers.items()))
        texts[profile.job] = f"{profile.inference_us} us{memory}, {units}"
    for comparison in device.comparisons:
        worst = comparison.worst
        sqnr = "equal bits" if worst.sqnr_db is None else f"SQNR at least {worst.sqnr_db:.1f} dB ({worst.name})"
        texts[comparison.job] = f"{sqnr}, top-1 {'equal' if comparison.top1_equal else 'differs'}"
    return texts


def _console() -> Console:
    """The terminal; when output goes to a file, lines long enough for whole names."""
    console = Console(markup=False, highlight=False, emoji=False)
    if not console.is_terminal:
        console.width = _FILE_COLUMNS
    return console
