"""What folders of other runtimes have: a record of their files, and the bundle's tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from edgekv.bundle import MANIFEST, Bundle, FileRecord, record_files
from edgekv.errors import BundleError
from edgekv.machine.json_file import read_json, readable_json
from edgekv.machine.system import sha256_of
from edgekv.spec import identify
from edgekv.spec.chat import DEFAULT, read_bundle_templates
from edgekv.spec.text import TOKENIZER, TOKENIZER_CONFIG

FORMAT = 3
Runtime = Literal["genie", "genai"]


class TargetRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A folder for another runtime.

    Attributes:
        format: version of this layout.
        producer: the program and version that wrote the folder.
        bundle_sha256: hash of the source bundle's manifest.
        soc: part number of the chip that the binaries target; null for graphs that are not compiled.
        checked: whether the graphs were proven to give what the bundle's give.
        floating_nodes: QNN nodes of the binaries that run in float, empty unless the bundle's export allowed them; null
            if nobody looked.
        files: size and hash of every other file.
    """

    format: int = FORMAT
    producer: str
    bundle_sha256: str
    soc: str | None
    checked: bool
    floating_nodes: list[str] | None
    files: dict[str, FileRecord]


R = TypeVar("R", bound=TargetRecord)


def write_record(
    kind: type[R],
    folder: Path,
    name: str,
    bundle: Bundle,
    *,
    soc: str | None,
    checked: bool,
    floating: Sequence[str] | None = None,
    **fields: Any,
) -> R:
    """Record all files of a folder in a further one.

    Args:
        kind: of the record.
        folder: complete but for the record.
        name: of the record's file.
        bundle: the source.
        soc: see `TargetRecord`.
        checked: see `TargetRecord`.
        floating: nodes of binaries that run in float; None if nobody looked.
        fields: those of `kind`.
    """
    record = kind(
        producer=f"edgekv {metadata.version('edgekv')}",
        bundle_sha256=sha256_of(bundle.path / MANIFEST),
        soc=soc,
        checked=checked,
        floating_nodes=None if floating is None else [*floating],
        files=record_files(folder),
        **fields,
    )
    (folder / name).write_bytes(readable_json(record))
    return record


def read_record(kind: type[R], folder: Path, name: str, *, expected: str, fix: str) -> R:
    """The record of a folder; every file is checked against its hash.

    Raises:
        BundleError: there is none, it is of another version, or a file is missing or changed.
    """
    record = read_json(folder / name, kind, expected=expected, fix=fix)
    if record.format != FORMAT:
        raise BundleError(f"{folder / name}: format", got=record.format, expected=FORMAT, fix=fix)
    for file, held in record.files.items():
        path = folder / file
        digest = sha256_of(path) if path.is_file() else None
        if digest != held.sha256:
            got = "no such file" if digest is None else f"sha256 {digest}"
            raise BundleError(str(path), got=got, expected=f"sha256 {held.sha256}", fix=fix)
    return record


def open_for(runtime: Runtime, kind: type[R], folder: Path, name: str) -> R:
    """The record of a folder that `edgekv bundle RUNTIME` wrote.

    Raises:
        BundleError: it is a bundle, a checkpoint, or a folder for another runtime, or is changed; the fix says what to
            run.
    """
    expected = f"a folder that edgekv bundle {runtime} wrote"
    try:
        record = identify(folder)
    except OSError:  # reading the record reports it
        record = None
    if record is not None and record.kind != runtime:
        fixes = {
            "bundle": f"Write the folder first: edgekv bundle {runtime} {folder} -o DIR",
            "checkpoint": f"Export it: edgekv export {folder} -o BUNDLE --device DEVICE"
            f"; then run: edgekv bundle {runtime} BUNDLE -o DIR",
        }
        fix = fixes.get(record.kind, record.as_bundle.format(path=folder))
        raise BundleError(str(folder), got=record.what, expected=expected, fix=fix)
    again = f"Write it again: edgekv bundle {runtime} BUNDLE -o {folder} --force"
    return read_record(kind, folder, name, expected=expected, fix=again)


def copy_tokenizer(bundle: Bundle, folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json`; of several chat templates, the latter has the default one."""
    shutil.copyfile(bundle.path / TOKENIZER, folder / TOKENIZER)
    path = bundle.path / TOKENIZER_CONFIG
    config = read_json(path, dict[str, Any], expected="the file of an export", fix="Export the bundle again.")
    config.pop("chat_template", None)
    if (templates := read_bundle_templates(bundle.path)) is not None and DEFAULT in templates.templates:
        config["chat_template"] = templates.templates[DEFAULT]
    (folder / TOKENIZER_CONFIG).write_bytes(readable_json(config))
