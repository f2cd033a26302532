"""Running all probes."""

from __future__ import annotations

import platform
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata

import msgspec

from edgekv.doctor.finding import Finding, NotInstalledError
from edgekv.doctor.packages import Package, list_packages
from edgekv.errors import EdgeKVError
from edgekv.graphs.processor import processors
from edgekv.machine.child import ChildEndedError, Limits, call
from edgekv.machine.system import memory_bytes

GROUP = "edgekv.probes"

_CORE = "engine cpu"
_OWN = {
    _CORE: "edgekv.doctor.probes:cpu",
    "engine htp": "edgekv.doctor.probes:htp",
    "Qualcomm's libraries": "edgekv.doctor.libraries:libraries",
    "engine litert": "edgekv.doctor.probes:litert",
    "engine tflite": "edgekv.doctor.probes:tflite",
}
_AT_ONCE = 2
_TIMEOUT_S = 60.0
_ASK_FOR_VERSIONS = "Install the versions that edgekv asks for."


class Examination(msgspec.Struct, frozen=True, kw_only=True):
    """The result of all probes.

    Attributes:
        edgekv: its version.
        python: version of the interpreter.
        machine: operating system and processor.
        cores: that this process may run on.
        memory_bytes: RAM; null if the system does not report it.
        core_works: whether bundles run on the CPU.
        findings: one per probe.
        packages: the requirements of edgekv and its extras.
    """

    edgekv: str
    python: str
    machine: str
    cores: int
    memory_bytes: int | None
    core_works: bool
    findings: list[Finding]
    packages: list[Package]


def examine(timeout_s: float = _TIMEOUT_S) -> Examination:
    """Run each probe in its own process, so that a crash or hang is a finding too.

    Args:
        timeout_s: time limit of a probe.
    """
    points = {point.name: point.value for point in metadata.entry_points(group=GROUP)}
    probes = _OWN | dict(sorted(points.items()))
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        findings = list(pool.map(lambda name: run_probe(name, probes[name], timeout_s), probes))
    packages = list_packages()
    core = [finding.status == "works" for finding in findings if finding.name == _CORE]
    core += [package.fits for package in packages if package.extra is None]
    return Examination(
        edgekv=metadata.version("edgekv"),
        python=platform.python_version(),
        machine=f"{platform.system()} {platform.machine()}",
        cores=processors(),
        memory_bytes=memory_bytes(),
        core_works=all(core),
        findings=findings,
        packages=packages,
    )


def run_probe(name: str, function: str, timeout_s: float = _TIMEOUT_S) -> Finding:
    """Run one probe in its own process.

    Args:
        name: of the finding.
        function: as `module:name`.
        timeout_s: time limit.
    """
    try:
        finding = call(probe, function, Limits(timeout_s=timeout_s))
    except ChildEndedError as error:
        detail = f"the process that tried it ended with {error.ending}"
        finding = Finding(status="broken", detail=detail, fix=_ASK_FOR_VERSIONS)
    return msgspec.structs.replace(finding, name=name)


def probe(function: str) -> Finding:
    """What a probe finds in this process; it is a function, as `module:name`."""
    try:
        finding: Finding = metadata.EntryPoint(name="probe", value=function, group="").load()()
    except NotInstalledError as error:
        return Finding(status="missing", detail="not installed", fix=error.fix)
    except EdgeKVError as error:
        return Finding.of(error)
    except Exception as error:  # a foreign package may raise anything
        detail = f"{type(error).__name__}: {' '.join(str(error).split())}"
        return Finding(status="broken", detail=detail, fix=_ASK_FOR_VERSIONS)
    return finding
