"""The thoughts of an answer, apart from its text: in the reader, in calls, in conversations and in chats."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from playwright.sync_api import Browser

import edgekv
from edgekv.cli.dialog import Dialog
from edgekv.cli.output import Output
from edgekv.conversation import Conversation
from edgekv.spec.chat import ChatTemplates
from edgekv.text import Grammar, SamplingParams, Tools
from edgekv.text.sampler import Sampler
from edgekv.text.thoughts import ThoughtFormat, ThoughtReader, thought_format
from edgekv.text.tools.format import GEMMA4
from edgekv.text.tools.grammar import tools_grammar
from tests.support.serving import FIGURES, KEPT, NAME, TURNS, change_settings, new_chat, say, served, talking_bundle

THINK, CHANNEL = ThoughtFormat("<think>", "</think>"), ThoughtFormat("<|channel>thought", "<channel|>")
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}</s>"
    "{% endfor %}<assistant>{% if thinks %}<think>{% endif %}"
)
"""Leaves out the thoughts of earlier turns."""


def read(reader: ThoughtReader, pieces: Sequence[tuple[int, str]]) -> tuple[str, str]:
    found = [*(reader.push(token, piece) for token, piece in pieces), reader.flush()]
    return "".join(thoughts for thoughts, _ in found), "".join(text for _, text in found)


def cut(text: str, places: Sequence[int]) -> list[tuple[int, str]]:
    bounds = [0, *sorted({place % (len(text) + 1) for place in places}), len(text)]
    return [(1, text[start:stop]) for start, stop in pairwise(bounds)]


_WORDS = st.text("ab <|/>\n", max_size=12)


@given(_WORDS, _WORDS, st.lists(st.integers(0, 60)), st.sampled_from([THINK, CHANNEL]), st.booleans())
def test_marks_divide_an_answer_however_it_comes(
    thoughts: str, text: str, places: list[int], form: ThoughtFormat, is_open: bool
) -> None:
    answer = f"{'' if is_open else form.open}\n{thoughts}{form.close}\n\n{text}"
    assert read(ThoughtReader(form, {}, is_open=is_open), cut(answer, places)) == (thoughts.strip(), text.lstrip())


@given(st.text("ab <|/>\nthink", max_size=20), st.lists(st.integers(0, 40)))
def test_an_answer_without_marks_is_text_to_the_character(text: str, places: list[int]) -> None:
    reader = ThoughtReader(THINK, {}, is_open=False)
    assert text.lstrip().startswith("<think>") or read(reader, cut(text, places)) == ("", text)
    assert text.lstrip().startswith("<think>") or not reader.hides


@pytest.mark.parametrize(
    ("pieces", "thoughts", "text"),
    [
        ([(7, ""), (1, "thought"), (1, "\nHm. "), (8, ""), (1, "Yes")], "Hm.", "Yes"),
        ([(7, ""), (1, "thought\n"), (8, ""), (1, "Yes")], "", "Yes"),
        ([(7, ""), (1, "thought\n"), (1, "Hm")], "Hm", ""),
        ([(1, "\n"), (9, ""), (1, "<|channel>thought")], "", "\n<|channel>thought"),
    ],
)
def test_marks_may_be_special_tokens_that_have_no_text(pieces: Any, thoughts: str, text: str) -> None:
    special = {7: "<|channel>", 8: "<channel|>", 9: "<|tool_call>"}
    assert read(ThoughtReader(CHANNEL, special, is_open=False), pieces) == (thoughts, text)


def test_a_template_says_which_marks_its_model_writes() -> None:
    found = [
        thought_format(ChatTemplates(templates={"default": source}))
        for source in ("{% set text = text.split('</think>')[-1] %}", "strip <|channel> to <channel|>", "plain")
    ]
    assert found == [THINK, CHANNEL, None]
    assert THINK.is_open("<|im_start|>assistant\n<think>\n") and not THINK.is_open("<think>\n\n</think>\n\n")


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return talking_bundle(tmp_path_factory.mktemp("thinking"), TEMPLATE)


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[edgekv.Model]:
    with edgekv.load(bundle) as model:
        yield model


@pytest.fixture
def says(model: edgekv.Model, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """Makes the model say a text; returns its number of tokens."""

    def say(text: str) -> int:
        tokens = model.tokenizer.encode(text, add_special_tokens=False).ids
        monkeypatch.setattr(Sampler, "__call__", lambda _, logits, prompt, generated: tokens[len(generated)])
        return len(tokens)

    return say


ASKED = [{"role": "user", "content": "Why?"}]
SAID = "<think>\nIt is so. \n</think>\n\nBecause."


def test_tokens_of_a_conversation_have_thoughts_or_text(model: edgekv.Model, says: Callable[[str], int]) -> None:
    count = says(SAID)
    tokens = list(model.generate(messages=ASKED, max_new_tokens=count))
    assert "".join(token.text for token in tokens) == "Because."
    assert "".join(token.thoughts or "" for token in tokens) == "It is so."
    assert [each for each, _ in groupby(token.thoughts is not None for token in tokens)] == [False, True, False]
    plain = list(model.generate("Why?", max_new_tokens=count))
    assert "".join(token.text for token in plain) == SAID and {token.thoughts for token in plain} == {None}


def test_an_answer_bound_by_a_grammar_has_no_thoughts(model: edgekv.Model) -> None:
    found = list(model.generate(messages=ASKED, grammar=Grammar.regex("<think>a</think>b"), max_new_tokens=30))
    assert "".join(token.text for token in found) == "<think>a</think>b"


def test_tools_leave_room_for_thoughts(model: edgekv.Model) -> None:
    """The grammar of an answer with tools takes special tokens of thoughts, and only before the text."""
    tools = Tools.read([{"type": "function", "function": {"name": "stop"}}])
    special = {"<|channel>": 7, "<channel|>": 8, "<|tool_call>": 9}
    rules = tools_grammar(tools, GEMMA4, special, CHANNEL)
    assert rules is not None and 'thoughts: (<[7]> "thought")? TEXT <[8]>' in rules.text
    assert "start: thoughts? answer" in rules.text
    required = tools_grammar(Tools.read(tools.declarations, "required"), GEMMA4, special, CHANNEL)
    assert required is not None and "thoughts" not in required.text


def test_a_conversation_keeps_thoughts_for_the_template(model: edgekv.Model, says: Callable[[str], int]) -> None:
    conversation = Conversation(model, params=SamplingParams(max_new_tokens=says(SAID), ignore_eos=True))
    with conversation.say("Why?") as answer:
        list(answer)
    assert (answer.text, answer.thoughts) == ("Because.", "It is so.")
    said = {"role": "assistant", "content": "Because.", "reasoning_content": "It is so."}
    assert conversation.messages == [*ASKED, said]
    with conversation.say("Really?") as answer:
        list(answer)
    seen = model.tokenizer.decode(answer._generation.prompt)
    assert seen == "<user>Why?</s><assistant>Because.</s><user>Really?</s><assistant>"


def test_a_chat_prints_thoughts_apart(
    model: edgekv.Model, says: Callable[[str], int], capsys: pytest.CaptureFixture[str]
) -> None:
    conversation = Conversation(model, params=SamplingParams(max_new_tokens=says(SAID)))
    Dialog(conversation, model, Output()).say("Why?")
    found = capsys.readouterr()
    assert found.out == "Because.\n" and found.err.startswith("It is so.\n\n[")


def test_a_server_has_fields_for_thoughts(bundle: Path, model: edgekv.Model, says: Callable[[str], int]) -> None:
    def tokens(prompt: str) -> int:
        return len(model.encode_chat(prompt))

    asked: list[Any] = ASKED
    count = says(SAID)
    with served(bundle) as server:
        client = server.client()
        wanted: dict[str, Any] = {"model": NAME, "messages": asked, "max_tokens": count}
        completion: Any = client.chat.completions.create(**wanted)
        message = completion.choices[0].message
        assert (message.content, message.reasoning_content) == ("Because.", "It is so.")
        of_thoughts = sum(t.thoughts is not None for t in model.generate(messages=ASKED, max_new_tokens=count))
        assert 0 < completion.usage.completion_tokens_details.reasoning_tokens == of_thoughts < count
        with client.chat.completions.create(**wanted, stream=True) as stream:
            deltas: list[Any] = [chunk.choices[0].delta for chunk in stream]
        thoughts = [getattr(delta, "reasoning_content", None) for delta in deltas]
        assert "".join(filter(None, thoughts)) == "It is so."
        assert "".join(delta.content or "" for delta in deltas) == "Because."

        answer: Any = client.responses.create(model=NAME, input="Why?", max_output_tokens=count)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        assert (answer.output[0].content[0].text, answer.output_text) == ("It is so.", "Because.")
        assert answer.usage.output_tokens_details.reasoning_tokens == of_thoughts
        with client.responses.stream(model=NAME, input="Why?", max_output_tokens=count) as events:
            found: list[Any] = [*events]
        assert "".join(each.delta for each in found if each.type == "response.reasoning_text.delta") == "It is so."
        (done,) = [each for each in found if each.type == "response.reasoning_text.done"]
        assert (done.text, done.output_index, done.content_index) == ("It is so.", 0, 0)

        later = client.responses.create(
            model=NAME, input="Really?", previous_response_id=answer.id, max_output_tokens=1
        )
        seen = "<user>Why?</s><assistant>Because.</s><user>Really?</s><assistant>"
        assert later.usage is not None and later.usage.input_tokens == tokens(seen)
        given: Any = [*ASKED, *(item.model_dump() for item in answer.output)]
        again = client.responses.create(model=NAME, input=given, max_output_tokens=1)
        seen = "<user>Why?</s><assistant><think>It is so.</think>Because.</s><assistant>"
        assert again.usage is not None and again.usage.input_tokens == tokens(seen)


def test_the_chat_page_folds_thoughts(bundle: Path, says: Callable[[str], int], chromium: Browser) -> None:
    """They are shown as they come, in a block that opens with a click, and stay after a reload."""
    count, folded = says(SAID), "document.querySelector('.assistant details')"
    watch = "new MutationObserver(() => shown.push(document.querySelector('.assistant .thoughts div')?.textContent))"
    with served(bundle) as server, new_chat(chromium, server) as chat:
        change_settings(chat, max_tokens=count, temperature=0)
        target = "document.getElementById('log'), { childList: true, subtree: true, characterData: true }"
        chat.run(f"globalThis.shown = [], {watch}.observe({target}), undefined")
        say(chat, "Why?", turns=2)
        seen = list(dict.fromkeys(filter(None, chat.run("shown"))))
        assert seen and all("It is so.".startswith(each) for each in seen)
        assert chat.run(TURNS)[1] == ["assistant", "Because."] and chat.run(FIGURES)
        assert chat.run(f"[{folded}.open, {folded}.hidden, {folded}.lastChild.textContent]") == [
            False,
            False,
            "It is so.",
        ]
        chat.click(".assistant summary")
        assert chat.run(f"{folded}.open && {folded}.lastChild.offsetHeight > 0")
        chat.open(f"{server.serving.url}/?later")
        chat.wait(f"document.title === {NAME!r}")
        assert chat.run(f"{folded}.lastChild.textContent") == "It is so."
        assert chat.run(f"{KEPT}.messages[1].thoughts") == "It is so."
        assert chat.run("document.querySelector('.user details').hidden")
        sent = "request().messages[1]"
        assert chat.run(sent) == {"role": "assistant", "content": "Because.", "reasoning_content": "It is so."}
