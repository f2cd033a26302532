"""Adapters over the command line and the server: a request's answer is that of its own run alone."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import InternalServerError, NotFoundError

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.conversation import Conversation
from edgekv.serve import ServeOptions
from edgekv.serve.command import summary
from tests.support.foreign_files import write_adapter
from tests.support.serving import ADAPTERS, NAME, Server, adapted_bundle, served


@pytest.fixture(scope="module")
def adapted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return adapted_bundle(tmp_path_factory.mktemp("talking"))


@pytest.fixture(scope="module")
def server(adapted: Path) -> Iterator[Server]:
    with served(adapted) as server:
        yield server


def test_requests_that_take_turns_answer_as_alone(server: Server, adapted: Path) -> None:
    prompts = ["Hello there", "Hello, you", "What is it"]
    requests = [(lora, prompts[at % 3]) for at, lora in enumerate([*ADAPTERS, None] * 3)]
    alone = {}
    for lora, prompt in dict.fromkeys(requests):
        with edgekv.load(adapted, threads=1) as model:
            alone[lora, prompt] = "".join(each.text for each in model.generate(prompt, 8, temperature=0, lora=lora))
    client = server.client()
    for lora, prompt in requests:
        name = NAME if lora is None else f"{NAME}:{lora}"
        answer = client.completions.create(model=name, prompt=prompt, max_tokens=8, temperature=0)
        assert answer.choices[0].text == alone[lora, prompt]
        assert answer.model == name
    assert len(set(alone.values())) > len(prompts)


def test_chats_and_responses_name_adapters(server: Server) -> None:
    client, messages = server.client(), [{"role": "user", "content": "Hello"}]
    texts = set()
    for name in (NAME, f"{NAME}:terse", f"{NAME}:terse=0.5,loud"):
        chat = client.chat.completions.create(model=name, messages=messages, max_tokens=8, temperature=0)  # type: ignore[arg-type]
        response = client.responses.create(model=name, input="Hello", max_output_tokens=16, temperature=0)
        assert chat.model == response.model == name
        assert response.output_text.startswith(chat.choices[0].message.content or "?")
        texts.add(response.output_text)
    assert len(texts) == 3


def test_adapters_are_listed_as_models(server: Server) -> None:
    found = [each["id"] for each in json.loads(server.get("/v1/models"))["data"]]
    assert found == [NAME, f"{NAME}:calm", f"{NAME}:loud", f"{NAME}:terse"]
    assert json.loads(server.get(f"/v1/models/{NAME}:calm"))["id"] == f"{NAME}:calm"


def test_the_summary_lists_adapters(server: Server) -> None:
    told = list(summary(server.serving, ServeOptions(keys=("k",)), "64MiB", Path("kept")))
    assert f"adapters   {NAME}:calm, {NAME}:loud, {NAME}:terse" in told and "API keys   1" in told
    assert "sessions   16, caches within 64MiB; 64 more requests may wait" in told
    assert "prefixes   in memory and in kept" in told


@pytest.mark.parametrize("name", ["other:terse", f"{NAME}:nobody", f"{NAME}:", f"{NAME}:terse=x"])
def test_an_unknown_adapter_is_an_unknown_model(server: Server, name: str) -> None:
    with pytest.raises(NotFoundError) as told:
        server.client().completions.create(model=name, prompt="Hello")
    assert str(server.model.bundle.path) not in str(told.value)


@pytest.mark.parametrize("file", ["adapter.json", "adapter.safetensors"])
def test_an_adapter_that_is_damaged_while_serving_is_named(adapted: Path, tmp_path: Path, file: str) -> None:
    bundle = shutil.copytree(adapted, tmp_path / "bundle")
    with served(bundle) as server:
        (bundle / "adapters" / "calm" / file).write_bytes(b"damaged")
        with pytest.raises(InternalServerError, match=f"adapters/calm/{file}: got .* Add it again") as told:
            server.client().completions.create(model=f"{NAME}:calm", prompt="Hello")
        assert (told.value.status_code, told.value.code) == (503, "adapter_damaged")
        assert str(bundle) not in str(told.value)
        assert f"{NAME}:calm" in server.get("/v1/models")
        assert server.client().completions.create(model=f"{NAME}:loud", prompt="Hello").choices[0].text


def test_commands_choose_adapters(adapted: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for options in ([], ["--lora", "loud"], ["--lora", "loud", "--lora", "calm=-1"]):
        assert run(["generate", str(adapted), "--prompt", "Hello", "--max-new-tokens", "8", "--json", *options]) == 0
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert len(set(texts)) == 3
    with edgekv.load(adapted, threads=1) as model:
        conversation = Conversation(model, lora="loud")
        plain = Conversation(model)
        answers = ["".join(each.text for each in each.say("Hello")) for each in (conversation, plain, conversation)]
    assert answers[0] != answers[1]
    message = ["chat", str(adapted), "--message", "Hello", "--lora", "loud", "--cpu-mode", "emulate", "--json"]
    assert run(message) == 0
    assert json.loads(capsys.readouterr().out)["answer"] == answers[0]


def test_the_commands_of_adapters(adapted: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bundle = shutil.copytree(adapted, tmp_path / "bundle")
    source = open_bundle(bundle).manifest.source.checkpoint
    write_adapter(tmp_path / "new", Path(source))
    add = ["lora", "add", str(bundle), str(tmp_path / "new"), "--name", "new", "--scale", "0.5"]
    assert run(add) == 0
    assert "new: rank 4, q,v, scale 0.5" in capsys.readouterr().out
    assert run(add) != 0
    assert "new" in capsys.readouterr().err
    assert run(["lora", "rm", str(bundle), "new"]) == 0
    assert capsys.readouterr().out == "new: removed\n"
    assert run(["lora", "ls", str(bundle), "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)["adapters"]
    assert [each["name"] for each in listed] == ["calm", "loud", "terse"]
    session = ["--session", str(tmp_path / "s"), "--lora", "calm"]
    assert run(["generate", str(bundle), "--prompt", "Hello", *session]) != 0
    assert "--session" in capsys.readouterr().err
