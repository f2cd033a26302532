"""RAM that QNN's compiler needs for a context binary: fitted to measurements on x86.

| model | graphs in the binary | weights | file of a graph | peak RAM | this estimate |
|---|---|---|---|---|---|
| SmolLM2-135M, whole | 1 | 0.20 GB | 2.0 MB | 1.26 GB | 1.33 GB |
| | 2 | | | 2.20 GB | 2.34 GB |
| | 4 | | | 3.72 GB | 4.38 GB |
| 8 layers of Llama-3.2-1B | 2 | 0.49 GB | 1.7 MB | 4.58 GB | 4.42 GB |
| its head | 1 | 0.26 GB | 0 | 1.26 GB | 1.25 GB |
| Llama-3.2-1B, whole | 1 | 1.76 GB | 3.3 MB | 7.7 GB | 8.12 GB |
| 8 layers of it, w4a16-lpbq64 | 4 | 0.26 GB | 1.7 MB | 5.45 GB | 5.43 GB |
| 5 layers of Llama-3.1-8B, w4a16-lpbq64 | 2 | 0.58 GB | 1.0 MB | 5.81 GB | 5.83 GB |
| 6 layers | | 0.70 GB | 1.3 MB | 6.88 GB | 6.97 GB |
"""

from __future__ import annotations

COMPILE_BYTES = 6_000_000_000
"""RAM target for compiling one part: available on a laptop with 8 GB."""

_PROCESS_BYTES = 148_000_000
_PER_WEIGHT_BYTE = 4.2
_PER_GRAPH_BYTE = 171
_MORE_PER_WEIGHT_BYTE = 3.4  # per further graph: the compiler shares their weights only at the end
_PER_PACKED_BYTE = 1.7  # the compiler unpacks 4-bit integers


def compile_bytes(weights_bytes: int, graph_bytes: int, graphs: int, *, packed_bytes: int = 0) -> int:
    """Estimated RAM to compile graphs with shared weights into one binary.

    Args:
        weights_bytes: weights of one graph.
        graph_bytes: file of one graph, without weights.
        graphs: number of graphs.
        packed_bytes: the part of the weights' bytes that contain two integers.
    """
    weights = (_PER_WEIGHT_BYTE + (graphs - 1) * _MORE_PER_WEIGHT_BYTE) * weights_bytes
    return _PROCESS_BYTES + round(weights + _PER_PACKED_BYTE * packed_bytes + graphs * _PER_GRAPH_BYTE * graph_bytes)
