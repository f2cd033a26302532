"""The types of matrices that reach a goal of an export: a size, bits a weight, or a divergence from the float model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Protocol, TypeVar

from edgekv.errors import UsageError
from edgekv.spec import HEAD, DecoderInterface, DecoderSpec, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.sensitivity import Costs
from exporters.options import ExportOptions, RunOptions
from exporters.pipeline.inputs import BUNDLE, DecoderKey
from exporters.pipeline.planning import Planner
from exporters.pipeline.quality import Quality
from exporters.pipeline.store import PieceStore
from exporters.pipeline.write import ExportResult
from exporters.plan import ExportPlan, plan_export
from exporters.progress import Progress
from exporters.quantize.allocation import Allocation, Front, Fronts, possible_types
from exporters.resources import other_bytes

if TYPE_CHECKING:
    from exporters.estimate import DecodeSpeed

T = TypeVar("T")

_MAX_TRIED = 4
_MARGIN = 0.95
_AIM = 0.998  # of a size: a bundle that is larger than estimated is made twice
_HOPELESS = 1.25
_MEASURED_BYTES = 1024  # that the manifest grows by when the bundle is checked and measured: three records, a verdict
_FILLED = 0.98  # of a size, or the estimate is corrected once


class PieceReader(Protocol):
    """Makes the pieces of an export, and reads what is wanted of them."""

    def __call__(
        self, derived: Checkpoint, decoder: DecoderKey, names: Sequence[str], read: Callable[[PieceStore], T], /
    ) -> T: ...


def decode_speed(export: ExportPlan, run: RunOptions, progress: Progress) -> DecodeSpeed:
    """What simulates the decode graph of an export at its largest context."""
    from exporters.estimate import DecodeSpeed  # the compiler's package is optional

    spec, options = export.checkpoint.spec, export.options
    graphs = [graph for graph in export.graphs if graph.role != "score"]
    graph = max((graph for graph in graphs if graph.role == "decode"), key=lambda graph: graph.context)
    interface = DecoderInterface.of(spec, graph.context, options.cache_dtype, options.cache_layout, "u16")
    return DecodeSpeed(spec, options.recipe, graph, graphs, interface, options.device, run, progress)


def allocated(
    checkpoint: Checkpoint,
    options: ExportOptions,
    export: ExportPlan,
    planner: Planner,
    finished: PieceReader,
    speed: DecodeSpeed | None = None,
) -> ExportPlan:
    """The export whose matrices have the types that reach the goals of the options.

    Each proposal is written, and measured if a goal is a divergence; the next one corrects what was expected. Its speed
    is simulated before it is written.

    Args:
        checkpoint: the checkpoint.
        options: with a goal.
        export: both together.
        planner: takes the pieces.
        finished: makes them.
        speed: simulates types; needed if a goal is a speed.

    Raises:
        UsageError: no types reach the goals; names the nearest.
        EngineError: the HTP compiler, which simulates a speed, is missing or failed.
    """
    spec, plain = export.checkpoint.spec, replace(options, target_mb=None, max_kl=None, target_tokens_per_s=None)
    has_head = _chooses_head(export)
    types = possible_types(spec, "litert" if options.graph_format == "tflite" else "cpu", head=has_head)
    measured = export
    if has_head and spec.shares_vocabulary:
        # A head of its own has other rows than the embeddings: what scales its inputs is in them.
        measured = plan_export(checkpoint, replace(plain, recipe=options.recipe.with_head(types[HEAD][0])))
    name = planner.sensitivities(measured, types)
    exact = planner.exact(measured)
    costs = finished(measured.checkpoint, exact, [name], lambda store: store.answer(name, Costs))
    choose: Choose = Fronts(spec, costs).choose
    if options.target_tokens_per_s is not None:
        assert speed is not None, "the goal is a speed"
        times = speed.times(types)
        timed = {name: {dtype: nats[dtype] for dtype in nats if dtype in times[name]} for name, nats in costs.items()}
        choose = _FastEnough(speed, Fronts(spec, timed, times), options.target_tokens_per_s)
    goal: _Goal
    if options.recipe.mean_bits is not None:
        goal = _mean_bits(choose, spec, options.recipe.name, options.recipe.mean_bits)
    elif options.target_mb is not None:
        head = None if has_head else export.options.recipe.rule(HEAD).dtype
        goal = _Size(choose, options, other_bytes(export.checkpoint, len(export.graphs), head))
    elif options.max_kl is not None:
        goal = _Divergence(choose, options)
    else:
        goal = _Known(choose)
    fast = "" if options.target_tokens_per_s is None else f"{options.target_tokens_per_s:g}tps"
    while True:
        chosen = goal.propose()
        recipe = chosen.recipe(options.recipe, "-".join(filter(None, (goal.name, fast))))
        tried = plan_export(checkpoint, replace(plain, recipe=recipe))
        exported = planner.export(tried)
        names = goal.pieces(exported)
        if goal.is_reached(
            chosen, finished(tried.checkpoint, exported.decoder, names, partial(goal.read, names=names))
        ):
            return tried


def _chooses_head(export: ExportPlan) -> bool:
    """Whether the head may get another type: one of 8 bits, where the recipe names no mean of bits of the layers.

    A tied head of 4 bits takes more bytes than one that is the table of embeddings too, and loses more: only time can
    speak for it.
    """
    recipe, rule = export.options.recipe, export.options.recipe.rule(HEAD)
    spec = export.checkpoint.spec
    if recipe.mean_bits is not None or spec.target is not None or rule.dtype != "int8" or rule.method == "stored":
        return False
    return export.options.target_tokens_per_s is not None or not spec.tied_head


Choose = Callable[[Callable[[Front], Allocation]], Allocation]
"""Chooses by what a front offers, within the other goals."""


class _FastEnough:
    """Chooses types that decode at least a given number of tokens per second.

    Args:
        speed: simulates types.
        fronts: the allocations.
        min_per_s: the goal.
    """

    def __init__(self, speed: DecodeSpeed, fronts: Fronts, min_per_s: float) -> None:
        self._speed = speed
        self._fronts = fronts
        self._min_per_s = min_per_s
        smallest = fronts.at(0.0).smallest
        self._base_us = speed.us(smallest.types) - smallest.us
        """Of what is no matrix of the layers."""

    def __call__(self, choice: Callable[[Front], Allocation]) -> Allocation:
        """What is chosen among those that are fast enough.

        Sums of matrices are corrected by what the simulation of the whole says.

        Raises:
            UsageError: none is; names the fastest.
        """
        max_us = 1e6 / self._min_per_s
        fastest_us = math.inf
        for _ in range(_MAX_TRIED):
            chosen = self._fronts.choose(choice, max_us - self._base_us)
            us = self._speed.us(chosen.types)
            if us <= max_us:
                return chosen
            fastest_us = min(fastest_us, us)
            self._base_us = us - chosen.us
        raise UsageError(
            "--target-tokens-per-s",
            got=f"{self._min_per_s:g}",
            expected=f"at most {math.floor(1e7 / fastest_us) / 10:g}: the fastest types within the other goals",
            fix="Ask for fewer, allow more bytes or a larger divergence, or a smaller --context.",
        )


class _Goal(Protocol):
    """What an export must reach."""

    name: str

    def propose(self) -> Allocation:
        """What to try next."""

    def pieces(self, exported: ExportResult) -> list[str]:
        """Names of the pieces that say whether the goal is reached."""

    def read(self, store: PieceStore, names: Sequence[str]) -> list[float]:
        """What they say."""

    def is_reached(self, chosen: Allocation, figures: Sequence[float]) -> bool:
        """Whether the goal is reached; if not, the next proposal is another."""


class _Known:
    """A goal that is reached before anything is measured: the bytes of matrices are known before they are written.

    Args:
        choose: chooses allocations.
        choice: what to take of a front; the least loss within the other goals if left out.
        name: of the goal.
    """

    def __init__(
        self, choose: Choose, choice: Callable[[Front], Allocation] = lambda front: front.largest, name: str = ""
    ) -> None:
        self.name = name
        self._choose = choose
        self._choice = choice

    def propose(self) -> Allocation:
        return self._choose(self._choice)

    def pieces(self, exported: ExportResult) -> list[str]:
        return [exported.write]

    def read(self, store: PieceStore, names: Sequence[str]) -> list[float]:
        return []

    def is_reached(self, chosen: Allocation, figures: Sequence[float]) -> bool:
        return True


def _mean_bits(choose: Choose, spec: DecoderSpec, name: str, max_bits: float) -> _Known:
    """The least loss with so many bits a weight on average, with scales, over the matrices of the layers.

    Args:
        choose: chooses allocations.
        spec: the decoder.
        name: of the recipe.
        max_bits: the goal.

    Raises:
        UsageError: no allocation reaches it; names the nearest.
    """
    shapes, smallest = matrices(spec), choose(lambda front: front.smallest)
    weights = sum(math.prod(shapes[tensor]) for tensor in smallest.types)
    max_bytes = int(max_bits * weights / 8)
    if smallest.bytes > max_bytes:
        least = math.ceil(smallest.bytes * 80 / weights) / 10
        raise UsageError(
            f"--recipe {name}",
            got=f"{max_bits:g} bits a weight",
            expected=f"{least:g} or more: every matrix of the layers in 4 bits, and their scales",
            fix=f"Use --recipe front-{least:g}.",
        )
    return _Known(choose, lambda front: front.within(max_bytes), name)


class _Size:
    """A bundle within a limit in bytes, and of a divergence if there is one.

    Args:
        choose: chooses allocations.
        options: with the goal in MB.
        other_bytes: an estimate of all other files of the bundle.
    """

    def __init__(self, choose: Choose, options: ExportOptions, other_bytes: int) -> None:
        assert options.target_mb is not None, "it is the goal"
        self.name = f"{options.target_mb:g}mb"
        self._choose = choose
        self._max_mb = options.target_mb
        self._max_nats = options.max_kl
        self._other_bytes = other_bytes
        self._has_corrected = False
        self._least = choose(lambda front: front.smallest)
        min_bytes = self._least.bytes + other_bytes
        if min_bytes > _HOPELESS * self._max_mb * 1e6:
            raise self._refused(f"about {_mb_up(min_bytes):g}")

    def propose(self) -> Allocation:
        """The allocation that loses least in the bytes that are left beside all other files."""
        max_bytes = int(_AIM * self._max_mb * 1e6) - self._other_bytes
        return self._choose(lambda front: front.within(max_bytes))

    def pieces(self, exported: ExportResult) -> list[str]:
        if self._max_nats is None:
            return [exported.write]
        assert exported.quality is not None, "the options say that it is measured"
        return [exported.write, exported.quality]

    def read(self, store: PieceStore, names: Sequence[str]) -> list[float]:
        """Bytes of the bundle with its manifest as it will be, and the divergence on the text that loses most."""
        written = [path for inner, path in store.files(names[0]).items() if inner.startswith(f"{BUNDLE}/")]
        found_bytes = sum(path.stat().st_size for path in written) + _MEASURED_BYTES
        return [float(found_bytes), *(_largest_nats(store, name) for name in names[1:])]

    def is_reached(self, chosen: Allocation, figures: Sequence[float]) -> bool:
        """Whether the goal is reached, and its bytes are used; if not, the next proposal knows the other files.

        Raises:
            UsageError: no allocation reaches it.
        """
        max_bytes, self._other_bytes = self._max_mb * 1e6, int(figures[0]) - chosen.bytes
        if figures[0] > max_bytes:
            min_bytes = self._least.bytes + self._other_bytes
            if min_bytes > max_bytes:
                raise self._refused(f"at least {_mb_up(min_bytes):g}")
            return False
        is_full, self._has_corrected = figures[0] >= _FILLED * max_bytes or self._has_corrected, True
        if not is_full and self.propose() != chosen:
            return False
        if self._max_nats is not None and figures[1] > self._max_nats:
            raise UsageError(
                "--max-kl",
                got=f"{self._max_nats:g} with --target-mb {self._max_mb:g}",
                expected=f"{figures[1]:g} or more, which the types that lose least in these bytes give",
                fix="Allow more bytes, or a larger divergence.",
            )
        return True

    def _refused(self, least: str) -> UsageError:
        return UsageError(
            "--target-mb",
            got=f"{self._max_mb:g}",
            expected=f"{least}: every matrix in its smallest type, and all other files",
            fix="Allow more, or write fewer graphs (--ar, --context).",
        )


class _Divergence:
    """At most so much divergence from the float model, on each text that the export measures.

    Args:
        choose: chooses allocations.
        options: with the goal in nats.
    """

    def __init__(self, choose: Choose, options: ExportOptions) -> None:
        assert options.max_kl is not None, "it is the goal"
        self.name = f"kl-{options.max_kl:g}"
        self._choose = choose
        self._max_nats = options.max_kl
        self._best = "8 bits for every matrix"
        if options.target_tokens_per_s is not None:
            self._best = "the best types that are fast enough"
        self._tried = 0
        self._wanted_nats = _MARGIN * self._max_nats

    def propose(self) -> Allocation:
        """The smallest allocation of which the goal can be expected."""
        self._tried += 1
        if self._tried >= _MAX_TRIED:
            return self._choose(lambda front: front.largest)
        return self._choose(lambda front: front.losing(self._wanted_nats))

    def pieces(self, exported: ExportResult) -> list[str]:
        assert exported.quality is not None, "the options say that it is measured"
        return [exported.quality]

    def read(self, store: PieceStore, names: Sequence[str]) -> list[float]:
        """The divergence on the text that loses most."""
        return [_largest_nats(store, name) for name in names]

    def is_reached(self, chosen: Allocation, figures: Sequence[float]) -> bool:
        """Whether the goal is reached; if not, the next proposal is larger.

        Raises:
            UsageError: no allocation reaches it.
        """
        if figures[0] <= self._max_nats:
            return True
        if chosen.bytes == self._choose(lambda front: front.largest).bytes:
            raise UsageError(
                "--max-kl",
                got=f"{self._max_nats:g}",
                expected=f"{figures[0]:g} or more, which {self._best} give",
                fix="Allow more, use --kv s16, or calibrate on other text.",
            )
        self._wanted_nats = min(self._wanted_nats, chosen.nats) * _MARGIN * self._max_nats / figures[0]
        return False


def _largest_nats(store: PieceStore, name: str) -> float:
    """The divergence on the text that loses most, nats a token."""
    return max(record.kl_nats for record in store.answer(name, Quality).records if record.text != "template")


def _mb_up(size_bytes: int) -> float:
    """In MB, rounded up to a tenth."""
    return math.ceil(size_bytes / 1e5) / 10
