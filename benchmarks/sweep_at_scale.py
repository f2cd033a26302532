"""A sweep of a 70B model on up to a thousand workers, on paper: what it moves, what it waits for, what binds.

    python -m benchmarks.sweep_at_scale [--workers 1,10,100,1000] [--gbit 10] [--storage-gbyte 20] [--ram-gb 64]

The pieces are those of `edgekv sweep`: one survey, a chain of layers for each recipe, and for each bundle writing,
compiling its parts, the float reference, evaluation and errors by layer. Their times and RAM are `edgekv plan`'s, which
were fitted on two x86 cores: a worker is such a machine. Bytes are those of bf16 weights, of integers, of hidden states
and of binaries; each piece reads from and writes to a shared file system, over the worker's own link.

A simulation starts the ready piece with the longest way to the end on a free worker with enough RAM, one piece on a
worker at a time. A scheduler with one thread needs `--scheduler-ms` for every piece (Dask's documentation says about
1 ms), one piece after another. The clock stops when the last piece ends.
"""

from __future__ import annotations

import argparse
import heapq
import json
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from devices import find
from edgekv.plan import Plan, make_plan
from edgekv.spec import Decoder

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
RECIPES = {"w8a16": 8.0, "w4a16-lpbq64": 4.3, "w4a16": 4.1}  # bits of a weight
KV, DEVICES, CONTEXT, AR = ("u8", "s16"), ("SM8650", "SM8750"), 4096, (1, 128)
EVALUATED_TOKENS = 4096
MULTIPLY_ADDS_PER_S = 100e9  # of `edgekv plan`
BF16_BYTES, FLOAT_BYTES = 2, 4


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of work.

    Attributes:
        name: unique.
        kind: for the table.
        seconds: of a worker.
        ram_bytes: that it needs.
        moved_bytes: read and written.
        needs: names of the pieces before.
    """

    name: str
    kind: str
    seconds: float
    ram_bytes: int
    moved_bytes: float
    needs: tuple[str, ...] = ()


@dataclass(slots=True)
class Outcome:
    """What a simulation found.

    Attributes:
        seconds: until the last piece ended.
        busy: share of the workers' time in which they worked.
        most_waiting: the most pieces that were ready at once.
    """

    seconds: float = 0.0
    busy: float = 0.0
    most_waiting: int = 0


@dataclass(order=True)
class _Ready:
    order: float
    piece: Piece = field(compare=False)


def pieces(decoder: Decoder, plans: dict[tuple[str, str], Plan], *, divided: bool) -> Iterator[Piece]:
    """The pieces of a sweep; with `divided`, the matrices of a layer are pieces of their own."""
    layer, tokens = replace(decoder, layers=1), plans["w8a16", "u8"].export.calibration_tokens
    states = FLOAT_BYTES * tokens * decoder.hidden
    layer_bytes = BF16_BYTES * decoder.layer_parameters
    forward = tokens * decoder.layer_parameters / MULTIPLY_ADDS_PER_S
    score = EVALUATED_TOKENS * decoder.parameters / MULTIPLY_ADDS_PER_S
    whole = BF16_BYTES * decoder.parameters
    ram = plans["w8a16", "u8"].export.quantization_peak_bytes
    updates = sum(inputs**2 * outputs for inputs, outputs in layer.layer_matrices)  # most of GPTQ's work
    yield Piece("survey", "survey", decoder.layers * forward, ram, whole)
    yield Piece("reference", "reference", score, ram, whole)
    for recipe, bits in RECIPES.items():
        plan = plans[recipe, "u8"]
        # `export` runs the exact decoder and the quantized one; the head is one layer more
        quantizing = (plan.export.export_seconds - 2 * decoder.layers * forward) / (decoder.layers + 1)
        before, made, stored = "survey", list[str](), bits / 8 * layer.layer_parameters
        for number in range(decoder.layers + 1):
            name = f"{recipe} layer {number}"
            if divided:
                parts = []
                for matrix, (inputs, outputs) in enumerate(layer.layer_matrices):
                    parts.append(f"{name}.{matrix}")
                    seconds = quantizing * inputs**2 * outputs / updates
                    moved = (BF16_BYTES + bits / 8) * inputs * outputs + states
                    yield Piece(parts[-1], "matrix", seconds, ram, moved, ("survey", before))
                yield Piece(name, "layer", forward, ram, stored + 2 * states, (before, *parts))
            else:
                moved = layer_bytes + stored + 2 * states
                yield Piece(name, "layer", forward + quantizing, ram, moved, ("survey", before))
            before = name
            made.append(name)
        bundle = bits / 8 * decoder.parameters
        for kv in KV:
            write = f"{recipe} {kv} write"
            cost = plans[recipe, kv].export
            yield Piece(write, "write", bundle / 1e9, cost.writing_peak_bytes, 2 * bundle, tuple(made))
            yield Piece(f"{write} evaluate", "evaluate", score, ram, bundle, (write, "reference"))
            yield Piece(f"{write} errors", "errors", score / 4, ram, bundle + whole, (write,))
            for device in DEVICES:
                for number, part in enumerate(plans[recipe, kv].parts or []):
                    count = len(AR)
                    seconds = count * (0.7 + 7e-9 * part.used_bytes + 6.6 * (part.graph_bytes / 1e6) ** 2)
                    moved = 2.0 * part.used_bytes
                    name = f"{write} {device} {number}"
                    yield Piece(name, "compile", seconds, part.compile_peak_bytes, moved, (write,))


def ways(plan: Sequence[Piece], bytes_per_s: float) -> dict[str, float]:
    """Seconds from the start of each piece to the end of the last one after it, if nothing waits."""
    after: dict[str, float] = {}
    longest: dict[str, float] = {}
    for piece in reversed(plan):  # each comes after those that it needs
        longest[piece.name] = piece.seconds + piece.moved_bytes / bytes_per_s + after.get(piece.name, 0.0)
        for need in piece.needs:
            after[need] = max(after.get(need, 0.0), longest[piece.name])
    return longest


def simulate(
    plan: Sequence[Piece], workers: int, ram_bytes: int, bytes_per_s: float, storage_bytes_per_s: float, task_s: float
) -> Outcome:
    """Run the pieces on equal workers.

    Args:
        plan: pieces in an order in which each comes after those that it needs.
        workers: how many.
        ram_bytes: of each; a piece that needs more is refused.
        bytes_per_s: of each worker's link.
        storage_bytes_per_s: of the file system, which all workers share when they move bytes at the same time.
        task_s: time of the scheduler for a piece.

    Raises:
        SystemExit: a piece does not fit a worker.
    """
    if too_large := [piece for piece in plan if piece.ram_bytes > ram_bytes]:
        raise SystemExit(f"{too_large[0].name} needs {too_large[0].ram_bytes / 1e9:.1f} GB of RAM")
    longest = ways(plan, bytes_per_s)
    waiting = {piece.name: len(piece.needs) for piece in plan}
    users: dict[str, list[Piece]] = {}
    for piece in plan:
        for need in piece.needs:
            users.setdefault(need, []).append(piece)
    ready = [_Ready(-longest[piece.name], piece) for piece in plan if not piece.needs]
    heapq.heapify(ready)
    running: list[tuple[float, str]] = []
    free, now, scheduler, busy, found = workers, 0.0, 0.0, 0.0, Outcome()
    while ready or running:
        found.most_waiting = max(found.most_waiting, len(ready))
        while ready and free:
            piece = heapq.heappop(ready).piece
            scheduler = max(scheduler, now) + task_s
            took = piece.seconds + piece.moved_bytes / min(bytes_per_s, storage_bytes_per_s / (len(running) + 1))
            heapq.heappush(running, (scheduler + took, piece.name))
            busy += took
            free -= 1
        now, name = heapq.heappop(running)
        free += 1
        for user in users.get(name, ()):
            waiting[user.name] -= 1
            if not waiting[user.name]:
                heapq.heappush(ready, _Ready(-longest[user.name], user))
    found.seconds, found.busy = now, busy / (now * workers)
    return found


def make_plans() -> dict[tuple[str, str], Plan]:
    """The plan of every recipe and cache type."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.json"
        config.write_text(json.dumps(CONFIG))
        return {
            (recipe, kv): make_plan(config, device=find(DEVICES[0]), context=CONTEXT, recipe=recipe, kv=kv, ar=AR)
            for recipe in RECIPES
            for kv in KV
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="1,10,100,1000")
    parser.add_argument("--gbit", type=float, default=10.0, help="of each worker's link")
    parser.add_argument("--storage-gbyte", type=float, default=20.0, help="per second, of the shared file system")
    parser.add_argument("--ram-gb", type=float, default=64.0)
    parser.add_argument("--scheduler-ms", type=float, default=1.0)
    args = parser.parse_args()
    decoder = Decoder(80, 8192, 64, 8, 128, 28672, 128256)
    plans, link = make_plans(), args.gbit * 1e9 / 8
    console = Console(width=110)
    for divided in (False, True):
        plan = list(pieces(decoder, plans, divided=divided))
        title = "matrices of a layer apart" if divided else "a layer is one piece"
        table = Table(title=f"{len(plan)} pieces, {sum(p.moved_bytes for p in plan) / 1e12:.1f} TB moved: {title}")
        for column in ("workers", "hours", "x one worker", "busy", "most waiting"):
            table.add_column(column, justify="right")
        base = 0.0
        for workers in map(int, args.workers.split(",")):
            found = simulate(
                plan, workers, int(args.ram_gb * 1e9), link, args.storage_gbyte * 1e9, args.scheduler_ms / 1e3
            )
            base = base or found.seconds
            cells = f"{found.seconds / 3600:.1f}", f"{base / found.seconds:.1f}", f"{found.busy:.0%}"
            table.add_row(str(workers), *cells, str(found.most_waiting))
        console.print(table)
        longest = max(ways(plan, link).values())
        console.print(f"critical path {longest / 3600:.1f} h; scheduler {len(plan) * args.scheduler_ms / 1e3:.1f} s")
        for kind in dict.fromkeys(piece.kind for piece in plan):
            of = [piece for piece in plan if piece.kind == kind]
            console.print(
                f"  {kind}: {len(of)} x {max(p.seconds for p in of):,.0f} s, "
                f"{max(p.ram_bytes for p in of) / 1e9:.1f} GB of RAM, {sum(p.moved_bytes for p in of) / 1e12:.2f} TB"
            )


if __name__ == "__main__":
    main()
