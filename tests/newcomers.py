"""Follow pages word for word in a clean environment, as a newcomer does: python -m tests.newcomers TASK [DIST]

Every command of the named parts of a page runs as it stands, in order, in one shell; files of a page are written where
their titles say. Nothing may be left to a guess: a command that fails ends the run. They run in a clone; what names
the package `edgekv` takes the wheel in DIST (build/dist, made by .ci/wheel).
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>console|python)(?: title=\"(?P<file>[^\"]+)\")?\n(?P<text>.*?)^ *```$", re.M | re.S
)
WAIT = 'until curl --silent --fail http://127.0.0.1:8080/health >/dev/null; do kill -0 "$!"; sleep 0.3; done'


@dataclass(frozen=True, slots=True)
class Part:
    """A page, or one section of it.

    Attributes:
        page: its path.
        section: the heading, as it is written; empty for the whole page.
    """

    page: str
    section: str = ""

    def text(self) -> str:
        text = (ROOT / self.page).read_text("utf-8")
        if not self.section:
            return text
        level = len(self.section) - len(self.section.lstrip("#"))
        found = re.search(rf"^{re.escape(self.section)}\n.*?(?=^#{{1,{level}}} |\Z)", text, re.M | re.S)
        assert found, f"{self.page} has no {self.section}"
        return found[0]


LAPTOP = Part("docs/start/laptop.md")
SNAPDRAGON = Part("docs/guides/devices/snapdragon-x.md", "## 1. Export on Linux x86-64 (or WSL 2 of an x86-64 PC)")
TASKS = {
    "first-chat": (LAPTOP,),
    "serve": (LAPTOP, Part("docs/start/serve.md")),
    "snapdragon-x": (
        Part("docs/guides/devices/snapdragon-x.md", "## 1. Export on Linux x86-64 (or WSL 2 of an x86-64 PC)"),
    ),
    "architecture": (Part("CONTRIBUTING.md", "## Add an architecture"),),
}
INTERACTIVE = re.compile(r"^edgekv chat \S+$")  # a conversation: a person types
FINDS = {
    "first-chat": "Paris",
    "serve": "Paris",
    "snapdragon-x": "compiled for   SC8380XP",
    "architecture": "build/mini",
}


def commands(part: Part) -> Iterator[str]:
    """Shell lines that do what a part says."""
    for match in BLOCK.finditer(part.text()):
        text = textwrap.dedent(match["text"])
        if match["file"]:
            yield f"cat > {match['file']} <<'END_OF_FILE'\n{text}END_OF_FILE"
        elif match["kind"] == "python":
            yield f"pip install openai >/dev/null && python - <<'END_OF_FILE'\n{text}END_OF_FILE"
        for line in text.splitlines() if match["kind"] == "console" else ():
            if not line.startswith("$ "):
                continue
            command = line.removeprefix("$ ")
            yield f"printf '%s\\n' {_quoted('$ ' + command)}"
            if command.startswith("edgekv serve"):  # it runs while the second terminal is used
                yield f"{command} & \n{WAIT}"
            elif INTERACTIVE.match(command):
                yield f"printf '/quit\\n' | {command}"
            else:
                yield command


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def main(task: str, dist: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        lines = ["set -euo pipefail", "trap 'kill $(jobs -p) 2>/dev/null || true' EXIT"]
        subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder / "edgekv")], check=True)
        lines += ["cd edgekv"]  # where all pages begin
        if task == "architecture":  # CONTRIBUTING begins in one that is set up
            lines += ["python3 -m venv .venv", ". .venv/bin/activate"]
            lines += ["pip install --quiet --editable '.[export,htp]'"]
        lines += [line for part in TASKS[task] for line in commands(part)]
        start = time.monotonic()
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=folder,
            env=clean_environment(folder, dist),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0, f"{task}: a command of the pages failed"
        assert FINDS[task] in done.stdout, f"{task}: the output has no {FINDS[task]!r}"
        ran = sum(line.startswith("$ ") for line in done.stdout.splitlines())
        binaries = sum(path.stat().st_size for path in folder.rglob("*_qnn.bin")) / 1e6
    took = time.monotonic() - start
    print(f"{task}: {ran} commands as they stand, 0 guesses, {took:.0f} s, {binaries:.0f} MB of binaries")


def clean_environment(folder: Path, dist: Path) -> dict[str, str]:
    """No variable of the caller's but those that say where packages come from."""
    own = {name: value for name, value in os.environ.items() if name.startswith("PIP_") or name == "PATH"}
    cache = str(folder / "cache")
    return own | {"HOME": str(folder), "LANG": "C.UTF-8", "EDGEKV_CACHE_DIR": cache, "PIP_FIND_LINKS": str(dist)}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2] if len(sys.argv) > 2 else ROOT / "build" / "dist").resolve())
