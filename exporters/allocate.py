"""The types of matrices that reach a goal of an export: a size, bits a weight, or a divergence from the float model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

from edgekv.errors import UsageError
from edgekv.spec import DecoderSpec, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.sensitivity import Costs
from exporters.options import ExportOptions
from exporters.pipeline.inputs import BUNDLE, Exact
from exporters.pipeline.planning import Exported, Planner
from exporters.pipeline.quality import Quality
from exporters.pipeline.store import PieceStore
from exporters.prepared import Prepared, prepare
from exporters.quantize.allocation import Allocation, Front, possible_types
from exporters.resources import other_bytes

T = TypeVar("T")

_MOST_TRIED = 4
_MARGIN = 0.95
_AIM = 0.998  # of a size: a bundle that is larger than estimated is made twice
_HOPELESS = 1.25
_MEASURED_BYTES = 1024  # that the manifest grows by when the bundle is checked and measured: three records, a verdict
_FILLED = 0.98  # of a size, or the estimate is corrected once


class Finished(Protocol):
    """Makes the pieces of a prepared export, and reads what is wanted of them."""

    def __call__(
        self, prepared: Prepared, exact: Exact, names: Sequence[str], read: Callable[[PieceStore], T], /
    ) -> T: ...


def allocated(
    checkpoint: Checkpoint, options: ExportOptions, prepared: Prepared, planner: Planner, finished: Finished
) -> Prepared:
    """The export whose matrices have the types that reach the goal of the options.

    Each proposal is written, and measured if the goal is a divergence; the next one corrects what was expected.

    Args:
        checkpoint: the checkpoint.
        options: with a goal.
        prepared: both together.
        planner: takes the pieces.
        finished: makes them.

    Raises:
        UsageError: no types reach the goal; names the nearest.
    """
    spec, plain = prepared.checkpoint.spec, replace(options, target_mb=None, max_kl=None)
    name = planner.sensitivities(
        prepared, possible_types(spec, "litert" if options.graph_format == "tflite" else "cpu")
    )
    exact = planner.exact(prepared)
    front = Front.of(spec, finished(prepared, exact, [name], lambda store: store.answer(name, Costs)))
    goal: _Size | _MeanBits | _Divergence
    if options.recipe.mean_bits is not None:
        goal = _MeanBits(front, spec, options.recipe.name, options.recipe.mean_bits)
    elif options.target_mb is not None:
        goal = _Size(front, options.target_mb, other_bytes(prepared.checkpoint, len(prepared.graphs)))
    else:
        assert options.max_kl is not None, "one of the three"
        goal = _Divergence(front, options.max_kl)
    while True:
        chosen = goal.propose()
        tried = prepare(checkpoint, replace(plain, recipe=chosen.recipe(options.recipe, goal.name)))
        exported = planner.export(tried)
        wanted = goal.piece(exported)
        if goal.is_reached(chosen, finished(tried, exported.folded.exact, [wanted], partial(goal.read, name=wanted))):
            return tried


class _Size:
    """A bundle within a limit in bytes.

    Args:
        front: the allocations.
        most_mb: the goal.
        other_bytes: an estimate of all other files of the bundle.
    """

    def __init__(self, front: Front, most_mb: float, other_bytes: int) -> None:
        self.name = f"{most_mb:g}mb"
        self._front = front
        self._most_mb = most_mb
        self._other_bytes = other_bytes
        self._has_corrected = False
        least_bytes = front.smallest.bytes + other_bytes
        if least_bytes > _HOPELESS * most_mb * 1e6:
            raise self._refused(f"about {_mb_up(least_bytes):g}")

    def propose(self) -> Allocation:
        """The allocation that loses least in the bytes that are left beside all other files."""
        return self._front.within(int(_AIM * self._most_mb * 1e6) - self._other_bytes)

    def piece(self, exported: Exported) -> str:
        """Name of the piece that says whether the goal is reached."""
        return exported.write

    def read(self, store: PieceStore, name: str) -> int:
        """Bytes of the bundle, with its manifest as it will be."""
        written = [path for inner, path in store.files(name).items() if inner.startswith(f"{BUNDLE}/")]
        return sum(path.stat().st_size for path in written) + _MEASURED_BYTES

    def is_reached(self, chosen: Allocation, found_bytes: float) -> bool:
        """Whether the goal is reached, and its bytes are used; if not, the next proposal knows the other files.

        Raises:
            UsageError: no allocation reaches it.
        """
        most_bytes, self._other_bytes = self._most_mb * 1e6, int(found_bytes) - chosen.bytes
        if found_bytes <= most_bytes:
            is_full, self._has_corrected = found_bytes >= _FILLED * most_bytes or self._has_corrected, True
            return is_full or self.propose() == chosen
        least_bytes = self._front.smallest.bytes + self._other_bytes
        if least_bytes > most_bytes:
            raise self._refused(f"at least {_mb_up(least_bytes):g}")
        return False

    def _refused(self, least: str) -> UsageError:
        return UsageError(
            "--target-mb",
            got=f"{self._most_mb:g}",
            expected=f"{least}: every matrix of the layers in 4 bits, and all other files",
            fix="Allow more, or write fewer graphs (--ar, --context).",
        )


class _MeanBits:
    """At most so many bits a weight on average, with scales, over the matrices of the layers.

    Args:
        front: the allocations.
        spec: the decoder.
        name: of the recipe.
        most_bits: the goal.

    Raises:
        UsageError: no allocation reaches it; names the nearest.
    """

    def __init__(self, front: Front, spec: DecoderSpec, name: str, most_bits: float) -> None:
        self.name = name
        self._front = front
        shapes = matrices(spec)
        weights = sum(math.prod(shapes[tensor]) for tensor in front.smallest.types)
        self._most_bytes = int(most_bits * weights / 8)
        if front.smallest.bytes > self._most_bytes:
            least = math.ceil(front.smallest.bytes * 80 / weights) / 10
            raise UsageError(
                f"--recipe {name}",
                got=f"{most_bits:g} bits a weight",
                expected=f"{least:g} or more: every matrix of the layers in 4 bits, and their scales",
                fix=f"Use --recipe front-{least:g}.",
            )

    def propose(self) -> Allocation:
        """The allocation within these bytes that loses least."""
        return self._front.within(self._most_bytes)

    def piece(self, exported: Exported) -> str:
        """Name of the bundle."""
        return exported.write

    def read(self, store: PieceStore, name: str) -> float:
        """Nothing: the types have these bits."""
        return 0.0

    def is_reached(self, chosen: Allocation, found: float) -> bool:
        """Always: the bytes of matrices are known before they are written."""
        return True


class _Divergence:
    """At most so much divergence from the float model, on each text that the export measures.

    Args:
        front: the allocations.
        most_nats: the goal.
    """

    def __init__(self, front: Front, most_nats: float) -> None:
        self.name = f"kl-{most_nats:g}"
        self._front = front
        self._most_nats = most_nats
        self._tried = 0
        self._wanted_nats = _MARGIN * most_nats

    def propose(self) -> Allocation:
        """The smallest allocation of which the goal can be expected."""
        self._tried += 1
        return self._front.largest if self._tried >= _MOST_TRIED else self._front.losing(self._wanted_nats)

    def piece(self, exported: Exported) -> str:
        """Name of the piece that says whether the goal is reached."""
        assert exported.quality is not None, "the options say that it is measured"
        return exported.quality

    def read(self, store: PieceStore, name: str) -> float:
        """The divergence on the text that loses most."""
        return max(each.kl_nats for each in store.answer(name, Quality).records if each.text != "template")

    def is_reached(self, chosen: Allocation, found_nats: float) -> bool:
        """Whether the goal is reached; if not, the next proposal is larger.

        Raises:
            UsageError: no allocation reaches it.
        """
        if found_nats <= self._most_nats:
            return True
        if chosen.bytes == self._front.largest.bytes:
            raise UsageError(
                "--max-kl",
                got=f"{self._most_nats:g}",
                expected=f"{found_nats:g} or more, which 8 bits for every matrix give",
                fix="Allow more, use --kv s16, or calibrate on other text.",
            )
        self._wanted_nats = min(self._wanted_nats, chosen.nats) * _MARGIN * self._most_nats / found_nats
        return False


def _mb_up(size_bytes: int) -> float:
    """In MB, rounded up to a tenth."""
    return math.ceil(size_bytes / 1e5) / 10
