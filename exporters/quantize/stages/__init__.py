"""Finished parts of exports and compilations, kept in a cache directory for --resume."""

from exporters.quantize.stages.binaries import FinishedBinaries
from exporters.quantize.stages.checks import Checks
from exporters.quantize.stages.keys import program_sha256, stage_keys
from exporters.quantize.stages.resumable import quantize_in_stages
from exporters.quantize.stages.stage import Stage, StagedMatrices
from exporters.quantize.stages.store import StageStore, stage_store

__all__ = [
    "Checks",
    "FinishedBinaries",
    "Stage",
    "StageStore",
    "StagedMatrices",
    "program_sha256",
    "quantize_in_stages",
    "stage_keys",
    "stage_store",
]
