"""`python -m edgekv` is the command `edgekv`."""

from edgekv.cli import main

main()
