"""Conversations: nothing is prefilled twice, and a conversation can be broken off, saved and loaded."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import edgekv
from devices import find
from edgekv.bundle import write_manifest
from edgekv.cli import run
from edgekv.conversation import Answer, Conversation
from edgekv.errors import EngineError, UsageError
from edgekv.spec.chat import ChatTemplates, write_templates
from edgekv.text import SamplingParams
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe
from tests.support.bundles import endless
from tests.support.checkpoints import write_checkpoint

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with a chat template, exported from a checkpoint that carries it."""
    folder = tmp_path_factory.mktemp("talker")
    checkpoint = write_checkpoint(folder / "checkpoint", {"max_position_embeddings": 512})
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    (checkpoint / "generation_config.json").write_text(json.dumps({"eos_token_id": [257, 258], "do_sample": False}))
    options = ExportOptions(
        find("SM8650"),
        find_recipe("w8a16"),
        256,
        (1, 8),
        calibration_tokens=256,
        check_on_htp=False,
        check_quality=False,
    )
    export_bundle(Checkpoint.open(str(checkpoint)), folder / "bundle", options)
    return folder / "bundle"


@pytest.fixture
def model(talker: Path):
    with edgekv.load(talker) as model:
        yield model


def test_messages_are_the_rendered_prompt(model):
    messages = [{"role": "user", "content": "Hi"}]
    prompt = model.encode_chat("<user>Hi</s><assistant>")
    said = [token.id for token in model.generate(messages=messages, max_new_tokens=5)]
    assert said == [token.id for token in model.generate(prompt, max_new_tokens=5)]
    for wrong in ({}, {"prompt": "x", "messages": messages}):
        with pytest.raises(UsageError, match=r"prompt, messages: got (neither|both)"):
            model.generate(**wrong)


def test_no_turn_prefills_what_the_cache_holds(model):
    conversation = Conversation(model, system="Be brief.", params=PARAMS)
    held = 0
    for turn in ("Hello", "And more", "A third"):
        with conversation.say(turn) as answer:
            generated = list(answer)
        stats = answer.stats
        assert stats.cache.reused_tokens >= held - 1 and len(generated) == 6
        assert stats.cache.computed_tokens == stats.prompt_tokens - stats.cache.reused_tokens + 5
        held = stats.prompt_tokens + 5
    assert [each["role"] for each in conversation.messages] == ["system", *["user", "assistant"] * 3]


def test_a_conversation_says_what_a_cold_model_says(talker: Path, model):
    """The tokens of all turns, run at once in an empty cache, are continued alike."""
    conversation = Conversation(model, params=PARAMS)
    for turn in ("One", "Two"):
        answer = conversation.say(turn)
        last = [token.id for token in answer]
    with edgekv.load(talker) as cold:
        assert [token.id for token in cold.generate(answer._generation.prompt, PARAMS)] == last


def test_an_answer_that_is_broken_off_stays_in_the_conversation(model):
    conversation = Conversation(model, params=PARAMS)
    with conversation.say("Hello") as answer:
        next(answer), next(answer)
    assert conversation.messages[-1] == {"role": "assistant", "content": answer.text}
    assert list(conversation.say("Go on")) and len(conversation.messages) == 4


def _contexts_agree(model: edgekv.Model, conversation: Conversation) -> None:
    """The tokens of the next turn are those of what the messages say."""
    answer = conversation.say("Go on")
    rendered = model.chat_templates.render(conversation.messages)
    assert model.tokenizer.decode(answer._generation.prompt) == model.tokenizer.decode(model.encode_chat(rendered))
    answer.close()


@pytest.mark.parametrize("seed", range(6))
def test_a_stop_text_is_no_part_of_the_next_turns_context(model, seed: int):
    free = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=2.0, seed=seed)
    plain = "".join(token.text for token in Conversation(model, params=free).say("Hello"))
    stop = plain[len(plain) // 2 :][:3]
    conversation = Conversation(model, params=replace(free, stop=(stop,)))
    with conversation.say("Hello") as answer:
        text = "".join(token.text for token in answer)
    assert answer.stats.stop_reason == "stop" and stop not in text
    assert conversation.messages[-1]["content"] == text
    _contexts_agree(model, conversation)


@pytest.mark.parametrize("tokens", range(1, 9))
def test_withheld_bytes_are_no_part_of_the_next_turns_context(model, tokens: int):
    """Random tokens end within a character now and then."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True, temperature=2.0, seed=tokens)
    conversation = Conversation(model, params=params)
    with conversation.say("Hello") as answer:
        for _ in range(tokens):
            next(answer)
    _contexts_agree(model, conversation)


def test_a_turn_that_fails_before_its_first_token_is_taken_back(model, monkeypatch: pytest.MonkeyPatch):
    conversation = Conversation(model, params=PARAMS)
    list(conversation.say("Hello"))
    before = list(conversation.messages)

    def fails(*_: object, **__: object) -> None:
        raise EngineError("running", got="nothing", expected="a step", fix="Try again.")

    with monkeypatch.context() as patch, pytest.raises(EngineError):
        patch.setattr("edgekv.runtime.graph.StaticGraph.run", fails)
        next(conversation.say("And"))
    assert conversation.messages == before
    assert list(conversation.say("And")) and len(conversation.messages) == 4


def test_a_saved_conversation_is_continued(model, tmp_path: Path):
    first = Conversation(model, params=PARAMS)
    list(first.say("Hello"))
    first.save(tmp_path / "talk.json")
    second = Conversation(model, params=PARAMS)
    second.load(tmp_path / "talk.json")
    assert second.messages == first.messages
    list(second.say("More"))
    for content in ("{", '{"messages": [{"role": "king", "content": "x"}]}', '{"messages": 3}'):
        (tmp_path / "talk.json").write_text(content)
        before = list(second.messages)
        with pytest.raises(UsageError):
            second.load(tmp_path / "talk.json")
        assert second.messages == before


def test_an_answer_ends_where_the_model_ends_it_or_says_that_it_was_cut(talker: Path, tmp_path: Path, capsys):
    shutil.copytree(talker, bundle := tmp_path / "bundle")
    write_manifest(bundle, endless(talker).manifest)
    assert run(["chat", str(bundle), "--message", "Hello"]) == 0
    printed = capsys.readouterr()
    assert printed.err.startswith("[cpu-fast: ") and printed.err.endswith("; cut: the context is full]\n")
    assert int(printed.err.split()[1]) > 200, "the context holds 256 tokens"
    assert run(["chat", str(bundle), "--message", "Hello", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().err.endswith("; cut: --max-new-tokens allows more]\n")


@pytest.mark.slow
def test_the_command_answers_one_message(talker: Path, capsys):
    assert run(["chat", str(talker), "--message", "Hello", "--max-new-tokens", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["schema"] == 1 and found["message"] == "Hello" and 1 <= len(found["tokens"]) <= 4
    assert run(["chat", str(talker), "--message", "Hello", "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.out.strip() == found["answer"].strip()
    assert f"; 0 of {found['stats']['prompt_tokens']} prompt tokens were in the cache" in printed.err


def test_the_command_keeps_an_answer_to_a_grammar(talker: Path, capsys):
    assert run(["chat", str(talker), "--message", "Hello", "--regex", "[a-c]{3}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["answer"]) == 3 and set(found["answer"]) <= set("abc")
    assert found["stats"]["stop_reason"] == "grammar"


def _type(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))


def test_the_command_holds_a_conversation(talker: Path, tmp_path: Path, capsys, monkeypatch):
    saved = tmp_path / "talk.json"
    _type(monkeypatch, "Hello", "", "More", f"/save {saved}", "/reset", "/load nowhere.json", f"/load {saved}", "/quit")
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    printed = capsys.readouterr()
    assert printed.err.count("tokens were in the cache") == 2 and "nowhere.json" in printed.err
    assert "[2 turns loaded from " in printed.err and "Traceback" not in printed.err
    assert [each["role"] for each in json.loads(saved.read_text())["messages"]] == ["user", "assistant"] * 2


def _talk(bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *typed: str) -> list[str]:
    """The answers, and behind them all that a chat of these lines has told."""
    _type(monkeypatch, *typed)
    options = ["--max-new-tokens", "6", "--regex", "[a-z]{12}", "--reproducible", "--threads", "1"]
    assert run(["chat", str(bundle), *options]) == 0
    printed = capsys.readouterr()
    return [*printed.out.splitlines(), printed.err]


def test_an_answer_is_said_to_come_again_where_it_does(talker: Path, capsys, monkeypatch):
    first, again, told = _talk(talker, capsys, monkeypatch, "Hello", "/regen")
    assert first == again and "[greedy decoding gives the same answer again; /set temperature 0.8 varies it]" in told
    first, again, told = _talk(talker, capsys, monkeypatch, "/set temperature 1", "/set seed 7", "Hello", "/regen")
    assert first == again and "[the same seed gives the same answer again; /set seed none varies it]" in told
    first, again, told = _talk(talker, capsys, monkeypatch, "/set temperature=1", "Hello", "/regen")
    assert first != again and "again" not in told


def test_sampling_is_changed_in_the_conversation(talker: Path, capsys, monkeypatch):
    told = _talk(
        talker, capsys, monkeypatch, "/set", "/set temperature 0.7", "/set top-k 9", "/set temp 1", "/set seed"
    )[-1]
    assert "[sampling: greedy (the checkpoint's); up to 6 tokens; /set changes it]" in told
    assert "[sampling: temperature 0.7, top_k 9; up to 6 tokens; /set changes it]" in told
    assert "/set: got 'temp'; expected temperature, top_k" in told
    assert "/set seed: got nothing; expected a whole number. Write /set seed 1" in told


def test_names_of_other_programs_are_known(talker: Path, capsys, monkeypatch):
    told = _talk(talker, capsys, monkeypatch, "/?", "/clear", "/bye", "never answered")[-1]
    assert "forget all turns but the system prompt; also /clear" in told and "[all turns are forgotten" in told
    assert "error" not in told and "tokens were in the cache" not in told


def test_a_chat_samples_as_the_checkpoint_says_or_as_is_usual(talker: Path, tmp_path: Path, capsys, monkeypatch):
    shutil.copytree(talker, bundle := tmp_path / "bundle")
    write_manifest(bundle, msgspec.structs.replace(endless(talker).manifest, generation=None))
    told = _talk(bundle, capsys, monkeypatch, "/set")[-1]
    usual = "temperature 0.8, top_k 40, top_p 0.95, min_p 0.05, repetition_penalty 1.05"
    assert f"[sampling: {usual} (usual: the checkpoint says nothing); up to 6 tokens" in told
    with edgekv.load(bundle) as model:
        assert model.defaults == SamplingParams() and Conversation(model).params.temperature == 0.8


def test_commands_change_the_conversation(talker: Path, tmp_path: Path, capsys, monkeypatch):
    saved = tmp_path / "talk.json"
    _type(
        monkeypatch,
        *(
            "/stats",
            "Hello",
            "More",
            "/regen",
            "/undo",
            "/system Be brief.",
            "/system",
            '"""',
            "One",
            "",
            "/two",
            '"""',
        ),
        *("/stats", f"/save {saved}", '/system ""', "/system"),
    )
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().err
    messages = json.loads(saved.read_text())["messages"]
    assert [each["role"] for each in messages] == ["system", *["user", "assistant"] * 2]
    assert [each["content"] for each in messages if each["role"] != "assistant"] == [
        "Be brief.",
        "Hello",
        "One\n\n/two",
    ]
    assert "[context: 256 tokens]" in told and "[since the start: 4 answers of 16 tokens together]" in told
    assert (
        "greedy decoding gives the same answer but for near ties; /set temperature 0.8 varies it" in told
        and "[taken back: More]" in told
    )
    assert told.count("[system: Be brief.]") == 2 and told.count("[no system prompt but the model's own]") == 2


@pytest.mark.parametrize(
    ("line", "expected"),
    {
        "/what": "command: got '/what'; expected /undo, /regen",
        "/undo": "conversation: got no turn",
        "/regen": "conversation: got no turn",
        "/undo 2": "after /undo: got '2'; expected nothing",
        "/exit now": "after /exit: got 'now'; expected nothing",
        "/save": "after /save: got nothing; expected FILE",
        "/load": "after /load: got nothing; expected FILE",
        "/save /": "edgekv: error: ",
        "/save nowhere/talk.json": "nowhere/talk.json: got No such file or directory",
        "/load ~nobody-at-all/talk.json": "~nobody-at-all/talk.json",
        "/load {folder}": "expected a saved conversation",
        "x" * 300: "Shorten the message",
        "\udcff": "expected Unicode text",
        '"""\nnever closed': 'block """: got the end of the input',
    }.items(),
)
def test_after_every_error_the_conversation_goes_on(
    talker: Path, tmp_path: Path, capsys, monkeypatch, line: str, expected: str
):
    monkeypatch.chdir(tmp_path)
    lines = [line.format(folder=tmp_path), *(["Hello"] if "never" not in line else [])]
    _type(monkeypatch, *lines)
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert expected in told and "Traceback" not in told and "This is a bug" not in told
    assert told.count("tokens were in the cache") == len(lines) - 1
    assert [*tmp_path.iterdir()] == []


def test_an_error_of_the_engine_or_of_ours_ends_no_conversation(talker: Path, capsys, monkeypatch):
    step, calls = Answer.__next__, iter(range(100))
    errors = {
        1: EngineError("step", got="x", expected="y", fix="z."),
        3: MemoryError(),
        5: KeyError("key"),
        7: OSError(),
    }

    def failing(answer):
        error = errors.get(next(calls))
        if error is not None:
            answer.close()
            raise error
        return step(answer)

    monkeypatch.setattr(Answer, "__next__", failing)
    _type(monkeypatch, *["Hello"] * 4, "Fine")
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert "error: step: got x" in told and "not enough memory" in told and "KeyError: 'key'. This is a bug" in told
    assert told.count("edgekv: error: ") == 4 and told.count("tokens were in the cache") == 1


def test_a_reader_of_answers_that_goes_ends_the_chat(talker: Path, tmp_path: Path):
    program = "import sys; from edgekv.cli import run; sys.exit(run(sys.argv[1:]))"
    command = [sys.executable, "-c", program, "chat", str(talker), "--max-new-tokens", "4"]
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(command, input="Hello\n" * 3, text=True, stdout=write, stderr=subprocess.PIPE, check=False)
    os.close(write)
    assert (
        done.returncode == 1 and done.stderr.count("tokens were in the cache") == 0 and "Traceback" not in done.stderr
    )


def test_what_is_no_unicode_is_refused_and_the_next_line_is_read(talker: Path):
    command = [sys.executable, "-m", "edgekv", "chat", str(talker), "--max-new-tokens", "4"]
    done = subprocess.run(command, input=b"\xff\xfe\nHello\n", capture_output=True, check=False)
    told = done.stderr.decode()
    assert done.returncode == 0 and "expected Unicode text" in told and told.count("tokens were in the cache") == 1


def test_ctrl_c_ends_the_answer_and_not_the_conversation(talker: Path, capsys, monkeypatch):
    step, calls = Answer.__next__, iter(range(100))

    def interrupted(answer):
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step(answer)

    monkeypatch.setattr(Answer, "__next__", interrupted)
    monkeypatch.setattr("sys.stdin", io.StringIO("Hello\nAgain\n"))
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().err.count("tokens were in the cache") == 2


def test_a_full_context_drops_the_oldest_turns_and_says_so(talker: Path, capsys, monkeypatch):
    _type(monkeypatch, *["x" * 60] * 5, "/stats")
    assert run(["chat", str(talker), "--max-new-tokens", "4"]) == 0
    told = capsys.readouterr().err
    assert told.count("tokens were in the cache") == 5 and "edgekv: error" not in told
    assert told.count("left out]") >= 1
    assert re.search(r"\[conversation: 5 turns, the oldest \d of them not in the last prompt; 10 messages\]", told)


def test_a_full_context_stops_the_conversation_if_asked(talker: Path, capsys, monkeypatch):
    _type(monkeypatch, *["x" * 60] * 5, "/undo", "/undo", "Hello")
    assert run(["chat", str(talker), "--max-new-tokens", "4", "--on-full", "stop"]) == 0
    told = capsys.readouterr().err
    assert "expected at most 256" in told and "with /undo or /reset, start with --on-full drop-oldest" in told
    assert told.endswith("cut: --max-new-tokens allows more]\n"), "there is room after two undos"
    assert run(["chat", str(talker), "--on-full", "slide"]) == 2
    assert "--on-full: got 'slide'; expected drop-oldest or stop" in capsys.readouterr().err


@pytest.mark.parametrize("on_full", ["drop-oldest", "stop"])
def test_a_message_that_is_too_long_alone_is_refused(talker: Path, capsys, on_full: str):
    assert run(["chat", str(talker), "--message", "x" * 300, "--on-full", on_full]) == 1
    told = capsys.readouterr().err
    assert "expected at most 256" in told and "Shorten the message" in told and "policy" not in told


def test_a_bundle_without_a_template_is_refused(small: Path, talker: Path, tmp_path: Path, capsys):
    assert run(["chat", str(small), "--message", "Hello"]) == 2
    told = capsys.readouterr().err
    assert "chat template: got none in" in told and "edgekv generate" in told and "Give a prompt" not in told
    copy = shutil.copytree(talker, tmp_path / "copy")
    write_templates(ChatTemplates(templates={"default": "other"}), copy)
    assert run(["chat", str(copy), "--message", "Hello"]) == 1  # the seal of the bundle
    assert "chat_template.json" in capsys.readouterr().err
