"""A server on this machine for tests, and a bundle that can chat."""

from __future__ import annotations

import shutil
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
from openai import OpenAI
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.bundle import open_bundle
from edgekv.engine import CacheMode
from edgekv.prefix import StoreConfig
from edgekv.serve import Limits, ServeOptions, Serving
from exporters.checkpoint.lora import AdapterChoice
from exporters.lora.add import add_lora
from exporters.lora.options import LoraOptions
from tests.adapters import write_adapter
from tests.checkpoints import write_checkpoint
from tests.exports import export_options, exported

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

    def __init__(self, model: edgekv.Model, serving: Serving) -> None:
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
        serving = Serving(model, ServeOptions(port=0, name=NAME, keys=keys, limits=limits or Limits(), **options))
        thread = threading.Thread(target=serving.run)
        thread.start()
        try:
            yield Server(model, serving)
        finally:
            serving.stop()
            thread.join()
