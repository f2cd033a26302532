"""Tokens as bytes, and the chain of keys that names the blocks of a sequence."""

from __future__ import annotations

import secrets
import sys
from array import array
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

SECRET_BYTES = 32
KEY_BYTES = 16
TOKEN_BYTES = 8
MAX_TOKEN = 2**64 - 1


def token_bytes(tokens: Iterable[int]) -> bytes:
    """Tokens as big-endian 64-bit integers, as wide as the hashes that name rows of pictures: bytes sort as tokens do.

    ValueError if one is out of range.
    """
    try:
        held = array("Q", tokens.tolist() if isinstance(tokens, np.ndarray) else tokens)
    except OverflowError:
        raise ValueError(f"tokens: got one out of range; expected 0 to {MAX_TOKEN}") from None
    if sys.byteorder == "little":
        held.byteswap()
    return held.tobytes()


def common_tokens(one: bytes, other: bytes) -> int:
    """Number of equal leading tokens."""
    size = min(len(one), len(other))
    difference = int.from_bytes(one[:size]) ^ int.from_bytes(other[:size])
    return (size - -(-difference.bit_length() // 8)) // TOKEN_BYTES


class Link(NamedTuple):
    """One block of a sequence.

    Attributes:
        key: names the block: a hash of everything before it and its own tokens.
        parent: key of the block before it, or the root.
        tokens: its own ones; see `token_bytes`.
        start: position of its first token.
    """

    key: bytes
    parent: bytes
    tokens: bytes
    start: int

    @property
    def end(self) -> int:
        """Position after its last token."""
        return self.start + len(self.tokens) // TOKEN_BYTES


class Keys:
    """Keyed hashes, which can be neither computed nor guessed without the secret.

    A block's key is H(parent's key, its own tokens). The chain begins at a root, which is a hash of the model's
    fingerprint, the salt and the adapter, so equal keys mean equal rows, and different salts share no key. One chain
    serves all groups of layers: a block is stored as its key and the number of the group.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._new_block = blake2b(key=self._secret, digest_size=KEY_BYTES, person=b"block")

    def root(self, layout: bytes, salt: str | None, adapter: str | None = None) -> bytes:
        """The root of all sequences of one salt and one adapter; None counts as a separate one."""
        named = [b"" if name is None else b"=" + name.encode("utf-8", "surrogatepass") for name in (salt, adapter)]
        return self.digest(b"root", layout, *named)

    def link(self, parent: bytes, tokens: bytes, start: int) -> Link:
        digest = self._new_block.copy()
        digest.update(parent + tokens)
        return Link(digest.digest(), parent, tokens, start)

    def chain(self, root: bytes, tokens: bytes, step: int) -> list[Link]:
        """The full blocks of a sequence."""
        links, parent, size = [], root, step * TOKEN_BYTES
        for at in range(0, len(tokens) - size + 1, size):
            links.append(self.link(parent, tokens[at : at + size], at // TOKEN_BYTES))
            parent = links[-1].key
        return links

    def digest(self, purpose: bytes, *parts: bytes | memoryview) -> bytes:
        """A hash of several parts, for one purpose."""
        digest = blake2b(key=self._secret, digest_size=KEY_BYTES, person=purpose)
        for part in parts:
            digest.update(memoryview(part).nbytes.to_bytes(8, "little"))
            digest.update(part)
        return digest.digest()


def tail(links: Sequence[Link], root: bytes) -> bytes:
    """The key that a block after these has as its parent."""
    return links[-1].key if links else root
