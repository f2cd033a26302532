"""RAM, time and disk that an export takes: the exporter's own allocations, and times fitted to measurements.

Measured with w8a16, 16 windows of 512 tokens, on two x86 cores that other work shared; a dash was not measured:

| shape | quantize and write | peak RAM | HTP check of a graph | its peak RAM | graph |
|---|---|---|---|---|---|
| 4 layers, hidden 256, vocab 4,096 | 5.5 s | 0.44 GB | 1.4 s | 0.19 GB | 0.19 MB |
| 15 layers of SmolLM2-135M | - | - | 9.7 s | 0.63 GB | 1.31 MB |
| SmolLM2-135M | 155 s | 0.85 GB | 47 s | 0.90 GB | 2.63 MB |
| 2 layers of Llama-3.2-1B | - | - | 18 s | 2.14 GB | 0.55 MB |
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgekv.kv import Geometry
from edgekv.size import Decoder, Weights

_WINDOWS, _WINDOW_TOKENS = 16, 512
_SAMPLE = 4_096  # elements kept of a cache tensor in a window, and up to twice as many
_FLOAT_BYTES = 4

_PROCESS_BYTES = 64_000_000
_TOKENIZER_BYTES = 800  # for each token of the vocabulary
_READING_BYTES = 6  # for each element: float32 beside the mapped pages of bfloat16
_SCORES_AT_ONCE = 5  # [T, T]: scores and weights of a head, and what softmax makes on its way
_ROWS_AT_ONCE = 4  # [T, intermediate]: gate, up, silu and their product
_SQUARES_AT_ONCE = 5  # [intermediate, intermediate]: sums over inputs, their factor, and what is made on its way
_LOGITS_AT_ONCE = 2  # [T, vocab]: a window's, and the parts that they are stacked from
_QUANTIZING_BYTES = 14  # for each element of a matrix: float32 thrice (read, scaled and rounded, clipped), then uint16

_QUERY_HEAD_GRAPH_BYTES, _KV_HEAD_GRAPH_BYTES, _LAYER_GRAPH_BYTES = 6_050, 9_150, 5_700

_CHECK_PROCESS_BYTES = 148_000_000
_CHECK_BYTES_PER_WEIGHT_BYTE = 2.1
_CHECK_BYTES_PER_GRAPH_BYTE = 131

_SECONDS_PER_PRODUCT = 0.238 / 1e6 / (_WINDOWS * _WINDOW_TOKENS)  # one element of a matrix times one token
_SECONDS_PER_SCORE = 13e-9  # one score of one query head
_CHECK_SECONDS = 0.7
_CHECK_SECONDS_PER_WEIGHT_BYTE = 7e-9
_CHECK_SECONDS_PER_SQUARE_MB = 6.6  # of the graph's file: the compiler's time grows with the square of the nodes


class ExportCost(msgspec.Struct, frozen=True, kw_only=True):
    """What `edgekv export` takes: an estimate.

    Attributes:
        peak_bytes: RAM, the most of the three that follow.
        calibration_peak_bytes: one layer or the head in float32, states and cache samples of all windows, and what
            is computed on one of them.
        quantization_peak_bytes: the largest matrix on its way to integers.
        check_peak_bytes: the HTP compiler in a process of its own, beside the waiting exporter.
        seconds: the two that follow together.
        export_seconds: calibration and quantization.
        check_seconds: the check on the HTP compiler, one graph after another.
        graphs: one for each AR, and one more that scores.
        graph_bytes: each graph's file, without weights.
        bundle_bytes: disk: weights and graphs.
    """

    peak_bytes: int
    calibration_peak_bytes: int
    quantization_peak_bytes: int
    check_peak_bytes: int
    seconds: float
    export_seconds: float
    check_seconds: float
    graphs: int
    graph_bytes: int
    bundle_bytes: int


def graph_bytes(decoder: Decoder) -> int:
    """The file of one graph, without weights: nodes and names, counted by heads in graphs that export wrote."""
    return decoder.layers * layer_graph_bytes(decoder)


def layer_graph_bytes(decoder: Decoder) -> int:
    """The share of one layer in that."""
    heads_bytes = decoder.heads * _QUERY_HEAD_GRAPH_BYTES + decoder.kv_heads * _KV_HEAD_GRAPH_BYTES
    return heads_bytes + _LAYER_GRAPH_BYTES


def export_cost(decoder: Decoder, weights: Weights, geometry: Geometry, ar: Sequence[int]) -> ExportCost:
    """The cost of exporting graphs of these AR with a calibration text that fills all windows."""
    window = min(_WINDOW_TOKENS, geometry.context)
    each_bytes = graph_bytes(decoder)
    graphs = len(ar) + 1
    base_bytes = _PROCESS_BYTES + _TOKENIZER_BYTES * decoder.vocab
    calibration_bytes = base_bytes + _calibration_bytes(decoder, geometry, window)
    largest = max(decoder.table_parameters, *(rows * columns for rows, columns in decoder.layer_matrices))
    quantization_bytes = base_bytes + _QUANTIZING_BYTES * largest
    compiler_bytes = _CHECK_BYTES_PER_WEIGHT_BYTE * weights.total_bytes + _CHECK_BYTES_PER_GRAPH_BYTE * each_bytes
    check_bytes = base_bytes + _CHECK_PROCESS_BYTES + round(compiler_bytes)
    export_seconds = _export_seconds(decoder, window)
    check_seconds = graphs * _check_seconds(weights, each_bytes)
    return ExportCost(
        peak_bytes=max(calibration_bytes, quantization_bytes, check_bytes),
        calibration_peak_bytes=calibration_bytes,
        quantization_peak_bytes=quantization_bytes,
        check_peak_bytes=check_bytes,
        seconds=export_seconds + check_seconds,
        export_seconds=export_seconds,
        check_seconds=check_seconds,
        graphs=graphs,
        graph_bytes=each_bytes,
        bundle_bytes=weights.total_bytes + graphs * each_bytes,
    )


def _calibration_bytes(decoder: Decoder, geometry: Geometry, window: int) -> int:
    """The most of four: the embedding read, attention or feed-forward of the last layer, or the head, at work.

    Cache samples and states of all windows stay. Every value of a layer is held for all windows, twice: in the exact
    decoder and in the quantized one.
    """
    both_bytes = 2 * _FLOAT_BYTES * _WINDOWS * window  # of a value one element wide
    kept = -(-window * decoder.head_dim // (window * decoder.head_dim // _SAMPLE | 1))
    held_bytes = both_bytes * decoder.hidden + _FLOAT_BYTES * geometry.tensors * _WINDOWS * kept
    weights_bytes = 2 * _FLOAT_BYTES * decoder.layer_parameters
    queries = decoder.heads * decoder.head_dim
    attention_bytes = both_bytes * (_SCORES_AT_ONCE * window + decoder.hidden + queries)
    inner_bytes = both_bytes * (_ROWS_AT_ONCE * decoder.intermediate + 2 * decoder.hidden)
    statistics = _SQUARES_AT_ONCE * decoder.intermediate**2 + 4 * decoder.intermediate * decoder.hidden
    layer_bytes = weights_bytes + max(attention_bytes, inner_bytes + _FLOAT_BYTES * statistics)
    logits_bytes = 2 * _LOGITS_AT_ONCE * _FLOAT_BYTES * window * decoder.vocab
    head_bytes = both_bytes * decoder.hidden + 2 * _FLOAT_BYTES * decoder.table_parameters + logits_bytes
    reading_bytes = _READING_BYTES * decoder.table_parameters
    return held_bytes + max(layer_bytes, head_bytes, reading_bytes)


def _export_seconds(decoder: Decoder, window: int) -> float:
    """The exact decoder and the quantized one, and GPTQ: two sums over tokens for each width of inputs, and for each
    matrix an update of every row from all rows before it.
    """
    tokens = _WINDOWS * window
    products = 2 * tokens * (decoder.layers * decoder.layer_parameters + decoder.table_parameters)
    queries = decoder.heads * decoder.head_dim
    sums = 2 * tokens * (2 * decoder.hidden**2 + queries**2 + decoder.intermediate**2)
    updates = sum(rows**2 * columns for rows, columns in decoder.layer_matrices)
    scores = 2 * _WINDOWS * decoder.layers * decoder.heads * window * window
    return _SECONDS_PER_PRODUCT * (products + decoder.layers * (sums + updates)) + _SECONDS_PER_SCORE * scores


def _check_seconds(weights: Weights, each_bytes: int) -> float:
    by_weights = _CHECK_SECONDS_PER_WEIGHT_BYTE * weights.total_bytes
    return _CHECK_SECONDS + by_weights + _CHECK_SECONDS_PER_SQUARE_MB * (each_bytes / 1e6) ** 2
