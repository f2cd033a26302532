"""Memory of a cache by the textbook formula, for any model and element."""

from __future__ import annotations


def estimate(
    *, layers: int, kv_heads: int, head_dim: int, tokens: int, element_bytes: int = 4, sequences: int = 1
) -> int:
    """Bytes of the keys and values of so many tokens in each of so many sequences: 2 x L x H x D x n x element.

    The formula and the default of float32 are those of ZigLlama's `estimateMemoryUsage`; with grouped queries H is
    the number of key/value heads. An update strategy holds more or less rows: `make_report` says how many.

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
