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
        requirement = Requirement(text)
        if (
            requirement.marker is None
            or requirement.marker.evaluate({"extra": ""})
            or not requirement.marker.evaluate({"extra": extra})
        ):
            continue
        if requirement.name == package:
            for other_extra in requirement.extras:
                missing |= {*missing_packages(package, other_extra)}
        elif not _is_installed(name := canonicalize_name(requirement.name)):
            missing.add(name)
    return sorted(missing)


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
