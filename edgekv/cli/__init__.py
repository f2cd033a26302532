"""The command `edgekv`: parse, call, print."""

from __future__ import annotations

import platform
import sys
from collections.abc import Sequence
from typing import NoReturn

_OLDEST = (3, 11)


def main() -> NoReturn:
    """The entry point of the program: run the arguments of the process and exit."""
    if refusal := refused_interpreter(sys.version_info[:2], sys.maxsize.bit_length() + 1):
        print(f"edgekv: error: {refusal}", file=sys.stderr)
        sys.exit(1)
    from edgekv.machine.blas import use_fastest_kernels

    use_fastest_kernels()  # before numpy is imported
    from edgekv.cli.app import main

    main()


def refused_interpreter(version: tuple[int, int], bits: int) -> str | None:
    """Why edgekv does not run on an interpreter, and what it runs on; None if it does."""
    if version >= _OLDEST and bits == 64:
        return None
    return (
        f"Python: got {version[0]}.{version[1]} of {bits} bits on {platform.system()} {platform.machine()}; "
        "expected 3.11 to 3.13 of 64 bits. Install one, and edgekv in an environment of it."
    )


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; see `exit_code_of`."""
    from edgekv.cli.app import run

    return run(arguments)
