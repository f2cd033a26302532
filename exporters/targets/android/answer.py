"""The answer in what genie-t2t-run prints: `[BEGIN]: ` text `[END]`."""

from __future__ import annotations

import codecs

_BEGIN, _END = "[BEGIN]:", "[END]"


class AnswerReader:
    """Finds the answer in a stream of bytes, as they come.

    Attributes:
        ended: whether the end of the answer was seen.
    """

    def __init__(self) -> None:
        self.ended = False
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._begun = False
        self._waiting = ""

    def read(self, chunk: bytes) -> str:
        """The next text of the answer. What could be the begin of the mark at its end is held back."""
        self._waiting += self._decoder.decode(chunk)
        if not self._begun:
            _, _, rest = self._waiting.partition(_BEGIN)
            if not rest:
                return ""
            self._begun, self._waiting = True, rest.removeprefix(" ")
        if self.ended:
            return ""
        text, mark, _ = self._waiting.partition(_END)
        if mark:
            self.ended = True
            return text
        held = next((n for n in range(len(_END) - 1, 0, -1) if text.endswith(_END[:n])), 0)
        self._waiting = text[len(text) - held :]
        return text[: len(text) - held]
