"""What scripts here have in common that keep arrays of transformers. It puts the repository's root on the path."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

TOLERANCE = 1e-4
sys.path.insert(0, str(Path(__file__).parent.parent.parent))


def loaded(architecture: Any, folder: Path) -> Any:
    """A model in float32; exits if a tensor of the folder is not one of the model's, or the other way round."""
    model, loading = architecture.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    if any(loading.values()):
        raise SystemExit(f"transformers did not load every tensor: {loading}")
    return model


def write_or_check(make: Callable[[], dict[str, np.ndarray]], file: Path) -> None:
    """Write the arrays, or with `--check` compare them with those in the file, and exit with those that differ."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check, made = parser.parse_args().check, make()
    if not is_check:
        np.savez_compressed(file, **made)
        return
    written = np.load(file)
    if made.keys() != {*written}:
        sys.exit(f"{file}: holds {', '.join(written)}; expected {', '.join(made)}")
    if wrong := [name for name in made if not np.allclose(made[name], written[name], atol=TOLERANCE)]:
        sys.exit(f"{file}: differ: {', '.join(wrong)}")
