"""Which cache a request continues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count

from edgekv.session.session import common_tokens


@dataclass(slots=True)
class Slot:
    """A sequence of the pool.

    Attributes:
        sequence: its id in the pool.
        salt: whose it is; only requests of the same salt continue it.
        lora: its adapters; only requests with the same continue it.
        is_busy: whether a request runs in it.
        used: when it was taken last; a larger number is later.
    """

    sequence: int
    salt: str | None
    lora: str | None = None
    is_busy: bool = False
    used: int = 0


class Slots:
    """Sequences that requests take and give back. Their ids are never used again.

    A request continues the idle sequence that has most of its prompt, if more of it is kept than lost. Otherwise it
    gets a new one, in place of the idle one used least recently if there are too many.
    """

    def __init__(
        self,
        most: int,
        tokens_of: Callable[[int], Sequence[int]],
        drop: Callable[[int], object],
        has_room: Callable[[], bool],
    ) -> None:
        """Start with none.

        Args:
            most: sequences at once.
            tokens_of: the tokens in the cache of a sequence; none if it has been evicted.
            drop: frees a sequence.
            has_room: whether the memory has room for one more.
        """
        self._most = most
        self._tokens_of = tokens_of
        self._drop = drop
        self._has_room = has_room
        self._slots: list[Slot] = []
        self._clock = count(1)
        self._ids = count(1)

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def busy(self) -> int:
        """How many are in use."""
        return sum(slot.is_busy for slot in self._slots)

    def take(self, prompt: Sequence[int], salt: str | None, lora: str | None = None) -> Slot | None:
        """The sequence for a prompt; None if all are in use, or the memory has no room for another."""
        best = self._best(prompt, salt, lora)
        if best is not None:
            return self._taken(best)
        while len(self._slots) >= self._most or (self._slots and not self._has_room()):
            idle = [slot for slot in self._slots if not slot.is_busy]
            if not idle:
                return None
            self._forget(min(idle, key=lambda slot: slot.used))
        slot = Slot(next(self._ids), salt, lora)
        self._slots.append(slot)
        return self._taken(slot)

    def give_back(self, slot: Slot) -> None:
        """The request has ended; its tokens stay in the cache."""
        slot.is_busy = False
        if not self._tokens_of(slot.sequence):
            self._forget(slot)

    def clear(self) -> None:
        """Free all idle sequences."""
        for slot in [slot for slot in self._slots if not slot.is_busy]:
            self._forget(slot)

    def _best(self, prompt: Sequence[int], salt: str | None, lora: str | None) -> Slot | None:
        best, most = None, 0
        for slot in self._slots:
            if slot.is_busy or (slot.salt, slot.lora) != (salt, lora):
                continue
            held = self._tokens_of(slot.sequence)
            common = common_tokens(held, prompt)
            if common > most and common >= len(held) - common:
                best, most = slot, common
        return best

    def _taken(self, slot: Slot) -> Slot:
        slot.is_busy, slot.used = True, next(self._clock)
        return slot

    def _forget(self, slot: Slot) -> None:
        self._slots.remove(slot)
        self._drop(slot.sequence)
