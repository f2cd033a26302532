"""The quality that the embedded model must keep, on text it never saw."""

import json
from collections.abc import Callable
from functools import cache

import numpy as np
import pytest

import edgekv
from benchmarks.large_checkpoint import rounded_to_nearest
from edgekv.cli import run
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.inspect.evaluate import Evaluation, evaluate
from exporters.quantize.calibrate import token_windows
from exporters.quantize.effort import DEFAULT_EFFORT, EFFORTS, Effort
from exporters.quantize.recipe import Recipe, find_recipe
from tests.support.exports import export_options, exported

pytestmark = pytest.mark.slow


@pytest.fixture
def held_out(embedded) -> str:
    return str(embedded / "heldout.txt")


@pytest.fixture(scope="module")
def measured(embedded) -> Callable[..., Evaluation]:
    """What a recipe costs over 2,048 held-out tokens."""
    checkpoint, text = Checkpoint.open(str(embedded)), (embedded / "heldout.txt").read_text("utf-8")

    @cache
    def measure(recipe: Recipe, effort: Effort = DEFAULT_EFFORT) -> Evaluation:
        options = export_options(recipe, context=128, ar=(1, 32), effort=effort)
        with edgekv.load(exported(embedded, options)) as model:
            return evaluate(model, checkpoint, text, "heldout.txt", tokens=2048)

    return measure


def test_quantization_costs_less_than_half_a_percent_of_perplexity(bundle, held_out, capsys):
    """Of a trained model: a random one of this vocabulary has a perplexity of 4,096."""
    assert run(["eval", str(bundle), "--text", held_out, "--tokens", "2048", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tokens"] == 2048
    assert found["reference_perplexity"] < 40
    assert found["perplexity"] <= 1.005 * found["reference_perplexity"]
    assert found["top1_agreement"] >= 0.98


@pytest.mark.parametrize(
    ("name", "most"), [pytest.param("w4a16", 1.025, marks=pytest.mark.thorough), ("w4a16-lpbq32-updown8", 1.02)]
)
def test_4_bits_cost_little(measured, name, most):
    """Perplexity is uncertain by 0.008 of so short a text."""
    assert measured(find_recipe(name)).perplexity_ratio <= most


@pytest.mark.thorough
def test_4_bits_cost_far_less_than_rounding_to_nearest(measured):
    """4.1 dB were gained, and KL divergence halved."""
    ours, theirs = (measured(recipe) for recipe in (find_recipe("w4a16"), rounded_to_nearest(find_recipe("w4a16"))))
    assert ours.sqnr_db >= theirs.sqnr_db + 3.5
    assert ours.kl_nats <= 0.6 * theirs.kl_nats


@pytest.mark.thorough
def test_learning_the_rounding_costs_less_on_text_it_never_saw(measured):
    """23 % less with 4,096 tokens."""
    recipe, effort = (
        find_recipe("w4a16"),
        Effort(3, descent_bits=4, weighs_attention=True, written_tokens=4096),
    )
    assert measured(recipe, effort).kl_nats < 0.85 * measured(recipe, EFFORTS[1]).kl_nats


def test_the_htp_agrees_with_the_cpu(embedded_on_htp, embedded, held_out):
    """Over 128 held-out tokens: 98 % of the top tokens, and caches less than 0.1 LSB apart on average."""
    checkpoint = Checkpoint.open(str(embedded))
    cpu, htp = edgekv.load(embedded_on_htp), edgekv.load(embedded_on_htp, engine="htp")
    agreed, differences = [], []
    for window in token_windows(checkpoint, (embedded / "heldout.txt").read_text("utf-8"), 128, 1):
        one, other = cpu.score(window.tolist()), htp.score(window.tolist())
        agreed.append(one.argmax(-1) == other.argmax(-1))
        rows = [m.cache.arena.array[:, m.cache.held_rows()].astype(np.int32) for m in (cpu, htp)]
        differences.append(np.abs(rows[0] - rows[1]))
    assert np.concatenate(agreed).mean() >= 0.98
    assert np.concatenate(differences, axis=1).mean() < 0.1


@pytest.mark.thorough
def test_eval_runs_on_the_htp(embedded_on_htp, held_out, capsys):
    assert run(["eval", str(embedded_on_htp), "--engine", "htp", "--text", held_out, "--tokens", "126", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["engine"], found["tokens"]) == ("htp", 126)
    assert abs(found["perplexity_ratio"] - 1) < 0.02


def test_eval_on_another_checkpoint_is_refused(bundle, held_out, tmp_path, capsys):
    from tests.support.checkpoints import write_checkpoint

    other = write_checkpoint(tmp_path / "other")
    assert run(["eval", str(bundle), "--text", held_out, "--checkpoint", str(other)]) == 1
    assert "the weights of the bundle" in capsys.readouterr().err
