"""Prefixes that a bundle brings along, in its folder `prefixes`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from edgekv.bundle import Bundle, FileRecord, atomic_directory, readable_json, record_files
from edgekv.errors import BundleError, UsageError
from edgekv.prefix.retention import MAX_PRIORITY, RetentionPolicy, TokenRangeRetentionConfig
from edgekv.prefix.rows import Rows
from edgekv.prefix.store import PrefixStore
from edgekv.system import sha256_of

FOLDER = "prefixes"
RECORD = "prefixes.json"
FORMAT = 1
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKENS = "tokens"
# Rows of a limited window are stored from the beginning of a block on, for stores of such blocks or smaller ones.
BAKED_TOKENS_PER_BLOCK = 32
_KEPT_LONGEST = RetentionPolicy((TokenRangeRetentionConfig(0, None, MAX_PRIORITY),))


class BakedPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefix of a bundle.

    Attributes:
        name: unique for the engine.
        engine: that has computed it, and that uses it.
        tokens: how many.
        file: its keys and values, in the folder `prefixes`.
        fingerprint: what they depend on; see `prefix_fingerprint`.
    """

    name: str
    engine: str
    tokens: int
    file: str
    fingerprint: str


class BakedRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prefixes.json`.

    Attributes:
        format: version of this layout.
        prefixes: in the order of their baking.
        files: size and hash of every other file of the folder.
    """

    format: int
    prefixes: list[BakedPrefix]
    files: dict[str, FileRecord]


class _BakedRows:
    """The rows of a file, by the groups of a store; a `Source`."""

    def __init__(self, tokens: int, groups: Sequence[Rows]) -> None:
        self._tokens = tokens
        self._groups = groups

    def first(self, group: int) -> int:
        return self._tokens - self._groups[group].shape[1]

    def read(self, group: int, token: int, out: Rows) -> None:
        start = token - self.first(group)
        out[...] = self._groups[group][:, start : start + out.shape[1]]


def baked_prefixes(bundle: Path) -> list[BakedPrefix]:
    """The prefixes of a bundle's folder.

    Raises:
        BundleError: their record is broken, or of another format version.
    """
    return _read_record(bundle).prefixes


def check_name(name: str) -> None:
    """Raise UsageError unless a name can be that of a file."""
    if _NAME.fullmatch(name) is None:
        wanted = "letters, digits, ., _ and -, 64 at most"
        raise UsageError("name", got=repr(name), expected=wanted, fix="Give another --name.")


def add_baked(bundle: Path, name: str, engine: str, tokens: Sequence[int], store: PrefixStore) -> BakedPrefix:
    """Put a sequence that a store holds into a bundle; a prefix of the same name and engine is replaced.

    Raises:
        UsageError: a name that is no plain file name, or a store that could not hold the sequence.
        BundleError: the folder cannot be written.
    """
    check_name(name)
    match = store.match(tokens)
    if match.tokens < len(tokens):
        wanted, fix = f"room for {len(tokens)}", "Free some memory."
        raise UsageError("prefix store", got=f"room for {match.tokens} tokens", expected=wanted, fix=fix)
    tensors: dict[str, Rows] = {_TOKENS: np.array(tokens, np.int64)}
    for number in range(len(store.groups)):
        blocks = [store.block(block, number) for block in match.block_ids(number)]
        unused = -len(tokens) % store.config.tokens_per_block
        rows = np.concatenate(blocks, axis=1)
        tensors[_group(number)] = np.ascontiguousarray(rows[:, : rows.shape[1] - unused])
    store.release(match)
    entry = BakedPrefix(
        name=name, engine=engine, tokens=len(tokens), file=f"{name}-{engine}.safetensors", fingerprint=store.fingerprint
    )
    kept = [each for each in baked_prefixes(bundle) if (each.name, each.engine) != (name, engine)]
    with atomic_directory(bundle / FOLDER, force=True, marker=RECORD) as folder:
        _copy(bundle, kept, folder)
        save_file(tensors, folder / entry.file)
        _write_record(folder, [*kept, entry])
    return entry


def remove_baked(bundle: Path, name: str | None, engine: str | None = None) -> list[BakedPrefix]:
    """Take prefixes out of a bundle: those of a name (None: all) and an engine (None: any); returns them.

    Raises:
        UsageError: there is none of that name.
        BundleError: the record is broken, or the folder cannot be written.
    """
    held = baked_prefixes(bundle)
    gone = [each for each in held if name in (None, each.name) and engine in (None, each.engine)]
    if not gone:
        found = ", ".join(each.name for each in held) or "no prefix"
        raise UsageError(f"prefix of {bundle}", got=found, expected=name or "one", fix="See edgekv prefix ls.")
    with atomic_directory(bundle / FOLDER, force=True, marker=RECORD) as folder:
        kept = [each for each in held if each not in gone]
        _copy(bundle, kept, folder)
        _write_record(folder, kept)
    return gone


def load_baked(bundle: Bundle, store: PrefixStore, engine: str) -> int:
    """Put the prefixes of a bundle that an engine has computed into a store, to be kept longest.

    Returns:
        Their tokens.

    Raises:
        BundleError: a file is missing or changed, or was baked for another bundle.
    """
    record = _read_record(bundle.path)
    tokens = 0
    for entry in record.prefixes:
        if entry.engine == engine:
            said, rows = _read_rows(bundle.path / FOLDER / entry.file, record, entry, store)
            store.insert(said, rows, retention=_KEPT_LONGEST, ended=True, public=True)
            tokens += len(said)
    return tokens


def _read_rows(path: Path, record: BakedRecord, entry: BakedPrefix, store: PrefixStore) -> tuple[list[int], _BakedRows]:
    fix = "Bake it again: edgekv prefix bake BUNDLE FILE"
    if entry.fingerprint != store.fingerprint:
        raise BundleError(str(path), got="a prefix of another bundle", expected="one of this bundle", fix=fix)
    wanted = record.files.get(entry.file)
    if wanted is None or not path.is_file() or sha256_of(path) != wanted.sha256:
        raise BundleError(str(path), got="a missing or changed file", expected="the file baked", fix=fix)
    try:
        held = load_file(path)
        groups = [held[_group(number)] for number in range(len(store.groups))]
        tokens: list[int] = held[_TOKENS].tolist()
    except (SafetensorError, KeyError) as error:
        raise BundleError(str(path), got=error, expected="the rows of each group", fix=fix) from None
    return tokens, _BakedRows(len(tokens), groups)


def _group(number: int) -> str:
    return f"group_{number}"


def _copy(bundle: Path, entries: Sequence[BakedPrefix], folder: Path) -> None:
    for entry in entries:
        shutil.copyfile(bundle / FOLDER / entry.file, folder / entry.file)


def _write_record(folder: Path, entries: list[BakedPrefix]) -> None:
    record = BakedRecord(format=FORMAT, prefixes=entries, files=record_files(folder))
    (folder / RECORD).write_bytes(readable_json(record))


def _read_record(bundle: Path) -> BakedRecord:
    file = bundle / FOLDER / RECORD
    fix = f"Remove {bundle / FOLDER} and bake again."
    try:
        record = msgspec.json.decode(file.read_bytes(), type=BakedRecord)
    except FileNotFoundError:
        return BakedRecord(format=FORMAT, prefixes=[], files={})
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BundleError(str(file), got=error, expected="the record of prefixes", fix=fix) from None
    if record.format != FORMAT:
        raise BundleError(f"{file}: format", got=record.format, expected=FORMAT, fix=fix)
    if wrong := [each.file for each in record.prefixes if Path(each.file).name != each.file]:
        raise BundleError(str(file), got=wrong[0], expected="a file in the folder", fix=fix)
    return record
