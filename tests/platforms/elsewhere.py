"""Tokens and caches of one bundle, for arm64.sh and wine.sh: made here and there, and compared.

python -m tests.platforms.elsewhere make BUNDLE OUT.npz [MODE ...]
python -m tests.platforms.elsewhere compare A.npz B.npz
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import edgekv

PROMPTS = ("def main(", "import os\nimport sys\n\n\nclass Reader:\n    def __init__(self, path):\n        self.")
MODES = ("emulate", "exact16", "fast")


def export(bundle: Path) -> None:
    """Export the embedded model, if that was not done."""
    if bundle.exists():
        return
    from exporters.checkpoint.checkpoint import Checkpoint
    from exporters.export import export_bundle
    from tests.support.exports import ROOT, export_options

    checkpoint = Checkpoint.open(str(ROOT / "models" / "stdlib-4m"))
    export_bundle(checkpoint, bundle, export_options(context=256, ar=(1, 32)))


def make(bundle: Path, target: Path, modes: Sequence[str]) -> None:
    """Write what each mode generates after each prompt, and the keys and values that it holds then."""
    found: dict[str, np.ndarray] = {}
    for mode in modes:
        model = edgekv.load(bundle, cpu_mode=mode, threads=1)
        for at, prompt in enumerate(PROMPTS):
            found[f"{mode} {at} tokens"] = np.array([token.id for token in model.generate(prompt, 12)])
            rows = model.cache.state.rows.values()
            found[f"{mode} {at} cache"] = np.concatenate([each.reshape(-1) for each in rows])
    np.savez(target, **found)


def compare(one: Path, other: Path) -> bool:
    """Print both side by side; whether tokens are the same and no integer of a cache is off by more than a step."""
    is_good = True
    with np.load(one) as here, np.load(other) as there:
        for mode in (each for each in MODES if f"{each} 0 tokens" in here):
            for at in range(len(PROMPTS)):
                same = np.array_equal(here[f"{mode} {at} tokens"], there[f"{mode} {at} tokens"])
                a, b = (each[f"{mode} {at} cache"].astype(int) for each in (here, there))
                steps = np.abs(a - b) if len(a) == len(b) else np.array([-1])
                share, most = np.count_nonzero(steps) / len(steps), steps.max()
                print(f"{mode}, prompt {at}: {'the same tokens' if same else 'OTHER tokens'}, {share:.3%} of the cache "
                      f"differ, by at most {most} steps")  # fmt: skip
                is_good = is_good and same and 0 <= most <= 1
    return is_good


if __name__ == "__main__":
    verb, first, second, *modes = sys.argv[1:]
    if verb == "compare":
        sys.exit(not compare(Path(first), Path(second)))
    export(Path(first))
    make(Path(first), Path(second), modes or MODES)
