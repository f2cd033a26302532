"""Prompts of commands: from an option, a file or standard input."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edgekv.errors import UsageError
from edgekv.machine.system import MIB, read_file
from edgekv.option import Option

MAX_PROMPT_BYTES = 64 * MIB
_STDIN = "-"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Where the prompt is."""

    prompt: Annotated[str | None, Option("The prompt; - reads it from standard input.")] = None
    prompt_file: Annotated[Path | None, Option("A UTF-8 file with the prompt; - for standard input.")] = None

    def read(self) -> str:
        """The prompt.

        Raises:
            UsageError: neither or both are given, or the input is unreadable, too large or not UTF-8.
        """
        if (self.prompt is None) == (self.prompt_file is None):
            found = "neither" if self.prompt is None else "both"
            raise UsageError("--prompt, --prompt-file", got=found, expected="one of them", fix="Give one.")
        if self.prompt is not None and self.prompt != _STDIN:
            return self.prompt
        option = "--prompt" if self.prompt_file is None else "--prompt-file"
        source = str(self.prompt_file or _STDIN)
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
