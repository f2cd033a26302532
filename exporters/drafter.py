"""From a drafter's checkpoint and the bundle of its target to a bundle that reads the target's cache."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import (
    FORMAT,
    HEADS_FILE,
    Bundle,
    GraphRecord,
    HtpCheck,
    Manifest,
    RecipeRecord,
    SourceRecord,
    TargetRecord,
    atomic_directory,
    check_output,
    record_files,
    write_manifest,
)
from edgekv.errors import UsageError
from edgekv.graphs.decoder import last_norm
from edgekv.kv import KvTensor
from edgekv.plan import calibration_window, default_calibration_tokens
from edgekv.spec import (
    FINAL_NORM,
    TARGET_HIDDEN,
    TARGET_OUT_RESULT,
    DecoderInterface,
    DecoderSpec,
    EncodingTypes,
    PartRecord,
    Role,
)
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import heads_of, transformed, transformed_as
from exporters.checkpoint.rotate import ResidualRotation
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.onnx import write_graphs
from exporters.htp.check import float_verdict, floating_nodes
from exporters.inspect.evaluate import open_source
from exporters.options import DEFAULT_RECIPE, ExportOptions
from exporters.preconditions import check_compiler
from exporters.progress import Progress, one_step, silent
from exporters.quantize.calibrate import calibration_windows, read_calibration
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.matrices import Quantizer
from exporters.quantize.reference import Floats, NumpyOps, Reference, Weights
from exporters.records import recipe_record, source_name, token_record
from quant import QuantizedWeight, Range

_READ = ("device", "recipe", "calibration", "calibration_tokens", "allow_float", "check_on_htp", "check_quality")
_TARGETS_OWN = ("context", "ar", "kv_dtype", "state_bits", "key_layout", "max_attention_window", "sink")


@dataclass(frozen=True, slots=True)
class TargetText:
    """What a drafter reads of its target on a calibration text.

    Attributes:
        tokens: the token of each row, which follows the ones that the target has run, `[windows, T]`.
        hidden: the target's last hidden states before it, `[windows, T, H]`, as its graphs give them.
        rows: the target's keys and values up to there, `[windows, T, D]`, as its cache holds them.
    """

    tokens: NDArray[np.int64]
    hidden: Floats
    rows: Mapping[KvTensor, Floats]


@dataclass(frozen=True, slots=True)
class Drafter:
    """A drafter and its target.

    Attributes:
        checkpoint: the drafter.
        target: the bundle whose cache it reads.
        source: the checkpoint of the target, as the bundle has it.
    """

    checkpoint: Checkpoint
    target: Bundle
    source: Checkpoint

    @classmethod
    def open(cls, name: str, target: Bundle) -> Drafter:
        """Open a drafter for a target, whose checkpoint is where it was when the bundle was exported.

        Raises:
            UsageError: the bundle gives no hidden state, or its keys and values have transforms that it does not hold.
            CheckpointError: the drafter or the target's checkpoint cannot be read, or they do not belong together.
        """
        manifest, at = target.manifest, f"--draft-for {target.path}"
        if manifest.target is not None or not manifest.model.gives_hidden:
            fix = "Export the target with --give-hidden."
            found = "a drafter" if manifest.target is not None else "graphs that give logits alone"
            raise UsageError(at, got=found, expected="graphs that give the last hidden state", fix=fix)
        plain = open_source(manifest, None)
        source = plain.with_vocabulary(manifest.model.vocabulary)
        drafter = cls(Checkpoint.open_drafter(name, source, _frame(target, plain)), target, source)
        recipe = manifest.recipe
        folded = {recipe.rotation, recipe.value_rotation, recipe.key_scaling} - {"none"}
        if folded and not drafter.is_cached_apart:
            names = ", ".join(sorted(folded))
            fix = 'Export the target with a recipe whose heads are "aligned" or "none", and nothing else rotated.'
            wanted = "one with neither rotation nor scaling"
            raise UsageError(at, got=f"a recipe with {names}", expected=wanted, fix=fix)
        return drafter

    @property
    def spec(self) -> DecoderSpec:
        """The drafter's layers, behind those of its target."""
        return self.checkpoint.spec

    @property
    def is_cached_apart(self) -> bool:
        """See `TargetState`."""
        return self.spec.target is not None and self.spec.target.is_cached_apart

    @property
    def read(self) -> list[KvTensor]:
        """The tensors of the target's cache that it reads."""
        if self.is_cached_apart:
            return []
        owners = sorted({self.spec.cache_layer(layer) for layer in self.spec.own_layers})
        return [*self.target.manifest.interface.tensors(owners)]

    @property
    def tensors(self) -> Tensors:
        """Its weights, with the transforms that the target's keys and values have."""
        recipe = self.transforms(self.target.manifest.recipe)
        return transformed(self.checkpoint, recipe, None if recipe.heads == "none" else heads_of(self.target))

    def transforms(self, recipe: RecipeRecord) -> RecipeRecord:
        """A recipe's transforms, as far as they are the target's."""
        return msgspec.structs.replace(
            recipe,
            rotation="none",
            neuron_scaling="none",
            outlier_channels="keep",
            value_rotation="none",
            key_scaling="none",
            heads="none" if self.is_cached_apart else self.target.manifest.recipe.heads,
        )

    def text(self, windows: NDArray[np.int64]) -> TargetText:
        """Run the target in float on windows of tokens `[windows, T+1]`."""
        tensors, spec, context = transformed_as(self.target, self.source), self.source.spec, windows.shape[1] - 1
        seen: dict[str, list[Floats]] = {tensor.past: [] for tensor in self.read}

        def observe(name: str, value: Floats) -> None:
            if name in seen:
                seen[name].append(value)

        runs = [*windows[:, :-1]]
        limit = self.target.manifest.context
        states = Reference(tensors, limit).states(runs, observe=observe)
        ops = NumpyOps(spec, Weights(tensors), context, limit)
        hidden = np.stack([last_norm(ops, spec, state) for state in states])
        encodings = self.target.manifest.encodings
        rows = {}
        for tensor in self.read:
            encoding, found = encodings[tensor.past], np.stack(seen[tensor.past])
            rows[tensor] = encoding.dequantize(encoding.quantize(found)).astype(np.float32)
        return TargetText(windows[:, 1:], hidden, rows)


@dataclass(slots=True)
class _Quantized:
    """Matrices by name, and the ranges of all results."""

    matrices: dict[str, QuantizedWeight] = field(default_factory=dict)
    ranges: dict[str, Range] = field(default_factory=dict)


def export_drafter(
    drafter: Drafter, output: Path, options: ExportOptions, *, force: bool = False, progress: Progress = silent
) -> Manifest:
    """Calibrate and quantize a drafter, and write its bundle: a graph of one token for each context of its target.

    A drafter with a cache of its own has graphs of as many tokens as its target prefills, too.

    Args:
        drafter: and its target.
        output: the bundle's folder; it appears atomically.
        options: recipe, calibration and checks; what concerns the cache is the target's.
        force: replace an existing bundle.
        progress: called for each step.

    Raises:
        UsageError: options that a drafter does not have, or the folder exists.
        CheckpointError: a tensor of the drafter has values that no graph can represent.
        EngineError: the HTP compiler is not installed, refused a graph, or computes part of it in float.
    """
    _check(options)
    check_output(output, force=force)
    check_compiler(options)
    target, spec = drafter.target.manifest, drafter.spec
    options.recipe.check(spec)
    recipe = drafter.transforms(recipe_record(spec, options.recipe))
    calibration = read_calibration(options.calibration, drafter.source.folder)
    sink = () if target.sink is None else tuple(target.sink.tokens)
    bos = drafter.source.special.bos
    first = sink or (() if bos is None else (bos,))
    tokens = options.calibration_tokens or default_calibration_tokens(drafter.source.spec.sizes)
    length = min(calibration_window(target.context, has_delta_rule=spec.delta_rule is not None), tokens)
    windows = calibration_windows(drafter.source.encode(calibration.text), length, tokens, first)
    with one_step("check weights", progress):
        drafter.checkpoint.check_values()
    with one_step("run target", progress):
        text = drafter.text(windows)
    tensors = drafter.tensors
    found = _quantized(tensors, text, options, len(sink), target.context, progress)
    graphs = _graphs(drafter)
    types = EncodingTypes(options.recipe.activations, target.kv_dtype)
    decoder = DecoderInterface.of(spec, target.context, target.kv_dtype, target.key_layout, types.activations)
    factors = [rope.rotation(target.context).attention_factor for rope in spec.ropes]
    # The next step of a draft reads what this one gives.
    reached = found.ranges[TARGET_OUT_RESULT]
    found.ranges[TARGET_HIDDEN].observe(np.array([reached.low, reached.high], np.float32))
    encodings = choose_encodings(decoder_results(spec), found.ranges, factors, types)
    heads = None
    if not drafter.is_cached_apart:
        encodings |= {tensor.past: target.encodings[tensor.past] for tensor in target.cache_geometry.names()}
        heads = target.files.get(HEADS_FILE)
    with atomic_directory(output, force=force) as folder, one_step("write", progress):
        encodings, places = write_graphs(tensors, found.matrices, decoder, encodings, graphs, folder)
        drafter.checkpoint.write_tokenizer(folder / "tokenizer.json")
        nodes = list[str]()
        verdict: HtpCheck = "not-run"
        if options.check_on_htp:
            nodes = floating_nodes([folder / graph.file for graph in graphs], options.device)
            verdict, nodes = float_verdict(nodes, allow_float=options.allow_float)
        manifest = Manifest(
            format=FORMAT,
            producer=f"edgekv {metadata.version('edgekv')}",
            device=options.device.soc,
            recipe=recipe,
            kv_dtype=target.kv_dtype,
            key_layout=target.key_layout,
            context=target.context,
            htp_check=verdict,
            floating_nodes=nodes,
            model=spec,
            tokens=token_record(drafter.checkpoint),
            graphs=graphs,
            encodings=encodings,
            weights=places,
            source=SourceRecord(
                checkpoint=source_name(drafter.checkpoint),
                weights_sha256=drafter.checkpoint.weights_sha256(),
                calibration=calibration.name,
                calibration_tokens=text.tokens.size,
            ),
            files=record_files(folder),
            target=TargetRecord(
                target.source.weights_sha256,
                None if heads is None else heads.sha256,
                target.recipe.rotation,
                target.model.vocabulary,
            ),
        )
        write_manifest(folder, manifest)
    return manifest


def _quantized(
    tensors: Tensors, text: TargetText, options: ExportOptions, sink: int, context: int, progress: Progress
) -> _Quantized:
    """Quantize the matrices one after another, each on the results of those before it."""
    quantizer, spec, found = Quantizer(tensors, text.tokens, context, options.recipe, sink), tensors.spec, _Quantized()
    layers = spec.own_layers
    steps = [quantizer.enter(text.hidden, text.rows), *map(quantizer.layer, layers), quantizer.head()]
    for done, step in enumerate(steps):
        progress("quantize", done, len(steps))
        found.matrices |= dict(step)
        found.ranges |= quantizer.take_ranges()
    progress("quantize", len(steps), len(steps))
    return found


def _graphs(drafter: Drafter) -> list[GraphRecord]:
    target, found = drafter.target.manifest, list[GraphRecord]()
    prefilled = {graph.ar for graph in target.graphs if graph.role == "prefill"} if drafter.is_cached_apart else set()
    for context in target.contexts:
        for ar in sorted({1} | {each for each in prefilled if each < context}):
            name, first, stop = f"ar{ar}_cl{context}", drafter.spec.first_layer, drafter.spec.layers
            part = PartRecord(
                name=name, file=f"{name}.onnx", first_layer=first, stop_layer=stop, embeds=True, head=True
            )
            role: Role = "decode" if ar == 1 else "prefill"
            found.append(GraphRecord(name=name, parts=[part], ar=ar, context=context, role=role))
    return found


def _frame(bundle: Bundle, source: Checkpoint) -> Floats:
    """From the hidden states that a bundle's graphs give to those of its checkpoint, `[H, H]`."""
    given = transformed_as(bundle, source)
    exact = np.diag(source.tensor(FINAL_NORM))
    name = bundle.manifest.recipe.rotation
    if name != "none":
        exact = ResidualRotation(source.spec, source.tensor, name).rotated(exact)
    weights = given.tensor(FINAL_NORM)[: source.spec.hidden] * np.float32(given.spec.head_gain)
    return np.asarray(exact / weights, np.float32)


def check_given(names: Iterable[str]) -> None:
    """Refuse fields of `ExportOptions` that change nothing in a drafter.

    Args:
        names: of those that were given.

    Raises:
        UsageError: naming the field.
    """
    for name in names:
        if name not in _READ:
            wanted = "what the target has" if name in _TARGETS_OWN else "a model of its own"
            fix = "Leave it out, and run edgekv compile on the bundle." if name == "compile" else "Leave it out."
            field = "--lora-slots" if name == "lora" else name
            raise UsageError(field, got="it with --draft-for", expected=wanted, fix=fix)


def _check(options: ExportOptions) -> None:
    """Refuse options that a drafter's export does not have."""
    usual = ExportOptions(options.device)
    check_given(each.name for each in fields(options) if getattr(options, each.name) != getattr(usual, each.name))
    if options.allocates:
        fix = f"Use --recipe {DEFAULT_RECIPE}."
        raise UsageError("recipe", got="bits on average with --draft-for", expected="a type for each matrix", fix=fix)
