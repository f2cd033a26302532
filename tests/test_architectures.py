"""Every architecture against Hugging Face transformers: the golden logits of tests/golden/make_golden.py."""

from pathlib import Path

import numpy as np
import pytest

from exporters.checkpoint import Checkpoint
from exporters.reference import Reference
from tests.checkpoints import ARCHITECTURES, write_checkpoint

GOLDEN = np.load(Path(__file__).parent / "golden" / "architectures.npz")
CASES = sorted(name.removesuffix("_tokens") for name in GOLDEN if name.endswith("_tokens"))


def opened(folder: Path, name: str, **options) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(folder, ARCHITECTURES[name], **options)))


@pytest.mark.parametrize("case", CASES)
def test_the_reference_equals_transformers(tmp_path, case):
    """Sequences of 96 tokens, with windows of 24 where there are any; 60 are below longrope's original context."""
    checkpoint = opened(tmp_path, case.rsplit("_", 1)[0])
    expected = GOLDEN[f"{case}_logits"]
    (actual,) = Reference(checkpoint).logits([GOLDEN[f"{case}_tokens"]])
    assert np.abs(actual[-len(expected) :] - expected).max() < 1e-4 * np.ptp(expected)
