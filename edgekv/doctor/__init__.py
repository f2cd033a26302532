"""Checks of this machine: installed packages, and engines, each tried in its own process.

A package adds a probe through the entry-point group `edgekv.probes`: a function without arguments that returns a
`Finding`.
"""

from edgekv.doctor.examine import Examination, examine
from edgekv.doctor.finding import Finding, Status, require
from edgekv.doctor.packages import Package, list_packages

__all__ = ["Examination", "Finding", "Package", "Status", "examine", "list_packages", "require"]
