"""One prompt, greedy: the same text from transformers in float32, from the CPU graphs and from the HTP."""

import json
from pathlib import Path

import numpy as np
import pytest

import edgekv
from edgekv.bundle import open_bundle
from edgekv.engine import Graphs, Session
from edgekv.kv import KVCache
from edgekv.runtime import CpuEngine
from edgekv.runtime.graph import RopeTable
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.golden.bundles import RECORDED, digest, digests, made_with

GOLDEN = np.load(Path(__file__).parent / "golden" / "logits.npz")["text"].tolist()
PROMPT = "def __init__(self, "
EXACT, NEAR = 1e-3, 0.2  # of logits; half of the golden tokens are ahead of all others by 1.3 or more


def continued(model: edgekv.Model, length: int = len(GOLDEN)) -> list[int]:
    prompt = model.encode(PROMPT)
    assert prompt == GOLDEN[: len(prompt)]
    return prompt + [token.id for token in model.generate(PROMPT, length - len(prompt))]


def farthest_behind(tokens: list[int], logits: np.ndarray, first: int = 1) -> float:
    """How far, at most, one of these tokens is behind the likeliest one by the logits `[T, V]`, from `first` on."""
    return max(float(row.max() - row[token]) for row, token in zip(logits[first - 1 :], tokens[first:], strict=False))


def test_unrelated_models_are_told_apart():
    passed = 0
    for one, two in np.random.default_rng(0).normal(scale=3, size=(300, 2, 64)):
        passed += farthest_behind([0, int(one.argmax())], two[None]) <= NEAR
    assert passed < 15, "about one in 64 agrees by chance"


@pytest.fixture(scope="module")
def cpu(bundle) -> edgekv.Model:
    return edgekv.load(bundle, kv_update="pointer-shift", reserve=2.0)


def test_the_cpu_writes_what_transformers_writes(cpu, embedded):
    """Each token that it chooses is the likeliest one of the float model, or nearly so; those of transformers are."""
    reference, start = Reference(Checkpoint.open(str(embedded))), len(cpu.encode(PROMPT))
    ours = continued(cpu)
    golden, chosen = reference.logits([np.array(GOLDEN), np.array(ours)])
    assert farthest_behind(GOLDEN, golden, start) <= EXACT
    assert farthest_behind(ours, chosen, start) <= NEAR


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
def test_pointer_shift_is_plain_copying_bit_by_bit(bundle):
    """With a reserve that is used up on the way; see test_generate for others, and for other strategies."""
    reserve = 1.5
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
    ours = continued(htp, 24)
    assert farthest_behind(ours, cpu.score(ours), len(htp.encode(PROMPT))) <= NEAR


@pytest.mark.thorough
@pytest.mark.slow
def test_bundles_have_the_bytes_that_were_recorded(tmp_path: Path) -> None:
    """One of each architecture and special form; `python -m tests.golden.bundles` names the files that differ."""
    recorded = json.loads(RECORDED.read_text())
    if recorded["made_with"] != made_with():
        pytest.skip(f"recorded with {recorded['made_with']}, whose bytes are others")
    found = {name: digest(files) for name, files in digests(tmp_path)}
    assert [name for name in found if found[name] != recorded["bundles"].get(name)] == []
    assert found.keys() == recorded["bundles"].keys()
