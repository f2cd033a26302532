"""`edgekv bench`: the tests of llama-bench on a bundle."""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import fmean, stdev

import pytest

import edgekv
from edgekv.bench import BenchPlan, FirstToken, Speed, default_plan, run_bench
from edgekv.cli import run
from edgekv.engine import Engine, Request, Sequence
from edgekv.prefix import StoreConfig


def test_a_report_has_every_test_and_the_mean_and_deviation_of_its_runs(
    small_export: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["-p", "8,20", "-n", "4", "-d", "0,30", "-r", "3", "--threads", "1", "--json"]
    assert run(["bench", str(small_export), *options]) == 0
    report = json.loads(capsys.readouterr().out)
    names = ["pp8", "pp20", "tg4", "pp8 @ d30", "pp20 @ d30", "tg4 @ d30"]
    assert [speed["test"] for speed in report["speeds"]] == names
    for speed in report["speeds"]:
        samples, tokens = speed["samples_ns"], speed["n_prompt"] + speed["n_gen"]
        assert len(samples) == 3
        assert speed["avg_ns"] == pytest.approx(fmean(samples))
        assert speed["stddev_ns"] == pytest.approx(stdev(samples))
        assert speed["avg_ts"] == pytest.approx(fmean(tokens * 1e9 / each for each in samples))
    assert [(each["n_prompt"], each["n_cached"]) for each in report["first_tokens"]] == [
        (8, 0),
        (8, 7),
        (20, 0),
        (20, 18),
    ]
    assert (report["engine"], report["kv_update"], report["threads"]) == ("cpu-fast", "slot", 1)
    assert report["ar"] == [1, 8]


def test_the_table_names_the_tests(small_export: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", str(small_export), "-p", "16", "-n", "2", "-r", "1"]) == 0
    printed = capsys.readouterr().out
    assert "; cpu-fast, slot, " in printed.splitlines()[0]
    assert "pp16" in printed
    assert "tg2" in printed
    assert " ± 0.00" in printed


def test_tests_are_calls_of_generate(small_export: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results: list[Speed | FirstToken] = []
    requests: list[tuple[int, int]] = []
    add = Engine.add

    def noted(engine: Engine, request: Request) -> Sequence:
        assert request.params is not None
        requests.append((len(request.tokens), request.params.max_new_tokens))
        return add(engine, request)

    monkeypatch.setattr(Engine, "add", noted)
    with edgekv.load(small_export, threads=1, prefix_cache=StoreConfig()) as model:
        run_bench(model, BenchPlan((6,), (5,), (8,), repetitions=2), report=results.append)
        steps = {graph.record.ar: graph.steps for graph in model.engine.graphs.loaded}
    depth = [(8, 1), (14, 1)] * 3 + [(8, 6)] * 3
    first = [(6, 1)] * 3 + [(5, 1), (6, 1)] * 3
    assert requests == [(1, 1), *depth, *first]
    assert steps[8] >= 3 * 3  # pp6 @ d8 in two steps, tg5 @ d8 in one
    assert steps[1] >= 3 * 5
    speed = results[1]
    assert isinstance(speed, Speed) and speed.test == "tg5 @ d8"
    assert math.isclose(speed.avg_ts, fmean(5e9 / each for each in speed.samples_ns))


def test_default_lengths_fit_the_context(small_export: Path) -> None:
    with edgekv.load(small_export, threads=1) as model:
        plan = default_plan(model, BenchPlan(depths=(10,)))
        empty = default_plan(model, BenchPlan())
    assert (list(plan.prompt_tokens), list(plan.new_tokens)) == ([64], [54])
    assert list(empty.new_tokens) == [63]  # after a first token


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["-p", "65"], "length: got 65 tokens; expected at most 64"),
        (["-p", "8", "-n", "8", "-d", "60"], "8 tokens after 60"),
        (["-n", "64"], "64 tokens after 1;"),
        (["-p", "0"], "prompt tokens: got 0"),
        (["-r", "0"], "repetitions: got 0"),
        (["-n", "x"], "--new-tokens"),
    ],
)
def test_lengths_beyond_the_context_are_refused(
    small_export: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", str(small_export), *options]) == 2
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""
