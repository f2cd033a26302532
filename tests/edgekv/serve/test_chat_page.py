"""The chat page, in headless Chromium: a conversation, its ends, its edits, adapters, a reload, a phone."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from edgekv.engine.engine import Engine, Event
from edgekv.engine.sequence import Sequence
from edgekv.serve import answers
from edgekv.serve.page import page
from tests.support.serving import (
    ADAPTERS,
    ERROR,
    FIGURES,
    IDLE,
    KEPT,
    NAME,
    TURNS,
    Server,
    Tab,
    adapted_bundle,
    change_settings,
    new_chat,
    new_tab,
    say,
    served,
    show,
    wait_for_turns,
)


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking) as server:
        yield server


@pytest.fixture
def chat(chromium: Browser, server: Server) -> Iterator[Tab]:
    with new_chat(chromium, server) as chat:
        yield chat


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """An answer takes longer than a browser needs to be told to stop it."""
    _wait_in_steps(monkeypatch, 0.01)


def _wait_in_steps(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    step = Engine.step

    def waited(engine: Engine, only: Sequence | None = None) -> list[tuple[Sequence, Event]]:
        time.sleep(seconds)
        return step(engine, only)

    monkeypatch.setattr(Engine, "step", waited)


def test_a_conversation_continues_from_the_cache(chat: Tab, server: Server) -> None:
    change_settings(chat, max_tokens=8, temperature=0, system="Be brief.")
    say(chat, "Hello", turns=2)
    say(chat, "More", turns=4)
    turns = chat.run(TURNS)
    assert [role for role, _ in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[0][1] == "Hello"
    messages = [{"role": "system", "content": "Be brief."}]
    messages += [{"role": role, "content": text} for role, text in turns[:3]]
    asked = server.client().chat.completions.create(model="talker", messages=messages, max_tokens=1)  # type: ignore
    figures = chat.run(FIGURES)
    for line in figures:
        assert re.fullmatch(
            r"8 tokens · (?:[\d.]+ tokens/s · )?first token \d+ ms · \d+ of \d+ prompt tokens from the cache · "
            "cut at the limit",
            line,
        )
    cached, prompt = map(int, re.findall(r"(\d+) of (\d+) prompt", figures[1])[0])
    assert asked.usage is not None and prompt == asked.usage.prompt_tokens  # all turns were sent
    assert 40 <= cached < prompt
    assert chat.run("document.getElementById('used').textContent") == f"{prompt + 8} of 512"
    assert chat.run("document.getElementById('meter').value") == prompt + 8


def test_conversations_are_kept_chosen_and_deleted(chat: Tab, server: Server) -> None:
    change_settings(chat, max_tokens=4, temperature=0)
    titles = "[...document.getElementById('talks').options].map(e => e.text)"
    say(chat, "First of all", turns=2)
    assert chat.run("document.getElementById('talks').hidden")
    first = chat.run(TURNS)
    chat.click("#new")
    say(chat, "<b>Second</b>", turns=2)
    assert chat.run(titles) == ["<b>Second</b>", "First of all"]
    chat.open(f"{server.serving.url}/")
    chat.wait("document.title === 'talker'")
    chat.run("document.getElementById('talks').value = 1, undefined")
    chat.run("document.getElementById('talks').dispatchEvent(new Event('change')), undefined")
    assert chat.run(TURNS) == first and chat.run(titles) == ["First of all", "<b>Second</b>"]
    chat.click("#settings")
    chat.click("#delete")
    assert chat.run(titles) == ["<b>Second</b>"] and chat.run(TURNS)[0][1] == "<b>Second</b>"
    for width in (1366, 390):
        chat.resize(width, 700)
        assert chat.run("document.documentElement.scrollWidth") == width


def test_a_long_prompt_says_in_per_cent_how_far_it_is(chat: Tab, monkeypatch: pytest.MonkeyPatch) -> None:
    _wait_in_steps(monkeypatch, 0.2)  # a busy browser shows what it was told last
    monkeypatch.setattr(answers, "PREFILL_S", 0.02)
    change_settings(chat, max_tokens=2)
    seen = "new MutationObserver(() => seen.push(document.getElementById('log').textContent))"
    options = "{ childList: true, subtree: true, characterData: true }"
    chat.run(f"window.seen = [], {seen}.observe(document.getElementById('log'), {options}), undefined")
    say(chat, "word " * 80, turns=2)
    told = [int(found[1]) for text in chat.run("seen") if (found := re.search(r"reads the prompt: (\d+) %", text))]
    assert told and told == sorted(told) and told[-1] > 0
    assert "reads the prompt" not in chat.run("document.getElementById('log').textContent")


def test_the_page_names_the_values_of_the_model(chat: Tab) -> None:
    assert chat.run("document.getElementById('temperature').placeholder") == "0 (the model's)"
    assert chat.run("document.getElementById('top_p').placeholder") == "all (the model's)"


def test_a_full_context_is_shown_as_full(chat: Tab) -> None:
    """The last token of an answer is not run: prompt and answer are one more than the context."""
    say(chat, "Hello", turns=2)
    assert chat.run("document.getElementById('used').textContent") == "512 of 512"


@pytest.mark.usefixtures("slow")
@pytest.mark.parametrize("way", ["escape", "button"])
def test_an_answer_stops_in_the_middle_and_stays_after_a_reload(chat: Tab, server: Server, way: str) -> None:
    say(chat, "Hello")
    chat.wait(f"{TURNS}[1]?.[1].length > 3")
    if way == "escape":
        chat.press("Escape")
    else:
        chat.click("#stop")
    chat.wait(IDLE)
    assert "stopped" in chat.run("document.querySelector('.assistant .figures').textContent")
    turns = chat.run(TURNS)
    assert len(turns[1][1]) > 3
    chat.wait("fetch('health').then(r => r.json()).then(h => h.running === 0 && h.queued === 0)")
    chat.open(f"{server.serving.url}/")
    chat.wait("document.title === 'talker'")
    assert chat.run(TURNS) == turns
    change_settings(chat, max_tokens=5)
    chat.click("#again")
    chat.wait(f"{IDLE} && document.querySelector('.assistant .figures').textContent.startsWith('5 tokens')")
    assert len(chat.run(TURNS)) == 2
    assert chat.run("document.getElementById('adapter').hidden")  # the bundle has none
    chat.click("#new")
    assert chat.run(TURNS) == []
    assert chat.run(f"{KEPT}.messages") == []


@pytest.mark.usefixtures("slow")
def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_written(chat: Tab, server: Server) -> None:
    say(chat, "Hello")
    chat.wait(f"{TURNS}[1]?.[1].length > 3")
    chat.open(f"{server.serving.url}/?later")
    chat.wait("document.title === 'talker'")
    roles = [role for role, _ in chat.run(TURNS)]
    assert roles == ["user", "assistant"]
    assert chat.run(IDLE)
    chat.wait("fetch('health').then(r => r.json()).then(h => h.running === 0)")


def test_the_page_works_on_a_phone_and_by_keyboard(chat: Tab) -> None:
    chat.resize(320, 600, dark=True)
    change_settings(chat, max_tokens=30)
    chat.run("document.getElementById('input').focus()")
    chat.type("A line")
    chat.press("Shift+Enter")
    chat.type("x" * 200)
    chat.press("Enter")
    wait_for_turns(chat, 2)
    assert chat.run("document.documentElement.scrollWidth") == 320
    outside = "[...document.querySelectorAll('button, textarea, meter, .text')].filter(e => e.offsetParent)"
    assert chat.run(f"{outside}.filter(e => e.getBoundingClientRect().right > 320).map(e => e.id)") == []
    buttons = f"{outside}.filter(e => e.tagName === 'BUTTON')"
    assert chat.run(f"{buttons}.map(e => e.offsetHeight)") == [40] * 7  # one line, and large enough for a finger
    assert chat.run("document.querySelector('header').offsetHeight") < 100
    chat.resize(1000, 700)
    assert chat.run(f"{buttons}.map(e => e.offsetHeight)") == [40, 40, 32, 32, 32, 40, 40]
    name = "(e => e === document.body ? 'the browser' : e.id || e.textContent)(document.activeElement)"
    order = []
    for _ in range(9):
        chat.press("Tab")
        order.append(chat.run(name))
    assert order == ["again", "send", "the browser", "new", "settings", "log", "Copy", "Edit", "Copy"]
    unnamed = "[...document.querySelectorAll('button, textarea, input, meter, select')]"
    named = "e.textContent.trim() || e.labels?.length || e.ariaLabel"
    assert chat.run(f"{unnamed}.filter(e => !({named})).map(e => e.id)") == []


def test_the_meter_moves_while_an_answer_is_written(chat: Tab) -> None:
    change_settings(chat, max_tokens=80, temperature=0)  # both turns fit the context
    watched = "new MutationObserver(() => shown.push(used.textContent)).observe(used, { childList: true })"
    chat.run(f"globalThis.shown = [], globalThis.used = document.getElementById('used'), {watched}, undefined")
    counted = 0
    for turns in (2, 4):
        chat.run("shown.length = 0, undefined")
        say(chat, "Hello", turns)
        *moving, last = list(dict.fromkeys(chat.run("shown")))
        estimates = [int(each.removeprefix("~").removesuffix(" of 512")) for each in moving if each.startswith("~")]
        assert estimates  # how many depends on how often the browser gets to draw
        assert [counted, *estimates] == sorted({counted, *estimates})
        counted = int(last.removesuffix(" of 512"))  # by the server
        assert counted >= estimates[-1]  # tokens that end within a character send nothing
        assert chat.run("document.getElementById('meter').value") == counted


def test_an_edited_message_asks_again_from_there(chat: Tab, server: Server) -> None:
    change_settings(chat, max_tokens=5, temperature=0)
    say(chat, "First", turns=2)
    say(chat, "Second", turns=4)
    before = chat.run(TURNS)
    chat.click(".edit")
    assert chat.run("document.activeElement.value") == "First"
    chat.type(" of all")
    chat.press("Escape")
    assert chat.run(TURNS) == before
    assert chat.run("document.activeElement.textContent") == "Edit"
    chat.press("Enter")
    chat.type(" of all")
    chat.press("Enter")
    wait_for_turns(chat, 2)
    messages = [{"role": "user", "content": "First of all"}]
    asked = server.client().chat.completions.create(model=NAME, messages=messages, max_tokens=5, temperature=0)  # type: ignore
    assert chat.run(f"{KEPT}.messages[0].content") == "First of all"
    assert chat.run(f"{KEPT}.messages[1].content") == asked.choices[0].message.content
    assert chat.run(f"{KEPT}.messages[1].figures.prompt") == asked.usage.prompt_tokens  # type: ignore[union-attr]
    assert chat.run("document.activeElement.id") == "input"


def test_what_cannot_be_answered_again_keeps_its_answer(chat: Tab) -> None:
    """Neither an edit nor another try loses what was there, and the edit can be corrected."""
    change_settings(chat, max_tokens=5)
    say(chat, "First", turns=2)
    say(chat, "Second", turns=4)
    before, figures = chat.run(TURNS), chat.run(FIGURES)
    chat.click(".edit")
    chat.type("x" * 3000)
    chat.press("Enter")
    chat.wait(f"{ERROR}.includes('512') && document.activeElement.value?.length === 3005")
    assert chat.run("document.activeElement.tagName") == "TEXTAREA"
    chat.press("Escape")
    assert chat.run(TURNS) == before
    chat.run("window.fetch = async () => { throw new TypeError('Failed to fetch'); }, 0")
    chat.click("#again")
    chat.wait(f"{ERROR} === 'The server does not answer. Is it running?'")
    wait_for_turns(chat, 4)
    assert chat.run(TURNS) == before
    assert chat.run(FIGURES) == figures
    assert chat.run(f"{KEPT}.messages.length") == 4
    chat.messages.clear()  # the browser notes the status 400


def test_copy_buttons_copy_a_message_and_its_code(chat: Tab) -> None:
    answer = "See:\n\n```python\nx = '<b>'\n\ny = 2\n```\n**end**"
    show(chat, "A *question*", answer)
    texts = {
        ".user .foot button": "A *question*",
        ".assistant .foot button": answer,
        ".code button": "x = '<b>'\n\ny = 2",
    }
    for is_secure in (True, False):  # http from another machine has no navigator.clipboard
        for selector, text in texts.items():
            chat.run("navigator.clipboard.writeText('nothing')")
            if not is_secure:
                chat.run("Object.defineProperty(navigator, 'clipboard', { value: undefined, configurable: true }), 0")
            chat.click(selector)
            chat.wait(f"document.querySelector({selector!r}).textContent === 'Copied'")
            chat.run("delete navigator.clipboard")
            assert chat.clipboard() == text
        chat.wait("[...document.querySelectorAll('button')].every(e => e.textContent !== 'Copied')")
    assert chat.run("document.getElementById('status').textContent") == "Copied"


def test_a_stream_that_breaks_off_is_told_and_kept(chat: Tab) -> None:
    data = json.dumps({"choices": [{"delta": {"content": "Half an ans"}}]})
    chat.run(
        f"window.fetch = async () => new Response({json.dumps(f'data: {data}{chr(10) * 2}: waiting{chr(10)}')}), 0"
    )
    say(chat, "Hello", turns=2)
    assert "Is the server still running?" in chat.run(ERROR)
    assert chat.run(TURNS) == [["user", "Hello"], ["assistant", "Half an ans"]]
    assert "broken off" in chat.run(FIGURES)[0]
    assert chat.run(f"{KEPT}.messages[1].content") == "Half an ans"


def test_damaged_storage_is_a_new_conversation(chat: Tab, server: Server) -> None:
    for kept in (
        "{",
        "null",
        "[]",
        '{"messages": 1}',
        '{"messages": [null, 1, {"role": "system", "content": "x"}], "settings": 3}',
        '{"messages": [{"role": "user", "content": ["x"]}], "settings": []}',
        '{"messages": [{"role": "__proto__", "content": "x"}, {"role": "user"}], "settings": null}',
    ):
        chat.run(f"addEventListener('pagehide', () => localStorage.setItem('edgekv chat', {kept!r})), 0")
        chat.open(f"{server.serving.url}/?damaged")
        chat.wait(f"document.title === {NAME!r}")
        assert chat.run(TURNS) == [], kept
        change_settings(chat, max_tokens=3)
        say(chat, "Hello", turns=2)


def test_a_browser_without_storage_can_chat(chat: Tab, server: Server) -> None:
    """As where cookies are blocked."""
    refused = "{ get() { throw new DOMException('no', 'SecurityError'); } }"
    script = "".join(f"Object.defineProperty(window, '{kind}Storage', {refused});" for kind in ("local", "session"))
    chat.prepare(script)
    chat.open(f"{server.serving.url}/?blocked")
    chat.wait(f"document.title === {NAME!r}")
    change_settings(chat, max_tokens=3)
    say(chat, "Hello", turns=2)
    assert chat.run(ERROR) == ""


def test_a_page_that_opened_before_the_server_started_finds_the_model(chat: Tab, server: Server) -> None:
    broken = "window.working = fetch; window.fetch = async () => { throw new TypeError('Failed to fetch'); }"
    chat.prepare(broken)
    chat.open(f"{server.serving.url}/?early")
    chat.wait(f"{ERROR} === 'The server does not answer. Is it running?'")
    chat.run("window.fetch = working, document.getElementById('max_tokens').value = 3, 0")
    say(chat, "Hello", turns=2)
    assert chat.run("document.title") == NAME


def test_an_adapter_is_chosen_and_kept(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    with served(adapted_bundle(tmp_path_factory.mktemp("adapted"))) as server, new_chat(chromium, server) as chat:
        options = "[...document.getElementById('adapter').options].map(e => [e.text, e.value])"
        names = sorted(ADAPTERS)
        assert chat.run(options) == [["no adapter", NAME], *([name, f"{NAME}:{name}"] for name in names)]
        chat.resize(320, 600)
        assert chat.run("document.documentElement.scrollWidth") == 320
        assert chat.run("document.getElementById('adapter').getBoundingClientRect().right") <= 320
        change_settings(chat, max_tokens=12, temperature=0)
        say(chat, "Hello", turns=2)
        chat.run("document.getElementById('adapter').focus()")
        chat.press("l")  # a list takes the first entry with this letter
        chat.wait("document.getElementById('adapter').value.endsWith(':loud')")
        chat.click("#again")
        chat.wait("document.querySelector('.assistant h2').textContent === 'Model · loud'")
        wait_for_turns(chat, 2)
        messages = [{"role": "user", "content": "Hello"}]
        for name in (NAME, f"{NAME}:loud"):
            client = server.client().chat.completions
            asked = client.create(model=name, messages=messages, max_tokens=12, temperature=0)  # type: ignore[call-overload]
            same = chat.run(f"{KEPT}.messages[1].content") == asked.choices[0].message.content
            assert same == (name != NAME)
        chat.open(f"{server.serving.url}/?later")
        chat.wait(f"document.title === {NAME!r}")
        assert chat.run("document.getElementById('adapter').value") == f"{NAME}:loud"
        assert chat.run("document.querySelector('.assistant h2').textContent") == "Model · loud"


def test_the_policy_refuses_html_foreign_hosts_and_other_scripts(chat: Tab) -> None:
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'done'; } catch (e) { return e.name; } })()"
    assert chat.run(refused) == "TypeError"
    assert chat.run("fetch('http://example.com/').then(() => 'done', e => e.name)") == "TypeError"
    script = "new Promise(r => { addEventListener('securitypolicyviolation', e => r(e.effectiveDirective));"
    added = "const s = document.createElement('style'); s.textContent = 'p {}'; document.head.append(s); })"
    assert chat.run(script + added) == "style-src-elem"
    assert any("Content Security Policy" in message for message in chat.messages)
    chat.messages.clear()


def test_an_error_is_told_and_leaves_no_empty_answer(chat: Tab) -> None:
    change_settings(chat, max_tokens=10)
    say(chat, "x" * 3000)
    chat.wait(f"{ERROR} !== ''")
    assert "512" in chat.run(ERROR)
    chat.wait(IDLE)
    assert chat.run(TURNS) == [] and chat.run("document.getElementById('input').value") == "x" * 3000
    chat.messages.clear()  # the browser notes the status 400


def test_a_key_is_asked_for_and_sent(chromium: Browser, talking: Path) -> None:
    with served(talking, keys=("secret",)) as server, new_tab(chromium) as chat:
        chat.open(f"{server.serving.url}/")
        chat.wait(f"{ERROR}.includes('key')")
        change_settings(chat, key="secret", max_tokens=3)
        chat.wait("document.title === 'talker'")
        say(chat, "Hello")
        chat.wait(f"{IDLE} && {TURNS}[1]?.[1] !== undefined")
        assert chat.run(ERROR) == ""
        assert "secret" not in chat.run("JSON.stringify(localStorage)")


@pytest.mark.slow
def test_the_page_needs_nothing_else() -> None:
    data, headers = page()
    text = data.decode()
    assert not re.search(
        r"https?://|//[a-z]+\.|@import|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", text
    )
    assert not re.search(r"<[^>]+\son[a-z]+=", text)
    assert not re.search(r"<[^>]+\sstyle=", text)
    policy = dict(headers)[b"content-security-policy"].decode()
    assert "unsafe" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
