"""Default sampling parameters."""

from __future__ import annotations

from edgekv.bundle import GenerationRecord
from edgekv.errors import BundleError, UsageError
from edgekv.session.params import DEFAULT_MAX_NEW_TOKENS, SamplingParams


def default_params(record: GenerationRecord | None) -> SamplingParams:
    """The bundle's defaults; greedy decoding if it has none.

    Raises:
        BundleError: a value that sampling refuses.
    """
    if record is None:
        return SamplingParams()
    try:
        return SamplingParams(
            record.temperature,
            record.top_k,
            record.top_p,
            min_p=record.min_p,
            repetition_penalty=record.repetition_penalty,
            max_new_tokens=record.max_new_tokens or DEFAULT_MAX_NEW_TOKENS,
        )
    except UsageError as error:
        fix = "Export the bundle again from a checkpoint with a correct generation_config.json."
        raise BundleError(
            f"manifest.json: generation: {error.field}", got=error.got, expected=error.expected, fix=fix
        ) from None
