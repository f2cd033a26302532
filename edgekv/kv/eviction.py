"""Evicts tokens by a context policy, and re-rotates the keys that stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from edgekv.errors import ContextFullError
from edgekv.kv.cache_memory import CacheMemory
from edgekv.kv.policies.keydiff import mean_similarity
from edgekv.kv.policies.policy import Policy
from edgekv.kv.policies.rotation import KvEncoding, Rotation
from edgekv.kv.rows import HeldKeys, held_keys


class Eviction:
    """Carries out a policy on the groups of layers that attend to the whole context.

    Attributes:
        policy: selects the tokens to evict.
        evicted: tokens evicted so far.
        rotation: re-rotates keys, and counts their rounding error; None if the policy moves no tokens.
    """

    def __init__(
        self,
        policy: Policy,
        memory: CacheMemory,
        encodings: Sequence[KvEncoding],
    ) -> None:
        """Start without evictions.

        Args:
            policy: the policy.
            memory: of the cache.
            encodings: of each tensor, in the order of the groups' names; empty if unknown.
        """
        self.policy = policy
        self.evicted = 0
        self._memory = memory
        self._encodings = encodings
        self.rotation = Rotation(policy.inverse_frequencies) if policy.inverse_frequencies else None

    def make_room(self, length: int) -> Sequence[int]:
        """Drop the tokens that the policy selects of those held, before a step without room; return their ages."""
        ages = self.policy.leaving(length, self._similarity)
        if ages:
            for group in self._memory.wide:
                group.drop(ages)
            self.evicted += len(ages)
        return ages

    def rotate(self, moved: Sequence[int]) -> None:
        """Rotate the key of each token held by as many positions, oldest first."""
        ages = [age for age, by in enumerate(moved) if by]
        if self.rotation is None or not ages:
            return
        angles = self.rotation.angles([moved[age] for age in ages])
        for key in self._keys():
            rows = [key.rows[age] for age in ages]
            turned = self.rotation.turn(key.arena.read(key.tensor, rows), key.zero_point, key.scale, angles)
            key.arena.write(key.tensor, rows, turned)

    def refusal(self, context: int, length: int, available: Sequence[int], ar: int) -> ContextFullError:
        """The error for an AR-`ar` step without room beside `length` tokens; `available` are the AR of all graphs."""
        smaller = [size for size in available if length <= context - size]
        retry = f"Run a graph of at most {smaller[-1]} tokens per inference, choose" if smaller else "Choose"
        return ContextFullError(
            f"context of {context} tokens",
            got=f"{length} tokens held",
            expected=f"at most {context - ar} before a step of AR-{ar}",
            fix=f"{retry} the policy sliding-window, or export with a larger --context.",
        )

    def _keys(self) -> Iterator[HeldKeys]:
        """The current keys of the layers that attend to the whole context."""
        return held_keys(self._memory.groups, self._memory.wide, self._encodings)

    def _similarity(self) -> Sequence[float]:
        keys = ((key.arena.read(key.tensor, key.rows), key.zero_point) for key in self._keys())
        return [float(score) for score in mean_similarity(keys)]
