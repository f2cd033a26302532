"""Prompts: from text to tokens that a bundle's graphs take."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING

from edgekv.bundle import Bundle
from edgekv.errors import ContextFullError, UsageError

if TYPE_CHECKING:
    from tokenizers import Tokenizer


class PromptReader:
    """Reads prompts for a bundle."""

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the bundle."""
        return self._bundle.tokenizer()

    def encode(self, prompt: str) -> list[int]:
        """The tokens of a text, with the special tokens that the checkpoint's tokenizer adds.

        Raises:
            UsageError: the text is not Unicode, as of an argument in another encoding.
        """
        try:
            prompt.encode()
        except UnicodeEncodeError as error:
            raise UsageError(
                "prompt", got=error, expected="Unicode text", fix="Give it as UTF-8, or in a file."
            ) from None
        tokens = list(self.tokenizer.encode(prompt).ids)
        bos = self._bundle.manifest.tokens.bos
        return tokens if tokens or bos is None else [bos]

    def read(self, prompt: str | Sequence[int], field: str, policy: str) -> list[int]:
        """The tokens of a prompt, which a cache with this context policy takes.

        Raises:
            ContextFullError: more tokens than the context holds and the policy is `fail`.
            UsageError: no tokens, or an id that is not in the vocabulary.
        """
        tokens = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        manifest = self._bundle.manifest
        if not tokens:
            raise UsageError(field, got="no tokens", expected="at least one", fix="Give some text.")
        if wrong := [t for t in tokens if not 0 <= t < manifest.model.vocab]:
            wanted = f"0 to {manifest.model.vocab - 1}, the model's vocabulary"
            raise UsageError(field, got=f"id {wrong[0]}", expected=wanted, fix="Use the bundle's own tokenizer.")
        if policy == "fail" and len(tokens) > manifest.context:
            raise ContextFullError(
                field,
                got=f"{len(tokens)} tokens",
                expected=f"at most {manifest.context}, the context of the bundle",
                fix="Shorten it, choose the policy sliding-window, or export with a larger --context.",
            )
        return tokens
