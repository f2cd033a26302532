"""Configuration of a prefix store."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from edgekv.prefix.errors import PrefixError
from edgekv.prefix.retention import DEFAULT_PRIORITY, check_priority

DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_FREE_MEMORY_FRACTION = 0.9
DEFAULT_DISK_CACHE_BYTES = 1 << 30
_FIX = "Correct the store's configuration."


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Uses the terms of TensorRT-LLM's KV cache configuration.

    The primary memory is limited by the smallest of the given limits: `max_bytes`, the bytes of `max_tokens`,
    and `free_memory_fraction` of the memory that is free when the store is created. The default is 256 MiB. It never
    exceeds 90 % of the free memory unless the fraction allows it. Memory is allocated as blocks come into use.

    Attributes:
        tokens_per_block: a power of two above 1.
        max_bytes: primary memory in bytes; None for no such limit.
        max_tokens: primary memory in tokens; None for no such limit.
        free_memory_fraction: primary memory as a fraction of the free memory, above 0, at most 1.
        host_cache_size: bytes of secondary memory for blocks that are evicted from the primary one.
        secondary_offload_min_priority: blocks of lower priority are dropped instead of offloaded, unless an
            offloaded block needs them.
        disk_folder: for blocks that leave memory, and for `save`; None for no disk.
        disk_cache_size: bytes of all block files below `disk_limit_folder`, of all stores and processes.
        disk_limit_folder: `disk_folder` or its parent; None is `disk_folder`.
        max_attention_window: attention window of each layer in tokens, repeated if shorter; empty for the geometry's
            own.
        enable_block_reuse: False stores nothing and matches nothing.
        enable_partial_reuse: match a block up to its first differing token, and store the incomplete last block of a
            finished sequence.
        copy_on_partial_reuse: True: copy a partially matched block, which stays available. False: reuse it only if no
            request uses it and it has no successor; it is then removed from the store with its match.

    Raises:
        PrefixError: a field is out of range.
    """

    tokens_per_block: int = DEFAULT_TOKENS_PER_BLOCK
    max_bytes: int | None = None
    max_tokens: int | None = None
    free_memory_fraction: float | None = None
    host_cache_size: int = 0
    secondary_offload_min_priority: int = DEFAULT_PRIORITY
    disk_folder: Path | None = None
    disk_cache_size: int = DEFAULT_DISK_CACHE_BYTES
    disk_limit_folder: Path | None = None
    max_attention_window: tuple[int, ...] = ()
    enable_block_reuse: bool = True
    enable_partial_reuse: bool = True
    copy_on_partial_reuse: bool = True

    def __post_init__(self) -> None:
        def check(field: str, right: bool, wanted: str) -> None:
            if not right:
                raise PrefixError(field, got=repr(getattr(self, field)), expected=wanted, fix=_FIX)

        tokens = self.tokens_per_block
        check("tokens_per_block", tokens > 1 and tokens & (tokens - 1) == 0, "a power of two above 1")
        check("max_bytes", self.max_bytes is None or self.max_bytes > 0, "at least 1 byte, or None")
        check("max_tokens", self.max_tokens is None or self.max_tokens > 0, "at least 1 token, or None")
        fraction = self.free_memory_fraction
        check("free_memory_fraction", fraction is None or 0 < fraction <= 1, "above 0, at most 1, or None")
        check("host_cache_size", self.host_cache_size >= 0, "0 bytes or more")
        check_priority("secondary_offload_min_priority", self.secondary_offload_min_priority)
        check("disk_cache_size", self.disk_cache_size > 0, "at least 1 byte")
