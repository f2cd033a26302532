"""Drafts of the next tokens, which the model checks several at a time. Knows tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.machine.lazy import lazy

if TYPE_CHECKING:
    from edgekv.draft.adaptive import (
        Acceptance as Acceptance,
        AdaptiveDrafter as AdaptiveDrafter,
        DraftRecord as DraftRecord,
        Source as Source,
    )
    from edgekv.draft.corpus import (
        CorpusDrafter as CorpusDrafter,
        CorpusIndex as CorpusIndex,
        build_index as build_index,
        open_corpus as open_corpus,
    )
    from edgekv.draft.lookup import PromptLookup as PromptLookup, SuffixAutomaton as SuffixAutomaton
    from edgekv.draft.speculation import (
        Drafter as Drafter,
        Speculation as Speculation,
        SpeculationMode as SpeculationMode,
    )
    from edgekv.draft.tree import DraftTree as DraftTree, as_tree as as_tree

__getattr__, __all__ = lazy(__name__, __file__)
