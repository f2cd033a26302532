"""Memory of keys and values by the textbook formula, for any model and element."""

from __future__ import annotations


def estimate(
    *, layers: int, kv_heads: int, head_dim: int, tokens: int, element_bytes: int = 4, sequences: int = 1
) -> int:
    """Bytes of the keys and values of each token of each sequence: 2 x L x H x D x n x element x sequences.

    Formula and default (float32) are those of ZigLlama's `estimateMemoryUsage`; with grouped-query attention H is the
    number of key/value heads. An update strategy allocates more or fewer rows: see `StrategyCost.held_bytes`.

    Raises:
        ValueError: a size below 1.
    """
    sizes = {
        "layers": layers,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "tokens": tokens,
        "element_bytes": element_bytes,
        "sequences": sequences,
    }
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}: got {value}; expected at least 1")
    return 2 * layers * kv_heads * head_dim * tokens * element_bytes * sequences
