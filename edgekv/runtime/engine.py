"""Engines run the graphs of a bundle. Packages add engines through the entry-point group `edgekv.engines`."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Protocol

from edgekv.bundle import Bundle, GraphFormat, GraphRecord, Manifest
from edgekv.errors import EngineError, UsageError
from edgekv.graphs.cpu_mode import CPU_MODES, CpuMode
from edgekv.machine.system import parse_bytes
from edgekv.runtime.binding import BatchInvariance, Binding
from edgekv.runtime.expert_memory import ExpertStats
from edgekv.runtime.expert_operands import RoutedExperts
from edgekv.runtime.load_options import EngineOptions

GROUP = "edgekv.engines"

MAX_THREADS = 1024

_OWN = {
    "cpu": "edgekv.runtime.cpu:CpuEngine",
    "htp": "edgekv.runtime.htp:HtpEngine",
    "litert": "edgekv.runtime.litert:LitertEngine",
    "tflite": "edgekv.runtime.tflite:TfliteEngine",
}


class Engine(Protocol):
    """Loads the graphs of a bundle."""

    @property
    def name(self) -> str:
        """The value of `--engine`; another one if it computes other keys and values. Prefixes are stored under it."""

    @property
    def alignment_bytes(self) -> int:
        """Addresses that are bound must be a multiple of this."""

    @property
    def batch_invariance(self) -> BatchInvariance:
        """Whether a token's results depend on the graph that computes them; `unequal` if the engine does not say."""

    def load(self, file: Path, name: str) -> Binding:
        """A graph, ready to be bound. A file is read only once.

        Args:
            file: of the bundle.
            name: of the graph in the file.

        Raises:
            EngineError: the runtime is missing, or refused the graph.
        """


def wide_prefill_of(engine: Engine, manifest: Manifest) -> list[GraphRecord]:
    """Prefill graphs of an engine that builds its own, which take any number of tokens up to AR; see `CpuEngine`."""
    own = getattr(engine, "wide_prefill", None)
    return [] if own is None else own(manifest)


def appending_decode_of(engine: Engine, manifest: Manifest) -> list[GraphRecord]:
    """Decode graphs of an engine that builds some which append to the cache themselves; see `CpuEngine`."""
    own = getattr(engine, "appending_decode", None)
    return [] if own is None else own(manifest)


def run_by(engine: Engine, manifest: Manifest) -> Manifest:
    """A manifest with the cache of the graphs that an engine loads: it may build its own; see `CpuEngine`."""
    own = getattr(engine, "as_run", None)
    return manifest if own is None else own(manifest)


def divided_by(engine: Engine, graph: GraphRecord) -> tuple[GraphRecord, RoutedExperts | None] | None:
    """A graph in the parts in which an engine runs it, and the experts that the host runs between them, if any.

    None if it runs the bundle's parts.
    """
    own = getattr(engine, "divided", None)
    return None if own is None else own(graph)


def release_results_of(engine: Engine) -> None:
    """Give memory back to the system that a larger step of an engine needed; see `CpuEngine`."""
    release = getattr(engine, "release_results", None)
    if release is not None:
        release()


def open_encoder(engine: Engine, file: Path) -> Binding:
    """A vision encoder on an engine.

    Raises:
        EngineError: the engine has none but the decoder's graphs, or refused it.
    """
    encoder = getattr(engine, "encoder", None)
    if encoder is None:
        fix = "Use --engine cpu or htp."
        at = f"{file.name} on {engine.name}"
        raise EngineError(at, got="an engine for text alone", expected="one with picture encoders", fix=fix)
    binding: Binding = encoder(file)
    return binding


def expert_stats_of(engine: Engine) -> ExpertStats | None:
    """What became of experts that an engine reads within a budget, since it was made; None without one."""
    memory = getattr(engine, "experts", None)
    return None if memory is None else replace(memory.stats)


class EngineType(Protocol):
    """The object that an entry point of `edgekv.engines` names: usually the engine's class."""

    @property
    def graph_format(self) -> GraphFormat:
        """The graph format that it runs."""

    def open(self, bundle: Bundle, threads: int | None) -> Engine:
        """An engine for a bundle of this format.

        Args:
            threads: per operation; None for the runtime's own choice.

        Raises:
            UsageError: an unsupported option, or a bundle that the engine cannot run.
            EngineError: the runtime is missing, or an unsupported version.
        """


def find_engines() -> dict[str, metadata.EntryPoint]:
    """The engines by name: edgekv's own, and those of installed packages. None is imported."""
    installed = {point.name: point for point in metadata.entry_points(group=GROUP)}
    return _own_engines() | {name: point for name, point in sorted(installed.items()) if name not in _OWN}


def _own_engines() -> dict[str, metadata.EntryPoint]:
    return {name: metadata.EntryPoint(name, value, GROUP) for name, value in _OWN.items()}


def make_engine(bundle: Bundle, options: EngineOptions) -> Engine:
    """The engine that runs a bundle.

    Raises:
        UsageError: an unknown engine, one for other graphs, or an option that it does not have.
        EngineError: what the engine needs is not installed, or has an unsupported version.
        BundleError: a compiled binary was changed.
        devices.UnknownDeviceError: an unknown device in the manifest.
    """
    name, threads = options.engine, options.threads
    mode = _read_mode(name, options.cpu_mode)
    if (htp := options.htp) is not None and name != "htp":
        raise UsageError("htp", got=f"options with the engine {name}", expected="none", fix="Leave them out.")
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise UsageError("threads", got=threads, expected=f"1 to {MAX_THREADS}", fix="Use the number of cores.")
    engines = _own_engines() if name in _OWN else find_engines()  # which reads every installed package
    graph_format = bundle.manifest.graph_format
    if name not in engines:
        fix = f"Use {_runnable(graph_format)}."
        raise UsageError("engine", got=repr(name), expected=" or ".join(engines), fix=fix)
    kind = _load(engines[name])
    if kind.graph_format != graph_format:
        runnable = _runnable(graph_format)
        raise UsageError(
            "engine",
            got=f"{name} for a bundle of {graph_format} graphs",
            expected=runnable,
            fix=f"Use {runnable}, or export with --format {kind.graph_format}.",
        )
    budget_bytes = _read_budget(name, options.expert_budget)
    engine = kind.open(bundle, threads)
    if htp is not None:
        from edgekv.runtime.htp import HtpEngine

        assert isinstance(engine, HtpEngine), "no other engine has them"
        return engine.with_options(htp)
    if mode is None and budget_bytes is None:
        return engine
    from edgekv.runtime.cpu import CpuEngine

    assert isinstance(engine, CpuEngine), "no other engine has modes or a budget"
    engine = engine.in_mode(mode or engine.mode)
    return engine if budget_bytes is None else engine.with_expert_budget(bundle.manifest, budget_bytes)


def _read_budget(engine: str, budget: str | int | None) -> int | None:
    if budget is None:
        return None
    if engine != "cpu":
        raise UsageError("expert_budget", got=f"it with the engine {engine}", expected="none", fix="Leave it out.")
    return parse_bytes("expert_budget", budget) if isinstance(budget, str) else budget


def _read_mode(engine: str, text: str | None) -> CpuMode | None:
    if text is None:
        return None
    if engine != "cpu":
        raise UsageError("cpu_mode", got=f"{text} with the engine {engine}", expected="none", fix="Leave it out.")
    cpu_mode = next((mode for mode in CPU_MODES if mode == text), None)
    if cpu_mode is None:
        raise UsageError(
            "cpu_mode", got=repr(text), expected=", ".join(CPU_MODES), fix="Use emulate for exact results."
        )
    return cpu_mode


def _runnable(graph_format: GraphFormat) -> str:
    """The engines that run these graphs, in words."""
    names = []
    for name, point in find_engines().items():
        try:
            if _load(point).graph_format == graph_format:
                names.append(name)
        except EngineError:
            continue
    return " or ".join(names)


def _load(point: metadata.EntryPoint) -> EngineType:
    try:
        kind: EngineType = point.load()
        _ = kind.graph_format
    except Exception as error:  # importing a foreign module may raise anything
        raise EngineError(
            f"engine {point.name}",
            got=f"{type(error).__name__}: {error}",
            expected=f"an engine in {point.value}",
            fix="Install its package again, or use another engine.",
        ) from None
    return kind
