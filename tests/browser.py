"""Headless Chromium, driven by its DevTools protocol over a pipe."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

VARIABLE = "EDGEKV_TEST_CHROMIUM"
"""Names the program. CI sets it, so that a browser that is missing there fails the tests instead of skipping them."""
_NAMES = ("chromium", "chromium-browser", "google-chrome")
PROGRAM = os.environ.get(VARIABLE) or next(filter(None, map(shutil.which, _NAMES)), None)
WAIT_S = 30.0
ANSWER_S = 90.0


class Browser:
    """A browser with one page.

    Attributes:
        messages: errors of scripts, and what the page wrote to the console, so far.
    """

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._buffer = b""
        self._number = 0
        self.messages: list[str] = []
        target = self._send("Target.createTarget", url="about:blank", session=None)["targetId"]
        self._session = None
        self._session = self._send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")
        self._send("Emulation.setFocusEmulationEnabled", enabled=True)
        allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        self._send("Browser.grantPermissions", permissions=allowed, session=None)

    def open(self, url: str) -> None:
        """Load a page and wait for it."""
        self._send("Page.navigate", url=url)
        self.wait("document.readyState === 'complete' && location.href !== 'about:blank'")

    @contextmanager
    def preparing(self, script: str) -> Iterator[None]:
        """Run a script in every page that loads within the block, before the page's own."""
        name = self._send("Page.addScriptToEvaluateOnNewDocument", source=script)["identifier"]
        yield
        self._send("Page.removeScriptToEvaluateOnNewDocument", identifier=name)

    def run(self, script: str) -> Any:
        """The value of an expression."""
        answer = self._send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + WAIT_S
        while not self.run(script):
            if time.monotonic() > end:
                shown = self.run("document.body.innerText")
                raise AssertionError(f"never: {script}; {self.messages}; the page shows: {shown}")
            time.sleep(0.02)

    def type(self, text: str) -> None:
        """Type into what has the focus."""
        self._send("Input.insertText", text=text)

    def press(self, key: str, code: int, *, shift: bool = False) -> None:
        """Press a key."""
        given: dict[str, Any] = {"key": key, "code": key, "windowsVirtualKeyCode": code, "modifiers": 8 * shift}
        text = "\r" if key == "Enter" else key if len(key) == 1 else None
        self._send("Input.dispatchKeyEvent", type="keyDown", **given, **({"text": text} if text else {}))
        self._send("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, selector: str) -> None:
        """Click on the first element that a CSS selector finds, in its middle."""
        place = self.run(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)});"
            " e.scrollIntoView({ block: 'nearest' }); const r = e.getBoundingClientRect();"
            " return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self._send("Input.dispatchMouseEvent", type=kind, x=place[0], y=place[1], button="left", clickCount=1)

    def resize(self, width: int, height: int, *, dark: bool = False) -> None:
        """Give the page the size of a screen."""
        self._send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        scheme = "dark" if dark else "light"
        self._send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def clipboard(self) -> str:
        """The text on the clipboard."""
        found: str = self.run("navigator.clipboard.readText()")
        return found

    def screenshot(self, path: Path) -> None:
        """Write what the page shows."""
        path.write_bytes(base64.b64decode(self._send("Page.captureScreenshot", format="png")["data"]))

    def _send(self, method: str, session: str | None = "own", **params: Any) -> dict[str, Any]:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if session is not None and self.__dict__.get("_session"):
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                found: dict[str, Any] = answer["result"]
                return found
            self._note(answer)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.messages.append(json.dumps(event["params"]["exceptionDetails"]))
        if event.get("method") == "Log.entryAdded":
            self.messages.append(event["params"]["entry"]["text"])

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._from], [], [], ANSWER_S)
            assert ready, f"the browser did not answer within {ANSWER_S:g} s"
            piece = os.read(self._from, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        data, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(data)
        return answer


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser until the block ends.

    Args:
        profile: a folder for its data.
    """
    assert PROGRAM is not None
    read_end, to_browser = os.pipe()
    from_browser, write_end = os.pipe()

    def place() -> None:
        os.dup2(read_end, 3)
        os.dup2(write_end, 4)

    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
    options = (*flags, "--disable-background-networking", "--remote-debugging-pipe", f"--user-data-dir={profile}")
    process = subprocess.Popen(
        [PROGRAM, *options], pass_fds=(3, 4), preexec_fn=place, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(read_end)
    os.close(write_end)
    try:
        yield Browser(to_browser, from_browser)
    finally:
        process.terminate()
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(to_browser)
        os.close(from_browser)
