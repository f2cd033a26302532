"""What keeps Qualcomm's libraries from an HTP: found by names and stated versions, before one of them is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from devices import Device
from edgekv.errors import EngineError
from edgekv.qnn.vendor_libraries import (
    BACKEND,
    LIBRARIES,
    SKEL_VARIABLE,
    SYSTEM,
    LibraryPlace,
    Platform,
    library_version,
    package_place,
    skel,
)

FOR_GRAPHS = (BACKEND, SYSTEM)
"""What the engine `htp` needs; Genie needs `LIBRARIES`."""

_AGAIN = "Install onnxruntime-qnn again."
_RPC_DEVICES = ("fastrpc-cdsp", "fastrpc-cdsp-secure", "adsprpc-smd", "adsprpc-smd-secure")


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong, what is right, and the way out."""

    got: str
    expected: str
    fix: str


def check_libraries(
    needed: Iterable[str],
    arch: int,
    on: Platform,
    chip: Device | None,
    environment: Mapping[str, str] = os.environ,
    devices: Path = Path("/dev"),
) -> None:
    """Refuse what would fail when it is loaded on a machine with an HTP; the emulator runs all.

    Reads the versions of a stub, a skel and two or three libraries: 20 MB, 15 ms.

    Args:
        needed: the libraries, such as `FOR_GRAPHS`.
        arch: HTP version that the binaries are for.
        on: this machine.
        chip: its chip, if known.
        environment: see `find_fault`.
        devices: the folder of device files.

    Raises:
        EngineError: a library is missing, the libraries are of two versions, none runs this HTP, or this HTP does not
            run the binaries.
    """
    place = package_place(on) if on.has_npu else None
    if place is None:
        return
    if chip is not None and chip.arch < arch:
        fault: Fault | None = Fault(
            f"V{chip.arch}, the HTP of {chip.soc}", f"V{arch} or newer", f"Export with --device {chip.soc}."
        )
    else:
        # The stub and skel are those of the chip, which may be newer than the binaries.
        fault = find_fault(place, on, needed, (arch if chip is None else chip.arch,), environment)
        fault = fault or (None if on.system == "windows" else permission_fault(devices))
    if fault is not None:
        raise EngineError(f"HTP V{arch} on this machine", got=fault.got, expected=fault.expected, fix=fault.fix)


def find_fault(
    place: LibraryPlace,
    on: Platform,
    needed: Iterable[str] = LIBRARIES,
    archs: Iterable[int] = (),
    environment: Mapping[str, str] = os.environ,
) -> Fault | None:
    """The first fault of a folder's libraries; None if there is none.

    Args:
        needed: the libraries that must be there.
        archs: the HTP versions that must run; none for any.
        environment: the folders in its variables may have a stub or a skel of another version, which is then loaded
            instead, or not, depending on the system.
    """
    needed = tuple(needed)
    if missing := [on.library(name) for name in needed if not place.has(name, on)]:
        return Fault(f"no {', '.join(missing)} in {place.folder}", "Qualcomm's libraries", _AGAIN)
    available = place.archs(on)
    required = tuple(archs) or tuple(available)
    if on.has_npu and (not required or not set(required) <= set(available)):
        return _unsupported(place, on, available, required)
    pairs = [place.folder / on.stub(arch) for arch in required] + [place.skel(arch) for arch in required]
    versions = dict(_versions([*(place.folder / on.library(name) for name in needed), *pairs]))
    if len(set(versions.values())) > 1:
        return Fault(f"libraries of two versions: {_listed(versions)}", "one version", _AGAIN)
    return _elsewhere(place, on, required, environment, versions) if on.has_npu else None


def permission_fault(devices: Path) -> Fault | None:
    """Whether device files of FastRPC are there and none of them can be opened."""
    present = [devices / name for name in _RPC_DEVICES if (devices / name).exists()]
    if not present or any(os.access(device, os.R_OK | os.W_OK) for device in present):
        return None
    return Fault(f"{present[0]} cannot be opened", "read and write permission", "Add yourself to its group.")


def driver_fault(devices: Path) -> Fault | None:
    """Whether the driver of FastRPC is missing or cannot be opened."""
    if not any((devices / name).exists() for name in _RPC_DEVICES):
        return Fault(
            f"{devices} has none of {', '.join(_RPC_DEVICES)}", "a device of FastRPC", "Start the driver of FastRPC."
        )
    return permission_fault(devices)


def _unsupported(place: LibraryPlace, on: Platform, available: list[int], required: tuple[int, ...]) -> Fault:
    if not available:
        return Fault(
            f"no pair of {on.stub(73)} and its skel", "libraries for an HTP", "Install the wheel for this platform."
        )
    arch = next(arch for arch in required if arch not in available)
    pair = (place.folder / on.stub(arch), place.skel(arch))
    missing = [file.name for file in pair if not file.is_file()]
    if len(missing) == 1:
        return Fault(f"no {missing[0]} in {place.folder}", "it, beside the others", _AGAIN)
    return Fault(
        f"libraries for {', '.join(f'V{arch}' for arch in available)}",
        f"for V{arch}",
        "Export with the --device of this machine's chip.",
    )


def _elsewhere(
    place: LibraryPlace,
    on: Platform,
    archs: tuple[int, ...],
    environment: Mapping[str, str],
    versions: Mapping[Path, str],
) -> Fault | None:
    """A stub or skel of another version in the folders that an environment names."""
    own_version = next(iter(versions.values()), None)
    names = {
        on.search_variable: (os.pathsep, [on.stub(arch) for arch in archs]),
        SKEL_VARIABLE: (";", [skel(arch) for arch in archs]),
    }
    for variable, (between, files) in names.items():
        for folder in filter(None, environment.get(variable, "").split(between)):
            for file, version in _versions(Path(folder, name) for name in files):
                if own_version is not None and version != own_version:
                    return Fault(
                        f"{variable} has {file.name} of {version} in {folder}",
                        f"only {own_version}, as in {place.folder}",
                        f"Remove {folder} from {variable}.",
                    )
    return None


def _versions(files: Iterable[Path]) -> Iterator[tuple[Path, str]]:
    """Those files that can be read and say it."""
    return ((file, version) for file in files if (version := library_version(file)) is not None)


def _listed(versions: Mapping[Path, str]) -> str:
    """`2.39.0 (libQnnHtpV73Skel.so), 2.51.0 (libQnnHtp.so and 4 more)`."""
    listed = []
    for version in sorted(set(versions.values())):
        first, *others = [file.name for file, own in versions.items() if own == version]
        listed.append(f"{version} ({first}{f' and {len(others)} more' if others else ''})")
    return ", ".join(listed)
