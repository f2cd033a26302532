"""What verify graphs cost plain decoding on the CPU, where its steps then give the bits of rows of larger steps.

    python -m benchmarks.alike_rows BUNDLE... [--mode fast,exact16] [--depth 0,200,400] [--tokens 24] [--rounds 9]

Each bundle is loaded twice, as it is and as if it had no verify graphs. Both decode the same tokens behind the same
prompt, by turns, with one thread. Compared is processor time, so that other programs disturb less; the ratio is the
median over rounds.
"""

from __future__ import annotations

import argparse
from statistics import median
from time import process_time_ns

import numpy as np
from msgspec import structs

import edgekv
from edgekv.bundle import Bundle, open_bundle


def without_verify(bundle: Bundle) -> Bundle:
    """The bundle as if it had been exported without `--draft-rows`."""
    graphs = [graph for graph in bundle.manifest.graphs if graph.role != "verify"]
    return Bundle(bundle.path, structs.replace(bundle.manifest, graphs=graphs))


def decode_ns(model: edgekv.Model, held: list[int], tokens: list[int]) -> float:
    """Processor time of a step, behind `held` tokens that are in the cache already if this is not the first call."""
    session = model.session
    session.reuse([*held, -1])
    if missing := held[len(session.tokens) :]:
        session.feed(missing)
    started = process_time_ns()
    for token in tokens:
        session.feed([token])
    return (process_time_ns() - started) / len(tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundles", nargs="+", metavar="BUNDLE")
    parser.add_argument("--mode", default="fast,exact16")
    parser.add_argument("--depth", default="0,200,400")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=9)
    args = parser.parse_args()
    for name in args.bundles:
        bundle = open_bundle(name, verify=False)
        random = np.random.default_rng(0)
        text = random.integers(3, bundle.manifest.model.vocab, bundle.manifest.context).tolist()
        for mode in args.mode.split(","):
            with (
                edgekv.load(without_verify(bundle), cpu_mode=mode, threads=1) as plain,
                edgekv.load(bundle, cpu_mode=mode, threads=1) as alike,
            ):
                for depth in map(int, args.depth.split(",")):
                    held, tokens = text[: max(depth, 1)], text[depth + 1 : depth + 1 + args.tokens]
                    pairs = []
                    for turn in range(args.rounds + 1):
                        order = (plain, alike) if turn % 2 else (alike, plain)
                        spent = {each is plain: decode_ns(each, held, tokens) for each in order}
                        pairs.append((spent[True], spent[False]))
                    base, own = (median(each) / 1e6 for each in zip(*pairs[1:], strict=True))
                    ratio = median(own / base for base, own in pairs[1:])
                    times = f"{base:.2f} ms a step, {own:.2f} with verify graphs"
                    print(f"{bundle.path.name} {mode} @ {depth}: {times}: {ratio:.3f}", flush=True)


if __name__ == "__main__":
    main()
