"""Chat templates: what they render, and what they must not be able to do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from edgekv.errors import UsageError
from edgekv.machine.child import kill_children
from edgekv.spec import template_sandbox as sandbox
from edgekv.spec.chat import ChatTemplates

CHATML = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nBe brief.<|im_end|>\n' }}{% endif %}"
    "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
STRICT = (
    "{{ bos_token }}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}[{{ m.role }}]{{ m.content | trim }}{% endfor %}"
)
USER = {"role": "user", "content": "Hello"}
GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "golden" / "texts.json").read_text())


def templates(source: str, **tokens: str) -> ChatTemplates:
    return ChatTemplates(templates={"default": source}, tokens=tokens)


def test_a_conversation_is_rendered_as_the_model_was_trained():
    assert templates(CHATML).render([USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
    )
    said = [{"role": "system", "content": "S"}, USER, {"role": "assistant", "content": "Hi"}]
    rendered = templates(CHATML).render(said, add_generation_prompt=False)
    assert rendered.count("<|im_start|>") == 3 and rendered.endswith("Hi<|im_end|>\n")


def test_special_tokens_and_further_variables_reach_the_template():
    assert templates(STRICT, bos_token="<s>").render([USER]) == "<s>[user]Hello"
    assert (
        templates("{{ mood }}{{ tools | tojson }}").render([USER], tools=[{"name": "ü"}], mood="x")
        == 'x[{"name": "ü"}]'
    )


def test_tools_choose_their_own_template():
    both = ChatTemplates(templates={"default": "plain", "tool_use": "tools"})
    assert (both.render([USER]), both.render([USER], tools=[{}]), both.render([USER], name="tool_use")) == (
        "plain",
        "tools",
        "tools",
    )


def _doubled(step: str) -> str:
    return "{% set x = 'aaaaaaaa' %}" + f"{{% {step} %}}" * 40 + "{{ x }}"


def _nested(loops: int) -> str:
    return "{% for i in messages %}" * loops + "{% endfor %}" * loops


@pytest.mark.parametrize(
    ("source", "refusal"),
    [
        ("{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}", "iterations"),
        ("{% set x = 'a' * 10**9 %}", "a product of more than 16,777,216 elements"),
        ("{{ 10**9 * 'ab' }}", "a product of more than"),
        ("{% set x = [0] * 10**7 %}", "a product of more than 1,000,000 elements"),
        ("{% set ns = namespace(x='a' * 10**7) %}" + "{% set ns.x = ns.x * 100 %}", "a product of more than"),
        ("{% generation %}{% set x = 'a' * 10**9 %}{% endgeneration %}", "a product of more than"),
        ("{{ ('%' ~ 10**9 ~ 'd') | format(1) }}", "MemoryError|characters"),
        ("{% generation %}", "generation|Unexpected end"),
        ("{{ 9 ** 999999999 }}", "a power that is too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(60000) %}{{ messages[0].content }}{% endfor %}", "characters"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|not safely callable|unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ '%1500000000d' % 1 }}", "MemoryError"),
        (_nested(60), "SyntaxError|RecursionError|too many"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{% break %}", "outside"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_refused(source: str, refusal: str):
    with pytest.raises(UsageError, match=refusal):
        templates(source).render([{"role": "user", "content": "x" * 1000}])


def test_a_template_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "_LIMITS", replace(sandbox._LIMITS, timeout_s=1.0))
    kill_children()  # one that runs keeps its limit
    with pytest.raises(UsageError, match=r"no answer within 1 s|MemoryError"):
        templates("{{ lipsum(n=10**7) }}").render([USER])


def test_each_rendering_has_the_limits_of_its_own():
    """Compiled templates are kept, the iterations that they have used are not."""
    source = "{% for i in range(7) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    for content in ("one", "two"):
        assert templates(source).render([{"role": "user", "content": content}]) == content


def test_a_template_that_ends_the_child_spares_the_next_rendering():
    with pytest.raises(UsageError, match="MemoryError"):
        templates(_doubled("set x = x ~ x")).render([USER])
    assert templates(STRICT, bos_token="<s>").render([USER]) == "<s>[user]Hello"


def test_a_child_that_was_killed_while_idle_is_replaced():
    assert templates("{{ 1 }}").render([USER]) == "1"
    kill_children()
    assert templates("{{ 2 }}").render([USER]) == "2"


def test_nested_too_deep_is_refused():
    content: list[object] = []
    for _ in range(100_000):  # the limit differs between versions of Python
        content = [content]
    with pytest.raises(UsageError, match="recursion"):
        templates(STRICT).render([{"role": "user", "content": content}])


def test_a_variable_that_json_does_not_have_is_refused():
    with pytest.raises(UsageError, match="a set, which JSON does not have"):
        templates(STRICT).render([USER], mood={1})


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [
        ([], "messages: got none"),
        (["Hello"], r"messages\[0\]: got str; expected an object"),
        ([{"role": "king", "content": "x"}], r"messages\[0\].role: got 'king'"),
        ([USER, {"role": "user", "content": 3}], r"messages\[1\].content: got int"),
        ([{"role": "user", "content": None}], r"messages\[0\].content: got NoneType; expected text"),
        ([USER, {"role": "assistant", "function_call": {"name": "f"}}], r"messages\[1\].function_call: got a value"),
        ([USER, USER], "roles must alternate"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages, refusal):
    with pytest.raises(UsageError, match=refusal):
        templates(STRICT, bos_token="").render(messages)


@pytest.mark.parametrize("number", range(len(GOLDEN["templates"])))
def test_a_template_renders_as_in_transformers(number: int):
    """`tests/golden/texts.py` renders the same; None where transformers fails."""
    source, text = GOLDEN["templates"][number]
    try:
        found = templates(source, **GOLDEN["named"]).render(GOLDEN["messages"], tools=GOLDEN["tools"])
    except UsageError:
        found = None
    assert found == text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}",
        "{% for m in messages %}{{ m['role'] + ':' + m['content'] + ';' }}{% endfor %}",
        "{% for m in messages %}{{ m.role }}:{{ m.content.strip() }};{% endfor %}",
    ],
)
def test_a_content_that_is_null_is_no_text(source: str):
    calls = [{"function": {"name": "f", "arguments": {}}}]
    said = [
        USER,
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "content": None},
        {"role": "assistant", "reasoning_content": "hm", "content": None},
    ]
    assert templates(source).render(said) == "user:Hello;assistant:;tool:;assistant:;"


def test_any_name_may_be_a_variable_of_the_template():
    found = templates("{{ templates }}{{ self }}{{ source }}").render([USER], templates=1, source=3)
    assert found.startswith("1") and found.endswith("3")
