"""Experts in memory: graphs map them from files, and a budget says how many stay between two passes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

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
        budget_bytes: for experts that stay between two passes.
        held_bytes: of those that stay now.
        max_pass_bytes: most that stayed and what a pass read beyond, together.
        hits: experts that a pass read and that had stayed.
        misses: those that were read from files.
        read_bytes: of these.
    """

    budget_bytes: int
    held_bytes: int = 0
    max_pass_bytes: int = 0
    hits: int = 0
    misses: int = 0
    read_bytes: int = 0


GraphFiles = dict[Expert, set[_File]]
"""The files of each expert that a graph reads; graphs of other rows may have matrices packed in another way."""


class ExpertMemory:
    """The experts that stay in memory, of all graphs of an engine.

    Experts of the oldest pass leave first, and of one pass those of the last layers: the next pass reads these last. So
    a budget that is smaller than what a token reads still keeps experts that the next one finds.
    """

    def __init__(self, budget_bytes: int) -> None:
        self.stats = ExpertStats(budget_bytes)
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
            UsageError: it has no experts, the budget is less than one, or the system cannot tell what is mapped.
        """
        own_bytes: dict[Expert, int] = {}
        for key in manifest.weights.matrices:
            if (number := expert_of(key)) is not None:
                expert = Expert(layer_of(key) or 0, number)
                own_bytes[expert] = own_bytes.get(expert, 0) + manifest.weights.bytes(key)
        if not own_bytes:
            fix = "Leave it out."
            raise UsageError("expert_budget", got="a model without experts", expected="a mixture", fix=fix)
        if budget_bytes < (least := max(own_bytes.values())):
            raise UsageError(
                "expert_budget",
                got=format_bytes(budget_bytes),
                expected=f"at least one expert, {least:,} bytes",
                fix=f"All experts together have {format_bytes(sum(own_bytes.values()))}.",
            )
        if not hasattr(os, "posix_fadvise") or not Path("/proc/self/maps").exists():
            fix = "Leave it out: the system pages what does not fit."
            raise UsageError("expert_budget", got="another system", expected="Linux", fix=fix)
        return cls(budget_bytes)

    def add(self, model: bytes, folder: Path, weights: MappedWeights) -> GraphFiles:
        """The files of the experts of a graph that a session has loaded; none of any graph stays.

        Args:
            model: serialized, as it was loaded.
            folder: of its weights.
            weights: what the session maps.
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
        return files

    def read(
        self, layers: Sequence[int], chosen: np.ndarray[tuple[int, ...], np.dtype[np.float32]], files: GraphFiles
    ) -> None:
        """Note what a graph has read, and let the oldest leave.

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
        stats.max_pass_bytes = max(stats.max_pass_bytes, stats.held_bytes)
        if stats.held_bytes <= stats.budget_bytes:
            return
        for expert in sorted(self._held, key=lambda expert: (self._last[expert], -expert.layer)):
            leaving = self._held.pop(expert)
            self._release(leaving)
            stats.held_bytes -= sum(file.used_bytes for file in leaving)
            if stats.held_bytes <= stats.budget_bytes:
                return

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

    __slots__ = ("_files", "_layers", "_memory", "chosen")

    def __init__(self, memory: ExpertMemory, layers: Sequence[int], count: int, files: GraphFiles) -> None:
        self._memory, self._layers, self._files = memory, layers, files
        self.chosen = np.zeros((len(layers), count), np.float32)

    def note(self) -> None:
        """Note what the graph has read in its last run."""
        self._memory.read(self._layers, self.chosen, self._files)
