"""Decoders of JSON by type, for any thread.

msgspec analyses a Struct when it is first decoded. Two threads that do so at the same time end the process with SIGSEGV
(msgspec 0.22: the second one decodes by what the first has not filled in yet). So each type is analysed under a lock.
"""

from __future__ import annotations

from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

T = TypeVar("T")

_LOCK = Lock()


class _Decoders(dict[Any, msgspec.json.Decoder[Any]]):
    """Makes a decoder when it is first asked for."""

    if TYPE_CHECKING:

        def __getitem__(self, kind: type[T], /) -> msgspec.json.Decoder[T]: ...

    def __missing__(self, kind: Any) -> msgspec.json.Decoder[Any]:
        with _LOCK:
            if (decoder := self.get(kind)) is None:
                decoder = self[kind] = msgspec.json.Decoder(kind)
        return decoder


DECODERS = _Decoders()
"""The decoder of each type: `DECODERS[kind].decode(raw)`."""


def analysed(kind: type[T]) -> type[T]:
    """A type that msgspec has analysed, for what `DECODERS` does not decode."""
    _ = DECODERS[kind]
    return kind


def convert(value: object, kind: type[T], *, strict: bool = True, from_attributes: bool = False) -> T:
    """`msgspec.convert`, of a type that is analysed.

    Raises:
        msgspec.ValidationError: the value is no such object.
    """
    return msgspec.convert(value, analysed(kind), strict=strict, from_attributes=from_attributes)
