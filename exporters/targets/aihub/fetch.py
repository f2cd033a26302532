"""Results of runs on AI Hub: fetched, checked, recorded and shown."""

from __future__ import annotations

import shlex
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.table import Table

from edgekv.bundle import Bundle, atomic_directory
from edgekv.errors import ServiceError
from edgekv.machine.json_file import readable_json
from exporters.htp.binary import read_target
from exporters.targets.aihub.account import Account
from exporters.targets.aihub.ledger import FOLDER, JobRecord, Ledger
from exporters.targets.aihub.options import graph_name
from exporters.targets.aihub.run import HostedDevice
from exporters.targets.aihub.sample import Comparison, compare, read_sample
from exporters.targets.record import TargetRecord, read_record, write_record

FETCHED = "fetched.json"


class Artefact(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One file that a job made.

    Attributes:
        file: in the device's folder.
        kind: of the job.
        graphs: names of the graphs in it.
        job: id of the job.
        soc: part number that a context binary itself names; none where it names none.
    """

    file: str
    kind: str
    graphs: list[str]
    job: str
    soc: str | None = None


class ProfileResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the service measured.

    Attributes:
        graph: name of the graph.
        job: id of the job.
        inference_us: least time of an inference.
        load_us: time of the first load.
        peak_bytes: most memory during inference.
        layers: number of layers on each unit, such as `NPU`.
    """

    graph: str
    job: str
    inference_us: int
    load_us: int
    peak_bytes: int | None
    layers: dict[str, int]


class FetchRecord(TargetRecord, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`fetched.json`, beside the files of one hosted device. `checked` says whether a step there was compared.

    Attributes:
        device: as the service calls it.
        artefacts: one for each job that makes a file.
        profiles: one for each profile job.
        comparisons: one for each inference job.
    """

    device: str
    artefacts: list[Artefact]
    profiles: list[ProfileResult]
    comparisons: list[Comparison]


def fetch_device(bundle: Bundle, account: Account, ledger: Ledger, records: Sequence[JobRecord]) -> FetchRecord | None:
    """Download one device's finished jobs and replace its folder in one step. Files of earlier fetches are reused.

    Args:
        bundle: the target.
        account: the source.
        ledger: of the bundle.
        records: of one device; unfinished jobs are skipped.

    Returns:
        The content of the folder; None if no job is done.

    Raises:
        ServiceError: the service could not be reached, or sent something else.
        BundleError: a file of the folder was changed, or a sample is missing.
    """
    done = [record for record in records if record.state == "done"]
    if not done:
        return None
    first = done[0]
    target = bundle.path / FOLDER / first.slug
    kept = _read(target)
    artefacts: list[Artefact] = []
    profiles: list[ProfileResult] = []
    comparisons: list[Comparison] = []
    with atomic_directory(target, force=True, marker=FETCHED) as folder:
        for record in done:
            assert record.id is not None
            if record.kind in ("compile", "link"):
                artefacts.append(_model(account, record, folder, target, kept))
            elif record.kind == "profile":
                profiles.append(_profile(account, record, folder))
            elif record.kind == "infer":
                comparisons.append(_compare(bundle, account, ledger, record))
        return write_record(
            FetchRecord,
            folder,
            FETCHED,
            bundle,
            soc=first.soc,
            checked=bool(comparisons),
            device=first.device or "",
            artefacts=artefacts,
            profiles=profiles,
            comparisons=comparisons,
        )


def _model(account: Account, record: JobRecord, folder: Path, earlier: Path, kept: FetchRecord | None) -> Artefact:
    """The product of a compile or link job; copied if an earlier fetch has downloaded it."""
    for artefact in kept.artefacts if kept is not None else ():
        if artefact.job == record.id:
            shutil.copyfile(earlier / artefact.file, folder / artefact.file)
            return artefact
    stem = f"{record.kind}_{'+'.join(record.graphs)}" if len(record.graphs) == 1 else record.kind
    with account.asking(f"downloading the output of job {record.id}") as client:
        assert record.product is not None
        path = Path(client.get_model(record.product).download(str(folder / stem)))
    target = read_target(path)
    if target is not None and target.soc != record.soc:
        raise ServiceError(
            f"AI Hub: job {record.id}",
            got=f"a binary for {target.soc}",
            expected=f"one for {record.soc}, the chip of {record.device}",
            fix="Compile again with --force; if that does not help, report the job to AI Hub.",
        )
    return Artefact(
        file=path.name,
        kind=record.kind,
        graphs=record.graphs,
        job=record.id or "",
        soc=None if target is None else target.soc,
    )


def _profile(account: Account, record: JobRecord, folder: Path) -> ProfileResult:
    assert record.id is not None
    with account.asking(f"reading the profile of job {record.id}") as client:
        raw: dict[str, Any] = client.get_job(record.id).download_profile()  # type: ignore[attr-defined, unused-ignore]
        summary = raw["execution_summary"] if raw else {}
        if not summary.get("estimated_inference_time"):
            raise ValueError("a profile without an inference time")
    (folder / f"profile_{record.graphs[0]}.json").write_bytes(readable_json(raw))
    return ProfileResult(
        graph=record.graphs[0],
        job=record.id,
        inference_us=summary["estimated_inference_time"],
        load_us=summary.get("first_load_time") or 0,
        peak_bytes=summary.get("estimated_inference_peak_memory"),
        layers=dict(Counter(layer["compute_unit"] for layer in raw["execution_detail"])),
    )


def _compare(bundle: Bundle, account: Account, ledger: Ledger, record: JobRecord) -> Comparison:
    assert record.id is not None
    sample = read_sample(ledger.sample(record.sources[-1]))
    graph = next(g for g in bundle.manifest.graphs if g.role != "score" and graph_name(g) == record.graphs[0])
    expected = {port.name: sample.outputs[port.name] for port in bundle.manifest.interface.graph(graph).outputs}
    with account.asking(f"reading the outputs of job {record.id}") as client:
        outputs = client.get_job(record.id).download_output_data()  # type: ignore[attr-defined, unused-ignore]
        if not isinstance(outputs, dict):
            raise ValueError("no outputs")
    return compare(bundle.manifest, record.graphs[0], record.id, expected, outputs)


def _read(folder: Path) -> FetchRecord | None:
    """The result of an earlier fetch, with its files verified."""
    if not (folder / FETCHED).is_file():
        return None
    fix = f"Remove {folder} and fetch again."
    return read_record(FetchRecord, folder, FETCHED, expected="the record that edgekv wrote", fix=fix)


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
    devices: list[FetchRecord]


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
    ready = [fetched for fetched in report.devices if fetched.artefacts and not fetched.comparisons]
    if ready:
        names = shlex.quote(",".join(fetched.device for fetched in ready))
        console.print(f"next: edgekv hub infer {shlex.quote(report.bundle)} --devices {names}", soft_wrap=True)


def _results(device: FetchRecord) -> dict[str, str]:
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
