"""Where the pieces of a command run, and the cluster for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from exporters.progress import Progress, silent
from exporters.sweep.cluster import LOCAL, connected
from exporters.sweep.fitness import Fitness, text_sha256, versions
from exporters.sweep.piece import Piece
from exporters.sweep.run import Failure, Say, check_workers, run_pieces
from exporters.sweep.source import Pinned, open_checkpoint
from exporters.sweep.store import PieceStore


@dataclass(frozen=True, slots=True)
class Where:
    """Where a sweep runs and what it leaves.

    Attributes:
        folder: of results and bundles.
        store: path or fsspec URL of the pieces; None for `pieces` in the folder.
        scheduler: `local` or an address.
        workers: number of local processes; None for one per core.
        keep_going: leave out what cannot be or fails.
        say: called with what happens to workers.
        progress: called for each kind of piece.
        divide: make the matrices of a layer pieces of their own.
        prune_days: afterwards remove pieces not used for so many days; None for none.
    """

    folder: Path
    store: str | None = None
    scheduler: str = LOCAL
    workers: int | None = None
    keep_going: bool = False
    say: Say = field(default=print)
    progress: Progress = silent
    divide: bool = False
    prune_days: float | None = None


def fitness_for(
    checkpoint: Pinned | None, calibration: Path | None, store: PieceStore, probe: str, disk_bytes: int
) -> Fitness:
    """What workers need for pieces of a checkpoint; None if they read none."""
    calibration_sha256 = "" if checkpoint is None else text_sha256(open_checkpoint(checkpoint.name), calibration)
    return Fitness(versions(), checkpoint, calibration, calibration_sha256, store, probe, disk_bytes)


def carry_out(
    pieces: dict[str, Piece], total: int, store: PieceStore, fitness: Fitness, where: Where
) -> dict[str, Failure]:
    """Do pieces on the cluster of `where`; return those that failed.

    Args:
        pieces: at least one, each after those that it needs.
        total: number of pieces with the finished ones.
        store: where they are kept.
        fitness: what workers need.
        where: the cluster.

    Raises:
        UsageError: workers do not fit.
        ServiceError: the scheduler cannot be reached, or vanished.
        EdgeKVError: a piece failed, without `keep_going`.
    """
    largest_bytes = max(piece.ram_bytes for piece in pieces.values())
    with connected(where.scheduler, where.workers, largest_bytes) as client:
        where.say(f"{len(pieces)} of {total} pieces to do; dashboard: {client.dashboard_link}")
        check_workers(client, fitness, largest_bytes, keep_going=where.keep_going, say=where.say)
        return run_pieces(client, pieces, store, fitness, where.progress, where.say, keep_going=where.keep_going)
