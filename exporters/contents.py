"""What a bundle holds: its graphs, weights and tokenizer, and the manifest that describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edgekv.bundle import (
    FORMAT,
    FileRecord,
    GraphFormat,
    GraphRecord,
    Manifest,
    RecipeRecord,
    SourceRecord,
    WeightPlaces,
)
from edgekv.kv import KeyLayout, KvDtype
from edgekv.spec import DecoderInterface, EncodingTypes
from edgekv.spec.chat import write_templates
from exporters.checkpoint.aligned import AlignedHeads, cache_encodings, write_heads
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.onnx import write_graphs
from exporters.lora.base import ExportedBase, write_lora_base
from exporters.lora.encodings import lora_encodings
from exporters.lora.options import LoraOptions
from exporters.lora.quantize import largest_elements
from exporters.progress import Progress, silent
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.sink import FloatSink
from exporters.records import sink_record, token_record
from quant import Encoding, Range


@dataclass(frozen=True, slots=True)
class BundleForm:
    """What the graphs of a bundle are, whatever the chip.

    Attributes:
        recipe: how each matrix is quantized.
        activations: integer type of activations of ONNX graphs.
        kv_dtype: integer type of the cache.
        state_dtype: of states.
        key_layout: keys as rows or columns.
        context: the longest.
        graph_format: ONNX graphs, or one `.tflite` file.
        graphs: to be written.
        lora: slots for adapters.
    """

    recipe: RecipeRecord
    activations: Literal["u16"]
    kv_dtype: KvDtype
    state_dtype: KvDtype
    key_layout: KeyLayout
    context: int
    graph_format: GraphFormat
    graphs: tuple[GraphRecord, ...]
    lora: LoraOptions | None


@dataclass(frozen=True, slots=True)
class Surveyed:
    """What the pass of the exact decoder decides.

    Attributes:
        sink: the first tokens in float, if they become a sink.
        heads: transforms of single heads, if the recipe aligns them.
        tokens: ids of the calibration text `[windows, T]`.
    """

    sink: FloatSink | None
    heads: AlignedHeads | None
    tokens: NDArray[np.int64]

    @property
    def sink_tokens(self) -> int:
        """Number of first tokens of each window that no graph computes."""
        return 0 if self.sink is None else len(self.sink.tokens)


class Contents(NamedTuple):
    """What a manifest says of the files of a bundle.

    Attributes:
        encodings: of all results, which depend on the format of the graphs.
        weights: where they are.
    """

    encodings: dict[str, Encoding]
    weights: WeightPlaces


def write_contents(
    checkpoint: Checkpoint,
    form: BundleForm,
    surveyed: Surveyed,
    tensors: Tensors,
    matrices: QuantizedMatrices,
    ranges: Mapping[str, Range],
    folder: Path,
    progress: Progress = silent,
    *,
    embedded: Range | None = None,
) -> Contents:
    """Write everything but the manifest into a folder.

    Args:
        checkpoint: the exact weights, tokenizer and templates.
        form: the graphs.
        surveyed: what the survey decided.
        tensors: the checkpoint, with the transforms that the recipe folds into the weights.
        matrices: its quantized matrices.
        ranges: of all results.
        folder: the target.
        progress: called for each layer, and for what follows the last one.
        embedded: see `write_graphs`.
    """
    steps = tensors.spec.layers + 1

    def done(layers: int) -> None:
        progress("write", layers, steps)

    done(0)
    is_tflite, context, graphs = form.graph_format == "tflite", form.context, form.graphs
    activations: Literal["u16", "s16"] = "s16" if is_tflite else form.activations
    types = EncodingTypes(activations, form.kv_dtype, form.state_dtype)
    slots = None if form.lora is None else form.lora.slots(tensors.spec)
    decoder = DecoderInterface.of(tensors.spec, context, form.kv_dtype, form.key_layout, types.activations, slots)
    factors = [rope.rotation(context).attention_factor for rope in tensors.spec.ropes]
    encodings = choose_encodings(decoder_results(tensors.spec), ranges, factors, types)
    if surveyed.heads is not None:
        encodings |= cache_encodings(surveyed.heads, form.kv_dtype)
        write_heads(surveyed.heads, folder)
    if slots is not None and form.lora is not None:
        adapters = [Adapter.open(choice) for choice in form.lora.calibrate]
        largest = largest_elements(adapters, ExportedBase(checkpoint, tensors))
        encodings |= lora_encodings(slots, tensors.spec, ranges, encodings, form.lora.reach, largest)
    inputs = tensors, matrices, decoder, encodings, graphs, folder, done
    if is_tflite:
        from exporters.graphs.tflite.graphs import write_tflite  # its package is optional

        encodings, places = write_tflite(*inputs, embedded=embedded)
    else:
        encodings, places = write_graphs(*inputs, embedded=embedded)
    if surveyed.sink is not None:
        surveyed.sink.write(folder, encodings)
    if form.lora is not None:
        write_lora_base(checkpoint, tensors, () if surveyed.sink is None else surveyed.sink.tokens, folder)
    checkpoint.write_tokenizer(folder / "tokenizer.json")
    if checkpoint.chat is not None:
        write_templates(checkpoint.chat, folder)
    done(steps)
    return Contents(encodings, places)


def make_manifest(
    checkpoint: Checkpoint,
    form: BundleForm,
    surveyed: Surveyed,
    contents: Contents,
    source: SourceRecord,
    files: dict[str, FileRecord],
) -> Manifest:
    """The manifest of a bundle with these contents, for no chip yet.

    Args:
        checkpoint: the exact weights.
        form: the graphs.
        surveyed: what the survey decided.
        contents: what was written.
        source: where the weights are from.
        files: of the bundle.
    """
    spec, sink = checkpoint.spec, surveyed.sink
    return Manifest(
        format=FORMAT,
        producer=f"edgekv {metadata.version('edgekv')}",
        device="",
        recipe=form.recipe,
        kv_dtype=form.kv_dtype,
        key_layout=form.key_layout,
        context=form.context,
        htp_check="not-run",
        floating_nodes=[],
        model=spec,
        tokens=token_record(checkpoint),
        generation=checkpoint.generation,
        graphs=list(form.graphs),
        encodings=contents.encodings,
        weights=contents.weights,
        source=source,
        files=files,
        graph_format=form.graph_format,
        sink=None if sink is None else sink_record(sink),
        lora=None if form.lora is None else form.lora.slots(spec),
    )
