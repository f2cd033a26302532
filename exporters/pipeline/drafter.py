"""A drafter's pieces: what it reads of its target, and its layers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np

from edgekv.bundle import HEADS_FILE, Manifest, RecipeRecord, TargetRecord
from edgekv.plan import (
    calibration_window,
    compile_bytes,
    quantization_bytes,
    writing_bytes,
)
from edgekv.qnn import provider as qnn
from edgekv.spec.tensors import EMBEDDING_IN, TARGET_FRAME, TARGET_IN, matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.drafter import Drafter
from exporters.options import ExportOptions
from exporters.pipeline.inputs import DecoderKey, Inputs
from exporters.pipeline.piece import Piece, Plan
from exporters.pipeline.pieces import CheckPiece, HeadPiece, LayerPiece, TextPiece
from exporters.pipeline.place import Identity, tokenizer_sha256
from exporters.pipeline.planning import give_tokens, put_texts
from exporters.pipeline.write import CacheForm, ExportResult, WritePiece, initial_manifest
from exporters.plan import opening_tokens, special_tokens
from exporters.quantize.calibrate import calibration_windows, default_chats, read_calibration, rendered
from exporters.quantize.matrices import needs_quantized_pass
from exporters.resources import generated_bytes

_ENTRY = (EMBEDDING_IN, TARGET_FRAME, TARGET_IN)


@dataclass(frozen=True, slots=True)
class TargetPiece(Piece):
    """What a drafter reads of its target, which runs in float; the drafter's values are checked first.

    Attributes:
        decoder: the drafter.
        tokens: names of the token ids of the windows, each with a token more than is run.
    """

    kind: ClassVar[str] = "target"

    decoder: DecoderKey
    tokens: tuple[str, ...]

    @property
    def needs(self) -> tuple[str, ...]:
        return self.tokens

    def make(self, folder: Path, inputs: Inputs) -> object:
        inputs.check_values(self.decoder)
        windows = np.concatenate([inputs.tokens(name) for name in self.tokens])
        inputs.drafter(self.decoder).text(windows).write(folder)
        return None


@dataclass(frozen=True, slots=True)
class DrafterPlan:
    """What is wanted of a drafter.

    Attributes:
        drafter: and its target.
        options: that a drafter has.
        result: names of the pieces.
        tokens: of the calibration text, with those that the target writes.
        window: of them in each window.
        written_windows: that the target writes.
    """

    drafter: Drafter
    options: ExportOptions
    result: ExportResult
    tokens: int
    window: int
    written_windows: int


def plan_drafter(plan: Plan, drafter: Drafter, options: ExportOptions, identity: Identity) -> DrafterPlan:
    """Add the pieces of a drafter.

    Args:
        plan: takes the pieces.
        drafter: and its target.
        options: recipe, calibration and checks; what concerns the cache is the target's.
        identity: of the drafter and its target.

    Raises:
        UsageError: the recipe or the calibration text does not fit.
    """
    target, spec, source = drafter.target.manifest, drafter.spec, drafter.source
    recipe = options.recipe.for_decoder(spec.sizes).with_effort(options.effort, spec)
    recipe.check(spec)
    record = drafter.transforms(recipe.record(spec))
    calibration = read_calibration(options.calibration, source.folder)
    sink = () if target.sink is None else tuple(target.sink.tokens)
    first = sink or (() if source.special.bos is None else (source.special.bos,))
    tokens = options.calibration_tokens or options.effort.calibration_tokens(source.spec.sizes)
    window = min(calibration_window(target.context, has_delta_rule=spec.delta_rule is not None), tokens)
    windows = calibration_windows(source.encode(calibration.text), window, tokens, first)
    sizes = source.spec.sizes
    key = DecoderKey(identity.weights, identity.config, spec, target.context, identity.target)
    written = options.effort.written_windows(windows.shape[1])
    total_tokens = windows.size + written * windows.shape[1]
    ram_bytes = quantization_bytes(sizes, 2 * sizes.layers * sizes.kv_heads, total_tokens, window)
    texts = _written(plan, key, source, first, written, windows.shape[1]) if written else ()
    read = plan.put(TargetPiece(key, (give_tokens(plan, windows), *texts)), ram_bytes)
    key = replace(key, survey=read, transforms=msgspec.structs.replace(record, name="", weights=[]))
    follows, layers = needs_quantized_pass(recipe), list[str]()
    ends = list(record.weights)
    for layer in spec.own_layers:
        at = (f"model.layers.{layer}.", *(_ENTRY if not layers else ()))
        rules = tuple(weight for weight in record.weights if weight.tensor.startswith(at))
        ends = [end for end in ends if end not in rules]
        owner = spec.cache_layer(layer)
        shared = (layers[owner - spec.first_layer],) if spec.first_layer <= owner < layer else ()
        piece = LayerPiece(key, layer, rules, follows, layers[-1] if layers else None, shared)
        layers.append(plan.put(piece, ram_bytes))
    layers.append(plan.put(HeadPiece(key, tuple(ends), follows, layers[-1]), ram_bytes))
    manifest = _manifest(drafter, record, calibration.name, identity.weights)
    write = plan.put(WritePiece(key, identity, manifest, None, (), (), tuple(layers)), writing_bytes(sizes))
    checks = {}
    if options.check_on_htp:
        weights = sum(rows * columns for rows, columns in matrices(spec).values())
        for graph in manifest.graphs:
            check = CheckPiece(write, graph.file, options.device.soc, qnn.compiler())
            checks[graph.file] = plan.put(check, compile_bytes(weights, 0, 1))
    return DrafterPlan(drafter, options, ExportResult(key, write, None, checks, ()), total_tokens, window, written)


def _written(
    plan: Plan, key: DecoderKey, source: Checkpoint, first: tuple[int, ...], windows: int, length: int
) -> tuple[str, ...]:
    """Add the text that the target writes; returns the names of its pieces.

    Args:
        plan: takes the pieces.
        key: of the drafter.
        source: the checkpoint of the target.
        first: the tokens at the start of each window.
        windows: their number.
        length: T of a window.
    """
    opening = opening_tokens(source, length)
    special = (
        () if source.chat is None else special_tokens(source, source.encode(rendered(source.chat, default_chats())))
    )
    whole = TextPiece(key, tokenizer_sha256(source), first, opening, special, 0, windows, length)
    return put_texts(plan, whole, generated_bytes(source.spec, length))


def _manifest(drafter: Drafter, recipe: RecipeRecord, calibration: str, weights_sha256: str) -> Manifest:
    target = drafter.target.manifest
    cache = CacheForm(target.kv_dtype, target.key_layout, target.context)
    manifest = initial_manifest(drafter.checkpoint, recipe, drafter.graphs, weights_sha256, calibration, cache)
    heads = None if drafter.is_cached_apart else target.files.get(HEADS_FILE)
    record = TargetRecord(
        target.source.weights_sha256,
        None if heads is None else heads.sha256,
        target.recipe.rotation,
        target.model.vocabulary,
    )
    return msgspec.structs.replace(manifest, target=record)
