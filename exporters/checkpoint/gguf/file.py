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
        self._fields: Mapping[str, Any] = parts[0].fields
        self.blocks: Mapping[str, Block] = joined(parts)
        self.architecture = self.text("general.architecture")

    def __contains__(self, key: str) -> bool:
        return self._key(key) in self._fields

    def text(self, key: str, default: str | None = None) -> str:
        """A string of the metadata.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, str):
            return value
        raise self.refusal(key, "a string", value)

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number of the metadata; float32 is read as its shortest decimal, 1e-05 rather than 9.99999974e-06.

        Raises:
            CheckpointError: it is missing without a default, or of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, (int, float, np.integer, np.floating)) and math.isfinite(value):
            single = np.float32(value)
            return float(str(single)) if float(single) == value else float(value)
        raise self.refusal(key, "a number", value)

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number of the metadata; for a list with one entry per layer, the entry that all layers share.

        Layers without heads, which have a 0, do not count.

        Raises:
            CheckpointError: it is missing without a default, of another type, or differs between layers.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, list) and len(shared := {each for each in value if each}) == 1:
            value = shared.pop()
        if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
            return int(value)
        raise self.refusal(key, "a whole number", value)

    def sizes(self, key: str, layers: int) -> list[int]:
        """A whole number of the metadata for each layer, from a list or from one that all share.

        Raises:
            CheckpointError: it is missing, of another type, or a list of another length.
        """
        value = self._fields.get(self._key(key))
        if not isinstance(value, list):
            return [self.size(key)] * layers
        if len(value) == layers and all(isinstance(each, (int, np.integer)) for each in value):
            return [int(each) for each in value]
        raise self.refusal(key, f"a whole number for each of {layers} layers", value)

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false of the metadata.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._fields.get(self._key(key), default)
        if isinstance(value, (bool, np.bool_)):
            return bool(value)
        raise self.refusal(key, "true or false", value)

    def list(self, key: str) -> list[Any]:
        """A list of the metadata; empty if it is missing.

        Raises:
            CheckpointError: it is of another type.
        """
        value = self._fields.get(self._key(key), [])
        if isinstance(value, list):
            return value
        raise self.refusal(key, "a list", value)

    def refusal(self, key: str, expected: str, value: object) -> CheckpointError:
        """The error that refuses a metadata field."""
        got = "nothing" if value is None else repr(value)[:80]
        return CheckpointError(
            f"{self.path.name}: {self._key(key)}",
            got=got,
            expected=expected,
            fix="Convert the model again with a current llama.cpp, or start from its safetensors.",
        )

    def _key(self, key: str) -> str:
        """Keys that start with a dot belong to the architecture: `.block_count` is `llama.block_count`."""
        return f"{self.architecture}{key}" if key.startswith(".") else key
