"""A server on this machine for tests, a bundle that can chat, and the chat page in the system's headless Chromium."""

from __future__ import annotations

import json
import os
import shutil
import socket
import threading
import time
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from openai import OpenAI
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import open_bundle
from edgekv.engine import CacheMode
from edgekv.prefix import StoreConfig
from edgekv.serve import Limits, ModelServer, ServeOptions
from exporters.checkpoint.lora import AdapterChoice
from exporters.lora.add import add_lora
from exporters.lora.options import LoraOptions
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


NAME = "talker"
ADAPTERS = ("terse", "loud", "calm")
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }} Write <tool_call>\\n{...}\\n</tool_call>{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.city }}{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def talking_bundle(folder: Path, template: str = TEMPLATE, **sizes: int) -> Path:
    """A random model with a chat template and a context of 512, whose answers do not end; shared, so not written to."""
    checkpoint = write_checkpoint(folder / "checkpoint", {"max_position_embeddings": 1024, **sizes})
    weights = load_file(checkpoint / "model.safetensors")
    weights["model.embed_tokens.weight"][[257, 258]] = 0  # the ends of a text: answers are long
    save_file(weights, checkpoint / "model.safetensors")
    (checkpoint / "chat_template.jinja").write_text(template)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258], "do_sample": False}))
    return exported(checkpoint, export_options(context=512, ar=(1, 8)))


def adapted_bundle(folder: Path) -> Path:
    """The same with three adapters, in a folder of its own."""
    checkpoint = talking_bundle(folder / "plain").parent / "checkpoint"
    options = replace(export_options(context=512, ar=(1, 8)), lora=LoraOptions(8, ("q", "v")))
    bundle = shutil.copytree(exported(checkpoint, options), folder / "bundle")
    for seed, name in enumerate(ADAPTERS):
        write_adapter(folder / name, checkpoint, seed=seed, lora_alpha=1)
        add_lora(open_bundle(bundle), AdapterChoice(folder / name), name)
    return bundle


class Server:
    """A server that runs.

    Attributes:
        model: what it serves; only its tokenizer may be used while requests run.
        serving: the server.
    """

    def __init__(self, model: edgekv.Model, serving: ModelServer) -> None:
        self.model = model
        self.serving = serving

    @property
    def port(self) -> int:
        return int(self.serving.url.rsplit(":", 1)[1])

    def client(self, key: str = "none", **options: Any) -> OpenAI:
        """The unmodified client."""
        return OpenAI(base_url=f"{self.serving.url}/v1", api_key=key, max_retries=0, timeout=60, **options)

    def raw(self, data: bytes, wait_s: float = 20) -> bytes:
        """What the server answers to bytes, until it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=wait_s) as connection:
            connection.sendall(data)
            answer = b""
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer

    def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON of the answer to a body, which is sent as it is if it is bytes."""
        answer, content = self._post(path, body, headers)
        return int(answer.split()[1]), msgspec.json.decode(content)

    def events(self, path: str, body: Any) -> list[Any]:
        """The data of all events of a stream."""
        answer, content = self._post(path, body, {})
        assert int(answer.split()[1]) == 200
        data = [line.removeprefix(b"data: ") for line in content.splitlines() if line.startswith(b"data: {")]
        return [msgspec.json.decode(each) for each in data]

    def _post(self, path: str, body: Any, headers: dict[str, str]) -> tuple[bytes, bytes]:
        """Head and content of an answer."""
        data = body if isinstance(body, bytes) else msgspec.json.encode(body)
        given = {"host": "127.0.0.1", "content-type": "application/json", "connection": "close"} | headers
        lines = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in given.items())
        head = f"POST {path} HTTP/1.1\r\n{lines}content-length: {len(data)}\r\n\r\n"
        answer, _, content = self.raw(head.encode() + data).partition(b"\r\n\r\n")
        return answer, content

    def get(self, path: str) -> str:
        """The body of a page."""
        answer = self.raw(f"GET {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n".encode())
        return answer.partition(b"\r\n\r\n")[2].decode()


@contextmanager
def served(
    bundle: Path,
    limits: Limits | None = None,
    *,
    engine: str = "cpu",
    keys: tuple[str, ...] = (),
    cpu_mode: str | None = None,
    budget: Any = None,
    prefix_cache: Path | None = None,
    reproducible: bool = False,
    **options: Any,
) -> Iterator[Server]:
    """Serve a bundle on a free port until the block ends."""
    mode = CacheMode("adaptive", budget=budget)
    store = StoreConfig(disk_folder=prefix_cache)
    threads = 1 if engine == "cpu" else None
    kept: dict[str, Any] = {"cache_mode": mode, "prefix_cache": store, "reproducible": reproducible}
    with edgekv.load(bundle, engine, threads=threads, cpu_mode=cpu_mode, **kept) as model:
        serving = ModelServer(model, ServeOptions(port=0, name=NAME, keys=keys, limits=limits or Limits(), **options))
        thread = threading.Thread(target=serving.run)
        thread.start()
        try:
            yield Server(model, serving)
        finally:
            serving.stop()
            thread.join()


CHROMIUM_VARIABLE = "EDGEKV_TEST_CHROMIUM"
"""Names the program. CI sets it, so that a browser that is missing there fails the tests instead of skipping them."""
_CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = os.environ.get(CHROMIUM_VARIABLE) or next(filter(None, map(shutil.which, _CHROMIUM_NAMES)), None)
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

    assert CHROMIUM is not None
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, chromium_sandbox=False)
        yield chromium
        chromium.close()


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
    chat.run("document.querySelector('dialog button.main').click()")
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


def drop_files(chat: Tab, type: str = "image/png", **contents: bytes) -> None:
    """Drop files by name, of which the browser is told this type."""
    files = json.dumps({name: b64encode(content).decode() for name, content in contents.items()})
    chat.run(
        "(files => { const data = new DataTransfer();"
        " for (const [name, text] of Object.entries(files))"
        " data.items.add(new File([Uint8Array.from(atob(text), each => each.charCodeAt(0))], name,"
        f" {{ type: {json.dumps(type)} }}));"
        " document.dispatchEvent(new DragEvent('drop', { dataTransfer: data, cancelable: true })); })"
        f"({files})"
    )


def wait_for_turns(chat: Tab, turns: int) -> None:
    """Wait until nothing is being written and there are so many turns."""
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === {turns}")


def show(chat: Tab, *contents: str) -> None:
    """Show a conversation, which a user's message begins."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": content} for at, content in enumerate(contents)]
    chat.run(f"state.messages = {json.dumps(messages)}, draw(), undefined")
