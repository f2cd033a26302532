"""RAM, time and disk space of an export: the exporter's own allocations, and times fitted to measurements.

Measured on two x86 cores that other work shared; values of calibration windows are in RAM. A dash: not measured. Time
and RAM of checks are of earlier graphs, whose files were larger.

| shape | recipe | processor time to quantize, write and measure | its clock time | RAM to quantize |
|---|---|---|---|---|
| SmolLM2-135M | w8a16 | 78 s | - | 0.62 GB |
| SmolLM2-135M | w4a16-lpbq64 | 124 s | - | 0.87 GB |
| 2 layers of Llama-3.2-1B | w4a16-lpbq64 | 229 s | - | 2.81 GB |
| the same, 4,096 tokens | w4a16-lpbq64 | 141 s | - | 1.64 GB |
| 1 layer of Llama-3.1-8B, without head | w4a16-lpbq64 | 276 s | - | 3.77 GB |
| 4 layers, hidden 256, vocab 4,096 | w4a16-lpbq64 | - | - | 0.14 GB |
| 1 layer of Llama-3.2-1B | w4a16-lpbq64 | - | - | 1.03 GB |

| shape | HTP check of a graph | its peak RAM | graph |
|---|---|---|---|
| 4 layers, hidden 256, vocab 4,096 | 1.4 s | 0.19 GB | 0.13 MB |
| 15 layers of SmolLM2-135M | 9.7 s | 0.63 GB | 0.87 MB |
| SmolLM2-135M | 47 s | 0.90 GB | 1.74 MB |
| 2 layers of Llama-3.2-1B | 18 s | 2.14 GB | 0.39 MB |
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from edgekv.plan.host_speed import ROUNDING_PRODUCTS, HostSpeed
from edgekv.plan.parts import COMPRESSED, EncoderPlan
from edgekv.spec import CHECKPOINT_TOKENS, Decoder, Geometry, LayeredGeometry, Weights

_WINDOW = 512  # of calibration text, in tokens
_DELTA_WINDOW = 4 * CHECKPOINT_TOKENS  # in a shorter context too: texts that go on for ever read S in any

_CALIBRATION_TOKENS, _CALIBRATION_TOKENS_LARGE = 12_800, 4_096

_SAMPLE = 4_096  # elements sampled from a cache tensor in a window; at most twice as many
_MAX_SAMPLED = 131_072  # of all windows
_FLOAT_BYTES = 4

_PROCESS_BYTES = 120_000_000
_TOKENIZER_BYTES = 800  # per token of the vocabulary
_SCORES_AT_ONCE = 5  # [T, T]: scores, masked scores, and intermediate results of softmax
_ROWS_AT_ONCE = 5  # [T, intermediate]: gate, up, sigmoid, silu and their product
_COLUMNS_AT_ONCE = 1024  # of a matrix that is being quantized
_TOKENS_AT_ONCE = 1024  # whose inputs are read
_COPIES_OF_TOKENS = 3  # as read, in order, and of the other decoder
_COPIES_OF_COLUMNS = 7  # the columns, their integers, errors and scales
_TABLE_ROWS_AT_ONCE = 8192  # of the head or of the embedding table
_COPIES_OF_ROWS = 4  # as read, rotated, rounded and dequantized
_COPIES_OF_HEAD_ROWS = 3  # those that are left while logits are computed

_PREFILL_GRAPH_BYTES, _DECODE_GRAPH_BYTES = (4_080, 5_250, 6_940), (1_200, 8_960, 7_360)
"""For each query head, KV head and layer: 4 % above graphs of seven shapes where every tensor has its own encoding.
Decode has the query heads of a KV head as rows of one product.
"""

_EXPERT_GRAPH_BYTES = 4_100
"""For each expert of each layer: a graph of 12 experts has 3,930 more for each than one of 4."""

_CHECK_PROCESS_BYTES = 148_000_000
_CHECK_BYTES_PER_WEIGHT_BYTE = 2.1
_CHECK_BYTES_PER_GRAPH_BYTE = 186  # one check took 655 MB: a graph of 1.76 MB, and by the recipe 86 MB of weights

_MEASURED_TOKENS = 768  # of the texts that show what was lost, by the exact decoder and by the graphs
_FACTOR_PRODUCTS = 1 / 3  # by the cube of the inputs
_BUSY = 0.78  # share of the cores' time that an export uses
_HEAD_ELEMENTS = 0.4  # of a head in 8 bits beside matrices in 4; see `HostSpeed`
_SCORES_OF_A_VALUE = 2.5  # a value's norms, activations, samples and files take as long as so many scores
_CHECK_SECONDS = 0.7
_CHECK_SECONDS_PER_WEIGHT_BYTE = 7e-9
_CHECK_PRODUCTS_PER_S = 88e9  # of a core where checks were measured; see `HostSpeed`
_CHECK_SECONDS_PER_SQUARE_MB = 11.2  # MB of the graph's file: compile time grows with the square of the node count


class ExportCost(msgspec.Struct, frozen=True, kw_only=True):
    """Estimated cost of `edgekv export`.

    Attributes:
        peak_bytes: peak RAM, the largest of the next three.
        quantization_peak_bytes: values of a window, samples of the cache, and the matrices of a layer or rows
            of the head that are being quantized.
        writing_peak_bytes: the integers of a layer or of the head, or some rows of the embedding table.
        check_peak_bytes: the HTP compiler in a child process, and the waiting exporter.
        seconds: `export_seconds` and `check_seconds` together.
        calibration_tokens: tokens of the calibration text, unless it is shorter.
        export_seconds: calibration and quantization.
        check_seconds: the HTP compiler's check, one graph after another.
        graphs: one for each AR, and one that scores all tokens.
        graph_bytes: each graph without weights, before it is compressed.
        bundle_bytes: weights and graphs on disk.
        host: the machine whose times they are.
    """

    peak_bytes: int
    quantization_peak_bytes: int
    writing_peak_bytes: int
    check_peak_bytes: int
    seconds: float
    calibration_tokens: int
    export_seconds: float
    check_seconds: float
    graphs: int
    graph_bytes: int
    bundle_bytes: int
    host: HostSpeed

    def with_encoder(self, encoder: EncoderPlan) -> ExportCost:
        """The cost with a vision encoder, which is quantized before the decoder; its time is not known."""
        quantizing = max(self.quantization_peak_bytes, encoder.quantization_peak_bytes)
        checking = max(self.check_peak_bytes, encoder.compile_peak_bytes)
        return msgspec.structs.replace(
            self,
            quantization_peak_bytes=quantizing,
            check_peak_bytes=checking,
            peak_bytes=max(quantizing, checking, self.writing_peak_bytes),
            bundle_bytes=self.bundle_bytes + encoder.bundle_bytes,
        )


def calibration_window(context: int, *, has_delta_rule: bool) -> int:
    """Tokens of a window of calibration text for graphs of this context."""
    return min(_WINDOW, max(context, _DELTA_WINDOW if has_delta_rule else 0))


def default_calibration_tokens(decoder: Decoder) -> int:
    """Default number of calibration tokens: fewer for large models, which need more time for each."""
    return _CALIBRATION_TOKENS_LARGE if decoder.is_large else _CALIBRATION_TOKENS


def window_bytes(decoder: Decoder, window: int) -> int:
    """RAM of the values of a window, of the exact and the quantized decoder: in attention or in the feed-forward.

    Rows of the quantized decoder's cache are kept beside them until they are sampled, window after window.
    """
    attention = _attention_width(decoder, window) + decoder.kv_heads * decoder.head_dim
    return 2 * _FLOAT_BYTES * window * max(attention, _feed_forward_width(decoder))


def _attention_width(decoder: Decoder, window: int) -> int:
    return decoder.hidden + 2 * decoder.heads * decoder.head_dim + _SCORES_AT_ONCE * window


def _feed_forward_width(decoder: Decoder) -> int:
    return decoder.hidden + _ROWS_AT_ONCE * decoder.intermediate


def quantization_bytes(decoder: Decoder, cache_tensors: int, tokens: int, window: int) -> int:
    """Peak RAM to quantize with this many calibration tokens: the largest of the steps of a layer and of the head.

    The values of all windows are in files. Memory includes those of one window, for the exact and the quantized
    decoder, the integers of the layer's matrices, a byte each, rows of the cache, and samples of it. GPTQ needs the
    second moments of a matrix's inputs, `[in, in]`, and coordinate descent needs them beside their factor.
    """
    hidden, inner, queries = decoder.hidden, decoder.intermediate, decoder.heads * decoder.head_dim
    keys = decoder.kv_heads * decoder.head_dim
    both = 2 * _FLOAT_BYTES * window

    def factoring(inputs: int, outputs: int) -> int:
        """Two or three squares over the inputs, whichever is faster, some tokens, and some columns."""
        squares = 2 if 2 * tokens * outputs < inputs * (tokens + outputs) else 3
        columns = min(outputs, _COLUMNS_AT_ONCE)
        some = _COPIES_OF_TOKENS * min(tokens, _TOKENS_AT_ONCE)
        return _FLOAT_BYTES * inputs * (squares * inputs + some + _COPIES_OF_COLUMNS * columns)

    attention_weights = 2 * _FLOAT_BYTES * hidden * (queries + 2 * keys)
    output_weights = 2 * _FLOAT_BYTES * queries * hidden
    gate_weights, down_weights = 4 * _FLOAT_BYTES * hidden * inner, 2 * _FLOAT_BYTES * inner * hidden
    table_rows = min(decoder.vocab, _TABLE_ROWS_AT_ONCE)
    pieces = (
        attention_weights + factoring(hidden, queries),
        attention_weights + both * (_attention_width(decoder, window) + keys),
        output_weights // 2 + factoring(queries, hidden),
        output_weights + both * (hidden + queries),
        gate_weights * 3 // 4 + factoring(hidden, inner // decoder.experts),
        gate_weights + both * _feed_forward_width(decoder),
        down_weights // 2 + factoring(inner // decoder.experts, hidden),
        down_weights + both * (2 * hidden + inner),
        decoder.table_parameters
        + _FLOAT_BYTES * table_rows * (_COPIES_OF_HEAD_ROWS * hidden + window)
        + factoring(hidden, table_rows),
    )
    sampled = window * decoder.head_dim
    kept = -(-sampled // (sampled // _SAMPLE | 1))
    samples = _FLOAT_BYTES * cache_tensors * min(tokens // window * kept, _MAX_SAMPLED)
    return _base_bytes(decoder) + samples + decoder.layer_parameters + max(pieces)


def writing_bytes(decoder: Decoder) -> int:
    """Peak RAM to write the weights."""
    rows = _FLOAT_BYTES * _COPIES_OF_ROWS * min(decoder.vocab, _TABLE_ROWS_AT_ONCE) * decoder.hidden
    return _base_bytes(decoder) + max(rows, decoder.table_parameters, 2 * decoder.layer_parameters)


def _base_bytes(decoder: Decoder) -> int:
    return _PROCESS_BYTES + _TOKENIZER_BYTES * decoder.vocab


def graph_bytes(decoder: Decoder) -> int:
    """Bytes of the largest graph without weights, before it is compressed: nodes and names, by number of heads."""
    return decoder.layers * layer_graph_bytes(decoder)


def graphs_bytes(decoder: Decoder, graphs: int) -> int:
    """Bytes of the files of so many graphs: one decodes, the others have rows."""
    decode = decoder.layers * layer_graph_bytes(decoder, is_decode=True)
    return round(COMPRESSED * (decode + (graphs - 1) * graph_bytes(decoder)))


def layer_graph_bytes(decoder: Decoder, *, is_decode: bool = False) -> int:
    """One layer's share of a graph before it is compressed: of the largest, or of one that decodes."""
    has_rows = is_decode and decoder.heads > decoder.kv_heads
    per_head, per_kv_head, per_layer = _DECODE_GRAPH_BYTES if has_rows else _PREFILL_GRAPH_BYTES
    experts = _EXPERT_GRAPH_BYTES * decoder.experts if decoder.experts > 1 else 0
    return decoder.heads * per_head + decoder.kv_heads * per_kv_head + per_layer + experts


def export_cost(
    decoder: Decoder, weights: Weights, geometry: Geometry, ar: Sequence[int], host: HostSpeed, *, checks: bool = True
) -> ExportCost:
    """The cost of exporting graphs of these AR, with a calibration text that fills all windows.

    Args:
        decoder: the model.
        weights: its weights.
        geometry: of the cache.
        ar: tokens per inference of each graph.
        host: the machine that exports.
        checks: whether the HTP compiler checks the graphs.
    """
    has_delta_rule = isinstance(geometry, LayeredGeometry) and geometry.delta_rule is not None
    window = calibration_window(geometry.context, has_delta_rule=has_delta_rule)
    tokens = default_calibration_tokens(decoder) // window * window
    size_bytes = graph_bytes(decoder)
    graphs = len(ar) + 1
    quantizing = quantization_bytes(decoder, geometry.tensors, tokens, window)
    writing = writing_bytes(decoder)
    compiler_bytes = _CHECK_BYTES_PER_WEIGHT_BYTE * weights.compiled_bytes + _CHECK_BYTES_PER_GRAPH_BYTE * size_bytes
    check_bytes = _base_bytes(decoder) + _CHECK_PROCESS_BYTES + round(compiler_bytes) if checks else 0
    export_seconds = _export_seconds(decoder, tokens, window, host, is_followed=weights.is_mostly_packed)
    slower = _CHECK_PRODUCTS_PER_S / host.products_per_s
    check_seconds = graphs * slower * _check_seconds(weights, size_bytes) if checks else 0.0
    return ExportCost(
        peak_bytes=max(quantizing, writing, check_bytes),
        quantization_peak_bytes=quantizing,
        writing_peak_bytes=writing,
        check_peak_bytes=check_bytes,
        seconds=export_seconds + check_seconds,
        calibration_tokens=tokens,
        export_seconds=export_seconds,
        check_seconds=check_seconds,
        graphs=graphs,
        graph_bytes=size_bytes,
        bundle_bytes=weights.total_bytes + graphs_bytes(decoder, graphs),
        host=host,
    )


def _export_seconds(decoder: Decoder, tokens: int, window: int, host: HostSpeed, *, is_followed: bool) -> float:
    """Time of the exact decoder, which runs twice, of the quantized one beside it, of rounding, and of the measurement.

    Beside its products, a decoder takes a time for each value that a layer gives. Rounding: for each input width the
    sum of squares over tokens, with those of the quantized decoder two more, their factor and its square; then the
    elements of each matrix, and the products that grow with the square of its inputs; the same for the head.

    Args:
        decoder: the model.
        tokens: of the calibration text.
        window: tokens of a window.
        host: the machine.
        is_followed: whether the quantized decoder runs beside the exact one, as with 4 bits.
    """
    hidden, queries = decoder.hidden, decoder.heads * decoder.head_dim
    inner = decoder.intermediate // decoder.experts
    passes = 3 if is_followed else 2
    parameters = decoder.all_layer_parameters
    widths = (hidden, queries, *(hidden, inner) * decoder.experts)  # of inputs
    products: float = tokens * (passes * parameters + decoder.table_parameters)
    products += 2 * _MEASURED_TOKENS * (parameters + decoder.table_parameters)
    products += tokens * decoder.layers * sum(width**2 for width in widths) * (1.5 if is_followed else 0.5)
    products += _FACTOR_PRODUCTS * (decoder.layers * sum(width**3 for width in widths) + hidden**3)
    products += hidden * (parameters + decoder.table_parameters)  # rotation of the residual
    kinds = decoder.layer_kinds
    pairs = sum(kind.layers * matrix.inputs**2 * matrix.outputs for kind in kinds for matrix in kind.matrices)
    head_products = ROUNDING_PRODUCTS["gptq"] if is_followed else host.rounding_products
    products += host.rounding_products * pairs + head_products * hidden * decoder.table_parameters
    scores: float = passes * (decoder.layers - decoder.convolutions) * decoder.heads * tokens * window
    values = _attention_width(decoder, 0) + _feed_forward_width(decoder)
    scores += _SCORES_OF_A_VALUE * passes * decoder.layers * tokens * values
    elements = parameters + (_HEAD_ELEMENTS if is_followed else 1) * decoder.table_parameters
    core_s = products / host.products_per_s + scores / host.scores_per_s + elements / host.elements_per_s
    return core_s / (_BUSY * host.cores)


def _check_seconds(weights: Weights, size_bytes: int) -> float:
    by_weights = _CHECK_SECONDS_PER_WEIGHT_BYTE * weights.compiled_bytes
    return _CHECK_SECONDS + by_weights + _CHECK_SECONDS_PER_SQUARE_MB * (size_bytes / 1e6) ** 2
