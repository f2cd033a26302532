"""The chat page in a browser, for tests: a new conversation, its settings, what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from tests.browser import Browser
from tests.serving import NAME, Server

ENTER, ESCAPE, TAB = 13, 27, 9
IDLE = "!document.getElementById('send').hidden"
TURNS = "[...document.querySelectorAll('.turn')].map(e => [e.classList[1], e.querySelector('.text').textContent])"
FIGURES = "[...document.querySelectorAll('.assistant .figures')].map(e => e.textContent)"
ERROR = "document.getElementById('error').textContent"
KEPT = "JSON.parse(localStorage.getItem('edgekv chat'))"


@contextmanager
def new_chat(chromium: Browser, server: Server) -> Iterator[Browser]:
    """The page with no conversation; it must end without an error of a script or of the content security policy."""
    chromium.open(f"{server.serving.url}/")
    chromium.run("document.querySelectorAll('dialog :is(input, textarea)').forEach(e => { e.value = ''; })")
    chromium.run("state = { messages: [], settings: {} }, save(), 0")
    chromium.messages.clear()
    chromium.resize(1000, 700)
    chromium.open(f"{server.serving.url}/?again")
    chromium.wait(f"document.title === {NAME!r}")
    yield chromium
    assert chromium.messages == []


def change_settings(chat: Browser, **values: object) -> None:
    chat.click("#settings")
    for name, value in values.items():
        chat.run(f"document.getElementById({name!r}).value = {json.dumps(str(value))}, undefined")
    chat.run("document.querySelector('dialog button').click()")
    chat.wait("!document.getElementById('dialog').open")


def say(chat: Browser, text: str, turns: int | None = None) -> None:
    """Send a message.

    Args:
        turns: the number of turns to wait for, the answer included; None to wait for nothing.
    """
    chat.run("document.getElementById('input').focus()")
    chat.type(text)
    chat.press("Enter", ENTER)
    if turns is not None:
        wait_for_turns(chat, turns)


def wait_for_turns(chat: Browser, turns: int) -> None:
    """Wait until nothing is being written and there are so many turns."""
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === {turns}")


def show(chat: Browser, *contents: str) -> None:
    """Show a conversation, which a user's message begins."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    chat.run(f"state.messages = {json.dumps(messages)}, draw(), undefined")
