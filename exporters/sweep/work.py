"""The work of quantizing and writing a bundle, in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from devices import Device, find
from edgekv.bundle import CompiledBinary, Manifest, open_bundle, record_files, write_manifest
from edgekv.errors import UsageError
from edgekv.runtime import HtpOptions
from exporters.contents import make_manifest, write_contents
from exporters.htp.check import floating_nodes
from exporters.htp.compile import COMPILER_DEFAULTS, compile_graphs
from exporters.quantize.as_stored import stored_record
from exporters.quantize.matrices import Quantizer
from exporters.quantize.stages import Stage, StagedMatrices
from exporters.records import source_record
from exporters.sweep.source import WEIGHTS, Source
from exporters.sweep.store import PieceStore
from exporters.sweep.survey_file import write_survey

STAGE, BUNDLE = "stage", "bundle"


@dataclass(frozen=True, slots=True)
class SurveyWork:
    """Calibration statistics of the exact decoder."""

    source: Source

    def __call__(self, folder: Path, store: PieceStore) -> object:
        prepared = self.source.prepared
        prepared.checkpoint.check_values(lambda done, of: None)
        found = prepared.survey()
        if found is not None:
            write_survey(found, folder)
        return None


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The quantized matrices of a layer, or of the head after the last one.

    Attributes:
        source: checkpoint and options.
        layer: its number; that of the head is the number of layers.
        before: key of the layer before; None for the first.
    """

    source: Source
    layer: int
    before: str | None

    def __call__(self, folder: Path, store: PieceStore) -> object:
        quantizer = quantizer_of(self.source, store)
        if self.before is not None:
            quantizer.hidden = read_stage(store, self.before).hidden()
            quantizer.take_ranges()
        if self.layer < self.source.prepared.checkpoint.spec.layers:
            matrices = dict(quantizer.layer(self.layer))
            Stage.write(folder / STAGE, matrices, quantizer.take_ranges(), quantizer.hidden)
        else:
            matrices = dict(quantizer.head())
            Stage.write(folder / STAGE, matrices, quantizer.take_ranges(), None)
        return None


@dataclass(frozen=True, slots=True)
class WriteWork:
    """Graphs, weights and manifest: a bundle that no compiler has checked.

    Attributes:
        source: checkpoint and options.
        layers: keys of the quantized layers and of the head.
    """

    source: Source
    layers: tuple[str, ...]

    def __call__(self, folder: Path, store: PieceStore) -> object:
        prepared, surveyed = self.source.prepared, self.source.surveyed(store)
        stages = [read_stage(store, key) for key in self.layers]
        ranges = {name: seen for stage in stages for name, seen in stage.ranges().items()}
        bundle = folder / BUNDLE
        bundle.mkdir()
        tensors = self.source.tensors(store)
        contents = write_contents(prepared, surveyed, tensors, StagedMatrices(stages), ranges, bundle)
        record = source_record(
            prepared.checkpoint,
            self.source.checkpoint[WEIGHTS],
            prepared.calibration.name,
            surveyed.tokens.size,
            stored_record(prepared.checkpoint, prepared.options.recipe),
        )
        write_manifest(bundle, make_manifest(prepared, surveyed, contents, record, record_files(bundle)))
        return None


@dataclass(frozen=True, slots=True)
class CheckWork:
    """The float check of a graph for a chip; answers its float nodes."""

    bundle: str
    file: str
    soc: str

    def __call__(self, folder: Path, store: PieceStore) -> list[str]:
        return floating_nodes([store.path(self.bundle) / BUNDLE / self.file], find(self.soc))


class Compiled(CompiledBinary, frozen=True, kw_only=True):
    """A binary, the float nodes of each file in it, and the peak RAM of its compiler."""

    floating: dict[str, list[str]]
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class CompileWork:
    """A context binary for a chip, checked for float nodes in the same run; answers `Compiled`.

    Attributes:
        bundle: key of the written bundle.
        files: of the graphs in the binary, by the names of the graphs.
        soc: the chip.
        htp: options of the compiler.
    """

    bundle: str
    files: tuple[tuple[str, str], ...]
    soc: str
    htp: HtpOptions = COMPILER_DEFAULTS

    def __call__(self, folder: Path, store: PieceStore) -> Compiled:
        place = store.path(self.bundle) / BUNDLE
        floating: dict[str, list[str]] = {}
        peaks: dict[str, int] = {}
        device: Device = find(self.soc)
        binary = compile_graphs(
            device,
            {name: place / file for name, file in self.files},
            folder,
            prefix="shared_" if len(self.files) > 1 else "",
            watch=peaks.__setitem__,
            lint=floating.__setitem__,
            options=self.htp,
        )
        return Compiled(
            file=binary.file,
            wrappers=binary.wrappers,
            graphs=binary.graphs,
            floating=floating,
            peak_bytes=peaks[binary.file],
        )


def quantizer_of(source: Source, store: PieceStore) -> Quantizer:
    """The quantizer of an export, with the embeddings of the calibration text as its residual."""
    options, surveyed = source.prepared.options, source.surveyed(store)
    context = options.contexts[-1]
    return Quantizer(source.tensors(store), surveyed.tokens, context, options.recipe, surveyed.sink_tokens)


def read_stage(store: PieceStore, key: str) -> Stage:
    """The stage of a finished layer.

    Raises:
        ValueError: it is damaged.
    """
    found = Stage.open(store.path(key) / STAGE)
    if found is None:
        raise ValueError(f"{store.path(key)}: got a damaged stage; expected what was written. Remove the folder.")
    return found


def read_bundle_manifest(store: PieceStore, key: str) -> Manifest:
    """The manifest of a written bundle."""
    return open_bundle(store.path(key) / BUNDLE, verify=False).manifest


def read_compiled(store: PieceStore, key: str) -> Compiled:
    """The answer of a finished `CompileWork`.

    Raises:
        UsageError: it names other files than those of its piece.
    """
    found, files = store.answer(key, Compiled), store.files(key)
    named = {found.file, *found.wrappers.values()}
    if named != {*files}:
        raise UsageError(
            f"piece {key}",
            got=f"a binary of {', '.join(sorted(named))}",
            expected=f"its files {', '.join(files)}",
            fix=f"Remove the piece from {store.place}, and run the same command again.",
        )
    return found
