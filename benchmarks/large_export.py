"""Time and RAM from a large checkpoint to context binaries.

    python -m benchmarks.large_export SHAPE [--recipe w4a16-lpbq64] [--context 1024,4096] [--ar 1,128]
        [--key-layout columns] [--device SM8650] [--folder DIR] [OPTIONS OF edgekv export]

SHAPE is one of benchmarks.large_checkpoint: a checkpoint of random weights is written first, and not timed. Then
`edgekv export --compile` runs as a user runs it. RAM is the most that any process held, read from the
system while it ran: edgekv's own, and those in which Qualcomm's compiler works.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.large_checkpoint import SHAPES, write_large_checkpoint
from devices import find
from docs.results import record_export
from edgekv.bundle import open_bundle
from edgekv.machine.system import peak_bytes
from edgekv.plan import DEFAULT_KEY_LAYOUT, PlanOptions, make_plan
from edgekv.spec.tensors import matrices
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.recipe import find_recipe
from quant import WEIGHT_TYPES

POLL_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Measured:
    """A command that has ended.

    Attributes:
        seconds: wall time.
        cpu_seconds: of its process and its children.
        own_bytes: the most RAM that its own process held.
        compiler_bytes: the most that any of its children held; 0 if it had none.
    """

    seconds: float
    cpu_seconds: float
    own_bytes: int
    compiler_bytes: int


def measure(arguments: Sequence[str]) -> Measured:
    """Run `edgekv ARGUMENTS`; its output goes to the terminal."""
    began, before = time.perf_counter(), _children_cpu_seconds()
    running = subprocess.Popen([sys.executable, "-m", "edgekv", *arguments])
    peaks: dict[int, int] = {}
    while running.poll() is None:
        for pid in (running.pid, *_children(running.pid)):
            peaks[pid] = max(peaks.get(pid, 0), peak_bytes(pid))
        time.sleep(POLL_SECONDS)
    if running.returncode:
        sys.exit(running.returncode)
    own_bytes = peaks.pop(running.pid)
    cpu_seconds = _children_cpu_seconds() - before
    return Measured(time.perf_counter() - began, cpu_seconds, own_bytes, max(peaks.values(), default=0))


def _children_cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(child) for child in task.read_text().split()]
        except OSError:  # it has just ended
            continue
    return found


def weights_bytes(checkpoint: Path, recipe: str) -> tuple[int, int]:
    """What the matrices of the layers and the head take at the recipe's bits, without their scales and with them."""
    rules = find_recipe(recipe)
    bits = scaled = 0
    for name, (rows, inputs) in matrices(Checkpoint.open(str(checkpoint)).spec).items():
        weights = WEIGHT_TYPES[rules.rule(name).dtype]
        bits += rows * inputs * weights.bits // 8
        scaled += weights.matrix_bytes(inputs, rows)
    return bits, scaled


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("--recipe", default="w4a16-lpbq64")
    parser.add_argument("--context", default="1024,4096")
    parser.add_argument("--ar", default="1,128")
    parser.add_argument("--key-layout", choices=("rows", "columns"), default=DEFAULT_KEY_LAYOUT)
    parser.add_argument("--device", default="SM8650", help="catalogue name of the chip")
    parser.add_argument("--folder", type=Path, help="where to work; what is there is used again")
    parser.add_argument("--apart", action="store_true", help="check and compile by themselves")
    parser.add_argument("--record", action="store_true", help="write this shape's row into docs/results.json")
    args, more = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        checkpoint = write_large_checkpoint(folder / args.shape, args.shape)
        bundle = folder / f"{args.shape}-{args.recipe}"
        given = ["--device", args.device, "--force"]
        what = ["--recipe", args.recipe, "--context", args.context, "--ar", args.ar, "--key-layout", args.key_layout]
        export = ["export", str(checkpoint), "-o", str(bundle), *given, *what, "--max-ram", "4GB"]
        export += more
        steps = {"export, check and compile at once": [*export, "--compile"]}
        if args.apart:
            steps = {"export and check": export, "compile": ["compile", str(bundle), *given]}
        table = Table(title=f"{args.shape}, {args.recipe}, contexts {args.context}, AR {args.ar}, {args.device}")
        for column in ("step", "seconds", "CPU seconds", "edgekv's RAM", "largest compiler's RAM"):
            table.add_column(column, justify="left" if column == "step" else "right")
        total, peaks = 0.0, (0, 0)
        for name, arguments in steps.items():
            done = measure(arguments)
            total += done.seconds
            peaks = max(peaks[0], done.own_bytes), max(peaks[1], done.compiler_bytes)
            sizes = (f"{size / 1e9:.2f} GB" for size in (done.own_bytes, done.compiler_bytes))
            table.add_row(name, f"{done.seconds:,.0f}", f"{done.cpu_seconds:,.0f}", *sizes)
        table.add_row("all", f"{total:,.0f}", "", "", "")
        Console(width=110).print(table)
        binaries = sum(path.stat().st_size for path in (bundle / "compiled" / args.device).glob("*.bin"))
        bits, scaled = weights_bytes(checkpoint, args.recipe)
        manifest = open_bundle(bundle, verify=False).manifest
        floats = len(manifest.floating_nodes)
        ratios = f"{binaries / bits:.3f} x what their matrices' bits take, {binaries / scaled:.3f} x with scales"
        print(f"binaries {binaries / 1e6:,.0f} MB, {ratios}")
        print(f"{floats} nodes compute in float")
        if args.record:
            taken = f"{total:,.0f} s" if total < 3600 else f"{total / 60:,.0f} min"
            own, compiler = (f"{peak / 1e9:.2f} GB" for peak in peaks)
            written = f"{binaries / 1e6:,.0f} MB, {binaries / bits:.2f} x and {binaries / scaled:.2f} x"
            record_export(args.shape, time=taken, ram=own, compiler_ram=compiler, binaries=written)
        contexts, tokens = (tuple(map(int, each.split(","))) for each in (args.context, args.ar))
        plan = make_plan(
            checkpoint, find(args.device), PlanOptions(context=max(contexts), ar=tokens, recipe=args.recipe)
        )
        planned = [part.first_layer + part.layers for part in plan.parts]
        made = [part.stop_layer for part in manifest.graphs[0].parts]
        print(f"parts end before the layers {made}, {'as planned' if made == planned else f'planned {planned}'}")


if __name__ == "__main__":
    main()
