"""What a layer of a shape takes in context binaries: its matrices, their scales, and what every graph adds.

    python -m benchmarks.binary_bytes SHAPE [--recipe w4a16-lpbq64] [--context 1024,4096] [--ar 1,128]
        [--key-layout columns] [--optimization 1] [--without-attention] [--folder DIR]

Checkpoints of the shape with one layer and with two, of random weights and a vocabulary of 512 tokens, are exported and
compiled, once for the first graph alone and once for all graphs in one binary. A layer is the difference of the two.
With --without-attention the graphs hold the matrices and norms alone: no change of the attention makes them smaller.
Qualcomm's compiler does not give the same size each time: with two layers it varied by 0.1 MB, once by 0.6 MB.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.large_checkpoint import write_large_checkpoint
from benchmarks.large_export import DEVICE, export_options, shape_parser, weights_bytes
from benchmarks.without_attention import write_without_attention
from devices import find
from edgekv.bundle import open_bundle
from edgekv.runtime import HtpOptions
from edgekv.system import link_or_copy
from exporters.htp.compile import COMPILER_DEFAULTS, compile_graphs, device_parts

_VOCABULARY = 512
_CALIBRATION_TOKENS = 512


@dataclass(frozen=True, slots=True)
class BinaryBytes:
    """Sizes of a model's binaries.

    Attributes:
        bits: what the integers of its matrices take.
        scaled: the same with their scales.
        alone: a binary of the first graph.
        shared: a binary of all graphs.
        graphs: how many these are.
    """

    bits: int
    scaled: int
    alone: int
    shared: int
    graphs: int

    def __post_init__(self) -> None:
        assert self.graphs > 1, "several graphs share weights"

    def beyond(self, smaller: BinaryBytes) -> BinaryBytes:
        """What this model takes more than another of as many graphs."""
        return BinaryBytes(
            self.bits - smaller.bits,
            self.scaled - smaller.scaled,
            self.alone - smaller.alone,
            self.shared - smaller.shared,
            self.graphs,
        )

    @property
    def each_further(self) -> int:
        """What a graph adds to a shared binary, on average over all but the first."""
        return (self.shared - self.alone) // (self.graphs - 1)

    def __str__(self) -> str:
        ratio = self.shared / self.bits
        return "\n".join(
            (
                f"integers of the matrices  {self.bits:>12,} bytes",
                f"their scales              {self.scaled - self.bits:>12,}",
                f"the first graph           {self.alone - self.scaled:>12,}",
                f"each further graph        {self.each_further:>12,}",
                f"all of {self.graphs} graphs           {self.shared:>12,}, {ratio:.3f} x the integers",
            )
        )


def export(checkpoint: Path, bundle: Path, options: Sequence[str]) -> None:
    """Export without the compiler; ends the program if that fails."""
    given = ["--device", DEVICE, "--force", "--skip-htp-check", "--calibration-tokens", str(_CALIBRATION_TOKENS)]
    command = [sys.executable, "-m", "edgekv", "export", str(checkpoint), "-o", str(bundle), *given, *options]
    if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
        sys.exit(1)


def compiled_bytes(
    bundle: Path,
    checkpoint: Path,
    recipe: str,
    *,
    options: HtpOptions = COMPILER_DEFAULTS,
    attention: bool = True,
) -> BinaryBytes:
    """Compile a bundle of whole graphs, with their attention or without, and read the sizes of the binaries."""
    opened, device = open_bundle(bundle), find(DEVICE)
    (models,) = device_parts(opened.manifest.graphs, opened.path)
    with tempfile.TemporaryDirectory() as scratch:
        if not attention:
            models = _without_attention(models, Path(scratch))
        sizes = []
        for chosen in (dict([next(iter(models.items()))]), models):
            with tempfile.TemporaryDirectory() as folder:
                binary = compile_graphs(device, chosen, Path(folder), options=options)
                sizes.append((Path(folder) / binary.file).stat().st_size)
    return BinaryBytes(*weights_bytes(checkpoint, recipe), *sizes, len(models))


def _without_attention(models: Mapping[str, Path], folder: Path) -> dict[str, Path]:
    """Graphs without attention, beside copies of the weights that they read."""
    for weights in next(iter(models.values())).parent.glob("*.safetensors"):
        link_or_copy(weights, folder / weights.name)
    for path in models.values():
        write_without_attention(path, folder / path.name)
    return {name: folder / path.name for name, path in models.items()}


def main() -> None:
    parser = shape_parser(__doc__)
    parser.add_argument("--optimization", type=int, choices=(1, 2, 3), help="of the compiler, as `--htp optimization`")
    parser.add_argument("--without-attention", action="store_true", help="leave the matrices and norms alone")
    args = parser.parse_args()
    options = export_options(args)
    compiler = HtpOptions(optimization=args.optimization)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch)
        found = []
        for layers in (1, 2):
            changes = {"num_hidden_layers": layers, "vocab_size": _VOCABULARY}
            checkpoint = write_large_checkpoint(folder / f"{args.shape}-{layers}", args.shape, changes)
            bundle = folder / f"bundle-{layers}"
            export(checkpoint, bundle, options)
            found.append(
                compiled_bytes(bundle, checkpoint, args.recipe, options=compiler, attention=not args.without_attention)
            )
    one, two = found
    print(f"a layer of {args.shape}, {args.recipe}, {DEVICE}\n{two.beyond(one)}")


if __name__ == "__main__":
    main()
