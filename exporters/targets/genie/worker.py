"""The child process behind `GenieDialog`: libGenie.so through ctypes. It may crash, so nothing else loads it.

Requests are lines on standard input, replies are lines on standard output.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_uint32, c_void_p

import msgspec

_COMPLETE = 0  # in GenieDialog_SentenceCode_t and in GenieTokenCode: the query is complete
_UNBUFFERED = 2  # _IONBF
_ENGINE = b"primary"  # the role of the only engine of a basic dialog

_OnText = CFUNCTYPE(None, c_char_p, c_int, c_void_p)
_OnTokens = CFUNCTYPE(None, POINTER(c_uint32), c_uint32, c_int, c_void_p)

_SIGNATURES: dict[str, list[object]] = {
    "GenieDialogConfig_createFromJson": [c_char_p, POINTER(c_void_p)],
    "GenieDialog_create": [c_void_p, POINTER(c_void_p)],
    "GenieDialog_query": [c_void_p, c_char_p, c_int, _OnText, c_void_p],
    "GenieDialog_tokenQuery": [c_void_p, POINTER(c_uint32), c_uint32, c_int, _OnTokens, c_void_p],
    "GenieDialog_setMaxNumTokens": [c_void_p, c_uint32],
    "GenieDialog_save": [c_void_p, c_char_p],
    "GenieDialog_restore": [c_void_p, c_char_p],
    "GenieDialog_reset": [c_void_p],
    "GenieDialog_applyLora": [c_void_p, c_char_p, c_char_p],
    "GenieDialog_free": [c_void_p],
    "GenieDialogConfig_free": [c_void_p],
}

Piece = str | list[int]
"""Of an answer: text, or tokens."""


class Request(msgspec.Struct, frozen=True):
    """What to do: `create` with a library, a folder for the configuration's paths and a configuration, or a method of
    `LoadedDialog` with what it takes.
    """

    method: str
    arguments: list[str | int | list[int]] = []


class Reply(msgspec.Struct, frozen=True):
    """A piece of an answer, or the end of a request: Genie's status, and the function that returned it."""

    piece: Piece | None = None
    function: str = ""
    status: int = 0


class GenieStatusError(Exception):
    """A function of Genie returned a status that is not 0."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(f"{function}: status {status}")
        self.function = function
        self.status = status


class LoadedDialog:
    """One dialog of libGenie.so. `take` gets the pieces of answers. Every method raises `GenieStatusError`."""

    def __init__(self, library: str, config: str, take: Callable[[Piece], None]) -> None:
        self._library, self._take = ctypes.CDLL(library), take
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._config, self._dialog = c_void_p(), c_void_p()
        self._checked("GenieDialogConfig_createFromJson", config.encode(), byref(self._config))
        self._checked("GenieDialog_create", self._config, byref(self._dialog))

    def query(self, text: str) -> None:
        """Continue a text."""

        def on_text(piece: bytes | None, code: int, user_data: object) -> None:
            if piece:
                self._take(piece.decode("utf-8", "replace"))

        self._call("query", text.encode(), _COMPLETE, _OnText(on_text), None)

    def token_query(self, tokens: Sequence[int]) -> None:
        """Continue tokens."""

        def on_tokens(found: Sequence[int], count: int, code: int, user_data: object) -> None:
            if count:
                self._take([int(found[i]) for i in range(count)])

        array = (c_uint32 * len(tokens))(*tokens)
        self._call("tokenQuery", array, len(tokens), _COMPLETE, _OnTokens(on_tokens), None)

    def set_max_new_tokens(self, count: int) -> None:
        self._call("setMaxNumTokens", count)

    def save(self, path: str) -> None:
        self._call("save", path.encode())

    def restore(self, path: str) -> None:
        self._call("restore", path.encode())

    def reset(self) -> None:
        self._call("reset")

    def apply_lora(self, name: str) -> None:
        self._call("applyLora", _ENGINE, name.encode())

    def free(self) -> None:
        self._call("free")
        self._checked("GenieDialogConfig_free", self._config)

    def _call(self, name: str, *arguments: object) -> None:
        self._checked(f"GenieDialog_{name}", self._dialog, *arguments)

    def _checked(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise GenieStatusError(name, status)


def main() -> None:
    """Serve until standard input ends. What the library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    _unbuffer_stdout()

    def send(reply: Reply) -> None:
        replies.write(msgspec.json.encode(reply) + b"\n")

    dialog: LoadedDialog | None = None
    for line in sys.stdin.buffer:
        request, end = msgspec.json.decode(line, type=Request), Reply()
        try:
            if request.method == "create":
                library, folder, config = map(str, request.arguments)
                os.chdir(folder)
                dialog = LoadedDialog(library, config, lambda piece: send(Reply(piece)))
            else:
                getattr(dialog, request.method)(*request.arguments)
        except GenieStatusError as failure:
            end = Reply(function=failure.function, status=failure.status)
        send(end)
    if dialog is not None:
        dialog.free()


def _unbuffer_stdout() -> None:
    """Disable buffering of C output: it names the cause of a crash, and a crash loses buffered output."""
    if os.name == "nt":
        return  # the library's own C runtime cannot be reached
    libc = ctypes.CDLL(None)
    libc.setvbuf(c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)


if __name__ == "__main__":
    main()
