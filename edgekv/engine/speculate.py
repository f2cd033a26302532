"""How a call speculates: the drafters that it asks, and how long their drafts may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from edgekv.draft import AdaptiveDrafter, AtMost, CorpusDrafter, CorpusIndex, PromptLookup, Source
from edgekv.engine.draft_bundle import BundleDrafter, check_draft
from edgekv.engine.loaded import LoadedBundle
from edgekv.engine.speculation import Speculation
from edgekv.errors import refuse

SpeculateMode = Literal["auto", "lookup", "corpus", "draft", "off"]
EXPORT_FIX = "Export it with --draft-rows 8."


@dataclass(frozen=True, slots=True)
class Speculate:
    """How to speculate. The text is the same with any value; only the time differs.

    Attributes:
        mode: `auto` asks all drafters there are, and drafts as much as pays by measured acceptance and time, or
            nothing; `lookup`, `corpus` and `draft` ask one drafter before every pass; `off` drafts nothing.
        corpus: an indexed text, see `Model.open_corpus`; needed by `corpus`, optional with `auto`.
        draft: a model with the same tokenizer, which nothing else uses meanwhile; needed by `draft`, optional with
            `auto`. It stays open.
        tokens: drafts of a pass at most; None for as many as the largest verify graph has room for.
        tree: let the drafts of `lookup` and `corpus` branch, into what followed the same words in other places.

    Raises:
        UsageError: an unknown mode, a mode without what it needs, or with what it does not use.
    """

    mode: SpeculateMode = "auto"
    corpus: CorpusIndex | None = None
    draft: LoadedBundle | None = None
    tokens: int | None = None
    tree: bool = False

    def __post_init__(self) -> None:
        check_choice(self.mode, corpus=self.corpus is not None, draft=self.draft is not None)
        if self.tokens is not None and (isinstance(self.tokens, bool) or self.tokens < 1):
            refuse("speculate: tokens", self.tokens, "at least 1", "Leave it out.")
        if self.tree and self.mode in ("draft", "off"):
            refuse("speculate: tree", f"a tree with the mode {self.mode}", "lookup, corpus or auto", "Leave it out.")


_FIELDS = {"mode": "speculate", "corpus": "speculate: corpus", "draft": "speculate: draft"}


def check_choice(mode: str, *, corpus: bool, draft: bool, fields: Mapping[str, str] = _FIELDS) -> None:
    """Refuse an unknown mode, and one that does not go with what is given.

    Args:
        mode: see `Speculate`.
        corpus: whether there is one.
        draft: whether there is one.
        fields: what errors call mode, corpus and draft.

    Raises:
        UsageError: see above.
    """
    if mode not in get_args(SpeculateMode):
        refuse(fields["mode"], repr(mode), " or ".join(get_args(SpeculateMode)), "Use auto.")
    for name, is_given in (("corpus", corpus), ("draft", draft)):
        if mode == name and not is_given:
            refuse(fields[name], "none", f"one for the mode {name}", "Give one, or use auto.")
        if is_given and mode not in (name, "auto"):
            refuse(fields[name], f"one with the mode {mode}", "none", f"Leave it out, or use {name} or auto.")


def speculates(wanted: Speculate | SpeculateMode | Speculation | None) -> bool:
    """Whether drafts are wanted."""
    if isinstance(wanted, Speculation):
        return True
    return (wanted.mode if isinstance(wanted, Speculate) else wanted or "off") != "off"


def check_speculate(model: LoadedBundle, wanted: Speculate) -> None:
    """Refuse what a bundle cannot do.

    Raises:
        UsageError: a named drafter in a bundle without verify graphs, more drafts than these have room for, a tree on
            an engine that cannot check one, or a draft bundle with another tokenizer.
    """
    rows = model.verify_rows
    if not rows and wanted.mode not in ("auto", "off"):
        refuse("speculate", f"{wanted.mode} in a bundle without verify graphs", "verify graphs", EXPORT_FIX)
    if rows and wanted.tokens is not None and wanted.tokens >= rows[-1]:
        found = f"{wanted.tokens} drafts of a pass"
        most = f"at most {rows[-1] - 1}: the largest verify graph has {rows[-1]} rows, one of them no draft"
        refuse("speculate: tokens", found, most, f"Give less, or export with --draft-rows {wanted.tokens + 1}.")
    if rows and wanted.tree and not model.takes_trees:
        found, fix = f"the engine {model.engine}, whose sums depend on the columns of tokens", "Leave it out."
        refuse("draft tree", found, "an engine that gives a token the same bits in any column, such as htp", fix)
    if wanted.draft is not None:
        check_draft(model, wanted.draft)


def make_speculation(model: LoadedBundle, wanted: Speculate | SpeculateMode | Speculation | None) -> Speculation | None:
    """The speculation of one call; None for none, as with `auto` in a bundle without verify graphs.

    A `Speculation` is used as it is.

    Raises:
        UsageError: see `Speculate` and `check_speculate`.
    """
    if isinstance(wanted, Speculation):
        return wanted
    chosen = wanted if isinstance(wanted, Speculate) else Speculate(wanted or "off")
    check_speculate(model, chosen)
    rows = model.verify_rows
    if not rows or not speculates(chosen):
        return None
    sources: list[Source] = []
    if chosen.mode in ("lookup", "auto"):
        sources.append(PromptLookup(tree=chosen.tree))
    if chosen.corpus is not None:
        sources.append(CorpusDrafter(chosen.corpus, tree=chosen.tree))
    if chosen.draft is not None:
        sources.append(BundleDrafter(chosen.draft, model.bundle.manifest.model.vocab))
    most = chosen.tokens or rows[-1] - 1
    if chosen.mode == "auto":
        drafter = AdaptiveDrafter(sources, rows, model.draft_record, most)
        return Speculation(drafter, drafter)
    (source,) = sources
    return Speculation(source, AtMost(most))
