"""ONNX Runtime on the CPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnxruntime as ort

from edgekv.bundle import Bundle, GraphFormat, GraphRecord, Manifest, read_manifest
from edgekv.errors import EdgeKVError, EngineError, UsageError
from edgekv.graphs.cpu_mode import CpuMode, RenderedMode, can_build
from edgekv.graphs.graph_cache import emulated_bytes, rendered_graph
from edgekv.graphs.onnx_session import PROVIDERS, session_options
from edgekv.graphs.processor import is_arm, processors
from edgekv.graphs.source import (
    EncoderSource,
    PartSource,
    Source,
    appending_decode,
    built_manifest,
    can_append,
    divided_by_experts,
    signed_cache,
    wide_prefill,
)
from edgekv.machine.graph_file import loadable
from edgekv.machine.steps import step
from edgekv.machine.system import format_bytes, free_memory_bytes, return_freed_memory
from edgekv.runtime.binding import BatchInvariance, Binding, MemoryBinding
from edgekv.runtime.expert_memory import ExpertMemory, PartExperts
from edgekv.runtime.idle_memory import IdleMemory
from edgekv.runtime.mapped import MappedWeights
from edgekv.runtime.result_memory import release_results, share_results

_Loaded = tuple[ort.InferenceSession, MappedWeights | None, PartExperts | None]

_MIN_GROWTH = 2  # of 16-bit integers as float32; those of 4 bits grow eightfold


@dataclass(frozen=True, slots=True)
class CpuEngine:
    """ONNX Runtime on the CPU.

    Attributes:
        threads: threads per operation; None for ONNX Runtime's own choice.
        mode: how it computes.
        batch_invariant: whether decode steps have the bits of rows of larger steps, for bundles whose drafts are
            verified. Only graphs that are built here do, on x86: kernels for Arm were seen to differ in the last bit.
        experts: which of a mixture stay in memory; None for as many as the system keeps.
    """

    graph_format: ClassVar[GraphFormat] = "onnx"

    threads: int | None = None
    mode: CpuMode = "emulate"
    batch_invariant: bool = False
    experts: ExpertMemory | None = None
    _sessions: dict[Path, _Loaded] = field(default_factory=dict, init=False, repr=False, compare=False)
    _manifests: dict[Path, Manifest] = field(default_factory=dict, repr=False, compare=False)
    _run_as: dict[Path, Manifest] = field(default_factory=dict, init=False, repr=False, compare=False)
    _idle_results: IdleMemory = field(default_factory=IdleMemory, init=False, repr=False, compare=False)

    @classmethod
    def open(cls, bundle: Bundle, threads: int | None) -> CpuEngine:
        """An engine in the mode `emulate`.

        Raises:
            UsageError: more threads than this process may use.
        """
        max_threads = processors()
        if threads is not None and threads > max_threads:
            fix = "Leave --threads out for all of them; no mode is faster with more."
            raise UsageError("threads", got=threads, expected=f"1 to {max_threads}, the processors", fix=fix)
        has_drafts = bundle.manifest.graph("verify") is not None
        is_invariant = has_drafts and can_build() and not is_arm()
        return cls(threads, batch_invariant=is_invariant, _manifests={bundle.path: bundle.manifest})

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError("threads", got=self.threads, expected="at least 1", fix="Give a positive number.")

    def in_mode(self, mode: CpuMode) -> CpuEngine:
        """An engine with another mode."""
        return replace(self, mode=mode)

    def with_expert_budget(self, manifest: Manifest, budget_bytes: int) -> CpuEngine:
        """An engine that has at most `budget_bytes` of experts in memory.

        Raises:
            UsageError: the mode computes all experts, or see `ExpertMemory.of`.
        """
        if self.mode == "emulate":
            got = "the mode emulate, which computes every expert"
            raise UsageError("expert_budget", got=got, expected="fast or exact16", fix="Add --cpu-mode fast.")
        return replace(self, experts=ExpertMemory.of(manifest, budget_bytes))

    @property
    def name(self) -> str:
        """`cpu`; in other modes than `emulate` with the mode, because keys and values differ."""
        return "cpu" if self.mode == "emulate" else f"cpu-{self.mode}"

    @property
    def batch_invariance(self) -> BatchInvariance:
        """`in-place` for bundles with verify graphs: their graphs here avoid what depends on other rows."""
        return "in-place" if self.batch_invariant else "unequal"

    @property
    def alignment_bytes(self) -> int:
        return 1

    def wide_prefill(self, manifest: Manifest) -> list[GraphRecord]:
        """Prefill graphs that take any number of tokens, in place of the bundle's; none in `emulate`.

        Their results have the roundings of a whole prompt, as those of prefill graphs do.
        """
        return [] if self.mode == "emulate" else wide_prefill(manifest)

    def appending_decode(self, manifest: Manifest) -> list[GraphRecord]:
        """Decode graphs that append to the cache themselves, in place of the bundle's; none in `emulate`."""
        return appending_decode(manifest) if self._appends(manifest) else []

    def as_run(self, manifest: Manifest) -> Manifest:
        """The manifest with the cache of the graphs that are loaded: exported ones where none can be built."""
        if self.mode == "emulate" and not can_build():
            return manifest
        built = built_manifest(manifest)
        return signed_cache(built) if self._appends(built) else built

    def divided(self, graph: GraphRecord) -> tuple[GraphRecord, None] | None:
        """See `divided_by`: within a budget, a part has one layer of experts at most."""
        return None if self.experts is None else (self._in_parts(graph), None)

    def _in_parts(self, graph: GraphRecord) -> GraphRecord:
        return graph if self.experts is None else divided_by_experts(graph, self.experts.layers)

    def _appends(self, manifest: Manifest) -> bool:
        return self.mode != "emulate" and not self.batch_invariant and can_append(manifest)

    def load(self, file: Path, name: str) -> Binding:
        if file not in self._sessions:
            with step(f"load {file.name} on {self.name}"):
                self._sessions[file] = self._load(file)
        session, weights, experts = self._sessions[file]
        return MemoryBinding(session, weights, experts=experts)

    def release_results(self) -> None:
        """Give memory back to the system that a larger step needed, if it is to leave; see `IdleMemory`."""
        if self._idle_results.leaves():
            release_results()

    def encoder(self, file: Path) -> Binding:
        """A vision encoder: in `emulate` its graph as it is, else one that is built for the mode.

        Raises:
            EngineError: the runtime refused the graph.
        """
        if file not in self._sessions:
            with step(f"load {file.name} on {self.name}"):
                self._sessions[file] = self._load_encoder(file)
        session, weights, _ = self._sessions[file]
        return MemoryBinding(session, weights)

    def _load_encoder(self, file: Path) -> _Loaded:
        vision = self._manifest(file.parent).vision
        if self.mode == "emulate" or vision is None:
            return self.session(file), None, None
        return self._rendered(file, EncoderSource(file.parent, vision), self.mode)

    def session(self, graph: Path) -> ort.InferenceSession:
        """A session of an ONNX file as it is; `load` builds another graph, which gives the same results in `emulate`.

        Raises:
            EngineError: the runtime refused the graph.
        """
        return self._session(graph, loadable(graph), graph.parent)

    def _load(self, file: Path) -> _Loaded:
        """A session of the graph that is built for the mode, and the weights that it maps."""
        source = self._source(file)
        if not self._sessions:
            self._check_memory(source)
        if self.mode != "emulate":
            return self._rendered(file, source, self.mode, has_shapes=not source.takes_fewer)
        content = emulated_bytes(source, batch_invariant=self.batch_invariant)
        return self._session(file, content, file.parent), None, None

    def _rendered(self, file: Path, source: Source, mode: RenderedMode, *, has_shapes: bool = True) -> _Loaded:
        """A session of the graph that is built for a mode, and the weights that it maps."""
        try:
            built = rendered_graph(source, mode, batch_invariant=self.batch_invariant)
            with built as (content, folder), MappedWeights.within(folder) as weights:
                session = self._session(file, content, folder, has_shapes=has_shapes, is_optimized=True)
            # The session maps what its kernels made of the weights; their own copies are freed.
            return_freed_memory()
            weights.release()
            experts = None
            if self.experts is not None and isinstance(source, PartSource) and source.tells_experts:
                model = source.manifest.model
                assert model.experts is not None, "its layers have some"
                files, most = self.experts.add(content, folder, weights), source.graph.ar * model.experts.used
                chosen = np.zeros((len(source.expert_layers), model.experts.count), np.float32)
                experts = PartExperts(self.experts, source.expert_layers, chosen, files, most)
            return session, weights, experts
        except EdgeKVError:
            raise
        except Exception as error:  # what the runtime raises while it packs weights has no common base
            raise _refused(file, error) from None

    def _source(self, file: Path) -> PartSource:
        """What a bundle's manifest says of a file."""
        if file.parent not in self._run_as:
            self._run_as[file.parent] = self.as_run(self._manifest(file.parent))
        manifest = self._run_as[file.parent]
        own = self.wide_prefill(manifest), self.appending_decode(manifest)
        source = PartSource.of(file.parent, manifest, file.name, *own, divide=self._in_parts)
        return replace(source, tells_experts=self.experts is not None and bool(source.expert_layers))

    def _manifest(self, folder: Path) -> Manifest:
        if folder not in self._manifests:
            self._manifests[folder] = read_manifest(folder)
        return self._manifests[folder]

    def _check_memory(self, source: PartSource) -> None:
        """Refuse weights that cannot fit: `emulate` makes floats of their integers.

        Raises:
            EngineError: there is too little free memory.
        """
        weights_bytes = source.manifest.weights.total_bytes
        if self.experts is not None:
            weights_bytes -= max(0, self.experts.total_bytes - self.experts.stats.budget_bytes)
        is_emulated = self.mode == "emulate"
        min_bytes = _MIN_GROWTH * weights_bytes if is_emulated else weights_bytes
        try:
            free_bytes = free_memory_bytes()
        except EngineError:
            return
        if free_bytes < min_bytes:
            raise EngineError(
                f"memory for {source.folder.name}",
                got=f"{format_bytes(free_bytes)} free",
                expected=f"at least {format_bytes(min_bytes)} in the mode {self.mode}",
                fix="Use --cpu-mode fast, or end other programs." if is_emulated else "End other programs.",
            )

    def _session(
        self, graph: Path, model: str | bytes, weights: Path, *, has_shapes: bool = True, is_optimized: bool = False
    ) -> ort.InferenceSession:
        try:
            options = session_options(weights, self.threads)
            if is_optimized:  # when its weights were packed
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
            # A pattern for each number of tokens would be kept.
            options.enable_mem_pattern = has_shapes and not self.batch_invariant
            # The planner compares each result with all before it whose sizes it does not know: seconds for a graph.
            options.enable_mem_reuse = has_shapes
            share_results(options)
            return ort.InferenceSession(model, options, providers=PROVIDERS)
        except Exception as error:  # the runtime's exceptions have no common base
            raise _refused(graph, error) from None


def _refused(graph: Path, error: Exception) -> EngineError:
    return EngineError(
        f"{graph.name} on the CPU",
        got=" ".join(str(error).split()),
        expected="a graph that ONNX Runtime loads",
        fix="Export the bundle again, with this edgekv and this onnxruntime.",
    )
