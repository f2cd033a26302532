"""API keys: who may use the server, and whose prefixes are whose."""

from __future__ import annotations

import hmac
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from edgekv.errors import UsageError
from edgekv.system import read_file

KEY_VARIABLE = "EDGEKV_API_KEY"
"""The environment variable with an accepted key."""
_LONGEST_FILE_BYTES = 1 << 20
_VISIBLE = "visible ASCII characters without spaces"


class ApiKeys:
    """The accepted keys. Only their hashes are kept."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def are_required(self) -> bool:
        """Whether a request needs a key."""
        return bool(self._digests)

    def salt(self, authorization: bytes | None) -> str | None:
        """The cache salt of a request's key; None if the key is not accepted.

        Every key is compared, each in constant time, so that the time tells nothing.

        Args:
            authorization: the header's value, `Bearer KEY`; None if there is none.
        """
        scheme, _, key = (authorization or b"").partition(b" ")
        given = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        return sha256(b"edgekv cache salt" + given).hexdigest() if any(matches) else None


def accepted_keys(key: str | None, file: Path | None) -> tuple[str, ...]:
    """The keys of a server: one that the command line or the environment gives, and those of a file.

    Raises:
        UsageError: an empty key, one with characters that a header cannot have, or a file without keys.
    """
    if key is not None and not _is_visible(key):
        # The key itself is a secret, so the message does not have it.
        found = "other characters" if key else "an empty key"
        fix = f"Correct --api-key, or the environment variable {KEY_VARIABLE}."
        raise UsageError("API key", got=found, expected=_VISIBLE, fix=fix)
    return (*(() if key is None else (key,)), *(() if file is None else read_keys(file)))


def read_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line; empty lines and lines that begin with # are left out.

    Raises:
        UsageError: it cannot be read, has no key, or one with characters that a header cannot have.
    """
    fix = "Write one key a line."
    try:
        lines = read_file(path, _LONGEST_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "no UTF-8 text"
        raise UsageError(str(path), got=reason, expected="a file of API keys", fix=fix) from None
    keys = tuple(key for line in lines if (key := line.strip()) and not key.startswith("#"))
    for number, key in enumerate(keys, 1):
        if not _is_visible(key):
            raise UsageError(f"{path}: key {number}", got="other characters", expected=_VISIBLE, fix=fix)
    if not keys:
        raise UsageError(str(path), got="no key", expected="at least one", fix=fix)
    return keys


def _is_visible(key: str) -> bool:
    return key != "" and key.isascii() and key.isprintable() and " " not in key


def _digest(key: bytes) -> bytes:
    return sha256(key).digest()
