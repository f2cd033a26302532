"""Qualcomm's HTP: the emulator on x86, the NPU on a Snapdragon."""

from __future__ import annotations

import shlex
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar, Literal

import onnxruntime as ort

from devices import Device, find
from edgekv.bundle import ENCODER, Bundle, GraphFormat, GraphRecord, open_compiled
from edgekv.errors import EdgeKVWarning, EngineError, UsageError
from edgekv.machine.child import ChildEndedError, call
from edgekv.machine.scratch import scratch_folder
from edgekv.machine.steps import step
from edgekv.qnn.library_fault import FOR_GRAPHS, check_libraries
from edgekv.qnn.options import HtpOptions
from edgekv.qnn.provider import compiler, create_session
from edgekv.qnn.this_chip import find_chip
from edgekv.qnn.vendor_libraries import Platform, has_rpc_memory
from edgekv.qnn.worker import HtpJob, HtpStep, context_config, create_sessions
from edgekv.runtime.binding import BatchInvariance, Binding, MemoryBinding
from edgekv.runtime.expert_operands import ExpertOperands, RoutedExperts
from edgekv.runtime.shared_memory import SharedAllocator
from edgekv.spec import EXPERTS

_SHARE = "ep.share_ep_contexts"
_SHARES_FROM = 73
_ALLOCATOR = "enable_htp_shared_memory_allocator"
_DEFAULT = HtpOptions()


@dataclass(frozen=True, slots=True)
class HtpEngine:
    """Qualcomm's HTP: the emulator on x86, the NPU on a Snapdragon.

    Attributes:
        device: the target.
        options: of the provider.
        compiled: wrappers of context binaries, by the graphs that they were compiled from; other graphs are compiled
            when they are loaded.
        alone: those of the binaries that contain one graph each.
        shares_weights: whether the binaries contain several graphs each. The provider then loads a binary once, for the
            sessions of all its graphs.
        first: a graph that every text runs.
        shared: the allocator of memory that the HTP reaches too; None for ordinary memory.
        operands: experts that decode graphs, divided at their routers, read as inputs; None if graphs are whole. Then
            a step of one token rounds in other places than prefill, which computes every expert.
    """

    graph_format: ClassVar[GraphFormat] = "onnx"

    device: Device
    compiled: Mapping[Path, Path] = field(default_factory=dict)
    alone: Mapping[Path, Path] = field(default_factory=dict, compare=False)
    shares_weights: bool = False
    options: HtpOptions = _DEFAULT
    name: Literal["htp", "htp-operands"] = "htp"
    first: Path | None = field(default=None, compare=False)
    operands: ExpertOperands | None = field(default=None, compare=False)
    shared: SharedAllocator | None = field(default=None, init=False, repr=False, compare=False)
    _sessions: dict[Path, ort.InferenceSession] = field(default_factory=dict, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> HtpEngine:
        if threads is not None:
            raise UsageError("threads", got=threads, expected="none with the engine htp", fix="Leave it out.")
        device, on = find(bundle.manifest.device), Platform.here()
        check_libraries(FOR_GRAPHS, device.arch, on, find_chip(on))
        engine = cls.on(device, bundle)
        if not engine.compiled:
            keep = f"edgekv compile {shlex.quote(str(bundle.path))} --device {device.soc}"
            text = f"{bundle.path.name} is not compiled for {device.soc}, so each run compiles its graphs. Once: {keep}"
            warnings.warn(text, EdgeKVWarning, stacklevel=2)
        return engine

    @classmethod
    def on(cls, device: Device, bundle: Bundle) -> HtpEngine:
        """An engine for a device that loads what the bundle was compiled to for it.

        Raises:
            EngineError: the compiler is not installed.
            BundleError: a compiled binary was changed.
        """
        # The emulator cannot load binaries of several graphs, and V68 and V69 are not known to share weights.
        decode = min(bundle.manifest.graphs, key=lambda graph: graph.ar)
        compiled = open_compiled(bundle, device.soc, compiler())
        steps = None if compiled is None else compiled.manifest.expert_steps
        operands = None if steps is None else ExpertOperands(bundle, steps)
        first = bundle.part_path((decode if operands is None else operands.graphs[decode.name]).parts[0])
        kinds = (True, False) if Platform.here().has_npu and device.arch >= _SHARES_FROM else (False,)
        for is_shared in kinds:
            if wrappers := _wrappers(bundle, device, is_shared=is_shared):
                alone = _wrappers(bundle, device, is_shared=False) if is_shared else wrappers
                engine = cls(device, wrappers, alone, shares_weights=is_shared, first=first, operands=operands)
                return engine if operands is None else replace(engine, name="htp-operands")
        return cls(device, _encoder(bundle, device), first=first)

    def with_options(self, options: HtpOptions) -> HtpEngine:
        """An engine with other options.

        Raises:
            UsageError: the chip or this machine does not have them, they are for compiling graphs that are compiled, or
                shared memory for binaries of several graphs.
        """
        options.check(self.device, Platform.here())
        if options.is_for_compiling and self.compiled:
            raise UsageError(
                "htp vtcm, optimization",
                got="one of them for compiled binaries",
                expected="neither: binaries keep what they were compiled for",
                fix="Give it to edgekv compile, with --force.",
            )
        engine = replace(self, options=options)
        has_binaries = not self.shares_weights or bool(self.alone)
        return engine.sharing() if takes_shared_memory(options, Platform.here(), has_binaries) else engine

    def sharing(self) -> HtpEngine:
        """An engine whose caches are in memory that the HTP reaches too.

        The provider registers an address once for all graphs of a binary, with the size of the first tensor there, so
        graphs are loaded from binaries of their own.
        """
        engine = replace(self, compiled=self.alone or self.compiled, shares_weights=False)
        object.__setattr__(engine, "shared", SharedAllocator(engine._any_session))
        return engine

    @property
    def batch_invariance(self) -> BatchInvariance:
        """`equal`: sums are of integers, unless decode graphs are divided."""
        return "equal" if self.operands is None else "unequal"

    @property
    def alignment_bytes(self) -> int:
        return 1

    def load(self, file: Path, name: str) -> Binding:
        if file not in self._sessions:
            with step(f"load {file.name} on htp"):
                self._sessions[file] = self.session(file)
        return MemoryBinding(self._sessions[file], shared=self.shared)

    def divided(self, graph: GraphRecord) -> tuple[GraphRecord, RoutedExperts] | None:
        """See `divided_by`.

        Raises:
            EngineError: the runtime is missing or refused the graph of experts.
        """
        if (operands := self.operands) is None or graph.name not in operands.graphs:
            return None
        binding = self.load(operands.file, EXPERTS)
        return operands.graphs[graph.name], RoutedExperts(binding, operands, self.shared)

    def encoder(self, file: Path) -> Binding:
        """A vision encoder.

        Raises:
            EngineError: the runtime is missing or refused the graph.
        """
        return self.load(file, ENCODER)

    def _any_session(self) -> ort.InferenceSession:
        if not self._sessions and self.first is not None:
            self.load(self.first, self.first.name)
        return next(iter(self._sessions.values()))

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file, or of the binary that it was compiled to.

        Raises:
            EngineError: the runtime is missing or refused the graph.
        """
        wrapper = self.compiled.get(graph)
        if wrapper is not None or graph in self.compiled.values():
            return self._created(graph if wrapper is None else wrapper, is_shared=self.shares_weights)
        with scratch_folder("htp") as folder:
            return self._created(self._compiled_in(folder, graph), is_shared=False)

    def _created(self, model: Path, *, is_shared: bool) -> ort.InferenceSession:
        allocator = {_ALLOCATOR: "1"} if self.shared else {}
        return create_session(
            model,
            self.device,
            session_config={_SHARE: "1"} if is_shared else {},
            provider_options={**self.options.provider_options, **allocator},
        )

    def _compiled_in(self, folder: Path, graph: Path) -> Path:
        """The wrapper of a graph that is compiled in a child process: Ctrl-C ends that, but no compiler in this one.

        Raises:
            EngineError: the compiler is missing, refused the graph, or crashed.
        """
        wrapper = folder / "compiled.onnx"
        options = dict(self.options.provider_options)
        job = HtpStep(model=str(graph), session_config=context_config(wrapper), provider_options=options)
        with step(f"compile {graph.name} for {self.device.soc}"):
            try:
                call(create_sessions, HtpJob(soc=self.device.soc, steps=[job]))
            except ChildEndedError as error:
                fix = "Install the tested compiler: pip install edgekv[htp]. If it is, please report this graph."
                expected = "a graph that the HTP compiler accepts whole"
                raise EngineError(
                    f"{graph.name} on {self.device.soc}",
                    got=f"the compiler ended with {error.ending}",
                    expected=expected,
                    fix=fix,
                ) from None
        return wrapper


def takes_shared_memory(options: HtpOptions, on: Platform, has_binaries: bool) -> bool:
    """Whether caches are in shared memory: as the options say, with `auto` if they can be.

    Args:
        on: this machine.
        has_binaries: whether each graph can be loaded by itself.

    Raises:
        UsageError: it was asked for and cannot be.
    """
    if not options.shared_memory or (options.shared_memory == "auto" and not on.has_npu):
        return False
    missing, fix = "", ""
    if not has_rpc_memory(on):
        missing, fix = "no library of FastRPC (libcdsprpc) that can be loaded", "Install FastRPC of your board's vendor"
    elif not has_binaries:
        missing, fix = "only a binary of several graphs", "Compile without --no-per-graph-binaries"
    if missing and options.shared_memory is True:
        expected = "FastRPC, and a binary for each graph"
        raise UsageError("htp shared-memory", got=missing, expected=expected, fix=f"{fix}, or leave it out.")
    return not missing


def _wrappers(bundle: Bundle, device: Device, *, is_shared: bool = False) -> Mapping[Path, Path]:
    compiled = open_compiled(bundle, device.soc, compiler())
    if compiled is None:
        return {}
    files = {bundle.part_path(part): part.name for part in bundle.manifest.parts}
    if (steps := compiled.manifest.expert_steps) is not None:
        operands = ExpertOperands(bundle, steps)
        files |= {bundle.part_path(part): part.name for graph in operands.graphs.values() for part in graph.parts}
        files[operands.file] = EXPERTS
    by_part = {path: compiled.wrapper(name, is_shared=is_shared) for path, name in files.items()}
    if is_shared and any(by_part.values()):  # a part with one graph has no binary that it shares
        by_part = {path: wrapper or compiled.wrapper(files[path]) for path, wrapper in by_part.items()}
    wrappers = {part: wrapper for part, wrapper in by_part.items() if wrapper is not None}
    return wrappers | _encoder(bundle, device) if wrappers else {}


def _encoder(bundle: Bundle, device: Device) -> dict[Path, Path]:
    """The wrapper of the vision encoder, which has a binary of its own in any case."""
    compiled, vision = open_compiled(bundle, device.soc, compiler()), bundle.manifest.vision
    wrapper = None if compiled is None or vision is None else compiled.wrapper(ENCODER)
    return {} if wrapper is None or vision is None else {bundle.path / vision.file: wrapper}
