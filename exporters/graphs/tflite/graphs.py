"""All graphs of a bundle as signatures of one `.tflite` file with shared weights, built layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from edgekv.graphs.decoder import decoder_layer, logits
from edgekv.spec import DecoderInterface, GraphRecord
from exporters.graphs.tflite.flatbuffer import TfliteFile
from exporters.graphs.tflite.ops import TfliteOps
from exporters.graphs.tflite.weights import TfliteWeights
from exporters.quantize.matrices import QuantizedMatrices
from exporters.quantize.reference import Tensors
from quant import Encoding


def write_tflite(
    tensors: Tensors,
    matrices: QuantizedMatrices,
    decoder: DecoderInterface,
    encodings: Mapping[str, Encoding],
    graphs: Sequence[GraphRecord],
    folder: Path,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Write the `.tflite` file into `folder`; each graph is a signature of its name.

    Args:
        tensors: the weights that are not matrices.
        matrices: the integers of every matrix, without blocks.
        decoder: gives the inputs and outputs of the graphs.
        encodings: one for every result of the decoder and every input.
        graphs: the graphs to write.
        folder: the target.
        progress: called with the number of layers done.
    """
    spec = tensors.spec
    (target,) = {graph.file for graph in graphs}
    file, weights = TfliteFile(), TfliteWeights(tensors, matrices)
    builders = [TfliteOps(file.subgraph(g.name), g, decoder, spec, encodings, weights) for g in graphs]
    hidden = [ops.embed("model.embed_tokens.weight", "embedding") for ops in builders]
    for layer in range(spec.layers):
        hidden = [decoder_layer(ops, spec, layer, each) for ops, each in zip(builders, hidden, strict=True)]
        weights.forget()
        if progress is not None:
            progress(layer + 1)
    for ops, each, graph in zip(builders, hidden, graphs, strict=True):
        rows = ops.select(each) if graph.role == "prefill" else each
        ops.finish(logits(ops, spec, rows))
    file.save(folder / target)
