"""Slots for adapters: a bundle without an adapter computes what a bundle without slots does, bit for bit."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import numpy as np
import pytest
from click.testing import CliRunner

import edgekv
from edgekv.bundle import open_bundle
from edgekv.cli.command import command
from edgekv.errors import UsageError
from edgekv.option import OptionGroup
from edgekv.spec import LORA_TARGETS, LoraSlots, lora_b
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.lora.options import LoraOptions
from tests.support.checkpoints import OLDER, write_checkpoint
from tests.support.exports import export_options, exported

SMALL = export_options(context=64, ar=(1, 8))
TOKENS = [3, 17, 5, 40, 9, 9, 21, 33, 2, 8, 11]


@pytest.fixture(scope="module")
def slots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of `small_export`, with slots of rank 4."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("slots") / "checkpoint")
    return exported(checkpoint, replace(SMALL, lora=LoraOptions(4)))


@pytest.mark.parametrize("mode", ["emulate", "exact16", "fast"])
def test_slots_without_an_adapter_change_no_bit(slots: Path, small_export: Path, mode: str) -> None:
    scores = [edgekv.load(each, cpu_mode=mode).score(TOKENS) for each in (slots, small_export)]
    assert np.array_equal(*scores)


@pytest.mark.htp
def test_slots_without_an_adapter_change_no_bit_on_the_htp(slots: Path, small_on_htp: Path) -> None:
    scores = [edgekv.load(each, engine="htp").score(TOKENS) for each in (slots, small_on_htp)]
    assert np.array_equal(*scores)


@pytest.mark.thorough
@pytest.mark.htp
def test_slots_compute_in_integers(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    bundle = exported(checkpoint, replace(SMALL, lora=LoraOptions(4, ("q", "down")), check_on_htp=True))
    assert open_bundle(bundle).manifest.htp_check == "integers-only"


def test_projections_of_one_input_share_a_stack(tmp_path: Path) -> None:
    spec = Checkpoint.open(str(write_checkpoint(tmp_path / "base", OLDER))).spec
    slots = LoraSlots.of(spec, 4, ("q", "v", "down"))
    shapes = {name: shape for name, shape, _ in slots.tensors(0)}
    assert shapes["lora_a_0_qkv"] == (1, 1, spec.hidden, 8)
    assert shapes[lora_b(0, "v", 0)] == (1, 1, 8, spec.head_dim)
    assert shapes[lora_b(0, "down")] == (1, 1, 4, spec.hidden)
    assert (slots.columns("q"), slots.columns("v")) == (slice(0, 4), slice(4, 8))


@command
def choose(lora: Annotated[LoraOptions | None, OptionGroup("")] = None) -> None:
    raise ChosenError(lora)


class ChosenError(Exception):
    pass


def chosen(*arguments: str) -> object:
    found = CliRunner().invoke(choose, arguments).exception
    assert isinstance(found, ChosenError), found
    return found.args[0]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (["--lora-slots", "0"], "--lora-slots"),
        (["--lora-slots", "8", "--lora-targets", "q,w"], "'w'"),
        (["--lora-slots", "8", "--lora-reach", "0"], "--lora-reach"),
        (["--lora-targets", "q"], "--lora-targets: got it without --lora-slots; expected both"),
    ],
)
def test_options_out_of_range_are_named(given: list[str], name: str) -> None:
    assert name in str(CliRunner().invoke(choose, given).exception)


def test_targets_keep_their_order() -> None:
    assert chosen("--lora-slots", "8", "--lora-targets", "down,q") == LoraOptions(8, ("q", "down"))
    assert chosen("--lora-slots", "8") == LoraOptions(8, LORA_TARGETS)
    assert chosen() is None


def test_an_htp_without_16_bit_inputs_has_no_slots() -> None:
    with pytest.raises(UsageError, match="V68"):
        export_options(device="SM8350", lora=LoraOptions(4))
    with pytest.raises(UsageError, match="tflite"):
        export_options(kv_dtype="s8", graph_format="tflite", lora=LoraOptions(4))
