"""How the export of large layers scales over pinned workers when their matrices are pieces of their own.

    python -m benchmarks.sweep_layers FOLDER [--shape llama-3.2-1b] [--layers 1] [--recipe w4a16] [--workers 1,2]
        [--calculate]

FOLDER keeps a random checkpoint of the shape, with so many layers and a small vocabulary. With `--calculate` no
workers are started, for a machine that does other work: the pieces that quantize run one after another, and the times
of so many workers follow from their processor seconds. Otherwise each worker is a process
pinned to a core of its own; the store is a new folder for each run.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from benchmarks.large_checkpoint import SHAPES, write_large_checkpoint
from benchmarks.sweep_at_scale import Piece, simulate
from benchmarks.sweep_compile import cluster
from devices import find
from exporters.options import ExportOptions
from exporters.quantize.recipe import find_recipe
from exporters.sweep.carry import Where
from exporters.sweep.planning import Planner
from exporters.sweep.single import export_on
from exporters.sweep.store import RECORD, PieceRecord, PieceStore

_VOCABULARY = 2048
_KINDS = ("layer", "run", "matrix")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.2-1b", choices=SHAPES)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--recipe", default="w4a16")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--workers", default="1,2")
    parser.add_argument("--calculate", action="store_true")
    given = parser.parse_args()
    changes = {"num_hidden_layers": given.layers, "vocab_size": _VOCABULARY}
    checkpoint = write_large_checkpoint(given.folder / f"{given.shape}-{given.layers}", given.shape, changes)
    options = ExportOptions(
        device=find("SM8650"),
        recipe=find_recipe(given.recipe),
        context=(512,),
        ar=(1, 32),
        calibration_tokens=given.tokens,
        check_on_htp=False,
    )
    if given.calculate:
        _calculate(str(checkpoint), options, [*map(int, given.workers.split(","))])
        return
    written = None
    print("pieces          workers  seconds  from the first layer's start to its end  same integers")
    for divide in (False, True):
        for count in map(int, given.workers.split(",")):
            with tempfile.TemporaryDirectory() as name, cluster(Path(name), count) as address:
                where = Where(Path(name), scheduler=address, say=lambda line: None, divide=divide)
                start = time.perf_counter()
                made = export_on(str(checkpoint), Path(name) / "bundle", options, where, force=False)
                taken_s = time.perf_counter() - start
                spans = _spans(Path(name) / "pieces")
            files = {file: record.sha256 for file, record in made.files.items()}
            written = written or files
            kind = "matrices" if divide else "whole layers"
            quantized_s = max(end for _, end in spans.values()) - min(begin for begin, _ in spans.values())
            same = "yes" if files == written else "NO"
            print(f"{kind:14}  {count:7}  {taken_s:7.1f}  {quantized_s:40.1f}  {same:>13}", flush=True)


def _calculate(checkpoint: str, options: ExportOptions, workers: Sequence[int]) -> None:
    """Time pieces in this process, and simulate workers that do them."""
    print("pieces          workers  calculated seconds  x one worker")
    for divide in (False, True):
        planner, timed = Planner(checkpoint, divide=divide), list[Piece]()
        planner.export(options)
        with tempfile.TemporaryDirectory() as name:
            store = PieceStore(name)
            for piece in planner.plan.pieces.values():
                start = time.process_time()
                store.make(piece.key, piece.kind, partial(piece.work, store=store))
                if piece.kind in _KINDS:
                    seconds = time.process_time() - start
                    timed.append(Piece(piece.key, piece.kind, seconds, 1, 0.0, piece.needs))
        names = {each.name for each in timed}
        timed = [replace(each, needs=tuple(need for need in each.needs if need in names)) for each in timed]
        one_s = sum(each.seconds for each in timed)
        for count in workers:
            taken_s = simulate(timed, count, 1, 1e9, 1e9, 0.0).seconds
            kind = "matrices" if divide else "whole layers"
            print(f"{kind:14}  {count:7}  {taken_s:18.1f}  {one_s / taken_s:12.2f}", flush=True)


def _spans(store: Path) -> dict[str, tuple[float, float]]:
    """When the pieces that quantize began and ended, in seconds."""
    found = {}
    for file in store.glob(f"*/{RECORD}"):
        record = msgspec.json.decode(file.read_bytes(), type=PieceRecord)
        if record.kind in _KINDS:
            end = file.stat().st_mtime
            found[file.parent.name] = (end - record.seconds, end)
    return found


if __name__ == "__main__":
    main()
