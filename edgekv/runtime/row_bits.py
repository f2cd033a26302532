"""What an engine says about the bits of a token's results."""

from __future__ import annotations

from typing import Literal, TypeAlias

RowBits: TypeAlias = Literal["equal", "in-place", "unequal"]
"""Whether a token's results have the same bits alone and beside others, in graphs of every AR.

- `equal`: always.
- `in-place`: if each token it sees is in the same column of both graphs: sums are in the order of the columns.
- `unequal`: not always, so that drafts cannot be verified.
"""
