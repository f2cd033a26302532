"""Bundles of other integers than the default's, in runtimes that people ship: the real programs choose our tokens."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import edgekv
from devices import find
from edgekv.bundle import Bundle
from edgekv.kv import KvDtype
from exporters.targets.genai.folder import open_genai_folder, run_folder
from exporters.targets.genai.options import GenaiOptions
from exporters.targets.genai.write import write_genai
from exporters.targets.genie.dialog import GenieDialog
from exporters.targets.genie.folder import open_genie_folder
from exporters.targets.genie.options import GenieOptions
from exporters.targets.genie.write import write_genie
from tests.support.bundles import ending_elsewhere
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.exports import export_options, exported

pytestmark = [pytest.mark.htp, pytest.mark.thorough]

DEVICE = find("SM8650")
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "head_dim": 16}
PROMPT = [*range(3, 23)]  # more tokens than a window takes
COUNT = 12


def export(folder: Path, recipe: str, kv_dtype: KvDtype) -> tuple[Bundle, list[int]]:
    """A bundle, and what edgekv's own loop chooses on the HTP."""
    options = export_options(recipe, context=64, ar=(1, 16), kv_dtype=kv_dtype, key_layout="columns")
    path = exported(write_checkpoint(folder / "checkpoint", NEWER, SIZES), options)
    bundle, tokens = ending_elsewhere(path, PROMPT, COUNT)
    assert len(tokens) == COUNT and len(set(tokens)) > 4
    return bundle, tokens


def genie_tokens(bundle: Bundle, folder: Path) -> list[int]:
    write_genie(bundle, folder, GenieOptions(check=False, bos=False))
    with GenieDialog(folder, open_genie_folder(folder).config()) as dialog:
        return list(dialog.token_query(PROMPT, max_new_tokens=COUNT))


def test_blocks_of_4_bits_go_through_genie_and_onnxruntime_genai(tmp_path: Path) -> None:
    bundle, tokens = export(tmp_path, "w4a16-lpbq32", "u8")
    assert genie_tokens(bundle, tmp_path / "genie") == tokens
    write_genai(bundle, tmp_path / "genai", GenaiOptions(DEVICE))
    assert run_folder(open_genai_folder(tmp_path / "genai"), PROMPT, COUNT) == tokens


def test_a_16_bit_cache_goes_through_genie(tmp_path: Path) -> None:
    bundle, tokens = export(tmp_path, "w8a16", "s16")
    assert genie_tokens(bundle, tmp_path / "genie") == tokens
    cpu, htp = (edgekv.load(bundle.path, engine).score(PROMPT) for engine in ("cpu", "htp"))
    assert 10 * np.log10(np.square(cpu).sum() / np.square(cpu - htp).sum()) > 30
