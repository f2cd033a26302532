"""The sampling defaults of a checkpoint, from generation_config.json to the command line."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

import edgekv
from edgekv.bundle import Bundle, GenerationRecord, open_bundle
from edgekv.cli import run
from edgekv.errors import BundleError, CheckpointError
from edgekv.text import SamplingParams
from exporters.checkpoint.generation import generation_record
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported

QWEN = {
    "bos_token_id": 256,
    "eos_token_id": [257, 258],
    "pad_token_id": 256,
    "do_sample": True,
    "repetition_penalty": 1.05,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.8,
    "num_beams": 3,
    "transformers_version": "4.51.0",
}
"""As Qwen2.5's, with beams that are not supported."""


@pytest.fixture(scope="module")
def sampled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("sampled") / "checkpoint")
    (checkpoint / "generation_config.json").write_text(json.dumps(QWEN))
    return exported(checkpoint, export_options(context=64, ar=(1, 8)))


@pytest.mark.parametrize(
    ("config", "record"),
    [
        ({}, None),
        ({"eos_token_id": 3, "transformers_version": "4", "top_k": 50}, None),
        ({"do_sample": False, "temperature": 0.6, "top_p": 0.9}, GenerationRecord()),
        ({"do_sample": True}, GenerationRecord(temperature=1.0)),
        ({"do_sample": True, "top_k": 0, "top_p": 1.0, "typical_p": 1.0}, GenerationRecord(temperature=1.0)),
        ({"repetition_penalty": 1.2, "max_new_tokens": 9}, GenerationRecord(repetition_penalty=1.2, max_new_tokens=9)),
        ({"typical_p": 0.5, "num_beams": 4, "min_length": 0}, GenerationRecord(ignored=["num_beams", "typical_p"])),
        (
            QWEN,
            GenerationRecord(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05, ignored=["num_beams"]),
        ),
    ],
)
def test_the_file_is_read_as_transformers_reads_it(config: dict[str, Any], record: GenerationRecord | None) -> None:
    assert generation_record(config) == record


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": "yes"}, "generation_config.json: do_sample: got 'yes'; expected true or false"),
        ({"do_sample": True, "temperature": "hot"}, "generation_config.json: temperature: got 'hot'"),
        ({"do_sample": True, "top_p": 3}, "generation_config.json: top_p: got 3; expected above 0, at most 1"),
        ({"repetition_penalty": math.nan}, "generation_config.json: repetition_penalty: got nan"),
        ({"max_new_tokens": 2**40}, "generation_config.json: max_new_tokens: got 1099511627776"),
    ],
)
def test_what_cannot_be_is_refused_at_export(config: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        generation_record(config)


def test_a_call_that_says_nothing_samples_as_the_checkpoint_says(sampled: Path) -> None:
    model = edgekv.load(sampled, threads=1)
    assert model.defaults == SamplingParams(0.7, 20, 0.8, repetition_penalty=1.05)
    stats = model.generate([5, 6, 7], 4).stats
    assert stats.sampling == SamplingParams(0.7, 20, 0.8, repetition_penalty=1.05, max_new_tokens=4)
    assert stats.bundle_defaults == ("temperature", "top_k", "top_p", "repetition_penalty")
    assert stats.seed is not None
    greedy = model.generate([5, 6, 7], temperature=0).stats
    assert greedy.sampling == SamplingParams(repetition_penalty=1.05)
    assert model.generate([5, 6, 7], SamplingParams()).stats.bundle_defaults == ()


def test_the_command_says_which_defaults_it_used(sampled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(sampled), "--prompt", "ab", "--max-new-tokens", "3"]
    assert run([*command, "--top-k", "7"]) == 0
    line = "[defaults of the checkpoint's generation_config.json: temperature 0.7, top_p 0.8, repetition_penalty 1.05; "
    assert line + "not supported: num_beams]\n" in capsys.readouterr().err
    assert run([*command, "--json"]) == 0
    stats = json.loads(capsys.readouterr().out)["stats"]
    assert stats["sampling"]["temperature"] == 0.7
    assert stats["bundle_defaults"] == ["temperature", "top_k", "top_p", "repetition_penalty"]
    assert run([*command, "--temperature", "0", "--repetition-penalty", "1"]) == 0
    assert "generation_config" not in capsys.readouterr().err


def test_a_bundle_without_defaults_is_greedy(small_export: Path) -> None:
    assert edgekv.load(small_export, threads=1, verify=False).defaults == SamplingParams()


def test_defaults_that_cannot_be_are_refused(small_export: Path) -> None:
    opened = open_bundle(small_export, verify=False)
    for wrong in (GenerationRecord(temperature=-1.0), GenerationRecord(top_k=5)):
        forged = Bundle(opened.path, structs.replace(opened.manifest, generation=wrong))
        with pytest.raises(BundleError, match=r"manifest.json: generation: (temperature|top_k): got"):
            edgekv.load(forged)
