"""Keyed hashes: names for salts and sequences that reveal neither."""

from __future__ import annotations

import os
import secrets
from array import array
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from edgekv.prefix.errors import PrefixError
from edgekv.prefix.private import read_private, write_private

SECRET = "store.key"
SECRET_BYTES = 32
KEY_BYTES = 16


class Keys:
    """Names that can be neither computed nor guessed without the secret."""

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret

    def root(self, fingerprint: bytes, salt: str | None, adapter: str | None = None) -> bytes:
        """The key of all sequences of one salt and one adapter; None counts as a separate one."""
        said = b"" if salt is None else b"salt:" + salt.encode("utf-8", "surrogatepass")
        return self._hash(b"root", fingerprint, said, *(() if adapter is None else (adapter.encode(),)))

    def sequence(self, root: bytes, tokens: bytes) -> bytes:
        """The key of a token sequence under a root."""
        return self._hash(b"sequence", root, tokens)

    def checksum(self, parts: Iterable[bytes | memoryview]) -> bytes:
        """The checksum of a file's fields and bytes."""
        return self._hash(b"checksum", *parts)

    def _hash(self, purpose: bytes, *parts: bytes | memoryview) -> bytes:
        digest = blake2b(key=self._secret, digest_size=KEY_BYTES, person=purpose)
        for part in parts:
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as 64-bit integers."""
    return array("q", tokens).tobytes()


def tokens_of(data: bytes) -> tuple[int, ...]:
    """The tokens that `token_bytes` was given."""
    return tuple(array("q", data))


def folder_secret(folder: Path) -> bytes:
    """The folder's secret, created under the index's lock by the first store that opens the folder."""
    path = folder / SECRET
    if not os.path.lexists(path):
        fresh = path.with_name(f".{SECRET}.partial-{os.getpid()}")
        fresh.unlink(missing_ok=True)
        write_private(fresh, os.urandom(SECRET_BYTES))
        fresh.replace(path)
    secret = read_private(path, secret=True)
    if len(secret) != SECRET_BYTES:
        fix = "Remove the folder; its blocks cannot be verified any more."
        raise PrefixError(str(path), got=f"{len(secret)} bytes", expected=f"{SECRET_BYTES} bytes", fix=fix)
    return secret
