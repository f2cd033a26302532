"""Configuration of a prefix store."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from edgekv.errors import EngineError, PrefixError
from edgekv.machine.system import free_memory_bytes
from edgekv.option import Option
from edgekv.prefix.retention import DEFAULT_PRIORITY, check_priority

if TYPE_CHECKING:
    from edgekv.prefix.rows import BlockGroup

DEFAULT_TOKENS_PER_BLOCK = 32
DEFAULT_MAX_BYTES = 256 << 20
DEFAULT_FREE_MEMORY_FRACTION = 0.9
DEFAULT_DISK_CACHE_BYTES = 1 << 30
_FIX = "Correct the store's configuration."


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """Uses the terms of TensorRT-LLM's KV cache configuration.

    Memory is limited by the smallest of the given limits: `max_bytes`, the bytes of `max_tokens`, and
    `free_memory_fraction` of the memory that is free when the store is created; the default is 256 MiB. It never
    exceeds 90 % of the free memory unless the fraction allows it. `host_cache_size` bytes are added. Memory is
    allocated as blocks come into use.

    Raises:
        PrefixError: a field is out of range.
    """

    tokens_per_block: Annotated[int, Option("Tokens per block of prefixes, a power of two above 1.")] = (
        DEFAULT_TOKENS_PER_BLOCK
    )
    max_bytes: int | None = None
    """Memory in bytes; None for no such limit."""
    max_tokens: Annotated[int | None, Option("Maximum number of prefix tokens in memory.")] = None
    free_memory_fraction: Annotated[
        float | None,
        Option("Memory for prefixes as a fraction of the free memory, above 0, at most 1.", shown="256 MiB of it"),
    ] = None
    host_cache_size: Annotated[int, Option("Bytes of memory in addition to these limits.")] = 0
    secondary_offload_min_priority: int = DEFAULT_PRIORITY
    """Blocks of lower priority are dropped instead of written to the folder."""
    disk_folder: Annotated[
        Path | None, Option("Folder where computed prefixes are stored for later runs.", "--prefix-cache")
    ] = None
    disk_cache_size: Annotated[
        int, Option("Maximum bytes of block files in the folder, for all models and processes together.", shown="1 GiB")
    ] = DEFAULT_DISK_CACHE_BYTES
    enable_block_reuse: Annotated[
        bool, Option("Whether prefixes are stored and matched at all.", "--enable-block-reuse/--no-block-reuse")
    ] = True
    enable_partial_reuse: Annotated[
        bool,
        Option(
            "Whether a block matches up to its first differing token, and the incomplete last block of a text is "
            "stored.",
            "--enable-partial-reuse/--no-partial-reuse",
        ),
    ] = True

    def __post_init__(self) -> None:
        def check(field: str, right: bool, expected: str) -> None:
            if not right:
                raise PrefixError(field, got=repr(getattr(self, field)), expected=expected, fix=_FIX)

        tokens = self.tokens_per_block
        check("tokens_per_block", tokens > 1 and tokens & (tokens - 1) == 0, "a power of two above 1")
        check("max_bytes", self.max_bytes is None or self.max_bytes > 0, "at least 1 byte, or None")
        check("max_tokens", self.max_tokens is None or self.max_tokens > 0, "at least 1 token, or None")
        fraction = self.free_memory_fraction
        check("free_memory_fraction", fraction is None or 0 < fraction <= 1, "above 0, at most 1, or None")
        check("host_cache_size", self.host_cache_size >= 0, "0 bytes or more")
        check_priority("secondary_offload_min_priority", self.secondary_offload_min_priority)
        check("disk_cache_size", self.disk_cache_size > 0, "at least 1 byte")

    def memory_bytes(self, groups: Sequence[BlockGroup], context: int, free_bytes: int | None = None) -> int:
        """Bytes of memory for the blocks of these groups, of which S, `context` tokens, are a full sequence.

        Fractions refer to `free_bytes`; None asks the system.

        Raises:
            PrefixError: less than one block of each group fits.
            EngineError: a fraction, on a system that does not report its free memory.
        """
        limits: list[tuple[int, str]] = []
        if self.max_tokens is not None:
            # S tokens need the bytes of one sequence, of which a limited window needs fewer rows.
            sequence_bytes = sum(group.row_bytes * min(group.window or context, context) for group in groups)
            limits.append((-(-self.max_tokens * sequence_bytes // context), "max_tokens"))
        if self.max_bytes is not None:
            limits.append((self.max_bytes, "max_bytes"))
        if not limits and self.free_memory_fraction is None:
            limits.append((DEFAULT_MAX_BYTES, "max_bytes"))
        fraction = DEFAULT_FREE_MEMORY_FRACTION if self.free_memory_fraction is None else self.free_memory_fraction
        try:
            free_bytes = free_memory_bytes() if free_bytes is None else free_bytes
            limits.append((int(free_bytes * fraction), "free_memory_fraction"))
        except EngineError:  # not every system reports its free memory
            if self.free_memory_fraction is not None:
                raise
        size_bytes, field = min(limits)
        min_bytes = self.tokens_per_block * sum(group.row_bytes for group in groups)
        if size_bytes + self.host_cache_size < min_bytes:
            expected = f"at least {min_bytes} bytes, a block of every layer"
            fix = "Raise it, or lower tokens_per_block."
            raise PrefixError(field, got=f"{size_bytes} bytes", expected=expected, fix=fix)
        return size_bytes + self.host_cache_size
