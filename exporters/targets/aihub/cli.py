"""`edgekv hub`: a bundle on the devices that Qualcomm AI Hub hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Optional, cast

import typer

from edgekv.bundle import Bundle, open_bundle
from edgekv.cli.output import print_json
from edgekv.errors import UsageError
from edgekv.text_file import read_text_file
from exporters.progress import shown
from exporters.targets.aihub.account import Account, connect
from exporters.targets.aihub.fetch import Fetched, fetch_device
from exporters.targets.aihub.hosted import Target, choose_targets, list_hosted
from exporters.targets.aihub.ledger import JobRecord, Ledger
from exporters.targets.aihub.options import Runtime
from exporters.targets.aihub.run import HubRun, check_all_done
from exporters.targets.aihub.show import HostedRow, HubReport, show_devices, show_report

# ruff: noqa: UP045  (typer reads the annotations of Python 3.10 at run time)

BundleArgument = Annotated[Path, typer.Argument(help="A bundle's folder.", show_default=False)]
DevicesOption = Annotated[
    str,
    typer.Option("--devices", "--device", help="Hosted devices or chips, separated by commas.", show_default=False),
]
ProfileOption = Annotated[Optional[str], typer.Option("--profile", help="Client profile, ~/.qai_hub/PROFILE.ini.")]
PollOption = Annotated[float, typer.Option("--poll", help="Seconds between polls of the jobs' status.", min=0.01)]
WaitOption = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait for the jobs and download their results.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Discard earlier jobs and submit all of them again.")]
QairtOption = Annotated[Optional[str], typer.Option("--qairt-version", help="QAIRT version that the service uses.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")]

_POLL_S = 10.0

hub = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Qualcomm AI Hub: compile, link, profile and run a bundle on hosted devices.\n\n"
    "Jobs are kept in BUNDLE/hub/jobs: after an interruption, run the same command again to continue.",
)


@dataclass(frozen=True, slots=True)
class _Manner:
    """The options of all commands that submit jobs."""

    profile: str | None
    qairt: str | None
    poll_s: float
    wait: bool
    force: bool
    as_json: bool


@hub.command()
def devices(profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """List the hosted devices, and the chips that edgekv knows of them."""
    rows = [HostedRow.of(each) for each in list_hosted(connect(profile))]
    if as_json:
        print_json(rows, list_name="devices")
    else:
        show_devices(rows)


@hub.command("compile")
def compile_(
    bundle: BundleArgument,
    devices: DevicesOption,
    runtime: Annotated[str, typer.Option(help="qnn_dlc, which can be linked, or qnn_context_binary.")] = "qnn_dlc",
    profile: ProfileOption = None,
    qairt_version: QairtOption = None,
    poll: PollOption = _POLL_S,
    wait: WaitOption = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Compile each graph for each device."""
    if runtime not in ("qnn_dlc", "qnn_context_binary"):
        wanted = "qnn_dlc or qnn_context_binary"
        raise UsageError("--runtime", got=repr(runtime), expected=wanted, fix="Use qnn_dlc.")
    kind = cast(Runtime, runtime)
    _run(
        bundle,
        devices,
        lambda run, targets: run.compile(targets, kind),
        _Manner(profile, qairt_version, poll, wait, force, as_json),
    )


@hub.command()
def link(
    bundle: BundleArgument,
    devices: DevicesOption,
    profile: ProfileOption = None,
    qairt_version: QairtOption = None,
    poll: PollOption = _POLL_S,
    wait: WaitOption = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Link the graphs into one context binary for each device, with shared weights; compiles what is missing."""
    _run(
        bundle,
        devices,
        lambda run, targets: run.link(targets),
        _Manner(profile, qairt_version, poll, wait, force, as_json),
    )


@hub.command("profile")
def profile_(
    bundle: BundleArgument,
    devices: DevicesOption,
    profile: ProfileOption = None,
    qairt_version: QairtOption = None,
    poll: PollOption = _POLL_S,
    wait: WaitOption = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Measure each graph on each device; compiles and links what is missing."""
    _run(
        bundle,
        devices,
        lambda run, targets: run.profile(targets),
        _Manner(profile, qairt_version, poll, wait, force, as_json),
    )


@hub.command()
def infer(
    bundle: BundleArgument,
    devices: DevicesOption,
    text: Annotated[Optional[Path], typer.Option(help="Text to run instead of the calibration text.")] = None,
    profile: ProfileOption = None,
    qairt_version: QairtOption = None,
    poll: PollOption = _POLL_S,
    wait: WaitOption = True,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Run one real step of each graph on each device and compare with the CPU engine.

    The step continues a text whose cache the CPU engine has filled. Compiles and links what is missing.
    """
    default = resources.files("exporters.quantize").joinpath("calibration.txt")
    content = default.read_text("utf-8") if text is None else read_text_file(text, "--text")
    _run(
        bundle,
        devices,
        lambda run, targets: run.infer(targets, content),
        _Manner(profile, qairt_version, poll, wait, force, as_json),
    )


@hub.command()
def status(bundle: BundleArgument, profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """Show the state of all jobs of a bundle."""
    opened, account, ledger = _open(bundle, profile, force=False)
    run = _earlier(opened, account, ledger)
    _print(opened, run.records, [], as_json=as_json)


@hub.command()
def fetch(bundle: BundleArgument, profile: ProfileOption = None, as_json: JsonOption = False) -> None:
    """Download the results of a bundle's jobs into BUNDLE/hub/DEVICE."""
    opened, account, ledger = _open(bundle, profile, force=False)
    run = _earlier(opened, account, ledger)
    _finish(opened, account, ledger, run, as_json=as_json)


def _run(
    bundle: Path,
    devices: str,
    submit: Callable[[HubRun, Sequence[Target]], None],
    manner: _Manner,
) -> None:
    opened, account, ledger = _open(bundle, manner.profile, force=manner.force)
    names = [name for name in devices.split(",") if name.strip()]
    targets = choose_targets(list_hosted(account), names, opened.manifest.kv_dtype)
    run = HubRun(opened, account, ledger, qairt=manner.qairt)
    with shown() as progress:
        submit(run, targets)
        if manner.wait:
            run.wait(manner.poll_s, progress)
    if manner.wait:
        _finish(opened, account, ledger, run, as_json=manner.as_json)
    else:
        _print(opened, run.records, [], as_json=manner.as_json)


def _open(bundle: Path, profile: str | None, *, force: bool) -> tuple[Bundle, Account, Ledger]:
    opened = open_bundle(bundle)
    opened.require_onnx("AI Hub's uploader")
    opened.require_whole("AI Hub's uploader")
    opened.require_no_slots("AI Hub's uploader")
    account = connect(profile)
    if force:
        Ledger.forget(opened)
    return opened, account, Ledger(opened, account.service)


def _earlier(bundle: Bundle, account: Account, ledger: Ledger) -> HubRun:
    """All jobs of a bundle, with their present state."""
    records = ledger.records("compile", "link", "profile", "infer")
    if not records:
        raise UsageError(
            f"jobs of {bundle.path}", got="none", expected="at least one", fix="Submit one: edgekv hub compile BUNDLE"
        )
    run = HubRun(bundle, account, ledger)
    run.resume(records)
    run.refresh()
    return run


def _finish(bundle: Bundle, account: Account, ledger: Ledger, run: HubRun, *, as_json: bool) -> None:
    """Download the finished jobs of each device, print the report, and fail if a job has failed."""
    fetched = []
    for slug in dict.fromkeys(record.slug for record in run.records):
        of_device = [r for r in ledger.records("compile", "link", "profile", "infer") if r.slug == slug]
        found = fetch_device(bundle, account, of_device)
        if found is not None:
            fetched.append(found)
    _print(bundle, run.records, fetched, as_json=as_json)
    check_all_done(run.records)


def _print(bundle: Bundle, records: Sequence[JobRecord], fetched: Sequence[Fetched], *, as_json: bool) -> None:
    report = HubReport(bundle=str(bundle.path), jobs=list(records), devices=list(fetched))
    if as_json:
        print_json(report)
    else:
        show_report(report)
