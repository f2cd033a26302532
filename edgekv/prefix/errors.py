"""The prefix store's error."""

from __future__ import annotations

from edgekv.errors import UsageError


class PrefixError(UsageError, ValueError):
    """An invalid setting or argument of the prefix store."""
