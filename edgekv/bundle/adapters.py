"""LoRA adapters of a bundle, in its folder `adapters`, each with a sealed record of its own.

They are beside the manifest, not in it: binaries and prefixes of the bundle stay valid when an adapter is added.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import msgspec
from numpy.typing import NDArray

from edgekv.bundle.atomic import atomic_directory
from edgekv.bundle.bundle import Bundle
from edgekv.bundle.formats import SEAL, Content, seal_of
from edgekv.bundle.manifest import MANIFEST
from edgekv.bundle.records import Count, FileRecord, Layer, Record
from edgekv.errors import BundleError, UsageError
from edgekv.machine.decoding import DECODERS, convert
from edgekv.machine.json_file import decode_json, readable_json
from edgekv.machine.system import MIB, read_file, sha256_of
from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors
from edgekv.spec import LoraTarget

ADAPTERS = "adapters"
ADAPTER_RECORD = "adapter.json"
_TENSORS = "adapter.safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LORA_FORMAT = 1
_LARGEST_RECORD_BYTES = 64 * MIB
_WRITTEN = "what edgekv lora add wrote"


class AdapterError(BundleError):
    """An adapter that is damaged, or was made for another export. It names files by their place in the bundle."""


class ClippedMatrix(Record, frozen=True):
    """A B with elements beyond its encoding.

    Attributes:
        layer: its layer.
        target: its projection.
        elements: how many were clipped.
        share: of its elements.
        reach: the largest element, relative to the largest that the encoding has.
    """

    layer: Layer
    target: LoraTarget
    elements: Count
    share: Annotated[float, msgspec.Meta(ge=0, le=1)]
    reach: Annotated[float, msgspec.Meta(ge=0)]


class LoraRecord(Record, frozen=True):
    """`adapter.json`.

    Attributes:
        format: version of this layout.
        name: of the adapter, in commands and requests.
        bundle_sha256: hash of the bundle's manifest.
        source: folder that it was added from.
        source_sha256: hash of its configuration and weights there.
        scale: multiplies what the adapter adds.
        rank: the largest r.
        targets: the projections that it changes.
        clipped: what did not fit into the encodings.
        files: size and hash of every other file.
    """

    format: int
    name: str
    bundle_sha256: str
    source: str
    source_sha256: str
    scale: float
    rank: Count
    targets: list[LoraTarget]
    clipped: list[ClippedMatrix]
    files: dict[str, FileRecord]


@dataclass(frozen=True, slots=True)
class LoraAdapter:
    """An adapter of a bundle.

    Attributes:
        path: its folder.
        record: the content of `adapter.json`.
        sha256: a hash of the record, and so of all files.
    """

    path: Path
    record: LoraRecord
    sha256: str = field(repr=False)

    def arrays(self) -> Mapping[str, NDArray[Any]]:
        """Its integers, by the names of `lora_tensor`; and rows of the sink, as in the sink's file.

        Raises:
            AdapterError: the file is missing or changed.
        """
        record = self.record.files[_TENSORS]
        expected = f"sha256 {record.sha256}"
        try:
            content = read_file(self.path / _TENSORS, record.bytes)
            if (sha256 := hashlib.sha256(content).hexdigest()) != record.sha256:
                raise ValueError(f"sha256 {sha256}")
            return decode_tensors(content).arrays
        except (OSError, ValueError, TensorFileError) as error:
            raise self.refusal(error.strerror if isinstance(error, OSError) else error, expected) from None

    def refusal(self, got: object, expected: str) -> AdapterError:
        """The error of a damaged file of tensors."""
        return AdapterError(
            _place(self.record.name, _TENSORS), got=got, expected=expected, fix=_again(self.record.name)
        )


def lora_tensor(half: str, layer: int, target: LoraTarget) -> str:
    """Name of a half of an adapter's matrix in its file: `a` `[r, in]`, `b` `[r, out]`."""
    return f"{half}.{layer}.{target}"


def check_lora_name(name: str) -> None:
    """Raise UsageError if an adapter cannot have this name."""
    if _NAME.fullmatch(name) is None:
        expected = "letters, digits, ., _ and -, 64 at most"
        raise UsageError("--name", got=repr(name), expected=expected, fix="Give another name.")


def lora_names(bundle: Bundle) -> list[str]:
    """The names of the adapters of a bundle, sorted; the adapters may be damaged."""
    names = (path.parent.name for path in (bundle.path / ADAPTERS).glob(f"*/{ADAPTER_RECORD}"))
    return sorted(name for name in names if _NAME.fullmatch(name))


def lora_adapters(bundle: Bundle) -> list[LoraAdapter]:
    """The adapters of a bundle, by name.

    Raises:
        AdapterError: a record is damaged.
    """
    return [open_lora(bundle, name) for name in lora_names(bundle)]


def open_lora(bundle: Bundle, name: str) -> LoraAdapter:
    """An adapter of a bundle.

    Raises:
        UsageError: the bundle has none of this name.
        AdapterError: its record is damaged, or was made for another export.
    """
    path = bundle.path / ADAPTERS / name
    if _NAME.fullmatch(name) is None or not (path / ADAPTER_RECORD).exists():
        raise UsageError(
            "lora",
            got=repr(name),
            expected=", ".join(lora_names(bundle)) or "an adapter; the bundle has none",
            fix="Add it: edgekv lora add BUNDLE FOLDER --name NAME",
        )
    file, again = _place(name, ADAPTER_RECORD), _again(name)
    try:
        raw = read_file(path / ADAPTER_RECORD, _LARGEST_RECORD_BYTES)
    except OSError as error:
        raise AdapterError(file, got=error.strerror, expected=_WRITTEN, fix=again) from None
    content = decode_json(raw, Content, field=file, expected=_WRITTEN, fix=again, error=AdapterError)
    seal = content.pop(SEAL, None)
    if seal != (expected := seal_of(content)):
        raise AdapterError(f"{file}: {SEAL}", got=repr(seal)[:80], expected=expected, fix=again)
    try:
        record = convert(content, LoraRecord)
    except msgspec.ValidationError as error:
        raise AdapterError(file, got=error, expected="the fields of an adapter", fix=again) from None
    if record.format != _LORA_FORMAT or record.name != name or [*record.files] != [_TENSORS]:
        got = f"{record.name}, format {record.format}"
        raise AdapterError(file, got=got, expected=f"{name}, format {_LORA_FORMAT}", fix=again)
    if record.bundle_sha256 != (expected := sha256_of(bundle.path / MANIFEST)):
        raise AdapterError(f"{file}: bundle_sha256", got=record.bundle_sha256, expected=expected, fix=again)
    return LoraAdapter(path, record, str(seal))


def write_lora(
    bundle: Bundle, record: LoraRecord, arrays: Mapping[str, NDArray[Any]], *, force: bool = False
) -> LoraAdapter:
    """Add an adapter to a bundle; it appears complete or not at all.

    Args:
        record: without `files`.
        arrays: see `LoraAdapter.arrays`.
        force: replace an adapter of this name.

    Raises:
        UsageError: the bundle has an adapter of this name.
        BundleError: the folder cannot be written.
    """
    check_lora_name(record.name)
    content = encode_tensors(arrays)
    files = {_TENSORS: FileRecord(bytes=len(content), sha256=hashlib.sha256(content).hexdigest())}
    whole = DECODERS[Content].decode(msgspec.json.encode(msgspec.structs.replace(record, files=files)))
    target = bundle.path / ADAPTERS / record.name
    with atomic_directory(target, force=force, marker=ADAPTER_RECORD) as folder:
        (folder / _TENSORS).write_bytes(content)
        (folder / ADAPTER_RECORD).write_bytes(readable_json(whole | {SEAL: seal_of(whole)}))
    return open_lora(bundle, record.name)


def new_lora_record(
    bundle: Bundle,
    name: str,
    source: str,
    source_sha256: str,
    scale: float,
    rank: int,
    targets: list[LoraTarget],
    clipped: list[ClippedMatrix],
) -> LoraRecord:
    """The record of an adapter that is not written yet; see `LoraRecord`."""
    return LoraRecord(
        format=_LORA_FORMAT,
        name=name,
        bundle_sha256=sha256_of(bundle.path / MANIFEST),
        source=source,
        source_sha256=source_sha256,
        scale=scale,
        rank=rank,
        targets=targets,
        clipped=clipped,
        files={},
    )


def remove_lora(bundle: Bundle, name: str) -> None:
    """Remove an adapter, also a damaged one.

    Raises:
        UsageError: the bundle has none of this name.
        BundleError: the folder cannot be changed.
    """
    path = bundle.path / ADAPTERS / name
    if _NAME.fullmatch(name) is None or not path.is_dir():
        open_lora(bundle, name)  # names the others
    gone = path.with_name(f".{name}.removed")
    try:
        shutil.rmtree(gone, ignore_errors=True)
        path.rename(gone)  # readers find all of it, or nothing
        shutil.rmtree(gone)
    except OSError as error:
        fix = "Make the bundle's folder writable."
        raise BundleError(str(path), got=error.strerror, expected="a folder to remove", fix=fix) from None


def _place(name: str, file: str) -> str:
    """A file of an adapter, for messages: clients of a server see them too."""
    return f"{ADAPTERS}/{name}/{file}"


def _again(name: str) -> str:
    return f"Add it again: edgekv lora rm BUNDLE {name}, then edgekv lora add BUNDLE FOLDER --name {name}"
