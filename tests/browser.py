"""Headless Chromium, the one of the system, driven by Playwright."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

VARIABLE = "EDGEKV_TEST_CHROMIUM"
"""Names the program. CI sets it, so that a browser that is missing there fails the tests instead of skipping them."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, _NAMES)), None)
WAIT_S = 30.0
_ALLOWED = ["clipboard-read", "clipboard-write"]


class Tab:
    """A page in a profile of its own.

    Attributes:
        messages: errors of scripts, and what the browser and the page wrote to the console, so far.
    """

    def __init__(self, page: Page) -> None:
        self.messages: list[str] = []
        self._page = page
        page.set_default_timeout(WAIT_S * 1000)
        page.on("pageerror", lambda error: self.messages.append(str(error)))
        page.on("console", lambda message: self.messages.append(f"{message.text} ({message.location})"))

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self._page.goto(url)

    def prepare(self, script: str) -> None:
        """Run a script in every page that is opened from now on, before the page's own."""
        self._page.add_init_script(script)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        return self._page.evaluate(script)

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(script):
            if time.monotonic() > end:
                shown = self.run("document.body.innerText")
                raise AssertionError(f"never: {script}; {self.messages}; the page shows: {shown}")
            self._page.wait_for_timeout(20)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._page.keyboard.insert_text(text)

    def press(self, key: str) -> None:
        """Press a key, such as `Enter` or `Shift+Enter`."""
        self._page.keyboard.press(key)

    def click(self, selector: str) -> None:
        """Click on the first element that a CSS selector finds, in its middle."""
        self._page.locator(selector).first.click(force=True)  # at once: an answer may end meanwhile

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page the size of a screen."""
        self._page.set_viewport_size({"width": width, "height": height})
        self._page.emulate_media(color_scheme="dark" if dark else "light")

    def clipboard(self) -> str:
        """The text on the clipboard."""
        found: str = self.run("navigator.clipboard.readText()")
        return found

    def screenshot(self, path: Path) -> None:
        """Write what the page shows."""
        self._page.screenshot(path=path)


@contextmanager
def new_tab(chromium: Browser) -> Iterator[Tab]:
    """A page until the block ends; nothing that others have stored is in it."""
    context = chromium.new_context()
    context.grant_permissions(_ALLOWED)
    try:
        yield Tab(context.new_page())
    finally:
        context.close()


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser until the block ends."""
    from playwright.sync_api import sync_playwright

    assert PROGRAM is not None
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=PROGRAM, chromium_sandbox=False)
        yield chromium
        chromium.close()
