"""Requests with the same adapter share passes; each answer is that of its own run alone."""

import shutil
from pathlib import Path

import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.engine import Generation, Request, Sequence
from edgekv.text import Token
from exporters.checkpoint.lora import AdapterChoice
from exporters.lora.add import add_lora
from exporters.lora.options import LoraOptions
from exporters.quantize.sink_request import SinkRequest
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter

REQUESTS = (None, "a", "b", "a", None, "b", "a")
STEPS = 6


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("lora-batch")
    base = write_checkpoint(folder / "base")
    sink = SinkRequest("tokens", (256,))  # rows of its own with each adapter
    options = export_options(context=96, ar=(1, 8), draft_rows=(8,), lora=LoraOptions(4), sink=sink)
    shutil.copytree(exported(base, options), folder / "bundle")
    for seed, name in enumerate("ab"):
        write_adapter(folder / name, base, seed=seed, lora_alpha=1)
        add_lora(open_bundle(folder / "bundle"), AdapterChoice(folder / name, 1.0), name)
    return folder / "bundle"


@pytest.mark.thorough
@pytest.mark.htp
def test_requests_with_one_adapter_share_passes(bundle: Path) -> None:
    prompts = [[256, *range(30 + 7 * number, 36 + 7 * number)] for number in range(len(REQUESTS))]
    with edgekv.load(bundle, "htp") as model:

        def start(number: int) -> Generation:
            return model.generate(
                prompts[number], STEPS, temperature=0, ignore_eos=True, sequence=number, lora=REQUESTS[number]
            )

        alone = [[token.id for token in start(number)] for number in range(len(REQUESTS))]
        assert len({tuple(each) for each in alone}) > 3
        model.sequences.clear()
        engine, params = model.engine, SamplingParams(max_new_tokens=STEPS, ignore_eos=True)
        engine.shares_passes = True
        found: dict[Sequence, list[int]] = {
            engine.add(Request(tuple(prompt), params, cache=number, lora=REQUESTS[number])): []
            for number, prompt in enumerate(prompts)
        }
        while engine.running or engine.waiting:
            for sequence, event in engine.step():
                assert isinstance(event, Token)
                found[sequence].append(event.id)
        assert [*found.values()] == alone
        assert model.batch.passes >= 3 * (STEPS - 2)
        assert model.batch.rows > 2 * model.batch.passes
