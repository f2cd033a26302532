"""What a bundle holds: its graphs, weights and tokenizer, and the manifest that describes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple

from edgekv.bundle import FORMAT, FileRecord, HtpCheck, Manifest, SourceRecord, WeightPlaces
from edgekv.spec import DecoderInterface, EncodingTypes
from edgekv.spec.chat import write_templates
from exporters.checkpoint.aligned import cache_encodings, write_heads
from exporters.checkpoint.lora import Adapter
from exporters.graphs.onnx import write_graphs
from exporters.lora.base import ExportedBase, write_lora_base
from exporters.lora.encodings import lora_encodings
from exporters.lora.quantize import largest_elements
from exporters.prepared import Prepared, Surveyed
from exporters.progress import Progress, silent
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.reference import Tensors
from exporters.records import sink_record, token_record
from quant import Encoding, Range


class Contents(NamedTuple):
    """What a manifest says of the files of a bundle.

    Attributes:
        encodings: of all results, which depend on the format of the graphs.
        weights: where they are.
    """

    encodings: dict[str, Encoding]
    weights: WeightPlaces


def write_contents(
    prepared: Prepared,
    surveyed: Surveyed,
    tensors: Tensors,
    matrices: QuantizedMatrices,
    ranges: Mapping[str, Range],
    folder: Path,
    progress: Progress = silent,
) -> Contents:
    """Write everything but the manifest into a folder.

    Args:
        prepared: checkpoint and options.
        surveyed: what the survey decided.
        tensors: the checkpoint, with the transforms that the recipe folds into the weights.
        matrices: its quantized matrices.
        ranges: of all results.
        folder: the target.
        progress: called for each layer, and for what follows the last one.
    """
    steps = tensors.spec.layers + 1

    def done(layers: int) -> None:
        progress("write", layers, steps)

    done(0)
    options, checkpoint, graphs = prepared.options, prepared.checkpoint, prepared.graphs
    is_tflite, context = options.graph_format == "tflite", options.contexts[-1]
    activations: Literal["u16", "s16"] = "s16" if is_tflite else options.recipe.activations
    types = EncodingTypes(activations, options.kv_dtype, options.state_dtype)
    slots = None if options.lora is None else options.lora.slots(tensors.spec)
    decoder = DecoderInterface.of(tensors.spec, context, options.kv_dtype, options.key_layout, types.activations, slots)
    factors = [rope.rotation(context).attention_factor for rope in tensors.spec.ropes]
    encodings = choose_encodings(decoder_results(tensors.spec), ranges, factors, types)
    if surveyed.heads is not None:
        encodings |= cache_encodings(surveyed.heads, options.kv_dtype)
        write_heads(surveyed.heads, folder)
    if slots is not None and options.lora is not None:
        adapters = [Adapter.open(choice) for choice in options.lora.calibrate]
        largest = largest_elements(adapters, ExportedBase(checkpoint, tensors))
        encodings |= lora_encodings(slots, tensors.spec, ranges, encodings, options.lora.reach, largest)
    places = WeightPlaces()
    if is_tflite:
        from exporters.graphs.tflite.graphs import write_tflite  # its package is optional

        write_tflite(tensors, matrices, decoder, encodings, graphs, folder, done)
    else:
        encodings, places = write_graphs(tensors, matrices, decoder, encodings, graphs, folder, done)
    if surveyed.sink is not None:
        surveyed.sink.write(folder, encodings)
    if options.lora is not None:
        write_lora_base(checkpoint, tensors, () if surveyed.sink is None else surveyed.sink.tokens, folder)
    checkpoint.write_tokenizer(folder / "tokenizer.json")
    if checkpoint.chat is not None:
        write_templates(checkpoint.chat, folder)
    done(steps)
    return Contents(encodings, places)


def make_manifest(
    prepared: Prepared,
    surveyed: Surveyed,
    contents: Contents,
    source: SourceRecord,
    files: dict[str, FileRecord],
    check: HtpCheck = "not-run",
    floating: Sequence[str] = (),
) -> Manifest:
    """The manifest of a bundle with these contents.

    Args:
        prepared: checkpoint and options.
        surveyed: what the survey decided.
        contents: what was written.
        source: where the weights are from.
        files: of the bundle.
        check: outcome of the HTP compiler's check.
        floating: nodes that compute in float.
    """
    options, checkpoint = prepared.options, prepared.checkpoint
    spec, sink = checkpoint.spec, surveyed.sink
    return Manifest(
        format=FORMAT,
        producer=f"edgekv {metadata.version('edgekv')}",
        device=options.device.soc,
        recipe=prepared.recipe,
        kv_dtype=options.kv_dtype,
        key_layout=options.key_layout,
        context=options.contexts[-1],
        htp_check=check,
        floating_nodes=list(floating),
        model=spec,
        tokens=token_record(checkpoint),
        generation=checkpoint.generation,
        graphs=list(prepared.graphs),
        encodings=contents.encodings,
        weights=contents.weights,
        source=source,
        files=files,
        graph_format=options.graph_format,
        sink=None if sink is None else sink_record(sink),
        lora=None if options.lora is None else options.lora.slots(spec),
    )
