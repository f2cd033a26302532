"""Copying files to a phone: what changed, by hash, each complete or not at all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import dirname
from shlex import quote

from edgekv.bundle.files import is_plain_path
from edgekv.errors import EngineError
from edgekv.machine.system import format_bytes, sha256_of
from exporters.progress import Progress, silent
from exporters.targets.android.adb import Adb
from exporters.targets.android.phone import free_bytes

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
        wanted = {f"{root}/{name}": path for name, path in files.items()}
        hashes = {remote: sha256_of(path) for remote, path in wanted.items()}
        held = _hashes(adb, wanted)
        changed = {remote: path for remote, path in wanted.items() if held.get(remote) != hashes[remote]}
        kept = tuple(remote for remote in wanted if remote not in changed)
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
        found = (made.output.strip().splitlines() or ["no permission to write"])[-1]
        raise EngineError(folder, got=found, expected="a folder that adb may write", fix=fix)
    needed, free = sum(each.bytes for each in pushes) + _SPARE_BYTES, free_bytes(adb, folder)
    if needed > free:
        fix = "Free some on the phone, or choose another folder: --to DIR"
        raise EngineError(folder, got=f"{format_bytes(free)} free", expected=format_bytes(needed), fix=fix)


def _hashes(adb: Adb, paths: Iterable[str]) -> dict[str, str]:
    """SHA-256 of those files of the phone that exist."""
    found: dict[str, str] = {}
    listed = list(paths)
    for at in range(0, len(listed), _NAMES_A_COMMAND):
        names = " ".join(map(quote, listed[at : at + _NAMES_A_COMMAND]))
        for line in adb.shell(f"sha256sum {names} 2>/dev/null").output.splitlines():
            digest, _, path = line.partition("  ")
            if len(digest) == 64:
                found[path.strip()] = digest
    return found


def _written(adb: Adb, root: str) -> set[str]:
    """The files of the folder that an earlier push wrote; what else is there is nobody's to remove."""
    listed = adb.shell(f"cat {quote(f'{root}/{_MARKER}')} 2>/dev/null").output.splitlines()
    return {name for name in listed if is_plain_path(name)}
