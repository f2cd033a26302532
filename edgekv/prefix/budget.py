"""The number of blocks of each pool that fit a budget of bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from edgekv.errors import EngineError
from edgekv.prefix.config import DEFAULT_FREE_MEMORY_FRACTION, DEFAULT_MAX_BYTES, StoreConfig
from edgekv.prefix.errors import PrefixError
from edgekv.prefix.groups import BlockGroup
from edgekv.system import free_memory_bytes


@dataclass(frozen=True, slots=True)
class PoolBudget:
    """Bytes to divide among the pools of all groups, and the configuration field that set them."""

    field: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Division:
    """What the pools of all groups need, in integers.

    Attributes:
        block_bytes: bytes of one block of each group.
        sequence_bytes: bytes of one full context of each group. Memory is divided in these proportions, as
            TensorRT-LLM does, so that every pool holds the same number of sequences.
        context: S.
    """

    block_bytes: tuple[int, ...]
    sequence_bytes: tuple[int, ...]
    context: int

    @classmethod
    def of(cls, groups: Sequence[BlockGroup], context: int, element_bytes: int, tokens_per_block: int) -> Division:
        rows = [group.tensors * group.head_dim * element_bytes for group in groups]
        windows = [group.window_tokens(context) for group in groups]
        return cls(
            tuple(row * tokens_per_block for row in rows),
            tuple(row * window for row, window in zip(rows, windows, strict=True)),
            context,
        )

    def bytes_of_tokens(self, tokens: int) -> int:
        """Bytes of a number of tokens, rounded up; S tokens need the bytes of one sequence."""
        return -(-tokens * sum(self.sequence_bytes) // self.context)

    def blocks(self, budget: PoolBudget) -> tuple[int, ...]:
        """Blocks of each pool.

        Raises:
            PrefixError: a pool would have none.
        """
        total = sum(self.sequence_bytes)
        blocks = tuple(
            budget.bytes * share // (total * size)
            for share, size in zip(self.sequence_bytes, self.block_bytes, strict=True)
        )
        if min(blocks) < 1:
            least = max(
                -(-total * size // share) for share, size in zip(self.sequence_bytes, self.block_bytes, strict=True)
            )
            wanted = f"at least {least} bytes, so that every pool has one block"
            fix = "Raise it, or lower tokens_per_block."
            raise PrefixError(budget.field, got=f"{budget.bytes} bytes", expected=wanted, fix=fix)
        return blocks


@dataclass(frozen=True, slots=True)
class Limits:
    """Capacities of the tiers.

    Attributes:
        primary: blocks of each group in primary memory.
        host: the same for host memory.
        disk: whether there is a disk tier.
        offload_min_priority: blocks of lower priority are not offloaded.
    """

    primary: Sequence[int]
    host: Sequence[int]
    disk: bool
    offload_min_priority: int


def limits_of(config: StoreConfig, division: Division, free_bytes: int | None) -> Limits:
    """The limits of a configuration; without `free_bytes`, the system's free memory is used.

    Raises:
        PrefixError: a pool would have no block.
    """
    host = (0,) * len(division.block_bytes)
    if config.host_cache_size:
        host = division.blocks(PoolBudget("host_cache_size", config.host_cache_size))
    return Limits(
        primary=division.blocks(primary_budget(config, division, free_bytes)),
        host=host,
        disk=config.disk_folder is not None,
        offload_min_priority=config.secondary_offload_min_priority,
    )


def primary_budget(config: StoreConfig, division: Division, free_bytes: int | None) -> PoolBudget:
    """The smallest of the given limits; 256 MiB by default, and at most 90 % of the free memory."""
    budgets = []
    if config.max_tokens is not None:
        budgets.append(PoolBudget("max_tokens", division.bytes_of_tokens(config.max_tokens)))
    if config.max_bytes is not None:
        budgets.append(PoolBudget("max_bytes", config.max_bytes))
    if not budgets and config.free_memory_fraction is None:
        budgets.append(PoolBudget("max_bytes", DEFAULT_MAX_BYTES))
    fraction = DEFAULT_FREE_MEMORY_FRACTION if config.free_memory_fraction is None else config.free_memory_fraction
    try:
        free_bytes = free_memory_bytes() if free_bytes is None else free_bytes
        budgets.append(PoolBudget("free_memory_fraction", int(free_bytes * fraction)))
    except EngineError:  # not every system reports its free memory
        if config.free_memory_fraction is not None:
            raise
    return min(budgets, key=lambda budget: budget.bytes)
