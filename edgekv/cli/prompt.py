"""Prompts of commands: from an option, a file or standard input."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from edgekv.errors import UsageError
from edgekv.system import MIB, read_file

MAX_PROMPT_BYTES = 64 * MIB
_STDIN = "-"

PromptOption = Annotated[
    str | None, typer.Option(help="The prompt; - reads it from standard input.", show_default=False)
]
PromptFileOption = Annotated[
    Path | None, typer.Option(help="A UTF-8 file with the prompt; - for standard input.", show_default=False)
]


def read_prompt(text: str | None, file: Path | None) -> str:
    """The prompt that the options name.

    Raises:
        UsageError: neither or both are given, or the input is unreadable, too large or not UTF-8.
    """
    if (text is None) == (file is None):
        found = "neither" if text is None else "both"
        raise UsageError("--prompt, --prompt-file", got=found, expected="one of them", fix="Give one.")
    if text is not None and text != _STDIN:
        return text
    option = "--prompt" if file is None else "--prompt-file"
    source = _STDIN if file is None else str(file)
    try:
        return _read(source).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        wanted, fix = f"UTF-8 text of at most {MAX_PROMPT_BYTES >> 20} MiB", "Check the path and the encoding."
        raise UsageError(option, got=f"{source}: {error}", expected=wanted, fix=fix) from None


def _read(source: str) -> bytes:
    if source != _STDIN:
        return read_file(Path(source), MAX_PROMPT_BYTES)
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise OSError(f"more than {MAX_PROMPT_BYTES >> 20} MiB")
    return raw
