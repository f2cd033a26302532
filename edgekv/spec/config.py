"""The only reader of `config.json`: typed, bounded fields; errors name the missing or invalid field.

It notes which fields are read, so that a field which nothing reads is refused instead of ignored.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgekv.errors import CheckpointError
from edgekv.machine.system import read_file

CONFIG = "config.json"
JSON_BYTES = 1 << 24
"""Largest configuration that is read; the configurations of published models have a few kilobytes."""

LARGEST: Mapping[str, int] = {
    "num_hidden_layers": 1 << 14,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 22,
    "head_dim": 1 << 14,
    "vocab_size": 1 << 24,
    "max_position_embeddings": 1 << 28,
}
"""Upper bounds of sizes, above every published model. Work and memory grow with them, so they are checked first."""
_LARGEST_OTHER = (1 << 31) - 1
_SMALLEST_NUMBER, _LARGEST_NUMBER = 1e-30, 1e30

_CORRECT = "Correct config.json."


_LAYER_KINDS = {"attention": "full_attention", "mamba": "linear_attention"}
"""Names of kinds of layers in configurations of releases before transformers 5."""


@dataclass(frozen=True, slots=True)
class _ReadNames:
    """The names that were read of an object, and what was read of the objects within it."""

    names: set[str] = field(default_factory=set)
    tables: dict[str, _ReadNames] = field(default_factory=dict)


class Config:
    """The fields of a Hugging Face configuration, or of an object within it.

    Null means absent. The `optional` readers differ: there null means None, and absent means the default.
    """

    def __init__(self, fields: Mapping[str, Any], path: str = CONFIG, read: _ReadNames | None = None) -> None:
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._none = {name for name, value in fields.items() if value is None}
        self._path = path
        self._read = _ReadNames() if read is None else read

    def _get(self, name: str, default: object = None) -> Any:
        self._read.names.add(name)
        return self._fields.get(name, default)

    def __contains__(self, name: str) -> bool:
        return name in self._fields

    def __len__(self) -> int:
        return len(self._fields)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the fields."""
        return tuple(self._fields)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields that are not null, as they are."""
        return dict(self._fields)

    def is_given(self, name: str) -> bool:
        """Whether a field is there, null included."""
        return name in self._fields or name in self._none

    def ignore(self, *names: str) -> None:
        """Say of fields that they change nothing here."""
        self._read.names.update(names)

    def check_read(self, harmless: Collection[str] = (), off: Collection[str] = ()) -> None:
        """Check that every field was read or ignored, those of objects that were read included.

        Null and empty values count as absent.

        Args:
            harmless: further fields that change nothing, or endings of their names if they begin with `_`.
            off: flags that change nothing if they are false.

        Raises:
            CheckpointError: naming the first that was not: it may change what the model computes.
        """
        endings = tuple(name for name in harmless if name.startswith("_"))
        for path, name, value in self._unread():
            is_off = value is False and name in off
            if name not in harmless and not name.endswith(endings) and not is_off:
                raise CheckpointError(
                    f"{path}: {name}",
                    got=_short(value),
                    expected="a field that this architecture is known to have",
                    fix="It may change what the model computes. If it does not, remove it.",
                )

    def _unread(self) -> Iterator[tuple[str, str, object]]:
        """Path, name and value."""
        for name, value in self._fields.items():
            if name not in self._read.names:
                if value not in ([], {}, ""):
                    yield self._path, name, value
            elif isinstance(value, dict) and name in self._read.tables:
                yield from self.table(name)._unread()

    def size(self, name: str, default: int | None = None) -> int:
        """A whole number from 1 to the field's bound in `LARGEST`.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.refusal(name, "a whole number above 0")
        if value > (largest := LARGEST.get(name, _LARGEST_OTHER)):
            raise self.refusal(name, f"at most {largest}", got=_short(value))
        return value

    def edge(self, name: str, default: int) -> int:
        """The edge of a square: one size, or two that are equal.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name)
        if isinstance(value, list) and len(value) == 2 and value[0] == value[1]:
            return Config({name: value[0]}, self._path).size(name)
        return self.size(name, default)

    def optional_size(self, name: str, default: int | None = None) -> int | None:
        """A whole number above 0, or None.

        Raises:
            CheckpointError: it is something else.
        """
        self.ignore(name)
        return self.size(name) if name in self else None if name in self._none else default

    def count(self, name: str, default: int) -> int:
        """A whole number, 0 included.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name, default)
        return 0 if value == 0 and not isinstance(value, bool) else self.size(name, default)

    def number(self, name: str, default: float | None = None) -> float:
        """A number from 1e-30 to 1e30.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _in_range(value):
            return float(value)
        raise self.refusal(name, "a number above 0")

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number above 0, or None.

        Raises:
            CheckpointError: it is something else.
        """
        self.ignore(name)
        return self.number(name) if name in self else None if name in self._none else default

    def zero_or_number(self, name: str) -> float:
        """A number above 0, or 0; 0 if it is absent.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name, 0.0)
        return 0.0 if value == 0 and not isinstance(value, bool) else self.number(name)

    def numbers(self, name: str, count: int) -> tuple[float, ...]:
        """A list of `count` numbers above 0.

        Raises:
            CheckpointError: it is something else or absent.
        """
        value = self._get(name)
        if isinstance(value, list) and len(value) == count:
            return tuple(Config({name: number}, self._path).number(name) for number in value)
        got = f"{len(value)} numbers" if isinstance(value, list) else None
        raise self.refusal(name, f"{count} numbers", got=got)

    def limits(self, name: str) -> tuple[float, float | None]:
        """The least and the greatest of what a list of two numbers allows, 0 and None if it is absent: no limit.

        transformers writes an infinite number as a table.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name, [0.0, math.inf])
        if isinstance(value, list) and len(value) == 2:
            ends = [math.inf if end == {"__float__": "Infinity"} else end for end in value]
            if all(isinstance(end, (int, float)) and not isinstance(end, bool) for end in ends):
                low, high = (float(end) for end in ends)
                if (low == 0 or _in_range(low)) and low < high and (high == math.inf or _in_range(high)):
                    return low, None if high == math.inf else high
        raise self.refusal(name, "two numbers of at least 0 in ascending order")

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name, default)
        if isinstance(value, bool):
            return value
        raise self.refusal(name, "true or false")

    def flags(self, name: str, count: int) -> tuple[bool, ...]:
        """The first `count` of a list of 0 and 1.

        Raises:
            CheckpointError: it is something else, shorter, or absent.
        """
        value = self._get(name)
        if isinstance(value, list) and len(value) >= count and all(flag in (0, 1) for flag in value):
            return tuple(bool(flag) for flag in value[:count])
        raise self.refusal(name, f"a list of {count} times 0 or 1")

    def text(self, name: str, default: str | None = None) -> str:
        """A string.

        Raises:
            CheckpointError: it is something else, or absent without a default.
        """
        value = self._get(name, default)
        if isinstance(value, str):
            return value
        raise self.refusal(name, "a string")

    def layers(self, name: str, count: int) -> tuple[int, ...]:
        """A list of numbers of layers, each below `count`.

        Raises:
            CheckpointError: it is something else or absent.
        """
        value = self._get(name)
        if isinstance(value, list) and all(type(layer) is int and 0 <= layer < count for layer in value):
            return tuple(value)
        raise self.refusal(name, f"a list of layers, from 0 to {count - 1}")

    def texts(self, name: str, count: int | None = None) -> tuple[str, ...]:
        """A list of strings.

        Args:
            count: the required number; None for any number.

        Raises:
            CheckpointError: it is something else or absent.
        """
        value = self._get(name)
        if isinstance(value, list) and count in (None, len(value)) and all(isinstance(text, str) for text in value):
            return tuple(value)
        expected = "a list of strings" if count is None else f"a list of {count} strings"
        raise self.refusal(name, expected, got=f"{len(value)}" if isinstance(value, list) else None)

    def table(self, name: str) -> Config:
        """An object within the configuration; empty if it is absent.

        Raises:
            CheckpointError: it is something else.
        """
        value = self._get(name, {})
        if isinstance(value, dict):
            return Config(value, f"{self._path}: {name}", self._read.tables.setdefault(name, _ReadNames()))
        raise self.refusal(name, "a JSON object")

    def expect(self, name: str, value: object, *others: object) -> None:
        """Check that a field is absent or has one of these values. Null means absent, except where a text is expected.

        Raises:
            CheckpointError: it has another.
        """
        if self._get(name, value) not in (value, *others) or (isinstance(value, str) and name in self._none):
            expected = " or ".join(map(repr, (value, *others)))
            raise self.refusal(name, expected, fix="This variant of the architecture cannot be exported.")

    def layer_types(self, count: int | None = None, name: str = "layer_types") -> tuple[str, ...]:
        """A list of kinds of layers, by the names of transformers 5; see `texts`."""
        return tuple(_LAYER_KINDS.get(kind, kind) for kind in self.texts(name, count))

    def with_defaults(self, **defaults: object) -> Config:
        """The configuration with the architecture's defaults for absent fields; null is not absent."""
        explicit_none = dict.fromkeys(self._none)
        return Config({**defaults, **self._fields, **explicit_none}, self._path, self._read)

    def with_filled(self, **defaults: object) -> Config:
        """The same for fields that are absent or null."""
        return Config({**dict.fromkeys(self._none), **defaults, **self._fields}, self._path, self._read)

    def changed(self, **fields: object) -> Config:
        """The configuration with other values of some fields."""
        return Config({**dict.fromkeys(self._none), **self._fields, **fields}, self._path, self._read)

    def with_names(self, **others: str) -> Config:
        """The configuration whose fields may have other names, too.

        Args:
            others: the other name of each field.

        Raises:
            CheckpointError: a field has both names and two values.
        """
        fields = {}
        for name, other in others.items():
            if other in self:
                self.ignore(other)
                fields[name] = self._fields[other]
                if self._fields.get(name, fields[name]) != fields[name]:
                    raise self.refusal(other, f"the same as {name}, which means the same")
        return self.changed(**fields)

    def text_decoder(self) -> Config:
        """The configuration of the language model: `text_config` of a multimodal model, else this one.

        Raises:
            CheckpointError: `text_config` is no object.
        """
        nested = self.table("text_config")
        return nested if nested and "num_hidden_layers" not in self else self

    def refusal(self, name: str, expected: str, *, got: str | None = None, fix: str = _CORRECT) -> CheckpointError:
        """The error that refuses a field."""
        value = self._fields.get(name)
        shown = got or ("nothing" if value is None else _short(value))
        return CheckpointError(f"{self._path}: {name}", got=shown, expected=expected, fix=fix)


def read_config(path: Path) -> Config:
    """The whole `config.json` of a checkpoint.

    Raises:
        CheckpointError: see `read_json`.
    """
    return Config(read_json(path))


def read_json(path: Path, *, optional: bool = False, limit_bytes: int = JSON_BYTES) -> dict[str, Any]:
    """The JSON object in a file.

    Args:
        path: a regular file.
        optional: return an empty object if there is no such file.
        limit_bytes: larger files are refused before they are read.

    Raises:
        CheckpointError: the file does not exist, is too large, is not a regular file, or contains no JSON object.
    """
    try:
        content = json.loads(read_file(path, limit_bytes).decode("utf-8"))
    except FileNotFoundError:
        if optional:
            return {}
        problem = "no such file"
    except OSError as error:
        problem = error.strerror or type(error).__name__
    except RecursionError:
        problem = "JSON that is nested too deeply"
    except ValueError as error:  # bad UTF-8, bad JSON, integers of thousands of digits
        problem = f"no valid JSON ({error})"
    else:
        if isinstance(content, dict):
            return content
        problem = f"a JSON {type(content).__name__}"
    raise CheckpointError(
        str(path),
        got=problem,
        expected="a JSON object",
        fix="Point to a whole Hugging Face checkpoint folder.",
    )


def _in_range(value: float) -> bool:
    return _SMALLEST_NUMBER <= value <= _LARGEST_NUMBER


def _short(value: object) -> str:
    """The value as text of at most 200 characters: a hostile file may contain megabytes."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"a number of {value.bit_length()} bits"
    try:
        shown = repr(value)
    except RecursionError:
        return f"a {type(value).__name__} that is nested too deeply"
    return shown if len(shown) <= 200 else shown[:200] + "..."
