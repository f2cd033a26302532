"""Prefixes stored in a bundle's folder `prefixes`."""

from __future__ import annotations

import errno
import hashlib
import os
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec
import numpy as np

from edgekv.bundle import Bundle
from edgekv.bundle.files import is_plain_path
from edgekv.errors import BundleError, UsageError
from edgekv.kv.arena import DTYPES
from edgekv.machine.json_file import read_json, readable_json
from edgekv.machine.scratch import atomic_file, remove_abandoned
from edgekv.machine.system import read_file
from edgekv.machine.tensor_file import TensorFileError, decode_tensors, encode_tensors
from edgekv.prefix.retention import MAX_PRIORITY, RetentionPolicy, TokenRangeRetentionConfig
from edgekv.prefix.rows import GroupRows, Rows
from edgekv.prefix.store import PrefixStore, Snapshot

FOLDER = "prefixes"
RECORD = "prefixes.json"
_LOCK = ".lock"
_LONGEST_WAIT_S = 60.0
FORMAT = 2
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_TOKENS = "tokens"
_GROUP = "group_"
_LARGEST_TOKEN = 2**32 - 1  # above every vocabulary: baked prefixes have no pictures
_STATE = "state/"
_OWN = re.compile(r"[0-9a-f]{8}\..+\.safetensors")  # other files are others'
# Rows of a limited window are stored from the start of a block, for stores with blocks of this size or smaller.
BAKED_TOKENS_PER_BLOCK = 32
_KEPT_LONGEST = RetentionPolicy((TokenRangeRetentionConfig(0, None, MAX_PRIORITY),))


class BakedPrefix(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One prefix of a bundle.

    Attributes:
        name: unique for the engine.
        engine: the engine that computed the prefix; only this engine may use it.
        tokens: number of tokens.
        fingerprint: hash of everything else that determines the rows; see `prefix_fingerprint`.
        file: its keys and values, in the folder `prefixes`.
        bytes: size of the file.
        sha256: hash of the file.
    """

    name: str
    engine: str
    tokens: int
    fingerprint: str
    file: str
    bytes: int
    sha256: str

    def is_meant(self, name: str | None, engine: str | None) -> bool:
        """Whether it has a name and an engine; None for any."""
        return name in (None, self.name) and engine in (None, self.engine)


class BakedRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`prefixes.json`: the version of this layout, and the prefixes in the order in which they were baked."""

    format: int = FORMAT
    prefixes: list[BakedPrefix]


def baked_prefixes(bundle: Path) -> list[BakedPrefix]:
    """The prefixes of a bundle's folder.

    Raises:
        BundleError: `prefixes.json` is invalid or has another format version.
    """
    file = bundle / FOLDER / RECORD
    fix = f"Remove {bundle / FOLDER} and bake again."
    if not os.path.lexists(file):
        return []
    record = read_json(file, BakedRecord, expected=f"the record of prefixes, format {FORMAT}", fix=fix)
    if record.format != FORMAT:
        raise BundleError(f"{file}: format", got=record.format, expected=FORMAT, fix=fix)
    if wrong := [prefix.file for prefix in record.prefixes if not is_plain_path(prefix.file) or "/" in prefix.file]:
        raise BundleError(str(file), got=repr(wrong[0]), expected="a file in the folder", fix=fix)
    return record.prefixes


def check_name(name: str) -> None:
    """Raise UsageError if the name is not a plain file name."""
    if _NAME.fullmatch(name) is None:
        expected = "letters, digits, ., _ and -, 64 at most"
        raise UsageError("name", got=repr(name), expected=expected, fix="Give another --name.")


def add_baked(bundle: Path, name: str, engine: str, tokens: Sequence[int], store: PrefixStore) -> BakedPrefix:
    """Write a stored sequence into a bundle, replacing a prefix of the same name and engine.

    Raises:
        UsageError: a name that is not a plain file name, or a store that could not hold the sequence.
        BundleError: the folder cannot be written.
    """
    check_name(name)
    tensors = _tensors(tokens, store)
    with _changing(bundle) as record:
        kept = [prefix for prefix in record.prefixes if (prefix.name, prefix.engine) != (name, engine)]
        content = encode_tensors(tensors)
        digest = hashlib.sha256(content).hexdigest()
        # A unique name: the old file stays intact until the record names the new one.
        file = f"{digest[:8]}.{name}-{engine}.safetensors"
        with atomic_file(bundle / FOLDER / file) as partial:
            partial.write_bytes(content)
        entry = BakedPrefix(
            name=name,
            engine=engine,
            tokens=len(tokens),
            fingerprint=store.fingerprint,
            file=file,
            bytes=len(content),
            sha256=digest,
        )
        _replace_record(bundle, BakedRecord(prefixes=[*kept, entry]))
    return entry


def _tensors(tokens: Sequence[int], store: PrefixStore) -> dict[str, Rows]:
    """The tokens, the rows that a store has for them, by group, and the states after them."""
    match = store.match(tokens)
    if match.tokens < len(tokens):
        expected, fix = f"room for {len(tokens)}", "Free some memory."
        raise UsageError("prefix store", got=f"room for {match.tokens} tokens", expected=expected, fix=fix)
    tensors: dict[str, Rows] = {_TOKENS: np.array(tokens, np.int64)}
    step = store.config.tokens_per_block
    for number, blocks in enumerate(match.rows):
        in_last = (len(tokens) - 1) % step + 1
        rows = np.concatenate([*blocks[:-1], blocks[-1][:, :in_last]], axis=1)
        tensors[f"{_GROUP}{number}"] = np.ascontiguousarray(rows)
    if match.states is not None:
        tensors |= {f"{_STATE}{name}": array for name, array in match.states.arrays.items()}
    return tensors


def remove_baked(bundle: Path, name: str | None, engine: str | None = None) -> list[BakedPrefix]:
    """Remove the prefixes of a name (None: all) and an engine (None: any) from a bundle; returns them.

    Raises:
        UsageError: no prefix has that name.
        BundleError: the record is broken, or the folder cannot be written.
    """
    held = baked_prefixes(bundle)
    if not any(prefix.is_meant(name, engine) for prefix in held):
        got = (repr(name) if name else "any name") + (f" on {engine}" if engine else "")
        expected = (
            f"one of {', '.join(f'{prefix.name} ({prefix.engine})' for prefix in held)}" if held else "a baked prefix"
        )
        raise UsageError(f"prefix of {bundle}", got=got, expected=expected, fix="See edgekv prefix ls.")
    with _changing(bundle) as record:
        gone = [prefix for prefix in record.prefixes if prefix.is_meant(name, engine)]
        _replace_record(bundle, BakedRecord(prefixes=[prefix for prefix in record.prefixes if prefix not in gone]))
    return gone


def load_baked(bundle: Bundle, store: PrefixStore, engine: str) -> None:
    """Load the prefixes of a bundle for an engine into a store, at the highest priority.

    Raises:
        BundleError: a file is missing or changed, or was baked for another bundle.
    """
    while True:
        baked = baked_prefixes(bundle.path)
        try:
            read = [_read_rows(bundle.path / FOLDER, prefix, store) for prefix in baked if prefix.engine == engine]
            break
        except BundleError:
            if baked_prefixes(bundle.path) == baked:  # otherwise a concurrent bake has replaced the file
                raise
    for tokens, rows, snapshot in read:
        store.publish(tokens)
        store.insert(tokens, rows, retention=_KEPT_LONGEST, ended=True, snapshot=snapshot)


def _read_rows(folder: Path, entry: BakedPrefix, store: PrefixStore) -> tuple[list[int], GroupRows, Snapshot | None]:
    path = folder / entry.file
    fix = "Bake it again: edgekv prefix bake BUNDLE FILE"
    if entry.fingerprint != store.fingerprint:
        raise BundleError(str(path), got="a prefix of another bundle", expected="one of this bundle", fix=fix)
    try:
        content = read_file(path, entry.bytes)
    except OSError:
        content = b""
    if hashlib.sha256(content).hexdigest() != entry.sha256:
        raise BundleError(str(path), got="a missing or changed file", expected="the file baked", fix=fix)
    try:
        held = decode_tensors(content).arrays
        groups = [held[f"{_GROUP}{number}"] for number in range(len(store.groups))]
        tokens = held[_TOKENS]
    except (TensorFileError, KeyError) as error:
        raise BundleError(str(path), got=error, expected="the rows of each group", fix=fix) from None
    is_right = tokens.dtype == np.int64 and tokens.shape == (entry.tokens,) and entry.tokens > 0
    if not is_right or tokens.min() < 0 or tokens.max() > _LARGEST_TOKEN:
        got, expected = f"{tokens.dtype} {list(tokens.shape)}", f"{entry.tokens} ids from 0 to {_LARGEST_TOKEN}"
        raise BundleError(f"{path}: tokens", got=got, expected=expected, fix=fix)
    for number, (rows, group) in enumerate(zip(groups, store.groups, strict=True)):
        min_rows = entry.tokens - group.first_needed(entry.tokens)
        shape = group.shape(entry.tokens)
        is_right = rows.ndim == 3 and (rows.shape[0], rows.shape[2]) == (shape[0], shape[2])
        if not is_right or rows.dtype != DTYPES[group.geometry.kv_dtype] or not min_rows <= rows.shape[1] <= shape[1]:
            got = f"{rows.dtype} {list(rows.shape)}"
            expected_rows = f"{group.geometry.kv_dtype} {list(shape)}, or the newest {min_rows} rows of it"
            raise BundleError(f"{path}: group {number}", got=got, expected=expected_rows, fix=fix)
    states = {name.removeprefix(_STATE): state for name, state in held.items() if name.startswith(_STATE)}
    if bool(states) != store.snapshots:
        raise BundleError(f"{path}: states", got=sorted(states), expected="those of the model", fix=fix)
    source = GroupRows(groups, [entry.tokens - rows.shape[1] for rows in groups])
    return tokens.tolist(), source, Snapshot(entry.tokens, states) if states else None


@contextmanager
def _changing(bundle: Path) -> Iterator[BakedRecord]:
    """The record, locked against changes by other processes.

    Raises:
        BundleError: the record is broken, or the folder cannot be written.
    """
    folder = bundle / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        with locked(folder / _LOCK):
            yield BakedRecord(prefixes=baked_prefixes(bundle))
    except OSError as error:
        fix = "Make the bundle's folder writable."
        raise BundleError(str(folder), got=error.strerror, expected="a writable folder", fix=fix) from None


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock between processes, which ends with its owner: that of an empty SQLite database.

    Raises:
        OSError: the file cannot be written, or another process holds the lock for a minute.
    """
    try:
        connection = sqlite3.connect(file, timeout=_LONGEST_WAIT_S, isolation_level=None)
        try:
            connection.execute("BEGIN EXCLUSIVE")
            yield
        finally:
            connection.close()
    except sqlite3.Error as error:
        reason = f"another process may hold its lock ({error}): end it, or use another folder"
        raise OSError(errno.EAGAIN, reason, str(file)) from None


def _replace_record(bundle: Path, record: BakedRecord) -> None:
    """Commit a change: replace the record, then remove files of prefixes that it no longer lists."""
    folder = bundle / FOLDER
    with atomic_file(folder / RECORD) as partial:
        partial.write_bytes(readable_json(record))
    remove_abandoned(folder)
    named = {entry.file for entry in record.prefixes}
    for path in folder.iterdir():
        if path.name not in named and _OWN.fullmatch(path.name) and path.is_file():
            with suppress(OSError):  # on Windows a reader may have it open; the next change removes it
                path.unlink()
