"""What is pushed to a phone: a folder's files and Qualcomm's libraries, and how they are known to be whole there."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from shlex import quote

from devices import Device, UnknownDeviceError, find
from edgekv.bundle import open_bundle
from edgekv.bundle.files import is_plain_path
from edgekv.errors import EngineError, UsageError
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.system import format_bytes, sha256_of
from edgekv.qnn.vendor_libraries import LIBRARIES, SDK_VARIABLES, Platform, skel, stated_version
from edgekv.spec import identify
from exporters.progress import Progress, silent
from exporters.targets.android.adb import Adb
from exporters.targets.genie.config import CONFIG, ENCODER_BINARY, GENERATOR_NODE, SHARED_CONFIG
from exporters.targets.genie.folder import GENIE_MANIFEST, GenieFolder, open_genie_folder


@dataclass(frozen=True, slots=True)
class Payload:
    """Verified files for one chip.

    Attributes:
        path: their folder.
        soc: part number of the chip.
        arch: its HTP version.
        names: the files, relative to the folder.
        binaries: the context binaries among them.
        genie: the folder, if Genie runs it.
    """

    path: Path
    soc: str
    arch: int
    names: tuple[str, ...]
    binaries: tuple[str, ...]
    genie: GenieFolder | None = None

    @property
    def config(self) -> str:
        """The configuration for a phone: over shared weights, if the folder has such binaries."""
        return SHARED_CONFIG if SHARED_CONFIG in self.names else CONFIG


def open_payload(folder: Path) -> Payload:
    """Open a folder of `edgekv bundle genie`, or a bundle; every file is checked against its hash.

    Raises:
        BundleError: it is neither, or a file is missing or changed.
    """
    record = identify(folder)
    return _bundle(folder) if record is not None and record.kind == "bundle" else _genie(folder)


def _genie(path: Path) -> Payload:
    """The binaries of single graphs stay here if there is one of all: they are for Genie on x86."""
    folder = open_genie_folder(path)
    manifest = folder.manifest
    alone = {graph.file for graph in manifest.graphs} - set(manifest.shared)
    left = {*alone, CONFIG, GENERATOR_NODE} if manifest.shared else set[str]()
    names = [GENIE_MANIFEST, *(name for name in sorted(manifest.files) if name not in left)]
    binaries = [*(manifest.shared or sorted(alone)), *[ENCODER_BINARY] * bool(manifest.vision)]
    return Payload(folder.path, manifest.soc, manifest.arch, tuple(names), tuple(binaries), folder)


def _bundle(path: Path) -> Payload:
    bundle = open_bundle(path)
    device = find(bundle.manifest.device)
    files = sorted(file.relative_to(bundle.path).as_posix() for file in bundle.path.rglob("*") if file.is_file())
    prefix = f"compiled/{device.soc}/"
    names = [name for name in files if not name.startswith("compiled/") or name.startswith(prefix)]
    binaries = [name for name in names if name.startswith(prefix) and name.endswith(".bin")]
    return Payload(bundle.path, device.soc, device.arch, tuple(names), tuple(binaries))


RUNNER, APP = "genie-t2t-run", "genie-app"

_ON = Platform("android", "arm64")
_FOLDERS = ("lib/aarch64-android", "lib/hexagon-v{arch}/unsigned", "bin/aarch64-android", "jni/arm64-v8a", ".")
_NEEDED = (*LIBRARIES, "QnnHtpNetRunExtensions")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Qairt:
    """The files that a program of Qualcomm's needs on a phone.

    Attributes:
        version: of the libraries, such as (2, 51, 0); empty if none of them says it.
        libraries: for Android's processor, and the runners.
        skel: for the HTP, which loads it by ADSP_LIBRARY_PATH.
    """

    version: Version
    libraries: tuple[Path, ...]
    skel: Path

    @property
    def files(self) -> dict[str, Path]:
        """Everything by its place on the phone."""
        return {path.name: path for path in self.libraries} | {f"dsp/{self.skel.name}": self.skel}


def find_qairt(sources: Sequence[Path], arch: int, runner: str, scratch: Path) -> Qairt:
    """Find everything that one version of the HTP needs.

    Args:
        sources: folders of the SDK or of unpacked archives, or `.aar` files; empty for the SDK of the environment.
        arch: HTP version of the phone.
        runner: the program to run.
        scratch: receives what is in archives.

    Raises:
        UsageError: no source is given, or one is neither a folder nor an archive.
        EngineError: a file is missing, or the libraries are of two versions.
    """
    places = sources or [Path(os.environ[name]) for name in SDK_VARIABLES if os.environ.get(name)][:1]
    if not places:
        fix = f"Download the Qualcomm AI Runtime SDK, and give its folder: --qairt DIR (or set {SDK_VARIABLES[0]})"
        raise UsageError("--qairt", got="none", expected="Qualcomm's libraries for Android", fix=fix)
    roots = [_opened(source, scratch) for source in places]
    names = [*map(_ON.library, _NEEDED), _ON.stub(arch), runner, skel(arch)]
    places_of = {name: _first(roots, name, arch) for name in names}
    if missing := [name for name, path in places_of.items() if path is None]:
        raise EngineError(
            "--qairt",
            got=f"no {', '.join(missing)} in {', '.join(map(str, places))}",
            expected=f"the files that HTP V{arch} needs on Android",
            fix="Give the SDK's root, which has bin/, lib/ and lib/hexagon-vN. Archives for apps have no programs.",
        )
    paths = {name: path for name, path in places_of.items() if path is not None}
    versions = {name: version for name, path in paths.items() if (version := _version(path))}
    if len(set(versions.values())) > 1:
        listed = ", ".join(f"{name} {format_version(version)}" for name, version in sorted(versions.items()))
        raise EngineError("--qairt", got=listed, expected="libraries of one version", fix="Give one SDK.")
    on_htp = paths.pop(skel(arch))
    others = (_first(roots, name, arch) for name in (RUNNER, APP) if name != runner)  # another model may need these
    libraries = (*paths.values(), *(path for path in others if path is not None))
    return Qairt(next(iter(versions.values()), ()), libraries, on_htp)


def check_version(qairt: Qairt, binaries: Iterable[Path]) -> None:
    """Check that the libraries load what a newer or the same compiler wrote.

    Raises:
        EngineError: a binary was compiled by a newer version than the libraries are.
    """
    for binary in binaries:
        version = _version(binary)
        if qairt.version and version and version > qairt.version:
            raise EngineError(
                binary.name,
                got=f"compiled by QAIRT {format_version(version)}",
                expected=f"at most the {format_version(qairt.version)} of the libraries",
                fix=f"Give an SDK of {format_version(version)} or newer: --qairt DIR",
            )


def format_version(version: Version) -> str:
    return ".".join(map(str, version))


def _version(path: Path) -> Version:
    """Empty if the file does not say it."""
    text = stated_version(path)
    return () if text is None else tuple(map(int, text.split(".")))


def _opened(source: Path, scratch: Path) -> Path:
    """The folder itself, or one with the libraries of an archive."""
    if source.is_dir():
        return source
    folder = scratch / source.name
    try:
        with zipfile.ZipFile(source) as archive:
            members = [name for name in archive.namelist() if re.fullmatch(r"jni/arm64-v8a/[\w.+-]+\.so", name)]
            archive.extractall(folder, members)
    except (OSError, zipfile.BadZipFile) as error:
        got = "no such file" if isinstance(error, FileNotFoundError) else "no archive"
        fix = "Give the SDK's folder, or an AAR that holds jni/arm64-v8a."
        raise UsageError("--qairt", got=f"{source} ({got})", expected="a folder or an .aar file", fix=fix) from None
    return folder


def _first(roots: Sequence[Path], name: str, arch: int) -> Path | None:
    paths = (root / folder.format(arch=arch) / name for root in roots for folder in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)


def runner_of(folder: GenieFolder) -> str:
    """The program that runs a folder: genie-t2t-run restores no state, genie-app does."""
    return RUNNER if folder.manifest.sink is None else APP


_ABI = "arm64-v8a"
_PROPERTIES = ("ro.soc.model", "ro.product.model", "ro.product.cpu.abi", "ro.build.version.release")
_SHARED = ("/sdcard", "/storage", "/mnt/sdcard")
"""Android mounts these so that no program starts from them."""


@dataclass(frozen=True, slots=True)
class Phone:
    """A connected phone.

    Attributes:
        soc: the chip's part number as the phone states it (`ro.soc.model`); empty before Android 12.
        name: the product's name.
        abi: its first instruction set.
        android: its version of Android.
    """

    soc: str
    name: str
    abi: str
    android: str

    @classmethod
    def read(cls, adb: Adb) -> Phone:
        """Ask the phone.

        Raises:
            EngineError: it does not answer.
        """
        command = "; ".join(f"getprop {name}" for name in _PROPERTIES)
        lines = [line.strip() for line in adb.read(command, "getprop").splitlines()]
        soc, name, abi, android = (*lines, "", "", "", "")[:4]
        return cls(soc, name, abi, android)

    def chip(self, named: str | None) -> Device:
        """The chip in edgekv's catalogue.

        Args:
            named: what the user says it is, for phones that do not say it.

        Raises:
            EngineError: the phone has no 64-bit Arm system, or names no chip, or one that edgekv does not know.
        """
        if self.abi != _ABI:
            raise EngineError(
                self.name, got=self.abi or "no ABI", expected=_ABI, fix="Use a phone with 64-bit Android."
            )
        if not self.soc and named is None:
            fix = "Say which it is: --chip SM8650"
            raise EngineError(self.name, got="no name of its chip", expected="ro.soc.model", fix=fix)
        said = named or self.soc
        try:
            return find(said)
        except UnknownDeviceError as error:
            try:
                return find(said.split("-")[0])  # SM8650-AC is an SM8650
            except UnknownDeviceError:
                pass
            expected = "a chip that edgekv knows"
            raise EngineError(f"{self.name}: chip", got=error.got, expected=expected, fix=error.fix) from None


def check_chip(chip: Device, soc: str, arch: int, what: str) -> None:
    """Check that context binaries are for this chip.

    Raises:
        EngineError: they are for another one.
    """
    if chip.soc != soc:
        raise EngineError(
            what,
            got=f"binaries for {soc} (HTP V{arch})",
            expected=f"binaries for the phone's {chip.soc} (HTP V{chip.arch})",
            fix=f"Export and compile for it: --device {chip.soc}",
        )


def check_folder(folder: str) -> None:
    """Check a folder of the phone before anything is copied to it.

    Raises:
        UsageError: it is no absolute path, or on storage where no program may start.
    """
    fix = "Use a folder below /data/local/tmp."
    if not folder.startswith("/") or ".." in folder.split("/") or not re.fullmatch(r"[\w./+@=-]+", folder):
        raise UsageError("--to", got=repr(folder), expected="an absolute path of letters, digits and ._-+@=", fix=fix)
    if any(folder == shared or folder.startswith(f"{shared}/") for shared in _SHARED):
        raise UsageError("--to", got=folder, expected="storage from which programs may start", fix=fix)


def free_bytes(adb: Adb, folder: str) -> int:
    """Free bytes of the file system of a folder that exists.

    Raises:
        EngineError: the phone does not say.
    """
    output = adb.read(f"df -k {quote(folder)}", "df")
    fields = output.splitlines()[-1].split() if output.strip() else []
    if len(fields) < 4 or not fields[-3].isdigit():
        raise EngineError(
            "df", got=output.strip()[-80:], expected="a line with free blocks", fix="Check: adb shell df -k"
        )
    return int(fields[-3]) * 1024


_MARKER = ".edgekv-push"
_PART = ".part"
_SPARE_BYTES = 16 << 20
_NAMES_A_COMMAND = 100


@dataclass(frozen=True, slots=True)
class Push:
    """What makes a folder of a phone hold some files and no others. Paths are those on the phone.

    Attributes:
        root: the folder.
        files: local files to copy.
        sha256: their hashes.
        kept: files that are there already, by hash.
        stale: files of an earlier push that are no more wanted.
        bytes: size of the files to copy.
    """

    root: str
    files: Mapping[str, Path]
    sha256: Mapping[str, str]
    kept: tuple[str, ...]
    stale: tuple[str, ...]
    bytes: int

    @classmethod
    def plan(cls, adb: Adb, root: str, files: Mapping[str, Path]) -> Push:
        """Compare the phone with what is wanted there; nothing changes.

        Args:
            adb: the phone.
            root: the folder, absolute.
            files: local files by their path in the folder.

        Raises:
            EngineError: the phone was lost.
        """
        paths = {f"{root}/{name}": path for name, path in files.items()}
        hashes = {remote: sha256_of(path) for remote, path in paths.items()}
        held = _hashes(adb, paths)
        changed = {remote: path for remote, path in paths.items() if held.get(remote) != hashes[remote]}
        kept = tuple(remote for remote in paths if remote not in changed)
        size = sum(path.stat().st_size for path in changed.values())
        stale = tuple(f"{root}/{name}" for name in sorted(_written(adb, root) - files.keys()))
        return cls(root, changed, hashes, kept, stale, size)

    def run(self, adb: Adb, *, progress: Progress = silent) -> None:
        """Copy each file beside its place, and rename it when its hash is right there; then remove what is stale.

        A lost connection leaves no damaged file, and a new plan continues.

        Raises:
            EngineError: a file could not be copied, or the phone was lost.
        """
        folders = sorted({dirname(remote) for remote in self.files} | {self.root})
        adb.read(f"mkdir -p {' '.join(map(quote, folders))}", self.root)
        self._note(adb, (*self.stale, *self.sha256))  # first, so that a push that is cut off can be cleared away
        for done, (remote, local) in enumerate(self.files.items()):
            progress("push", done, len(self.files))
            part = remote + _PART
            adb.push(local, part)
            check = f"echo {quote(f'{self.sha256[remote]}  {part}')} | sha256sum -c -"
            adb.read(f"{check} && mv -f {quote(part)} {quote(remote)}", remote)
        if self.stale:
            gone = (name for remote in self.stale for name in (remote, remote + _PART))
            adb.read(f"rm -f {' '.join(map(quote, gone))}", "rm")
            self._note(adb, self.sha256)
        progress("push", len(self.files), len(self.files))

    def _note(self, adb: Adb, written: Iterable[str]) -> None:
        """Record which files of the folder are edgekv's."""
        names = [quote(remote.removeprefix(f"{self.root}/")) for remote in written]
        marker = f"{self.root}/{_MARKER}"
        adb.read(f"printf '%s\\n' {' '.join(names)} > {quote(marker + _PART)}", marker)
        adb.read(f"mv -f {quote(marker + _PART)} {quote(marker)}", marker)


def check_room(adb: Adb, folder: str, pushes: Iterable[Push]) -> None:
    """Create a folder, and check that all the pushes fit there.

    Raises:
        EngineError: it cannot be written, or there is no room.
    """
    fix = "Choose another folder that adb may write, such as --to /data/local/tmp/edgekv."
    made = adb.shell(f"mkdir -p {quote(folder)} && test -w {quote(folder)}")
    if made.code != 0:
        got = (made.output.strip().splitlines() or ["no permission to write"])[-1]
        raise EngineError(folder, got=got, expected="a folder that adb may write", fix=fix)
    needed, free = sum(push.bytes for push in pushes) + _SPARE_BYTES, free_bytes(adb, folder)
    if needed > free:
        fix = "Free some on the phone, or choose another folder: --to DIR"
        raise EngineError(folder, got=f"{format_bytes(free)} free", expected=format_bytes(needed), fix=fix)


def _hashes(adb: Adb, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those files of the phone that exist."""
    digests: dict[str, str] = {}
    listed = list(paths)
    for at in range(0, len(listed), _NAMES_A_COMMAND):
        names = " ".join(map(quote, listed[at : at + _NAMES_A_COMMAND]))
        for line in adb.shell(f"sha256sum {names} 2>/dev/null").output.splitlines():
            digest, _, path = line.partition("  ")
            if len(digest) == 64:
                digests[path.strip()] = digest
    return digests


def _written(adb: Adb, root: str) -> set[str]:
    """The files of the folder that an earlier push wrote; what else is there is nobody's to remove."""
    listed = adb.shell(f"cat {quote(f'{root}/{_MARKER}')} 2>/dev/null").output.splitlines()
    return {name for name in listed if is_plain_path(name)}


@dataclass(frozen=True, slots=True)
class OnPhone:
    """Where a folder of Genie's and its libraries are on a phone.

    Attributes:
        folder: the folder that `edgekv bundle genie` wrote.
        libraries: the libraries and runners; the skel is in its folder `dsp`.
        config: name of the configuration.
    """

    folder: str
    libraries: str
    config: str


@dataclass(frozen=True, slots=True)
class Deployment:
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
) -> Deployment:
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
        return Deployment(phone, OnPhone(there, "", ""), push, None)
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
        return Deployment(phone, OnPhone(there, held, payload.config), push, libraries)


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
