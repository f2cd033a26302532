"""Drafts of the next tokens, which the model checks several at a time. Knows tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.draft.acceptance import Acceptance as Acceptance
    from edgekv.draft.adaptive import AdaptiveDrafter as AdaptiveDrafter, FixedLimit as FixedLimit, Source as Source
    from edgekv.draft.automaton import Match as Match, SuffixAutomaton as SuffixAutomaton
    from edgekv.draft.corpus import CorpusDrafter as CorpusDrafter, open_corpus as open_corpus
    from edgekv.draft.corpus_index import CorpusIndex as CorpusIndex, build_index as build_index
    from edgekv.draft.drafter import Drafter as Drafter, Pacer as Pacer
    from edgekv.draft.lookup import PromptLookup as PromptLookup
    from edgekv.draft.pass_costs import PassCosts as PassCosts
    from edgekv.draft.record import DraftRecord as DraftRecord
    from edgekv.draft.speculation import Speculation as Speculation, SpeculationMode as SpeculationMode
    from edgekv.draft.tree import DraftTree as DraftTree, as_tree as as_tree

__getattr__, __all__ = lazy(__name__, __file__)
