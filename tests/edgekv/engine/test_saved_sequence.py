"""A sequence on disk: a later process continues where an earlier one ended."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgekv
from edgekv.cli import run
from edgekv.engine.saved import _fingerprint, load_sequence, save_sequence
from edgekv.errors import UsageError
from edgekv.kv import StateError, read_state
from edgekv.runtime.graph import RopeTable
from quant import Encoding

PROMPT = "import os\n\ndef read_file(path):\n"


def generate(capsys: pytest.CaptureFixture[str], bundle: Path, prompt: str, *options: str) -> dict[str, Any]:
    command = ["generate", str(bundle), "--prompt", prompt, "--max-new-tokens", "6"]
    command += ["--cpu-mode", "emulate", "--json"]  # the same bits for any split of a text into steps
    assert run([*command, *options]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)
    return output


@pytest.mark.slow
def test_a_later_run_continues_where_an_earlier_one_ended(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    session = ("--session", str(tmp_path / "talk"))
    first = generate(capsys, bundle, PROMPT, *session)
    longer = PROMPT + first["text"] + "\n    return"
    plain, saved = generate(capsys, bundle, longer), generate(capsys, bundle, longer, *session)
    assert saved["tokens"] == plain["tokens"]
    assert saved["stats"]["cache"]["reused_tokens"] >= len(first["prompt_tokens"])
    assert saved["stats"]["cache"]["computed_tokens"] < plain["stats"]["cache"]["computed_tokens"]
    again = generate(capsys, bundle, longer, *session, "--kv-update", "pointer-shift")
    assert again["tokens"] == plain["tokens"]
    assert again["stats"]["cache"]["reused_tokens"] == len(plain["prompt_tokens"]) - 1
    assert [path.name for path in tmp_path.iterdir()] == ["talk"]


@pytest.mark.slow
def test_another_text_begins_anew(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = ("--session", str(tmp_path / "talk"))
    generate(capsys, bundle, PROMPT, *session)
    other = "class Shape:\n    pass\n"
    assert generate(capsys, bundle, other, *session)["tokens"] == generate(capsys, bundle, other)["tokens"]


def test_a_sequence_of_another_bundle_or_engine_is_refused(bundle: Path, small: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    with edgekv.load(bundle, threads=1) as model:
        list(model.generate(PROMPT, 4, sequence=7))
        held = len(model.sequences.get_or_create(7).tokens)
        assert save_sequence(model.engine, 7, file) == held > 4
        assert load_sequence(model.engine, 8, file) == held
        assert save_sequence(model.engine, 9, tmp_path / "empty") == 0
    with edgekv.load(small, threads=1) as model:
        with pytest.raises(StateError, match=r"state .*talk: fingerprint: got .* on cpu, .*; expected .* on cpu, "):
            load_sequence(model.engine, 7, file)
        assert 7 not in model.sequences


def test_a_damaged_file_is_refused_and_nothing_is_changed(bundle: Path, tmp_path: Path) -> None:
    file = tmp_path / "talk"
    with edgekv.load(bundle, threads=1) as model:
        list(model.generate(PROMPT, 4, sequence=7))
        save_sequence(model.engine, 7, file)
        raw = file.read_bytes()
        file.write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(StateError, match="content: got sha256"):
            load_sequence(model.engine, 8, file)
        assert 8 not in model.sequences


def test_a_mode_that_keeps_nothing_is_refused(bundle: Path, tmp_path: Path) -> None:
    with (
        edgekv.load(bundle, threads=1, cache_mode="disabled") as model,
        pytest.raises(UsageError, match="session: got the cache mode disabled"),
    ):
        load_sequence(model.engine, 0, tmp_path / "talk")


def test_a_file_that_no_sequence_fills_is_not_read(bundle: Path, tmp_path: Path, capsys) -> None:
    with (tmp_path / "talk").open("wb") as file:
        file.truncate(40 << 30)  # a sparse file
    assert run(["generate", str(bundle), "--prompt", "The", "--session", str(tmp_path / "talk")]) == 1
    assert "talk: file: got file of 42.95 GB, more than the limit of" in capsys.readouterr().err


def test_a_pipe_is_no_session(bundle: Path, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with edgekv.load(bundle, threads=1) as model, pytest.raises(StateError, match="a FIFO, not a regular file"):
        load_sequence(model.engine, 0, tmp_path / "pipe")


def test_a_sequence_of_another_context_policy_is_refused(small: Path, tmp_path: Path) -> None:
    """Loaded with `fail`, one under `sinks` would generate beyond the context."""
    file, policies = tmp_path / "talk", ("sinks(4, 40)", "sinks(4, 30)", "keydiff(32, 4)", "sliding-window", "fail")
    for number, saved in enumerate(policies):
        with edgekv.load(small, threads=1, policy=saved) as model:
            list(model.generate([5, 6, 7], 20, sequence=7, ignore_eos=True))
            save_sequence(model.engine, 7, file)
            assert load_sequence(model.engine, 8, file) > 0
        other = policies[number - 1]
        with edgekv.load(small, threads=1, policy=other) as model:
            with pytest.raises(StateError, match=rf"context policy {re.escape(saved)}; expected .*{re.escape(other)}"):
                load_sequence(model.engine, 7, file)
            assert 7 not in model.sequences


@pytest.mark.parametrize(
    ("policy", "changes", "words"),
    [
        ("fail", {"position": 1 << 36}, f"position: got {1 << 36}; expected 22 to 22"),
        ("sliding-window", {"position": 1 << 36}, f"position: got {1 << 36}; expected 22 to 22"),
        ("sinks(4, 40)", {"position": 21}, "position: got 21; expected 22 to 22"),
        ("fail", {"tokens_seen": 23, "position": 23}, "tokens_seen: got 23; expected 22 to 22"),
        ("sliding-window", {"rewindable": -1}, "rewindable: got -1"),
    ],
)
def test_numbers_of_a_file_are_checked_before_memory_is_asked_for(
    small: Path, tmp_path: Path, policy: str, changes: dict[str, Any], words: str
) -> None:
    file = tmp_path / "talk"
    with edgekv.load(small, threads=1, policy=policy) as model:
        list(model.generate([5, 6, 7], 20, sequence=7, ignore_eos=True))
        assert save_sequence(model.engine, 7, file) == 22
        state = read_state(file, fingerprint=_fingerprint(model.engine))
        cache = model.sequences.get_or_create(7).cache
        with pytest.raises(StateError, match=words):
            cache.restore(replace(state, **changes))
        cache.restore(state)


def test_a_text_that_goes_on_for_ever_takes_no_memory_for_its_positions() -> None:
    encoding = Encoding("u16", 1 / 32767, 32768)
    table, far = RopeTable([1.0, 0.1], encoding, encoding, positions=4), RopeTable([1.0, 0.1], encoding, encoding)
    whole = far.rows(0, 61_000)
    for near, rows in zip(table.rows(60_000, 8), whole, strict=True):
        assert np.array_equal(near, rows[60_000:60_008])
    cos, _ = table.rows(1 << 36, 2)
    assert cos.shape == (2, 2)
