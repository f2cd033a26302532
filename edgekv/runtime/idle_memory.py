"""When memory that nothing uses for now leaves the process."""

from __future__ import annotations

from edgekv.machine.system import is_short_of_memory


class IdleMemory:
    """Memory that can be filled again: it leaves when it is idle for the first time, and wherever memory is short.

    What a process needs once is idle forever: the weights of a single prompt leave before those of its decode steps
    come. What it needed again it will likely need once more, and filling all of it takes a tenth of a long prompt.
    """

    __slots__ = ("_has_left",)

    def __init__(self) -> None:
        self._has_left = False

    def leaves(self) -> bool:
        """Whether it leaves now, where it is idle."""
        if self._has_left and not is_short_of_memory():
            return False
        self._has_left = True
        return True
