"""Experts in memory: graphs map them from files, and a budget says how many are in memory."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.machine.system import format_bytes
from edgekv.spec import expert_of, layer_of

if TYPE_CHECKING:
    from edgekv.bundle import Manifest
    from edgekv.runtime.mapped import MappedWeights

_MATRIX = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.")
_PACKED = "prepacked_"  # keys of what kernels have made of a weight; see `pack_weights`
_PAGE_BYTES = 4096


class Expert(NamedTuple):
    """One expert of a layer."""

    layer: int
    number: int


class _File(NamedTuple):
    """A file of a matrix of an expert, and the bytes of it that kernels read."""

    path: Path
    used_bytes: int


@dataclass(slots=True)
class ExpertStats:
    """What became of the experts that passes have read.

    Attributes:
        budget_bytes: for experts.
        held_bytes: of those that are in memory now.
        max_held_bytes: most that were; at most the budget.
        hits: experts that a pass read and that had stayed.
        misses: those that were read from files.
        read_bytes: of these.
    """

    budget_bytes: int
    held_bytes: int = 0
    max_held_bytes: int = 0
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0


GraphFiles = dict[Expert, set[_File]]
"""The files of each expert that a graph reads; graphs of other rows may have matrices packed in another way."""


class ExpertMemory:
    """The experts that are in memory, of all graphs of an engine, whose parts have one layer of them at most.

    Before a part runs, as many leave as it may read. Experts of the oldest pass leave first, and of one pass those of
    the last layers: the next pass reads these last. So a budget that is smaller than what a token reads still keeps
    experts that the next one finds.

    Attributes:
        stats: what became of experts.
        layers: with experts.
        total_bytes: of all experts in the bundle's files.
    """

    def __init__(self, budget_bytes: int, layers: frozenset[int] = frozenset(), total_bytes: int = 0) -> None:
        self.stats = ExpertStats(budget_bytes)
        self.layers, self.total_bytes = layers, total_bytes
        self._mappings: dict[_File, list[MappedWeights]] = {}
        self._held: dict[Expert, set[_File]] = {}
        self._last: dict[Expert, int] = {}
        """The pass that read each expert last."""
        self._pass = 0
        self._last_layer = -1

    @classmethod
    def of(cls, manifest: Manifest, budget_bytes: int) -> ExpertMemory:
        """For a bundle.

        Raises:
            UsageError: it has no experts, the budget is less than those of a layer, or the system cannot tell what is
                mapped.
        """
        own_bytes: dict[int, int] = {}
        for key in manifest.weights.matrices:
            if expert_of(key) is not None:
                layer = layer_of(key) or 0
                own_bytes[layer] = own_bytes.get(layer, 0) + manifest.weights.bytes(key)
        if not own_bytes:
            fix = "Leave it out."
            raise UsageError("expert_budget", got="a model without experts", expected="a mixture", fix=fix)
        total_bytes = sum(own_bytes.values())
        if budget_bytes < (least := max(own_bytes.values())):
            raise _too_small(budget_bytes, least, total_bytes)
        if not hasattr(os, "posix_fadvise") or not Path("/proc/self/maps").exists():
            fix = "Leave it out: the system pages what does not fit."
            raise UsageError("expert_budget", got="another system", expected="Linux", fix=fix)
        return cls(budget_bytes, frozenset(own_bytes), total_bytes)

    def add(self, model: bytes, folder: Path, weights: MappedWeights) -> GraphFiles:
        """The files of the experts of a graph that a session has loaded; none of any graph stays.

        Args:
            model: serialized, as it was loaded.
            folder: of its weights.
            weights: what the session maps.

        Raises:
            UsageError: the budget is less than the experts of its layer, as kernels read them.
        """
        import onnx

        files: GraphFiles = {}
        for tensor in onnx.load_from_string(model).graph.initializer:
            match = _MATRIX.match(tensor.name)
            if match is None or not tensor.external_data:
                continue
            entries = {entry.key: entry.value for entry in tensor.external_data}
            file = _File(folder / entries["location"], _used_bytes(entries))
            files.setdefault(Expert(int(match[1]), int(match[2])), set()).add(file)
            self._mappings.setdefault(file, []).append(weights)
        self._release(self._mappings)
        self._held.clear()
        self.stats.held_bytes = 0
        if (least := sum(file.used_bytes for own in files.values() for file in own)) > self.stats.budget_bytes:
            raise _too_small(self.stats.budget_bytes, least, self.total_bytes)
        return files

    def make_room(self, files: GraphFiles, most: int) -> None:
        """Let the oldest leave, so that a graph can read what is missing of its experts within the budget.

        Args:
            files: of the graph.
            most: experts that it reads at most.
        """
        stats, held = self.stats, self._held
        missing = sorted(
            (sum(file.used_bytes for file in own - held.get(expert, set())) for expert, own in files.items()),
            reverse=True,
        )
        limit_bytes = stats.budget_bytes - sum(missing[:most])
        if stats.held_bytes <= limit_bytes:
            return
        for expert in sorted(held, key=lambda expert: (expert in files, self._last[expert], -expert.layer)):
            leaving = held[expert] - files.get(expert, set())
            self._release(leaving)
            stats.held_bytes -= sum(file.used_bytes for file in leaving)
            held[expert] -= leaving
            if not held[expert]:
                del held[expert]
            if stats.held_bytes <= limit_bytes:
                return

    def read(self, layers: Sequence[int], chosen: NDArray[np.float32], files: GraphFiles) -> None:
        """Note what a graph has read.

        Args:
            layers: with experts, of the graph or of its part.
            chosen: as `edgekv.graphs.source.CHOSEN` gives it.
            files: of the graph.
        """
        stats = self.stats
        if layers[0] <= self._last_layer:
            self._pass += 1
        self._last_layer = layers[-1]
        for row, number in np.argwhere(chosen).tolist():
            expert = Expert(layers[row], number)
            if expert not in files:
                continue  # its matrices are so small that the graph itself has them
            held = self._held.setdefault(expert, set())
            missing_bytes = sum(file.used_bytes for file in files[expert] - held)
            stats.hits += not missing_bytes
            stats.misses += bool(missing_bytes)
            stats.read_bytes += missing_bytes
            stats.held_bytes += missing_bytes
            held |= files[expert]
            self._last[expert] = self._pass
        stats.max_held_bytes = max(stats.max_held_bytes, stats.held_bytes)

    def _release(self, files: Iterable[_File]) -> None:
        """Let the system take the pages of all graphs, and what it keeps of the files."""
        for file in files:
            for weights in self._mappings[file]:
                weights.release(file.path.name)
            with suppress(OSError):
                opened = os.open(file.path, os.O_RDONLY)
                try:
                    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
                finally:
                    os.close(opened)


def _used_bytes(entries: dict[str, str]) -> int:
    """Whole pages of what kernels have made of a weight; of the weight itself if they made nothing."""
    blobs = [blob for key in entries if key.startswith(_PACKED) for blob in entries[key].split("|")[1:]]
    sizes = [int(blob.split(";")[1]) for blob in blobs] or [int(entries["length"])]
    return sum(-(-size // _PAGE_BYTES) * _PAGE_BYTES for size in sizes)


class PartExperts:
    """The experts that a loaded graph reads.

    Attributes:
        chosen: the memory of its output `CHOSEN`.
    """

    __slots__ = ("_files", "_layers", "_memory", "_most", "chosen")

    def __init__(
        self,
        memory: ExpertMemory,
        layers: Sequence[int],
        chosen: NDArray[np.float32],
        files: GraphFiles,
        most: int,
    ) -> None:
        """Args: layers: with experts. chosen: see the class. files: of the graph. most: experts that it can read."""
        self._memory, self._layers, self._files, self._most = memory, layers, files, most
        self.chosen = chosen

    def make_room(self) -> None:
        """Let the oldest leave memory before a run."""
        self._memory.make_room(self._files, self._most)

    def note(self) -> None:
        """Note what the graph has read in its last run."""
        self._memory.read(self._layers, self.chosen, self._files)


def _too_small(budget_bytes: int, least: int, total_bytes: int) -> UsageError:
    return UsageError(
        "expert_budget",
        got=format_bytes(budget_bytes),
        expected=f"at least the experts of a layer, {least:,} bytes",
        fix=f"All experts together have {format_bytes(total_bytes)}.",
    )
