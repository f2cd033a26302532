"""All graphs of a decoder as signatures of one `.tflite` file with shared weights, built layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from edgekv.bundle import WeightPlaces
from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import EMBEDDINGS, DecoderInterface, GraphRecord, head_width
from exporters.checkpoint.tensors import Tensors
from exporters.graphs.onnx import EMBEDDING_SHARD
from exporters.graphs.tflite.flatbuffer import TfliteFile
from exporters.graphs.tflite.ops import TfliteOps
from exporters.graphs.tflite.weights import TfliteWeights
from exporters.graphs.weights import ShardWriter
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.table import Table
from quant import Encoding, Range


def write_tflite(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    decoder: DecoderInterface,
    encodings: Mapping[str, Encoding],
    graphs: Sequence[GraphRecord],
    folder: Path,
    progress: Callable[[int], None] | None = None,
    *,
    embedded: Range | None = None,
) -> tuple[dict[str, Encoding], WeightPlaces]:
    """Write the `.tflite` file into `folder`; each graph is a signature of its name.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of every matrix, without blocks, and scales with the gains of their products.
        decoder: gives the inputs and outputs of the graphs.
        encodings: one for every result of the decoder and every input.
        graphs: the graphs to write.
        folder: the target.
        progress: called with the number of layers done.
        embedded: what other rows than the table's reach that the host puts in their place; None if there are none.

    Returns:
        The encodings, with that of the embeddings that the host looks up; and the place of its table, if there is one.
    """
    spec, encodings, places = tensors.spec, dict(encodings), WeightPlaces()
    if not all(graph.is_whole for graph in graphs):
        table, writer = Table.of(tensors), ShardWriter(tensors.tensor, partial(head_width, spec), {})
        writer.put_table(table)
        writer.write(folder / f"{EMBEDDING_SHARD}.safetensors")
        places = writer.places
        encodings["embedding"] = encodings[EMBEDDINGS] = table.encoding_with(embedded, "s16")
        if table.columns is not None:
            encodings["embedding.columns"] = table.scaled_encoding
    (target,) = {graph.file for graph in graphs}
    file, weights = (
        TfliteFile(),
        TfliteWeights(tensors.tensor, partial(head_width, spec), matrices, scales_have_gains=True),
    )
    builders = [TfliteOps(file.subgraph(g.name), g, decoder, spec, encodings, weights) for g in graphs]
    hidden = [ops.embed("model.embed_tokens.weight", "embedding") for ops in builders]
    for layer in range(spec.layers):
        hidden = [decoder_layer(ops, spec, layer, state) for ops, state in zip(builders, hidden, strict=True)]
        weights.forget()
        if progress is not None:
            progress(layer + 1)
    for ops, state, graph in zip(builders, hidden, graphs, strict=True):
        rows = ops.select(state) if graph.role == "prefill" else state
        ops.finish(logits(ops, spec, rows))
    file.save(folder / target)
    return encodings, places
