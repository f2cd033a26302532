"""A kit on an Android phone, over adb: qnn-net-run computes there, and the cache and the comparison are here."""

from __future__ import annotations

import ctypes
import math
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from time import monotonic
from typing import Any, Literal

import numpy as np
import onnx
from msgspec.structs import replace
from onnx import helper

from devices.report import DecodeResult, GraphResult, MissingMeasurement, Place, Sample, SpeedResult, Versions
from edgekv.bundle import Bundle, CompiledBinaries, GraphRecord, open_compiled
from edgekv.conformance.graphs import GraphJob, compare, read_cases
from edgekv.conformance.kit import PACKED, Arrays, Kit, KitModel, opened_model, unpack, unpack_binaries
from edgekv.conformance.models import DECODE_STRATEGIES, ModelJob, decode_on, measured_graphs, read_bytes
from edgekv.conformance.run import LostDeviceError, PartCrashedError, check_chip
from edgekv.conformance.sensors import Sensors, of_numbers
from edgekv.errors import EngineError
from edgekv.machine.scratch import scratch_folder
from edgekv.runtime.binding import BatchInvariance
from edgekv.spec import GraphInterface, Port
from exporters.progress import Progress, silent
from exporters.targets.android.adb import Adb, LostPhoneError
from exporters.targets.android.net_run import NET_RUN, EndedOnPhoneError, NetRun
from exporters.targets.android.push import (
    Phone,
    Push,
    check_folder,
    check_program,
    check_room,
    check_version,
    find_qairt,
    format_version,
    library_folder,
)

_SAMPLE_S = 10.0
_STEPS = 64
_MAX_STEPS = 1 << 14


@dataclass(slots=True)
class PhoneRunner:
    """Runs the parts of a kit on a phone.

    Attributes:
        adb: the phone.
        folder: of the phone, from which programs may start.
        qairt: folders or archives with Qualcomm's libraries; empty for the SDK that the environment names.
        chip: what the phone's chip is, if it does not say so.
        progress: told of each file that is copied.
    """

    adb: Adb
    folder: str
    qairt: Sequence[Path] = ()
    chip: str | None = None
    progress: Progress = silent
    _net_run: NetRun = field(init=False)
    _there: str = field(init=False)
    _name: str = field(init=False, default="")
    _versions: Versions = field(init=False)

    @property
    def place(self) -> Place:
        return "npu"

    @property
    def through(self) -> str:
        return f"{NET_RUN} over adb"

    @property
    def strategies(self) -> Sequence[str]:
        return DECODE_STRATEGIES

    @property
    def measured(self) -> Sequence[str]:
        return (NET_RUN,)

    @property
    def unmeasured(self) -> Sequence[MissingMeasurement]:
        own = f"{NET_RUN} binds memory of its own, and the same for all runs of a start"
        alone = f"each start of {NET_RUN} loads a graph: the first step of a speed has both"
        return MissingMeasurement(what="registering addresses", reason=own), MissingMeasurement(
            what="load time alone", reason=alone
        )

    @property
    def names(self) -> Sequence[str]:
        return self.adb.serial, self._name

    def versions(self) -> Versions:
        return self._versions

    def prepare(self, kit: Kit) -> None:
        check_folder(self.folder)
        with _losing(), scratch_folder("qairt") as scratch:
            phone = Phone.read(self.adb)
            self._name = phone.name
            check_chip(kit, phone.chip(self.chip).soc)
            arch, binaries = kit.manifest.arch, _unpacked(kit, scratch)
            sdk = find_qairt(self.qairt, arch, NET_RUN, scratch)
            check_version(sdk, binaries.values())
            libraries = library_folder(self.folder, sdk, arch)
            self._there = f"{self.folder}/conformance"
            pushes = [
                Push.plan(self.adb, libraries, sdk.files),
                Push.plan(self.adb, self._there, binaries),
            ]
            check_room(self.adb, self.folder, pushes)
            for push in pushes:
                push.run(self.adb, progress=self.progress)
            check_program(self.adb, f"{libraries}/{NET_RUN}")
        self._net_run = NetRun(self.adb, libraries, self.folder)
        version = format_version(sdk.version)
        self._versions = Versions(
            edgekv=metadata.version("edgekv"),
            runtime=f"{NET_RUN} {version}".strip(),
            provider=f"QAIRT {version}".strip(),
            qairt=version,
            system=f"Android {phone.android} {phone.abi}",
            python=platform.python_version(),
        )

    def graph(self, job: GraphJob) -> GraphResult:
        inputs, expected = read_cases(job)
        with _losing():
            outputs = iter(
                self._net_run.run(f"{self._there}/{job.graph.binary.removesuffix(PACKED)}", inputs, expected)
            )
        return replace(compare(job, lambda _: next(outputs)), run_us=0.0)  # copies are most of the time here

    def decode(self, kit: Kit, model: KitModel, strategy: str, allowed_steps: int) -> DecodeResult:
        job = ModelJob(folder=str(kit.path), model=model, strategy=strategy, allowed_steps=allowed_steps)
        with _losing():
            result = decode_on(lambda bundle: _PhoneEngine(self._net_run, self._binaries(kit, model, bundle)), job)
        return replace(result, load_ms=0.0)  # a graph is loaded by each start of the program

    def speeds(self, kit: Kit, model: KitModel, strategy: str) -> list[SpeedResult]:
        with _losing(), opened_model(kit.path, model) as bundle:
            return [self._speed(kit, model, bundle, record) for record in measured_graphs(bundle.manifest)]

    def watch(self, kit: Kit, model: KitModel, seconds: float, take: Callable[[Sample], None]) -> None:
        at_s, began, steps = 0.0, monotonic(), _STEPS
        with _losing(), opened_model(kit.path, model) as bundle:
            record = min((graph for graph in bundle.manifest.graphs if graph.ar == 1), key=lambda graph: graph.context)
            while at_s < seconds:
                _, step_s = self._times_s(self._binaries(kit, model, bundle), bundle, record, steps)
                at_s, sensors = monotonic() - began, self._sensors()
                take(Sample(at_s=at_s, tokens_per_s=1 / step_s, celsius=sensors.celsius, mhz=sensors.mhz))
                steps = max(1, min(_MAX_STEPS, math.ceil(min(_SAMPLE_S, seconds) / step_s)))

    def _speed(self, kit: Kit, model: KitModel, bundle: Bundle, record: GraphRecord) -> SpeedResult:
        first_s, step_s = self._times_s(self._binaries(kit, model, bundle), bundle, record, _STEPS)
        return SpeedResult(
            model=model.name,
            strategy=NET_RUN,
            ar=record.ar,
            context=record.context,
            read_bytes=read_bytes(model, bundle.manifest, record),
            steps=_STEPS,
            first_us=first_s * 1e6,
            step_us=step_s * 1e6,
            host_us=0.0,
            tokens_per_s=record.ar / step_s,
        )

    def _times_s(self, binaries: _Binaries, bundle: Bundle, record: GraphRecord, steps: int) -> tuple[float, float]:
        """Seconds of the first run, with loading, and of a step: sums over the parts of a graph."""
        first_s = step_s = 0.0
        for part in record.parts:
            wrapper, binary = binaries.of(bundle.part_path(part))
            inputs = {port.name: np.zeros(port.shape, port.dtype) for port in _interface(wrapper).inputs}
            once_s, spent_s = self._net_run.time_s(binary, inputs, steps)
            first_s, step_s = first_s + once_s, step_s + spent_s / steps
        return first_s, step_s

    def _binaries(self, kit: Kit, model: KitModel, bundle: Bundle) -> _Binaries:
        compiled = open_compiled(bundle, kit.manifest.soc, kit.manifest.compiler)
        if compiled is None:
            fix = "Compile it again, and make a new kit."
            raise EngineError(model.name, got="no binaries", expected=kit.manifest.compiler, fix=fix)
        return _Binaries(
            bundle, compiled, f"{self._there}/{model.folder}/{compiled.path.relative_to(bundle.path).as_posix()}"
        )

    def _sensors(self) -> Sensors:
        def numbers(pattern: str) -> Iterator[float]:
            for line in self.adb.shell(f"cat /{pattern} 2>/dev/null").output.split():
                with suppress(ValueError):
                    yield float(line)

        return of_numbers(numbers)


def _unpacked(kit: Kit, scratch: Path) -> dict[str, Path]:
    """The context binaries of a kit by their places on the phone."""
    binaries = dict[str, Path]()
    for name in sorted(kit.manifest.files):
        if name.endswith(f".bin{PACKED}"):
            binaries[name.removesuffix(PACKED)] = unpack(kit.path / name, scratch)
        elif name.endswith(".bin"):
            binaries[name] = kit.path / name
    for model in kit.manifest.models:
        if model.binaries:
            (folder := scratch / model.folder).mkdir()
            names = unpack_binaries(kit.path / model.binaries, folder)
            binaries |= {f"{model.folder}/{name}": folder / name for name in names if name.endswith(".bin")}
    return binaries


@contextmanager
def _losing() -> Iterator[None]:
    """Errors of a phone as those of a run."""
    try:
        yield
    except LostPhoneError as error:
        raise LostDeviceError(error.field, got=error.got, expected=error.expected, fix=error.fix) from None
    except EndedOnPhoneError as error:
        raise PartCrashedError(error.ending) from None


@dataclass(frozen=True, slots=True)
class _Binaries:
    """The binaries of single graphs of a bundle."""

    bundle: Bundle
    compiled: CompiledBinaries
    there: str

    def of(self, file: Path) -> tuple[Path, str]:
        """The wrapper of a part's graph here, and its binary on the phone."""
        names = {self.bundle.part_path(part): part.name for part in self.bundle.manifest.parts}
        for binary in self.compiled.manifest.binaries:
            if binary.graphs == 1 and (wrapper := binary.wrappers.get(names[file])) is not None:
                return self.compiled.path / wrapper, f"{self.there}/{binary.file}"
        fix = "Compile it again without --no-per-graph-binaries, and make a new kit."
        raise EngineError(names[file], got="no binary of this graph alone", expected="one", fix=fix)


def _interface(wrapper: Path) -> GraphInterface:
    """The ports of a wrapper."""
    graph = onnx.load(wrapper, load_external_data=False).graph
    return GraphInterface(tuple(map(_port, graph.input)), tuple(map(_port, graph.output)))


def _port(value: onnx.ValueInfoProto) -> Port:
    tensor = value.type.tensor_type
    dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
    return Port(value.name, np.dtype(dtype).name, tuple(size.dim_value for size in tensor.shape.dim))


@dataclass(frozen=True, slots=True)
class _PhoneEngine:
    """An engine whose graphs a phone computes: each run is a start of the program."""

    net_run: NetRun
    binaries: _Binaries
    name: Literal["htp"] = "htp"

    @property
    def batch_invariance(self) -> BatchInvariance:
        """`equal`: sums are of integers."""
        return "equal"

    @property
    def alignment_bytes(self) -> int:
        return 1

    def load(self, file: Path, name: str) -> _PhoneBinding:
        wrapper, binary = self.binaries.of(file)
        return _PhoneBinding(self.net_run, binary, _interface(wrapper))


class _PhoneBinding:
    """A graph of a phone; a `Binding`. Memory that is bound is copied to it and back."""

    reads_used_rows = False
    takes_fewer = False

    def __init__(self, net_run: NetRun, binary: str, interface: GraphInterface) -> None:
        self.interface = interface
        self._net_run = net_run
        self._binary = binary
        self._inputs: Arrays = {}
        self._outputs: Arrays = {}

    def inputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._inputs |= _bound(names, dtype, shape, addresses, offset_bytes)

    def outputs(
        self,
        names: Sequence[str],
        dtype: np.dtype[Any],
        shape: Sequence[int],
        addresses: Sequence[int],
        offset_bytes: int = 0,
    ) -> None:
        self._outputs |= _bound(names, dtype, shape, addresses, offset_bytes)

    def run(self) -> None:
        (computed,) = self._net_run.run(self._binary, [self._inputs], [self._outputs])
        for name, values in computed.items():
            held = self._outputs[name]
            if values.shape != held.shape:
                got = f"{values.nbytes} bytes of {name}"
                raise EngineError(self._binary, got=got, expected=f"{held.nbytes}", fix="Make the kit again.")
            held[...] = values

    def release(self) -> None:
        """Nothing is held here."""


def _bound(
    names: Sequence[str], dtype: np.dtype[Any], shape: Sequence[int], addresses: Sequence[int], offset_bytes: int
) -> Arrays:
    """Arrays on bound memory."""
    size = dtype.itemsize * math.prod(shape)
    memory = (memoryview((ctypes.c_uint8 * size).from_address(at + offset_bytes)) for at in addresses)
    return {name: np.frombuffer(buffer, dtype).reshape(shape) for name, buffer in zip(names, memory, strict=True)}
