"""What is pushed to a phone: a folder's files, and how they get there and are known to be whole."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from shlex import quote

from devices import Device, UnknownDeviceError, find
from edgekv.bundle import open_bundle
from edgekv.bundle.files import is_plain_path
from edgekv.errors import EngineError, UsageError
from edgekv.machine.system import format_bytes, sha256_of
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
