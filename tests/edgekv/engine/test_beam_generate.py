from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

import edgekv
from edgekv.bundle import Bundle, TokenRecord
from edgekv.cli import run
from edgekv.engine.beam_search import Hypothesis
from edgekv.errors import ContextFullError, UsageError
from tests.support.bundles import separate

PROMPT = "import os\n\ndef read_file(path):\n"


@pytest.fixture(scope="module")
def model(bundle: Path) -> edgekv.Model:
    return edgekv.load(bundle, threads=1)


@pytest.fixture(scope="module")
def text_tokens(model: edgekv.Model, embedded: Path) -> list[int]:
    """As many tokens of held-out text as the context takes."""
    return model.encode((embedded / "heldout.txt").read_text("utf-8")[:4000])[: model.bundle.manifest.context]


@pytest.mark.thorough
@pytest.mark.htp
@pytest.mark.parametrize(("options", "tokens"), [({"kv_update": "slot"}, 58), ({"reserve": 1.5}, 8)])
def test_beams_that_share_memory_find_what_separate_ones_find(
    small_on_htp: Path, options: dict[str, Any], tokens: int
) -> None:
    """Bit by bit: the HTP's sums of integers do not depend on the order of the columns."""
    model = edgekv.load(small_on_htp, "htp", verify=False, **options)
    prompt = list(range(tokens))
    result = model.generate(prompt, 5, num_beams=3, num_return_sequences=3)
    assert (result.stats.kv_bytes_beside > 0) == (tokens == 58)
    found = tuple(Hypothesis(each.tokens, each.score) for each in result.sequences)
    assert found == separate(model, prompt, 3, 5)


@pytest.mark.slow
def test_the_cpu_finds_the_same_scores(model: edgekv.Model, text_tokens: list[int]) -> None:
    """Its floating-point sums depend on the order of the columns, so a score may differ by little."""
    result = model.generate(text_tokens[:20], 8, num_beams=4)
    assert result.sequences[0].score == pytest.approx(separate(model, text_tokens[:20], 4, 8)[0].score, abs=0.02)


def test_one_beam_is_greedy_choice(model: edgekv.Model) -> None:
    greedy = [token.id for token in model.generate(PROMPT, 20)]
    assert list(model.generate(PROMPT, 20, num_beams=1).sequences[0].tokens) == greedy


def test_one_row_for_each_beam_and_step_is_copied_and_none_gathered(model: edgekv.Model) -> None:
    stats = model.generate(PROMPT, 12, num_beams=4).stats
    geometry = model.bundle.manifest.geometry
    row_bytes = geometry.tensors * geometry.row_bytes
    assert stats.decoded_tokens == 11
    assert stats.kv_bytes_kept == 4 * 10 * row_bytes  # the last ones are needed by none
    assert (stats.kv_bytes_gathered, stats.kv_bytes_beside) == (0, 0)
    assert stats.kv_bytes_held == model.cache.stats.bytes_held
    assert stats.kv_bytes_copied == stats.kv_bytes_kept + stats.prompt_tokens * row_bytes
    assert stats.steps == 1 + 4 * 11


def test_the_prompt_is_run_once_and_left_in_the_cache(model: edgekv.Model) -> None:
    before = [token.id for token in model.generate(PROMPT, 10)]
    result = model.generate(PROMPT, 10, num_beams=3)
    assert model.cache.length == len(result.prompt)
    assert [token.id for token in model.generate(PROMPT, 10)] == before


def test_text_is_the_decoding_of_the_tokens(model: edgekv.Model) -> None:
    sequences = model.generate(PROMPT, 20, num_beams=3, num_return_sequences=3).sequences
    assert len(sequences) == 3
    for sequence in sequences:
        assert sequence.text == model.tokenizer.decode(list(sequence.tokens))
        assert sequence.stop_reason == "length"


def test_a_sequence_that_ends_by_itself_says_so(model: edgekv.Model) -> None:
    (free,) = model.generate(PROMPT, 12, num_beams=4).sequences
    ends = TokenRecord(bos=None, eos=[free.tokens[6]], pad=None)
    bundle = Bundle(model.bundle.path, msgspec.structs.replace(model.bundle.manifest, tokens=ends))
    result = edgekv.load(bundle, threads=1).generate(
        model.encode(PROMPT), 12, num_beams=4, num_return_sequences=4, early_stopping=True
    )
    ended = [each for each in result.sequences if each.stop_reason == "eos"]
    assert ended
    for each in ended:
        assert each.tokens.index(free.tokens[6]) == len(each.tokens) - 1
        assert each.text == model.tokenizer.decode(list(each.tokens[:-1]))


@pytest.mark.parametrize(("left", "tokens"), [(0, 1), (1, 2), (5, 6)])
def test_a_full_context_ends_a_search(model: edgekv.Model, text_tokens: list[int], left: int, tokens: int) -> None:
    prompt = text_tokens[: len(text_tokens) - left]
    result = model.generate(prompt, 50, num_beams=4)
    assert len(result.sequences[0].tokens) == tokens
    assert result.sequences[0].stop_reason == "context"
    assert model.generate(prompt, tokens, num_beams=4).sequences[0].stop_reason == "length"
    with pytest.raises(ContextFullError, match="prompt: got 129 tokens"):
        model.generate([5] * 129, 1, num_beams=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2, "temperature": 0.5}, "temperature: got 0.5 with num_beams; expected nothing"),
        ({"num_beams": 2, "top_k": 5}, "top_k: got 5 with num_beams"),
        ({"num_beams": 2, "seed": 0}, "seed: got 0 with num_beams"),
        ({"num_beams": 2, "stop": ["x"]}, r"stop: got \['x'\] with num_beams"),
        ({"num_beams": 2, "processors": [max]}, "processors: got 1 with num_beams"),
        ({"num_beams": 2, "return_logits": True}, "return_logits: got True with num_beams"),
        ({"num_beams": 2, "sequence": 3}, "sequence: got 3 with num_beams"),
        ({"num_return_sequences": 2}, "num_return_sequences: got 2 without num_beams"),
        ({"length_penalty": 1.0}, "length_penalty: got 1.0 without num_beams"),
        ({"early_stopping": False}, "early_stopping: got False without num_beams"),
    ],
)
def test_options_that_do_not_go_together_are_refused(
    model: edgekv.Model, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate(PROMPT, 5, **options)


def test_what_beams_cannot_go_with_is_refused(bundle: Path) -> None:
    with pytest.raises(UsageError, match="cache mode: got disabled with num_beams; expected always"):
        edgekv.load(bundle, cache_mode="disabled", verify=False).generate(PROMPT, 5, num_beams=2)


def test_a_sliding_window_is_refused(bundle: Path) -> None:
    sliding = edgekv.load(bundle, policy="sliding-window", verify=False)
    with pytest.raises(UsageError, match="context policy: got sliding-window with num_beams; expected fail"):
        sliding.generate(PROMPT, 5, num_beams=2)


def test_the_command_prints_sequences_and_scores(bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(bundle), "--prompt", PROMPT, "--max-new-tokens", "6", "--num-beams", "4"]
    command += ["--num-return-sequences", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
    assert run([*command, "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed) == ["schema", "prompt_tokens", "sequences", "stats"]
    assert [list(each) for each in printed["sequences"]] == [["tokens", "text", "score", "stop_reason"]] * 2
    assert printed["sequences"][0]["score"] >= printed["sequences"][1]["score"]
    assert run(command) == 0
    shown = capsys.readouterr()
    assert shown.out == "".join(each["text"] + "\n" for each in printed["sequences"])
    assert "4 beams of 5" in shown.err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--num-beams", "0"], "--num-beams: got 0"),
        (["--num-beams", "2", "--top-k", "3"], "--top-k: got 3 with num_beams"),
        (["--length-penalty", "2"], "--length-penalty: got 2.0 without num_beams"),
        (
            ["--num-beams", "2", "--early-stopping", "soon"],
            "--early-stopping: got 'soon'; expected true, false or never",
        ),
        (["--num-beams", "2", "--context-policy", "sliding-window"], "--context-policy: got sliding-window"),
    ],
)
def test_the_command_refuses_them_by_name(
    bundle: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", str(bundle), "--prompt", "x", *options]) == 2
    assert message in capsys.readouterr().err
