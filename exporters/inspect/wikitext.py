"""WikiText word perplexity as lm-evaluation-harness defines it: pages, detokenized text, words and rolling windows.

Definition: the task `wikitext` of lm-evaluation-harness (`lm_eval/tasks/wikitext`, `lm_eval.utils`), version 2. The
log-likelihood of every page's detokenized text is divided by the number of words of its original text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from edgekv.errors import CheckpointError, UsageError
from edgekv.spec.text import begins_with
from exporters.checkpoint.checkpoint import Checkpoint

# In the order of lm-evaluation-harness; the second has no effect on any text of WikiText, and is kept as it is there.
_SUBSTITUTIONS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"s '", "s'"),
        (r"/' [0-9]/", "/'[0-9]/"),
        (r" @-@ ", "-"),
        (r" @,@ ", ","),
        (r" @\.@ ", "."),
        *((f" {re.escape(mark)} ", f"{mark} ") for mark in ":;.!?,"),
        (r"\(\s*([^\)]*?)\s*\)", r"(\1)"),
        (r"\[\s*([^\]]*?)\s*\]", r"[\1]"),
        (r"{\s*([^}]*?)\s*}", r"{\1}"),
        (r'"\s*([^"]*?)\s*"', r'"\1"'),
        (r"'\s*([^']*?)\s*'", r"'\1'"),
        (r"= = = =", "===="),
        (r"= = =", "==="),
        (r"= =", "=="),
        (r" ° ", "°"),
        (r" \n", "\n"),
        (r"\n ", "\n"),
        (r" N ", " 1 "),
        (r" 's", "'s"),
    )
)


class WordPerplexity(msgspec.Struct, frozen=True, kw_only=True):
    """WikiText word perplexity of whole pages.

    Attributes:
        pages: number of pages evaluated.
        pages_in_text: number of pages of the text.
        words: number of words of the pages before detokenization.
        perplexity: exp of the negative log-likelihood per word under the bundle.
        reference_perplexity: the same under the float32 reference.
        ratio: perplexity over reference_perplexity.
        ratio_error: standard error of the ratio, from the spread of the tokens' log-likelihood differences.
    """

    pages: int
    pages_in_text: int
    words: int
    perplexity: float
    reference_perplexity: float
    ratio: float
    ratio_error: float


@dataclass(frozen=True, slots=True)
class Window:
    """Tokens to run, and those that the logits of some of them predict.

    Attributes:
        inputs: ids `[T]`.
        targets: ids `[n]`, predicted by rows `first` to `first + n - 1` of the logits `[T, V]`.
        first: the first row that counts.
        position: of the first input.
    """

    inputs: NDArray[np.int64]
    targets: NDArray[np.int64]
    first: int = 0
    position: int = 0

    @classmethod
    def of(cls, tokens: NDArray[np.int64], first_tokens: int = 1) -> Window:
        """Each token behind the first ones is predicted by the row of the token before it."""
        return cls(tokens, tokens[first_tokens:], first_tokens - 1)

    def after(self, tokens: int) -> Window:
        """Without the first inputs, and what they predict."""
        first = max(self.first - tokens, 0)
        lost = max(tokens - self.first, 0)
        return Window(self.inputs[tokens:], self.targets[lost:], first, self.position + tokens)


def measured_windows(windows: Iterable[NDArray[np.int64]], first: Sequence[int], tokens: int) -> list[Window]:
    """The first windows of a text, the last of them cut, with `tokens` predicted tokens in all.

    Args:
        windows: as `cut_windows` gives them.
        first: the tokens with which each begins; none of them is predicted.
        tokens: limit.
    """
    kept: list[Window] = []
    first_tokens, left = max(1, len(first)), tokens
    for window in windows:
        if left <= 0:
            break
        kept.append(Window.of(window[: first_tokens + left], first_tokens))
        left -= len(kept[-1].targets)
    return kept


@dataclass(frozen=True, slots=True)
class Pages:
    """Whole pages of WikiText, cut into windows.

    Attributes:
        windows: of all pages.
        pages: number of pages.
        pages_in_text: number of pages of the text.
        words: number of words of the pages before detokenization.
    """

    windows: Sequence[Window]
    pages: int
    pages_in_text: int
    words: int

    @classmethod
    def read(cls, checkpoint: Checkpoint, text: str, context: int, tokens: int, sink: Sequence[int] = ()) -> Pages:
        """Take as many pages from the start of a text as have `tokens` tokens in all.

        Args:
            checkpoint: for its tokenizer and its BOS token, or else EOS, in front of every page.
            text: WikiText raw.
            context: the longest window.
            tokens: limit.
            sink: tokens that every sequence of the bundle begins with.

        Raises:
            UsageError: the text has no page headings, or its first page has more tokens.
            CheckpointError: the checkpoint has neither BOS nor EOS.
        """
        texts = split_pages(text)
        special = checkpoint.special
        prefix = special.eos[:1] if special.bos is None else (special.bos,)
        if not prefix:
            raise CheckpointError(
                "bos_token_id",
                got="neither this nor eos_token_id",
                expected="a token to put in front of a page",
                fix="Add one of them to config.json.",
            )
        windows: list[Window] = []
        total = words = pages = 0
        for page in texts:
            ids = checkpoint.encode(detokenize(page))
            if total + len(ids) > tokens:
                if not pages:
                    fix = f"Use --tokens {len(ids)}."
                    raise UsageError("--tokens", got=tokens, expected=f"{len(ids)}, the first page's", fix=fix)
                break
            windows += rolling_windows(ids, prefix, context, sink)
            total, words, pages = total + len(ids), words + count_words(page), pages + 1
        return cls(windows, pages, len(texts), words)


def split_pages(text: str) -> list[str]:
    """The pages of WikiText raw. Each begins at a ` = Title = ` line; deeper headings have more `=` signs.

    Raises:
        UsageError: there is no such line.
    """
    pages: list[list[str]] = [[]]
    headings = 0
    for line in text.split("\n"):
        heading = line.replace("= = =", "===").replace("= =", "==").strip()
        if heading.startswith("= ") and heading.endswith(" ="):
            headings += 1
            pages.append([])
        pages[-1].append(line)
    if not headings:
        raise UsageError(
            "--text",
            got="no line such as ` = Title = `",
            expected="WikiText raw, whose pages begin with one",
            fix="Give a file such as wiki.test.raw, or leave out --word-perplexity.",
        )
    joined = ["\n".join(lines) for lines in pages]
    return [page for page in joined if page.strip()]


def detokenize(page: str) -> str:
    """Undo WikiText's tokenization: spaces around punctuation, ` @-@ ` within words, and spaced `=` signs."""
    for pattern, replacement in _SUBSTITUTIONS:
        page = pattern.sub(replacement, page)
    return page


def count_words(page: str) -> int:
    """Pieces of an original page between white space; an empty one at its start and one at its end count."""
    return len(re.split(r"\s+", page))


def rolling_windows(
    tokens: Sequence[int], prefix: Sequence[int], length: int, sink: Sequence[int] = ()
) -> Iterator[Window]:
    """Windows of at most `length` tokens that predict each token once.

    The first window begins with `prefix`; the others begin with the token before those that they predict, and the last
    one with as many tokens before as fit. With a sink, every window begins with it instead.

    Args:
        tokens: ids of a page.
        prefix: one id.
        length: the context length.
        sink: ids, or none. A page that begins with them has them once.
    """
    if begins_with(tokens, sink):
        tokens = tokens[len(sink) :]
    start = [*(sink or prefix)]
    done = min(len(tokens), length - len(start) + 1)
    if done:
        yield _window([*start, *tokens[: done - 1]], tokens[:done])
    room = length - len(sink)
    while done < len(tokens):
        end = min(done + room, len(tokens))
        yield _window([*sink, *tokens[end - room - 1 : end - 1]], tokens[done:end])
        done = end


def _window(inputs: Sequence[int], targets: Sequence[int]) -> Window:
    return Window(np.array(inputs), np.array(targets), len(inputs) - len(targets))
