"""Names of graphs in context binaries: `prompt_ar32_cl512_1_of_1`.

Genie, GenieX and AI Hub read AR, context and the order of the parts of a split model from them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from edgekv.bundle import GraphRecord

Reader = Literal["genie", "aihub"]

KINDS: Mapping[Reader, Mapping[str, str]] = {
    "genie": {"decode": "token", "prefill": "prompt", "verify": "prompt"},
    "aihub": {"decode": "token", "prefill": "prompt", "verify": "verify"},
}
"""What names begin with, by the role of the graph. Genie's prompt graphs have the logits of all rows."""

_NAME = re.compile(r"(?:([a-zA-Z]+)_)?ar(\d+)_cl(\d+)(?:_(\d+)_of_(\d+))?")


@dataclass(frozen=True, slots=True)
class GraphName:
    """The name of one part of a graph.

    Attributes:
        kind: `token`, `prompt` or `verify`.
        ar: tokens per inference.
        context: S.
        part: number of the part, from 1 on.
        parts: how many there are.
    """

    kind: str
    ar: int
    context: int
    part: int = 1
    parts: int = 1

    @classmethod
    def of(cls, reader: Reader, graph: GraphRecord, part: int = 1) -> GraphName:
        """The name that a reader wants."""
        return cls(KINDS[reader][graph.role], graph.ar, graph.context, part, len(graph.parts))

    @classmethod
    def parse(cls, text: str) -> GraphName | None:
        """The parts of a name; None if it is none."""
        if (match := _NAME.fullmatch(text)) is None:
            return None
        ar, context, part, parts = (int(group or 1) for group in match.groups()[1:])
        return cls(match[1] or "", ar, context, part, parts)

    @property
    def stem(self) -> str:
        """The name without its part."""
        return f"{self.kind}_ar{self.ar}_cl{self.context}"

    @property
    def end(self) -> str:
        """What names the part."""
        return f"_{self.part}_of_{self.parts}"

    @property
    def file(self) -> str:
        """The stem of files: only graphs of several parts name them."""
        return self.stem if self.parts == 1 else str(self)

    def padded(self, length: int, *, pads_number: bool = False) -> str:
        """The name in as many characters: with underscores before the part, or zeros before the context's number.

        Names are replaced within binaries, where their length is fixed.
        """
        room = length - len(self.end)
        if not pads_number:
            return self.stem.ljust(room, "_") + self.end
        before, mark, number = self.stem.rpartition("_cl")
        return before + mark + number.zfill(room - len(before + mark)) + self.end

    def __str__(self) -> str:
        return self.stem + self.end
