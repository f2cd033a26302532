"""Which sequences run, and in which caches."""

from __future__ import annotations

from collections import deque

from edgekv.engine.pool import SessionPool
from edgekv.engine.request import DEFAULT_CACHE, Request
from edgekv.engine.sequence import Sequence

_MAX_SEQUENCES = 4


class Scheduler:
    """Chooses which waiting sequence begins, and how much of a prompt is read at once.

    Attributes:
        waiting: added and not begun, in the order of their arrival.
        running: begun and not ended.
        max_sequences: sequences that run at once in caches that the pool chooses; as many are kept for the next turns
            of their texts.
    """

    def __init__(self, pool: SessionPool, pieces: tuple[int, int], *, shares_prompts: bool) -> None:
        """Begin without sequences.

        Args:
            pool: the caches.
            pieces: tokens of a prompt that are read at once: if it runs alone, and beside others.
            shares_prompts: whether what one sequence has read of a prompt is stored, so that another restores it.
        """
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.max_sequences = _MAX_SEQUENCES
        self._pool = pool
        self._pieces = pieces
        self._shares_prompts = shares_prompts

    @property
    def piece_tokens(self) -> int:
        """Tokens of a prompt that a step runs: beside other texts, as few as the bundle's graphs have rows."""
        return self._pieces[len(self.running) != 1]

    def next(self) -> Sequence | None:
        """The first waiting sequence that can begin now, with its cache; None if none can.

        One whose cache is taken, or whose prompt another is reading, waits. Once the pool has no cache to choose, all
        that came later wait too.
        """
        for sequence in self.waiting:
            if self._is_free(sequence) and not self._is_read(sequence.request):
                return sequence if self.can_begin(sequence) else None
        return None

    def can_begin(self, sequence: Sequence) -> bool:
        """Whether nobody else has the cache of a waiting sequence; if its request names none, the pool chooses one."""
        if not self._is_free(sequence):
            return False
        if sequence.cache is None:
            request = sequence.request
            owner = request.salt, request.lora
            sequence.cache = self._pool.choose(request.tokens, owner, self.max_sequences)
        return sequence.cache is not None

    def begin(self, sequence: Sequence) -> None:
        """Let a waiting sequence have its caches, which nobody else has.

        Raises:
            UsageError: the id of its cache is not a 64-bit integer.
        """
        assert sequence.cache is not None, "it has its cache"
        self.running.append(sequence)
        self.waiting.remove(sequence)  # at any time it is in one of them, so that it can be ended
        self._pool.take(sequence.cache, sequence)
        if sequence.request.scores:
            self._pool.take(DEFAULT_CACHE, sequence)

    def _is_free(self, sequence: Sequence) -> bool:
        """Whether no sequence runs in the caches that it is bound to: the named one, and the default one of scores."""
        if sequence.cache is not None and self._pool.holder(sequence.cache) is not None:
            return False
        return not sequence.request.scores or self._pool.holder(DEFAULT_CACHE) is None

    def _is_read(self, request: Request) -> bool:
        """Whether another sequence is reading the same prompt, whose rows are restored once it has."""
        if not request.is_pooled or not self._shares_prompts:
            return False
        reading = (sequence for sequence in self.running if sequence.is_reading)
        return any(sequence.request.has_prompt_of(request) for sequence in reading)
