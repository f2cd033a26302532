"""Evicts tokens by a context policy, and re-rotates the keys that stay."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from edgekv.errors import ContextFullError
from edgekv.kv.group import Group, HeldKeys
from edgekv.kv.policies.keydiff import mean_similarity
from edgekv.kv.policies.policy import Policy
from edgekv.kv.policies.rotation import Requantization, Rotation
from edgekv.kv.positions import Positions


class Eviction:
    """Carries out a policy on the groups of layers that attend to the whole context.

    Attributes:
        policy: selects the tokens to evict.
        evicted: tokens evicted so far.
    """

    def __init__(
        self,
        policy: Policy,
        groups: Sequence[Group],
        positions: Positions,
        keys: Callable[[], Iterable[HeldKeys]],
    ) -> None:
        """Start without evictions.

        Args:
            policy: the policy.
            groups: layers that attend to the whole context.
            positions: of the tokens held; changed with them.
            keys: returns the current keys of these layers.
        """
        self.policy = policy
        self.evicted = 0
        self._groups = groups
        self._positions = positions
        self._keys = keys
        self._rotation = Rotation(policy.inverse_frequencies) if policy.inverse_frequencies else None

    @property
    def cost(self) -> Requantization | None:
        """Rounding error of all keys rotated so far; None if the policy rotates none."""
        return self._rotation.cost if self._rotation else None

    def make_room(self, context: int, ar: int) -> None:
        """Evict the tokens that the policy selects before an AR-`ar` step in a context of S tokens."""
        ages = self.policy.leaving(context, self._positions.length, ar, self._similarity)
        if not ages:
            return
        for group in self._groups:
            group.drop(ages)
        self._positions.drop(ages)
        self.evicted += len(ages)
        if self._rotation is not None:
            self._renumber(self._rotation)

    def refusal(self, context: int, available: Sequence[int], ar: int) -> ContextFullError:
        """The error for an AR-`ar` step that has no room; `available` are the AR of all graphs."""
        length = self._positions.length
        smaller = [each for each in available if self.policy.admits(context, length, each)]
        retry = f"Run a graph of at most {smaller[-1]} tokens per inference, choose" if smaller else "Choose"
        return ContextFullError(
            f"context of {context} tokens",
            got=f"{length} tokens held",
            expected=f"at most {context - ar} before a step of AR-{ar}",
            fix=f"{retry} the policy sliding-window, or export with a larger --context.",
        )

    def _renumber(self, rotation: Rotation) -> None:
        """Renumber the tokens held from position 0, and rotate their keys by the difference."""
        moved = self._positions.renumber()
        ages = [age for age, by in enumerate(moved) if by]
        if not ages:
            return
        angles = rotation.angles([moved[age] for age in ages])
        for key in self._keys():
            rows = [key.rows[age] for age in ages]
            turned = rotation.turn(key.arena.read(key.tensor, rows), key.zero_point, key.scale, angles)
            key.arena.write(key.tensor, rows, turned)

    def _similarity(self) -> Sequence[float]:
        keys = ((key.arena.read(key.tensor, key.rows), key.zero_point) for key in self._keys())
        return [float(score) for score in mean_similarity(keys)]
