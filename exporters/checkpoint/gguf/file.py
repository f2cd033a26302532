"""A GGUF file: typed access to its metadata and tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf.part import Block
from exporters.checkpoint.gguf.split import joined, open_parts

_SHOWN = 8  # entries of a list in an error
_LONGEST = 80  # characters of a value in an error


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file that was given.
        parts: all files of the model, in order.
        architecture: `general.architecture`, such as `llama`.
        blocks: every tensor by its name.
    """

    def __init__(self, path: Path) -> None:
        """Read the metadata and map the tensors; of a split file, those of all parts.

        Raises:
            CheckpointError: a file is truncated, damaged, of another version or byte order, a part is missing or of
                another model, or `gguf` is missing.
        """
        parts = open_parts(path)
        self.path = path
        self.parts = tuple(part.path for part in parts)
        self._read: set[str] = set()
        self._fields: Mapping[str, Any] = parts[0].fields
        self.blocks: Mapping[str, Block] = joined(parts)
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._fields

    @property
    def unread(self) -> dict[str, Any]:
        """The metadata that no method has read yet, by key."""
        return {key: value for key, value in self._fields.items() if key not in self._read}

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._value(key, default)
        if isinstance(value, str):
            return value
        raise self.refusal(key, "a string", value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata; float32 is read as its shortest decimal, 1e-05 rather than 9.99999974e-06.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._value(key, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _is_finite(value):
            single = np.float32(value)
            return float(str(single)) if float(single) == value else float(value)
        raise self.refusal(key, "a number", value)

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of the metadata.

        Raises:
            CheckpointError: it is missing without a default, of another type, or less than `least`.
        """
        value = self._value(key, default)
        if _is_whole(value) and value >= least:
            return int(value)
        raise self.refusal(key, f"a whole number of at least {least}", value)

    def sizes(self, key: str, layers: int, default: int | None = None, *, least: int = 1) -> list[int]:
        """A whole number of the metadata for each layer, from a list or from one that all share.

        Raises:
            CheckpointError: it is missing without a default, of another type, less than `least`, or a list of another
                length.
        """
        value = self._value(key, default)
        if not isinstance(value, list):
            return [self.size(key, default, least=least)] * layers
        if len(value) == layers and all(_is_whole(number) and number >= least for number in value):
            return value
        raise self.refusal(key, f"a whole number of at least {least} for each of {layers} layers", value)

    def shared_size(self, key: str, layers: int, default: int | None = None) -> int:
        """A whole number above 0 of the metadata that all layers share, from a list or one number.

        Raises:
            CheckpointError: it is missing without a default, of another type, or differs between layers.
        """
        sizes = self.sizes(key, layers, default)
        if len(set(sizes)) == 1:
            return sizes[0]
        raise self.refusal(key, "the same for all layers", sizes)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false of the metadata.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._value(key, default)
        if isinstance(value, bool):
            return value
        raise self.refusal(key, "true or false", value)

    def entries(self, key: str) -> list[Any]:
        """A list of the metadata; empty if it is missing.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._value(key, [])
        if isinstance(value, list):
            return value
        raise self.refusal(key, "a list", value)

    def one_or_more(self, key: str) -> list[Any]:
        """The entries of a list of the metadata, or its only value; empty if it is missing."""
        value = self._value(key, [])
        return value if isinstance(value, list) else [value]

    def texts(self, key: str) -> list[str]:
        """A list of strings of the metadata; empty if it is missing.

        Raises:
            CheckpointError: it is of another type.
        """
        strings = self.entries(key)
        if all(isinstance(text, str) for text in strings):
            return strings
        raise self.refusal(key, "a list of strings", strings)

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """True or false of the metadata for each layer; None if it is missing or no list.

        Raises:
            CheckpointError: the list is of another length, or of other types.
        """
        value = self._value(key, None)
        if not isinstance(value, list):
            return None
        if len(value) == layers and all(isinstance(flag, bool) for flag in value):
            return value
        raise self.refusal(key, f"true or false for each of {layers} layers", value)

    def refusal(self, key: str, expected: str, value: object) -> CheckpointError:
        """The error that refuses a metadata field."""
        got = "nothing" if value is None else short(value)
        return CheckpointError(
            f"{self.path.name}: {self._key(key)}",
            got=got,
            expected=expected,
            fix="Convert the model again with a current llama.cpp, or start from its safetensors.",
        )

    def _value(self, key: str, default: object) -> Any:
        """A value as the file has it; it counts as read from now on."""
        self._read.add(self._key(key))
        return self._fields.get(self._key(key), default)

    def _key(self, key: str) -> str:
        """Keys that start with a dot belong to the architecture: `.block_count` is `llama.block_count`."""
        return f"{self.architecture}{key}" if key.startswith(".") else key


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False


def short(value: object) -> str:
    """The beginning of a value: a list may have a million entries."""
    shown = repr(value[:_SHOWN])[:-1] + ", ...]" if isinstance(value, list) and len(value) > _SHOWN else repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
