"""A payload and the libraries that it needs, on a phone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from edgekv.errors import EngineError
from edgekv.machine.scratch import scratch_folder
from exporters.progress import Progress
from exporters.targets.android.adb import Adb
from exporters.targets.android.push import Payload, Phone, Push, check_chip, check_folder, check_room
from exporters.targets.android.run import OnPhone, Qairt, check_version, find_qairt, format_version, runner_of


@dataclass(frozen=True, slots=True)
class Deployed:
    """What is on the phone now.

    Attributes:
        phone: the phone.
        place: where everything is; without libraries for a bundle.
        files: what was pushed of the payload.
        libraries: what was pushed of the libraries; None for a bundle, whose app has its own.
    """

    phone: Phone
    place: OnPhone
    files: Push
    libraries: Push | None


def deploy(
    adb: Adb, payload: Payload, folder: str, *, qairt: Sequence[Path], chip: str | None, progress: Progress
) -> Deployed:
    """Check everything, then push what changed.

    Args:
        adb: the phone.
        payload: what to push.
        folder: receives one folder for the payload and one for the libraries.
        qairt: folders or archives with the libraries; empty for the SDK that the environment names.
        chip: what the phone's chip is, if it does not say so.
        progress: told of each file.

    Raises:
        UsageError: a folder of the phone, or no libraries.
        EngineError: the phone has another chip, or the libraries do not fit; or pushing failed.
    """
    check_folder(folder)
    phone = Phone.read(adb)
    check_chip(phone.chip(chip), payload.soc, payload.arch, str(payload.path))
    files = {name: payload.path / name for name in payload.names}
    there = f"{folder}/{_name(payload.path)}"
    if payload.genie is None:
        push = Push.plan(adb, there, files)
        check_room(adb, folder, [push])
        push.run(adb, progress=progress)
        return Deployed(phone, OnPhone(there, "", ""), push, None)
    with scratch_folder("qairt") as scratch:
        runner = runner_of(payload.genie)
        sdk = find_qairt(qairt, payload.arch, runner, scratch)
        check_version(sdk, [payload.path / name for name in payload.binaries])
        held = library_folder(folder, sdk, payload.arch)
        push, libraries = Push.plan(adb, there, files), Push.plan(adb, held, sdk.files)
        check_room(adb, folder, [push, libraries])
        libraries.run(adb, progress=progress)
        check_program(adb, f"{held}/{runner}")
        push.run(adb, progress=progress)
        return Deployed(phone, OnPhone(there, held, payload.config), push, libraries)


def library_folder(folder: str, qairt: Qairt, arch: int) -> str:
    """Where libraries for an HTP version are on a phone."""
    return f"{folder}/qairt-{format_version(qairt.version) or 'unknown'}-v{arch}"


def check_program(adb: Adb, program: str) -> None:
    """Let a program of the phone start.

    Raises:
        EngineError: it may not.
    """
    if adb.shell(f"chmod 755 {quote(program)} && test -x {quote(program)}").code != 0:
        fix = "Choose a folder from which programs may start, such as --to /data/local/tmp/edgekv."
        raise EngineError(program, got="a program that may not start", expected="permission to start it", fix=fix)


def _name(path: Path) -> str:
    """The folder's name without what a shell or another file system may not like."""
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in path.name)
