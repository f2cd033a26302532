"""Stores, sequences and rows for the tests of the prefix cache."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from edgekv.kv import RowSpec
from edgekv.prefix import GroupRows, Match, PrefixStore, RetentionPolicy, StoreConfig, TokenRangeRetentionConfig
from edgekv.prefix.rows import Rows
from edgekv.prefix.table import Row, Table, file_name

GEOMETRY = RowSpec(layers=1, kv_heads=1, head_dim=2, window=64)
STEP = 2
TOKEN_BYTES = GEOMETRY.tensors * GEOMETRY.row_bytes
BLOCK_BYTES = STEP * TOKEN_BYTES
LARGE = 32 * BLOCK_BYTES
LONG = tuple(range(12))

Tokens = tuple[int, ...]


def rows_of(tokens: Tokens, salt: str | None = None, geometry: RowSpec = GEOMETRY) -> Rows:
    """Rows that differ for every beginning and salt, as real keys and values do."""
    rows = np.empty((geometry.tensors, len(tokens), geometry.head_dim), np.uint8)
    digest = zlib.crc32(repr(salt).encode())
    places = np.arange(geometry.tensors * geometry.head_dim, dtype=np.uint64).reshape(geometry.tensors, -1)
    for place, token in enumerate(tokens):
        digest = zlib.crc32(token.to_bytes(4, "little"), digest)
        rows[:, place] = (places * 0x9E3779B1 + digest) >> np.uint64(5) & np.uint64(255)
    return rows


def source(tokens: Tokens, salt: str | None = None, first: int = 0) -> GroupRows:
    """The rows of a sequence from a token on, for a store of one group."""
    return GroupRows([rows_of(tokens, salt)[:, first:]], [first])


def split(store: PrefixStore, rows: Rows) -> list[Rows]:
    """Rows of all tensors, one head a layer, by the store's groups."""
    layers = [group.geometry.numbers or range(group.geometry.layers) for group in store.groups]
    return [rows[[2 * layer + kind for layer in each for kind in (0, 1)]] for each in layers]


def fetch(store: PrefixStore, match: Match) -> list[Rows]:
    """A copy of the rows of a match, by group; 0 outside of a limited window."""
    rows = [np.zeros(group.shape(match.tokens), np.uint8) for group in store.groups]
    store.restore(match, GroupRows(rows))
    return rows


def store_of(blocks: int, **changes: object) -> PrefixStore:
    """A store in memory of so many blocks, each of two tokens."""
    config = StoreConfig(**{"tokens_per_block": STEP, "max_bytes": blocks * BLOCK_BYTES, **changes})  # type: ignore[arg-type]
    return PrefixStore(GEOMETRY, config)


def opened(folder: Path, fingerprint: str = "weights", **changes: object) -> PrefixStore:
    """A store on a folder."""
    given = {"tokens_per_block": STEP, "max_bytes": LARGE, "disk_folder": folder}
    return PrefixStore(GEOMETRY, StoreConfig(**{**given, **changes}), fingerprint=fingerprint)  # type: ignore[arg-type]


def insert(store: PrefixStore, tokens: Tokens, priority: int | None = None, salt: str | None = None) -> int:
    """Store a sequence at a priority."""
    policy = None if priority is None else RetentionPolicy((TokenRangeRetentionConfig(0, None, priority),))
    return store.insert(tokens, source(tokens, salt), retention=policy, salt=salt)


def found(store: PrefixStore, tokens: Tokens, salt: str | None = None) -> int:
    """The length of a match, whose rows are checked."""
    match = store.match(tokens, salt)
    np.testing.assert_array_equal(fetch(store, match)[0], rows_of(tokens[: match.tokens], salt))
    return match.tokens


def saved(folder: Path, tokens: Tokens = LONG, salt: str | None = None) -> list[Path]:
    """The files of a sequence in its order, written by a store that is gone."""
    store = opened(folder)
    before = {row.key for row in table_rows(folder)}
    store.insert(tokens, source(tokens, salt), salt=salt)
    store.save()
    store.close()
    return [folder / file_name((row.key, row.part)) for row in table_rows(folder) if row.key not in before]


def table_rows(folder: Path) -> list[Row]:
    """The rows of a folder's table, the first blocks of sequences first."""
    table = Table(folder)
    try:
        return table.rows()
    finally:
        table.close()


def files(folder: Path) -> dict[str, int]:
    """Names and sizes of the block files."""
    return {path.name: path.stat().st_size for path in folder.rglob("*.safetensors")}


def audit(folder: Path, limit_bytes: int | None = None, *, whole: bool = True) -> None:
    """The laws of a folder: a row for each file, no more bytes than allowed, and a parent for each chained row.

    The last one holds if nothing was damaged or removed by hand; then `whole`.
    """
    rows = table_rows(folder)
    assert files(folder) == {file_name((row.key, row.part)): row.size_bytes for row in rows}
    held = {(row.key, row.part) for row in rows}
    assert not whole or not [row for row in rows if row.chained and row.start and (row.parent, row.part) not in held]
    if limit_bytes is not None:
        assert sum(row.size_bytes for row in rows) <= limit_bytes


def drawn(seed: int) -> Iterator[Tokens]:
    """Sequences of which many begin alike."""
    draw = random.Random(seed)
    while True:
        begin = draw.randrange(12)
        yield tuple(begin * 100 + i for i in range(8)) + tuple(
            draw.randrange(1000) for _ in range(draw.randrange(1, 24))
        )


def work(folder: Path, seed: int, disk_bytes: int) -> None:
    """Match, insert and save until killed; each line says that what was drawn up to a number is saved."""
    store = opened(folder, max_bytes=40 * STEP * TOKEN_BYTES, disk_cache_size=disk_bytes)
    for number, tokens in enumerate(drawn(seed)):
        match = store.match(tokens)
        assert np.array_equal(fetch(store, match)[0], rows_of(tokens[: match.tokens]))
        if store.insert(tokens, source(tokens), ended=True) < len(tokens):
            raise AssertionError("the memory is large enough")
        store.save()
        print(number, flush=True)
