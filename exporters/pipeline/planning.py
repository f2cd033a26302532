"""From options to pieces: what an export, a compilation or a target asks for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from devices import Device
from edgekv.bundle import ENCODER, ENCODER_FILES, MANIFEST, Bundle
from edgekv.machine.system import link_or_copy, sha256_of
from edgekv.plan import compile_bytes, layer_graph_bytes, quantization_bytes, writing_bytes
from edgekv.qnn import provider as qnn
from edgekv.qnn.options import HtpOptions
from edgekv.spec.tensors import HEAD, HEAD_TURN
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.graphs.split import layer_bytes
from exporters.htp.compile import binary_sets, device_parts
from exporters.inspect.held_out import MEASURED_TOKENS, TextName, held_out_chat, held_out_prose, template_tokens
from exporters.pipeline.encoder import TILES, EncoderPiece
from exporters.pipeline.inputs import BUNDLE, TEXT, TOKENS, Exact, Folded, ProvenAdapter, SinkChoice
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
    WritePiece,
)
from exporters.pipeline.place import Identity
from exporters.pipeline.quality import (
    EncodePiece,
    Measured,
    QualityPiece,
    ReferencePiece,
    Text,
    quality_bytes,
    reference_bytes,
)
from exporters.pipeline.sensitivity import SensitivityPiece
from exporters.prepared import Prepared
from exporters.quantize.generated import WINDOWS_AT_ONCE
from exporters.quantize.matrices import needs_quantized_pass
from exporters.quantize.sink_wanted import SinkWanted
from exporters.records import adapter_records, source_name
from exporters.resources import generated_bytes
from quant import WEIGHT_TYPES, WeightDtype, WeightType

_LAYER_TOKENS = 64  # of the text on which layers are measured


@dataclass(frozen=True, slots=True)
class Exported:
    """The names of a bundle's pieces.

    Attributes:
        folded: the decoder.
        write: the written bundle.
        quality: what the bundle lost; None if that is not measured.
        checks: the float checks, by file.
        binaries: the compiled binaries, in order.
    """

    folded: Folded
    write: str
    quality: str | None
    checks: Mapping[str, str]
    binaries: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        """The last pieces of the bundle."""
        return [self.write, *([] if self.quality is None else [self.quality]), *self.checks.values(), *self.binaries]


class Planner:
    """Collects the pieces of exports of a checkpoint, each once.

    Args:
        identity: of the checkpoint.
        swept: the text on which a sweep measures each layer; its exports also share the float reference's logits.

    Attributes:
        plan: what was collected.
    """

    def __init__(self, identity: Identity, *, swept: Text | None = None) -> None:
        self.plan = Plan()
        self._identity = identity
        self._swept = swept

    def export(self, prepared: Prepared) -> Exported:
        """The pieces of an export."""
        folded = self._folded(prepared)
        write = self._write(prepared, folded, self._layers(prepared, folded))
        quality = self._quality(prepared, folded, write)
        checks, binaries = self._compiled(prepared, write)
        return Exported(folded, write, quality, checks, binaries)

    def sensitivities(self, prepared: Prepared, types: Mapping[str, tuple[WeightDtype, ...]]) -> str:
        """The piece that measures what each matrix would lose in each of these types."""
        piece = SensitivityPiece(self._folded(prepared), tuple(prepared.recipe.weights), tuple(types.items()))
        most = max(map(len, types.values()))
        sizes = prepared.checkpoint.spec.sizes
        candidates = 2 * most * sizes.layer_parameters
        if HEAD in types:  # the integers of each type, the exact matrix, and one that stands for it
            candidates = max(candidates, (len(types[HEAD]) + 2 * 4) * sizes.table_parameters)
        return self.plan.put(piece, quantizing_bytes(prepared) + candidates)

    def _folded(self, prepared: Prepared) -> Folded:
        checkpoint, options, recipe = prepared.checkpoint, prepared.options, prepared.recipe
        exact = self.exact(prepared)
        windows, first = prepared.survey_windows, prepared.surveyed_first
        pictured = replace(exact, pictures=self._encoder(prepared, exact))
        survey = SurveyPiece(pictured.alone, None if windows is None else self._tokens(windows), len(first))
        ram_bytes = quantizing_bytes(prepared)
        wanted = options.sink if checkpoint.spec.delta_rule is None else SinkWanted("none")
        sink = SinkChoice(self.plan.put(survey, ram_bytes), wanted, first)
        has_heads = recipe.heads != "none"
        adapters = _adapters(prepared) if has_heads else ()
        surveys = (replace(survey, adapter=each) for each in adapters)
        return Folded(
            exact=pictured,
            sink=sink,
            transforms=msgspec.structs.replace(recipe, name="", weights=[], outlier_channels="keep"),
            kv_dtype=options.kv_dtype if has_heads else None,
            adapted=tuple(self.plan.put(each, ram_bytes) for each in surveys),
            tokens=(self._tokens(prepared.survey_tokens), self._tokens(prepared.plain_tokens)),
            learned=self._learned(checkpoint, exact.alone, sink, prepared),
        )

    def exact(self, prepared: Prepared) -> Exact:
        """The exact decoder of an export."""
        return Exact(
            weights=self._identity.weights,
            config=self._identity.config,
            spec=prepared.checkpoint.spec,
            context=_rotary_context(prepared),
        )

    def _learned(self, checkpoint: Checkpoint, exact: Exact, sink: SinkChoice, prepared: Prepared) -> tuple[str, ...]:
        length = prepared.survey_tokens.shape[1]
        windows = prepared.learned_windows
        bos = () if checkpoint.special.bos is None else (checkpoint.special.bos,)
        ram_bytes = generated_bytes(checkpoint.spec, length)
        opening = prepared.chat_opening() if windows else ()
        special = prepared.chat_special() if windows else ()
        found = []
        for number, at in enumerate(range(0, windows, WINDOWS_AT_ONCE)):
            size = min(WINDOWS_AT_ONCE, windows - at)
            piece = TextPiece(exact, self._identity.tokenizer, sink, bos, opening, special, number, size, length)
            found.append(self.plan.put(piece, ram_bytes))
        return tuple(found)

    def _tokens(self, tokens: NDArray[np.int64]) -> str:
        ids = np.ascontiguousarray(tokens, np.int64)
        return self.plan.give(partial(_write_tokens, ids), "tokens", ids.shape, ids.tobytes().hex())

    def _layers(self, prepared: Prepared, folded: Folded) -> tuple[str, ...]:
        spec, recipe, ram_bytes = prepared.checkpoint.spec, prepared.recipe, quantizing_bytes(prepared)
        follows = needs_quantized_pass(prepared.options.recipe)
        found = list[str]()
        for layer in range(spec.layers):
            rules = tuple(each for each in recipe.weights if each.tensor.startswith(f"model.layers.{layer}."))
            owner = spec.cache_layer(layer)
            shared = () if owner == layer else (found[owner],)
            piece = LayerPiece(folded, layer, rules, follows, found[-1] if found else None, shared)
            found.append(self.plan.put(piece, ram_bytes))
        ends = tuple(each for each in recipe.weights if each.tensor in (HEAD, HEAD_TURN))
        return *found, self.plan.put(HeadPiece(folded, ends, follows, found[-1]), ram_bytes)

    def _encoder(self, prepared: Prepared, exact: Exact) -> str | None:
        """The vision encoder; None if the checkpoint has none."""
        vision, shown = prepared.checkpoint.vision, prepared.pictures
        if vision is None or shown is None:
            return None
        named = hashlib.sha256(shown.tiles.tobytes()).hexdigest()
        tiles = self.plan.give(partial(_write_tiles, shown.tiles), "tiles", shown.tiles.shape, named)
        spec, needed = prepared.encoder, prepared.encoder_plan
        assert spec is not None and needed is not None, "it has a vision encoder"
        rotation, graph_format = prepared.recipe.rotation, prepared.options.graph_format
        piece = EncoderPiece(exact.alone, spec, vision.pictures, rotation, tiles, shown.name, graph_format)
        return self.plan.put(piece, needed.quantization_peak_bytes)

    def _write(self, prepared: Prepared, folded: Folded, layers: tuple[str, ...]) -> str:
        checkpoint, form = prepared.checkpoint, prepared.form
        adapters, ram_bytes = _adapters(prepared), quantizing_bytes(prepared)
        piece = WritePiece(
            folded=folded,
            identity=self._identity,
            source=source_name(checkpoint),
            calibration=prepared.calibration.name,
            merged=tuple(adapter_records(checkpoint)),
            form=form,
            adapters=adapters,
            adapted=tuple(self.plan.put(RangesPiece(folded, each), ram_bytes) for each in adapters),
            layers=layers,
            encoder=folded.exact.pictures,
        )
        return self.plan.put(piece, writing_bytes(checkpoint.spec.sizes))

    def measured(self, prepared: Prepared, folded: Folded, text: Text) -> Measured:
        """Windows of a text on which a bundle is measured."""
        exact, special = folded.exact.of_text.alone, prepared.checkpoint.special
        piece = EncodePiece(exact, self._identity.tokenizer, give_text(self.plan, text.content))
        return Measured(
            exact=exact,
            sink=folded.sink,
            bos=() if special.bos is None else (special.bos,),
            context=prepared.options.contexts[-1],
            ids=self.plan.put(piece, quantizing_bytes(prepared)),
            title=text.title,
            tokens=text.tokens,
        )

    def _quality(self, prepared: Prepared, folded: Folded, write: str) -> str | None:
        checkpoint = prepared.checkpoint
        measured: dict[TextName, Measured] = {}
        if prepared.options.check_quality:
            prose = Text("prose", held_out_prose(), MEASURED_TOKENS["prose"])
            measured["prose"] = self.measured(prepared, folded, prose)
            if (chat := held_out_chat(checkpoint.chat)) is not None:
                text = Text("chat", chat, MEASURED_TOKENS["chat"])
                marks = template_tokens(checkpoint.tokenizer, chat)
                measured["chat"] = replace(self.measured(prepared, folded, text), template=marks)
        ram_bytes, reference, by_layer = quality_bytes(checkpoint.spec), None, None
        if self._swept is not None:
            least = replace(self._swept, tokens=min(self._swept.tokens, _LAYER_TOKENS))
            by_layer = self.measured(prepared, folded, least)
            ram_bytes += quantizing_bytes(prepared)
            if measured:
                most = reference_bytes(checkpoint.spec, prepared.options.contexts[-1])
                reference = self.plan.put(ReferencePiece(tuple(measured.values())), most)
        if not measured and by_layer is None:
            return None
        return self.plan.put(QualityPiece(write, tuple(measured.items()), reference, by_layer), ram_bytes)

    def _compiled(self, prepared: Prepared, write: str) -> tuple[dict[str, str], tuple[str, ...]]:
        options = prepared.options
        if not options.check_on_htp or options.graph_format != "onnx":
            return {}, ()
        soc, compiler = options.device.soc, qnn.compiler()
        checked = dict.fromkeys(part.file for graph in prepared.graphs for part in graph.parts)
        if prepared.checkpoint.vision is not None:
            checked[ENCODER_FILES["onnx"]] = None
        binaries = list[str]()
        if options.compile:
            whole = all(graph.is_whole for graph in prepared.graphs)
            encoder = [] if prepared.checkpoint.vision is None else [{ENCODER: Path(ENCODER_FILES["onnx"])}]
            sets = binary_sets(device_parts(prepared.graphs, Path()), per_graph_binaries=whole)
            for models in [*sets, *encoder]:
                files = tuple((name, path.name) for name, path in models.items())
                for _, file in files:
                    checked.pop(file, None)
                piece = CompilePiece(write, files, soc, compiler)
                encodes = prepared.encoder_plan if ENCODER in models else None
                needed = _compiler_bytes(prepared, len(files)) if encodes is None else encodes.compile_peak_bytes
                binaries.append(self.plan.put(piece, needed))
        checks = {}
        for file in checked:
            checks[file] = self.plan.put(CheckPiece(write, file, soc, compiler), _compiler_bytes(prepared, 1))
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
    found = []
    for models in sets:
        files = tuple((name, path.name) for name, path in models.items())
        piece: Piece = CompilePiece(bundle, files, device.soc, compiler, options, prefix)
        found.append(plan.put(piece, compiler_bytes([*models.values()])))
    return found


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


def give_text(plan: Plan, text: str) -> str:
    """Add a text, its line ends as they are: they are tokens. Returns its name."""
    return plan.give(partial(_write_text, text), "text", text)


def _adapters(prepared: Prepared) -> tuple[ProvenAdapter, ...]:
    """Those that the slots are calibrated on."""
    lora = prepared.options.lora
    return () if lora is None else tuple(ProvenAdapter.of(choice) for choice in lora.calibrate)


def quantizing_bytes(prepared: Prepared) -> int:
    """RAM to quantize a layer, as `edgekv plan` estimates it."""
    spec = prepared.checkpoint.spec
    windows, window = prepared.survey_tokens.shape
    tokens = (windows + prepared.learned_windows) * window
    return quantization_bytes(spec.sizes, 2 * spec.layers * spec.kv_heads, tokens, window)


def _write_text(text: str, folder: Path) -> None:
    (folder / TEXT).write_bytes(text.encode())


def _write_tiles(tiles: NDArray[np.uint8], folder: Path) -> None:
    np.save(folder / TILES, tiles)


def _write_tokens(ids: NDArray[np.int64], folder: Path) -> None:
    np.save(folder / TOKENS, ids)


def _copy_files(source: Path, names: Sequence[str], folder: Path) -> None:
    for name in names:
        place = folder / BUNDLE / name
        place.parent.mkdir(parents=True, exist_ok=True)
        link_or_copy(source / name, place)


def _rotary_context(prepared: Prepared) -> int:
    """The context, or the length of a window if rotations are the same: most are, for every context."""
    context, window = prepared.options.contexts[-1], prepared.survey_tokens.shape[1]
    for rope in prepared.checkpoint.spec.ropes:
        one, other = rope.rotation(window), rope.rotation(context)
        if one.attention_factor != other.attention_factor or not np.array_equal(
            one.inverse_frequencies, other.inverse_frequencies
        ):
            return context
    return window


def _compiler_bytes(prepared: Prepared, graphs: int) -> int:
    """Of the compiler, for the largest part."""
    spec, recipe, split = prepared.checkpoint.spec, prepared.options.recipe, prepared.split
    counts = WeightType.matrix_bytes, WeightType.packed_bytes
    layers, packed = (layer_bytes(spec, recipe, count) for count in counts)
    of_head = WEIGHT_TYPES[recipe.rule(HEAD).dtype]
    head, packed_head = (count(of_head, spec.hidden, spec.vocab) for count in counts)
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
