"""Tool calls: every call fits its declared schema, in each family's notation, and none shows in the text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, cast

import jsonschema
import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

import edgekv
from edgekv.errors import UsageError
from edgekv.serve.chat import MessagePictures, template_messages
from edgekv.spec.chat import ChatTemplates
from edgekv.text import Detokenizer, GrammarCompiler, Tools
from edgekv.text.tools import (
    CallFormat,
    ToolCallReader,
    find_format,
    render_with_tools,
    special_tokens,
    tools_grammar,
)
from edgekv.text.tools.declare import declared_messages
from edgekv.text.tools.format import GENERIC
from edgekv.text.tools.reader import JsonReply, _OpenObject
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported

WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "days": {"type": "integer", "minimum": 1, "maximum": 7},
        "unit": {"enum": ["°C", "°F", None]},
        "hours": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["city"],
    "additionalProperties": False,
}
PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"at": {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}},
    "additionalProperties": False,
}
DECLARED = [
    {"type": "function", "function": {"name": "get_weather", "description": "Weather.", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "go-to.place", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop"}},
]
NO_PICTURES = MessagePictures(cast(Any, None))
"""Of messages that are text: it is never asked."""
SCHEMAS = {"get_weather": WEATHER, "go-to.place": PLACE, "stop": {"type": "object", "maxProperties": 0}}
TEMPLATES = {
    "hermes": "{{ tools }} Write <tool_call>\\n{...}\\n</tool_call>",
    "llama3": '{{ tools }} Answer with {"name": function, "parameters": arguments}.',
    "llama3-tag": "{{ tools }} <|python_tag|>",
    "mistral": "[AVAILABLE_TOOLS]{{ tools }}[/AVAILABLE_TOOLS] [TOOL_CALLS][{}]",
    "mistral-spaced": "{{ tools }} [TOOL_CALLS] [{}]",
    "mistral-args": "{{ tools }} [TOOL_CALLS]name[ARGS]{}",
    "gemma": "{{ tools }} <start_function_call>call:name{}<end_function_call> <escape>",
    "json": "{{ messages }}",
    "gemma4": '{{ tools }} <|tool_call>call:name{}<tool_call|> <|"|>',
}
GEMMA4 = """{%- macro written(x) -%}
{%- if x is string %}<|"|>{{ x }}<|"|>
{%- elif x is mapping %}{
{%- for name, each in x | dictsort %}{{ name }}:{{ written(each) }}{{ "" if loop.last else "," }}{% endfor -%} }
{%- elif x is sequence %}[
{%- for each in x %}{{ written(each) }}{{ "" if loop.last else "," }}{% endfor -%} ]
{%- else %}{{ x | tojson }}{% endif %}
{%- endmacro -%}
{{ bos_token }}<|turn>system
{% if enable_thinking %}<|think|>{% endif %}
{%- for message in messages if message.role == "system" %}{{ message.content }}{% endfor %}
{%- for tool in tools or [] %}<|tool>declaration:{{ tool.function.name }}
{{- written({"parameters": tool.function.parameters}) }}<tool|>{% endfor %}<turn|>
{% for message in messages if message.role != "system" %}
{%- if message.role == "tool" %}<|tool_response>response:{{ message.name }}
{{- written({"value": message.content}) }}<tool_response|>
{%- else %}<|turn>{{ "model" if message.role == "assistant" else message.role }}
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<|tool_call>call:{{ call.function.name }}
{{- written(call.function.arguments) }}<tool_call|>{% endfor %}
{%- if not message.tool_calls %}<turn|>
{% endif %}{% endif %}{% endfor %}
{%- if add_generation_prompt and messages[-1].role != "tool" %}<|turn>model
{% endif %}"""
"""Turns, thinking and tools in the form of https://ai.google.dev/gemma/docs/core/prompt-formatting-gemma4"""
QWEN3_5 = """{%- set instructed = messages[0].content if messages[0].role == "system" else "" %}
{%- if tools or instructed %}<|im_start|>system
{% if tools %}<tools>
{%- for tool in tools %}
{{ tool | tojson }}{% endfor %}
</tools>
Answer in the form <tool_call>
<function=name>
<parameter=name>
value
</parameter>
</function>
</tool_call>{% endif %}{{ instructed }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role == "user" %}<|im_start|>user
{{ message.content }}<|im_end|>
{% elif message.role == "assistant" %}<|im_start|>assistant
{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>
<function={{ call.function.name }}>
{% for name, value in call.function.arguments | items %}<parameter={{ name }}>
{{ value if value is string else value | tojson }}
</parameter>
{% endfor %}</function>
</tool_call>{% endfor %}<|im_end|>
{% elif message.role == "tool" %}<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
<think>
{% if enable_thinking is defined and not enable_thinking %}{{ "\\n</think>\\n\\n" }}{% endif %}{% endif %}"""
"""Turns, thinking and tools as Qwen3.5 and Qwen3-Coder write them: a parameter of a call is a line, not JSON."""
MARKERS = (
    *("<tool_call>", "</tool_call>", "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]", "<start_function_call>"),
    *("<end_function_call>", "<escape>", "<|tool_call>", "<tool_call|>", '<|"|>'),
)
VOCAB, EOS = 256 + 1 + len(MARKERS), 256


def _tokenizer(*, special: bool) -> Tokenizer:
    """The 256 bytes, an end token, and the markers of all families, special or not."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.add_tokens([AddedToken(marker, special=special) for marker in MARKERS])
    return tokenizer


def _format(name: str) -> CallFormat:
    return find_format(ChatTemplates(templates={"default": TEMPLATES[name]}))


def _answer(tools: Tools, form: CallFormat, tokenizer: Tokenizer, seed: int) -> tuple[str, ToolCallReader, bool]:
    """A random answer: its text, the reader of its calls, and whether it came to its end."""
    compiler = GrammarCompiler(tokenizer, VOCAB, [EOS])
    special = special_tokens(tokenizer, form.texts, compiler.is_special)
    grammar = tools_grammar(tools, form, special)
    assert grammar is not None
    constraint = compiler.compile(grammar)
    reader, detokenizer, random = ToolCallReader(form, special), Detokenizer(tokenizer), np.random.default_rng(seed)
    text, forced = "", list[int]()
    for _ in range(600):
        forced = forced or constraint.forced()
        allowed = constraint.allowed()
        # Markers, braces and ends more often than one byte of many, so that answers have calls and end.
        likely = [token for token in allowed if token >= 256 or token in _LIKELY]
        chosen = likely if likely and random.random() < 0.5 else allowed
        token = forced.pop(0) if forced else int(random.choice(chosen))
        if token == EOS:
            return text + reader.flush(), reader, True
        constraint.push(token)
        text += reader.push(token, detokenizer.push(token))
        if constraint.is_complete:
            return text + reader.push(-1, detokenizer.flush()) + reader.flush(), reader, True
    return text, reader, False


_LIKELY = frozenset(_tokenizer(special=True).encode('"}],{<[').ids)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("name", TEMPLATES)
def test_every_call_of_a_random_answer_fits_its_schema(name: str, special: bool) -> None:
    tokenizer, form = _tokenizer(special=special), _format(name)
    calls = 0
    for seed, choice in enumerate(("required", "auto", "get_weather", "go-to.place", "stop") * 2):
        tools = Tools.read(DECLARED, choice, parallel=seed < 5)
        text, reader, has_ended = _answer(tools, form, tokenizer, seed)
        for call in reader.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            assert choice in ("auto", "required", call.name)
        if choice != "auto":
            assert text == ""
        if choice == "stop" or (has_ended and choice != "auto"):
            assert len(reader.calls) == 1 or (choice == "required" and tools.parallel)
        calls += len(reader.calls)
    assert calls >= 4


def _push(reader: ToolCallReader, tokenizer: Tokenizer, answer: str) -> str:
    detokenizer = Detokenizer(tokenizer)
    ids: Sequence[int] = tokenizer.encode(answer, add_special_tokens=False).ids
    text = "".join(reader.push(token, detokenizer.push(token)) for token in ids)
    return text + reader.push(-1, detokenizer.flush()) + reader.flush()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize(
    ("name", "answer", "text", "calls"),
    [
        (
            "hermes",
            'Sure é <tool\n<tool_call>\n{"name": "a", "arguments": {"b": "}"}}\n</tool_call> and\n'
            '<tool_call>\n{"name": "c", "arguments": {}}\n</tool_call>',
            "Sure é <tool\n and\n",
            [("a", '{"b": "}"}'), ("c", "{}")],
        ),
        ("hermes", "No <tool_cal", "No <tool_cal", []),
        ("hermes", 'Cut <tool_call>\n{"name": "a", "arg', "Cut ", []),
        ("llama3", '{"name": "a", "parameters": {"b": [1, 2]}}', "", [("a", '{"b": [1, 2]}')]),
        ("llama3", 'See {"name": "a"}', 'See {"name": "a"}', []),
        (
            "mistral",
            '[TOOL_CALLS][{"name": "a", "arguments": {"b": 1}}, {"name": "c", "arguments": {}}]',
            "",
            [("a", '{"b": 1}'), ("c", "{}")],
        ),
        ("mistral-args", '[TOOL_CALLS]a[ARGS]{"b": 1}[TOOL_CALLS]c[ARGS]{}', "", [("a", '{"b": 1}'), ("c", "{}")]),
        (
            "gemma",
            "Now <start_function_call>call:a{city:<escape>Köln, {x}<escape>,days:-3,on:[true,null],at:{x:1.5e3}}"
            "<end_function_call>",
            "Now ",
            [("a", '{"city": "Köln, {x}", "days": -3, "on": [true, null], "at": {"x": 1500.0}}')],
        ),
        ("json", '{"tool_call": {"name": "a", "arguments": {"b": "}}"}}}', "", [("a", '{"b": "}}"}')]),
        ("json", '{"response": "See \\"a\\" \\u00e9\\n{\\"tool_call\\": "}', 'See "a" é\n{"tool_call": ', []),
        ("json", '{"response": "Cut', "Cut", []),
        ("json", '{"tool_call": {"name": "a", "argu', "", []),
        ("gemma4", '<|tool_call>call:a{b:<|"|>"<|"|>}<tool_call|>', "", [("a", r'{"b": "\""}')]),
    ],
)
def test_calls_are_read_from_each_notation(name: str, answer: str, text: str, calls: Any, special: bool) -> None:
    tokenizer, form = _tokenizer(special=special), _format(name)
    reader = ToolCallReader(form, special_tokens(tokenizer, form.texts, lambda token: special))
    assert _push(reader, tokenizer, answer) == text
    assert [(call.name, call.arguments) for call in reader.calls] == calls


def test_a_template_of_gemma_4_has_thinking_calls_and_results_in_its_notation() -> None:
    """Arguments come as a text of JSON, as OpenAI's API has them, and go to the template as an object."""
    templates = ChatTemplates(templates={"default": GEMMA4}, tokens={"bos_token": "<bos>"})
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = Tools.read([{"type": "function", "function": function}])
    call = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Ulm", "on": [1, true]}'},
    }
    asked = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Rain?"}]
    answered = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "no"},
    ]
    messages = template_messages([*asked, *answered], NO_PICTURES, has_developer=False)
    assert render_with_tools(templates, messages, tools, enable_thinking=True) == (
        "<bos><|turn>system\n<|think|>Be brief.<|tool>declaration:weather"
        '{parameters:{properties:{city:{type:<|"|>string<|"|>}},type:<|"|>object<|"|>}}<tool|><turn|>\n'
        "<|turn>user\nRain?<turn|>\n<|turn>model\n"
        '<|tool_call>call:weather{city:<|"|>Ulm<|"|>,on:[1,true]}<tool_call|>'
        '<|tool_response>response:weather{value:<|"|>no<|"|>}<tool_response|>'
    )
    plain = render_with_tools(templates, asked, None)
    assert plain == "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nRain?<turn|>\n<|turn>model\n"
    assert find_format(templates) == _format("gemma4")


def test_a_template_of_qwen3_5_has_thinking_and_its_calls_are_asked_for_as_json() -> None:
    """No grammar binds its notation of calls; it still writes those of a conversation without tools."""
    templates = ChatTemplates(templates={"default": QWEN3_5}, tokens={})
    function = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
    tools = Tools.read([{"type": "function", "function": function}])
    called = {"name": "weather", "arguments": '{"city": "Ulm", "days": [1, 2]}'}
    messages = template_messages(
        [
            {"role": "user", "content": "Rain?"},
            {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "type": "function", "function": called}]},
            {"role": "tool", "tool_call_id": "1", "name": "weather", "content": "no"},
        ],
        NO_PICTURES,
        has_developer=False,
    )
    answer = "<|im_start|>assistant\n<think>\n"
    assert render_with_tools(templates, messages, None) == (
        "<|im_start|>user\nRain?<|im_end|>\n<|im_start|>assistant\n<tool_call>\n<function=weather>\n"
        "<parameter=city>\nUlm\n</parameter>\n<parameter=days>\n[1, 2]\n</parameter>\n</function>\n</tool_call>"
        f"<|im_end|>\n<|im_start|>user\n<tool_response>\nno\n</tool_response><|im_end|>\n{answer}"
    )
    plain = render_with_tools(templates, messages[:1], None, enable_thinking=False)
    assert plain == f"<|im_start|>user\nRain?<|im_end|>\n{answer}\n</think>\n\n"
    assert find_format(templates) == GENERIC
    asked = render_with_tools(templates, messages, tools, enable_thinking=True)
    assert '{"tool_call": {"name": "weather", "arguments": {"city": "Ulm", "days": [1, 2]}}}<|im_end|>' in asked
    assert "<function=" not in asked and asked.endswith(answer)


def test_schemas_that_refer_to_themselves_stay_right() -> None:
    tree = {
        "type": "object",
        "properties": {"left": {"anyOf": [{"type": "null"}, {"$ref": "#"}]}, "name": {"$ref": "#/$defs/name"}},
        "required": ["left", "name"],
        "additionalProperties": False,
        "$defs": {"name": {"type": "string", "maxLength": 2}},
    }
    tools = Tools.read([{"type": "function", "function": {"name": "plant", "parameters": tree}}], "required")
    readers = [_answer(tools, _format("hermes"), _tokenizer(special=True), seed)[1] for seed in range(5)]
    calls = [call for reader in readers for call in reader.calls]
    for call in calls:
        jsonschema.validate(json.loads(call.arguments), tree)
    assert calls


@pytest.mark.parametrize(
    ("change", "choice", "reason"),
    [
        ({"type": "web_search"}, "auto", "tools[0]: got another kind of tool"),
        ({"function": {"name": "a b"}}, "auto", "tools[0].function.name"),
        ({"function": {"name": "a", "parameters": []}}, "auto", "tools[0].function.parameters"),
        ({"function": {"name": "a", "parameters": {"type": "string"}}}, "auto", "a schema of an object"),
        ({"function": {"name": "a", "parameters": {"multipleOf": 10**9}}}, "auto", "tools[0].function.parameters"),
        ({"function": {"name": "stop"}}, "auto", "stop twice"),
        ({}, "never", "tool_choice: got 'never'"),
    ],
)
def test_malformed_tools_are_refused_by_name(change: dict[str, Any], choice: str, reason: str) -> None:
    with pytest.raises(UsageError) as refused:
        Tools.read([{**DECLARED[0], **change}, *DECLARED[1:]], choice)
    assert reason in str(refused.value)


def test_templates_without_known_markers_have_a_format_of_json() -> None:
    for source in ("{{ messages }}", "{{ tools }} <tool_call><function=name>"):
        assert find_format(ChatTemplates(templates={"default": source})) is GENERIC


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


@given(TEXTS, st.booleans(), st.lists(st.integers(0, 60), max_size=8))
def test_a_reply_of_json_is_read_piece_by_piece(text: str, is_ascii: bool, cuts: list[int]) -> None:
    """Whatever its escapes are and wherever its tokens end."""
    raw = f"{GENERIC.reply}{json.dumps(text, ensure_ascii=is_ascii)}}}"
    places = sorted({0, len(raw), *(cut for cut in cuts if cut < len(raw))})
    reply = JsonReply(GENERIC.reply)
    assert "".join(reply.push(raw[at:end]) for at, end in pairwise(places)) == text


def test_half_a_surrogate_pair_is_a_replacement_character() -> None:
    for escaped, text in (
        (r"\ud83dx", "\ufffdx"),
        (r"\udc00", "\ufffd"),
        (r"\\ud83d", r"\ud83d"),
        (r"\ud83d\ud83d\ude00", "\ufffd\U0001f600"),
    ):
        reply = JsonReply(GENERIC.reply)
        assert "".join(map(reply.push, f'{GENERIC.reply}"{escaped}"}}')) == text


_VALUES = st.recursive(
    st.text(st.sampled_from('ab"\\\\{}[]\u00e9'), max_size=6) | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=3), _VALUES, max_size=3), st.lists(st.integers(1, 4), min_size=1))
def test_an_object_is_read_once_it_has_ended(value: dict[str, Any], cuts: list[int]) -> None:
    text, found = f" {json.dumps(value, ensure_ascii=False)}", _OpenObject("")
    for end in accumulate(cuts):
        assert found.has_ended(text[:end]) == (end >= len(text))
    assert found.has_ended(text) and found.has_ended(text + '}"{')


@pytest.mark.parametrize("cut", [1, 2, 5])
def test_an_object_of_gemma_is_read_once_it_has_ended(cut: int) -> None:
    text, found = 'f{a:<escape>{ "}<escape>,b:{c:[1]},d:<escape><escape>}', _OpenObject("<escape>")
    assert [found.has_ended(text[:end]) for end in range(cut, len(text), cut)] == [False] * ((len(text) - 1) // cut)
    assert found.has_ended(text)


PLAIN = ChatTemplates(templates={"default": "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"})


def _called(arguments: object) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": arguments}}],
    }


CALLED = _called('{"a": 1}')
RESULT = {"role": "tool", "tool_call_id": "1", "content": "7"}


def test_messages_declare_tools_that_the_template_cannot() -> None:
    tools = Tools.read(DECLARED)
    told, declared = declared_messages(PLAIN, [{"role": "system", "content": "Be brief."}, ASK[0]], tools)
    assert declared is None and told[1] == ASK[0]
    system = told[0]["content"]
    assert system.startswith("Be brief.\n\nYou can call these functions:\n") and '"response"' in system
    assert all(json.dumps(each["function"], ensure_ascii=False) in system for each in DECLARED)
    asked, _ = declared_messages(PLAIN, ASK, Tools.read(DECLARED, "stop"))
    content = asked[0]["content"]
    assert content.endswith("\n\nWeather?") and '"stop"' in content and "go-to.place" not in content
    assert "response" not in content
    parts = [{"type": "text", "text": "Weather?"}]
    assert declared_messages(PLAIN, [{"role": "user", "content": parts}], tools)[0][0]["content"][1:] == parts


def test_messages_show_earlier_calls_and_results() -> None:
    """As turns of the user and the model, which any template takes."""
    turns = [ASK[0], CALLED, RESULT, {"role": "assistant", "content": "Seven."}, ASK[0], CALLED, RESULT, RESULT, ASK[0]]
    call = '{"tool_call": {"name": "f", "arguments": {"a": 1}}}'
    result = '{"tool_result": {"name": "f", "content": "7"}}'
    plain, declared = declared_messages(PLAIN, turns, None)
    assert declared is None and [each["role"] for each in plain] == ["user", "assistant"] * 3 + ["user"]
    assert [each["content"] for each in plain] == [
        *("Weather?", call, result, "Seven.", "Weather?", call, f"{result}\n\n{result}\n\nWeather?")
    ]
    told, _ = declared_messages(PLAIN, turns, Tools.read(DECLARED))
    assert told[3]["content"] == '{"response": "Seven."}' and told[1]["content"] == call
    native = ChatTemplates(templates={"default": TEMPLATES["hermes"]})
    tools = Tools.read(DECLARED)
    whole = [_called({"a": 1}) if each is CALLED else each for each in turns]
    assert declared_messages(native, turns, tools) == (whole, tools.declarations)
    unknown = ChatTemplates(templates={"default": "{{ tools }} <tool_call><function=name>"})
    assert declared_messages(unknown, turns, None) == (whole, None)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        (" ", {}),
        ("null", {}),
        (None, {}),
        ('{"a": ', {"arguments": '{"a": '}),
        ("[1]", {"arguments": "[1]"}),
        ("3", {"arguments": "3"}),
        ([1], {"arguments": [1]}),
        ("[" * 100_000, {"arguments": "[" * 100_000}),
    ],
)
def test_arguments_of_earlier_calls_are_objects_whatever_the_model_wrote(arguments: object, told: object) -> None:
    """Clients send a call that was cut off again with every later turn."""
    source = (
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{% for k, v in c.function.arguments"
        " | items %}({{ k }}={{ v }}){% endfor %}<tool_call>{{ c.function.arguments | tojson }}{% endfor %}{% endfor %}"
    )
    templates = ChatTemplates(templates={"default": source})
    text = render_with_tools(templates, [ASK[0], _called(arguments), RESULT], None)
    assert text.endswith(f"<tool_call>{json.dumps(told)}7") and text.startswith("Weather?") and "None" not in text


@pytest.mark.parametrize("call", [3, {}, {"function": None}, {"id": ["x"], "function": {"name": {}}}])
def test_odd_calls_of_earlier_turns_are_told_as_they_are(call: object) -> None:
    told, _ = declared_messages(PLAIN, [*ASK, {"role": "assistant", "tool_calls": [call]}], Tools.read(DECLARED))
    assert told[1]["content"].startswith('{"tool_call": ')


def test_what_gemmas_notation_cannot_bind_is_refused() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "pattern": "x+"}}}
    tools = Tools.read([{"type": "function", "function": {"name": "f", "parameters": schema}}])
    found = r"tools\[0\].function.parameters.properties.a: got the keyword pattern"
    with pytest.raises(UsageError, match=found):
        tools_grammar(tools, _format("gemma"), {})


@pytest.mark.parametrize(
    ("schema", "field"),
    [
        ({"enum": 5}, "enum: got 5"),
        ({"enum": []}, r"enum: got \[\]"),
        ({"enum": [["x"]]}, r"enum\[0\]: got"),
        ({"anyOf": {"type": "string"}}, "anyOf: got"),
        ({"oneOf": [5]}, r"oneOf\[0\]: got 5; expected a schema"),
        ({"type": 5}, "type: got 5"),
        ({"type": ["string", 5]}, "type: got"),
        ({"type": "text"}, "type: got text"),
        ({"type": "object", "properties": [1]}, "properties: got"),
        ({"type": "object", "properties": {"b": 1}}, "properties.b: got 1"),
        ({"type": "object", "properties": {"b:c": {}}}, "properties: got 'b:c'"),
        ({"type": "object", "required": 5}, "required: got 5"),
        ({"type": "object", "required": [5]}, "required: got"),
        ({"type": "object", "required": ["c"], "properties": {"b": {}}}, "required: got 'c'"),
        ({"type": "array", "items": [{}]}, "items: got"),
        ({"type": "array", "minItems": "2"}, "minItems: got 2"),
        ({"type": "array", "minItems": 3, "maxItems": 2}, "maxItems: got 2; expected at least 3"),
        ({"minLength": -1}, "minLength: got -1"),
        ({"maxLength": 1e3}, "maxLength: got 1000.0"),
        ({"maxLength": True}, "maxLength: got True"),
        ({"maxLength": 10**40}, "maxLength: got 1000"),
    ],
)
@pytest.mark.parametrize("name", ["gemma", "gemma4"])
def test_malformed_schemas_are_refused_by_name(schema: dict[str, Any], field: str, name: str) -> None:
    parameters = {"type": "object", "properties": {"a": schema}}
    declared = [{"type": "function", "function": {"name": each, "parameters": {}}} for each in "ef"]
    declared[1]["function"] = {"name": "f", "parameters": parameters}
    with pytest.raises(UsageError, match=rf"^tools\[1\].function.parameters.properties.a.{field}"):
        tools_grammar(Tools.read(declared, "f"), _format(name), {})


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_grammar_is_linear_in_the_schema(name: str) -> None:
    def size(properties: int, is_required: bool) -> int:
        names = [f"p{number:04}" for number in range(properties)]
        schema = {"type": "object", "properties": {each: {"type": ["string", "null"]} for each in names}}
        schema["required"] = names[: properties // 2 if is_required else 0]
        function = {"name": "f", "parameters": schema}
        grammar = tools_grammar(Tools.read([{"type": "function", "function": function}]), _format(name), {})
        assert grammar is not None
        return len(grammar.text)

    for is_required in (False, True):
        assert size(800, is_required) <= 2.1 * size(400, is_required)


def test_equal_types_are_written_once() -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(20):
        schema = {"type": ["object", "object", "object"], "properties": {"a": schema}}
    function = {"name": "f", "parameters": {"type": "object", "properties": {"a": schema}}}
    grammar = tools_grammar(Tools.read([{"type": "function", "function": function}]), _format("gemma"), {})
    assert grammar is not None and len(grammar.text) < 5000


TEMPLATE = (
    "{% for each in tools or [] %}{{ each | tojson }}{% endfor %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% endfor %}{# <tool_call> #}<assistant>"
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> edgekv.Model:
    """A random model whose template has Hermes' markers."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("tools") / "checkpoint", {"max_position_embeddings": 1024})
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return edgekv.load(exported(checkpoint, export_options(context=1024, ar=(1, 8, 32))), threads=1)


ASK = [{"role": "user", "content": "Weather?"}]


def test_a_call_is_rendered_bound_and_read(model: edgekv.Model) -> None:
    tools = Tools.read(DECLARED, "get_weather")
    generation = model.generate(messages=ASK, tools=tools, max_new_tokens=300, temperature=1, seed=1)
    tokens = list(generation)
    (call,) = generation.tool_calls
    assert call.name == "get_weather"
    jsonschema.validate(json.loads(call.arguments), WEATHER)
    assert "".join(token.text for token in tokens) == ""
    assert [token.tool_calls for token in tokens if token.tool_calls] == [(call,)]
    assert generation.stats.stop_reason == "grammar"
    assert '"get_weather"' in model.tokenizer.decode(list(generation.prompt))
    stats = generation.stats
    assert stats.generated_tokens / stats.times.decode_steps >= 1.8


def test_an_answer_without_a_call_is_the_same_as_without_tools(model: edgekv.Model) -> None:
    prompt = model.encode("a")
    free = [token.text for token in model.generate(prompt, max_new_tokens=20)]
    bound = [token.text for token in model.generate(prompt, max_new_tokens=20, tools=DECLARED)]
    none = [token.text for token in model.generate(prompt, max_new_tokens=20, tools=Tools.read(DECLARED, "none"))]
    assert "".join(free) == "".join(none)
    assert "<tool_call>" not in "".join(bound)


def test_tools_are_refused_beside_a_grammar_and_without_markers(model: edgekv.Model, bundle: Path) -> None:
    with pytest.raises(UsageError, match="one together with tools"):
        model.generate("a", tools=DECLARED, grammar=edgekv.Grammar.json_object())
    with pytest.raises(UsageError, match=r"tools\[0\].function.parameters: got Unimplemented keys"):
        parameters = {"type": "object", "properties": {"a": {"not": {}}}}
        model.generate("a", tools=[{"type": "function", "function": {"name": "f", "parameters": parameters}}])
    with edgekv.load(bundle, threads=1) as plain, pytest.raises(UsageError, match="chat template"):
        plain.generate("a", tools=DECLARED)
