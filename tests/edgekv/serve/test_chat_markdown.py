"""Markdown on the chat page: what it shows, and that a hostile answer only ever becomes text, marks and web links."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from tests.support.serving import Server, Tab, new_chat, served, show

HTML = "document.querySelector('.assistant .text').innerHTML"
TAGS = {
    *("A", "BLOCKQUOTE", "BUTTON", "CODE", "DIV", "EM", "H3", "H4", "H5", "H6", "HEADER", "HR", "LI", "OL", "P", "PRE"),
    *("S", "SPAN", "STRONG", "TABLE", "TBODY", "TD", "TH", "THEAD", "TR", "UL"),
}
ATTRIBUTES = {"class", "href", "rel", "start", "style", "tabindex", "target", "title", "type"}
LINK = 'target="_blank" rel="noopener noreferrer nofollow"'
SAMPLE = """\
# Title
Some *text* with `code`.

1. one
   - two
2. three

| a | b |
|---|--:|
| c | d |

```python
e = 1
```
> f
"""


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking) as server:
        yield server


@pytest.fixture(scope="module")
def opened(chromium: Browser, server: Server) -> Iterator[Tab]:
    with new_chat(chromium, server) as chat:
        yield chat


@pytest.fixture
def chat(opened: Tab) -> Iterator[Tab]:
    opened.resize(1000, 700)
    yield opened
    assert opened.messages == []


def _rendered(chat: Tab, text: str) -> str:
    show(chat, "x", text)
    found: str = chat.run(HTML)
    return found


def _fuzz(chat: Tab, script: str, texts: list[str]) -> list[str]:
    """The texts for which a function of a text, and of an element to show it in, is false."""
    each = "text => !check(text, document.createElement('div'))"
    found: list[str] = chat.run(f"(() => {{ const check = {script}; return {json.dumps(texts)}.filter({each}); }})()")
    return found


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("a\nb\n\nc", "<p>a\nb</p><p>c</p>"),
        ("*a* **b** ***c*** ~~d~~ _e_ __f__", "<p><em>a</em> <strong>b</strong> <strong><em>c</em></strong> "
         "<s>d</s> <em>e</em> <strong>f</strong></p>"),
        ("**a *b* c**", "<p><strong>a <em>b</em> c</strong></p>"),
        ("snake_case_name, 2 * 3 * 4, *open, \\*x\\*", "<p>snake_case_name, 2 * 3 * 4, *open, *x*</p>"),
        ("`a *b*` ``c ` d`` `` ` `` `open", "<p><code>a *b*</code> <code>c ` d</code> <code>`</code> `open</p>"),
        ("\\(x_{i} + y_{j}\\) \\[z\\] \\# \\`a\\`", "<p>\\(x_{i} + y_{j}\\) \\[z\\] # `a`</p>"),
        ("**「a」**b*c*d", "<p><strong>「a」</strong>b<em>c</em>d</p>"),
        ("a\r\n\r\n---\r\n- b\r\n", "<p>a</p><hr><ul><li><p>b</p></li></ul>"),
        ("# a\n### b\n###### c\n#d", "<h3>a</h3><h5>b</h5><h6>c</h6><p>#d</p>"),
        ("a\n---\n* * *", "<p>a</p><hr><hr>"),
        ("> a\n> > b\n\nc", "<blockquote><p>a</p><blockquote><p>b</p></blockquote></blockquote><p>c</p>"),
        ("- a\n- b\n  c\n\n- d\ne", "<ul><li><p>a</p></li><li><p>b\nc</p></li><li><p>d\ne</p></li></ul>"),
        ("3. a\n   - b\n     - c\n4. d", '<ol start="3"><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul>'
         "</li></ul></li><li><p>d</p></li></ol>"),
        ("1. a\n  - b\n    - c", '<ol start="1"><li><p>a</p><ul><li><p>b</p><ul><li><p>c</p></li></ul>'
         "</li></ul></li></ol>"),
        ("- a\n\t- b", "<ul><li><p>a</p><ul><li><p>b</p></li></ul></li></ul>"),
        ("- a\n1. b\n\nc", '<ul><li><p>a</p></li></ul><ol start="1"><li><p>b</p></li></ol><p>c</p>'),
        ("a | b\nc", "<p>a | b\nc</p>"),
        ("https://a.b/c_d_e?f=*g*).", f'<p><a href="https://a.b/c_d_e?f=*g" title="https://a.b/c_d_e?f=*g" {LINK}>'
         "https://a.b/c_d_e?f=*g</a>*).</p>"),
        ("[*a*](https://b.c/d_(e) \"f\")", f'<p><a href="https://b.c/d_(e)" title="https://b.c/d_(e)" {LINK}>'
         "<em>a</em></a></p>"),
        ("![a](https://b.c/) [](mailto:d@e.f)", f'<p><a href="https://b.c/" title="https://b.c/" {LINK}>a</a> '
         f'<a href="mailto:d@e.f" title="mailto:d@e.f" {LINK}>mailto:d@e.f</a></p>'),
        ("[https://good.com](https://bad.com/)", f'<p><a href="https://bad.com/" title="https://bad.com/" {LINK}>'
         "https://good.com</a></p>"),
        ("[a] (b) [c][d] [e](/metrics) [f](x.html)", "<p>[a] (b) [c][d] [e](/metrics) [f](x.html)</p>"),
    ],
)  # fmt: skip
def test_a_text_becomes_elements(chat: Tab, text: str, html: str) -> None:
    assert _rendered(chat, text) == html


def test_a_table_has_a_head_and_sides(chat: Tab) -> None:
    _rendered(chat, "| a | *b* | c |\n|---|:--|--:|\n| `d` | e \\| f |\n\ng")
    rows = (
        "[...document.querySelectorAll('.assistant tr')].map(r => [...r.children].map(e => [e.tagName, e.innerHTML]))"
    )
    assert chat.run(rows) == [
        [["TH", "a"], ["TH", "<em>b</em>"], ["TH", "c"]],
        [["TD", "<code>d</code>"], ["TD", "e | f"]],
    ]
    assert chat.run("[...document.querySelectorAll('th')].map(e => e.style.textAlign)") == ["", "", "right"]
    assert chat.run("document.querySelector('.assistant .text > p').textContent") == "g"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("```js\n<b>a</b>\n\n  *b*\n```\nc", "<b>a</b>\n\n  *b*"),
        ("~~~\n```\n~~~", "```"),
        ("````\n```\n````", "```"),
        ("- a\n\n  ```\n  b\n    c\n  ```", "b\n  c"),
        ("```\nstill being written", "still being written"),
        ("```", ""),
    ],
)
def test_a_fence_shows_code_as_it_is(chat: Tab, text: str, code: str) -> None:
    _rendered(chat, text)
    assert chat.run("document.querySelector('.assistant pre').textContent") == code
    assert chat.run("document.querySelectorAll('.assistant pre').length") == 1


@pytest.mark.parametrize(
    "text",
    [
        "<img src=x onerror=alert(1)> <script>alert(2)</script> <style>*{display:none}</style>",
        "<iframe srcdoc='<script>parent.alert(1)</script>'></iframe><svg/onload=alert(1)><base href=//evil.com>",
        "[a](javascript:alert(1)) [b](JaVaScRiPt:alert(1))",
        "[a](data:text/html,<script>alert(1)</script>) [b](vbscript:x) [c](//evil.com) [d](\\\\evil.com)",
        "[a](\x01javascript:alert(1)) [b](java\tscript:alert(1)) [c](blob:https://a.b/c) [d](file:///etc/passwd)",
        '[a](https://b.c" onmouseover="alert(1)) [d](https://e.f/"onclick=alert(1)) <a href="javascript:x">g</a>',
        "![a](https://evil.com/stolen.png) ![b](data:image/svg+xml,<svg/onload=alert(1)>)",
        '```html" onload="alert(1)\n</code></pre><script>alert(1)</script>\n```',
        "| <script>alert(1)</script> |\n|---|\n| <img src=x onerror=alert(1)> |",
        "# <img src=x onerror=alert(1)>\n- <b onclick=alert(1)>x</b>\n> <form action=//evil.com><input></form>",
        "`</code><script>alert(1)</script>` **<u>x</u>** ~~</s><script>~~ [<img src=x>](https://a.b/<img>)",
        "</div></article></main><script>alert(1)</script><!-- ]]> --> &lt;script&gt; &#60;img&#62;",
        "__proto__ constructor **toString** [x](https://__proto__/) \u202egnp.exe \ufeff\ud800 \0",
    ],
)
def test_a_hostile_answer_is_inert(chat: Tab, text: str) -> None:
    chat.run("window.alerted = 0, window.alert = () => { alerted++; }, undefined")
    before = chat.run("performance.getEntriesByType('resource').length")
    _rendered(chat, text)
    parts = "[...document.querySelectorAll('.assistant .text *')]"
    assert {*chat.run(f"{parts}.map(e => e.tagName)")} <= TAGS
    assert {*chat.run(f"{parts}.flatMap(e => e.getAttributeNames())")} <= ATTRIBUTES
    links = chat.run("[...document.querySelectorAll('.assistant a')].map(e => e.protocol)")
    assert {*links} <= {"https:", "mailto:"}
    chat.run("document.querySelectorAll('.assistant .text *:not(a)').forEach(e => e.click()), undefined")
    assert chat.run("performance.getEntriesByType('resource').length") == before
    assert chat.run("alerted") == 0
    assert chat.run("document.querySelectorAll('.turn').length") == 2


_PIECES = (
    *("*", "**", "_", "`", "``", "```", "~~", "~~~", "[", "]", "(", ")", "](", "![", "|", "|---|", "-", ">", "#", "1."),
    *("\\", ":", "/", "http://h.t", "<", "&", "---", "\t", *("\n", "  ", " ", "\n\n", "alpha", "alpha") * 3),
)


def _texts() -> list[str]:
    chosen = random.Random(7)
    return ["".join(chosen.choices(_PIECES, k=chosen.randrange(2, 40))) for _ in range(3000)]


def test_no_word_is_lost_and_nothing_else_appears(chat: Tab) -> None:
    script = (
        "(text, element) => { markdown(element)(text); const parts = [...element.querySelectorAll('*')];"
        " const count = (all) => all.split('alpha').length;"
        f" return parts.every(e => {json.dumps(sorted(TAGS))}.includes(e.tagName))"
        f" && parts.every(e => e.getAttributeNames().every(name => {json.dumps(sorted(ATTRIBUTES))}.includes(name)))"
        " && !element.querySelector('a a') && count(element.innerHTML) >= count(text); }"
    )
    assert _fuzz(chat, script, _texts()) == []


def test_a_text_that_grows_ends_as_the_whole_text(chat: Tab) -> None:
    """However an answer is cut into pieces while it streams."""
    script = (
        "(text, element) => { const whole = document.createElement('div'); markdown(whole)(text);"
        " const write = markdown(element);"
        " for (let end = 0; end <= text.length; end += 1 + end % 3) write(text.slice(0, end));"
        " write(text); return element.innerHTML === whole.innerHTML; }"
    )
    assert _fuzz(chat, script, [*_texts()[:500], SAMPLE]) == []


def test_finished_blocks_stay_while_an_answer_grows(chat: Tab) -> None:
    """So that a selection or a focused button in them stays too."""
    kept = chat.run(
        "(() => { const element = document.createElement('div'), write = markdown(element);"
        " write('```\\na\\n```\\n\\nb'); const first = element.firstChild; write('```\\na\\n```\\n\\nb c\\n\\nd');"
        " return [first === element.firstChild, element.children.length, element.children[1].textContent]; })()"
    )
    assert kept == [True, 3, "b c"]


@pytest.mark.parametrize(
    "text",
    [
        "*a **b ", "a* b** ", "_a *b ", "[", "![", "](", "[a](", "](https://a.b) ", "`a ``b ```c ", "\\", "<", "~~a ",
        "https://", "https://.", "> ", "- ", "* a\n", "1. a\n   ", "\n", "| ", "|-|\n", "|a|\n|-|\n", "```\n", "# ",
        "- - ",        " ", "\t", "-", "a.:;!?", "**", "***a*", "()", "[a](b(c)",
    ],
)  # fmt: skip
def test_hostile_texts_take_linear_time(chat: Tab, text: str) -> None:
    """A quadratic step takes minutes for these; an answer is rendered again with every frame."""
    long = json.dumps(text * (200_000 // len(text)))
    taken_ms = chat.run(
        f"(() => {{ const text = {long}, element = document.createElement('div'), began = performance.now();"
        " markdown(element)(text); return performance.now() - began; })()"
    )
    assert taken_ms < 5_000


def test_a_phone_scrolls_code_and_tables_and_not_the_page(chat: Tab) -> None:
    chat.resize(320, 600)
    show(chat, "x", f"| {'a |' * 30}\n|{'-|' * 30}\n\n```{'j' * 200}\n{'c' * 200}\n```\n\n{'w' * 200} `{'v' * 200}`")
    assert chat.run("document.documentElement.scrollWidth") == 320
    assert chat.run("document.getElementById('log').scrollWidth") == 320
    for selector in ("pre", ".wide"):
        scrolled = (
            f"(e => e.scrollWidth > e.clientWidth && e.tabIndex === 0)(document.querySelector('.assistant {selector}'))"
        )
        assert chat.run(scrolled)


@pytest.mark.parametrize("dark", [False, True])
def test_every_text_has_contrast(chat: Tab, dark: bool) -> None:
    """At least 4.5 to 1, as the accessibility guidelines ask for (WCAG 2.2, 1.4.3)."""
    chat.resize(1000, 700, dark=dark)
    show(chat, "x", f"{SAMPLE}\n[link](https://a.b)\n")
    chat.run("document.querySelector('.edit').click(), document.getElementById('error').textContent = 'x', undefined")
    weak = chat.run(
        "(() => { const numbers = (text) => text.match(/[\\d.]+/g).map(Number);"
        " const light = (c) => { const [r, g, b] = c.map(v => (v /= 255) <= 0.04045 ? v / 12.92"
        " : ((v + 0.055) / 1.055) ** 2.4); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };"
        " const below = (e) => { const c = numbers(getComputedStyle(e).backgroundColor);"
        " return c.length === 3 || c[3] === 1 || !e.parentElement ? c.slice(0, 3) : below(e.parentElement); };"
        " const isText = (e) => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim());"
        " return [...document.body.querySelectorAll('*')].filter(e => e.offsetParent && !e.disabled && isText(e))"
        " .filter(e => { const [a, b] = [light(numbers(getComputedStyle(e).color)), light(below(e))];"
        " return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05) < 4.5; }).map(e => e.outerHTML); })()"
    )
    assert weak == []
