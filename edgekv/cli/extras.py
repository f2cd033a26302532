"""Which packages of an extra are not installed."""

from __future__ import annotations

from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def missing_packages(package: str, extra: str) -> list[str]:
    """The packages that an extra of an installed package requires and that are not installed, by name.

    Versions are not compared; `edgekv doctor` does.
    """
    missing = set[str]()
    for text in metadata.requires(package) or []:
        wanted = Requirement(text)
        if (
            wanted.marker is None
            or wanted.marker.evaluate({"extra": ""})
            or not wanted.marker.evaluate({"extra": extra})
        ):
            continue
        if wanted.name == package:
            for each in wanted.extras:
                missing |= {*missing_packages(package, each)}
        elif not _is_installed(name := canonicalize_name(wanted.name)):
            missing.add(name)
    return sorted(missing)


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
