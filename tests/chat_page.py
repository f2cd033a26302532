"""The chat page in a browser, for tests: a new conversation, its settings, what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager

from playwright.sync_api import Browser

from tests.browser import Tab, new_tab
from tests.serving import NAME, Server

IDLE = "!document.getElementById('send').hidden"
TURNS = "[...document.querySelectorAll('.turn')].map(e => [e.classList[1], e.querySelector('.text').textContent])"
FIGURES = "[...document.querySelectorAll('.assistant .figures')].map(e => e.textContent)"
ERROR = "document.getElementById('error').textContent"
KEPT = "JSON.parse(localStorage.getItem('edgekv chat'))"


@contextmanager
def new_chat(chromium: Browser, server: Server) -> Iterator[Tab]:
    """The page with no conversation; it must end without an error of a script or of the content security policy."""
    with new_tab(chromium) as chat:
        chat.resize(1000, 700)
        chat.open(f"{server.serving.url}/")
        chat.wait(f"document.title === {NAME!r}")
        yield chat
        assert chat.messages == []


def change_settings(chat: Tab, **values: object) -> None:
    chat.click("#settings")
    for name, value in values.items():
        chat.run(f"document.getElementById({name!r}).value = {json.dumps(str(value))}, undefined")
    chat.run("document.querySelector('dialog button').click()")
    chat.wait("!document.getElementById('dialog').open")


def say(chat: Tab, text: str, turns: int | None = None) -> None:
    """Send a message.

    Args:
        turns: the number of turns to wait for, the answer included; None to wait for nothing.
    """
    chat.run("document.getElementById('input').focus()")
    chat.type(text)
    chat.press("Enter")
    if turns is not None:
        wait_for_turns(chat, turns)


def wait_for_turns(chat: Tab, turns: int) -> None:
    """Wait until nothing is being written and there are so many turns."""
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === {turns}")


def show(chat: Tab, *contents: str) -> None:
    """Show a conversation, which a user's message begins."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    chat.run(f"state.messages = {json.dumps(messages)}, draw(), undefined")
