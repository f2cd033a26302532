"""The child process behind `GenieDialog` and `GeniePipeline`: libGenie.so through ctypes. It may crash, so nothing else
loads it.
"""

from __future__ import annotations

import atexit
import ctypes
import os
from collections.abc import Callable, Sequence
from ctypes import CFUNCTYPE, POINTER, byref, c_char_p, c_int, c_size_t, c_uint32, c_void_p
from pathlib import Path

import msgspec

_COMPLETE = 0  # in GenieDialog_SentenceCode_t and in GenieTokenCode: the query is complete
_UNBUFFERED = 2  # _IONBF
_ENGINE = b"primary"  # the role of the only engine of a basic dialog
_TEXT_IN, _EMBEDDINGS_OF_TEXT = 100, 101  # GenieNode_IOName_t: of a text-encoder
_IMAGE_IN, _EMBEDDINGS_OF_IMAGE = 200, 201  # of an image-encoder
_EMBEDDINGS_IN, _TEXT_OUT, _TOKENS_OUT = 1, 2, 4  # of a text-generator

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
    "GenieNodeConfig_createFromJson": [c_char_p, POINTER(c_void_p)],
    "GenieNode_create": [c_void_p, POINTER(c_void_p)],
    "GenieNode_setData": [c_void_p, c_int, c_char_p, c_size_t, c_char_p],
    "GenieNode_setTextCallback": [c_void_p, c_int, _OnText],
    "GenieNode_setTokenCallback": [c_void_p, c_int, _OnTokens],
    "GeniePipelineConfig_createFromJson": [c_char_p, POINTER(c_void_p)],
    "GeniePipeline_create": [c_void_p, POINTER(c_void_p)],
    "GeniePipeline_addNode": [c_void_p, c_void_p],
    "GeniePipeline_connect": [c_void_p, c_void_p, c_int, c_void_p, c_int],
    "GeniePipeline_execute": [c_void_p, c_void_p],
}

Piece = str | list[int]
"""Of an answer: text, or tokens."""


class Request(msgspec.Struct, frozen=True):
    """What to do: `create` with a library, a folder for the configuration's paths and a configuration, or a method of
    `LoadedDialog` with what it takes; `create_pipeline` has whether answers are tokens, and a configuration a node.
    """

    method: str
    arguments: list[str | int | list[int]] = []


class GenieStatusError(Exception):
    """A function of Genie returned a status that is not 0."""

    def __init__(self, function: str, status: int) -> None:
        super().__init__(function, status)
        self.function = function
        self.status = status


class _Loaded:
    """libGenie.so. `take` gets the pieces of answers. Every method raises `GenieStatusError`."""

    def __init__(self, library: str) -> None:
        self._library = ctypes.CDLL(library)
        self.take: Callable[[Piece], None] = lambda piece: None
        for name, arguments in _SIGNATURES.items():
            getattr(self._library, name).argtypes = arguments

    def _on_text(self, piece: bytes | None, code: int, user_data: object) -> None:
        if piece:
            self.take(piece.decode("utf-8", "replace"))

    def _on_tokens(self, token_ids: Sequence[int], count: int, code: int, user_data: object) -> None:
        if count:
            self.take([int(token_ids[i]) for i in range(count)])

    def _checked(self, name: str, *arguments: object) -> None:
        if status := getattr(self._library, name)(*arguments):
            raise GenieStatusError(name, status)


class LoadedPipeline(_Loaded):
    """An image encoder and a text encoder that give embeddings to a text generator, in the order of what is set."""

    def __init__(self, library: str, text: str, image: str, generator: str, *, as_tokens: bool) -> None:
        super().__init__(library)
        config, self._pipeline = c_void_p(), c_void_p()
        self._checked("GeniePipelineConfig_createFromJson", b'{"pipeline": {"version": 1}}', byref(config))
        self._checked("GeniePipeline_create", config, byref(self._pipeline))
        self._text, self._image, self._generator = (self._node(config_text) for config_text in (text, image, generator))
        for node, output in ((self._text, _EMBEDDINGS_OF_TEXT), (self._image, _EMBEDDINGS_OF_IMAGE)):
            self._checked("GeniePipeline_connect", self._pipeline, node, output, self._generator, _EMBEDDINGS_IN)
        if as_tokens:
            self._callback = _OnTokens(self._on_tokens)
            self._checked("GenieNode_setTokenCallback", self._generator, _TOKENS_OUT, self._callback)
        else:
            self._callback = _OnText(self._on_text)
            self._checked("GenieNode_setTextCallback", self._generator, _TEXT_OUT, self._callback)

    def text(self, text: str) -> None:
        """Append a text to the prompt."""
        content = text.encode()
        self._checked("GenieNode_setData", self._text, _TEXT_IN, content, len(content), None)

    def image(self, file: str) -> None:
        """Append a picture to the prompt, from a file of float32 pixels."""
        content = Path(file).read_bytes()
        self._checked("GenieNode_setData", self._image, _IMAGE_IN, content, len(content), None)

    def execute(self) -> None:
        """Answer the prompt."""
        self._checked("GeniePipeline_execute", self._pipeline, None)

    def _node(self, config: str) -> c_void_p:
        made, node = c_void_p(), c_void_p()
        self._checked("GenieNodeConfig_createFromJson", config.encode(), byref(made))
        self._checked("GenieNode_create", made, byref(node))
        self._checked("GeniePipeline_addNode", self._pipeline, node)
        return node


class LoadedDialog(_Loaded):
    """One dialog."""

    def __init__(self, library: str, config: str) -> None:
        super().__init__(library)
        self._config, self._dialog = c_void_p(), c_void_p()
        self._checked("GenieDialogConfig_createFromJson", config.encode(), byref(self._config))
        self._checked("GenieDialog_create", self._config, byref(self._dialog))

    def query(self, text: str) -> None:
        """Continue a text."""
        self._call("query", text.encode(), _COMPLETE, _OnText(self._on_text), None)

    def token_query(self, tokens: Sequence[int]) -> None:
        """Continue tokens."""
        array = (c_uint32 * len(tokens))(*tokens)
        self._call("tokenQuery", array, len(tokens), _COMPLETE, _OnTokens(self._on_tokens), None)

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


_loaded: list[_Loaded] = []


def run(request: Request, take: Callable[[Piece], None]) -> None:
    """Do what a request says; `take` gets the pieces of an answer.

    Raises:
        GenieStatusError: Genie refused it.
    """
    if request.method in ("create", "create_pipeline"):
        _loaded[:] = [_load(request)]
        return
    _loaded[0].take = take
    getattr(_loaded[0], request.method)(*request.arguments)


def _load(request: Request) -> _Loaded:
    _unbuffer_stdout()
    if request.method == "create":
        library, folder, config = map(str, request.arguments)
        os.chdir(folder)
        dialog = LoadedDialog(library, config)
        atexit.register(dialog.free)
        return dialog
    library, folder, *nodes = map(str, request.arguments[1:])
    os.chdir(folder)
    pipeline = LoadedPipeline(library, *nodes, as_tokens=request.arguments[0] == 1)
    atexit.register(os._exit, 0)  # libGenie 1.21 aborts in the destructors of a pipeline
    return pipeline


def _unbuffer_stdout() -> None:
    """Disable buffering of C output: it names the cause of a crash, and a crash loses buffered output."""
    if os.name == "nt":
        return  # the library's own C runtime cannot be reached
    libc = ctypes.CDLL(None)
    libc.setvbuf(c_void_p.in_dll(libc, "stdout"), None, _UNBUFFERED, 0)
