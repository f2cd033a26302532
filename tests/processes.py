"""Starting commands that a test interrupts."""

from __future__ import annotations

import signal


def interruptible() -> None:
    """For `preexec_fn`: a shell starts background jobs, and so these tests perhaps, with SIGINT ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
