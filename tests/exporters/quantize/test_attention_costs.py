"""What errors of queries and keys cost, against attention with weights that were moved."""

from dataclasses import dataclass

import numpy as np
import pytest

from edgekv.graphs.decoder import attention
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.fold import EVERY, Rows
from exporters.quantize.attention import PROJECTIONS, attention_costs, projection_name, weighed_projections
from exporters.quantize.reference import Floats, NumpyOps, Weights
from tests.support.checkpoints import write_checkpoint

TOKENS, LAYER = 48, 1


@dataclass
class Moved:
    """A decoder with one matrix moved."""

    checkpoint: Checkpoint
    name: str
    change: Floats

    @property
    def spec(self):
        return self.checkpoint.spec

    def tensor(self, key: str, rows: Rows = EVERY) -> Floats:
        found = self.checkpoint.tensor(key, rows)
        return found + self.change[rows] if key == self.name else found

    def integers(self, key, rows=EVERY):
        raise AssertionError(key)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(tmp_path_factory.mktemp("checkpoint"))))


def mixed(tensors, x: Floats) -> Floats:
    """What the attention of the layer adds to the residual."""
    weights = Weights(tensors)
    ops = NumpyOps(tensors.spec, weights, TOKENS, TOKENS)
    output = weights[f"model.layers.{LAYER}.self_attn.o_proj.weight"]
    return attention(ops, tensors.spec, LAYER, x) @ output.T


@pytest.mark.parametrize("projection", PROJECTIONS)
def test_costs_are_those_of_attention_with_moved_weights(
    checkpoint: Checkpoint, projection: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("exporters.quantize.attention._EVERY", 1)
    spec, random = checkpoint.spec, np.random.default_rng(0)
    x = random.standard_normal((6, TOKENS, spec.hidden)).astype(np.float32)
    costs = attention_costs(spec, Weights(checkpoint), LAYER, iter(x), TOKENS, 0)[projection]
    heads, width = {"q_proj": spec.heads, "k_proj": spec.kv_heads}[projection], spec.head_dim
    assert costs.shape == (heads, width, width)
    np.testing.assert_allclose(costs, costs.swapaxes(1, 2), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.trace(costs, axis1=1, axis2=2) / width, 2, rtol=1e-4)  # 1, and the damping
    undamped, directions = np.linalg.eigh(costs[0] - np.eye(width))
    found = []
    for direction in (directions[:, -1], directions[:, -4], directions[:, 0]):
        random = np.random.default_rng(1)  # alike for all directions
        total = 0.0
        for each in [*x, *x, *x]:
            change = np.zeros((heads * width, spec.hidden), np.float32)
            change[:width] = 1e-2 * direction[:, None] * random.standard_normal(spec.hidden)
            moved = Moved(checkpoint, projection_name(LAYER, projection), change)
            total += float(np.square(mixed(moved, each) - mixed(checkpoint, each)).sum())
        found.append(total)
    for at, number in ((-4, 1), (0, 2)):
        assert found[number] / found[0] == pytest.approx(undamped[at] / undamped[-1], rel=0.3)


def test_layers_whose_queries_are_not_products_alone_are_not_weighed(checkpoint: Checkpoint) -> None:
    spec = checkpoint.spec
    assert len(weighed_projections(spec)) == 2 * spec.layers
    assert weighed_projections(Checkpoint.open("models/hybrid-1m").spec) == []
