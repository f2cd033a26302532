"""The option `--sink`; see `exporters.quantize.sink`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from edgekv.errors import UsageError

_MODES: dict[str, Literal["auto", "none"]] = {"auto": "auto", "none": "none"}


@dataclass(frozen=True, slots=True)
class SinkRequest:
    """The `--sink` of an export.

    Attributes:
        mode: `auto`: the token at position 0 if it spans the ranges; `none`; or `tokens`.
        tokens: ids, with the mode `tokens`.
    """

    mode: Literal["auto", "none", "tokens"] = "auto"
    tokens: tuple[int, ...] = ()

    @classmethod
    def parse(cls, text: str) -> SinkRequest:
        """Read the option.

        Raises:
            UsageError: neither `auto`, `none` nor token ids.
        """
        if text in _MODES:
            return cls(_MODES[text])
        ids = text.split(",")
        if not all(number.strip().isascii() and number.strip().isdigit() and len(number) < 10 for number in ids):
            expected = "auto, none, or token ids such as 1"
            raise UsageError("--sink", got=repr(text), expected=expected, fix="Use auto.")
        return cls("tokens", tuple(int(number) for number in ids))
