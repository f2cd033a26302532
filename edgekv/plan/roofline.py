"""The most tokens a second that memory bandwidth allows."""

from __future__ import annotations

import msgspec

from devices import Device
from edgekv.kv import Geometry
from edgekv.plan.cache import Decoder, Weights


class Roofline(msgspec.Struct, frozen=True, kw_only=True):
    """Bandwidth over bytes read for each token generated.

    Attributes:
        dram_gb_per_s: peak bandwidth of the device's DRAM, 10^9 bytes a second.
        weights_bytes: read for each token: every layer and the head whole, one row of the embedding table.
        mean_cache_bytes: cache rows of a context half full, the mean of a generation that fills it.
        full_cache_bytes: cache rows of a full context, all of which a static graph reads, however few count.
        tokens_per_s: at the mean context: what graphs for several contexts can come near to.
        static_tokens_per_s: with one graph for the whole context.
    """

    dram_gb_per_s: float
    weights_bytes: int
    mean_cache_bytes: int
    full_cache_bytes: int
    tokens_per_s: float
    static_tokens_per_s: float


def roofline(decoder: Decoder, weights: Weights, geometry: Geometry, device: Device) -> Roofline:
    """Bytes of the AR-1 graph against the device's bandwidth; what it computes and writes is taken to be free."""
    read_bytes = weights.layers * weights.layer_bytes + weights.head_bytes + weights.embedding_bytes // decoder.vocab
    full_bytes = geometry.tensors * geometry.past_rows(1) * geometry.row_bytes
    mean_bytes = full_bytes // 2
    bytes_per_s = device.dram_gb_per_s * 1e9
    return Roofline(
        dram_gb_per_s=device.dram_gb_per_s,
        weights_bytes=read_bytes,
        mean_cache_bytes=mean_bytes,
        full_cache_bytes=full_bytes,
        tokens_per_s=bytes_per_s / (read_bytes + mean_bytes),
        static_tokens_per_s=bytes_per_s / (read_bytes + full_bytes),
    )
