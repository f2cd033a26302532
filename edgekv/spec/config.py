"""A `config.json`, read field by field: what is missing or cannot be so is refused by name."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from edgekv.errors import CheckpointError

_CORRECT = "Correct config.json."


class Config:
    """The fields of a Hugging Face configuration, or of a table within it.

    Null stands for absent, but for the `optional` fields: there null is none, and absent the architecture's default.
    """

    def __init__(self, fields: Mapping[str, Any], path: str = "config.json") -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._none = {name for name, value in fields.items() if value is None}
        self._path = path

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __len__(self) -> int:
        return len(self._fields)

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number above 0.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._fields.get(name, default)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
        raise self.refusal(name, "a whole number above 0")

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number above 0, or None.

        Raises:
            CheckpointError: it is something else.
        """
        if name in self:
            return self.size(name)
        return None if name in self._none else default

    def count(self, name: str, default: int) -> int:
        """A whole number, 0 included.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._fields.get(name, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.size(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._fields.get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0:
            return float(value)
        raise self.refusal(name, "a number above 0")

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A finite number above 0, or None.

        Raises:
            CheckpointError: it is something else.
        """
        if name in self:
            return self.number(name)
        return None if name in self._none else default

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of so many finite numbers above 0.

        Raises:
            CheckpointError: it is something else or absent.
        """
        value = self._fields.get(name)
        if isinstance(value, list) and len(value) == count:
            return tuple(Config({name: each}, self._path).number(name) for each in value)
        found = f"{len(value)} numbers" if isinstance(value, list) else None
        raise self.refusal(name, f"{count} numbers", got=found)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._fields.get(name, default)
        if isinstance(value, bool):
            return value
        raise self.refusal(name, "true or false")

    def text(self, name: str, default: str | None = None) -> str:
        """A string.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._fields.get(name, default)
        if isinstance(value, str):
            return value
        raise self.refusal(name, "a string")

    def texts(self, name: str, count: int) -> tuple[str, ...]:
        """A list of so many strings.

        Raises:
            CheckpointError: it is something else or absent.
        """
        value = self._fields.get(name)
        if isinstance(value, list) and len(value) == count and all(isinstance(each, str) for each in value):
            return tuple(value)
        raise self.refusal(name, f"a list of {count} strings", got=f"{len(value)}" if isinstance(value, list) else None)

    def table(self, name: str) -> Config:
        """An object within the configuration; empty if it is absent.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._fields.get(name, {})
        if isinstance(value, dict):
            return Config(value, f"{self._path}: {name}")
        raise self.refusal(name, "a JSON object")

    def expect(self, name: str, value: object) -> None:
        """Accept a field that is absent or has this value.

        Raises:
            CheckpointError: it has another.
        """
        if self._fields.get(name, value) != value:
            raise self.refusal(name, repr(value), fix="This variant of the architecture cannot be exported.")

    def refusal(self, name: str, wanted: str, *, got: str | None = None, fix: str = _CORRECT) -> CheckpointError:
        """The error that refuses a field."""
        value = self._fields.get(name)
        shown = got or ("nothing" if value is None else repr(value))
        return CheckpointError(f"{self._path}: {name}", got=shown, expected=wanted, fix=fix)
