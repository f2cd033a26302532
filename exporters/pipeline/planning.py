"""From options to pieces: what an export, a compilation or a target asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from devices import Device
from edgekv.bundle import ENCODER, ENCODER_FILES, MANIFEST, Bundle, Manifest
from edgekv.errors import UsageError
from edgekv.machine.system import link_or_copy, sha256_of
from edgekv.plan import compile_bytes, layer_graph_bytes, quantization_bytes, writing_bytes
from edgekv.qnn import provider as qnn
from edgekv.qnn.options import HtpOptions
from edgekv.spec import Task
from edgekv.spec.tensors import HEAD, HEAD_TURN
from exporters.graphs.split import layer_bytes
from exporters.htp.compile import binary_sets, device_parts
from exporters.inspect.held_out import MEASURED_TOKENS, TextName, held_out_chat, held_out_prose, template_tokens
from exporters.pipeline.encoder import EncoderPiece, write_tiles
from exporters.pipeline.inputs import BUNDLE, TEXT, TOKENS, DecoderKey, ProvenAdapter
from exporters.pipeline.parallel import compiler_bytes
from exporters.pipeline.piece import Piece, Plan
from exporters.pipeline.pieces import (
    CheckPiece,
    CompilePiece,
    CompileTflitePiece,
    HeadPiece,
    LayerPiece,
    RangesPiece,
    SurveyPiece,
    TextPiece,
)
from exporters.pipeline.place import Identity
from exporters.pipeline.quality import (
    EncodePiece,
    QualityPiece,
    QualityWindows,
    ReferencePiece,
    Text,
    quality_bytes,
    reference_bytes,
)
from exporters.pipeline.sensitivity import SensitivityPiece
from exporters.pipeline.task_quality import TaskQualityPiece
from exporters.pipeline.write import CacheForm, ExportResult, WritePiece, initial_manifest
from exporters.plan import ExportPlan
from exporters.quantize.generated import WINDOWS_AT_ONCE
from exporters.quantize.matrices import needs_quantized_pass
from exporters.quantize.sink_request import SinkRequest
from exporters.resources import generated_bytes
from quant import WEIGHT_TYPES, WeightDtype, WeightType

_LAYER_TOKENS = 64  # of the text on which layers are measured


class Planner:
    """Collects the pieces of exports of a checkpoint, each once.

    Args:
        identity: of the checkpoint.
        swept: the text on which a sweep measures each layer; its exports also share the float reference's logits.
        residual_every: see `Plan`.

    Attributes:
        plan: what was collected.
    """

    def __init__(self, identity: Identity, *, swept: Text | None = None, residual_every: int = 1) -> None:
        self.plan = Plan(residual_every=residual_every)
        self._identity = identity
        self._swept = swept

    def export(self, export: ExportPlan) -> ExportResult:
        """The pieces of an export."""
        decoder = self._decoder(export)
        write = self._write(export, decoder, self._layers(export, decoder))
        quality = self._quality(export, decoder, write)
        checks, binaries = self._compiled(export, write)
        return ExportResult(decoder, write, quality, checks, binaries)

    def sensitivities(self, export: ExportPlan, types: Mapping[str, tuple[WeightDtype, ...]]) -> str:
        """The piece that measures what each matrix would lose in each of these types."""
        piece = SensitivityPiece(self._decoder(export), tuple(export.recipe.weights), tuple(types.items()))
        most = max(map(len, types.values()))
        sizes = export.checkpoint.spec.sizes
        candidates = 2 * most * sizes.layer_parameters
        if HEAD in types:  # the integers of each type, the exact matrix, and one that stands for it
            candidates = max(candidates, (len(types[HEAD]) + 2 * 4) * sizes.head_parameters)
        return self.plan.put(piece, quantizing_bytes(export) + candidates)

    def _decoder(self, export: ExportPlan) -> DecoderKey:
        checkpoint, options, recipe = export.checkpoint, export.options, export.recipe
        exact = self.exact(export)
        windows, first = export.survey_windows, export.surveyed_first
        pictured = replace(exact, pictures=self._encoder(export, exact))
        survey = SurveyPiece(pictured.alone, None if windows is None else give_tokens(self.plan, windows), len(first))
        ram_bytes = quantizing_bytes(export)
        has_none = checkpoint.spec.delta_rule is not None or checkpoint.spec.bidirectional
        sink = SinkRequest("none") if has_none else options.sink
        surveyed = replace(pictured, survey=self.plan.put(survey, ram_bytes), sink=sink, first=first)
        has_heads = recipe.heads != "none"
        adapters = _adapters(export) if has_heads else ()
        surveys = (replace(survey, adapter=adapter) for adapter in adapters)
        return replace(
            surveyed,
            transforms=msgspec.structs.replace(recipe, name="", weights=[], outlier_channels="keep"),
            kv_dtype=options.cache_dtype if has_heads else None,
            adapted=tuple(self.plan.put(piece, ram_bytes) for piece in surveys),
            tokens=(give_tokens(self.plan, export.survey_tokens), give_tokens(self.plan, export.plain_tokens)),
            learned=self._learned(surveyed.of_text, export),
        )

    def exact(self, export: ExportPlan) -> DecoderKey:
        """The exact decoder of an export."""
        return DecoderKey(
            weights=self._identity.weights,
            config=self._identity.config,
            spec=export.checkpoint.spec,
            context=_rotary_context(export),
        )

    def _learned(self, decoder: DecoderKey, export: ExportPlan) -> tuple[str, ...]:
        checkpoint, length = export.checkpoint, export.survey_tokens.shape[1]
        windows = export.learned_windows
        bos = () if checkpoint.special.bos is None else (checkpoint.special.bos,)
        opening = export.chat_opening() if windows else ()
        special = export.chat_special() if windows else ()
        first = TextPiece(decoder, self._identity.tokenizer, bos, opening, special, 0, windows, length)
        return put_texts(self.plan, first, generated_bytes(checkpoint.spec, length))

    def _layers(self, export: ExportPlan, decoder: DecoderKey) -> tuple[str, ...]:
        spec, recipe, ram_bytes = export.checkpoint.spec, export.recipe, quantizing_bytes(export)
        follows = needs_quantized_pass(export.options.recipe)
        names = list[str]()
        for layer in range(spec.layers):
            rules = tuple(weight for weight in recipe.weights if weight.tensor.startswith(f"model.layers.{layer}."))
            owner = spec.cache_layer(layer)
            shared = () if owner == layer else (names[owner],)
            piece = LayerPiece(decoder, layer, rules, follows, names[-1] if names else None, shared)
            names.append(self.plan.put(piece, ram_bytes))
        ends = tuple(weight for weight in recipe.weights if weight.tensor in (HEAD, HEAD_TURN))
        return *names, self.plan.put(HeadPiece(decoder, ends, follows, names[-1]), ram_bytes)

    def _encoder(self, export: ExportPlan, exact: DecoderKey) -> str | None:
        """The vision encoder; None if the checkpoint has none."""
        vision, shown = export.checkpoint.vision, export.pictures
        if vision is None or shown is None:
            return None
        named = hashlib.sha256(b"".join(tile.tobytes() for tile in shown.tiles)).hexdigest()
        shapes = tuple(tile.shape for tile in shown.tiles)
        tiles = self.plan.give(partial(write_tiles, shown.tiles), "tiles", shapes, named)
        spec, needed = export.encoder, export.encoder_plan
        assert spec is not None and needed is not None, "it has a vision encoder"
        rotation, graph_format = export.recipe.rotation, export.options.graph_format
        method = export.options.effort.encoder_method
        piece = EncoderPiece(exact.alone, spec, vision.pictures, rotation, tiles, shown.name, graph_format, method)
        return self.plan.put(piece, needed.quantization_peak_bytes)

    def _write(self, export: ExportPlan, decoder: DecoderKey, layers: tuple[str, ...]) -> str:
        adapters, ram_bytes = _adapters(export), quantizing_bytes(export)
        piece = WritePiece(
            decoder=decoder,
            identity=self._identity,
            manifest=self._manifest(export),
            lora=export.options.lora,
            adapters=adapters,
            adapted=tuple(self.plan.put(RangesPiece(decoder, adapter), ram_bytes) for adapter in adapters),
            layers=layers,
            encoder=decoder.pictures,
        )
        return self.plan.put(piece, writing_bytes(export.checkpoint.spec.sizes))

    def _manifest(self, export: ExportPlan) -> Manifest:
        checkpoint, options, name = export.checkpoint, export.options, export.calibration.name
        cache = CacheForm(options.cache_dtype, options.cache_layout, options.contexts[-1])
        manifest = initial_manifest(checkpoint, export.recipe, export.graphs, self._identity.weights, name, cache)
        return msgspec.structs.replace(
            manifest,
            generation=checkpoint.generation,
            graph_format=options.graph_format,
            task=checkpoint.task,
            lora=None if options.lora is None else options.lora.slots(checkpoint.spec),
        )

    def measured(self, export: ExportPlan, decoder: DecoderKey, text: Text) -> QualityWindows:
        """Windows of a text on which a bundle is measured."""
        of_text, special = decoder.of_text, export.checkpoint.special
        piece = EncodePiece(of_text.exact, self._identity.tokenizer, give_text(self.plan, text.content))
        return QualityWindows(
            decoder=of_text,
            bos=() if special.bos is None else (special.bos,),
            context=export.options.contexts[-1],
            ids=self.plan.put(piece, quantizing_bytes(export)),
            title=text.title,
            tokens=text.tokens,
        )

    def _quality(self, export: ExportPlan, decoder: DecoderKey, write: str) -> str | None:
        checkpoint = export.checkpoint
        if checkpoint.task is not None:
            return self._task_quality(export, checkpoint.task, decoder, write)
        measured: dict[TextName, QualityWindows] = {}
        if export.options.check_quality:
            prose = Text("prose", held_out_prose(), MEASURED_TOKENS["prose"])
            measured["prose"] = self.measured(export, decoder, prose)
            if (chat := held_out_chat(checkpoint.chat)) is not None:
                text = Text("chat", chat, MEASURED_TOKENS["chat"])
                marks = template_tokens(checkpoint.tokenizer, chat)
                measured["chat"] = replace(self.measured(export, decoder, text), template=marks)
        ram_bytes, reference, by_layer = quality_bytes(checkpoint.spec), None, None
        if self._swept is not None:
            least = replace(self._swept, tokens=min(self._swept.tokens, _LAYER_TOKENS))
            by_layer = self.measured(export, decoder, least)
            ram_bytes += quantizing_bytes(export)
            if measured:
                most = reference_bytes(checkpoint.spec, export.options.contexts[-1])
                reference = self.plan.put(ReferencePiece(tuple(measured.values())), most)
        if not measured and by_layer is None:
            return None
        return self.plan.put(QualityPiece(write, tuple(measured.items()), reference, by_layer), ram_bytes)

    def _task_quality(self, export: ExportPlan, task: Task, decoder: DecoderKey, write: str) -> str | None:
        if self._swept is not None:
            expected = "a checkpoint that writes text, whose bundles are compared by divergence"
            raise UsageError("sweep", got=f"that of {task.noun}", expected=expected, fix="Use edgekv export.")
        if not export.options.check_quality:
            return None
        exact, context = decoder.of_text.alone, export.options.contexts[-1]
        piece = TaskQualityPiece(write, exact, self._identity.tokenizer, task, context)
        return self.plan.put(piece, quality_bytes(export.checkpoint.spec))

    def _compiled(self, export: ExportPlan, write: str) -> tuple[dict[str, str], tuple[str, ...]]:
        options = export.options
        if not options.check_on_htp or options.graph_format != "onnx":
            return {}, ()
        soc, compiler = options.device.soc, qnn.compiler()
        checked = dict.fromkeys(part.file for graph in export.graphs for part in graph.parts)
        if export.checkpoint.vision is not None:
            checked[ENCODER_FILES["onnx"]] = None
        binaries = list[str]()
        if options.compile:
            whole = all(graph.is_whole for graph in export.graphs)
            encoder = [] if export.checkpoint.vision is None else [{ENCODER: Path(ENCODER_FILES["onnx"])}]
            sets = binary_sets(device_parts(export.graphs, Path()), per_graph_binaries=whole)
            for models in [*sets, *encoder]:
                files = tuple((name, path.name) for name, path in models.items())
                for _, file in files:
                    checked.pop(file, None)
                piece = CompilePiece(write, files, soc, compiler)
                encodes = export.encoder_plan if ENCODER in models else None
                needed = _compiler_bytes(export, len(files)) if encodes is None else encodes.compile_peak_bytes
                binaries.append(self.plan.put(piece, needed))
        checks = {}
        for file in checked:
            checks[file] = self.plan.put(CheckPiece(write, file, soc, compiler), _compiler_bytes(export, 1))
        return checks, tuple(binaries)


def plan_binaries(
    plan: Plan,
    bundle: str,
    sets: Sequence[Mapping[str, Path]],
    device: Device,
    compiler: str,
    options: HtpOptions,
    prefix: str = "shared_",
) -> list[str]:
    """Add the binaries of graphs that exist; returns their names.

    Args:
        plan: takes the pieces.
        bundle: name of the folder with the graphs.
        sets: the graphs of each binary, by name.
        device: the chip.
        compiler: its version.
        options: of the compiler.
        prefix: of the names of binaries of several graphs.
    """
    names = []
    for models in sets:
        files = tuple((name, path.name) for name, path in models.items())
        piece: Piece = CompilePiece(bundle, files, device.soc, compiler, options, prefix)
        names.append(plan.put(piece, compiler_bytes([*models.values()])))
    return names


def plan_tflite(plan: Plan, bundle: str, models: Mapping[str, Path], device: Device, compiler: str) -> str:
    """Add the context of TFLite graphs that exist; returns its name.

    Args:
        plan: takes the piece.
        bundle: name of the folder with the graphs.
        models: the one file of all graphs, by their names.
        device: the chip.
        compiler: its version.
    """
    (source,) = {*models.values()}
    piece = CompileTflitePiece(bundle, source.name, tuple(models), device.soc, compiler)
    return plan.put(piece, compile_bytes(source.stat().st_size, 0, len(models)))


def give_bundle(plan: Plan, bundle: Bundle) -> str:
    """Add a bundle that exists, under the hash of its manifest, which has those of its files; returns its name."""
    files = [*bundle.manifest.files, MANIFEST]
    return plan.give(partial(_copy_files, bundle.path, files), "bundle", sha256_of(bundle.path / MANIFEST))


def put_texts(plan: Plan, whole: TextPiece, ram_bytes: int) -> tuple[str, ...]:
    """Add all windows of a text in batches of `WINDOWS_AT_ONCE`; returns their names."""
    batches = enumerate(range(0, whole.windows, WINDOWS_AT_ONCE))
    return tuple(
        plan.put(replace(whole, number=number, windows=min(WINDOWS_AT_ONCE, whole.windows - at)), ram_bytes)
        for number, at in batches
    )


def give_tokens(plan: Plan, tokens: NDArray[np.int64]) -> str:
    """Add token ids `[windows, T]`; returns their name."""
    ids = np.ascontiguousarray(tokens, np.int64)
    return plan.give(partial(_write_tokens, ids), "tokens", ids.shape, ids.tobytes().hex())


def give_text(plan: Plan, text: str) -> str:
    """Add a text, its line ends as they are: they are tokens. Returns its name."""
    return plan.give(partial(_write_text, text), "text", text)


def _adapters(export: ExportPlan) -> tuple[ProvenAdapter, ...]:
    """Those that the slots are calibrated on."""
    lora = export.options.lora
    return () if lora is None else tuple(ProvenAdapter.of(choice) for choice in lora.calibrate)


def quantizing_bytes(export: ExportPlan) -> int:
    """RAM to quantize a layer, as `edgekv plan` estimates it."""
    spec = export.checkpoint.spec
    windows, window = export.survey_tokens.shape
    tokens = (windows + export.learned_windows) * window
    return quantization_bytes(spec.sizes, 2 * spec.layers * spec.kv_heads, tokens, window)


def _write_text(text: str, folder: Path) -> None:
    (folder / TEXT).write_bytes(text.encode())


def _write_tokens(ids: NDArray[np.int64], folder: Path) -> None:
    np.save(folder / TOKENS, ids)


def _copy_files(source: Path, names: Sequence[str], folder: Path) -> None:
    for name in names:
        place = folder / BUNDLE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, place)


def _rotary_context(export: ExportPlan) -> int:
    """The context, or the length of a window if rotations are the same: most are, for every context."""
    context, window = export.options.contexts[-1], export.survey_tokens.shape[1]
    for rope in export.checkpoint.spec.ropes:
        one, other = rope.rotation(window), rope.rotation(context)
        if one.attention_factor != other.attention_factor or not np.array_equal(
            one.inverse_frequencies, other.inverse_frequencies
        ):
            return context
    return window


def _compiler_bytes(export: ExportPlan, graphs: int) -> int:
    """Of the compiler, for the largest part."""
    spec, recipe, split = export.checkpoint.spec, export.options.recipe, export.split
    counts = WeightType.matrix_bytes, WeightType.packed_bytes
    layers, packed = (layer_bytes(spec, recipe, count) for count in counts)
    of_head = WEIGHT_TYPES[recipe.rule(HEAD).dtype]
    head, packed_head = (count(of_head, spec.hidden, spec.result_width) for count in counts)
    needs = [compile_bytes(head, 0, 1, packed_bytes=packed_head)]
    for part in split.layers:
        weights = sum(layers[layer] for layer in part)
        if part.start == 0 and split.embeds:
            weights += WEIGHT_TYPES["int8"].matrix_bytes(spec.hidden, spec.vocab)
        each_bytes, packed_bytes = len(part) * layer_graph_bytes(spec.sizes), sum(packed[layer] for layer in part)
        if part.stop == spec.layers and not split.own_head:
            weights, packed_bytes = weights + head, packed_bytes + packed_head
        needs.append(compile_bytes(weights, each_bytes, graphs, packed_bytes=packed_bytes))
    return max(needs)
