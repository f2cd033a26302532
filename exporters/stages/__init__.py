"""What an export or a compilation has finished, kept in a cache directory so that it need not be done again."""

from exporters.stages.binaries import FinishedBinaries
from exporters.stages.checks import Checks
from exporters.stages.keys import stage_keys
from exporters.stages.stage import Stage
from exporters.stages.store import StageStore, stage_store
from exporters.stages.walk import StagedMatrices, quantize_in_stages

__all__ = [
    "Checks",
    "FinishedBinaries",
    "Stage",
    "StageStore",
    "StagedMatrices",
    "quantize_in_stages",
    "stage_keys",
    "stage_store",
]
