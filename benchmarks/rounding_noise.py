"""How far a bundle is from itself if a few integers of its residual are moved by one step.

    python -m benchmarks.rounding_noise BUNDLE TEXT [--tokens 200] [--rates 0.00001,0.001,1] [--record]

After each layer, in `emulate`, a share of the elements of the 16-bit residual is moved by one step up or down. Printed
are the mean distance of the cache in its own steps and the top-1 agreement with the bundle as it is: two ways to
compute that differ in so few roundings cannot agree better. `--record` writes those of the rate 0.001 into
docs/results.json.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
from numpy.typing import NDArray

import edgekv
from docs.results import record
from edgekv.bundle import Bundle
from edgekv.kv import KvTensor
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from exporters.inspect.probe import Integers, Probe, _Piece
from exporters.inspect.trace import Trace


class _MovedProbe(Probe):
    """Runs one window as it is, then with each of some shares of the residual moved."""

    def __init__(self, bundle: Bundle, rates: Sequence[float]) -> None:
        super().__init__(bundle, make_engine(bundle, EngineOptions(threads=1)))
        self._rates = rates
        self._runs = 0
        self._random = np.random.default_rng(0)

    def _run(
        self,
        session: ort.InferenceSession,
        piece: _Piece,
        state: Integers,
        tokens: Integers,
        held: dict[KvTensor, Integers],
    ) -> tuple[Trace, Integers]:
        trace, found = super()._run(session, piece, state, tokens, held)
        rate = self._rates[self._runs % len(self._rates)]
        self._runs += 1
        if rate and not piece.part.head:
            found = self._moved(found, rate)
        return trace, found

    def _moved(self, values: Integers, rate: float) -> Integers:
        limits = np.iinfo(values.dtype)
        chosen = self._random.random(values.shape) < rate
        moves = np.where(chosen, self._random.choice([-1, 1], values.shape), 0)
        return np.clip(values.astype(np.int64) + moves, limits.min, limits.max).astype(values.dtype)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rates", default="0.00001,0.0001,0.001,0.01,1")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    rates = [0.0, *map(float, args.rates.split(","))]
    with edgekv.load(args.bundle, threads=1) as model:
        bundle, ids = model.bundle, model.encode(args.text.read_text("utf-8")[: 16 * args.tokens])
    sink = [] if bundle.manifest.sink is None else bundle.manifest.sink.tokens
    window = np.array([*sink, *ids][: args.tokens])
    probe = _MovedProbe(bundle, rates)
    encodings, layers = probe.encodings, bundle.manifest.model.layers
    stages, distances = probe.stages([window] * len(rates)), np.zeros((layers, len(rates)))
    for layer in range(layers):
        traces = [*islice(stages, len(rates))]
        cache = [name for name in traces[0] if name.startswith("past_")]
        steps: list[NDArray[Any]] = [
            np.concatenate([np.rint(trace[name] / encodings[name].scale).ravel() for name in cache]) for trace in traces
        ]
        distances[layer] = [np.abs(each - steps[0]).mean() for each in steps]
    logits = [trace["logits"].argmax(-1) for trace in stages]
    print(f"{len(window)} tokens of {args.text.name}")
    for number, rate in enumerate(rates[1:], start=1):
        agreed = (logits[number] == logits[0]).mean()
        steps = distances[:, number].mean()
        print(f"  {rate:<8g} of the residual: cache {steps:.4f} steps, top-1 {agreed:.2%}")
        if args.record and rate == 0.001:
            record(agreement_moved=f"{100 * agreed:.1f} %", steps_moved=f"{steps:.3f}")


if __name__ == "__main__":
    main()
