"""RAM that QNN's compiler takes for a context binary: fitted to measurements, with w8a16 on x86.

| what | graphs in the binary | weights | a graph's file | peak RAM | estimated here |
|---|---|---|---|---|---|
| SmolLM2-135M, whole | 1 | 0.20 GB | 2.6 MB | 1.26 GB | 1.33 GB |
| | 2 | | | 2.20 GB | 2.34 GB |
| | 4 | | | 3.72 GB | 4.38 GB |
| 8 layers of Llama-3.2-1B | 2 | 0.49 GB | 2.2 MB | 4.58 GB | 4.42 GB |
| its head | 1 | 0.26 GB | 0 | 1.26 GB | 1.25 GB |
| Llama-3.2-1B, whole | 1 | 1.76 GB | 4.4 MB | 7.7 GB | 8.12 GB |
"""

from __future__ import annotations

COMPILE_BYTES = 6_000_000_000
"""What compiling one part should stay below, so that a laptop of 8 GB can do it."""

_PROCESS_BYTES = 148_000_000
_PER_WEIGHT_BYTE = 4.2
_PER_GRAPH_BYTE = 131
_MORE_PER_WEIGHT_BYTE = 3.4  # for each further graph, whose weights the compiler shares only at the end


def compile_bytes(weights_bytes: int, graph_bytes: int, graphs: int) -> int:
    """RAM to compile graphs over the same weights into one binary: an estimate.

    Args:
        weights_bytes: of one graph.
        graph_bytes: file of one graph, without weights.
        graphs: how many.
    """
    factor = _PER_WEIGHT_BYTE + (graphs - 1) * _MORE_PER_WEIGHT_BYTE
    return _PROCESS_BYTES + round(factor * weights_bytes + graphs * _PER_GRAPH_BYTE * graph_bytes)
