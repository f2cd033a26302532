"""Checks of this machine: installed packages, and engines, each tried in its own process.

A package adds a probe through the entry-point group `edgekv.probes`: a function without arguments that returns a
`Finding`.
"""

from edgekv.doctor.examine import Examination as Examination, examine as examine
from edgekv.doctor.finding import Finding as Finding, Status as Status, require as require
from edgekv.doctor.packages import Package as Package, list_packages as list_packages
