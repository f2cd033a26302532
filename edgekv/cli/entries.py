"""What a user types in `edgekv chat`: a line, or a block of lines between two triple quotes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from edgekv.cli.cache import HISTORY
from edgekv.cli.exit_codes import held_signals
from edgekv.errors import UsageError
from edgekv.machine.system import MIB, cache_folder

if TYPE_CHECKING:
    from prompt_toolkit.history import History

QUOTES = '"""'
_PROMPT = "> "
_CONTINUED = "... "
_LARGEST_HISTORY_BYTES = MIB


@dataclass(frozen=True, slots=True)
class Entry:
    """What was typed.

    Attributes:
        text: without the quotes of a block.
        is_command: whether it is a line that begins with a slash; a block never is.
    """

    text: str
    is_command: bool = False

    @classmethod
    def read(cls, typed: str) -> Entry:
        """The entry of a line, of pasted lines, or of a block; Esc and Enter send one that is open."""
        text = typed.strip()
        if text.startswith(QUOTES):
            inner = text[len(QUOTES) :]
            return cls(inner.removesuffix(QUOTES).strip("\n"))
        return cls(text, text.startswith("/") and "\n" not in text)


class Entries(Protocol):
    """Where entries come from."""

    def next(self) -> Entry | None:
        """The next entry; None at the end.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed; what was typed is gone.
            UsageError: the input ends within a block.
        """
        ...


def open_entries(commands: Iterable[str], *, keeps_history: bool) -> Entries:
    """The entries of standard input: with line editing on a terminal, otherwise its lines.

    Args:
        commands: which Tab completes.
        keeps_history: whether the history is a file of the user, or ends with the process.
    """
    if not (sys.stdin.isatty() and (sys.stdout.isatty() or sys.stderr.isatty())):
        return LineEntries()
    return TerminalEntries(commands, keeps_history=keeps_history)


def is_open_block(text: str) -> bool:
    """Whether a text begins a block and does not end it."""
    text = text.strip()
    return text.startswith(QUOTES) and not (len(text) >= 2 * len(QUOTES) and text.endswith(QUOTES))


class LineEntries:
    """Entries of a file or a pipe."""

    def __init__(self) -> None:
        if hasattr(sys.stdin, "reconfigure"):  # what is no Unicode is refused as a message, and the next line is read
            sys.stdin.reconfigure(errors="surrogateescape")

    def next(self) -> Entry | None:
        text = sys.stdin.readline()
        if not text:
            return None
        while is_open_block(text):
            line = sys.stdin.readline()
            if not line:
                fix = f"End the block with {QUOTES}."
                raise UsageError(f"block {QUOTES}", got="the end of the input", expected=QUOTES, fix=fix)
            text += line
        return Entry.read(text)


class TerminalEntries:
    """Entries of a terminal, with line editing, a history and bracketed paste."""

    def __init__(self, commands: Iterable[str], *, keeps_history: bool) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.application import get_app
        from prompt_toolkit.completion import WordCompleter
        from prompt_toolkit.filters import Condition
        from prompt_toolkit.history import InMemoryHistory
        from prompt_toolkit.output import create_output

        self._session: PromptSession[str] = PromptSession(
            history=_open_history() if keeps_history else InMemoryHistory(),
            multiline=Condition(lambda: is_open_block(get_app().current_buffer.text)),  # Enter begins a line in a block
            prompt_continuation=_CONTINUED,
            completer=WordCompleter(list(commands), sentence=True),
            complete_while_typing=False,
            enable_suspend=True,
            output=create_output(always_prefer_tty=True),  # answers may be redirected
        )

    def next(self) -> Entry | None:
        app, is_ended = self._session.app, False

        def leave() -> None:
            if is_ended and app.is_running and not app.is_done:
                app.exit(exception=EOFError)

        def end() -> None:
            nonlocal is_ended
            is_ended = True
            if app.loop is not None and not app.loop.is_closed():
                app.loop.call_soon_threadsafe(leave)

        try:
            with held_signals(end):
                return Entry.read(self._session.prompt(_PROMPT, pre_run=leave))
        except EOFError:
            return None


def history_file() -> Path:
    """Where the history of terminals is kept."""
    return cache_folder() / HISTORY


def _open_history() -> History:
    """The history of earlier chats, in a file that only its owner can read; in memory if there can be none."""
    from prompt_toolkit.history import FileHistory, InMemoryHistory

    class QuietHistory(FileHistory):
        """A full disk, or a character that is no Unicode, ends no chat."""

        def store_string(self, string: str) -> None:
            with suppress(OSError):
                super().store_string(string.encode(errors="replace").decode())

    path = history_file()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            path.chmod(0o600)
            if (size := file.seek(0, os.SEEK_END)) > _LARGEST_HISTORY_BYTES:
                file.seek(size - _LARGEST_HISTORY_BYTES // 2)
                _, mark, kept = file.read().partition(b"\n#")  # each entry begins with a comment
                file.seek(0)
                file.write(mark + kept)
                file.truncate()
    except OSError:
        return InMemoryHistory()
    return QuietHistory(path)
