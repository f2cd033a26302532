"""README.md and docs/*.md: every command runs, and prints what is shown below it.

A block that cannot run here says why in a comment above it, `<!-- not run: REASON -->`; pytest's summary lists them as
skipped.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet
from filelock import FileLock

from edgekv.cli import run
from tests.support.exports import export_options, exported, kept, quantized_layers
from tests.support.pages import PAGES, ROOT, Block, Command, blocks, difference, name_of

BUNDLE, DRAFTING = "build/stdlib-4m", "build/drafting"
"""Bundles of the embedded model; the second has verify graphs."""
DEMO = (
    f"edgekv export models/stdlib-4m -o {BUNDLE} --device SM8650",
    f"edgekv compile {BUNDLE} --device SM8650",
)
"""What pages begin with. It runs once for all workers."""
EXTRA = re.compile(r'pip install "?edgekv(?:\[([\w,]+)\])?"?')
ALL = [block for page in PAGES for block in blocks(page)]
LONG = (
    "guides/lora.md",
    "guides/pictures.md",
    "guides/quality.md",
    "guides/speculation.md",
    "guides/troubleshooting.md",
    "reference/runtimes/",
)
"""Beginnings of pages whose commands take many seconds; other tests run the same code on smaller models."""


class Scratch:
    """A folder like the repository's root, which the workers of a run share: each command line runs in it once."""

    def __init__(self, folder: Path, embedded: Path) -> None:
        self.folder = folder
        self._embedded = embedded
        for name in ("build", "printed"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / "models").symlink_to(ROOT / "models")

    @cached_property
    def _environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        return {**os.environ, "PATH": path, "EDGEKV_CACHE_DIR": str(self.folder / "cache"), "COLUMNS": "200"}

    def run(self, command: Command) -> str:
        """What a command line prints; it must succeed."""
        line = command.line
        printed = self.folder / "printed" / sha256(line.encode()).hexdigest()
        with FileLock(printed.with_suffix(".lock")):
            if not printed.exists():
                self._provide_bundles(line)
                printed.write_text(self._demo()[line] if line in DEMO else self._run_line(line))
        return printed.read_text()

    def run_python(self, program: str) -> None:
        self._provide_bundles(program)
        self._run([sys.executable, "-c", program])

    def _run_line(self, line: str) -> str:
        """Exports take layers from each other, which changes none of their files."""
        if not line.startswith("edgekv export"):
            return self._run(["bash", "-c", line])
        with quantized_layers("docs") as layers:
            return self._run(["bash", "-c", f"{line} --resume --keep-pieces --cache-dir {shlex.quote(str(layers))}"])

    def _demo(self) -> dict[str, str]:
        """What the commands of the demonstration print; the bundle is in place then."""

        def make(folder: Path) -> None:
            scratch = Scratch(folder, self._embedded)
            printed = {line: scratch._run_line(line) for line in DEMO}
            (folder / "models").unlink()
            shutil.rmtree(folder / "cache", ignore_errors=True)
            (folder / "printed.json").write_text(json.dumps(printed))

        made = kept("docs", ("exporters.cli.export", "exporters.cli.compile"), make, DEMO)
        self._copy(made / BUNDLE, BUNDLE)
        return dict[str, str](json.loads((made / "printed.json").read_text()))

    def _provide_bundles(self, named_in: str) -> None:
        if BUNDLE in named_in:
            self._demo()
        if DRAFTING in named_in:
            options = export_options(context=512, ar=(1, 32), draft_rows=(8, 16))
            self._copy(exported(self._embedded, options), DRAFTING)

    def _copy(self, bundle: Path, name: str) -> None:
        with FileLock(self.folder / "printed" / "bundles.lock"):
            if not (self.folder / name).exists():
                shutil.copytree(bundle, self.folder / name)

    def _run(self, arguments: list[str]) -> str:
        done = subprocess.run(arguments, cwd=self.folder, env=self._environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments[-1]}\n{done.stdout}\n{done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Scratch:
    mine = tmp_path_factory.getbasetemp()
    return Scratch((mine.parent if "PYTEST_XDIST_WORKER" in os.environ else mine) / "docs", embedded)


def with_commands() -> list[ParameterSet]:
    marks = {page: [pytest.mark.thorough] if name_of(page).startswith(LONG) else [] for page in PAGES}
    return [pytest.param(page, marks=marks[page], id=name_of(page)) for page in PAGES]


@pytest.mark.htp
@pytest.mark.parametrize("page", with_commands())
def test_commands_print_what_the_page_shows(scratch: Scratch, page: Path) -> None:
    differences = []
    for block in blocks(page):
        if block.not_run:
            continue
        if block.kind == "python":
            scratch.run_python(block.text)
        for command in block.commands if block.kind == "console" else ():
            if not command.line.startswith("edgekv "):
                continue  # the next test
            printed = scratch.run(command).splitlines()
            found = command.shown and difference(command.shown, printed, block.tolerance)
            if found:
                differences.append(f"$ {command.line}\n{found}")
    assert not differences, "\n\n".join(differences)


def test_other_commands_name_targets_and_extras_that_there_are() -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for block in ALL:
        for command in block.commands if block.kind == "console" and not block.not_run else ():
            program, *words = command.line.split("#")[0].split()
            if program == "make":
                assert set(words) <= targets, command.line
            elif program == "pip":
                named = EXTRA.search(command.line)
                assert named and {*(named[1] or "").split(",")} - {""} <= extras.keys(), command.line
            else:
                assert program == "edgekv", f"{block.page.name}: {command.line}: say why it is not run"


@pytest.mark.parametrize("block", [block for block in ALL if block.not_run], ids=lambda block: name_of(block.page))
def test_blocks_that_do_not_run_here(block: Block) -> None:
    """Commands and options that exist, at least."""
    for command in block.commands if block.kind == "console" else ():
        if command.line.startswith("edgekv "):
            _, *words = shlex.split(command.line, comments=True)
            assert run([*words, "--help"]) == 0, command.line
    pytest.skip(f"{block.page.name}: {block.not_run}: {block.text.splitlines()[0]}")


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["a 1.00", "b"], ["a 1.04", "b"]),
        (["a", "...", "d"], ["a", "b", "c", "d"]),
        (["a", "..."], ["a"]),
        (["first, second 4, ..."], ["first, second 4, third 5"]),
        (["1 s, 20 tokens/s, 0.2 GB of RAM"], ["9 s, 7 tokens/s, 1.2 GB of RAM"]),
        (["columns    2", "", "x"], ["columns 2", "x", ""]),
    ],
)
def test_outputs_that_count_as_equal(shown: list[str], printed: list[str]) -> None:
    assert difference(shown, printed) is None


@pytest.mark.parametrize(
    ("shown", "printed"),
    [
        (["a 1.00"], ["a 1.06"]),
        (["a"], ["b"]),
        (["a"], ["a", "b"]),
        (["a", "b"], ["a"]),
        (["...", "b"], ["a", "c"]),
        (["a", "...", "d"], ["x", "a", "d"]),
        (["a 1 ..."], ["b 1 c"]),
        (["4 layers"], ["four layers"]),
    ],
)
def test_outputs_that_do_not(shown: list[str], printed: list[str]) -> None:
    assert difference(shown, printed) is not None


def test_comments_above_a_block_say_how_it_is_compared(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "text\n\n<!-- tolerance: 20 % -->\n```console\n$ edgekv a\nout\n\n$ edgekv b # why\n```\n"
        "<!-- not run: no network -->\n\n```python\nimport edgekv\n```\n```json\n{}\n```\n"
    )
    one, other = blocks(page)
    assert [*one.commands] == [Command("edgekv a", ("out",)), Command("edgekv b # why")]
    assert (one.tolerance, one.not_run, other.kind, other.not_run) == (0.2, None, "python", "no network")
