"""libGenie.so through ctypes. It may crash: only the worker loads it."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_uint32, c_void_p

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


def unbuffer_stdout() -> None:
    """Disable buffering of C output: it names the cause of a crash, and a crash loses buffered output."""
    if os.name == "nt":
        return  # the library's own C runtime cannot be reached
    libc = ctypes.CDLL(None)
    libc.setvbuf(c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)


class GenieStatusError(Exception):
    """A function of Genie returned a status that is not 0."""

    def __init__(self, call: str, status: int) -> None:
        super().__init__(f"{call}: status {status}")
        self.call = call
        self.status = status


class LoadedDialog:
    """One dialog of libGenie.so. Every method raises `GenieStatusError`."""

    def __init__(self, library: str, config: bytes) -> None:
        self._library = ctypes.CDLL(library)
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments
        self._config, self._dialog = c_void_p(), c_void_p()
        self._call("GenieDialogConfig_createFromJson", config, byref(self._config))
        self._call("GenieDialog_create", self._config, byref(self._dialog))

    def query(self, text: str, take: Callable[[str], None]) -> None:
        """Continue a text; `take` is called with the pieces of the answer."""

        def on_text(piece: bytes | None, code: int, user_data: object) -> None:
            if piece:
                take(piece.decode("utf-8", "replace"))

        self._call("GenieDialog_query", self._dialog, text.encode(), _COMPLETE, _OnText(on_text), None)

    def token_query(self, tokens: Sequence[int], take: Callable[[list[int]], None]) -> None:
        """Continue tokens; `take` is called with the tokens of the answer."""

        def on_tokens(found: Sequence[int], count: int, code: int, user_data: object) -> None:
            if count:
                take([int(found[i]) for i in range(count)])

        array = (c_uint32 * len(tokens))(*tokens)
        self._call("GenieDialog_tokenQuery", self._dialog, array, len(tokens), _COMPLETE, _OnTokens(on_tokens), None)

    def set_max_new_tokens(self, count: int) -> None:
        self._call("GenieDialog_setMaxNumTokens", self._dialog, count)

    def save(self, path: str) -> None:
        self._call("GenieDialog_save", self._dialog, path.encode())

    def restore(self, path: str) -> None:
        self._call("GenieDialog_restore", self._dialog, path.encode())

    def reset(self) -> None:
        self._call("GenieDialog_reset", self._dialog)

    def apply_lora(self, name: str) -> None:
        self._call("GenieDialog_applyLora", self._dialog, _ENGINE, name.encode())

    def free(self) -> None:
        self._call("GenieDialog_free", self._dialog)
        self._call("GenieDialogConfig_free", self._config)

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            raise GenieStatusError(name, status)
