"""The prefix store's error, and its warning."""

from __future__ import annotations

from edgekv.errors import UsageError


class PrefixError(UsageError, ValueError):
    """An invalid setting or argument of the prefix store."""


class PrefixWarning(UserWarning):
    """A folder of prefixes that was damaged, so that the cache starts empty."""
