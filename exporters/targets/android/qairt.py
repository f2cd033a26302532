"""Qualcomm's libraries and runners for Android, from the user's own SDK or archives."""

from __future__ import annotations

import os
import re
import zipfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from edgekv.errors import EngineError, UsageError
from edgekv.qnn.vendor_libraries import LIBRARIES, SDK_VARIABLES, Platform, skel, stated_version

RUNNER, APP = "genie-t2t-run", "genie-app"

_ON = Platform("android", "arm64")
_FOLDERS = ("lib/aarch64-android", "lib/hexagon-v{arch}/unsigned", "bin/aarch64-android", "jni/arm64-v8a", ".")
_NEEDED = (*LIBRARIES, "QnnHtpNetRunExtensions")

Version = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Qairt:
    """The files that a Genie folder needs on a phone.

    Attributes:
        version: of the libraries, such as (2, 51, 0); empty if none of them says it.
        libraries: for Android's processor, and the runners.
        skel: for the HTP, which loads it by ADSP_LIBRARY_PATH.
    """

    version: Version
    libraries: tuple[Path, ...]
    skel: Path


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
    given = sources or [Path(os.environ[name]) for name in SDK_VARIABLES if os.environ.get(name)][:1]
    if not given:
        fix = f"Download the Qualcomm AI Runtime SDK, and give its folder: --qairt DIR (or set {SDK_VARIABLES[0]})"
        raise UsageError("--qairt", got="none", expected="Qualcomm's libraries for Android", fix=fix)
    roots = [_opened(source, scratch) for source in given]
    wanted = [*map(_ON.library, _NEEDED), _ON.stub(arch), runner, skel(arch)]
    found = {name: _first(roots, name, arch) for name in wanted}
    if missing := [name for name, path in found.items() if path is None]:
        raise EngineError(
            "--qairt",
            got=f"no {', '.join(missing)} in {', '.join(map(str, given))}",
            expected=f"the files that HTP V{arch} needs on Android",
            fix="Give the SDK's root, which has bin/, lib/ and lib/hexagon-vN. Archives for apps have no programs.",
        )
    paths = {name: path for name, path in found.items() if path is not None}
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
    found = stated_version(path)
    return () if found is None else tuple(map(int, found.split(".")))


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
        found = "no such file" if isinstance(error, FileNotFoundError) else "no archive"
        fix = "Give the SDK's folder, or an AAR that holds jni/arm64-v8a."
        raise UsageError("--qairt", got=f"{source} ({found})", expected="a folder or an .aar file", fix=fix) from None
    return folder


def _first(roots: Sequence[Path], name: str, arch: int) -> Path | None:
    paths = (root / folder.format(arch=arch) / name for root in roots for folder in _FOLDERS)
    return next((path for path in paths if path.is_file()), None)
