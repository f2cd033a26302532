"""How a call drafts tokens, as a caller says it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

from edgekv.draft.corpus_index import CorpusIndex
from edgekv.draft.drafter import Drafter
from edgekv.errors import refuse

SpeculationMode = Literal["auto", "lookup", "corpus", "draft", "off"]


class HasDraftModel(Protocol):
    """Such as a `Model`."""

    @property
    def draft_model(self) -> Any:
        """What drafts: a `DraftModel` of the engine."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate. The text is the same with any value; only the time differs.

    Attributes:
        mode: `auto` asks all drafters there are, and drafts as much as pays by measured acceptance and time, or
            nothing; `lookup`, `corpus` and `draft` ask one drafter before every pass; `off` drafts nothing.
        corpus: an indexed text, see `Model.open_corpus`; needed by `corpus`, optional with `auto`.
        draft: a model with the same tokenizer, which nothing else uses meanwhile; needed by `draft`, optional with
            `auto`. It stays open.
        tokens: drafts of a pass at most; None for as many as the largest verify graph has room for.
        tree: let the drafts of `lookup` and `corpus` branch, into what followed the same words in other places.
        drafter: your own, which serves one text and is asked instead of the others; with it the mode stays `auto`.

    Raises:
        UsageError: an unknown mode, a mode without what it needs, or with what it does not use.
    """

    mode: SpeculationMode = "auto"
    corpus: CorpusIndex | None = None
    draft: HasDraftModel | None = None
    tokens: int | None = None
    tree: bool = False
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        check_choice(self.mode, corpus=self.corpus is not None, draft=self.draft is not None)
        if self.tokens is not None and (isinstance(self.tokens, bool) or self.tokens < 1):
            refuse("speculate: tokens", self.tokens, "at least 1", "Leave it out.")
        if self.tree and self.mode in ("draft", "off"):
            refuse("speculate: tree", f"a tree with the mode {self.mode}", "lookup, corpus or auto", "Leave it out.")
        if self.drafter is not None and (self.mode, self.corpus, self.draft) != ("auto", None, None):
            refuse("speculate: drafter", f"one with the mode {self.mode}", "no other drafter", "Leave one of them out.")

    @classmethod
    def read(cls, wanted: Speculation | SpeculationMode | None) -> Speculation | None:
        """As a caller gives it; None for no drafts.

        Raises:
            UsageError: an unknown mode.
        """
        chosen = wanted if isinstance(wanted, Speculation) else Speculation(wanted or "off")
        return None if chosen.mode == "off" else chosen


_FIELDS = {"mode": "speculate", "corpus": "speculate: corpus", "draft": "speculate: draft"}


def check_choice(mode: str, *, corpus: bool, draft: bool, fields: Mapping[str, str] = _FIELDS) -> None:
    """Refuse an unknown mode, and one that does not go with what is given.

    Args:
        mode: see `Speculation`.
        corpus: whether there is one.
        draft: whether there is one.
        fields: what errors call mode, corpus and draft.

    Raises:
        UsageError: see above.
    """
    if mode not in get_args(SpeculationMode):
        refuse(fields["mode"], repr(mode), " or ".join(get_args(SpeculationMode)), "Use auto.")
    for name, is_given in (("corpus", corpus), ("draft", draft)):
        if mode == name and not is_given:
            refuse(fields[name], "none", f"one for the mode {name}", "Give one, or use auto.")
        if is_given and mode not in (name, "auto"):
            refuse(fields[name], f"one with the mode {mode}", "none", f"Leave it out, or use {name} or auto.")
