"""The quality that a trained hybrid must keep, on text it never saw."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from edgekv.bundle import open_bundle
from edgekv.cli import run
from exporters.quantize.recipe import find_recipe
from tests.support.exports import export_options, exported

pytestmark = pytest.mark.slow


@pytest.fixture
def hybrid(embedded: Path) -> Path:
    """Convolutions in three of five layers; made by models/train_hybrid.py."""
    return embedded.parent / "hybrid-1m"


@pytest.fixture
def measured(hybrid: Path, embedded: Path, capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    def measure(tokens: int, *arguments: str, **options: Any) -> Any:
        folder = exported(hybrid, export_options(context=512, ar=(1, 128), **options))
        capsys.readouterr()
        text = ["--text", str(embedded / "heldout.txt"), "--tokens", str(tokens)]
        assert run(["eval", str(folder), *text, *arguments, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    return measure


def test_a_hybrid_costs_as_little_as_a_dense_model(measured: Callable[..., Any]) -> None:
    """1.0008 and 0.0002."""
    found = measured(4096)
    assert found["perplexity_ratio"] <= 1.003
    assert found["kl_nats"] <= 0.001
    assert found["reference_perplexity"] < 25


@pytest.mark.parametrize(("bits", "own", "whole"), [(16, 65, 39), pytest.param(8, 37, 35, marks=pytest.mark.thorough)])
def test_states_cost_little_of_their_own(measured: Callable[..., Any], bits: int, own: float, whole: float) -> None:
    """Rounding alone 69 to 72 dB and 37.5 to 39.2, with all errors 39.4 to 40.6 and 35.2 to 36.0; 8 bits hold roots."""
    found = measured(2048, "--layers", state_bits=bits)
    states = [each for each in found["tensors"] if each["kind"] == "state"]
    assert [each["layer"] for each in states] == [0, 1, 3]
    assert {each["dtype"] for each in states} == {f"u{bits}"}
    assert min(each["own_db"] for each in states) >= own
    assert min(each["sqnr_db"] for each in states) >= whole
    assert found["evaluation"]["kl_nats"] <= 0.001


def test_convolutions_keep_8_bits_in_4_bit_recipes(hybrid: Path) -> None:
    folder = exported(hybrid, export_options(find_recipe("w4a16-lpbq32"), context=512, ar=(1, 128)))
    matrices = open_bundle(folder).manifest.weights.matrices
    parts = ("conv.b_proj", "conv.c_proj", "conv.x_proj", "conv.out_proj")
    names = [f"model.layers.{layer}.{part}.weight" for layer in (0, 1, 3) for part in parts]
    assert {matrices[name].dtype for name in names} == {"int8"}
    assert matrices["model.layers.0.mlp.up_proj.weight"].dtype == "lpbq32"
