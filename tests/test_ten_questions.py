"""The benchmark of ten questions: what it calls equal is equal, and where answers part it shows by how much."""

import sys

import pytest

import edgekv
from benchmarks import ten_questions
from tests.support.checkpoints import write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.serving import TEMPLATE


@pytest.fixture(scope="module")
def other(tmp_path_factory):
    """The same shape and tokenizer, other weights."""
    checkpoint = write_checkpoint(tmp_path_factory.mktemp("other") / "checkpoint", seed=5)
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return exported(checkpoint, export_options(context=128, ar=(1, 8)))


def test_a_bundle_answers_as_itself(talking):
    with edgekv.load(talking, threads=1) as one, edgekv.load(talking, threads=1, kv_update="mirror") as two:
        found = ten_questions.ask(one, two, "Who?", 5)
        said = list(one.generate(messages=[{"role": "user", "content": "Who?"}], temperature=0, max_new_tokens=5))
    assert (found.tokens, found.answer) == (len(said), "".join(token.text for token in said))
    assert found.difference is None
    assert ten_questions.answers_table([found]).title == "1 of 1 answers have the same tokens"


def test_the_gap_is_that_of_the_first_engine_s_logits(talking, other):
    with edgekv.load(talking, threads=1) as one, edgekv.load(other, threads=1) as two:
        found = ten_questions.ask(one, two, "Who?", 5).difference
        messages = [{"role": "user", "content": "Who?"}]
        a, b = ([token.id for token in model.generate(messages=messages, max_new_tokens=5)] for model in (one, two))
        at = next(at for at in range(5) if a[at] != b[at])
        prompt = one.generate(messages=messages).prompt
        logits = one.score([*prompt, *a[:at]])[-1]
    assert found is not None
    assert found.at == at
    assert found.nats == pytest.approx(logits.max() - logits[b[at]])
    assert found.steps * one.bundle.manifest.encodings["logits"].scale == pytest.approx(found.nats)


@pytest.mark.thorough
@pytest.mark.slow
@pytest.mark.htp
def test_it_prints_every_question_and_the_float_nodes(talking, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["ten_questions", str(talking), "--limit", "2"])
    ten_questions.main()
    printed = capsys.readouterr().out
    assert "of 10 answers have the same tokens" in printed
    assert "0 nodes compute in float on SM8650" in printed
