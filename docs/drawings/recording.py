"""python -m docs.drawings.recording: record README's commands in a terminal as a moving SVG.

The commands run; every piece of output appears when it came. Longer waits than 0.3 s are shortened to that.
"""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
COMMANDS = (
    "edgekv export models/stdlib-4m -o build/stdlib-4m --device SM8650",
    "edgekv compile build/stdlib-4m --device SM8650",
    'edgekv generate build/stdlib-4m --prompt "def main(" --max-new-tokens 40 --engine htp',
)
COLUMNS, WIDTH, HEIGHT = 104, 8.0, 18.0
LONGEST_WAIT, TYPED_AFTER = 0.3, 0.8
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\r")


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that appears at once, and the seconds since the piece before."""

    wait: float
    text: str


def record(command: str, folder: Path) -> Iterator[Piece]:
    """What a command prints on a terminal, as it comes. Its progress goes to a pipe, so there are no bars."""
    reading, writing = pty.openpty()
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "EDGEKV_CACHE_DIR": str(folder / "cache")}
    start = time.monotonic()
    with subprocess.Popen(
        ["bash", "-c", command], cwd=folder, env=environment, stdout=writing, stderr=subprocess.PIPE
    ) as child:
        os.close(writing)
        while True:
            try:
                read = os.read(reading, 4096)
            except OSError:  # the other end is closed
                break
            if not read:
                break
            yield Piece(time.monotonic() - start, _CONTROL.sub("", read.decode("utf-8", "replace")))
            start = time.monotonic()
        said = child.stderr.read().decode() if child.stderr else ""
    if child.returncode:
        raise SystemExit(f"{command}\n{said}")
    last = said.splitlines()[-1:]  # the line of figures
    if last and last[0].startswith("["):
        yield Piece(0, f"{last[0]}\n")


def draw(pieces: list[Piece]) -> str:
    """The recording as SVG. Viewers that do not animate show the end."""
    now, row, column, shapes = 0.0, 0, 0, []
    for piece in pieces:
        now += min(piece.wait, LONGEST_WAIT)
        for number, line in enumerate(piece.text.split("\n")):
            if number:
                row, column = row + 1, 0
            while line:
                shown, line = line[: COLUMNS - column], line[COLUMNS - column :]
                if shown.strip():
                    kind = "typed" if shown.startswith("$ ") else "out"
                    shapes.append(
                        f'<text class="{kind}" x="{16 + column * WIDTH:g}" y="{50 + row * HEIGHT:g}" '
                        f'textLength="{len(shown) * WIDTH:g}" style="animation-delay:{now:.2f}s">{escape(shown)}</text>'
                    )
                column += len(shown)
                if line:
                    row, column = row + 1, 0
    width, height = 32 + COLUMNS * WIDTH, 50 + (row + 1) * HEIGHT
    style = (
        "text{font:13px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;white-space:pre;fill:#d1d7e0;"
        "animation:show .01s linear both}.typed{fill:#7ee787}@keyframes show{from{opacity:0}to{opacity:1}}"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" role="img" xml:space="preserve"><title>Export, compile and generate in a terminal</title>'
        f'<style>{style}</style><rect width="{width:g}" height="{height:g}" rx="8" fill="#151b23"/>'
        '<circle cx="20" cy="18" r="5" fill="#f85149"/><circle cx="38" cy="18" r="5" fill="#d29922"/>'
        f'<circle cx="56" cy="18" r="5" fill="#3fb950"/>{"".join(shapes)}</svg>\n'
    )


def main() -> None:
    pieces = list[Piece]()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "models").symlink_to(ROOT / "models")
        for command in COMMANDS:
            pieces.append(Piece(TYPED_AFTER, f"$ {command}\n"))
            pieces += record(command, folder)
            pieces.append(Piece(0, "\n"))
    (ROOT / "docs" / "images" / "terminal.svg").write_text(draw(pieces), "utf-8")


if __name__ == "__main__":
    main()
