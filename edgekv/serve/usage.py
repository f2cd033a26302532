"""Token counts of an answer, as the API reports them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import UNSET, UnsetType

from edgekv.serve.events import Finished


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `usage`; cached tokens were not computed."""

    cached_tokens: int = 0


class CompletionDetails(msgspec.Struct, frozen=True):
    """Part of `usage` with speculation: drafts that are part of the answer, and drafts that are not."""

    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(msgspec.Struct, frozen=True):
    """`usage` of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | UnsetType = UNSET

    @classmethod
    def of(cls, ends: Sequence[Finished], n: int) -> Usage:
        """Of the answers to a request: the tokens of all answers, and each prompt once.

        Args:
            ends: of the answers, with the `n` of a prompt side by side.
            n: answers to each prompt.
        """
        firsts = ends[::n]
        prompt = sum(end.prompt_tokens for end in firsts)
        generated = sum(end.generated_tokens for end in ends)
        cached = PromptDetails(sum(end.cached_tokens for end in firsts))
        accepted, rejected = sum(end.accepted_drafts for end in ends), sum(end.rejected_drafts for end in ends)
        details = CompletionDetails(accepted, rejected) if accepted or rejected else UNSET
        return cls(prompt, generated, prompt + generated, cached, details)
