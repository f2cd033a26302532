"""The command `edgekv`: parse, call, print."""

from edgekv.cli.app import main, run

__all__ = ["main", "run"]
