"""Fields of requests that other servers have and this one has not: those that would change the answer are refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from edgekv.machine.decoding import DECODERS
from edgekv.serve.errors import refused


@dataclass(frozen=True, slots=True)
class UnsupportedField:
    """A field that would change the answer.

    Attributes:
        fix: what to do instead.
        neutral: values that ask for nothing, beside null; clients send them with every request.
    """

    fix: str
    neutral: tuple[Any, ...] = ()


def within(field: str, names: Iterable[str]) -> str | None:
    """A field of a request, or a place within one, such as `messages[0].content`; None if no name is its root."""
    return field if re.split(r"[.\[]", field, maxsplit=1)[0] in names else None


def _named(names: str, fix: str, *neutral: Any) -> dict[str, UnsupportedField]:
    return dict.fromkeys(names.split(), UnsupportedField(fix, neutral))


_LEAVE_OUT = "It is not supported; leave it out."
_TEMPLATE = "Set variables of the chat template in chat_template_kwargs, such as enable_thinking."
_LENGTH = "Use max_tokens, or max_output_tokens in /v1/responses."
_CONSTRAINT = "Use response_format, or text.format in /v1/responses."
_ADAPTER = 'Use "model": "NAME:ADAPTER"; GET /v1/models lists them.'

_NOTHING: tuple[Any, ...] = ((), {}, "", False, "none", "auto")

UNSUPPORTED: Mapping[str, UnsupportedField] = {
    # how tokens are chosen
    **_named("typical_p typical tfs_z length_penalty repeat_penalty encoder_repetition_penalty", _LEAVE_OUT, 1),
    **_named("guidance_scale cfg_scale num_beams", _LEAVE_OUT, 1),
    **_named("mirostat mirostat_mode dynatemp_range xtc_probability dry_multiplier top_a penalty_alpha", _LEAVE_OUT, 0),
    **_named("epsilon_cutoff eta_cutoff smoothing_factor no_repeat_ngram_size", _LEAVE_OUT, 0),
    **_named("encoder_no_repeat_ngram_size", _LEAVE_OUT, 0),
    **_named("top_n_sigma adaptive_target", _LEAVE_OUT, 0, -1),
    **_named("min_keep", _LEAVE_OUT, 0, 1),
    **_named("use_beam_search dynamic_temperature temperature_last watermark watermarking", _LEAVE_OUT, False),
    **_named("early_stopping", _LEAVE_OUT, False),
    **_named("samplers sampler_priority sampler_order logits_processors", _LEAVE_OUT, ()),
    **_named("custom_logit_processor custom_params vllm_xargs negative_prompt", _LEAVE_OUT, {}, "", ()),
    **_named("repetition_detection logit_bias_exp", _LEAVE_OUT),
    **_named("do_sample", "Use temperature: 0 chooses the most likely token."),
    **_named("random_seed sampling_seed", "Use seed."),
    **_named("n_cmpl num_return_sequences", "Use n.", 1),
    **_named("allowed_token_ids allowed_words", _LEAVE_OUT, ()),
    **_named("bad_words banned_tokens banned_strings bad_words_ids custom_token_bans", "Use logit_bias.", (), ""),
    # where an answer ends
    **_named("n_predict max_new_tokens num_predict max_length max_gen_len", _LENGTH),
    **_named("min_new_tokens min_length", "Use min_tokens.", 0),
    **_named("t_max_predict_ms t_max_prompt_ms n_indent n_discard", _LEAVE_OUT, 0, -1),
    **_named("n_keep", _LEAVE_OUT, 0, -1),
    **_named("stopping_strings stop_sequence stop_sequences", "Use stop.", (), ""),
    **_named("stop_regex", _LEAVE_OUT, (), ""),
    **_named("ban_eos_token", "Use ignore_eos.", False),
    **_named("include_stop_str_in_output no_stop_trim", _LEAVE_OUT, False),
    **_named("thinking_token_budget thinking_budget thinking_budget_tokens max_thinking_tokens", _LEAVE_OUT, -1),
    **_named("reasoning_budget reasoning_budget_tokens", _LEAVE_OUT, -1),
    # what the answer has to be
    **_named("structural_tag response_schema guided_whitespace_pattern grammar_type", _CONSTRAINT),
    **_named("grammar_lazy json_mode", _CONSTRAINT, False),
    **_named("grammar_triggers", _CONSTRAINT, ()),
    **_named("format", _CONSTRAINT, ""),
    # what the model reads
    **_named("truncate_prompt_tokens truncate truncation_length", "Shorten the prompt.", 0),
    **_named("truncate_sequence", "Shorten the prompt.", False),
    **_named("documents", _TEMPLATE, ()),
    **_named("chat_template template raw enable_thinking thinking think thinking_forced_open", _TEMPLATE, "", False),
    **_named("reasoning_effort", _TEMPLATE),
    **_named("task", _TEMPLATE),
    **_named("verbosity", _LEAVE_OUT, "medium"),
    **_named("reasoning", _TEMPLATE, {}),
    **_named("system", "Send a message with the role system.", ""),
    **_named("safe_prompt", "Send a message with the role system.", False),
    **_named("prompt_embeds input_embeds input_ids", "Send messages, or the prompt of /v1/completions."),
    **_named("images image image_data multimodal_data", "Send pictures as parts of a message.", ()),
    **_named("media_io_kwargs mm_processor_kwargs", _LEAVE_OUT, {}),
    **_named("max_dynamic_patch min_dynamic_patch use_audio_in_video", _LEAVE_OUT, False),
    **_named("options", "Send its fields in the request itself, by the names of OpenAI.", {}),
    **_named("context context_management", "Send the whole conversation.", ()),
    **_named("session_params previous_response previous_input_messages", "Send the whole conversation.", {}),
    **_named("transforms plugins models", _LEAVE_OUT, ()),
    **_named("moderation", _LEAVE_OUT),
    **_named("lora lora_path lora_adapters lora_request adapter_id adapter", _ADAPTER, (), ""),
    # what the answer has beside its text
    **_named("prompt_logprobs decoder_input_details", "Use /v1/completions with echo and logprobs.", False),
    **_named("logprob_token_ids n_probs top_n_tokens", "Use logprobs and top_logprobs.", 0, ()),
    **_named("return_tokens_as_token_ids return_token_ids return_tokens return_hidden_states", _LEAVE_OUT, False),
    **_named("return_prompt_text return_prompt_token_ids return_meta_info return_sampling_mask", _LEAVE_OUT, False),
    **_named("return_routed_experts return_cached_tokens_details return_full_text", _LEAVE_OUT, False),
    **_named("post_sampling_probs timings_per_token return_progress details", _LEAVE_OUT, False),
    **_named("enable_response_messages", _LEAVE_OUT, False),
    **_named("response_fields", _LEAVE_OUT, ()),
    **_named("skip_special_tokens include_reasoning separate_reasoning stream_reasoning", _LEAVE_OUT, True),
    **_named("parse_tool_calls", _LEAVE_OUT, True),
    **_named("reasoning_format", _LEAVE_OUT, "auto", "deepseek"),
}
"""By name, for every path whose requests do not have the field."""

CHANGES_NOTHING = frozenset(
    name
    for names in (
        "user metadata store safety_identifier service_tier request_id rid session_id custom_labels provider route",
        # speed, place and order
        "prediction prompt_cache_key prompt_cache_retention prompt_cache_options cache_prompt n_cache_reuse priority",
        "id_slot extra_key kv_transfer_params ec_transfer_params bootstrap_host bootstrap_port bootstrap_room",
        "routed_dp_rank disagg_prefill_dp_rank data_parallel_rank draft_model ttl keep_alive stream_interval",
        "sse_ping_interval backend_sampling background_options guided_decoding_backend access_programs",
        # only with another field, which is refused
        "mirostat_tau mirostat_eta dynatemp_exponent xtc_threshold dry_base dry_allowed_length dry_penalty_last_n",
        "dry_sequence_breakers repeat_last_n repetition_penalty_range smoothing_curve adaptive_decay truncation_side",
        "preserved_tokens spaces_between_special_tokens return_token_offsets return_mm_kwargs",
        "routed_experts_prompt_start routed_experts_start_len",
        # of tools that the server itself would run
        "max_tool_calls",
        # read by some paths, and without a meaning on the others
        "parallel_tool_calls truncation modalities stream_options include",
    )
    for name in names.split()
)
"""Fields of other servers, and of other paths, that change no answer."""


def check_fields(
    body: bytes, known: Iterable[str], elsewhere: Mapping[str, str], own: Mapping[str, UnsupportedField]
) -> None:
    """Refuse the fields of a request that would change its answer, and that nothing reads.

    Args:
        body: JSON of an object.
        known: fields that are read.
        elsewhere: paths that read other fields, by the field.
        own: what differs from `UNSUPPORTED` on this path.

    Raises:
        ApiError: naming the first of them.
    """
    for name, raw in DECODERS[dict[str, msgspec.Raw]].decode(body).items():
        if name in known or name in CHANGES_NOTHING:
            continue
        unsupported = own.get(name) or UNSUPPORTED.get(name)
        if unsupported is None and name in elsewhere:
            unsupported = UnsupportedField(
                f"It is a field of {elsewhere[name]}; leave it out.", ((), {}, "", False, "none", "auto")
            )
        if unsupported is None:
            continue
        value = msgspec.json.decode(raw)
        comparable = tuple(value) if value == [] else value
        if value is None or any(
            comparable == neutral and isinstance(comparable, str) == isinstance(neutral, str)
            for neutral in unsupported.neutral
        ):
            continue
        shown = value if isinstance(value, (bool, int, float)) else f"a {_KINDS[type(value)]}"
        expected = (
            "nothing"
            if unsupported.neutral is _NOTHING
            else " or ".join(map(_written, unsupported.neutral)) or "nothing"
        )
        raise refused(name, got=shown, expected=expected, fix=unsupported.fix)


_KINDS: Mapping[type, str] = {str: "text", list: "list", dict: "object"}


def _written(value: object) -> str:
    return "an empty list" if value == () else msgspec.json.encode(value).decode()
