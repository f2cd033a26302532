"""One prompt, greedy: the same text from transformers in float32, from the CPU graphs and from the HTP."""

from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.engine import Graphs, Session
from edgekv.kv import KVCache
from edgekv.runtime import CpuEngine
from edgekv.runtime.rope import RopeTable
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.exports import export_options, exported
from tests.ties import assert_same_or_tied

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")["text"].tolist()
PROMPT = "def __init__(self, "
NEAR = 0.1  # of logits; by less the reference chooses one token of the golden text, and half of them by 1.3 or more


def continued(model: edgekv.Model, length: int = len(GOLDEN)) -> list[int]:
    prompt = model.encode(PROMPT)
    assert prompt == GOLDEN[: len(prompt)]
    return prompt + [token.id for token in model.generate(PROMPT, length - len(prompt))]


def assert_same_or_near_tie(tokens: list[int], other: list[int], logits, other_logits) -> None:
    """Equal, or else the two candidates at the first difference are about as likely in both runs."""
    if tokens == other:
        return
    at = next(i for i, pair in enumerate(zip(tokens, other, strict=True)) if pair[0] != pair[1])
    one, two = logits(tokens[:at])[-1], other_logits(tokens[:at])[-1]
    gap = max(abs(each[tokens[at]] - each[other[at]]) for each in (one, two))
    assert gap <= NEAR, f"token {at}: {tokens[at]} or {other[at]}, {gap} apart"


def test_unrelated_models_are_told_apart():
    passed = 0
    for one, two in np.random.default_rng(0).normal(scale=3, size=(300, 2, 64)):
        with suppress(AssertionError):
            tokens = [[int(each.argmax())] for each in (one, two)]
            assert_same_or_near_tie(*tokens, lambda _, row=one: row[None], lambda _, row=two: row[None])
            passed += 1
    assert passed < 15, "about one in 64 agrees by chance"


@pytest.fixture(scope="module")
def bundle(embedded) -> Path:
    """Calibrated on more text than other exports of the tests: the reference chooses token 11 by 0.108 of logits."""
    return exported(embedded, export_options(context=128, ar=(1, 32), calibration_tokens=6144))


@pytest.fixture(scope="module")
def cpu(bundle) -> edgekv.Model:
    return edgekv.load(bundle, kv_update="pointer-shift", reserve=2.0)


def test_the_cpu_writes_what_transformers_writes(cpu, embedded):
    reference = Reference(Checkpoint.open(str(embedded)))
    assert_same_or_near_tie(
        continued(cpu), GOLDEN, cpu.score, lambda tokens: next(reference.logits([np.array(tokens)]))
    )


@pytest.mark.slow
def test_all_strategies_write_the_same_on_the_cpu(bundle, cpu):
    expected = continued(cpu)
    assert continued(edgekv.load(bundle, kv_update="pointer-shift", reserve=1.5)) == expected
    assert continued(edgekv.load(bundle, kv_update="mirror")) == expected
    for strategy in ("slot", "shift-concat"):
        assert_same_or_tied(continued(edgekv.load(bundle, kv_update=strategy)), expected, (), cpu)


def plain_copying(bundle: Path, tokens: list[int]) -> np.ndarray:
    """Integer logits `[T, V]` of a loop that knows nothing of strategies: run, concatenate, drop the oldest row."""
    opened = open_bundle(bundle)
    manifest = opened.manifest
    session = CpuEngine().session(opened.graph_path(manifest.graph("decode")))
    cos, sin = (manifest.encodings[name] for name in ("position_ids_cos", "position_ids_sin"))
    rope = RopeTable(manifest.rotations[""].inverse_frequencies, cos, sin)
    rows = manifest.context - 1
    feeds = {t.past: np.full((1, 1, rows, manifest.model.head_dim), 128, np.uint8) for t in manifest.geometry.names()}
    mask = np.zeros((1, 1, 1, manifest.context), np.uint16)
    logits = []
    for position, token in enumerate(tokens):
        mask[..., rows - position :] = 65535
        feeds |= {"input_ids": np.array([[token]], np.int32), "attention_mask": mask}
        feeds |= {
            f"position_ids_{n}": t[None, None] for n, t in zip(("cos", "sin"), rope.rows(position, 1), strict=True)
        }
        new = dict(zip([o.name for o in session.get_outputs()], session.run(None, feeds), strict=True))
        logits.append(new["logits"][0, 0])
        for tensor in manifest.geometry.names():
            feeds[tensor.past] = np.concatenate((feeds[tensor.past], new[tensor.new]), axis=2)[:, :, 1:]
    return np.array(logits)


@pytest.mark.slow
@pytest.mark.parametrize("reserve", [2.0, 1.5])
def test_pointer_shift_is_plain_copying_bit_by_bit(bundle, reserve):
    model = edgekv.load(bundle, kv_update="pointer-shift", reserve=reserve)
    generated = [token.id for token in model.generate([GOLDEN[0]], 100)]
    expected = plain_copying(bundle, [GOLDEN[0], *generated])
    assert expected[:-1].argmax(-1).tolist() == generated
    cache = KVCache(model.bundle.manifest.geometry, ar=(1, 32), reserve=reserve)
    stepwise = Session(cache, Graphs(model.bundle, CpuEngine(), cache))
    for token, row in zip([GOLDEN[0], *generated], expected, strict=True):
        assert (stepwise.feed([token]) == row).all()


def test_slot_moves_cpu_logits_by_the_order_of_a_sum_at_most(bundle, cpu):
    """Its rows stand in another order: float addition may differ in the last bits, 8 LSB at most."""
    step = cpu.bundle.manifest.encodings["logits"].scale
    slot = edgekv.load(bundle, kv_update="slot").score(GOLDEN)
    assert np.abs(slot - cpu.score(GOLDEN)).max() <= 8.5 * step


@pytest.mark.htp
def test_the_htp_writes_what_the_cpu_writes(embedded_on_htp):
    htp, cpu = (edgekv.load(embedded_on_htp, engine=engine) for engine in ("htp", "cpu"))
    assert_same_or_near_tie(continued(htp, 32), continued(cpu, 32), htp.score, cpu.score)
