"""Token counts of an answer, as the API reports them."""

from __future__ import annotations

import msgspec

from edgekv.serve.events import Finished


class PromptDetails(msgspec.Struct, frozen=True):
    """Part of `usage`; cached tokens were not computed."""

    cached_tokens: int = 0


class Usage(msgspec.Struct, frozen=True):
    """`usage` of completions."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails

    @classmethod
    def of(cls, *ends: Finished) -> Usage:
        """Of the answers to a request."""
        prompt = sum(end.prompt_tokens for end in ends)
        generated = sum(end.generated_tokens for end in ends)
        return cls(prompt, generated, prompt + generated, PromptDetails(sum(end.cached_tokens for end in ends)))
