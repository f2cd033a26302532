"""Probe of Qualcomm's libraries: whether this platform has what the HTP needs. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

import msgspec

from edgekv.doctor.finding import Finding, require
from edgekv.vendor_libraries import (
    LIBRARIES,
    PACKAGE,
    SKEL_VARIABLE,
    Place,
    Platform,
    find_places,
    skel_versions,
)

_INSTALL = 'Install it: pip install "edgekv[htp]"'
_RPC = "cdsprpc"  # FastRPC: how a process on Linux reaches the HTP
_RPC_DEVICES = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "adsprpc-smd", "adsprpc-smd-secure")


def libraries() -> Finding:
    """What is there on this machine."""
    package = require("onnxruntime-qnn", "htp")
    finding = find_libraries(Platform.here())
    return msgspec.structs.replace(finding, detail=f"{package}: {finding.detail}")


def find_libraries(on: Platform, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Finding:
    """What is there on a platform, in the folders that an environment names.

    Args:
        on: the platform.
        environment: see `find_places`.
        devices: the folder of device files.
    """
    places = find_places(on, environment)
    if not places:
        return Finding(status="missing", detail="not installed", fix=_INSTALL)
    if not any(place.origin == PACKAGE for place in places):
        found = "; ".join(_describe(place, on) for place in places)
        return Finding(status="missing", detail=f"{found}, and not the package that calls them", fix=_INSTALL)
    detail = "; ".join(_describe(place, on) for place in places)
    fix = next(filter(None, (_fix(place, on, environment) for place in places if place.origin == PACKAGE)), "")
    if not fix and on.has_npu and on.system != "windows":
        fix = _rpc_fix(devices)
    return Finding(status="broken" if fix else "works", detail=detail, fix=fix)


def _describe(place: Place, on: Platform) -> str:
    versions = " and ".join(sorted(place.versions(on))) or "of no version"
    archs = ", ".join(f"V{arch}" for arch in place.archs(on))
    where = PACKAGE if place.origin == PACKAGE else f"{place.folder} ({place.origin}, not used)"
    runs = f"for {archs}" if archs else "emulator only" if not on.has_npu else "for no HTP"
    return f"QAIRT {versions} in {where}: {runs}"


def _fix(place: Place, on: Platform, environment: Mapping[str, str]) -> str:
    """What is wrong with a place, and the way out; empty if nothing is."""
    if missing := [on.library(name) for name in LIBRARIES if not place.has(name, on)]:
        return f"{', '.join(missing)} missing: install onnxruntime-qnn again."
    versions = place.versions(on)
    if len(versions) > 1:
        return f"Libraries of {' and '.join(sorted(versions))} are mixed: install onnxruntime-qnn again."
    if on.has_npu and not place.archs(on):
        return f"No pair of {on.stub(73)} and its skel: install the wheel for this platform."
    given = [Path(each) for each in environment.get(SKEL_VARIABLE, "").split(";") if each]
    others = skel_versions(given) - versions
    if on.has_npu and others:
        return f"{SKEL_VARIABLE} has skels of {' and '.join(sorted(others))}: unset it."
    return ""


def _rpc_fix(devices: Path) -> str:
    """What keeps a process on Linux from the HTP; empty if nothing is found."""
    if find_library(_RPC) is None:
        return f"lib{_RPC}.so is missing: install FastRPC of your board's vendor."
    present = [devices / name for name in _RPC_DEVICES if (devices / name).exists()]
    if not present:
        return f"{devices} has none of {', '.join(_RPC_DEVICES)}: start the driver of FastRPC."
    if not any(os.access(each, os.R_OK | os.W_OK) for each in present):
        return f"{present[0]} cannot be opened: add yourself to its group."
    return ""
