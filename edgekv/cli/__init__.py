"""The command `edgekv`: parse, call, print."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import NoReturn

_NEEDED = ("click", "packaging", "rich")


def main() -> NoReturn:
    """The entry point of the program: run the arguments of the process and exit."""
    if missing := [each for each in _NEEDED if find_spec(each) is None]:
        print(
            f"edgekv: error: the command: got no {', '.join(missing)}; expected the packages of edgekv[cli]. "
            'Run pip install "edgekv[cli]" to run bundles, or pip install "edgekv[export]" to make them too. '
            "In Python, edgekv.load works without.",
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
