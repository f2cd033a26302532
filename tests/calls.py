"""How many random calls a test makes: a few, and more in a long run, `make test-long`."""

from __future__ import annotations

import os

VARIABLE = "EDGEKV_TEST_CALLS"


def calls(usual: int) -> int:
    """The usual number, or that of EDGEKV_TEST_CALLS if it is larger."""
    return max(usual, int(os.environ.get(VARIABLE) or 0))
