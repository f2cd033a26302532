"""Chat templates: what they render, and what they must not be able to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edgekv import sandbox
from edgekv.child import kill_children
from edgekv.errors import CheckpointError, UsageError
from edgekv.spec.chat import ChatTemplates, read_bundle_templates, read_checkpoint_templates, write_templates

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
        ("{% set x = 'a' * 1000000000 %}", "multiplies a text"),
        ("{{ 9 ** 999999999 }}", "a power that is too large"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(60000) %}{{ messages[0].content }}{% endfor %}", "characters"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError|unsafe"),
        ("{{ messages.append(1) }}", "SecurityError|not safely callable|unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages[0].nothing.more }}", "UndefinedError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ '%1500000000d' % 1 }}", "MemoryError"),
        (_doubled("set x = x ~ x"), "MemoryError"),
        (_nested(60), "SyntaxError|RecursionError|too many"),
        ("{{ " + "9" * 5000 + " }}", "4300 digits"),
        ("{% break %}", "outside"),
    ],
)
def test_a_template_that_fails_or_never_ends_is_refused(source: str, refusal: str):
    with pytest.raises(UsageError, match=refusal):
        templates(source).render([{"role": "user", "content": "x" * 1000}])


def test_a_template_that_takes_long_is_ended(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sandbox, "LIMIT_S", 1.0)
    kill_children()  # one that runs keeps its limit
    with pytest.raises(UsageError, match=r"no answer within 1 s|MemoryError"):
        templates("{{ lipsum(n=10**7) }}").render([USER])


def test_each_rendering_has_the_limits_of_its_own():
    """Compiled templates are kept, the iterations that they have used are not."""
    source = "{% for i in range(7) %}{% for j in range(100000) %}{% endfor %}{% endfor %}{{ messages[0].content }}"
    for content in ("one", "two"):
        assert templates(source).render([{"role": "user", "content": content}]) == content


def test_a_template_that_ends_the_child_spares_the_next_rendering():
    for _ in range(2):
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
        ([USER, USER], "roles must alternate"),
    ],
)
def test_messages_that_cannot_be_rendered_are_refused(messages, refusal):
    with pytest.raises(UsageError, match=refusal):
        templates(STRICT, bos_token="").render(messages)


def test_the_file_of_its_own_comes_before_the_configuration(tmp_path: Path):
    config = {"chat_template": "old", "bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_checkpoint_templates(tmp_path)
    assert found == ChatTemplates(templates={"default": "old"}, tokens={"bos_token": "<s>", "eos_token": "</s>"})
    (tmp_path / "chat_template.jinja").write_text("new")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("rag")
    found = read_checkpoint_templates(tmp_path)
    assert found is not None and found.templates == {"default": "new", "rag": "rag"}
    write_templates(found, tmp_path)
    assert read_bundle_templates(tmp_path) == found


def test_several_templates_in_the_configuration(tmp_path: Path):
    entries = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entries}))
    found = read_checkpoint_templates(tmp_path)
    assert found is not None and found.templates == {"default": "a", "tool_use": "b"}


def test_a_folder_without_a_template_has_none(tmp_path: Path):
    assert read_checkpoint_templates(tmp_path) is None and read_bundle_templates(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "refusal"),
    [
        ('{"chat_template": "{% for %}"}', "template default: got TemplateSyntaxError"),
        (json.dumps({"chat_template": _nested(60)}), "template default: got "),
        (json.dumps({"chat_template": "{{ " + "9" * 5000 + " }}"}), "template default: got .*4300 digits"),
        (json.dumps({"chat_template": "{% break %}"}), "template default: got .*outside"),
        ('{"chat_template": 3}', "chat_template: got int"),
        ('{"chat_template": [{"name": "x"}]}', "chat_template: got list"),
        ("[1]", "expected a JSON object"),
        ("[" * 100000, "expected a JSON object"),
        ('{"chat_template": "' + "x" * (1 << 21) + '"}', "2,097,152 characters"),
    ],
)
def test_broken_templates_are_refused_at_export(tmp_path: Path, content: str, refusal: str):
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(CheckpointError, match=refusal):
        read_checkpoint_templates(tmp_path)
