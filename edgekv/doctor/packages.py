"""The requirements in edgekv's metadata, and the installed versions."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import metadata

import msgspec
from packaging.requirements import Requirement

_SELF = "edgekv"
_FOR_DEVELOPERS = frozenset({"docs", "parity", "test"})


class Package(msgspec.Struct, frozen=True, kw_only=True):
    """One requirement.

    Attributes:
        name: of the package.
        extra: the extra of edgekv that requires it; None for edgekv itself.
        expected: the versions that fit.
        installed: the installed version, if any.
        fits: whether the installed version fits.
    """

    name: str
    extra: str | None
    expected: str
    installed: str | None
    fits: bool


def list_packages() -> list[Package]:
    """The requirements of edgekv and its extras on this machine, without those for development."""
    extras = metadata.metadata("edgekv").get_all("Provides-Extra") or []
    requirements = [Requirement(text) for text in metadata.requires("edgekv") or []]
    packages = []
    for extra in (None, *sorted(set(extras) - _FOR_DEVELOPERS)):
        packages += [_check(requirement, extra) for requirement in _asked_for(requirements, extra)]
    return packages


def _asked_for(requirements: list[Requirement], extra: str | None) -> Iterator[Requirement]:
    for requirement in requirements:
        if requirement.name == _SELF:  # an extra that includes another one
            continue
        always = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if extra is None:
            if always:
                yield requirement
        elif not always and requirement.marker is not None and requirement.marker.evaluate({"extra": extra}):
            yield requirement


def _check(requirement: Requirement, extra: str | None) -> Package:
    try:
        installed = metadata.version(requirement.name)
    except metadata.PackageNotFoundError:
        installed = None
    fits = installed is not None and requirement.specifier.contains(installed, prereleases=True)
    expected = str(requirement.specifier)
    return Package(name=requirement.name, extra=extra, expected=expected, installed=installed, fits=fits)
