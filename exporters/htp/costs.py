"""What the HTP compiler's simulation says of a graph: the lines of its profile."""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekv.errors import EngineError
from edgekv.machine.decoding import convert

_HEADER = ("Message", "Time", "Unit of Measurement", "Event Identifier")
_FIRST = "Performance Estimates"
_LINES: Mapping[str, tuple[str, str]] = {
    "Simulated (Accelerator exec cycles)": ("cycles", "CYCLES"),
    "Simulated (Accelerator exec time us)": ("us", "US"),
    "Simulated (Accelerator exec time us (lower estimate))": ("low_us", "US"),
    "Simulated (Accelerator exec time us (upper estimate))": ("high_us", "US"),
    "Input Fill": ("read_bytes", "BYTES"),
    "Intermediate Fill": ("refilled_bytes", "BYTES"),
    "Intermediate Spill": ("spilled_bytes", "BYTES"),
    "Output Spill": ("written_bytes", "BYTES"),
    "Missing Ops (Number of Ops with no Costs associated)": ("missing_ops", "US"),
}


class Costs(msgspec.Struct, frozen=True, kw_only=True):
    """The simulated costs of one run of a graph.

    Attributes:
        cycles: of the HTP.
        us: microseconds.
        low_us: the lower estimate.
        high_us: the upper estimate.
        read_bytes: weights and inputs that are read from DRAM.
        refilled_bytes: intermediate results that are read back from DRAM.
        spilled_bytes: intermediate results that do not fit the VTCM and are written to DRAM.
        written_bytes: outputs.
        missing_ops: operations that the compiler has no cost for; above 0, all figures are void.
    """

    cycles: int
    us: float
    low_us: float
    high_us: float
    read_bytes: int
    refilled_bytes: int
    spilled_bytes: int
    written_bytes: int
    missing_ops: int

    @property
    def moved_bytes(self) -> int:
        """All bytes between DRAM and VTCM."""
        return self.read_bytes + self.refilled_bytes + self.spilled_bytes + self.written_bytes


T = TypeVar("T")


def each_once(repeated: Sequence[T], graphs: int) -> list[T] | None:
    """What the compiler writes of several graphs of one binary: each but the last is there twice, one after the other.

    Returns:
        Each once; None if it wrote another number of them.
    """
    return [*repeated[1::2], repeated[-1]] if graphs and len(repeated) == 2 * graphs - 1 else None


def read_costs(profile: Path, graphs: int) -> list[Costs]:
    """The costs of the graphs of one binary, in the order of its sessions.

    The profile of the first session has all graphs; see `each_once`.

    Args:
        profile: the file of the first session.
        graphs: their number.

    Raises:
        EngineError: the file is missing, or has another form.
    """
    try:
        rows = [*csv.reader(profile.read_text("utf-8").splitlines())]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise _other_form(str(getattr(error, "strerror", None) or error)) from None
    if not rows or not {*_HEADER} <= {*rows[0]}:
        raise _other_form(f"the columns {', '.join(rows[0]) if rows else 'of an empty file'}")
    message, number, unit, identifier = (rows[0].index(name) for name in _HEADER)
    blocks = list[dict[str, float]]()
    for row in rows[1:]:
        if len(row) != len(rows[0]):
            raise _other_form(f"a line of {len(row)} columns")
        # Names are in the last column, and in the first one in earlier versions.
        names = {row[identifier], row[message]}
        if _FIRST in names:
            blocks.append({})
        for name in names & _LINES.keys():
            field, expected = _LINES[name]
            if not blocks or row[unit] != expected or not row[number].isdecimal():
                raise _other_form(f"{name}: {row[number]} {row[unit]}")
            blocks[-1][field] = int(row[number])
    fields = {field for field, _ in _LINES.values()}
    for block in blocks:
        if missing := fields - block.keys():
            raise _other_form(f"no {', '.join(sorted(missing))}")
    if (once := each_once(blocks, graphs)) is None:
        raise _other_form(f"estimates of {len(blocks)} graphs for {graphs}")
    return [convert(block, Costs, strict=False) for block in once]


def _other_form(got: str) -> EngineError:
    return EngineError(
        "profile of the HTP compiler",
        got=got,
        expected="the simulated costs of each graph, as onnxruntime-qnn 2.7.0 writes them",
        fix="Use the tested version: pip install edgekv[htp].",
    )
