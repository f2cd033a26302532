"""Commands that a test interrupts, what killed ones leave, and what folders hold."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path


def interruptible() -> None:
    """For `preexec_fn`: a shell starts background jobs with SIGINT ignored, nohup with SIGHUP, and so these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def left_by_a_killed_process(parent: Path, prefix: str) -> Path:
    """A folder of `held_folder` whose process was killed."""
    held = "import sys, time; from pathlib import Path; from edgekv.machine.scratch import held_folder\n"
    held += "with held_folder(Path(sys.argv[1]), sys.argv[2]) as folder: print(folder, flush=True); time.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", held, str(parent), prefix], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        folder = Path(child.stdout.readline().decode().strip())
        child.kill()
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """The files of a folder by their relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
