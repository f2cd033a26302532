"""The command to run next, which commands that write a folder name at their end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgekv.bundle import Manifest


def next_line(bundle: Path, manifest: Manifest, *, is_compiled: bool) -> str:
    """`next: COMMAND`: compile what was exported, then run it.

    The emulator of this machine loads binaries of whole graphs only, so graphs in parts are run on the CPU.
    """
    from edgekv.spec.chat import read_bundle_templates

    folder = shlex.quote(str(bundle))
    if not is_compiled:
        return f"next: edgekv compile {folder} --device {manifest.device}"
    if manifest.target is not None:
        return f'next: edgekv generate TARGET --draft {folder} --prompt "Once upon a time" --engine htp'
    engine = ""
    if manifest.graph_format == "tflite":
        engine = " --engine litert"
    elif manifest.is_whole:
        engine = " --engine htp"
    if read_bundle_templates(bundle) is not None:
        return f"next: edgekv chat {folder}{engine}"
    return f'next: edgekv generate {folder} --prompt "Once upon a time"{engine}'


def next_command(command: str, folder: Path, options: str = "") -> str:
    """`next: COMMAND`: what runs a folder that was written for another runtime."""
    return f'next: edgekv {command} {shlex.quote(str(folder))} {options} --prompt "Once upon a time"'.replace("  ", " ")
