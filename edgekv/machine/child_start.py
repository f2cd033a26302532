"""The first code of a child process: `python -m edgekv.machine.child_start PARENT KIND ARGUMENTS`.

Linux kills the child when the parent dies, even by SIGKILL. Elsewhere an orphaned child ends when its work is done.
PARENT is the parent's process id, or 0 to survive it. KIND is `calls`, with limits of memory and time; or `program`,
with the program and its arguments.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from contextlib import suppress

_PR_SET_PDEATHSIG = 1


def main() -> None:
    parent, kind, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if parent:
        die_with(parent)
    if kind == "program":
        if os.name == "nt":  # `execv` would end this process at once, with the exit code 0
            import subprocess

            sys.exit(subprocess.call(arguments))
        os.execv(arguments[0], arguments)  # the death signal stays set
    from edgekv.machine.child import serve

    serve(int(arguments[0]), float(arguments[1]))


def die_with(parent: int) -> None:
    """Have this process killed when the thread of the parent that started it ends."""
    if not sys.platform.startswith(("linux", "android")):
        return
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        sys.exit("the parent process has ended")


if __name__ == "__main__":
    main()
