"""A bundle of a real model's shape, with random weights rounded to nearest: for the CPU engine's benchmarks.

    python -m benchmarks.large_bundle SHAPE -o DIR [--recipe w4a16-lpbq64] [--context 1024] [--ar 1,32,256]

SHAPE is one of benchmarks.large_checkpoint. DIR gets the checkpoint and the bundle. How its integers were chosen
does not show in a bundle's speed.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.large_checkpoint import SHAPES, rounded_to_nearest, write_large_checkpoint
from devices import find
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import ExportOptions, export_bundle
from exporters.quantize.recipe import find_recipe

CALIBRATION = "import sys\nprint(sys.argv)\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--recipe", default="w4a16-lpbq64")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--ar", default="1,32,256")
    args = parser.parse_args()
    checkpoint = write_large_checkpoint(args.output / "checkpoint", args.shape)
    calibration = args.output / "calibration.txt"
    calibration.write_text(CALIBRATION)
    options = ExportOptions(
        device=find("SM8650"),
        recipe=rounded_to_nearest(find_recipe(args.recipe)),
        context=args.context,
        ar=tuple(int(each) for each in args.ar.split(",")),
        calibration=calibration,
        check_on_htp=False,
    )
    export_bundle(Checkpoint.open(str(checkpoint)), args.output / args.recipe, options)


if __name__ == "__main__":
    main()
