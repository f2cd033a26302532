"""What a user can set wrongly."""

from __future__ import annotations

from edgekv.errors import UsageError


class PrefixError(UsageError, ValueError):
    """A setting or argument of the prefix store that cannot be: names the field, what was found and what is wanted."""
