"""`edgekv hub`: a bundle on the devices that Qualcomm AI Hub hosts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgekv.cli.command import Group
from edgekv.cli.model import BundleArgument
from edgekv.cli.output import Output, print_json
from edgekv.errors import UsageError
from edgekv.machine.text_file import read_text_file
from edgekv.option import Option
from exporters.progress import progress_bars
from exporters.targets.aihub.options import Runtime

if TYPE_CHECKING:
    from edgekv.bundle import Bundle
    from exporters.targets.aihub.account import Account
    from exporters.targets.aihub.fetch import FetchRecord
    from exporters.targets.aihub.ledger import JobRecord, Ledger
    from exporters.targets.aihub.run import HubRun, Target

ProfileOption = Annotated[str | None, Option("Client profile, ~/.qai_hub/PROFILE.ini.")]

hub = Group(
    help="Jobs are kept in BUNDLE/hub/jobs: after an interruption, run the same command again to continue.",
)


@dataclass(frozen=True, slots=True)
class JobOptions:
    """Where jobs run, and how they are waited for."""

    devices: Annotated[str, Option("Hosted devices or chips, separated by commas.", "--devices")]
    profile: ProfileOption = None
    qairt: Annotated[str | None, Option("QAIRT version that the service uses.", "--qairt-version")] = None
    poll_s: Annotated[float, Option("Seconds between polls of the jobs' status.", "--poll", minimum=0.01)] = 10.0
    wait: Annotated[bool, Option("Wait for the jobs and download their results.", "--wait/--no-wait")] = True
    force: Annotated[bool, Option("Discard earlier jobs and submit all of them again.")] = False


@hub.command()
def devices(output: Output, profile: ProfileOption = None) -> None:
    """List the hosted devices, and the chips that edgekv knows of them."""
    from exporters.targets.aihub.account import connect  # slow to import, as in other commands
    from exporters.targets.aihub.fetch import HostedRow, show_devices
    from exporters.targets.aihub.run import list_hosted

    rows = [HostedRow.of(hosted) for hosted in list_hosted(connect(profile))]
    if output.as_json:
        print_json(rows, list_name="devices")
    else:
        show_devices(rows)


@hub.command("compile")
def compile_(
    bundle: BundleArgument,
    jobs: JobOptions,
    output: Output,
    runtime: Annotated[Runtime, Option("qnn_dlc can be linked; qnn_context_binary is for one chip.")] = "qnn_dlc",
) -> None:
    """Compile each graph for each device."""
    _run(bundle, lambda run, targets: run.compile(targets, runtime), jobs, output)


@hub.command()
def link(bundle: BundleArgument, jobs: JobOptions, output: Output) -> None:
    """Link the graphs into one context binary for each device, with shared weights; compiles what is missing."""
    _run(bundle, lambda run, targets: run.link(targets), jobs, output)


@hub.command("profile")
def profile_(bundle: BundleArgument, jobs: JobOptions, output: Output) -> None:
    """Measure each graph on each device; compiles and links what is missing."""
    _run(bundle, lambda run, targets: run.profile(targets), jobs, output)


@hub.command()
def infer(
    bundle: BundleArgument,
    jobs: JobOptions,
    output: Output,
    text: Annotated[Path | None, Option("Text to run instead of the calibration text.")] = None,
) -> None:
    """Run one real step of each graph on each device and compare with the CPU engine.

    The step continues a text whose cache the CPU engine has filled. Compiles and links what is missing.
    """
    default = resources.files("exporters.quantize").joinpath("calibration.txt")
    content = default.read_text("utf-8") if text is None else read_text_file(text, "--text")
    _run(bundle, lambda run, targets: run.infer(targets, content), jobs, output)


@hub.command()
def status(bundle: BundleArgument, output: Output, profile: ProfileOption = None) -> None:
    """Show the state of all jobs of a bundle."""
    opened, account, ledger = _open(bundle, profile, force=False)
    run = _earlier(opened, account, ledger)
    _print(opened, run.records, [], as_json=output.as_json)


@hub.command()
def fetch(bundle: BundleArgument, output: Output, profile: ProfileOption = None) -> None:
    """Download the results of a bundle's jobs into BUNDLE/hub/DEVICE."""
    opened, account, ledger = _open(bundle, profile, force=False)
    run = _earlier(opened, account, ledger)
    _finish(opened, account, ledger, run, as_json=output.as_json)


def _run(bundle: Path, submit: Callable[[HubRun, Sequence[Target]], None], options: JobOptions, output: Output) -> None:
    from exporters.targets.aihub.run import HubRun, choose_targets, list_hosted

    opened, account, ledger = _open(bundle, options.profile, force=options.force)
    names = [name for name in options.devices.split(",") if name.strip()]
    targets = choose_targets(list_hosted(account), names, opened.manifest.kv_dtype)
    run = HubRun(opened, account, ledger, qairt=options.qairt)
    with progress_bars(output.is_quiet) as progress:
        submit(run, targets)
        if options.wait:
            run.wait(options.poll_s, progress)
    if options.wait:
        _finish(opened, account, ledger, run, as_json=output.as_json)
    else:
        _print(opened, run.records, [], as_json=output.as_json)


def _open(bundle: Path, profile: str | None, *, force: bool) -> tuple[Bundle, Account, Ledger]:
    from edgekv.bundle import open_bundle
    from exporters.capabilities import AI_HUB
    from exporters.targets.aihub.account import connect
    from exporters.targets.aihub.ledger import Ledger

    opened = open_bundle(bundle)
    AI_HUB.check(opened)
    account = connect(profile)
    if force:
        Ledger.forget(opened)
    return opened, account, Ledger(opened, account.service)


def _earlier(bundle: Bundle, account: Account, ledger: Ledger) -> HubRun:
    """All jobs of a bundle, with their present state."""
    from exporters.targets.aihub.run import HubRun

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
    from exporters.targets.aihub.fetch import fetch_device
    from exporters.targets.aihub.run import check_all_done

    fetched = []
    for slug in dict.fromkeys(record.slug for record in run.records):
        of_device = [r for r in ledger.records("compile", "link", "profile", "infer") if r.slug == slug]
        fetched_device = fetch_device(bundle, account, ledger, of_device)
        if fetched_device is not None:
            fetched.append(fetched_device)
    _print(bundle, run.records, fetched, as_json=as_json)
    check_all_done(run.records)


def _print(bundle: Bundle, records: Sequence[JobRecord], fetched: Sequence[FetchRecord], *, as_json: bool) -> None:
    from exporters.targets.aihub.fetch import HubReport, show_report

    report = HubReport(bundle=str(bundle.path), jobs=list(records), devices=list(fetched))
    if as_json:
        print_json(report)
    else:
        show_report(report)
