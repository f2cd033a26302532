"""Starting commands that a test interrupts."""

from __future__ import annotations

import signal


def interruptible() -> None:
    """For `preexec_fn`: a shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and so these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
