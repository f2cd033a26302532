"""What a model's speculation has measured so far."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from edgekv.draft.acceptance import Acceptance
from edgekv.draft.pass_costs import PassCosts


@dataclass(frozen=True, slots=True)
class DraftRecord:
    """Measurements that all texts of a model share, so that a new one need not begin without.

    Attributes:
        costs: of passes.
        acceptance: of drafts, by the name of their drafter.
    """

    costs: PassCosts = field(default_factory=PassCosts)
    acceptance: defaultdict[str, Acceptance] = field(default_factory=lambda: defaultdict(Acceptance))
