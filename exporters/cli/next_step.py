"""The command to run next, which commands that write a folder name at their end."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING

from edgekv.cli.extras import missing_packages

if TYPE_CHECKING:
    from edgekv.bundle import Manifest


def next_line(bundle: Path, manifest: Manifest, *, is_compiled: bool, for_cpu: bool = False) -> str:
    """`next: COMMAND`: compile what was exported, then run it; on the CPU where the HTP's packages are missing.

    The emulator of this machine loads binaries of whole graphs only, so graphs in parts are run on the CPU.
    """
    from edgekv.spec import EmbeddingTask
    from edgekv.spec.chat import read_bundle_templates

    folder = shlex.quote(str(bundle))
    runs_on_cpu = not is_compiled and (for_cpu or bool(missing_packages("edgekv", "htp")))
    if not is_compiled and not runs_on_cpu:
        return f"next: edgekv compile {folder} --device {manifest.device}"
    engine = " --engine htp" if manifest.is_whole and not runs_on_cpu else ""
    if manifest.target is not None:
        return f'next: edgekv generate TARGET --draft {folder} --prompt "Once upon a time"{engine}'
    if manifest.graph_format == "tflite":
        engine = " --engine litert"
    if manifest.task is not None:
        command = "embed" if isinstance(manifest.task, EmbeddingTask) else 'rerank --query "a tale"'
        return f'next: edgekv {command} {folder} --text "Once upon a time"{engine}'
    if read_bundle_templates(bundle) is not None:
        return f"next: edgekv chat {folder}{engine}"
    return f'next: edgekv generate {folder} --prompt "Once upon a time"{engine}'


def next_command(command: str, folder: Path, options: str = "") -> str:
    """`next: COMMAND`: what runs a folder that was written for another runtime."""
    return f'next: edgekv {command} {shlex.quote(str(folder))} {options} --prompt "Once upon a time"'.replace("  ", " ")
