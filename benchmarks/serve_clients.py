"""Unmodified clients of OpenAI's API against a server: openai, llm and litellm.

    edgekv serve BUNDLE --name m &
    python -m venv clients && clients/bin/pip install openai llm litellm
    clients/bin/python benchmarks/serve_clients.py http://127.0.0.1:8080 m

The bundle needs a chat template with tools. The environment is one of its own because litellm brings many packages;
this file imports nothing of edgekv. Each line printed is a client, what it did, and the start of what it got.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

MESSAGES: list[Any] = [{"role": "user", "content": "What is the weather in Rome?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather.",
            "parameters": {
                "type": "object",
                "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                "required": ["city"],
                "additionalProperties": False,
            },
        },
    }
]
LIMIT = 120


def use_openai(url: str, model: str) -> Iterator[tuple[str, str]]:
    from openai import AsyncOpenAI, OpenAI
    from pydantic import BaseModel

    class City(BaseModel):
        name: Literal["Rome", "Oslo"]

    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    create = client.chat.completions.create
    whole = create(model=model, messages=MESSAGES, max_tokens=20).choices[0].message.content or ""
    yield "chat", whole
    stream = create(model=model, messages=MESSAGES, max_tokens=20, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "".join(pieces) == whole
    yield "stream", whole
    call = create(model=model, messages=MESSAGES, tools=TOOLS, tool_choice="required", max_tokens=LIMIT)
    made = (call.choices[0].message.tool_calls or [])[0]
    assert made.type == "function" and json.loads(made.function.arguments)["city"] in ("Rome", "Oslo")
    yield "tools", made.function.arguments
    parsed = client.chat.completions.parse(model=model, messages=MESSAGES, response_format=City, max_tokens=LIMIT)
    assert parsed.choices[0].message.parsed is not None
    yield "structured output", repr(parsed.choices[0].message.parsed)
    yield "responses", client.responses.create(model=model, input="Hello", max_output_tokens=20).output_text

    async def ask() -> str:
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            found = await client.chat.completions.create(model=model, messages=MESSAGES, max_tokens=20)
            return found.choices[0].message.content or ""

    assert asyncio.run(ask()) == whole
    yield "async", whole


def use_litellm(url: str, model: str) -> Iterator[tuple[str, str]]:
    os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # it would be fetched from the network
    import litellm

    where: Any = {"model": f"openai/{model}", "api_base": f"{url}/v1", "api_key": "none", "messages": MESSAGES}
    whole = litellm.completion(**where, max_tokens=20).choices[0].message.content
    yield "completion", whole
    stream = litellm.completion(**where, max_tokens=20, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole
    yield "stream", whole
    call = litellm.completion(**where, tools=TOOLS, tool_choice="required", max_tokens=LIMIT)
    arguments = call.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(arguments)["city"] in ("Rome", "Oslo")
    yield "tools", arguments
    assert asyncio.run(litellm.acompletion(**where, max_tokens=20)).choices[0].message.content == whole
    yield "async", whole


def use_llm(url: str, model: str) -> Iterator[tuple[str, str]]:
    with tempfile.TemporaryDirectory() as folder:
        entry = {"model_id": "edge", "model_name": model, "api_base": f"{url}/v1", "supports_tools": True}
        (Path(folder) / "extra-openai-models.yaml").write_text(json.dumps([entry]))
        environment = {**os.environ, "LLM_USER_PATH": folder}
        for name, options in (("stream", []), ("whole answer", ["--no-stream"])):
            command = [sys.executable, "-m", "llm", "-m", "edge", *options, "-o", "max_tokens", "20", "Hello"]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, input="")
            assert done.returncode == 0, done.stderr
            yield name, done.stdout


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("model")
    given = parser.parse_args()
    for package, use in (("openai", use_openai), ("litellm", use_litellm), ("llm", use_llm)):
        for what, got in use(given.url, given.model):
            print(f"{package} {version(package)}: {what}: {got.strip()[:60]!r}")


if __name__ == "__main__":
    main()
