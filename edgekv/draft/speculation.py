"""How a call drafts tokens: the value that Python takes, the options of commands, and what a drafter is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, get_args

from edgekv.errors import UsageError, refuse
from edgekv.option import Option, check_place

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgekv.draft.corpus import CorpusIndex
    from edgekv.draft.tree import DraftTree

SpeculationMode = Literal["auto", "lookup", "corpus", "draft", "off"]


class Drafter(Protocol):
    """Guesses the tokens that follow a text. The text never depends on the guesses: wrong ones only cost time."""

    @property
    def name(self) -> str:
        """Who made the last proposal, for statistics. A drafter that asks others gives the name of the one it took."""

    def propose(self, tokens: Sequence[int], k: int) -> Sequence[int] | DraftTree:
        """Tokens that may follow, at most k of them, in one continuation or several; none if it has no guess.

        Args:
            tokens: the whole text, prompt and output. Within one generation it only grows.
            k: at least 1.
        """

    def accepted(self, n: int) -> None:
        """So many tokens of the last proposal were right; called once after each proposal that was not empty."""


class HasDraftModel(Protocol):
    """Such as a `Model`, or what `edgekv.load_drafter` gives."""

    @property
    def draft_model(self) -> Any:
        """What drafts: `Drafting` of an engine, or a `TargetDraftModel`."""


@dataclass(frozen=True, slots=True)
class Speculation:
    """How to speculate. The text is the same with any value; only the time differs.

    Attributes:
        mode: `auto` asks all drafters there are, and drafts as much as pays by measured acceptance and time, or
            nothing; `lookup`, `corpus` and `draft` ask one drafter before every pass; `off` drafts nothing.
        corpus: an indexed text, see `Model.open_corpus`; needed by `corpus`, optional with `auto`. Commands give its
            path, and open it.
        draft: a model with the same tokenizer, which nothing else uses meanwhile; needed by `draft`, optional with
            `auto`; or what `edgekv.load_drafter` gives. It stays open. Commands give the path of its bundle, and load
            it.
        tokens: drafts of a pass at most; None for as many as the largest verify graph has room for.
        tree: let the drafts of `lookup` and `corpus` branch, into what followed the same words in other places.
        drafter: your own, which serves one text and is asked instead of the others; with it the mode stays `auto`.

    Raises:
        UsageError: an unknown mode, a mode without what it needs, or with what it does not use.
    """

    mode: Annotated[
        SpeculationMode,
        Option(
            "Draft tokens that one pass verifies; the text is the same. lookup copies from prompt and text, corpus "
            "from --draft-corpus, draft asks --draft; auto uses all of them, and none where drafting does not pay.",
            "--speculate",
            shown="off; auto with another option of drafts",
        ),
    ] = "auto"
    corpus: Annotated[
        CorpusIndex | str | None,
        Option(
            "A UTF-8 text or source file to copy drafts from; indexed once.",
            "--draft-corpus",
            metavar="FILE",
            parse=check_place,
        ),
    ] = None
    draft: Annotated[
        HasDraftModel | str | None,
        Option(
            "Bundle of a smaller model with the same tokenizer, or of a drafter for this model.",
            metavar="BUNDLE",
            parse=check_place,
        ),
    ] = None
    tokens: Annotated[
        int | None,
        Option(
            "Maximum drafts per pass.",
            "--draft-tokens",
            shown="as many as the largest verify graph has room for",
        ),
    ] = None
    tree: Annotated[
        bool, Option("Draft a tree of alternative continuations, with lookup and corpus; htp only.", "--draft-tree")
    ] = False
    drafter: Drafter | None = None

    def __post_init__(self) -> None:
        mode = self.mode
        if mode not in get_args(SpeculationMode):
            refuse("mode", repr(mode), " or ".join(get_args(SpeculationMode)), "Use auto.")
        for name in ("corpus", "draft"):
            is_given = getattr(self, name) is not None
            if mode == name and not is_given:
                refuse(name, "none", f"one for the mode {name}", "Give one, or use auto.")
            if is_given and mode not in (name, "auto"):
                refuse(name, f"one with the mode {mode}", "none", f"Leave it out, or use {name} or auto.")
        if self.tokens is not None and (isinstance(self.tokens, bool) or self.tokens < 1):
            refuse("tokens", self.tokens, "at least 1", "Leave it out.")
        if self.tree and mode in ("draft", "off"):
            refuse("tree", f"a tree with the mode {mode}", "lookup, corpus or auto", "Leave it out.")
        if self.drafter is not None and (mode, self.corpus, self.draft) != ("auto", None, None):
            refuse("drafter", f"one with the mode {mode}", "no other drafter", "Leave one of them out.")

    @classmethod
    def read(cls, speculation: Speculation | SpeculationMode | None) -> Speculation | None:
        """As a caller gives it; None for no drafts.

        Raises:
            UsageError: an unknown mode, or one that needs more than its name.
        """
        if not isinstance(speculation, Speculation):
            try:
                speculation = cls(speculation or "off")
            except UsageError as error:
                fix = 'Use "auto" or "lookup", or give a Speculation.'
                refuse("speculate", repr(speculation)[:40], str(error.expected), fix)
        return None if speculation.mode == "off" else speculation
