"""RAM that QNN's compiler takes for a context binary: fitted to measurements, with w8a16 on x86."""

from __future__ import annotations

COMPILE_BYTES = 6_000_000_000
"""What compiling one part should stay below, so that a laptop of 8 GB can do it."""

_PROCESS_BYTES = 148_000_000
_PER_WEIGHT_BYTE = 4.0
_PER_GRAPH_BYTE = 131
_MORE_PER_WEIGHT_BYTE = 2.4  # for each further graph, whose weights the compiler shares only at the end


def compile_bytes(weights_bytes: int, graph_bytes: int, graphs: int) -> int:
    """RAM to compile graphs over the same weights into one binary: an estimate.

    Args:
        weights_bytes: of one graph.
        graph_bytes: file of one graph, without weights.
        graphs: how many.
    """
    factor = _PER_WEIGHT_BYTE + (graphs - 1) * _MORE_PER_WEIGHT_BYTE
    return _PROCESS_BYTES + round(factor * weights_bytes + graphs * _PER_GRAPH_BYTE * graph_bytes)
