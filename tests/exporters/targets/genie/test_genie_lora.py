"""Qualcomm's own libGenie.so applies the adapters of a bundle."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from edgekv.bundle import Bundle, open_bundle
from edgekv.cli import run
from edgekv.engine import LoraChoice
from edgekv.engine.adapters import Adapters
from exporters.checkpoint.lora import AdapterChoice
from exporters.lora.add import add_lora
from exporters.lora.options import LoraOptions
from exporters.targets.genie.config import Debug, GenieConfig
from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.folder import GenieFolder, open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from tests.support.checkpoints import NEWER, write_sinking
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter

pytestmark = [pytest.mark.htp, pytest.mark.thorough]

EVERY = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NAMES = ("first", "second")
PROMPT = list(range(3, 30))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Two parts, a sink, keys in rows, and two adapters of all projections."""
    folder = tmp_path_factory.mktemp("genie-lora")
    base = write_sinking(folder / "base", NEWER)
    options = export_options(context=64, ar=(1, 16), splits=2, calibration_tokens=512, lora=LoraOptions(4))
    shutil.copytree(exported(base, options), folder / "bundle")
    for seed, name in enumerate(NAMES):
        write_adapter(folder / name, base, EVERY, seed=seed, lora_alpha=1)
        add_lora(open_bundle(folder / "bundle"), AdapterChoice(folder / name, 1.0), name)
    return open_bundle(folder / "bundle")


@pytest.fixture(scope="module")
def written(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> GenieFolder:
    """`write_genie` compares the tokens of the base model and of each adapter with edgekv's loop on the HTP."""
    target = tmp_path_factory.mktemp("folder") / "genie"
    assert write_genie(bundle, target, GenieOptions()).checked
    return open_genie_folder(target)


def test_genie_swaps_adapters(written: GenieFolder) -> None:
    answers: dict[str, list[int]] = {}
    with GenieDialog(written.path, written.config(), written.state) as dialog:
        answers["base"] = list(dialog.token_query(PROMPT, 6))
        for name in (*NAMES, *NAMES):
            dialog.apply_lora(name, written.adapter_state(written.adapter(name)))
            found = list(dialog.token_query(PROMPT, 6))
            assert answers.setdefault(name, found) == found
    assert len(set(map(tuple, answers.values()))) == 3


def test_genie_reads_the_integers_of_the_bundle(bundle: Bundle, written: GenieFolder, tmp_path: Path) -> None:
    config = written.config()
    debug = Debug(path=str(tmp_path), dump_tensors=True)
    config = GenieConfig(dialog=msgspec.structs.replace(config.dialog, debug=debug))
    with GenieDialog(written.path, config, written.state) as dialog:
        dialog.apply_lora("second", written.adapter_state(written.adapter("second")))
        list(dialog.token_query(PROMPT, 1))
    memory = Adapters(bundle).open([LoraChoice("second")]).memory
    names = [name for name, _, _ in memory.floats()]
    for name in names:
        (dumped,) = tmp_path.rglob(f"000_in_{name}")
        wanted = memory.integers(name).astype(np.int32) + 32768
        assert np.array_equal(np.fromfile(dumped, np.uint16), wanted.ravel()), name
    assert len(names) > 20


def test_the_command_names_adapters(written: GenieFolder, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["genie", "run", str(written.path), "--prompt", "hello", "--max-new-tokens", "4"]
    assert run([*command, "--lora", "third"]) == 2
    assert "--lora: got 'third'; expected first, second" in capsys.readouterr().err
    texts = []
    for more in ([], ["--lora", "first"]):
        assert run([*command, *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] != texts[1]


def test_a_bundle_without_adapters_runs_as_its_base(bundle: Bundle, tmp_path: Path) -> None:
    plain = tmp_path / "bundle"
    shutil.copytree(bundle.path, plain, ignore=shutil.ignore_patterns("adapters"))
    manifest = write_genie(open_bundle(plain), tmp_path / "genie", GenieOptions())
    assert manifest.checked and not manifest.adapters
