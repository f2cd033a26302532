"""The result of a probe."""

from __future__ import annotations

from importlib import metadata
from typing import Literal

import msgspec

from edgekv.errors import EdgeKVError

Status = Literal["works", "missing", "not configured", "broken"]


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one probe.

    Attributes:
        status: `missing` means not installed; `broken` means installed and failing.
        detail: the version that works, or what is wrong.
        fix: what to do; empty if it works.
        devices: names of the devices that it reaches.
        name: of the probe.
    """

    status: Status
    detail: str
    fix: str = ""
    devices: list[str] = []
    name: str = ""

    @classmethod
    def of(cls, error: EdgeKVError, status: Status = "broken") -> Finding:
        """An error as a finding."""
        return cls(status=status, detail=f"{error.field}: got {error.got}", fix=error.fix)


class NotInstalledError(EdgeKVError):
    """A package that a probe needs is not installed."""


def require(package: str, extra: str | None = None) -> str:
    """Name and version of an installed package.

    Args:
        extra: the extra of edgekv that installs it; None if edgekv itself does.

    Raises:
        NotInstalledError: it is not installed.
    """
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        raise NotInstalledError(
            package,
            got="not installed",
            expected="an installed package",
            fix="Install it: pip install " + (f'"edgekv[{extra}]"' if extra else "edgekv"),
        ) from None
