"""What caches take, before any is allocated."""

from __future__ import annotations


def estimate_bytes(
    *, tokens: int, layers: int, kv_heads: int, head_dim: int, element_bytes: int = 4, sequences: int = 1
) -> int:
    """A key and a value of each token in each head: sequences x tokens x layers x kv_heads x D x 2 x element_bytes.

    With float32 elements and grouped-query attention's own kv_heads this is the formula that ZigLlama's
    documentation of its KV cache gives. A cache of edgekv allocates more: see `edgekv size`.
    """
    return sequences * tokens * layers * kv_heads * head_dim * 2 * element_bytes
