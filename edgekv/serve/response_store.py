"""Answers that later requests can continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from edgekv.serve.errors import ApiError
from edgekv.serve.response_records import ResponseRecord

MOST_BYTES = 64 << 20
"""Of all keys together, shared evenly."""
_LEAST_BYTES = 4 << 20
"""Of a key, however many there are: a conversation of the longest request."""


@dataclass(frozen=True, slots=True)
class Stored:
    """An answer and the conversation that it ends.

    Attributes:
        record: as it was sent.
        messages: of the conversation, with the answer and without instructions.
        size_bytes: about what they take.
    """

    record: ResponseRecord
    messages: tuple[dict[str, Any], ...]
    size_bytes: int


class ResponseStore:
    """The newest answers of each API key, in memory. No key takes the room of another."""

    def __init__(self, most: int, keys: int = 1) -> None:
        """Start with none.

        Args:
            most: answers of a key.
            keys: API keys that there are; without authentication all clients are one.
        """
        self._most = most
        self._most_bytes = max(_LEAST_BYTES, MOST_BYTES // max(keys, 1))
        self._held: dict[str | None, OrderedDict[str, Stored]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._held.values()))

    def add(self, salt: str | None, record: ResponseRecord, messages: tuple[dict[str, Any], ...]) -> None:
        """Keep an answer; the oldest ones of the key go if there are too many."""
        size = len(msgspec.json.encode((record, messages)))
        if size > self._most_bytes:
            return
        held = self._held.setdefault(salt, OrderedDict())
        held[record.id] = Stored(record, messages, size)
        while len(held) > self._most or sum(each.size_bytes for each in held.values()) > self._most_bytes:
            held.popitem(last=False)

    def get(self, salt: str | None, name: str, param: str | None = None) -> Stored:
        """An answer of this key.

        Raises:
            ApiError: 404, there is none of this name.
        """
        held = self._held.get(salt)
        found = None if held is None else held.get(name)
        if found is None:
            message = f"response: got {name[:80]!r}; expected one that is stored. Send the whole conversation."
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    def remove(self, salt: str | None, name: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: 404, there is none of this name.
        """
        self.get(salt, name)
        del self._held[salt][name]
