"""Probe of Qualcomm's libraries: whether this platform has what the HTP needs. Nothing is loaded."""

from __future__ import annotations

import os
from collections.abc import Mapping
from ctypes.util import find_library
from pathlib import Path

import msgspec

from edgekv.doctor.finding import Finding, require
from edgekv.qnn.library_fault import Fault, driver_fault, find_fault
from edgekv.qnn.vendor_libraries import PACKAGE, LibraryPlace, Platform, find_places

_INSTALL = 'Install it: pip install "edgekv[htp]"'
_RPC = "cdsprpc"  # FastRPC: how a process on Linux reaches the HTP


def libraries() -> Finding:
    """What is there on this machine."""
    package = require("onnxruntime-qnn", "htp")
    finding = find_libraries(Platform.here())
    return msgspec.structs.replace(finding, detail=f"{package}: {finding.detail}")


def find_libraries(on: Platform, environment: Mapping[str, str] = os.environ, devices: Path = Path("/dev")) -> Finding:
    """What is there on a platform, in the folders that an environment names.

    Args:
        environment: see `find_places`.
        devices: the folder of device files.
    """
    places = find_places(on, environment)
    if not places:
        return Finding(status="missing", detail="not installed", fix=_INSTALL)
    if not any(place.origin == PACKAGE for place in places):
        described = "; ".join(_describe(place, on) for place in places)
        return Finding(status="missing", detail=f"{described}, and not the package that calls them", fix=_INSTALL)
    detail = "; ".join(_describe(place, on) for place in places)
    faults = (find_fault(place, on, environment=environment) for place in places if place.origin == PACKAGE)
    fault = next(filter(None, faults), None)
    fix = "" if fault is None else _sentences(fault)
    if not fix and on.has_npu and on.system != "windows":
        fix = _rpc_fix(devices)
    return Finding(status="broken" if fix else "works", detail=detail, fix=fix)


def _describe(place: LibraryPlace, on: Platform) -> str:
    versions = " and ".join(sorted(place.versions(on))) or "of no version"
    archs = ", ".join(f"V{arch}" for arch in place.archs(on))
    where = PACKAGE if place.origin == PACKAGE else f"{place.folder} ({place.origin}, not used)"
    runs = f"for {archs}" if archs else "emulator only" if not on.has_npu else "for no HTP"
    return f"QAIRT {versions} in {where}: {runs}"


def _sentences(fault: Fault) -> str:
    return f"{fault.got[0].upper()}{fault.got[1:]}. {fault.fix}"


def _rpc_fix(devices: Path) -> str:
    """What keeps a process on Linux from the HTP; empty if nothing is found."""
    if find_library(_RPC) is None:
        return f"lib{_RPC}.so is missing: install FastRPC of your board's vendor."
    fault = driver_fault(devices)
    return "" if fault is None else _sentences(fault)
