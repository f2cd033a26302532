"""What of edgekv works on this machine: installed packages, and engines that are tried, each in a process of its own.

`probes` has those of this package; others join through the entry-point group `edgekv.probes`, with a function that
takes nothing and returns a `Finding`.
"""

from edgekv.doctor.examine import Examination, examine
from edgekv.doctor.finding import Finding, Status, require
from edgekv.doctor.packages import Package, list_packages

__all__ = ["Examination", "Finding", "Package", "Status", "examine", "list_packages", "require"]
