"""What the command line says of a value: written once, beside the field of the dataclass that holds it.

    @dataclass(frozen=True, slots=True)
    class SamplingParams:
        top_k: Annotated[int | None, Option("Sample from the k most likely tokens.")] = None

The type and the default of an option are those of the field; see `edgekv.cli.command` for how a command gets it. Fields
without such an annotation cannot be set from the command line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from devices import Device, UnknownDeviceError, find
from edgekv.errors import UsageError

_NUMBERS = re.compile(r"\d{1,12}(,\d{1,12})*")
_SIZES = re.compile(r"\d{1,4}x\d{1,4}(,\d{1,4}x\d{1,4})*")
_MAX_SIZES, _MAX_EDGE = 16, 8192
_MAX_NUMBERS = 64

Parser = Callable[[str, str], Any]
"""The value of a text; called with the name of the option, for errors, and the text."""


@dataclass(frozen=True, slots=True)
class Option:
    """An option.

    Attributes:
        help: what it means.
        flags: its names, such as `-o --output` or `--history/--no-history`; empty for that of the field with dashes.
        shown: the default in words; None for the value of the field, empty for none.
        metavar: stands for the value in the help; empty for its type.
        parse: the value of a text; None for types that need no parser: bool, int, float, str, Path, Literal of texts,
            and sequences of these, whose options may be repeated. A type that can be `str` among others takes the text.
        collect: what the field gets of an option that may be repeated and has a parser, such as `tuple` or `dict`.
        minimum: the smallest number.
        negates: whether the flag stands for False.
        variable: environment variable that sets it too.
        group: heading in the help; empty for that of the dataclass.
        subjects: what errors of the library call it, beside the name of the field; a word may follow.
    """

    help: str
    flags: str = ""
    shown: str | None = None
    metavar: str = ""
    parse: Parser | None = None
    collect: Callable[[Iterable[Any]], Any] | None = None
    minimum: float | None = None
    negates: bool = False
    variable: str = ""
    group: str = ""
    subjects: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Argument:
    """A positional argument; see `Option`."""

    help: str
    metavar: str = ""
    parse: Parser | None = None


@dataclass(frozen=True, slots=True)
class OptionGroup:
    """The options of a dataclass within a dataclass, or of a parameter of a command.

    Attributes:
        title: heading in the help.
        only: the fields that the command has options for; empty for all.
    """

    title: str
    only: tuple[str, ...] = ()


# Parsers


def parse_numbers(option: str, listed: str) -> tuple[int, ...]:
    """The numbers of an option, such as `--ar 1,32`.

    Raises:
        UsageError: not whole numbers of at most 12 digits, separated by commas, or more than 64 of them.
    """
    text = listed.replace(" ", "")
    if _NUMBERS.fullmatch(text) and text.count(",") < _MAX_NUMBERS:
        return tuple(int(number) for number in text.split(","))
    shown = listed if len(listed) <= 40 else f"{listed[:37]}..."
    expected = f"at most {_MAX_NUMBERS} whole numbers, comma-separated, such as 1,32"
    raise UsageError(option, got=repr(shown), expected=expected, fix="Correct the list.")


def parse_sizes(option: str, listed: str) -> tuple[tuple[int, int], ...]:
    """The widths and heights of an option, such as `--picture-sizes 448x448,896x448`.

    Raises:
        UsageError: not at most 16 sizes, separated by commas, of edges from 1 to 8192, or one twice.
    """
    text = listed.replace(" ", "").lower()
    if _SIZES.fullmatch(text) and text.count(",") < _MAX_SIZES:
        sizes = [(int(width), int(height)) for width, _, height in (size.partition("x") for size in text.split(","))]
        edges = [edge for size in sizes for edge in size]
        if len({*sizes}) == len(sizes) and min(edges) >= 1 and max(edges) <= _MAX_EDGE:
            return tuple(sizes)
    shown = listed if len(listed) <= 40 else f"{listed[:37]}..."
    expected = f"at most {_MAX_SIZES} widths and heights of 1 to {_MAX_EDGE}, each once, such as 448x448,896x448"
    raise UsageError(option, got=repr(shown), expected=expected, fix="Correct the list.")


def check_place(option: str, text: str) -> str:
    """A path or a URL that is not empty.

    Raises:
        UsageError: it is empty, as that of a shell's variable that is not set.
    """
    if not text:
        fix = "Set the variable that it comes from, or leave it out; the current folder is `.`."
        raise UsageError(option, got="an empty path", expected="a path", fix=fix)
    return text


def find_device(option: str, name: str) -> Device:
    """A chip by the names that people know.

    Raises:
        UsageError: no device has this name; the error suggests names.
    """
    try:
        return find(name)
    except UnknownDeviceError as error:
        raise UsageError(option, got=repr(error.got), expected=error.expected_text, fix=error.fix) from None
