"""The command `edgekv`: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

_FRAMEWORK = "typer"


def main() -> NoReturn:
    """The entry point of the program: run the arguments of the process and exit."""
    if find_spec(_FRAMEWORK) is None:
        print(
            f'edgekv: error: command line: got no package {_FRAMEWORK}; expected it. Run pip install "edgekv[cli]"; '
            "edgekv.load works without it.",
            file=sys.stderr,
        )
        sys.exit(1)
    from edgekv.cli.app import main

    main()


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; see `exit_code_of`."""
    from edgekv.cli.app import run

    return run(arguments)


__all__ = ["main", "run"]
