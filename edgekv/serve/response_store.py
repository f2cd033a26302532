"""Answers that later requests can continue."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import msgspec

from edgekv.serve.errors import ApiError
from edgekv.serve.response_records import ResponseRecord

MOST_BYTES = 64 << 20


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
    """The newest answers of each API key, in memory."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._held: OrderedDict[tuple[str | None, str], Stored] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._held)

    def add(self, salt: str | None, record: ResponseRecord, messages: tuple[dict[str, Any], ...]) -> None:
        """Keep an answer; the oldest ones go if there are too many."""
        size = len(msgspec.json.encode((record, messages)))
        if size > MOST_BYTES:
            return
        self._held[salt, record.id] = Stored(record, messages, size)
        self._bytes += size
        while len(self._held) > self._most or self._bytes > MOST_BYTES:
            _, oldest = self._held.popitem(last=False)
            self._bytes -= oldest.size_bytes

    def get(self, salt: str | None, name: str, param: str | None = None) -> Stored:
        """An answer of this key.

        Raises:
            ApiError: 404, there is none of this name.
        """
        found = self._held.get((salt, name))
        if found is None:
            message = f"response: got {name[:80]!r}; expected one that is stored. Send the whole conversation."
            raise ApiError(404, message, param=param, code="response_not_found")
        return found

    def remove(self, salt: str | None, name: str) -> None:
        """Forget an answer.

        Raises:
            ApiError: 404, there is none of this name.
        """
        self._bytes -= self.get(salt, name).size_bytes
        del self._held[salt, name]
