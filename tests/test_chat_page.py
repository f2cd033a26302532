"""The chat page, in headless Chromium: a conversation, its end in the middle, a reload, a phone, and hostile text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

import pytest

from edgekv.serve.page import page
from tests.browser import PROGRAM, Browser, browser
from tests.serving import Server, served, talking_bundle

ENTER, ESCAPE, TAB = 13, 27, 9
IDLE = "!document.getElementById('send').hidden"
TURNS = "[...document.querySelectorAll('.turn')].map(e => [e.classList[1], e.querySelector('.text').textContent])"
KEPT = "JSON.parse(localStorage.getItem('edgekv chat'))"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(talking_bundle(tmp_path_factory.mktemp("talker"))) as server:
        yield server


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if PROGRAM is None:
        pytest.skip("needs Chromium: apt-get install chromium")
    with browser(tmp_path_factory.mktemp("profile")) as chromium:
        yield chromium


@pytest.fixture
def chat(chromium: Browser, server: Server) -> Iterator[Browser]:
    """The page with no conversation; it must end without an error of a script or of the content security policy."""
    chromium.open(f"{server.serving.url}/")
    chromium.run("localStorage.clear(), sessionStorage.clear(), state = { messages: [], settings: {} }, undefined")
    chromium.messages.clear()
    chromium.resize(1000, 700)
    chromium.open(f"{server.serving.url}/?again")
    chromium.wait("document.title === 'talker'")
    yield chromium
    assert chromium.messages == []


def _settings(chat: Browser, **values: object) -> None:
    chat.click("settings")
    for name, value in values.items():
        chat.run(f"document.getElementById({name!r}).value = {json.dumps(str(value))}, undefined")
    chat.run("document.querySelector('dialog button').click()")
    chat.wait("!document.getElementById('dialog').open")


def _say(chat: Browser, text: str) -> None:
    chat.run("document.getElementById('input').focus()")
    chat.type(text)
    chat.press("Enter", ENTER)


def test_a_conversation_continues_from_the_cache(chat: Browser, server: Server) -> None:
    _settings(chat, max_tokens=8, temperature=0, system="Be brief.")
    _say(chat, "Hello")
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    _say(chat, "More")
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 4")
    turns = chat.run(TURNS)
    assert [role for role, _ in turns] == ["user", "assistant", "user", "assistant"]
    assert turns[0][1] == "Hello"
    messages = [{"role": "system", "content": "Be brief."}]
    messages += [{"role": role, "content": text} for role, text in turns[:3]]
    asked = server.client().chat.completions.create(model="talker", messages=messages, max_tokens=1)  # type: ignore
    figures = chat.run("[...document.querySelectorAll('.assistant .figures')].map(e => e.textContent)")
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


def test_a_full_context_is_shown_as_full(chat: Browser) -> None:
    """The last token of an answer is not run: prompt and answer are one more than the context."""
    _say(chat, "Hello")
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    assert chat.run("document.getElementById('used').textContent") == "512 of 512"


@pytest.mark.parametrize("way", ["escape", "button"])
def test_an_answer_stops_in_the_middle_and_stays_after_a_reload(chat: Browser, server: Server, way: str) -> None:
    _say(chat, "Hello")
    chat.wait(f"{TURNS}[1]?.[1].length > 3")
    if way == "escape":
        chat.press("Escape", ESCAPE)
    else:
        chat.click("stop")
    chat.wait(IDLE)
    assert "stopped" in chat.run("document.querySelector('.assistant .figures').textContent")
    turns = chat.run(TURNS)
    assert len(turns[1][1]) > 3
    chat.wait("fetch('health').then(r => r.json()).then(h => h.running === 0 && h.queued === 0)")
    chat.open(f"{server.serving.url}/")
    chat.wait("document.title === 'talker'")
    assert chat.run(TURNS) == turns
    _settings(chat, max_tokens=5)
    chat.click("again")
    chat.wait(f"{IDLE} && document.querySelector('.assistant .figures').textContent.startsWith('5 tokens')")
    assert len(chat.run(TURNS)) == 2
    chat.click("new")
    assert chat.run(TURNS) == []
    assert chat.run(f"{KEPT}.messages") == []


def test_a_reload_in_the_middle_of_an_answer_keeps_what_was_written(chat: Browser, server: Server) -> None:
    _say(chat, "Hello")
    chat.wait(f"{TURNS}[1]?.[1].length > 3")
    chat.open(f"{server.serving.url}/?later")
    chat.wait("document.title === 'talker'")
    roles = [role for role, _ in chat.run(TURNS)]
    assert roles == ["user", "assistant"]
    assert chat.run(IDLE)
    chat.wait("fetch('health').then(r => r.json()).then(h => h.running === 0)")


def test_the_page_works_on_a_phone_and_by_keyboard(chat: Browser) -> None:
    chat.resize(320, 600, dark=True)
    _settings(chat, max_tokens=30)
    chat.run("document.getElementById('input').focus()")
    chat.type("A line")
    chat.press("Enter", ENTER, shift=True)
    chat.type("x" * 200)
    chat.press("Enter", ENTER)
    chat.wait(f"{IDLE} && document.querySelectorAll('.turn').length === 2")
    assert chat.run("document.documentElement.scrollWidth") == 320
    outside = "[...document.querySelectorAll('button, textarea, meter, .text')].filter(e => e.offsetParent)"
    assert chat.run(f"{outside}.filter(e => e.getBoundingClientRect().right > 320).map(e => e.id)") == []
    buttons = f"{outside}.filter(e => e.tagName === 'BUTTON')"
    assert chat.run(f"{buttons}.map(e => e.offsetHeight)") == [40] * 4  # one line, and large enough for a finger
    assert chat.run("document.querySelector('header').offsetHeight") < 100
    chat.resize(1000, 700)
    assert chat.run(f"{buttons}.map(e => e.offsetHeight)") == [40] * 4
    order = []
    for _ in range(5):
        chat.press("Tab", TAB)
        order.append(chat.run("document.activeElement.id"))
    assert {"again", "send", "new", "settings", "log"} & set(order) >= {"again", "send"}
    unnamed = "[...document.querySelectorAll('button, textarea, input, meter')]"
    assert chat.run(f"{unnamed}.filter(e => !e.textContent.trim() && !e.labels?.length).map(e => e.id)") == []


def test_text_is_never_html(chat: Browser) -> None:
    hostile = "<img src=x onerror=alert(1)> <script>alert(2)</script>\n```js\n<b>bold</b>\n```\nend"
    chat.run(
        "state.messages = [{ role: 'user', content: 'x' }, { role: 'assistant', content: "
        f"{json.dumps(hostile)} }}], draw(), undefined"
    )
    assert chat.run("document.querySelectorAll('#log img, #log script, #log b').length") == 0
    assert chat.run("document.querySelector('.assistant pre').textContent") == "<b>bold</b>"
    assert "<script>alert(2)</script>" in chat.run("document.querySelector('.assistant .text').textContent")


def test_the_policy_refuses_html_foreign_hosts_and_other_scripts(chat: Browser) -> None:
    refused = "(() => { try { document.body.innerHTML = '<b>x</b>'; return 'done'; } catch (e) { return e.name; } })()"
    assert chat.run(refused) == "TypeError"
    assert chat.run("fetch('http://example.com/').then(() => 'done', e => e.name)") == "TypeError"
    script = "new Promise(r => { addEventListener('securitypolicyviolation', e => r(e.effectiveDirective));"
    added = "const s = document.createElement('style'); s.textContent = 'p {}'; document.head.append(s); })"
    assert chat.run(script + added) == "style-src-elem"
    assert any("Content Security Policy" in message for message in chat.messages)
    chat.messages.clear()


def test_an_error_is_told_and_leaves_no_empty_answer(chat: Browser) -> None:
    _settings(chat, max_tokens=10)
    _say(chat, "x" * 3000)
    chat.wait("document.getElementById('error').textContent !== ''")
    assert "512" in chat.run("document.getElementById('error').textContent")
    chat.wait(IDLE)
    assert [role for role, _ in chat.run(TURNS)] == ["user"]
    chat.messages.clear()  # the browser notes the status 400


def test_a_key_is_asked_for_and_sent(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> None:
    bundle = talking_bundle(tmp_path_factory.mktemp("keyed"))
    with served(bundle, keys=("secret",)) as server:
        chromium.open(f"{server.serving.url}/")
        chromium.wait("document.getElementById('error').textContent.includes('key')")
        _settings(chromium, key="secret", max_tokens=3)
        chromium.wait("document.title === 'talker'")
        _say(chromium, "Hello")
        chromium.wait(f"{IDLE} && {TURNS}[1]?.[1] !== undefined")
        assert chromium.run("document.getElementById('error').textContent") == ""
        assert "secret" not in chromium.run("JSON.stringify(localStorage)")
    chromium.messages.clear()


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
