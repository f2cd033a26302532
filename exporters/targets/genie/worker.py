"""The child process behind `GenieDialog`: requests come on standard input, replies go to standard output."""

from __future__ import annotations

import os
import sys
from typing import IO

import msgspec

from exporters.targets.genie.library import GenieStatusError, LoadedDialog, unbuffer_stdout
from exporters.targets.genie.messages import (
    ApplyLora,
    Create,
    Done,
    Query,
    Reply,
    Request,
    Reset,
    Restore,
    Save,
    Text,
    TokenQuery,
    Tokens,
)


def main() -> None:
    """Serve until standard input ends. What the library prints goes to standard error."""
    replies = os.fdopen(os.dup(1), "wb", buffering=0)
    os.dup2(2, 1)
    unbuffer_stdout()
    dialog: LoadedDialog | None = None
    for line in sys.stdin.buffer:
        request = msgspec.json.decode(line, type=Request)
        status, call = 0, type(request).__name__
        try:
            if isinstance(request, Create):
                os.chdir(request.folder)
                dialog = LoadedDialog(request.library, request.config.encode())
            elif dialog is not None:
                _serve(dialog, request, replies)
        except GenieStatusError as failure:
            status, call = failure.status, failure.call
        _send(replies, Done(call=call, status=status))
    if dialog is not None:
        dialog.free()


def _serve(dialog: LoadedDialog, request: Request, replies: IO[bytes]) -> None:
    if isinstance(request, (Query, TokenQuery)) and request.max_new_tokens is not None:
        dialog.set_max_new_tokens(request.max_new_tokens)
    if isinstance(request, Query):
        dialog.query(request.text, lambda piece: _send(replies, Text(piece=piece)))
    elif isinstance(request, TokenQuery):
        dialog.token_query(request.tokens, lambda tokens: _send(replies, Tokens(tokens=tokens)))
    elif isinstance(request, Save):
        dialog.save(request.path)
    elif isinstance(request, Restore):
        dialog.restore(request.path)
    elif isinstance(request, Reset):
        dialog.reset()
    elif isinstance(request, ApplyLora):
        dialog.apply_lora(request.name)


def _send(replies: IO[bytes], reply: Reply) -> None:
    replies.write(msgspec.json.encode(reply) + b"\n")


if __name__ == "__main__":
    main()
