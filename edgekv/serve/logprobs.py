"""Log-probabilities of tokens, as the API reports them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from edgekv.text.output import decode
from edgekv.text.sampler import most_likely

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass(frozen=True, slots=True)
class Likelihood:
    """A token and its log-probability, a natural logarithm."""

    id: int
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of a text and the most likely ones in its place.

    Attributes:
        token: the token; its log-probability is 0 if it is the first of a text.
        top: the most likely ones, in descending order.
        is_first: whether nothing comes before it, so that it has no log-probability.
    """

    token: Likelihood
    top: tuple[Likelihood, ...] = ()
    is_first: bool = False


def token_logprob(logits: NDArray[np.float32], token: int, top: int) -> TokenLogprob:
    """The log-probability of a token among logits `[V]`, at temperature 1 and before any penalty."""
    values = logits.astype(np.float64)
    largest = values.max()
    normalizer = largest + np.log(np.exp(values - largest).sum())
    best = most_likely(logits, min(top, len(logits))) if top else ()
    ranked = tuple(Likelihood(int(id), float(values[id] - normalizer)) for id in best)
    return TokenLogprob(Likelihood(token, float(values[token] - normalizer)), ranked)


class TokenNames:
    """The text and the bytes of single tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def text(self, token: int) -> str:
        """The text of a token; U+FFFD stands for bytes of an incomplete character."""
        return decode(self._tokenizer, [token], skip_special_tokens=False)

    def data(self, token: int) -> bytes:
        """The bytes of a token, which may be a part of a character."""
        text = self.text(token)
        if _REPLACEMENT not in text:
            return text.encode()
        piece = self._tokenizer.id_to_token(token) or ""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        table = _byte_of_character()
        if all(character in table for character in piece):
            return bytes(table[character] for character in piece)
        return text.encode()


@cache
def _byte_of_character() -> dict[str, int]:
    """The bytes that the characters of a byte-level vocabulary stand for, as GPT-2 defined them.

    Printable characters of Latin-1 stand for themselves, the other bytes for the characters from U+0100 on.
    """
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + number): byte for number, byte in enumerate(others)}
