"""`edgekv chat` at a pseudo terminal: line editing, history, pasted text, blocks, Ctrl-C, and what is left behind."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgekv.cli.entries import Entry, history_file, is_open_block
from tests.support.serving import talking_bundle

pexpect = pytest.importorskip("pexpect", reason="Windows has no pseudo terminals of POSIX")

READY = r"\x1b\[\?2004h"  # bracketed paste is on: the terminal takes a line
ANSWERED = r"tokens were in the cache.*\]"
IMPATIENT = """
import edgekv.cli.waiting as waiting
from edgekv.cli import main
waiting._FIRST_S = waiting._NEXT_S = 0.005
main()
"""
"""The program, which says at once what it waits for."""
Terminal = Callable[..., "pexpect.spawn[str]"]


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_bundle(tmp_path_factory.mktemp("talking"))


def _take_signals() -> None:
    """What ran in this process before, or started it, may have blocked or ignored signals, which a child inherits."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


@pytest.fixture
def terminal(talker: Path, tmp_path: Path) -> Iterator[Terminal]:
    """Starts `edgekv chat` at a terminal, and waits until it takes a line."""
    started = []

    def start(
        *options: str,
        cache: Path = tmp_path / "cache",
        bundle: Path = talker,
        program: tuple[str, ...] = ("-m", "edgekv"),
    ) -> pexpect.spawn[str]:
        given = {"EDGEKV_CACHE_DIR": str(cache), "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
        arguments = [*program, "chat", str(bundle), "--max-new-tokens", "5", "--threads", "1", *options]
        environment = {**os.environ, **given}
        chat = pexpect.spawn(
            sys.executable,
            arguments,
            env=environment,
            encoding="utf-8",
            timeout=60,
            dimensions=(24, 120),
            preexec_fn=_take_signals,
        )
        started.append(chat)
        chat.delaybeforesend = None
        chat.expect(READY)
        return chat

    yield start
    for chat in started:
        if chat.isalive():
            chat.kill(signal.SIGKILL)
            chat.wait()
        chat.close()


def _say(chat: pexpect.spawn[str], typed: str, expected: str = ANSWERED) -> None:
    chat.send(typed)
    chat.expect(expected)
    chat.expect(READY)


def _saved(chat: pexpect.spawn[str], file: Path) -> list[str]:
    """The messages of the user, as the chat saves them."""
    _say(chat, f"/save {file}\r", "saved in")
    return re.findall(r'"role": "user",\s*"content": "(.*)"', file.read_text())


def _leave(chat: pexpect.spawn[str]) -> int:
    chat.send("\x04")
    return _ended(chat)


def _ended(chat: pexpect.spawn[str]) -> int:
    """The exit status; `close` alone ends a program that takes more than a tenth of a second to end by itself."""
    chat.expect(pexpect.EOF)
    status = chat.wait()
    chat.close()
    return int(status)


def test_a_line_is_edited_and_the_history_is_that_of_earlier_chats(terminal: Terminal, tmp_path: Path) -> None:
    chat = terminal()
    _say(chat, "Hexllo\x1b[D\x1b[D\x1b[D\x7f\r")  # left three times, backspace
    _say(chat, "second\x01my \r")  # to the beginning of the line
    assert _saved(chat, tmp_path / "one.json") == ["Hello", "my second"]
    assert _leave(chat) == 0
    chat = terminal()
    _say(chat, "\x1b[A\x1b[A\r")  # two lines up: beyond /save
    _say(chat, "\x12Hel\r\r")  # a search in the history
    assert _saved(chat, tmp_path / "two.json") == ["my second", "Hello"]


def test_only_its_owner_reads_the_history(terminal: Terminal, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    file = cache / "chat-history"
    file.write_text("\n# then\n+a line of an earlier chat\n" * 60_000)
    file.chmod(0o644)
    chat = terminal()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert 100_000 < file.stat().st_size <= 1 << 19, "older lines are forgotten"
    _say(chat, "Hello\r")
    assert file.read_text().startswith("\n# then\n+a line") and file.read_text().endswith("\n+Hello\n")
    assert _leave(chat) == 0


def test_a_chat_needs_no_history(terminal: Terminal, tmp_path: Path) -> None:
    chat = terminal("--no-history")
    _say(chat, "Hello\r")
    assert _leave(chat) == 0 and not (tmp_path / "cache" / "chat-history").exists()
    (tmp_path / "cache" / "chat-history").mkdir()
    chat = terminal()
    _say(chat, "Hello\r")
    _say(chat, "\x1b[A\r")
    assert _saved(chat, tmp_path / "talk.json") == ["Hello"] * 2 and _leave(chat) == 0


def test_pasted_lines_and_blocks_are_one_message(terminal: Terminal, tmp_path: Path) -> None:
    chat = terminal()
    _say(chat, "\x1b[200~/usr/bin\r/two\n\nthree\x1b[201~\r")
    _say(chat, '"""\r/one\r"two"\r"""\r')
    _say(chat, '"""in a line"""\r')
    _say(chat, '"""open\x1b\r')  # Esc and Enter send it
    assert _saved(chat, tmp_path / "talk.json") == [r"/usr/bin\n/two\n\nthree", r"/one\n\"two\"", "in a line", "open"]
    assert _leave(chat) == 0


def test_tab_completes_a_command(terminal: Terminal) -> None:
    chat = terminal()
    chat.send("/hel\t")
    chat.expect("p")
    _say(chat, "\r", "continue the conversation in a file")


def test_ctrl_c_clears_a_line_and_stops_an_answer(terminal: Terminal, tmp_path: Path) -> None:
    slow = talking_bundle(tmp_path / "slow", num_hidden_layers=16)  # an answer takes seconds
    chat = terminal("--max-new-tokens", "500", "--cpu-mode", "emulate", bundle=slow)
    _say(chat, "not sent\x03", "Ctrl-D leaves")
    chat.send("Hello\r")
    chat.expect(
        r"\x1b\[\?2004l(\s|\x1b\[K|\[(load|build|prefill)[^\]]*\])*[^\s\x1b\[]{3}"
    )  # the first text of the answer
    chat.sendintr()
    chat.expect(r"; stopped\]")
    chat.expect(READY)
    assert _saved(chat, tmp_path / "talk.json") == ["Hello"]
    _say(chat, "/undo\r", "taken back: Hello")
    assert _leave(chat) == 0


def test_a_prompt_that_takes_seconds_says_how_far_it_is(terminal: Terminal, tmp_path: Path) -> None:
    slow = talking_bundle(tmp_path / "slow", num_hidden_layers=16)
    chat = terminal("--cpu-mode", "emulate", bundle=slow, program=("-c", IMPATIENT))
    chat.send(f"\x1b[200~{'word ' * 80}\x1b[201~\r")
    chat.expect(r"\[load ar\S+ on cpu, \d+ s\]")
    chat.expect(r"\[prefill: [1-9]\d* of 4\d\d tokens, \d+ s\]")
    chat.expect(ANSWERED)
    chat.expect(READY)
    assert _leave(chat) == 0


@pytest.mark.htp
def test_a_graph_that_is_not_compiled_is_said_to_be_and_ctrl_c_ends_it(talker: Path) -> None:
    arguments = ["-c", IMPATIENT, "generate", str(talker), "Hello", "--engine", "htp"]
    run = pexpect.spawn(sys.executable, arguments, encoding="utf-8", timeout=60, preexec_fn=_take_signals)
    run.expect("is not compiled for SM8650, so each run compiles its graphs. Once: edgekv compile ")
    run.expect(r"\[compile ar1_cl512\.onnx\.gz for SM8650, \d+ s\]")
    run.sendintr()
    assert _ended(run) == 130


def test_a_chat_says_how_it_samples(terminal: Terminal) -> None:
    chat = terminal()
    _say(chat, "/set temperature 0.7\r", r"\[sampling: temperature 0\.7; up to 5 tokens; /set changes it\]")
    assert _leave(chat) == 0


def test_bytes_that_are_no_text_end_nothing(terminal: Terminal) -> None:
    chat = terminal()
    os.write(chat.child_fd, b"a\xffb\r")
    chat.expect("expected Unicode text")
    chat.expect(READY)
    _say(chat, "Hello\r")
    assert _leave(chat) == 0


def test_what_the_model_writes_cannot_control_the_terminal(terminal: Terminal) -> None:
    chat = terminal("--regex", r"\x1b\[2J\x07\u009bz", "--max-new-tokens", "40")
    _say(chat, "Hello\r", "\ufffd\\[2J\ufffd\ufffdz\r\n")
    assert _leave(chat) == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_gives_the_terminal_back_as_it_was(terminal: Terminal, number: signal.Signals) -> None:
    chat = terminal()
    _say(chat, "Hello\r")
    raw = termios.tcgetattr(chat.child_fd)[3]
    chat.kill(number)
    chat.expect(r"\x1b\[\?2004l")
    chat.expect(pexpect.EOF)
    assert not raw & termios.ICANON and termios.tcgetattr(chat.child_fd)[3] & termios.ICANON
    assert chat.wait() == 128 + number
    chat.close()


def test_answers_may_go_to_a_file(terminal: Terminal, talker: Path, tmp_path: Path) -> None:
    file = tmp_path / "answers"
    command = f"{sys.executable} -m edgekv chat {talker} --max-new-tokens 5 --threads 1 > {file}"
    given = {**os.environ, "TERM": "xterm", "PROMPT_TOOLKIT_NO_CPR": "1"}
    chat = pexpect.spawn("/bin/sh", ["-c", command], env=given, encoding="utf-8", timeout=60)
    chat.expect(READY)
    _say(chat, "Hello\r")
    assert _leave(chat) == 0
    assert file.read_text() and "\x1b" not in file.read_text()


@pytest.mark.parametrize(
    ("typed", "text", "is_command"),
    [
        ("  hello \n", "hello", False),
        ("/undo\n", "/undo", True),
        ("/one\n/two", "/one\n/two", False),
        ('"""\n  indented\n"""\n', "  indented", False),
        ('"""/undo"""', "/undo", False),
        ('""""""', "", False),
        ("\n", "", False),
    ],
)
def test_what_is_typed_is_a_message_or_a_command(typed: str, text: str, is_command: bool) -> None:
    assert not is_open_block(typed) and Entry.read(typed) == Entry(text, is_command)


@pytest.mark.parametrize("typed", ['"""', '"""\nx', '""" x', ' """"', '"""x""'])
def test_a_block_is_open_until_its_quotes(typed: str) -> None:
    assert is_open_block(typed)


def test_the_history_is_in_the_cache_folder(cache_dir: Path) -> None:
    assert history_file() == cache_dir / "chat-history"
