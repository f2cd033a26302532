"""Scripts that a model writes and its calibration text does not: integers fit the languages that they saw."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator

from tokenizers import Tokenizer

from exporters.quantize.calibrate import CalibrationText

_MIN_SHARE = 0.05  # of the tokens with letters
_MIN_SEEN = 1e-3  # of the letters of the text
_SAMPLED = 8192


def script_warnings(calibration: CalibrationText, tokenizer: Tokenizer) -> Iterator[str]:
    """What to say of a calibration text that lacks scripts of the vocabulary; nothing if it lacks none."""
    size = tokenizer.get_vocab_size()
    tokens = (tokenizer.decode([token]) for token in range(0, size, max(1, size // _SAMPLED)))
    if unseen := unseen_scripts(calibration.text, tokens):
        named = ", ".join(f"{script.lower()} {share:.0%}" for script, share in unseen.items())
        yield (
            f"calibration: {calibration.name} text has no letters of some scripts of the vocabulary ({named} of its "
            f"tokens): other languages lose more. Give a --calibration with text in each that you use"
        )


def unseen_scripts(text: str, tokens: Iterable[str]) -> dict[str, float]:
    """The scripts of tokens of which a text has hardly a letter, with their shares of the tokens, largest first.

    Args:
        text: the text.
        tokens: of the vocabulary, decoded; those without a letter do not count.
    """
    seen = Counter[str]()
    for letter, count in Counter(filter(str.isalpha, text)).items():
        seen[_script(letter)] += count
    firsts = (next(filter(str.isalpha, token), None) for token in tokens)
    known = Counter(_script(letter) for letter in firsts if letter is not None)
    return {
        script: count / known.total()
        for script, count in known.most_common()
        if count >= _MIN_SHARE * known.total() and seen[script] < max(1, _MIN_SEEN * seen.total())
    }


def _script(letter: str) -> str:
    """The first word of the letter's Unicode name, such as LATIN, CYRILLIC or CJK."""
    return unicodedata.name(letter, "OTHER").partition(" ")[0]
