"""The memory of a model on the CPU engine in every mode, beside the file of its weights.

    python -m benchmarks.cpu_memory BUNDLE [--tokens 200] [--new 20]

Each mode runs in a process of its own, after a first one that fills the cache of graphs. `resident` and
`proportional` (shared pages count once, in equal parts) are what the process has more than before the bundle was
opened, with all packages imported; `own` is the part that no file backs. `of the file` is the proportional memory,
`peak of it` the peak. Linux only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import edgekv
from edgekv.bundle import open_bundle
from edgekv.graphs.cpu_mode import CPU_MODES

_KIB, _MIB = 1 << 10, 1 << 20
_PACKAGES = ("edgekv.loading", "edgekv.runtime.cpu", "tokenizers", "jinja2")


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of this process.

    Attributes:
        resident_bytes: pages in memory.
        proportional_bytes: the same, with shared pages counted in equal parts.
        own_bytes: pages that no file backs.
        peak_bytes: most resident bytes so far.
    """

    resident_bytes: int
    proportional_bytes: int
    own_bytes: int
    peak_bytes: int

    @classmethod
    def now(cls) -> Memory:
        """The memory of this process."""
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
        lines += [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
        sizes = {name: int(rest.split()[0]) * _KIB for name, rest in (line.split(":", 1) for line in lines)}
        return cls(sizes["Rss"], sizes["Pss"], sizes["Anonymous"], sizes["VmHWM"])


def run(bundle: Path, mode: str, tokens: int, new: int) -> tuple[Memory, Memory]:
    """The memory before a bundle is opened and after a generation."""
    for name in _PACKAGES:
        import_module(name)
    before = Memory.now()
    with edgekv.load(bundle, cpu_mode=mode, threads=1) as model:
        random = np.random.default_rng(0)
        prompt = random.integers(10, model.bundle.manifest.model.vocab, tokens).tolist()
        for _ in model.generate(prompt, new, ignore_eos=True):
            pass
        return before, Memory.now()


def measure(bundle: Path, mode: str, tokens: int, new: int) -> list[int]:
    """Resident, proportional, own and peak bytes that a model adds, in a new process."""
    command = [sys.executable, "-m", "benchmarks.cpu_memory", str(bundle), "--mode", mode]
    command += ["--tokens", str(tokens), "--new", str(new)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [*map(int, printed.split())]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--new", type=int, default=20)
    parser.add_argument("--mode", choices=CPU_MODES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.mode is not None:
        before, after = run(args.bundle, args.mode, args.tokens, args.new)
        differences = (
            after.resident_bytes - before.resident_bytes,
            after.proportional_bytes - before.proportional_bytes,
            after.own_bytes - before.own_bytes,
            after.peak_bytes - before.resident_bytes,
        )
        print(*differences)
        return
    open_bundle(args.bundle)
    file_bytes = sum(path.stat().st_size for path in args.bundle.iterdir() if path.suffix == ".safetensors")
    table = Table(title=f"{args.bundle.name}: weights of {file_bytes / _MIB:.0f} MiB; MiB of memory")
    for column in ("mode", "resident", "proportional", "own", "peak", "of the file", "peak of it"):
        table.add_column(column, justify="left" if column == "mode" else "right")
    for mode in CPU_MODES:
        measure(args.bundle, mode, args.tokens, args.new)
        added = measure(args.bundle, mode, args.tokens, args.new)
        ratios = (f"{size_bytes / file_bytes:.2f}" for size_bytes in (added[1], added[3]))
        table.add_row(mode, *(f"{size_bytes / _MIB:.0f}" for size_bytes in added), *ratios)
    Console(width=110).print(table)


if __name__ == "__main__":
    main()
