"""Reading and writing `manifest.json`: format version, types, ranges, consistency, seal."""

from __future__ import annotations

import shlex
from difflib import get_close_matches
from pathlib import Path
from typing import NoReturn

import msgspec

from edgekv.bundle.atomic import replaced_by_a_killed_process
from edgekv.bundle.consistency import check_consistency
from edgekv.bundle.formats import FORMAT, SEAL, Content, seal_of
from edgekv.bundle.manifest import MANIFEST, Manifest
from edgekv.errors import BundleError, MissingBundleError
from edgekv.machine.decoding import DECODERS, convert
from edgekv.machine.json_file import json_of_lines, read_json
from edgekv.spec import identify

_UPGRADE = "Install a newer edgekv: pip install -U edgekv"


def read_manifest(path: str | Path) -> Manifest:
    """The manifest of a bundle's folder, checked for consistency; the other files are not read.

    Raises:
        BundleError: no folder, no manifest, broken JSON, an unknown format version, a field of the wrong type or out of
            range, fields that contradict each other, or content that does not match the seal.
    """
    folder = Path(path)
    file = folder / MANIFEST
    _check_folder(folder, file)
    again = export_again(folder)

    def fail(field: str, got: object, expected: object, fix: str = again) -> NoReturn:
        raise BundleError(f"{file}: {field}" if field else str(file), got=got, expected=expected, fix=fix)

    content = read_json(file, Content, expected="whole JSON, the manifest of a bundle", fix=again)
    version = content.get("format")
    if not isinstance(version, int) or isinstance(version, bool):
        fail("format", repr(version)[:80], FORMAT)
    if version != FORMAT:
        fail("format", version, FORMAT, _UPGRADE if version > FORMAT else again)
    seal = content.pop(SEAL, None)
    try:
        manifest = convert(content, Manifest)
    except msgspec.ValidationError as error:
        fail("", error, f"the fields of format {FORMAT}", _UPGRADE if "unknown field" in str(error) else again)
    except RecursionError:
        fail("", "values nested too deeply", f"the fields of format {FORMAT}")
    check_consistency(manifest, fail)
    if seal != (expected := seal_of(content)):
        fail(SEAL, "none" if seal is None else repr(seal)[:80], f"{expected}, for what the manifest says")
    return manifest


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write `manifest.json` into a folder, sealed, in lines for readers."""
    content = DECODERS[Content].decode(msgspec.json.encode(manifest, order="deterministic"))
    (folder / MANIFEST).write_bytes(json_of_lines(content | {SEAL: seal_of(content)}))


def export_again(folder: Path) -> str:
    """The fix for a bundle that is damaged."""
    return f"Export the bundle again: edgekv export CHECKPOINT -o {folder} --force"


def _bundle_beside(folder: Path) -> Path | None:
    """The bundle in the same folder whose name is nearest; None if none is near."""
    try:
        names = [path.name for path in folder.absolute().parent.iterdir() if (path / MANIFEST).is_file()]
    except OSError:
        return None
    near = get_close_matches(folder.name, names, 1)
    return folder.with_name(near[0]) if near else None


def _check_folder(folder: Path, file: Path) -> None:
    """Describe a folder that is not a bundle."""
    if file.exists():
        return
    if kind := identify(folder):
        raise BundleError(f"bundle {folder}", got=kind.what, expected="a bundle's folder", fix=kind.as_bundle)
    if old := replaced_by_a_killed_process(folder.absolute()):
        raise BundleError(
            f"bundle {folder}",
            got="nothing there: a process that was replacing it was killed",
            expected="a bundle's folder",
            fix=f"The one before is whole: mv {shlex.join([str(old), str(folder)])}",
        )
    if not folder.is_dir():
        fix = "Make one with: edgekv export CHECKPOINT -o BUNDLE --device DEVICE"
        if folder.exists():
            raise BundleError(f"bundle {folder}", got="a file", expected="a bundle's folder", fix=fix)
        if near := _bundle_beside(folder):
            fix = f"Did you mean {shlex.quote(str(near))}? Otherwise make one with: edgekv export CHECKPOINT -o BUNDLE"
        raise MissingBundleError(f"bundle {folder}", got="nothing there", expected="a bundle's folder", fix=fix)
