"""Options of speculation, from Python, the command line and a server: the same text, fewer passes, and refusals."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

import edgekv
from edgekv import Grammar, SamplingParams
from edgekv.cli import run
from edgekv.draft import Speculation
from edgekv.engine import Engine, Sequence
from edgekv.errors import UsageError
from edgekv.runtime import StaticGraph
from edgekv.text import BeamParams
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.serving import NAME, TEMPLATE, served

CONTEXT = 128
PROMPT = [*range(40, 60), *range(40, 46)]
LONG = SamplingParams(max_new_tokens=60, ignore_eos=True)


def _bundle(folder: Path, verify: tuple[int, ...], **options: Any) -> Path:
    checkpoint = write_checkpoint(folder / "checkpoint", **options)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return exported(checkpoint, export_options(context=CONTEXT, ar=(1, 8), draft_rows=verify))


@pytest.fixture(scope="module")
def verifying(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with graphs that verify 4 and 8 tokens."""
    return _bundle(tmp_path_factory.mktemp("verifying"), (4, 8))


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another one without such graphs, which can draft for it."""
    return _bundle(tmp_path_factory.mktemp("other"), (), seed=1)


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle whose tokenizer has one other token."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("foreign") / "checkpoint")
    tokenizer = checkpoint / "tokenizer.json"
    content = json.loads(tokenizer.read_text())
    content["added_tokens"][-1]["content"] += "x"
    tokenizer.write_text(json.dumps(content))
    return exported(checkpoint, export_options(context=CONTEXT, ar=(1, 8)))


@pytest.fixture
def corpus(verifying: Path, tmp_path: Path) -> Path:
    """What the model answers to a prompt, as a text file."""
    path = tmp_path / "corpus.txt"
    with edgekv.load(verifying) as model:
        tokens = [token.id for token in model.generate("Hello", LONG)]
        path.write_text("x" + model.tokenizer.decode([*model.encode("Hello"), *tokens], skip_special_tokens=False))
    return path


def ids(model: edgekv.Model, speculate: Any, params: SamplingParams = LONG, prompt: Any = PROMPT) -> tuple[Any, Any]:
    """The tokens of a text, and what speculation brought."""
    generation = model.generate(prompt, params, speculate=speculate)
    return [token.id for token in generation], generation.stats.speculation


@pytest.mark.parametrize("params", [LONG, LONG.overlaid(temperature=0.8, seed=3)], ids=["greedy", "sampled"])
def test_the_text_is_the_same_with_every_drafter(verifying: Path, other: Path, corpus: Path, params: SamplingParams):
    with edgekv.load(verifying) as model, edgekv.load(other) as draft, edgekv.load(verifying) as twin:
        plain, nothing = ids(model, "off", params)
        assert nothing is None and ids(model, None, params) == (plain, None)
        index = model.open_corpus(corpus)
        for speculate in (
            "auto",
            "lookup",
            Speculation("lookup", tokens=2),
            Speculation("corpus", corpus=index),
            Speculation("draft", draft=draft),
            Speculation("draft", draft=twin),
            Speculation("auto", corpus=index, draft=draft),
        ):
            tokens, stats = ids(model, speculate, params)
            assert tokens == plain, speculate
            assert stats.tokens == len(plain) - 1 and stats.passes <= stats.tokens


def test_a_twin_is_nearly_always_right(verifying: Path):
    with edgekv.load(verifying) as model, edgekv.load(verifying) as twin:
        _, stats = ids(model, Speculation("draft", draft=twin))
        assert stats.tokens_per_pass > 6 and stats.drafters["draft"].accepted > 0.9 * stats.drafters["draft"].proposed
        _, stats = ids(model, Speculation("draft", draft=twin, tokens=3))
        assert 3 < stats.tokens_per_pass <= 4


def test_a_draft_bundle_follows_the_text(verifying: Path, other: Path):
    with edgekv.load(verifying) as model, edgekv.load(other) as draft:
        tokens, _ = ids(model, Speculation("draft", draft=draft))
        held = draft.session.tokens
        common = next((at for at, (a, b) in enumerate(zip(held, PROMPT + tokens, strict=False)) if a != b), len(held))
        assert common >= len(PROMPT + tokens) - 8  # up to the last pass, but for its wrong drafts


def draft_steps(model: edgekv.Model, draft: edgekv.Model, *, by_turns: bool) -> tuple[int, list[list[int]]]:
    """Steps of the draft model for two answers, and their tokens."""
    before = draft.engine.graphs.times.steps
    prompts = (PROMPT, [*reversed(PROMPT)])
    answers = [
        model.generate(prompt, LONG, speculate=Speculation("draft", draft=draft), sequence=number)
        for number, prompt in enumerate(prompts)
    ]
    texts: list[list[int]] = [[], []]
    if by_turns:
        for tokens in zip(*answers, strict=True):
            for text, token in zip(texts, tokens, strict=True):
                text.append(token.id)
    else:
        texts = [[token.id for token in answer] for answer in answers]
    return draft.engine.graphs.times.steps - before, texts


def test_answers_that_take_turns_keep_the_draft_s_caches(verifying: Path, other: Path):
    with edgekv.load(verifying) as model, edgekv.load(other) as draft:
        one_by_one, texts = draft_steps(model, draft, by_turns=False)
        model.sequences.clear()
    with edgekv.load(verifying) as model, edgekv.load(other) as draft:
        by_turns, same = draft_steps(model, draft, by_turns=True)
        assert same == texts and by_turns <= one_by_one + 2
        assert len(draft.sequences) == 1, "beside its own session"


@pytest.mark.thorough
def test_a_draft_model_has_few_sessions(verifying: Path, other: Path):
    with edgekv.load(verifying) as model, edgekv.load(other) as draft:
        for first in range(60, 64):
            for _ in range(2):
                tokens, stats = ids(model, Speculation("draft", draft=draft), prompt=[first, *PROMPT])
                assert len(tokens) == LONG.max_new_tokens and stats.passes
        assert len(draft.sequences) == 3


def test_a_text_longer_than_the_drafts_context_goes_on_without_drafts(tmp_path_factory: Any, verifying: Path):
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("short") / "checkpoint", seed=1)
    short = exported(checkpoint, export_options(context=32, ar=(1, 8)))
    with edgekv.load(verifying) as model, edgekv.load(short) as draft:
        plain, _ = ids(model, "off")
        tokens, stats = ids(model, Speculation("draft", draft=draft))
        assert tokens == plain and stats.passes > 20


def test_a_corpus_with_the_answer_brings_a_pass_of_tokens(verifying: Path, corpus: Path):
    with edgekv.load(verifying) as model:
        _, stats = ids(model, Speculation("corpus", corpus=model.open_corpus(corpus)), prompt="Hello")
        assert stats.drafters["corpus"].accepted >= 5


def test_a_loop_is_drafted_by_auto(verifying: Path):
    """Whether it pays is measured, so only that drafts are checked at all is certain."""
    params = SamplingParams(max_new_tokens=90, ignore_eos=True, logit_bias={50: 100, 51: 99}, repetition_penalty=1)
    with edgekv.load(verifying) as model:
        plain, _ = ids(model, "off", params)
        tokens, stats = ids(model, "auto", params)
        assert tokens == plain and stats.drafters["lookup"].accepted > 0


def test_beams_with_speculation_are_refused(verifying: Path):
    with edgekv.load(verifying) as model:
        with pytest.raises(UsageError, match="speculate: got drafts with num_beams; expected none with num_beams"):
            model.generate(PROMPT, BeamParams(2), speculate="auto")
        assert model.generate(PROMPT, BeamParams(2, max_new_tokens=2), speculate="off").sequences


def test_a_draft_bundle_with_another_tokenizer_is_refused(verifying: Path, foreign: Path):
    with edgekv.load(verifying) as model, edgekv.load(foreign) as draft:
        with pytest.raises(UsageError, match=r"draft bundle: got .*a tokenizer with .* 2 entries differ; expected"):
            model.generate(PROMPT, LONG, speculate=Speculation(draft=draft))
        with pytest.raises(UsageError, match="draft bundle: got the model itself"):
            model.generate(PROMPT, LONG, speculate=Speculation(draft=model))
        assert not model.session.tokens


def test_more_drafts_than_a_verify_graph_has_rows_are_refused(verifying: Path):
    with edgekv.load(verifying) as model:
        with pytest.raises(UsageError, match="got 8 drafts of a pass; expected at most 7") as error:
            model.generate(PROMPT, LONG, speculate=Speculation(tokens=8))
        assert "--draft-rows 9" in str(error.value)


def test_on_arm_the_cpu_takes_plain_steps(verifying: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with edgekv.load(verifying) as model:
        text, passes = ids(model, "auto")
        assert passes is None or passes.accepted == 0
        assert text == ids(model, None)[0]
        with pytest.raises(UsageError, match="lookup on the engine cpu, whose results depend on the number of tokens"):
            ids(model, "lookup")


def test_a_bundle_without_verify_graphs_speculates_only_if_it_may_not(other: Path):
    with edgekv.load(other) as model:
        assert ids(model, "auto")[1] is None
        with pytest.raises(UsageError, match=r"lookup in a bundle without verify graphs.* --draft-rows 8"):
            model.generate(PROMPT, LONG, speculate="lookup")


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"mode": "fast"}, "mode"),
        ({"mode": "corpus"}, "corpus"),
        ({"mode": "draft"}, "draft"),
        ({"tokens": 0}, "tokens"),
        ({"mode": "lookup", "draft": object()}, "draft"),
        ({"mode": "off", "corpus": object()}, "corpus"),
    ],
)
def test_what_does_not_go_together_is_refused(options: dict[str, Any], field: str):
    with pytest.raises(UsageError) as error:
        Speculation(**options)
    assert error.value.field == field


def test_a_grammar_continues_the_drafts_that_it_allows(verifying: Path):
    with edgekv.load(verifying) as model:
        constraint, _ = model.engine.texts.bind(Grammar.regex("(yes|no), sure"), None)
        assert constraint is not None
        drafts, answer = model.encode("no mercy"), model.encode("no, sure")
        at = next(at for at, (a, b) in enumerate(zip(drafts, answer, strict=False)) if a != b)
        assert 0 < at < len(answer)
        assert constraint.continued(drafts, 50) == answer  # forced from the first wrong one on
        assert constraint.continued(drafts, at) == answer[:at]
        assert constraint.continued(model.encode("maybe"), 50) == []
        for token in answer:  # the text itself has not changed
            assert token in constraint.allowed()
            constraint.push(token)


def test_a_grammar_and_drafts_compose(verifying: Path, tmp_path: Path):
    text = {"type": "string", "maxLength": 20}
    schema = {"type": "object", "properties": {"first": text, "second": text}, "required": ["first", "second"]}
    params = SamplingParams(max_new_tokens=90, grammar=Grammar.json_schema({**schema, "additionalProperties": False}))
    with edgekv.load(verifying) as model:
        plain = model.generate(PROMPT, params)
        wanted = list(plain)
        (tmp_path / "corpus").write_text("".join(token.text for token in wanted))
        corpus = Speculation("corpus", corpus=model.open_corpus(tmp_path / "corpus"))
        found = model.generate(PROMPT, params, speculate=corpus)
        assert [token.id for token in found] == [token.id for token in wanted]
    assert found.stats.forced_tokens == plain.stats.forced_tokens > 10
    assert found.stats.times.decode_steps < 0.7 * plain.stats.times.decode_steps


# The command line


def generated(capsys: Any, *arguments: str) -> Any:
    assert run(["generate", *arguments, "--prompt", "Hello", "--max-new-tokens", "40", "--ignore-eos", "--json"]) == 0
    captured = capsys.readouterr()
    return json.loads(captured.out), captured.err


def test_generate_speculates(verifying: Path, other: Path, corpus: Path, capsys: Any):
    plain, _ = generated(capsys, str(verifying))
    assert plain["stats"]["speculation"] is None
    for options in (
        ["--speculate", "lookup"],
        ["--speculate", "auto", "--draft-tokens", "3"],
        ["--draft-corpus", str(corpus)],
        ["--draft", str(other)],
    ):
        found, said = generated(capsys, str(verifying), *options)
        assert found["tokens"] == plain["tokens"] and not said
        assert found["stats"]["speculation"]["passes"] > 0


def test_the_summary_tells_what_speculation_brought(verifying: Path, corpus: Path, capsys: Any):
    options = ["--speculate", "corpus", "--draft-corpus", str(corpus)]
    assert run(["generate", str(verifying), "--prompt", "Hello", "--ignore-eos", *options]) == 0
    assert "tokens a pass, corpus " in capsys.readouterr().err
    assert run(["chat", str(verifying), "--message", "Hi", "--max-new-tokens", "20", "--speculate", "lookup"]) == 0
    assert "tokens a pass" in capsys.readouterr().err


def test_a_bundle_without_verify_graphs_says_so_once(other: Path, capsys: Any):
    found, said = generated(capsys, str(other), "--speculate", "auto")
    assert said == "[no speculation: the bundle has no verify graphs. Export it with --draft-rows 8.]\n"
    assert found["stats"]["speculation"] is None
    assert generated(capsys, str(other))[1] == ""


@pytest.mark.parametrize(
    ("options", "found"),
    [
        (["--speculate", "fast"], "--speculate: got 'fast'"),
        (["--speculate", "corpus"], "--draft-corpus: got none"),
        (["--speculate", "draft"], "--draft: got none"),
        (["--speculate", "lookup", "--draft", "x"], "--draft: got one with the mode lookup"),
        (["--speculate", "off", "--draft-tree"], "--draft-tree: got a tree with the mode off"),
        (["--draft-corpus", "{bundle}"], "--draft-corpus: got"),
        (["--draft", "{foreign}"], "draft bundle: got"),
        (["--speculate", "auto", "--draft-tokens", "9"], "--draft-tokens: got 9 drafts of a pass"),
    ],
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_wrong_options_are_refused(
    verifying: Path, foreign: Path, capsys: Any, command: str, options: list[str], found: str
):
    text = ["--prompt", "Hi"] if command == "generate" else ["--message", "Hi"]
    given = [each.format(bundle=verifying, foreign=foreign) for each in options]
    assert run([command, str(verifying), *text, *given]) == 2
    captured = capsys.readouterr()
    assert found in captured.err and captured.out == ""


def test_beams_with_drafts_are_refused(verifying: Path, capsys: Any):
    assert run(["generate", str(verifying), "--prompt", "Hi", "--num-beams", "2", "--speculate", "auto"]) == 2
    assert "speculate: got drafts with num_beams" in capsys.readouterr().err


def test_bench_tells_what_a_pass_with_drafts_costs(verifying: Path, capsys: Any):
    options = ["-p", "8", "-n", "4", "-d", "0,20,110", "-r", "2"]
    assert run(["bench", str(verifying), *options, "--json"]) == 0
    passes = json.loads(capsys.readouterr().out)["verify_passes"]
    sizes = [(each["n_rows"], each["n_depth"]) for each in passes]
    assert sizes == [(4, 0), (8, 0), (4, 20), (8, 20), (4, 110), (8, 110)]
    assert all(len(each["samples_ns"]) == 2 and each["steps"] > 0 for each in passes)
    assert run(["bench", str(verifying), "-p", "8", "-n", "4", "-d", "120", "-r", "1"]) == 0
    printed = capsys.readouterr().out
    assert "4 rows @ d120" in printed and "8 rows" not in printed  # these have no room there


# A server


def test_requests_take_turns_by_passes(verifying: Path, monkeypatch: pytest.MonkeyPatch):
    turns: list[Sequence] = []
    real = Engine.step

    def step(engine: Engine, only: Sequence | None = None) -> Any:
        if only is not None:
            turns.append(only)
        return real(engine, only)

    monkeypatch.setattr(Engine, "step", step)
    with edgekv.load(verifying) as twin, served(verifying, speculate=Speculation("draft", draft=twin)) as server:
        body = {"model": NAME, "prompt": ["Hello", "World"], "max_tokens": 60, "ignore_eos": True}
        assert server.post("/v1/completions", body)[0] == 200
    for generation in {id(each): each for each in turns}.values():
        drafts = generation.stats.speculation
        assert drafts is not None and drafts.accepted > 40
        groups = [name for name, _ in groupby(turns) if name is generation]
        assert len(groups) in (drafts.passes, drafts.passes + 1)  # fewer where the other one has ended


def test_serve_speculates_and_counts_drafts(verifying: Path):
    body = {"model": NAME, "prompt": "Hello", "max_tokens": 60, "ignore_eos": True}
    with served(verifying) as server:
        status, plain = server.post("/v1/completions", body)
        assert status == 200 and set(plain["usage"]["completion_tokens_details"].values()) == {0}
        assert "draft" not in server.get("/metrics")
    with served(verifying, speculate=Speculation("lookup")) as server:
        status, found = server.post("/v1/completions", body)
        assert status == 200 and found["choices"] == plain["choices"]
        details = found["usage"]["completion_tokens_details"]
        metrics = server.get("/metrics")
    for name, count in (
        ("draft_tokens_accepted_total", details["accepted_prediction_tokens"]),
        ("draft_tokens_total", sum(details.values())),
    ):
        assert f'edgekv_{name}{{drafter="lookup"}} {count}\n' in metrics
    assert "edgekv_decode_passes_total " in metrics


def test_verify_graphs_keep_their_memory_longer_than_others(verifying: Path, monkeypatch: pytest.MonkeyPatch):
    """Drafts may be rare, and a pass that has to read its weights again costs a fifth more."""
    released: list[str] = []
    monkeypatch.setattr(StaticGraph, "release", lambda graph: released.append(graph.record.role))
    monkeypatch.setattr("edgekv.engine.session._IDLE_VERIFY_STEPS", 40)
    with edgekv.load(verifying) as model:
        ids(model, "lookup", LONG.overlaid(max_new_tokens=10))
        released.clear()
        ids(model, "off", LONG.overlaid(max_new_tokens=30))
        assert released == ["prefill"]
        ids(model, "off", prompt=PROMPT[:1])  # more steps of the same graph
        assert released == ["prefill", "verify", "verify"]
