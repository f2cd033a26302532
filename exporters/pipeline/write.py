"""From quantized layers to a bundle: graphs and manifest for no chip yet, and then the bundle of a chip."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Literal

import msgspec
import numpy as np

from devices import Device
from edgekv.bundle import (
    FORMAT,
    MANIFEST,
    AdapterRecord,
    CompiledBinary,
    EmbeddingQuality,
    GraphRecord,
    Manifest,
    QualityRecord,
    RankingQuality,
    RecipeRecord,
    SinkRecord,
    SourceRecord,
    TokenRecord,
    atomic_directory,
    record_files,
    write_manifest,
)
from edgekv.errors import UsageError
from edgekv.kv import KeyLayout, KvDtype
from edgekv.machine.system import link_or_copy
from edgekv.qnn import provider as qnn
from edgekv.spec import LAYER_INPUTS_PORT, TARGET_HIDDEN, TARGET_OUT_RESULT, EmbeddingTask, EncodingTypes
from edgekv.spec.chat import write_templates
from exporters.checkpoint.aligned import cache_encodings, write_heads
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.onnx import joined_places, write_graphs
from exporters.htp.check import float_verdict
from exporters.htp.compile import Watch, unwatched, write_compiled
from exporters.lora.base import ExportedBase, write_lora_base
from exporters.lora.encodings import lora_encodings
from exporters.lora.options import LoraOptions
from exporters.lora.quantize import largest_elements
from exporters.pipeline.encoder import EncoderResult
from exporters.pipeline.inputs import BUNDLE, DecoderKey, Inputs, ProvenAdapter, SurveyResult
from exporters.pipeline.layer_file import LayerMatrices
from exporters.pipeline.piece import Piece
from exporters.pipeline.pieces import asked_places, read_compiled, read_manifest
from exporters.pipeline.place import Identity
from exporters.pipeline.quality import Quality
from exporters.pipeline.store import PieceStore
from exporters.quantize.as_stored import stored_record
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.recipe import Recipe
from exporters.quantize.sink import SINK_FILE
from quant import Encoding, Range


@dataclass(frozen=True, slots=True)
class ExportResult:
    """The names of a bundle's pieces.

    Attributes:
        decoder: what they depend on.
        write: the written bundle.
        quality: what the bundle lost; None if that is not measured.
        checks: the float checks, by file.
        binaries: the compiled binaries, in order.
    """

    decoder: DecoderKey
    write: str
    quality: str | None
    checks: Mapping[str, str]
    binaries: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The last pieces of the bundle."""
        return [self.write, *([] if self.quality is None else [self.quality]), *self.checks.values(), *self.binaries]


@dataclass(frozen=True, slots=True)
class CacheForm:
    """The cache of a bundle's graphs: its integers, how keys lie in it, and the longest context."""

    dtype: KvDtype
    layout: KeyLayout
    context: int


def initial_manifest(
    checkpoint: Checkpoint,
    recipe: RecipeRecord,
    graphs: Sequence[GraphRecord],
    weights_sha256: str,
    calibration: str,
    cache: CacheForm,
) -> Manifest:
    """The manifest of a bundle, as far as every one is known before anything is quantized.

    Args:
        checkpoint: what is quantized.
        recipe: of its matrices.
        graphs: to be written.
        weights_sha256: see `Identity`.
        calibration: name of the text.
        cache: that the graphs read.
    """
    merged = [
        AdapterRecord(folder=str(adapter.folder.resolve()), sha256=adapter.sha256, scale=adapter.scale)
        for adapter in checkpoint.adapters
    ]
    return Manifest(
        format=FORMAT,
        producer=f"edgekv {metadata.version('edgekv')}",
        device="",
        recipe=recipe,
        kv_dtype=cache.dtype,
        key_layout=cache.layout,
        context=cache.context,
        htp_check="not-run",
        floating_nodes=[],
        model=checkpoint.spec,
        tokens=token_record(checkpoint),
        graphs=[*graphs],
        encodings={},
        source=SourceRecord(
            checkpoint=source_name(checkpoint),
            weights_sha256=weights_sha256,
            calibration=calibration,
            calibration_tokens=0,
            adapters=merged,
        ),
        files={},
    )


def source_name(checkpoint: Checkpoint) -> str:
    """How a manifest names a checkpoint: its path, or its hub id or URL."""
    return str(checkpoint.folder.resolve()) if Path(checkpoint.name).exists() else checkpoint.name


def token_record(checkpoint: Checkpoint) -> TokenRecord:
    """The special tokens."""
    special = checkpoint.special
    return TokenRecord(bos=special.bos, eos=list(special.eos), pad=special.pad)


@dataclass(frozen=True, slots=True)
class WritePiece(Piece):
    """Graphs, weights and manifest: a bundle for no chip yet, which no compiler has checked.

    Attributes:
        decoder: what was quantized.
        identity: the checkpoint, with its tokenizer, templates and sampling defaults.
        manifest: see `initial_manifest`.
        lora: the slots.
        adapters: that the slots are calibrated on.
        adapted: names of their ranges.
        layers: names of the quantized layers and of the head.
        encoder: name of the vision encoder; None if there is none.
    """

    kind: ClassVar[str] = "write"

    decoder: DecoderKey
    identity: Identity
    manifest: Manifest
    lora: LoraOptions | None
    adapters: tuple[ProvenAdapter, ...]
    adapted: tuple[str, ...]
    layers: tuple[str, ...]
    encoder: str | None = None

    @property
    def needs(self) -> tuple[str, ...]:
        encoder = () if self.encoder is None else (self.encoder,)
        return (*self.decoder.needs, *self.layers, *self.adapted, *encoder)

    def make(self, folder: Path, inputs: Inputs) -> object:
        checkpoint, survey = inputs.checkpoint(self.decoder, self.identity), inputs.surveyed(self.decoder)
        for adapter in self.adapters:
            adapter.checked()
        recipe = Recipe.of(self.manifest.recipe)
        stored = stored_record(checkpoint, recipe, partial(inputs.progress, "compare integers"))
        layers = [inputs.layer(name) for name in self.layers]
        for layer, asked in zip(layers, asked_places(checkpoint.spec, recipe), strict=True):
            layer.check(asked)
        ranges = {name: seen for layer in layers for name, seen in layer.ranges().items()}
        for adapted in self.adapted:
            for name, seen in inputs.layer(adapted).ranges().items():
                ranges[name].cover(seen)
        bundle, tensors = folder / BUNDLE, inputs.folded(self.decoder)
        bundle.mkdir()
        vision = embedded = None
        if self.encoder is not None:
            vision = inputs.store.answer(self.encoder, EncoderResult)
            for name in (vision.file, *vision.weights.files):
                link_or_copy(inputs.store.path(self.encoder) / name, bundle / name)
            embedded = Range(vision.low, vision.high)
            if tensors.spec.gathered_width:
                ranges[LAYER_INPUTS_PORT].cover(Range(vision.behind_low, vision.behind_high))
        steps = tensors.spec.layers + 1

        def done(layers: int) -> None:
            inputs.progress("write", layers, steps)

        done(0)
        if self.decoder.target:  # the next step of a draft reads what this one gives
            reached = ranges[TARGET_OUT_RESULT]
            ranges[TARGET_HIDDEN].observe(np.array([reached.low, reached.high], np.float32))
        encodings = self._encodings(checkpoint, tensors, survey, ranges)
        if self.decoder.target and not (drafter := inputs.drafter(self.decoder)).is_cached_apart:
            target = drafter.target.manifest
            encodings |= {tensor.past: target.encodings[tensor.past] for tensor in target.cache_geometry.names()}
        del ranges
        graphs = self.manifest.graphs
        written = self.manifest.interface, encodings, graphs, bundle, done
        if self.manifest.graph_format == "tflite":
            from exporters.graphs.tflite.graphs import write_tflite  # its package is optional

            encodings, places = write_tflite(tensors, LayerMatrices(layers), *written, embedded=embedded)
        else:
            for name in self.layers:
                inputs.give_weights(name, bundle)
            places = joined_places(layer.places for layer in layers)
            encodings, places = write_graphs(tensors, places, *written, embedded=embedded)
        self._write_beside(checkpoint, tensors, survey, encodings, bundle)
        done(steps)
        source = msgspec.structs.replace(
            self.manifest.source,
            calibration_tokens=survey.tokens.size,
            stored=stored,
            unreached_experts=[expert for layer in layers for expert in layer.unreached],
            generated_tokens=sum(inputs.tokens(name).size for name in self.decoder.learned),
        )
        sink = None
        if survey.sink is not None:
            outlier = survey.sink.outlier
            tokens = list(survey.sink.tokens)
            sink = SinkRecord(tokens=tokens, file=SINK_FILE, result=outlier.result, ratio=outlier.ratio)
        manifest = msgspec.structs.replace(
            self.manifest,
            encodings=encodings,
            weights=places,
            source=source,
            sink=sink,
            vision=None if vision is None else vision.record,
            files=record_files(bundle, partial(inputs.progress, "hash files")),
        )
        write_manifest(bundle, manifest)
        return None

    def _encodings(
        self, checkpoint: Checkpoint, tensors: Tensors, survey: SurveyResult, ranges: Mapping[str, Range]
    ) -> dict[str, Encoding]:
        """Of all results and inputs of a decoder."""
        manifest, spec, states = self.manifest, tensors.spec, tensors.spec.convolution_states
        activations: Literal["u16", "s16"] = "s16" if manifest.graph_format == "tflite" else "u16"
        types = EncodingTypes(activations, manifest.kv_dtype, "u16" if states is None else states.dtype)
        factors = [rope.rotation(manifest.context).attention_factor for rope in spec.ropes]
        encodings = choose_encodings(decoder_results(spec), ranges, factors, types)
        if survey.heads is not None and not self.decoder.target:
            encodings |= cache_encodings(survey.heads, manifest.kv_dtype)
        if self.lora is not None and manifest.lora is not None:
            adapters = [Adapter.open(choice) for choice in self.lora.calibrate]
            largest = largest_elements(adapters, ExportedBase(checkpoint, tensors))
            encodings |= lora_encodings(manifest.lora, spec, ranges, encodings, self.lora.reach, largest)
        return encodings

    def _write_beside(
        self,
        checkpoint: Checkpoint,
        tensors: Tensors,
        survey: SurveyResult,
        encodings: Mapping[str, Encoding],
        folder: Path,
    ) -> None:
        """Write what is neither graph nor weight: transforms, sink, base of adapters, tokenizer and templates."""
        if survey.heads is not None and not self.decoder.target:
            write_heads(survey.heads, folder)
        if survey.sink is not None:
            survey.sink.write(folder, encodings)
        if self.lora is not None:
            write_lora_base(checkpoint, tensors, () if survey.sink is None else survey.sink.tokens, folder)
        checkpoint.write_tokenizer(folder)
        if checkpoint.chat is not None:
            write_templates(checkpoint.chat, folder)


def assemble(
    exported: ExportResult,
    device: Device,
    store: PieceStore,
    target: Path,
    *,
    force: bool,
    allow_float: bool = False,
    watch: Watch = unwatched,
) -> Manifest:
    """Put a bundle together.

    Args:
        exported: names of its finished pieces.
        device: the chip.
        store: where they are.
        target: the bundle's folder.
        force: replace an existing bundle.
        allow_float: accept nodes that compute in float, and record them.
        watch: called with the peak RAM of compiling each binary.

    Raises:
        EngineError: a node computes in float.
        UsageError: a piece is missing, damaged, or holds something else.
    """
    binaries = [read_compiled(store, name) for name in exported.binaries]
    floating = {file: nodes for binary in binaries for file, nodes in binary.floating.items()}
    floating |= {file: store.answer(name, list[str]) for file, name in exported.checks.items()}
    manifest = read_manifest(store, exported.write)
    quality: tuple[QualityRecord, ...] = ()
    task_quality: EmbeddingQuality | RankingQuality | None = None
    if exported.quality is not None and manifest.task is None:
        quality = store.answer(exported.quality, Quality).records
    elif exported.quality is not None:
        is_embedder = isinstance(manifest.task, EmbeddingTask)
        task_quality = (
            store.answer(exported.quality, EmbeddingQuality)
            if is_embedder
            else store.answer(exported.quality, RankingQuality)
        )
    verdict, nodes = "not-run", list[str]()
    if floating:
        files = manifest.graph_files
        if unchecked := [file for file in files if file not in floating]:
            raise UsageError(
                f"pieces of {target.name}",
                got=f"no float check of {unchecked[0]}",
                expected="one of each graph",
                fix=f"Remove {', '.join(exported.binaries)} from {store.place}, and run the same command again.",
            )
        every = [node for file in files for node in floating[file]]
        verdict, nodes = float_verdict(every, allow_float=allow_float)
    with atomic_directory(target, force=force) as folder:
        for name, path in store.files(exported.write).items():
            inner = name.removeprefix(f"{BUNDLE}/")
            if inner not in (name, MANIFEST):
                place = folder / inner
                place.parent.mkdir(parents=True, exist_ok=True)
                link_or_copy(path, place)
        changed = msgspec.structs.replace(
            manifest,
            device=device.soc,
            htp_check=verdict,
            floating_nodes=nodes,
            quality=quality,
            task_quality=task_quality,
        )
        write_manifest(folder, changed)
        if binaries:
            compiled = folder / "compiled" / device.soc
            compiled.mkdir(parents=True)
            take_binaries(exported.binaries, store, compiled, watch)
            plain = [_plain(binary) for binary in binaries]
            write_compiled(compiled, device, plain, qnn.compiler(), folder / MANIFEST, floating=nodes)
    return changed


def take_binaries(
    names: Sequence[str], store: PieceStore, folder: Path, watch: Watch = unwatched
) -> list[CompiledBinary]:
    """Copy finished binaries and their wrappers into a folder.

    Raises:
        UsageError: a piece is missing, damaged, or holds something else.
    """
    binaries = []
    for name in names:
        binary = read_compiled(store, name)
        for file, path in store.files(name).items():
            link_or_copy(path, folder / file)
        if binary.peak_bytes is not None:
            watch(binary.file, binary.peak_bytes)
        binaries.append(_plain(binary))
    return binaries


def _plain(binary: CompiledBinary) -> CompiledBinary:
    """What a manifest says of a binary."""
    return CompiledBinary(
        file=binary.file, wrappers=binary.wrappers, graphs=binary.graphs, optimization=binary.optimization
    )
