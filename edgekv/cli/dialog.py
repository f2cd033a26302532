"""The conversation of `edgekv chat`: messages, commands, and the figures behind each answer."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from edgekv.cli.entries import QUOTES, Entries, Entry, open_entries
from edgekv.cli.exit_codes import is_closed_pipe, report
from edgekv.cli.output import Output
from edgekv.cli.pictures import encoder_line, opened_pictures, waiting_tiles
from edgekv.cli.summary import engine_and_mode, speculation_summary, summary
from edgekv.cli.waiting import after_prefill, waiting
from edgekv.errors import ContextFullError, UsageError
from edgekv.text.params import SamplingParams

if TYPE_CHECKING:
    from edgekv.conversation import Answer, Conversation
    from edgekv.engine import GenerationStats
    from edgekv.model import Model
    from edgekv.pictures import Picture
    from edgekv.text import StopReason

HINT = "/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves."
_CUT: dict[StopReason | None, str] = {
    "length": "; cut: --max-new-tokens allows more",
    "context": "; cut: the context is full",
    None: "; stopped",
}
_LARGER = "export with a larger --context."
_GREEDY = "greedy decoding", "/set temperature 0.8"
_SETTABLE = {
    "temperature": 0.8,
    "top_k": 40,
    "top_p": 0.95,
    "min_p": 0.05,
    "repetition_penalty": 1.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 1,
    "max_new_tokens": 256,
}
"""What `/set` changes, with an example of each."""
_WHOLE = ("top_k", "seed", "max_new_tokens")
_SHOWN_CHARACTERS = 60
_CONTROLS = {code: "\ufffd" for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"} | {ord("\r"): None}
"""A model must not move the cursor, or change the colours or the title of a terminal."""


class Dialog:
    """Reads messages and commands, and prints answers. It continues after every error."""

    def __init__(
        self,
        conversation: Conversation,
        model: Model,
        output: Output,
        pictures: Sequence[Picture] = (),
        *,
        keeps_history: bool = True,
    ) -> None:
        """Prepare to read standard input.

        Args:
            conversation: a new one.
            model: opens pictures.
            output: says whether answers come without their figures.
            pictures: in front of the first message.
            keeps_history: whether what is typed at a terminal is kept for later chats.
        """
        self._conversation = conversation
        self._model, self._output = model, output
        self._pictures = [*pictures]
        self._keeps_history, self._is_quiet = keeps_history, output.is_quiet
        self._answers = self._tokens = self._dropped_turns = 0
        self._last: GenerationStats | None = None

    def run(self) -> None:
        """Answer until the input ends, or the user leaves."""
        entries = open_entries([*_COMMANDS, *_ALIASES], keeps_history=self._keeps_history)
        if sys.stdin.isatty() and not self._is_quiet:
            _tell(HINT)
            self._set("")
        while (entry := _next(entries)) is not None:
            try:
                self._handle(entry)
            except KeyboardInterrupt:
                _tell("[interrupted]")
            except Exception as error:
                if is_closed_pipe(error):
                    raise
                report(error)

    def ask(self, message: str) -> Answer:
        """The answer to a message, which is generated as it is read.

        Raises:
            EdgeKVError: see `Conversation.say`.
        """
        with self._full_context(), waiting(self._output):
            answer = self._conversation.say(message, self._pictures)
        self._pictures = []
        return answer

    def say(self, message: str) -> None:
        """Answer a message on standard output.

        Raises:
            EdgeKVError: see `Conversation.say`.
        """
        pictures = self._pictures
        tiles = waiting_tiles(pictures)
        answer = self.ask(message)
        try:
            self._print(answer)
        finally:
            if not answer.stats.generated_tokens:  # the turn is taken back
                self._pictures = pictures
        if pictures and not self._is_quiet:
            _tell(encoder_line(pictures, tiles))

    def _handle(self, entry: Entry) -> None:
        if not entry.is_command:
            self.say(entry.text)
            return
        name, argument = [*entry.text.split(maxsplit=1), ""][:2]
        command = _COMMANDS.get(_ALIASES.get(name, name))
        if command is None:
            fix = f"A message that begins with / goes between two {QUOTES}."
            raise UsageError("command", got=repr(name), expected=", ".join(_COMMANDS), fix=fix)
        if not command.accepts(argument):
            got, expected = repr(argument) if argument else "nothing", command.argument or "nothing"
            raise UsageError(f"after {name}", got=got, expected=expected, fix="/help shows how to use it.")
        command.run(self, argument)

    # Commands

    def _undo(self, _: str) -> None:
        from edgekv.conversation import text_of

        taken = self._conversation.undo()
        first = " ".join(text_of(taken[0]).split())
        shown = first if len(first) <= _SHOWN_CHARACTERS else f"{first[:_SHOWN_CHARACTERS]}..."
        _tell(f"[taken back: {shown}]")
        if pictures := self._conversation.pictures_of(taken):
            self._pictures[:0] = pictures
            self._tell_pictures()

    def _image(self, path: str) -> None:
        if path:
            self._pictures += opened_pictures([_path(path)], self._model, self._output, "/image")
        else:
            self._pictures = []
        self._tell_pictures()

    def _tell_pictures(self) -> None:
        _tell(f"[with the next message: {_count(len(self._pictures), 'picture')}]")

    def _regenerate(self, _: str) -> None:
        with self._full_context(), waiting(self._output):
            answer = self._conversation.regenerate()
        params = self._conversation.params
        if params.greedy or params.seed is not None:
            why, fix = ("the same seed", "/set seed none") if params.seed is not None else _GREEDY
            same = "the same answer again" if self._model.is_reproducible else "the same answer but for near ties"
            _tell(f"[{why} gives {same}; {fix} varies it]")
        self._print(answer)

    def _set(self, text: str) -> None:
        name, _, value = text.replace("=", " ").partition(" ")
        params, field = self._conversation.params, name.replace("-", "_")
        if name:
            if field not in _SETTABLE:
                fix = "/set alone shows what holds."
                raise UsageError("/set", got=repr(name), expected=", ".join(_SETTABLE), fix=fix)
            self._conversation.params = params = params.overlaid(**{field: _setting(field, value.strip())})
        why = self._why_sampled() if not name else ""
        sampling = params.overlaid(grammar=None).described()
        _tell(f"[sampling: {sampling}{why}; up to {params.max_new_tokens:,} tokens; /set changes it]")

    def _why_sampled(self) -> str:
        """Where the values are from, if nobody has chosen any."""
        current, defaults = (
            params.overlaid(max_new_tokens=1, grammar=None)
            for params in (self._conversation.params, self._model.chat_defaults)
        )
        if current != defaults:
            return ""
        is_silent = self._model.bundle.manifest.generation is None
        return " (usual: the checkpoint says nothing)" if is_silent else " (the checkpoint's)"

    def _system(self, text: str) -> None:
        if text:
            self._conversation.system = None if text == '""' else text
        shown = self._conversation.system
        _tell("[no system prompt but the model's own]" if shown is None else f"[system: {shown}]")

    def _save(self, path: str) -> None:
        self._conversation.save(_path(path))
        _tell(f"[{_count(self._conversation.turns, 'turn')} saved in {path}]")

    def _load(self, path: str) -> None:
        self._conversation.load(_path(path))
        self._dropped_turns = 0
        _tell(f"[{_count(self._conversation.turns, 'turn')} loaded from {path}]")

    def _stats(self, _: str) -> None:
        turns, context = self._conversation.turns, self._conversation.context_tokens
        dropped = min(self._dropped_turns, turns)  # fewer after an undo
        seen = f", the oldest {dropped} of them not in the last prompt" if dropped else ""
        _tell(f"[conversation: {_count(turns, 'turn')}{seen}; {len(self._conversation.messages)} messages]")
        _tell(f"[since the start: {_count(self._answers, 'answer')} of {self._tokens:,} tokens together]")
        if self._last is None:
            _tell(f"[context: {context:,} tokens]")
            return
        filled = self._last.prompt_tokens + self._last.generated_tokens
        _tell(f"[context: {filled:,} of {context:,} tokens at the end of the last answer]")
        _tell(summary(self._last))

    def _reset(self, _: str) -> None:
        self._conversation.reset()
        self._pictures = []
        self._dropped_turns = 0
        _tell("[all turns are forgotten; the system prompt stays]")

    def _help(self, _: str) -> None:
        rows = [(f"{name} {command.argument}".strip(), command.about) for name, command in _COMMANDS.items()]
        rows += [
            (f"{QUOTES} ... {QUOTES}", "a message of several lines; pasted lines need no quotes"),
            ("Ctrl-C", "stop an answer; what was said stays in the conversation"),
        ]
        width = max(len(left) for left, _ in rows)
        for left, right in rows:
            _tell(f"{left:{width}}  {right}")

    # Answers

    def _print(self, answer: Answer) -> None:
        """Stream an answer. Ctrl-C ends the answer, not the conversation."""
        if answer.dropped_turns not in (0, self._dropped_turns):
            oldest = "turn is" if answer.dropped_turns == 1 else f"{answer.dropped_turns} turns are"
            _tell(f"[the context is full: the oldest {oldest} left out]")
        self._dropped_turns = answer.dropped_turns
        is_terminal, thinks = sys.stdout.isatty(), False
        try:
            with answer:
                for token in after_prefill(answer, self._output):
                    if token.thoughts and not self._is_quiet:
                        click.secho(token.thoughts.translate(_CONTROLS), nl=False, err=True, dim=True)
                        thinks = True
                    if token.text and thinks:
                        click.echo("\n", err=True)
                        thinks = False
                    click.echo(token.text.translate(_CONTROLS) if is_terminal else token.text, nl=False)
        except KeyboardInterrupt:
            pass
        finally:
            click.echo()
        self._last = answer.stats
        self._answers += 1
        self._tokens += answer.stats.generated_tokens
        if not self._is_quiet or answer.stats.stop_reason in _CUT:
            _tell(_figures(answer.stats))

    @contextmanager
    def _full_context(self) -> Iterator[None]:
        """Say what a user of this command can do about a full context: it has no option for the policy."""
        fix = "Shorten the message, take its pictures away with /image" if self._pictures else "Shorten the message"
        if self._conversation.turns and self._conversation.on_full == "stop":
            fix = "Forget turns with /undo or /reset, start with --on-full drop-oldest"
        try:
            yield
        except ContextFullError as error:
            got, expected = error.got, error.expected
            raise ContextFullError(error.field, got=got, expected=expected, fix=f"{fix}, or {_LARGER}") from None


@dataclass(frozen=True, slots=True)
class _Command:
    """A line that begins with a slash.

    Attributes:
        argument: what follows its name; in brackets if it may be left out.
        about: what it does.
        run: does it.
    """

    argument: str
    about: str
    run: Callable[[Dialog, str], None]

    def accepts(self, argument: str) -> bool:
        """Whether this may follow its name."""
        is_optional = self.argument.startswith("[")
        return is_optional or bool(argument) == bool(self.argument)


_EXITS = ("/exit", "/quit", "/bye")
_ALIASES = {"/clear": "/reset", "/?": "/help", "/quit": "/exit", "/bye": "/exit"}
_COMMANDS = {
    "/undo": _Command("", "take the last message and its answer back", Dialog._undo),
    "/regen": _Command("", "answer the last message again", Dialog._regenerate),
    "/image": _Command("[file]", "show a picture with the next message; without a file, none", Dialog._image),
    "/system": _Command("[text]", 'show or change the system prompt; "" for the model\'s own', Dialog._system),
    "/save": _Command("FILE", "write the conversation to a file", Dialog._save),
    "/load": _Command("FILE", "continue the conversation in a file", Dialog._load),
    "/set": _Command("[name value]", "show or change the sampling, such as /set temperature 0.7", Dialog._set),
    "/stats": _Command("", "show how full the context is, and figures of the last answer", Dialog._stats),
    "/reset": _Command("", "forget all turns but the system prompt; also /clear", Dialog._reset),
    "/help": _Command("", "show this; also /?", Dialog._help),
    "/exit": _Command("", "leave, as do /quit, /bye and Ctrl-D on an empty line", lambda *_: None),
}


def _next(entries: Entries) -> Entry | None:
    """The next entry that is not empty; None at the end."""
    while True:
        try:
            entry = entries.next()
        except KeyboardInterrupt:
            _tell(HINT)
        except UsageError as error:
            report(error)
        else:
            if entry is None or (entry.is_command and entry.text in _EXITS):
                return None
            if entry.text:
                return entry


def _tell(line: str) -> None:
    click.echo(line.translate(_CONTROLS), err=True)


def _setting(field: str, text: str) -> float | int | None:
    """The value of a sampling parameter; `none` for that of greedy decoding without penalties.

    Raises:
        UsageError: it is no number.
    """
    if text in ("none", "off"):
        plain: float | int | None = getattr(SamplingParams(), field)
        return plain
    try:
        return int(text) if field in _WHOLE else float(text)
    except ValueError:
        number = "a whole number" if field in _WHOLE else "a number"
        fix = f"Write /set {field} {_SETTABLE[field]}, or /set {field} none."
        raise UsageError(f"/set {field}", got=repr(text) if text else "nothing", expected=number, fix=fix) from None


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError as error:  # ~ of an unknown user
        raise UsageError(repr(text), got=error, expected="a path", fix="Give the whole path.") from None


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _figures(stats: GenerationStats) -> str:
    first = "" if stats.times.first_token_ms is None else f", first token {stats.times.first_token_ms:.0f} ms"
    speed = "" if stats.times.tokens_per_second is None else f", {stats.times.tokens_per_second:.1f} tokens/s"
    cached = f"{stats.cache.reused_tokens} of {stats.prompt_tokens} prompt tokens were in the cache"
    tokens = f"{engine_and_mode(stats.setup.engine)}: {stats.generated_tokens} tokens"
    return f"[{tokens}{first}{speed}; {cached}{speculation_summary(stats)}{_CUT.get(stats.stop_reason, '')}]"
