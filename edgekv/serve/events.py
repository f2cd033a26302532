"""What a job tells the request that waits for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.serve.errors import ApiError
from edgekv.serve.logprobs import TokenLogprob
from edgekv.text import ToolCall

FinishReason = Literal["stop", "length", "tool_calls"]


@dataclass(frozen=True, slots=True)
class Piece:
    """One generated token.

    Attributes:
        text: to show now; may be empty.
        logprob: of the token and the most likely ones; None unless they were asked for.
        calls: of tools, which it completes.
    """

    text: str
    logprob: TokenLogprob | None = None
    calls: tuple[ToolCall, ...] = ()


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of the prompt's tokens; the first one has none."""

    tokens: tuple[TokenLogprob, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The end of an answer.

    Attributes:
        reason: why.
        prompt_tokens: tokens of the prompt.
        cached_tokens: those of them that were not computed.
        generated_tokens: tokens generated, with the end-of-sequence token.
        accepted_drafts: those of them that speculation proposed.
        rejected_drafts: proposed tokens that were wrong, or not needed.
    """

    reason: FinishReason
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    accepted_drafts: int = 0
    rejected_drafts: int = 0


Event = Piece | PromptLogprobs | Finished | ApiError
