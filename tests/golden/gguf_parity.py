"""Compare logits of GGUF files with those of transformers' own GGUF loader, in the parity environment.

python tests/golden/gguf_parity.py [FILE.gguf ...]

Without files, small random ones are written. Exits with 1 if a logit differs by more than 1e-4 of the largest, or the
tokens of a text differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.foreign_files import write_gguf

TOLERANCE = 1e-4
TOKENS = 64
NAMES = {"llama-2": "F32", "smollm2": "F16", "qwen2": "Q8_0", "qwen3": "Q5_1", "phi3": "Q4_0"}
PADDING = {"tokenizer.ggml.padding_token_id": 258}  # the default of some is beyond a small vocabulary
CHANGES = {"qwen3": {"head_dim": 128}, "phi3": {"sliding_window": None, "max_position_embeddings": 128}}


def difference(file: Path) -> float:
    """The largest difference of two logits, as a share of the largest logit."""
    checkpoint = Checkpoint.open(str(file))
    tokens = np.random.default_rng(1).integers(3, checkpoint.spec.vocab - 8, TOKENS)
    (ours,) = Reference(checkpoint, 128).logits([tokens])
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].float().numpy()
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(each) for each in sys.argv[1:]]
        for name, kind in {} if files else NAMES.items():
            folder = write_checkpoint(Path(scratch) / name, ARCHITECTURES[name] | CHANGES.get(name, {}))
            files.append(write_gguf(folder, Path(scratch) / f"{name}-{kind}.gguf", kind, **PADDING))
        for file in files:
            found = difference(file)
            worst = max(worst, found)
            print(f"{file.name}: {found:.1e} of the largest logit")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
