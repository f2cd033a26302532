"""Fields of other servers: each is honoured, refused by name, or known to change no answer."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai import OpenAI
from openai.types import completion_create_params as completions
from openai.types.chat import completion_create_params as chat
from openai.types.responses import response_create_params as responses

import edgekv
from edgekv.serve.chat import ChatRequest
from edgekv.serve.completions import CompletionRequest
from edgekv.serve.errors import ApiError
from edgekv.serve.fields import CHANGES_NOTHING, UNSUPPORTED, check_fields
from edgekv.serve.generation import SamplingFields, _elsewhere
from edgekv.serve.responses import ResponsesRequest
from tests.support.serving import NAME, Server, served, talking_bundle

# As the documents and the sources of the servers list them (vLLM 0.11 to 0.15, SGLang 0.5, llama.cpp of 2026), beside
# those of OpenAI, which its client has.
VLLM = """
    use_beam_search top_k min_p repetition_penalty watermarking length_penalty stop_token_ids include_stop_str_in_output
    ignore_eos min_tokens skip_special_tokens spaces_between_special_tokens truncate_prompt_tokens truncation_side
    prompt_logprobs logprob_token_ids allowed_token_ids bad_words echo add_generation_prompt continue_final_message
    add_special_tokens documents chat_template chat_template_kwargs media_io_kwargs mm_processor_kwargs
    structured_outputs guided_json guided_regex guided_choice guided_grammar guided_decoding_backend
    guided_whitespace_pattern structural_tag priority request_id session_id return_tokens_as_token_ids return_token_ids
    routed_experts_prompt_start return_token_offsets return_prompt_text return_mm_kwargs cache_salt kv_transfer_params
    ec_transfer_params vllm_xargs repetition_detection thinking_token_budget stream_interval include_reasoning
    reasoning_effort best_of logits_processors prompt_embeds enable_response_messages previous_input_messages
    previous_response
"""
SGLANG = """
    return_hidden_states return_routed_experts routed_experts_start_len return_cached_tokens_details
    return_prompt_token_ids return_meta_info return_sampling_mask task regex ebnf json_schema stop_regex no_stop_trim
    lora_path session_params separate_reasoning stream_reasoning max_dynamic_patch min_dynamic_patch use_audio_in_video
    custom_logit_processor custom_params input_ids rid extra_key bootstrap_host bootstrap_port bootstrap_room
    routed_dp_rank disagg_prefill_dp_rank data_parallel_rank custom_labels reasoning
"""
LLAMA_CPP = """
    dynatemp_range dynatemp_exponent n_predict n_indent n_keep n_cmpl n_discard typical_p repeat_penalty repeat_last_n
    dry_multiplier dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers xtc_probability xtc_threshold
    mirostat mirostat_tau mirostat_eta grammar grammar_lazy grammar_triggers preserved_tokens n_probs min_keep
    t_max_predict_ms t_max_prompt_ms id_slot cache_prompt n_cache_reuse return_tokens samplers timings_per_token
    return_progress post_sampling_probs response_fields lora multimodal_data reasoning_format thinking_forced_open
    parse_tool_calls top_n_sigma adaptive_target adaptive_decay backend_sampling sse_ping_interval reasoning_budget
"""
OTHERS = """
    ttl draft_model keep_alive options format think raw template system context images num_predict
    enable_thinking thinking thinking_budget provider route transforms plugins models top_a verbosity random_seed
    safe_prompt do_sample typical watermark truncate return_full_text top_n_tokens decoder_input_details details
    adapter_id stopping_strings ban_eos_token tfs_z epsilon_cutoff eta_cutoff smoothing_factor smoothing_curve
    penalty_alpha no_repeat_ngram_size guidance_scale negative_prompt num_beams early_stopping min_length max_new_tokens
    truncate_sequence
"""
"""Of LM Studio, Ollama, DashScope, DeepSeek, OpenRouter, Mistral, TGI and text-generation-webui."""
KINDS: tuple[tuple[type[SamplingFields], Any], ...] = (
    (ChatRequest, chat.CompletionCreateParamsBase),
    (CompletionRequest, completions.CompletionCreateParamsBase),
    (ResponsesRequest, responses.ResponseCreateParamsBase),
)


@pytest.mark.parametrize(("kind", "openais"), KINDS)
def test_every_field_of_other_servers_is_known(kind: type[SamplingFields], openais: Any):
    own, elsewhere = set(kind.__struct_fields__), _elsewhere(kind)
    unknown = [
        name
        for name in (*openais.__annotations__, *f"{VLLM}{SGLANG}{LLAMA_CPP}{OTHERS}".split())
        if not (name in own or name in kind.unsupported or name in UNSUPPORTED or name in elsewhere)
        and name not in CHANGES_NOTHING
    ]
    assert unknown == []
    assert not CHANGES_NOTHING & UNSUPPORTED.keys()


def _checked(kind: type[SamplingFields], **fields: Any) -> None:
    check_fields(msgspec.json.encode(fields), kind.__struct_fields__, _elsewhere(kind), kind.unsupported)


@pytest.mark.parametrize("kind", [kind for kind, _ in KINDS])
def test_a_field_that_would_change_the_answer_is_refused_unless_its_value_asks_for_nothing(kind: type[SamplingFields]):
    own = kind.__struct_fields__
    refused = {name: found for name, found in {**UNSUPPORTED, **kind.unsupported}.items() if name not in own}
    assert len(refused) > 100
    for name, found in refused.items():
        with pytest.raises(ApiError, match=re.escape(f"{name}: got ")) as error:
            _checked(kind, **{name: 0.375})
        assert (error.value.status, error.value.param) == (400, name) and str(error.value).endswith(found.fix)
        for neutral in (None, *found.neutral):
            _checked(kind, **{name: neutral})
    for name in _elsewhere(kind).keys() - CHANGES_NOTHING - refused.keys():
        with pytest.raises(ApiError, match=f"{name}: got a text; expected .* It is a field of /v1/"):
            _checked(kind, **{name: "x"})
    _checked(kind, **dict.fromkeys(CHANGES_NOTHING, "x"), something_new=[1])


# What is honoured.

USER: list[Any] = [{"role": "user", "content": "Hello"}]
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"c": {"enum": ["Oslo", "Rome"]}},
    "required": ["c"],
    "additionalProperties": False,
}
CITIES = {'{"c": "Oslo"}', '{"c": "Rome"}', "Oslo", "Rome"}
GBNF = 'root ::= city\ncity ::= "Oslo" | "Rome"'
NAMED = {"name": "x", "schema": SCHEMA}


@pytest.fixture(scope="module")
def server(talking: Path) -> Iterator[Server]:
    with served(talking) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> OpenAI:
    return server.client()


@pytest.fixture(scope="module")
def alone(talking: Path) -> Iterator[edgekv.Model]:
    """The same bundle without a server."""
    with edgekv.load(talking, threads=1) as model:
        yield model


CONSTRAINTS: list[dict[str, Any]] = [
    {"guided_json": SCHEMA},
    {"guided_json": json.dumps(SCHEMA)},
    {"json_schema": SCHEMA},
    {"structured_outputs": {"json": SCHEMA}},
    {"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}},
    {"guided_choice": ["Oslo", "Rome"]},
    {"structured_outputs": {"choice": ["Oslo", "Rome"]}},
    {"guided_regex": "Oslo|Rome"},
    {"regex": "(Oslo|Rome)"},
    {"structured_outputs": {"regex": "Oslo|Rome"}},
    {"grammar": GBNF},
    {"ebnf": GBNF},
    {"guided_grammar": 'start: "Oslo" | "Rome"'},
    {"structured_outputs": {"grammar": GBNF}},
]
FORMATS: list[dict[str, Any]] = [
    {"type": "json_schema", "json_schema": NAMED},
    {"type": "json_schema", "schema": SCHEMA},
    {"type": "json_object", "schema": SCHEMA},
]


@pytest.mark.parametrize("form", [*CONSTRAINTS, *({"response_format": each} for each in FORMATS)], ids=str)
def test_a_constraint_in_the_words_of_another_server_holds(client: OpenAI, form: dict[str, Any]):
    """On every path, and in an answer that is drawn."""
    drawn: Any = {"model": NAME, "temperature": 1.0}
    answer = client.chat.completions.create(**drawn, messages=USER, max_tokens=60, extra_body=form)
    assert answer.choices[0].message.content in CITIES and answer.choices[0].finish_reason == "stop"
    completion = client.completions.create(**drawn, prompt=["Once", "Twice"], max_tokens=60, n=2, extra_body=form)
    assert {choice.text for choice in completion.choices} <= CITIES
    if "response_format" not in form:
        response = client.responses.create(**drawn, input="Hello", max_output_tokens=60, extra_body=form)
        assert response.output_text in CITIES


def test_any_json_and_odd_texts_are_constraints_too(client: OpenAI):
    for form in (
        {"structured_outputs": {"json_object": True}},
        {"json_schema": {"type": "object", "maxProperties": 0}},
    ):
        answer = client.chat.completions.create(model=NAME, messages=USER, max_tokens=60, extra_body=form)
        assert (answer.choices[0].message.content or "").startswith("{")
    odd = ['a|b "c" (d) [e] \\n', "\n\u00e9\u4e2d\U0001f600", "x" * 50]
    for text in odd:
        answer = client.chat.completions.create(
            model=NAME, messages=USER, max_tokens=200, extra_body={"guided_choice": [text]}
        )
        assert answer.choices[0].message.content == text


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
TOOL = {"type": "function", "function": {"name": "f"}}
ASSISTANT = {"role": "assistant", "content": "Os"}


@pytest.mark.parametrize(
    ("path", "fields", "param", "words"),
    [
        (CHAT, {"guided_json": SCHEMA, "regex": "x"}, "regex", "a constraint beside guided_json"),
        (CHAT, {"guided_json": SCHEMA, "response_format": FORMATS[0]}, "response_format.json_schema.schema", "beside"),
        (CHAT, {"guided_json": {"not": {}}}, "guided_json", "not"),
        (CHAT, {"guided_json": "{"}, "guided_json", "expected JSON"),
        (CHAT, {"guided_regex": "("}, "guided_regex", "unclosed group"),
        (CHAT, {"guided_choice": [""]}, "guided_choice", "a character or more"),
        (CHAT, {"grammar": "root ::= <x>"}, "grammar", "of llama.cpp, or of Lark"),
        (CHAT, {"grammar": {"type": "json"}}, "grammar", "Expected `str | null`"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "unclosed group"),
        (CHAT, {"structured_outputs": {"structural_tag": "x"}}, "structured_outputs", "unknown field `structural_tag`"),
        (CHAT, {"guided_json": SCHEMA, "tools": [TOOL]}, "guided_json", "a constraint together with tools"),
        (COMPLETIONS, {"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        (COMPLETIONS, {"response_format": {"type": "json_schema"}}, "response_format.json_schema", "no schema"),
        (RESPONSES, {"response_format": FORMATS[0]}, "response_format", "Use text.format"),
        (RESPONSES, {"max_tokens": 3}, "max_tokens", "Use max_output_tokens"),
        (RESPONSES, {"include": ["message.output_text.logprobs"]}, "include", "logprobs"),
        (RESPONSES, {"reasoning": {"effort": "low"}}, "reasoning.effort", "the chat template does not know it"),
        (RESPONSES, {"text": {"verbosity": "low"}}, "text.verbosity", "expected medium"),
        (CHAT, {"reasoning_effort": "low"}, "reasoning_effort", "the chat template does not know it"),
        (CHAT, {"min_tokens": 9, "max_tokens": 5}, "min_tokens", "expected 0 to 5"),
        (CHAT, {"min_tokens": -1}, "min_tokens", "expected 0 to"),
        (CHAT, {"min_tokens": 3, "guided_json": SCHEMA}, "min_tokens", "with a grammar"),
        (CHAT, {"min_tokens": 3, "tools": [TOOL]}, "min_tokens", "with tools"),
        (COMPLETIONS, {"stop_token_ids": [1 << 20]}, "stop_token_ids", "vocabulary"),
        (CHAT, {"continue_final_message": True}, "continue_final_message", "a last message of 'user'"),
        (
            CHAT,
            {"messages": [*USER, ASSISTANT], "continue_final_message": True, "add_generation_prompt": True},
            "continue_final_message",
            "with a new turn",
        ),
        (
            CHAT,
            {"messages": [*USER, ASSISTANT], "continue_final_message": True, "tools": [TOOL]},
            "continue_final_message",
            "with tools",
        ),
        (CHAT, {"messages": [*USER, {**ASSISTANT, "prefix": True}]}, "messages[1].prefix", "continue_final_message"),
        (CHAT, {"stream_options": {"continuous_usage_stats": True}}, "stream_options.continuous_usage_stats", "usage"),
        (CHAT, {"typical_p": 0.5}, "typical_p", "expected 1. It is not supported"),
        (CHAT, {"max_output_tokens": 3}, "max_output_tokens", "Use max_completion_tokens"),
        (COMPLETIONS, {"tools": [TOOL]}, "tools", "a field of /v1/chat/completions"),
    ],
)
def test_what_does_not_go_together_is_named(server: Server, path: str, fields: Any, param: str, words: str):
    asked = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}, RESPONSES: {"input": "x"}}[path]
    status, answer = server.post(path, {"model": NAME, **asked, **fields})
    error = answer["error"]
    assert (status, error["param"]) == (400, param) and words in error["message"], error


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_a_constraint_that_was_refused_before_is_refused_with_its_status(server: Server, path: str):
    """Also in a stream, whose headers do not wait for the engine."""
    asked = {CHAT: {"messages": USER}, COMPLETIONS: {"prompt": "x"}}[path]
    for _ in range(2):
        status, answer = server.post(path, {**asked, "guided_regex": "(", "stream": True})
        assert (status, answer["error"]["param"]) == (400, "guided_regex")


def test_clients_that_send_neutral_values_are_answered(server: Server):
    """As programs with a slider for everything do."""
    plain = server.post(CHAT, {"messages": USER, "max_tokens": 4})[1]["choices"]
    neutral: dict[str, Any] = {"typical_p": 1.0, "repeat_penalty": 1, "top_k": -1, "logprobs": False, "tools": []}
    neutral |= dict.fromkeys(("mirostat", "xtc_probability", "n_keep", "top_logprobs", "min_tokens"), 0)
    neutral |= {name: [] for name in ("bad_words", "stop", "stop_token_ids")}
    neutral |= dict.fromkeys(("skip_special_tokens", "include_reasoning", "add_generation_prompt"), True)
    neutral |= dict.fromkeys(("use_beam_search", "continue_final_message"), False) | {"grammar": ""}
    neutral |= dict.fromkeys(("guided_json", "reasoning_effort", "suffix", "prompt_logprobs", "n"))
    status, answer = server.post(CHAT, {"messages": USER, "max_tokens": 4, **neutral})
    assert status == 200 and answer["choices"] == plain


def _text(model: edgekv.Model, prompt: str, most: int) -> str:
    return "".join(token.text for token in model.generate(model.encode_chat(prompt), max_new_tokens=most))


def test_the_last_message_is_continued(client: OpenAI, alone: edgekv.Model):
    """Its text, spaces included, is the end of the prompt; the answer is what follows it."""
    for content in ("The capital is ", "Os"):
        messages: Any = [*USER, {"role": "assistant", "content": content}]
        body = {"continue_final_message": True, "add_generation_prompt": False}
        answer = client.chat.completions.create(model=NAME, messages=messages, max_tokens=7, extra_body=body)
        assert answer.choices[0].message.content == _text(alone, f"<user>Hello</s><assistant>{content}", 7)
    answer = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=5, extra_body={"add_generation_prompt": False}
    )
    assert answer.choices[0].message.content == _text(alone, "<user>Hello</s><assistant>Os</s>", 5)


def test_a_template_that_writes_the_last_message_otherwise_is_named(tmp_path: Path):
    template = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim | upper }}</s>{% endfor %}<assistant>"
    with served(talking_bundle(tmp_path, template)) as server:
        messages = [*USER, {"role": "assistant", "content": "Os"}]
        status, answer = server.post(CHAT, {"messages": messages, "continue_final_message": True})
        assert (status, answer["error"]["param"]) == (400, "continue_final_message")


def test_a_template_that_knows_the_effort_gets_it(tmp_path: Path):
    template = "{{ reasoning_effort }}{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}<assistant>"
    with served(talking_bundle(tmp_path, template)) as server:
        client, counts = server.client(), list[int]()
        for effort in ("low", "medium"):
            answer = client.chat.completions.create(
                model=NAME,
                messages=USER,
                max_tokens=1,
                reasoning_effort=effort,  # type: ignore[arg-type]
            )
            response = client.responses.create(
                model=NAME,
                input="Hello",
                max_output_tokens=1,
                reasoning={"effort": effort},  # type: ignore[typeddict-item]
            )
            assert answer.usage is not None and response.usage is not None
            assert answer.usage.prompt_tokens == response.usage.input_tokens
            counts.append(answer.usage.prompt_tokens)
        assert counts[1] - counts[0] == len("medium") - len("low")


def test_an_answer_ends_at_a_stop_token(client: OpenAI, alone: edgekv.Model):
    """Which is not part of it, also where the end-of-sequence tokens are ignored."""
    (token,) = alone.encode("e")[-1:]
    body = {"stop_token_ids": [token], "ignore_eos": True}
    for bias in ({str(token): 3}, {str(token): 100}):
        answer = client.chat.completions.create(
            model=NAME, messages=USER, max_tokens=300, logit_bias=bias, seed=1, temperature=1.0, extra_body=body
        )
        assert answer.choices[0].finish_reason == "stop" and answer.usage is not None
        assert "e" not in (answer.choices[0].message.content or "")
    assert answer.usage.completion_tokens == 1
    generation = alone.generate("Once", max_new_tokens=300, stop_token_ids=[token], logit_bias={token: 100.0})
    assert [each.id for each in generation] == [token] and generation.stats.stop_reason == "eos"


def test_an_answer_has_no_end_before_the_min_tokens(client: OpenAI, alone: edgekv.Model):
    """Neither the checkpoint's nor that of the request."""
    (token,) = alone.encode("e")[-1:]
    for end in (token, alone.bundle.manifest.tokens.eos[0]):
        for path in ("chat", "completions"):
            bias, body = {str(end): 1000}, {"min_tokens": 6, "stop_token_ids": [token]}
            wanted: Any = {"model": NAME, "max_tokens": 20, "logit_bias": bias, "extra_body": body}
            if path == "chat":
                usage = client.chat.completions.create(**wanted, messages=USER).usage
            else:
                usage = client.completions.create(**wanted, prompt="Once").usage
            assert usage is not None and usage.completion_tokens == 7


def test_a_request_may_add_to_its_salt(server: Server):
    """Nothing computed for one salt makes a request with another faster."""
    cached = []
    for salt in ("one", "one", "two", None):
        asked = {"prompt": "A prompt of some length that is salted", "max_tokens": 1, "cache_salt": salt}
        _, answer = server.post(COMPLETIONS, asked)
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0)
    assert cached == [False, True, False, False]
