"""The limits that plans are checked against, each in one place."""

from __future__ import annotations

HTP_CONTEXT_BYTES = 3_750_000_000
"""Capacity of one HTP context, observed, not documented: it addresses 4 GB, part of which the runtime needs."""

PROTOBUF_BYTES = (1 << 31) - 1
"""The largest protobuf, and so the largest file of one graph."""

MOST_CONTEXT = 1 << 20
"""The longest context that is planned: 1,048,576 tokens."""

MOST_GRAPHS = 16
"""Maximum number of ARs of one plan."""
