from pathlib import Path

import numpy as np
import pytest

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import NEWER, OLDER, write_checkpoint

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "logits.npz")
TOLERANCE = 1e-4


def difference(checkpoint: Checkpoint, name: str) -> float:
    expected = GOLDEN[f"{name}_logits"]
    (actual,) = Reference(checkpoint).logits([GOLDEN[f"{name}_tokens"]])
    return float(np.abs(actual[-len(expected) :] - expected).max())


def test_the_embedded_model_equals_transformers(embedded):
    assert difference(Checkpoint.open(str(embedded)), "embedded") < TOLERANCE


@pytest.mark.parametrize(("name", "form"), [("newer", NEWER), ("older", OLDER)])
def test_both_forms_of_checkpoint_equal_transformers(tmp_path, name, form):
    """Tied and untied head, default and llama3 rotary embedding."""
    assert difference(Checkpoint.open(str(write_checkpoint(tmp_path, form))), name) < TOLERANCE


def test_windows_do_not_see_each_other(tmp_path):
    reference = Reference(Checkpoint.open(str(write_checkpoint(tmp_path))))
    first, second = np.arange(40), np.arange(100, 120)
    together = list(reference.logits([first, second]))
    apart = [next(reference.logits([window])) for window in (first, second)]
    assert all(np.array_equal(a, b) for a, b in zip(together, apart, strict=True))
