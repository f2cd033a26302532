"""The sampling defaults of a checkpoint: its `generation_config.json`, or the same fields from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from edgekv.bundle import GenerationRecord
from edgekv.errors import CheckpointError, UsageError
from edgekv.text.params import SamplingParams

GENERATION_CONFIG = "generation_config.json"

_NEUTRAL: dict[str, object] = {
    "begin_suppress_tokens": [],
    "cache_implementation": None,
    "diversity_penalty": 0.0,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "encoder_repetition_penalty": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "guidance_scale": 1.0,
    "length_penalty": 1.0,
    "min_length": 0,
    "no_repeat_ngram_size": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "suppress_tokens": [],
    "typical_p": 1.0,
}
"""Values of transformers' options that have no effect."""
_NOT_SAMPLING = frozenset(
    {
        "_from_model_config",
        "bos_token_id",
        "decoder_start_token_id",
        "eos_token_id",
        "max_length",
        "pad_token_id",
        "transformers_version",
        "use_cache",
    }
)
_SUPPORTED = frozenset(
    {"do_sample", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_new_tokens"},
)


def generation_record(config: Mapping[str, Any], file: str = GENERATION_CONFIG) -> GenerationRecord | None:
    """Default sampling parameters; None if the file has none. `do_sample: false` is one: greedy.

    As in Hugging Face transformers, `do_sample` decides: without it, temperature, top_k, top_p and min_p have no
    effect. Unlike there, a missing top_k means all tokens, not 50. Other options are ignored, and listed by name.

    Args:
        config: the fields.
        file: where they stand, for errors.

    Raises:
        CheckpointError: a value out of range.
    """
    fields = {name: config[name] for name in _SUPPORTED if config.get(name) is not None}
    ignored = [
        name
        for name, value in sorted(config.items())
        if name not in _SUPPORTED | _NOT_SAMPLING
        and not name.startswith("output_")
        and value not in (None, False, _NEUTRAL.get(name))
    ]
    do_sample = fields.pop("do_sample", False)
    if not isinstance(do_sample, bool):
        _refuse(file, "do_sample", repr(do_sample), "true or false")
    if fields.get("top_k") == 0:
        del fields["top_k"]  # transformers' value for all tokens
    if fields.get("top_p") == 1:
        del fields["top_p"]
    if do_sample:
        fields.setdefault("temperature", 1.0)
    else:
        fields = {name: fields[name] for name in ("repetition_penalty", "max_new_tokens") if name in fields}
    try:
        params = SamplingParams(**fields)
    except UsageError as error:
        _refuse(file, error.field, error.got, error.expected)
    record = GenerationRecord(
        temperature=params.temperature,
        top_k=params.top_k,
        top_p=params.top_p,
        min_p=params.min_p,
        repetition_penalty=params.repetition_penalty,
        max_new_tokens=fields.get("max_new_tokens"),
        ignored=ignored,
    )
    return record if config.get("do_sample") is not None or record != GenerationRecord() else None


def _refuse(file: str, name: str, got: object, expected: object) -> NoReturn:
    fix = f"Correct or remove it in {file}."
    raise CheckpointError(f"{file}: {name}", got=got, expected=expected, fix=fix)
