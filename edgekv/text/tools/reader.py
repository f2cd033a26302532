"""Finds the calls in an answer as it is generated, and keeps their notation out of its text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from edgekv.text.stops import StopSequences
from edgekv.text.tools.format import CallFormat
from edgekv.text.tools.gemma import IncompleteError, read_arguments
from edgekv.text.tools.tool import ToolCall

_WHOLE_CHARACTERS = re.compile(
    r"""(?:[^"\\]|\\["\\/bfnrt]|\\u(?![dD][89abAB])[0-9a-fA-F]{4}"""
    # The first half of a surrogate pair, with the second one or with what cannot become one.
    r"""|\\u[dD][89abAB][0-9a-fA-F]{2}(?:\\u[dD][c-fC-F][0-9a-fA-F]{2}|(?=[^\\]|\\[^u]|\\u[^dD]|\\u[dD][^c-fC-F])))*"""
)


class ToolCallReader:
    """Takes the tokens of an answer that a grammar of `tools_grammar` binds.

    Attributes:
        calls: the calls that are complete.
    """

    def __init__(self, call: CallFormat, special: Mapping[str, int]) -> None:
        """Start an answer.

        Args:
            call: how the model writes calls.
            special: ids of the special tokens in it, which have no text in the answer.
        """
        self.calls: list[ToolCall] = []
        self._format = call
        self._special = {number: text for text, number in special.items()}
        self._marker = call.open.strip().removesuffix("call:").removesuffix("[").strip() or call.tag
        self._text = StopSequences([self._marker])
        self._is_call = False  # between open and close
        self._is_first = True
        self._buffer = ""  # of the current call, or of what follows it
        self._object = _OpenObject(call.quote)
        self._reply = JsonReply(call.reply) if call.reply else None

    def push(self, token: int, text: str) -> str:
        """The text of the answer that a token adds, without the notation of calls.

        Args:
            text: that it adds, as a `Detokenizer` gives it.
        """
        text = self._special.get(token, text)
        if not self._is_call and not self._format.open and self._is_first and text:
            self._is_first = False
            self._is_call = text.startswith("{")
        if self._is_call:
            self._buffer += text
            return self._read()
        self._buffer += text
        shown = self._plain(self._text.push(text))
        if not self._text.has_matched:
            return shown
        _, _, rest = self._buffer.partition(self._marker)
        self._is_call = True
        self._begin(rest)
        return shown + self._read()

    def _begin(self, text: str) -> None:
        """Go on with the text behind a marker or a call."""
        self._buffer, self._object = text, _OpenObject(self._format.quote)

    def flush(self) -> str:
        """The text that was withheld, at the end; a call that was cut is left out."""
        return "" if self._is_call else self._plain(self._text.flush())

    def _plain(self, text: str) -> str:
        """Text outside of calls as it is shown."""
        return text if self._reply is None else self._reply.push(text)

    def _read(self) -> str:
        """Take complete calls from the buffer; the text after the last one."""
        while self._is_call:
            read = self._call()
            if read is None:
                return ""
            call, rest = read
            close, separator = self._format.close, self._format.separator
            if separator and rest.startswith(separator):
                self._begin(rest[len(separator) :])
            elif rest.startswith(close):
                self._is_call = False
                self._begin("")
                self._text = StopSequences([self._marker])
                self.calls.append(call)
                return self.push(-1, rest[len(close) :])
            else:
                return ""
            self.calls.append(call)
        return ""

    def _call(self) -> tuple[ToolCall, str] | None:
        """The call at the start of the buffer and the text after it; None if it is not complete."""
        form, text = self._format, self._buffer
        if not self._object.has_ended(text):
            return None
        try:
            if form.body == "gemma":
                name, _, _ = text.partition("{")
                arguments, end = read_arguments(text, len(name), form.quote)
                return ToolCall(name.removeprefix("call:"), _written(arguments)), text[end:]
            name, middle, rest = text.partition(form.middle) if form.middle else ("", "", text)
            start = len(name) + len(middle) + (len(rest) - len(rest.lstrip(" \n[")))
            value, end = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, IncompleteError):
            return None
        if form.body == "named":
            return ToolCall(name, _written(value)), text[end:]
        return ToolCall(value["name"], _written(value[form.key])), text[end:]


def _written(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=False)


class _OpenObject:
    """Finds where the first object of a growing text ends. Each character is looked at once."""

    def __init__(self, quote: str) -> None:
        """Begin in front of a text.

        Args:
            quote: text around strings; empty for JSON's.
        """
        self._quote = quote or '"'
        self._outside = re.compile(rf"[{{}}]|{re.escape(self._quote)}")
        self._inside = re.compile(r'\\.|"' if not quote else re.escape(quote), re.DOTALL)
        self._at = self._depth = 0
        self._in_string = False

    def has_ended(self, text: str) -> bool:
        """Whether it has ended in a text, which begins with the one before."""
        while self._depth or not self._at or not text.startswith("}", self._at - 1):
            match = (self._inside if self._in_string else self._outside).search(text, self._at)
            if match is None:
                # What may be the beginning of a marker, or of an escape, is looked at again.
                rest = len(self._quote) - 1 if len(self._quote) > 1 else text.endswith("\\")
                self._at = max(self._at, len(text) - rest)
                return False
            self._at = match.end()
            if match[0] == self._quote:
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if match[0] == "{" else -1
        return True


class JsonReply:
    """Reads the text of an answer that is `open`, a string of JSON, and a brace, as it is generated."""

    def __init__(self, open: str) -> None:
        """Start an answer.

        Args:
            open: text before the string.
        """
        self._left = len(open) + 1  # characters before the text, with its quotation mark
        self._raw = ""
        self._has_ended = False

    def push(self, text: str) -> str:
        """The text that more of the answer adds; an escape that is not complete is withheld."""
        before = min(self._left, len(text))
        self._left -= before
        self._raw += text[before:]
        if self._has_ended:
            return ""
        characters = _WHOLE_CHARACTERS.match(self._raw)
        assert characters is not None
        end = characters.end()
        self._has_ended = self._raw.startswith('"', end)
        whole, self._raw = self._raw[:end], self._raw[end:]
        decoded: str = json.loads(f'"{whole}"', strict=False)
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
