"""Drafts of the next tokens, which the model checks several at a time. Knows tokens only."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edgekv.lazy import lazy

if TYPE_CHECKING:
    from edgekv.draft.acceptance import Acceptance
    from edgekv.draft.adaptive import AdaptiveDrafter, FixedLimit, Source
    from edgekv.draft.automaton import Match, SuffixAutomaton
    from edgekv.draft.corpus import CorpusDrafter, open_corpus
    from edgekv.draft.corpus_index import CorpusIndex, build_index
    from edgekv.draft.drafter import Drafter, Pacer
    from edgekv.draft.lookup import PromptLookup
    from edgekv.draft.pass_costs import PassCosts
    from edgekv.draft.record import DraftRecord
    from edgekv.draft.speculation import Speculation, SpeculationMode
    from edgekv.draft.tree import DraftTree, as_tree

__all__ = [
    "Acceptance",
    "AdaptiveDrafter",
    "FixedLimit",
    "CorpusDrafter",
    "CorpusIndex",
    "DraftRecord",
    "DraftTree",
    "Drafter",
    "Match",
    "Pacer",
    "PassCosts",
    "PromptLookup",
    "Source",
    "Speculation",
    "SpeculationMode",
    "SuffixAutomaton",
    "as_tree",
    "build_index",
    "open_corpus",
]

__getattr__ = lazy(
    __name__,
    {
        "acceptance": "Acceptance",
        "adaptive": "AdaptiveDrafter FixedLimit Source",
        "automaton": "Match SuffixAutomaton",
        "corpus": "CorpusDrafter open_corpus",
        "corpus_index": "CorpusIndex build_index",
        "drafter": "Drafter Pacer",
        "lookup": "PromptLookup",
        "pass_costs": "PassCosts",
        "record": "DraftRecord",
        "speculation": "Speculation SpeculationMode",
        "tree": "DraftTree as_tree",
    },
)
