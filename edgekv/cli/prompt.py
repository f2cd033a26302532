"""Prompts of commands: from an option, a file or standard input."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from edgekv.errors import UsageError
from edgekv.machine.system import MIB, read_file
from edgekv.option import Argument, Option

MAX_PROMPT_BYTES = 64 * MIB
_STDIN = "-"


@dataclass(frozen=True, slots=True)
class PromptOptions:
    """Where the prompt is."""

    text: Annotated[str | None, Argument("The prompt; - reads it from standard input.", metavar="[PROMPT]")] = None
    prompt: Annotated[str | None, Option("The prompt; the same as PROMPT.", "-p --prompt")] = None
    prompt_file: Annotated[Path | None, Option("A UTF-8 file with the prompt; - for standard input.")] = None

    def read(self) -> str:
        """The prompt.

        Raises:
            UsageError: none or several are given, or the input is unreadable, too large or not UTF-8.
        """
        sources = {"PROMPT": self.text, "--prompt": self.prompt, "--prompt-file": self.prompt_file}
        names = [name for name, source in sources.items() if source is not None]
        if len(names) != 1:
            got = " and ".join(names) or "none of them"
            raise UsageError("PROMPT, --prompt, --prompt-file", got=got, expected="one of them", fix="Give one.")
        text = self.prompt if self.text is None else self.text
        if text is not None and text != _STDIN:
            return text
        (option,) = names
        return read_text(str(self.prompt_file or _STDIN), option)


def read_text(source: str, option: str) -> str:
    """The text of a file, or of standard input (`-`), that an option names.

    Raises:
        UsageError: it is unreadable, too large or not UTF-8.
    """
    try:
        return _read(source).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        expected, fix = f"UTF-8 text of at most {MAX_PROMPT_BYTES >> 20} MiB", "Check the path and the encoding."
        raise UsageError(option, got=f"{source}: {error}", expected=expected, fix=fix) from None


def _read(source: str) -> bytes:
    if source != _STDIN:
        return read_file(Path(source), MAX_PROMPT_BYTES)
    raw = sys.stdin.buffer.read(MAX_PROMPT_BYTES + 1)
    if len(raw) > MAX_PROMPT_BYTES:
        raise OSError(f"more than {MAX_PROMPT_BYTES >> 20} MiB")
    return raw
