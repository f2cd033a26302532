"""What a sweep saves: processor and wall time of a sweep and of separate exports and evaluations, and equal bytes.

    python -m benchmarks.sweep_saving CHECKPOINT --text FILE -o DIR [--recipes ...] [--kv ...] [--devices ...]
        [--contexts ...] [--calibration-tokens 1024] [--tokens 500] [--separate NAME,...]

The sweep runs once; then each combination of `--separate` (all by default) is exported and evaluated by itself, with a
cache folder of its own, and its files are compared with those of the sweep. What was timed is kept in DIR and not run
again. Combinations without a time take that of one with the same recipe and cache and another chip, whose work is the
same, or else the mean of those that have one; the table says which. Processor time is that of the command and of all
its processes, and wall time that of the command; other programs on the machine disturb the latter more.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import fmean

import msgspec

from edgekv.machine.scratch import atomic_file
from exporters.sweep.result import Result, SweepReport


class Timed(msgspec.Struct, frozen=True):
    """What a command took.

    Attributes:
        cpu_s: processor time of all its processes.
        wall_s: from start to end.
        same: whether its files are those of the sweep; None for the sweep.
    """

    cpu_s: float
    wall_s: float
    same: bool | None = None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--recipes", default="w8a16,w4a16,w4a16-lpbq64")
    parser.add_argument("--kv", default="u8,s16")
    parser.add_argument("--devices", default="SM8650,SM8750")
    parser.add_argument("--contexts", default="512")
    parser.add_argument("--calibration-tokens", default="1024")
    parser.add_argument("--tokens", default="500")
    parser.add_argument("--workers", default="2")
    parser.add_argument("--separate", default="all")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    times = _read(given.output)
    choices = ["--recipes", given.recipes, "--kv", given.kv, "--devices", given.devices, "--contexts", given.contexts]
    common = ["--calibration-tokens", given.calibration_tokens, "--skip-htp-check"]
    measured = ["--text", str(given.text), "--tokens", given.tokens]
    if "sweep" not in times:
        command = ["sweep", str(given.checkpoint), *choices, *common, *measured, "--workers", given.workers]
        times["sweep"] = timed([*command, "-o", str(given.output / "sweep")], given.output / "cache")
        _write(given.output, times)
    report = msgspec.json.decode((given.output / "sweep" / "results.json").read_bytes(), type=SweepReport)
    names = [each.name for each in report.results]
    for name in names if given.separate == "all" else [each for each in given.separate.split(",") if each]:
        if name not in times:
            found = report.results[names.index(name)]
            times[name] = _separate(found, given.output, str(given.checkpoint), common, measured)
            _write(given.output, times)
    _show(report, times)


def _separate(found: Result, output: Path, checkpoint: str, common: list[str], measured: list[str]) -> Timed:
    """Export and evaluate a combination by itself."""
    bundle, cache = output / "separate" / found.name, output / "separate-cache"
    shutil.rmtree(bundle, ignore_errors=True)
    options = ["--recipe", found.recipe, "--kv", found.kv, "--device", found.device]
    options += ["--context", ",".join(map(str, found.contexts))]
    try:
        exported = timed(["export", checkpoint, "-o", str(bundle), *options, *common], cache)
        evaluated = timed(["eval", str(bundle), *measured], cache)
        same = _files(bundle) == _files(Path(found.bundle))
    finally:
        shutil.rmtree(cache, ignore_errors=True)
        shutil.rmtree(bundle, ignore_errors=True)
    return Timed(exported.cpu_s + evaluated.cpu_s, exported.wall_s + evaluated.wall_s, same)


def timed(words: list[str], cache: Path) -> Timed:
    """Run a command; its workers are its children, so `wait4` counts them."""
    start = time.perf_counter()
    environment = {**os.environ, "EDGEKV_CACHE_DIR": str(cache), "OPENBLAS_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "edgekv", *words], stdout=subprocess.DEVNULL, env=environment)
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"edgekv {' '.join(words)}: ended with status {os.waitstatus_to_exitcode(status)}")
    return Timed(round(used.ru_utime + used.ru_stime, 1), round(time.perf_counter() - start, 1))


def _files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def _read(output: Path) -> dict[str, Timed]:
    file = output / "times.json"
    return msgspec.json.decode(file.read_bytes(), type=dict[str, Timed]) if file.exists() else {}


def _write(output: Path, times: dict[str, Timed]) -> None:
    with atomic_file(output / "times.json") as partial:
        partial.write_text(json.dumps(msgspec.to_builtins(times), indent=2))


def _show(report: SweepReport, times: dict[str, Timed]) -> None:
    alone = {each.name: times[each.name] for each in report.results if each.name in times}
    total_cpu_s = total_wall_s = 0.0
    print(f"{'':32} processor s  wall s  same files")
    for each in report.results:
        like = alone.get(each.name) or _of_another_chip(each, report, alone)
        if like is None and alone:
            like = Timed(fmean(one.cpu_s for one in alone.values()), fmean(one.wall_s for one in alone.values()))
        if like is None:
            continue
        total_cpu_s, total_wall_s = total_cpu_s + like.cpu_s, total_wall_s + like.wall_s
        note = ("yes" if like.same else "NO") if each.name in alone else "calculated"
        print(f"{each.name:32} {like.cpu_s:11.1f}  {like.wall_s:6.1f}  {note:>10}")
    print(f"{'all separately':32} {total_cpu_s:11.1f}  {total_wall_s:6.1f}")
    sweep = times["sweep"]
    print(f"{'sweep':32} {sweep.cpu_s:11.1f}  {sweep.wall_s:6.1f}")
    if total_cpu_s:
        print(f"{'x':32} {sweep.cpu_s / total_cpu_s:11.2f}  {sweep.wall_s / total_wall_s:6.2f}")


def _of_another_chip(wanted: Result, report: SweepReport, alone: dict[str, Timed]) -> Timed | None:
    """The time of a combination that differs in the chip only."""
    for each in report.results:
        same = (each.recipe, each.kv, each.contexts) == (wanted.recipe, wanted.kv, wanted.contexts)
        if same and each.name in alone:
            return alone[each.name]
    return None


if __name__ == "__main__":
    main()
