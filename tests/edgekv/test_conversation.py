"""Conversations in Python: a full context, turns taken back and answered again, system prompts, files."""

from __future__ import annotations

import errno
import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, strategies as st
from msgspec import structs

import edgekv
from edgekv.bundle import Bundle, GenerationRecord
from edgekv.conversation import Conversation, answer_defaults
from edgekv.errors import ContextFullError, EngineError, UsageError
from edgekv.spec.chat import Message
from edgekv.text import SamplingParams, split_turns
from tests.support.serving import talking_bundle

CONTEXT = 512
STEP = CONTEXT // 4
PARAMS = SamplingParams(max_new_tokens=6, ignore_eos=True)
SYSTEM: Message = {"role": "system", "content": "Be brief."}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[edgekv.Model]:
    with edgekv.load(talking_bundle(tmp_path_factory.mktemp("talking"))) as model:
        yield model


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _prompt(model: edgekv.Model, conversation: Conversation, text: str) -> str:
    """What the model sees of a conversation with one more message."""
    with conversation.say(text) as answer:
        list(answer)
    return model.tokenizer.decode(answer._generation.prompt)


def _tokens(model: edgekv.Model, messages: list[Message]) -> int:
    return len(model.encode_chat(model.chat_templates.render(messages)))


# A full context


def test_a_long_conversation_goes_on_without_its_oldest_turns(model: edgekv.Model) -> None:
    conversation = Conversation(model, system="Be brief.", params=PARAMS)
    dropped, reused = [], []
    for turn in range(40):
        with conversation.say(f"{turn:02d}" + "x" * 20) as answer:
            assert len(list(answer)) == 6
        seen = model.tokenizer.decode(answer._generation.prompt)
        assert seen.startswith("<system>Be brief.</s><user>") and f"<user>{turn:02d}x" in seen
        assert seen.count("<user>") == turn + 1 - answer.dropped_turns
        dropped.append(answer.dropped_turns)
        reused.append(answer.stats.cache.reused_tokens / answer.stats.prompt_tokens)
    assert conversation.turns == 40 and len(conversation.messages) == 81, "the conversation itself is whole"
    assert dropped[-1] > 20 and dropped == sorted(dropped) and len({*dropped}) < 15
    shares = [share for share, *pair in zip(reused[1:], dropped, dropped[1:], strict=False) if len({*pair}) == 1]
    assert len(shares) > 24 and min(shares) > 0.5, "a turn that drops no further ones continues the cache"


def test_an_answer_that_filled_the_context_is_no_dead_end(model: edgekv.Model) -> None:
    conversation = Conversation(model, params=replace(answer_defaults(model), ignore_eos=True))
    first = conversation.say("Hello")
    assert len(list(first)) > STEP and first.stats.stop_reason == "context"
    second = conversation.say("Go on")
    assert len(list(second)) > STEP and second.dropped_turns == 1


def test_a_message_that_never_fits_leaves_the_conversation_as_it_was(model: edgekv.Model) -> None:
    conversation = Conversation(model, params=PARAMS)
    list(conversation.say("Hello"))
    before = [*conversation.messages]
    for text in ("x" * 3 * CONTEXT, "x" * (1 << 20)):
        with pytest.raises(ContextFullError):
            conversation.say(text)
        assert conversation.messages == before
    assert list(conversation.say("Hello")) and conversation.turns == 2


def test_an_old_message_that_is_longer_than_the_context_is_dropped(model: edgekv.Model, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text(json.dumps({"messages": [_user("x" * (1 << 20)), {"role": "assistant", "content": "y"}]}))
    conversation = Conversation(model, params=PARAMS)
    conversation.load(file)
    answer = conversation.say("Hello")
    assert answer.dropped_turns == 1 and list(answer)


def test_stop_refuses_what_is_longer_than_the_context(model: edgekv.Model) -> None:
    conversation = Conversation(model, params=PARAMS, on_full="stop")
    with pytest.raises(ContextFullError, match="at most 512"):
        for _ in range(20):
            answer = conversation.say("x" * 50)
            assert answer.dropped_turns == 0 and list(answer)
    conversation.undo()
    assert list(conversation.say("Hello")), "an undo makes room"
    with pytest.raises(UsageError, match=r"on_full: got 'slide'; expected drop-oldest or stop"):
        Conversation(model, on_full="slide")  # type: ignore[arg-type]


def test_a_model_that_evicts_tokens_itself_sees_all_turns(model: edgekv.Model) -> None:
    with edgekv.load(model.bundle.path, policy="sliding-window") as sliding:
        conversation = Conversation(sliding, params=PARAMS)
        conversation.messages = [_user("x" * 600), {"role": "assistant", "content": "y"}]
        answer = conversation.say("Hello")
        assert answer.dropped_turns == 0 and answer.stats.prompt_tokens > CONTEXT and list(answer)


LENGTHS = st.lists(st.integers(0, 260), min_size=1, max_size=14)


@given(LENGTHS, st.booleans(), st.one_of(st.none(), st.integers(1, 2 * CONTEXT)))
def test_what_is_kept_are_the_newest_turns_that_fit(
    model: edgekv.Model, lengths: list[int], has_system: bool, wanted: int | None
) -> None:
    turns = [
        [_user(f"{at}" + "x" * length), {"role": "assistant", "content": "y"}] for at, length in enumerate(lengths)
    ]
    turns[-1].pop()
    system = [SYSTEM] if has_system else []
    messages = [*system, *(each for turn in turns for each in turn)]
    assert split_turns(messages) == (system, turns)

    def fitted(count: int) -> int | None:
        """Dropped turns of the conversation as it was with this many; None if its newest is too long."""
        then = [*system, *(each for turn in turns[: count - 1] for each in turn), turns[count - 1][0]]
        try:
            found = model.engine.texts.fit(then, model.chat_templates.render, max_answer_tokens=wanted)
        except ContextFullError:
            assert _tokens(model, [*system, turns[count - 1][0]]) > CONTEXT
            return None
        kept = [*system, *then[len(system) + found.dropped_messages :]]
        assert found.text == model.chat_templates.render(kept) and [*found.tokens] == model.encode_chat(found.text)
        assert found.dropped_messages == 2 * found.dropped_turns
        room = min(STEP, wanted or STEP)
        assert len(found.tokens) + room <= CONTEXT + 1 or found.dropped_turns == count - 1
        whole = _tokens(model, then)
        assert (found.dropped_turns > 0) == (count > 1 and whole + room > CONTEXT + 1)
        return found.dropped_turns

    dropped = [fitted(count) for count in range(1, len(turns) + 1)]
    for before, after, at in zip(dropped, dropped[1:], range(2, len(turns) + 1), strict=False):
        if None in (before, after) or before == after:
            continue
        # Other turns are dropped only where keeping them would leave too little room.
        kept = [*system, *(each for turn in turns[before : at - 1] for each in turn), turns[at - 1][0]]
        assert _tokens(model, kept) + min(STEP, wanted or STEP) > CONTEXT + 1 or before == at - 2


# Turns taken back and answered again


def test_undo_takes_the_last_turn_back(model: edgekv.Model) -> None:
    conversation, other = Conversation(model, params=PARAMS), Conversation(model, params=PARAMS)
    for text in ("One", "Two"):
        list(conversation.say(text))
    assert [each["content"] for each in conversation.undo()][:1] == ["Two"] and conversation.turns == 1
    list(other.say("One"))
    assert conversation.messages == other.messages
    assert _prompt(model, conversation, "Three") == _prompt(model, other, "Three")
    for _ in range(2):
        conversation.undo()
    with pytest.raises(UsageError, match="conversation: got no turn"):
        conversation.undo()
    assert conversation.messages == [] and list(conversation.say("Four"))


def test_an_answer_is_generated_again_from_the_cache(model: edgekv.Model) -> None:
    params = SamplingParams(temperature=5.0, max_new_tokens=12, ignore_eos=True)
    conversation = Conversation(model, params=params)
    first = conversation.say("Hello")
    list(first), list(conversation.say("And?"))
    told = conversation.messages[-1]["content"]
    again = conversation.regenerate()
    list(again)
    assert conversation.turns == 2 and len(conversation.messages) == 4
    assert conversation.messages[-1]["content"] == again.text != told
    assert again.stats.cache.reused_tokens == again.stats.prompt_tokens - 1, "the prompt is known to the token"


def test_an_answer_that_cannot_be_generated_again_stays(model: edgekv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    conversation = Conversation(model, params=PARAMS)
    with pytest.raises(UsageError, match="conversation: got no turn"):
        conversation.regenerate()
    list(conversation.say("Hello"))
    before = [*conversation.messages]

    def fails(*_: object, **__: object) -> None:
        raise EngineError("running", got="nothing", expected="a step", fix="Try again.")

    with monkeypatch.context() as patch, pytest.raises(EngineError):
        patch.setattr("edgekv.runtime.graph.StaticGraph.run", fails)
        list(conversation.regenerate())
    assert conversation.messages == before
    list(conversation.regenerate())
    assert conversation.messages == before, "greedy decoding says the same"


@pytest.mark.parametrize("read", [0, 3])
def test_an_answer_that_is_not_read_to_its_end_ends_with_the_next_change(model: edgekv.Model, read: int) -> None:
    conversation = Conversation(model, params=PARAMS)
    open_answer = conversation.say("One")
    for _ in range(read):
        next(open_answer)
    list(conversation.say("Two"))
    open_answer.close()
    said = [each["content"] for each in conversation.messages]
    assert said[:-1] == (["One", open_answer.text, "Two"] if read else ["Two"])
    next(conversation.say("Three"))
    conversation.reset()
    assert conversation.messages == [] and list(conversation.say("Four")) and conversation.turns == 1


def test_a_message_without_an_answer_can_be_answered(model: edgekv.Model) -> None:
    conversation = Conversation(model, params=PARAMS)
    conversation.messages = [_user("Hello")]
    list(conversation.regenerate())
    assert [each["role"] for each in conversation.messages] == ["user", "assistant"]
    conversation.messages = [{"role": "assistant", "content": "Welcome."}]
    with pytest.raises(UsageError, match="got only an answer"):
        conversation.regenerate()


# System prompts and files


def test_the_system_prompt_changes_and_the_turns_stay(model: edgekv.Model) -> None:
    conversation = Conversation(model, params=PARAMS)
    assert conversation.system is None
    list(conversation.say("Hello"))
    turn = [*conversation.messages]
    conversation.system = "Be brief."
    assert conversation.messages == [SYSTEM, *turn]
    assert _prompt(model, conversation, "And?").startswith("<system>Be brief.</s><user>Hello</s>")
    conversation.system = "Be long."
    conversation.reset()
    assert conversation.system == "Be long." and len(conversation.messages) == 1
    conversation.system = None
    assert conversation.messages == []


def test_a_loaded_conversation_has_its_own_system_prompt(model: edgekv.Model, tmp_path: Path) -> None:
    first, second = Conversation(model, system="Be brief."), Conversation(model, system="Be long.")
    first.save(tmp_path / "talk.json")
    assert json.loads((tmp_path / "talk.json").read_text()) == {"messages": [SYSTEM]}
    second.load(tmp_path / "talk.json")
    assert second.system == "Be brief."
    first.messages = [{"role": "system", "content": [{"type": "text", "text": "In parts."}]}]
    assert first.system == "In parts."


def test_a_conversation_that_does_not_reach_the_disk_leaves_the_one_before(
    model: edgekv.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conversation = Conversation(model, system="Be brief.")
    conversation.save(tmp_path / "talk.json")
    before = (tmp_path / "talk.json").read_bytes()

    def fsync(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("os.fsync", fsync)
    conversation.system = "Be long."
    with pytest.raises(UsageError, match=r"talk\.json: got Input/output error"):
        conversation.save(tmp_path / "talk.json")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"messages": 3}',
        '{"messages": [{"role": "king", "content": "x"}]}',
        '{"messages": [{}]}',
        "[" * 99999,
    ],
)
def test_a_broken_file_is_refused_by_name(model: edgekv.Model, tmp_path: Path, content: str) -> None:
    file = tmp_path / "broken.json"
    file.write_text(content)
    conversation = Conversation(model, system="Be brief.")
    with pytest.raises(UsageError, match=r"broken\.json"):
        conversation.load(file)
    assert conversation.messages == [SYSTEM]


@pytest.mark.parametrize("name", ["", "missing/talk.json", "a\0b", "x" * 300])
def test_a_place_that_is_no_file_is_refused_by_name(model: edgekv.Model, tmp_path: Path, name: str) -> None:
    conversation = Conversation(model)
    for work in (conversation.save, conversation.load):
        with pytest.raises(UsageError):
            work(tmp_path / name)
    assert [*tmp_path.iterdir()] == []


def test_an_answer_may_fill_the_context_unless_told_otherwise(model: edgekv.Model) -> None:
    assert answer_defaults(model).max_new_tokens == CONTEXT == edgekv.Conversation(model).params.max_new_tokens
    record = GenerationRecord(max_new_tokens=7)
    bundle = model.bundle
    changed = Bundle(bundle.path, structs.replace(bundle.manifest, generation=record))
    with edgekv.load(changed) as told:
        assert edgekv.Conversation(told).params.max_new_tokens == 7


# Caches


def test_conversations_that_take_turns_keep_their_caches(model: edgekv.Model) -> None:
    gc.collect()  # conversations of other tests
    before = len(model.sequences)
    talks = [Conversation(model, params=PARAMS), Conversation(model, params=PARAMS)]
    reused = []
    for turn in range(3):
        for number, talk in enumerate(talks):
            with talk.say(f"{number} says {turn}") as answer:
                assert len(list(answer)) == 6
            reused.append(answer.stats.cache.reused_tokens)
    assert reused[:2] == [0, 0] and min(reused[2:]) > 10
    assert len(model.sequences) == before + 2
    del talk, talks, answer
    assert len(model.sequences) == before
