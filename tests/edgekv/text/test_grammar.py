"""Constrained decoding: every finished text fits its grammar, and forced tokens cost no pass of their own."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

import edgekv
from benchmarks.schemas import random_schema
from edgekv import Grammar
from edgekv.cli import run
from edgekv.engine import GenerationStats
from edgekv.errors import BusyError, UsageError
from edgekv.text import GrammarCompiler, constraint
from edgekv.text.schema import has_finite_answer
from tests.support.bundles import assert_same_or_tied
from tests.support.exports import export_options, exported

PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "measured_in_metres": {"type": "boolean"}},
    "required": ["name", "measured_in_metres"],
    "additionalProperties": False,
}
LOOP: dict[str, Any] = {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}
DOUBLING = [{"anyOf": [{"minLength": n}, {"maxLength": n}]} for n in range(20)]
PROMPT = "def main("


@pytest.fixture(scope="module")
def model(bundle: Path) -> edgekv.Model:
    return edgekv.load(bundle, threads=1)


@pytest.fixture(scope="module")
def random_model(tmp_path_factory: pytest.TempPathFactory) -> edgekv.Model:
    """Random weights over a vocabulary of bytes, with room for texts of 480 tokens."""
    from tests.support.checkpoints import write_checkpoint

    checkpoint = write_checkpoint(tmp_path_factory.mktemp("random") / "checkpoint", {"max_position_embeddings": 512})
    return edgekv.load(exported(checkpoint, export_options(context=512, ar=(1, 8))), threads=1)


def _generate(model: edgekv.Model, grammar: Grammar, **keywords: Any) -> tuple[str, GenerationStats]:
    generation = model.generate(PROMPT, grammar=grammar, **{"max_new_tokens": 100, **keywords})
    return "".join(token.text for token in generation), generation.stats


@pytest.mark.parametrize("kind", ["number", "integer"])
def test_a_number_has_an_end(random_model: edgekv.Model, kind: str) -> None:
    """Of a model that writes nothing but digits if it may."""
    bias = {random_model.encode(digit)[-1]: 1000.0 for digit in "123456789"}
    schema = {"type": "array", "items": {"type": kind}, "minItems": 2, "maxItems": 2}
    text, stats = _generate(random_model, Grammar.json_schema(schema), logit_bias=bias, max_new_tokens=200)
    assert stats.stop_reason == "grammar"
    assert all(len(digits) <= constraint.MAX_DIGITS for digits in re.findall(r"\d+", text))
    jsonschema.validate(json.loads(text), schema)


def test_digits_of_texts_have_no_bound(random_model: edgekv.Model) -> None:
    bias = {random_model.encode("7")[-1]: 1000.0}
    long = {"type": "array", "items": {"type": "string", "pattern": "^7{30}$"}, "minItems": 1, "maxItems": 1}
    assert _generate(random_model, Grammar.json_schema(long), logit_bias=bias)[0] == f'["{"7" * 30}"]'


@pytest.mark.parametrize("temperature", [0, 1])
def test_a_finished_text_is_json_of_its_schema(model: edgekv.Model, temperature: float) -> None:
    text, stats = _generate(model, Grammar.json_schema(PERSON), temperature=temperature)
    jsonschema.validate(json.loads(text), PERSON)
    assert stats.stop_reason == "grammar"


def test_a_text_matches_a_regular_expression(model: edgekv.Model) -> None:
    text, stats = _generate(model, Grammar.regex(r"\d{4}-(0[1-9]|1[0-2]), .{3}é"))
    assert re.fullmatch(r"\d{4}-(0[1-9]|1[0-2]), .{3}é", text)
    assert stats.stop_reason == "grammar"


def test_a_text_is_one_of_a_lark_grammar(model: edgekv.Model) -> None:
    text, _ = _generate(model, Grammar.lark('start: "f(" arg ("," arg){2} ")"\narg: /[a-z]{1,3}/ | "(" arg ")"'))
    assert re.fullmatch(r"f\([a-z()]+,[a-z()]+,[a-z()]+\)", text)


def test_a_text_is_one_of_some(model: edgekv.Model) -> None:
    """Whatever their characters mean in regular expressions."""
    for texts in (["a|b", "(c"], ['\n\t"\\', "é\U0001f600"]):
        text, stats = _generate(model, Grammar.choice(texts))
        assert text in texts and stats.stop_reason == "grammar"
    for wrong in ([], [""], [1]):
        with pytest.raises(UsageError, match="expected texts of a character or more"):
            Grammar.choice(wrong)  # type: ignore[arg-type]


LIST = r"""# a list
root   ::= "[" ws item ("," ws item)* "]" ws
item   ::= [a-z]{1,2} | "\"" [^"\\]? "\"" # or a character
ws     ::= | " "
"""


def test_a_text_is_one_of_a_grammar_of_llama_cpp(model: edgekv.Model) -> None:
    text, stats = _generate(model, Grammar.gbnf(LIST), max_new_tokens=400, logit_bias={model.encode("]")[-1]: 5.0})
    assert re.fullmatch(r'\[ ?([a-z]{1,2}|"[^"\\]?")(, ?([a-z]{1,2}|"[^"\\]?"))*\] ?', text, re.DOTALL), text
    assert stats.stop_reason in ("grammar", "eos")
    assert Grammar.gbnf('start: "x"') == Grammar.lark('start: "x"')
    for wrong in ("root ::= <think>", "root", "root ::= (" + "(" * 3000, ""):
        with pytest.raises(UsageError, match="grammar: got"):
            Grammar.gbnf(wrong)


def test_a_grammar_is_compiled_again_for_another_salt(model: edgekv.Model) -> None:
    """The time would tell what somebody else has asked for."""
    manifest = model.bundle.manifest
    compiler = GrammarCompiler(model.tokenizer, manifest.model.vocab, manifest.tokens.eos)
    grammar, refused = Grammar.regex("x+"), Grammar.regex("(")
    assert compiler.compile(grammar, "one").allowed().size
    assert [compiler.has(grammar, salt) for salt in ("one", "two", None)] == [True, False, False]
    for _ in range(2):
        with pytest.raises(UsageError, match="unclosed group"):
            compiler.compile(refused)
        assert not compiler.has(refused)


def test_a_text_may_end_where_the_grammar_allows_an_end(random_model: edgekv.Model) -> None:
    generation = random_model.generate("x", grammar=Grammar.regex("a*"), temperature=1, seed=3, max_new_tokens=400)
    text = "".join(token.text for token in generation)
    assert set(text) <= {"a"}
    assert generation.stats.stop_reason == "eos"


def test_a_text_that_is_cut_says_so(model: edgekv.Model) -> None:
    text, stats = _generate(model, Grammar.json_schema(PERSON), max_new_tokens=9)
    assert stats.stop_reason == "length"
    assert stats.generated_tokens == 9
    assert text.startswith('{"name": "')


def test_forced_tokens_never_run_past_the_context(model: edgekv.Model) -> None:
    long = Grammar.regex("x" * 400)
    prompt = model.encode(PROMPT)
    generation = model.generate(prompt, grammar=long, max_new_tokens=1000)
    tokens = list(generation)
    assert generation.stats.stop_reason == "context"
    assert len(prompt) + len(tokens) == model.bundle.manifest.context + 1  # as many as without a grammar


def _one_by_one(model: edgekv.Model, prompt: Sequence[int], grammar: Grammar, most: int) -> list[int]:
    """The greedy text of a grammar, each token run on its own: what forcing several at once has to equal."""
    manifest = model.bundle.manifest
    constraint = GrammarCompiler(model.tokenizer, manifest.model.vocab, manifest.tokens.eos).compile(grammar)
    tokens: list[int] = []
    while len(tokens) < most and not constraint.is_complete:
        logits = model.score([*prompt, *tokens])[-1]
        allowed = constraint.allowed()
        forced = constraint.forced()
        assert not forced or forced[0] in allowed
        tokens.append(forced[0] if forced else int(allowed[logits[allowed].argmax()]))
        constraint.push(tokens[-1])
    return tokens


def test_forced_tokens_run_together_give_the_text_of_one_by_one(model: edgekv.Model) -> None:
    grammar, prompt = Grammar.json_schema(PERSON), model.encode(PROMPT)
    generation = model.generate(prompt, grammar=grammar, max_new_tokens=30)
    found = [token.id for token in generation]
    assert_same_or_tied(found, _one_by_one(model, prompt, grammar, 30), prompt, model)
    stats = generation.stats
    assert stats.forced_tokens >= 10
    assert stats.times.decode_steps <= len(found) - stats.forced_tokens
    assert stats.cache.computed_tokens <= len(prompt) + len(found)


def test_logits_of_forced_tokens_are_those_of_their_steps(model: edgekv.Model) -> None:
    prompt = model.encode(PROMPT)
    generation = model.generate(prompt, grammar=Grammar.json_schema(PERSON), max_new_tokens=12, return_logits=True)
    tokens = list(generation)
    scored = model.score([*prompt, *(token.id for token in tokens[:-1])])[-len(tokens) :]
    logits = np.stack([token.logits for token in tokens])
    assert np.abs(logits - scored).max() <= 17 * model.bundle.manifest.encodings["logits"].scale


def test_a_seed_gives_the_same_text_again(model: edgekv.Model) -> None:
    first, again = (_generate(model, Grammar.json_schema(PERSON), temperature=1, seed=5)[0] for _ in range(2))
    assert first == again


def test_a_grammar_holds_against_bias_and_processors(model: edgekv.Model) -> None:
    def prefer_x(prompt: Sequence[int], generated: Sequence[int], logits: Any) -> Any:
        logits[model.encode("x")[-1]] += 1000
        return logits

    text, _ = _generate(model, Grammar.regex("(yes|no)"), processors=[prefer_x], repetition_penalty=1.5)
    assert text in ("yes", "no")


def test_forbidding_what_a_grammar_needs_is_refused(model: edgekv.Model) -> None:
    every = {token: -float("inf") for token in range(model.bundle.manifest.model.vocab - 1)}
    with pytest.raises(UsageError, match="none that is finite among those that the grammar allows"):
        _generate(model, Grammar.regex("[0-9]{3}"), logit_bias=every)


@pytest.mark.slow
def test_random_schemas_are_kept_to_by_random_weights(random_model: edgekv.Model) -> None:
    finished = 0
    for seed in range(20):
        schema = random_schema(seed)
        generation = random_model.generate(
            "x", grammar=Grammar.json_schema(schema), temperature=1, seed=seed, max_new_tokens=150
        )
        text = "".join(token.text for token in generation)
        if generation.stats.stop_reason in ("grammar", "eos"):
            jsonschema.Draft202012Validator(schema, format_checker=_FORMATS).validate(json.loads(text))
            finished += 1
    assert finished >= 10


_FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (lambda: Grammar.json_schema({"not": {"type": "string"}}), "Unimplemented keys"),
        (lambda: Grammar.json_schema({"type": "string", "minLength": 3, "maxLength": 1}), "Unsatisfiable"),
        (lambda: Grammar.json_schema({"$ref": "http://example.com/schema"}), "not present"),
        (lambda: Grammar.json_schema({"$ref": "#/nowhere"}), "nowhere"),
        (lambda: Grammar.json_schema({"type": "string", "allOf": DOUBLING}), "schema too large"),
        (lambda: Grammar.regex("(?=a)b"), "look-ahead"),
        (lambda: Grammar.regex(r"[^\s\S]"), "no text satisfies"),
        (lambda: Grammar.lark('begin: "a"'), "no start rule"),
        (lambda: Grammar.lark("start: " + "(" * 5000 + '"a"' + ")" * 5000), "deeply nested"),
        (lambda: Grammar.lark("start: start"), "no text satisfies"),
    ],
)
def test_what_cannot_be_compiled_is_refused_before_prefill(model: edgekv.Model, grammar: Any, reason: str) -> None:
    steps = model.engine.graphs.times.steps
    with pytest.raises(UsageError, match=reason):
        model.generate(PROMPT, grammar=grammar())
    assert model.engine.graphs.times.steps == steps


def test_a_grammar_that_takes_too_long_is_refused_until_it_is_compiled(
    model: edgekv.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine may have been busy."""
    names = [f"p{number}" for number in range(1500)]
    large = Grammar.json_schema({"properties": {name: {"type": "string"} for name in names}, "required": names})
    compiler = model.engine.texts._grammars
    with monkeypatch.context() as patch:
        patch.setattr(constraint, "COMPILE_LIMIT_S", 0.001)
        with pytest.raises(BusyError, match=r"does not compile within 0\.001 s; .*Try again later"):
            model.generate(PROMPT, grammar=large)
    with compiler._changed:
        assert compiler._changed.wait_for(lambda: not compiler.compiling, 60)
    assert model.generate(PROMPT, grammar=large, max_new_tokens=1)


def test_grammars_that_never_compile_are_few(model: edgekv.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has a thread that cannot be stopped: asked again it gets no other, and a fifth grammar is refused."""
    manifest = model.bundle.manifest
    compiler = GrammarCompiler(model.tokenizer, manifest.model.vocab, manifest.tokens.eos)
    end, started, real = threading.Event(), list[str](), GrammarCompiler._matcher

    def compile_late(own: GrammarCompiler, grammar: Grammar) -> Any:
        started.append(grammar.text)
        end.wait(60)
        return real(own, grammar)

    monkeypatch.setattr(constraint, "COMPILE_LIMIT_S", 0.02)
    monkeypatch.setattr(GrammarCompiler, "_matcher", compile_late)
    endless = [Grammar.regex(f"never{at}") for at in range(5)]
    try:
        for grammar in [*endless[:4], *endless[:4]]:
            with pytest.raises(BusyError, match="does not compile within"):
                compiler.compile(grammar)
        with pytest.raises(BusyError, match="4 others that compile; expected fewer than 4"):
            compiler.compile(endless[4])
        assert started == [grammar.text for grammar in endless[:4]] and compiler.compiling == 4
    finally:
        end.set()
    monkeypatch.setattr(constraint, "COMPILE_LIMIT_S", 20)
    assert not compiler.compile(endless[4]).is_complete
    assert not compiler.compile(endless[0]).is_complete


def _nested(levels: int) -> str:
    return '{"items": ' * levels + "{}" + "}" * levels


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: Grammar.json_schema(LOOP), "recursion without end"),
        (lambda: Grammar.json_schema("{"), "Expecting"),
        (lambda: Grammar.json_schema("[]"), "list"),
        (lambda: Grammar.json_schema(False), "nothing satisfies"),
        (lambda: Grammar.json_schema({"const": float("nan")}), "not JSON compliant"),
        (lambda: Grammar.json_schema({"const": {1}}), "not JSON serializable"),
        (lambda: Grammar.json_schema(_nested(65)), "66 levels"),
        (lambda: Grammar.json_schema("[" * 60_000), "60000 levels"),
        (lambda: Grammar.json_schema({"description": "x" * 70_000}), "70,"),
        (lambda: Grammar.json_schema({"const": "\ud800"}), "surrogate"),
        (lambda: Grammar.json_schema({"multipleOf": 123_456_789}), "123,456,789 remainders"),
        (lambda: Grammar.json_schema({"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}), "1,022,117 remainders"),
        (lambda: Grammar.json_schema({"multipleOf": 0}), "above 0"),
        (lambda: Grammar.lark('start: %json {"multiple\\u004ff": 1e11}'), "remainders"),
        (lambda: Grammar.regex(""), "an empty text"),
        (lambda: Grammar.regex("a\0"), "zero byte"),
        (lambda: edgekv.SamplingParams(grammar={"type": "object"}), "Grammar.json_schema"),  # type: ignore[arg-type]
    ],
)
def test_what_is_too_large_or_never_ends_is_refused_without_a_model(make: Any, reason: str) -> None:
    with pytest.raises(UsageError, match=re.escape(reason)):
        make()


@pytest.mark.parametrize(
    ("schema", "is_finite"),
    [
        (LOOP, False),
        ({**LOOP, "required": []}, True),
        ({"anyOf": [{"type": "null"}, LOOP]}, True),
        ({"type": "array", "items": {"$ref": "#"}}, True),
        ({"type": "array", "items": {"$ref": "#"}, "minItems": 1}, False),
        ({"type": "array", "prefixItems": [{"$ref": "#"}], "minItems": 1}, False),
        ({"type": ["array", "null"], "items": {"$ref": "#"}, "minItems": 1}, True),
        ({"allOf": [{"$ref": "#"}]}, False),
        ({"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"$ref": "#"}}}, False),
        ({"$ref": "#/$defs/0", "$defs": {str(n): {"$ref": f"#/$defs/{n + 1}"} for n in range(900)}}, True),
        ({"type": "object", "required": ["a"], "additionalProperties": {"$ref": "#"}}, False),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, False),
    ],
)
def test_schemas_with_a_finite_instance(schema: dict[str, Any], is_finite: bool) -> None:
    assert has_finite_answer(schema) is is_finite


@pytest.mark.slow
def test_the_command_line_takes_each_kind(bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "schema.json").write_text(json.dumps(PERSON))
    (tmp_path / "grammar.lark").write_text('start: "a" /[0-9]/ "c"')
    for option, value, pattern in (
        ("--json-schema", '{"enum": ["one"]}', '"one"'),
        ("--json-schema", tmp_path / "schema.json", r'\{"name": ".*", "measured_in_metres": (true|false)\}'),
        ("--grammar", tmp_path / "grammar.lark", "a[0-9]c"),
        ("--regex", "[x-z]{4}", "[x-z]{4}"),
    ):
        assert run(["generate", str(bundle), "--prompt", PROMPT, option, str(value)]) == 0
        printed = capsys.readouterr()
        assert re.fullmatch(pattern, printed.out.strip())
        assert "ended by grammar" in printed.err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--regex", "a", "--json-schema", "{}"], "--json-schema and --regex"),
        (["--json-schema", "missing.json"], "No such file"),
        (["--grammar", "missing.lark"], "No such file"),
        (["--regex", "("], "unclosed"),
        (["--regex", "a", "--num-beams", "2"], "with num_beams"),
    ],
)
def test_the_command_line_refuses_by_name(
    bundle: Path, options: list[str], reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(bundle), "--prompt", PROMPT, *options]) == 2
    printed = capsys.readouterr()
    assert reason in printed.err
    assert printed.out == ""
