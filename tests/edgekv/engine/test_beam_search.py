from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgekv.engine.beam_search import BeamSearch, Hypothesis
from edgekv.errors import UsageError
from edgekv.text import BeamParams
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.bundles import run_search
from tests.support.checkpoints import NEWER, OLDER, write_checkpoint

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "beams.json").read_text())
FORMS = {"newer": NEWER, "older": OLDER}
TOLERANCE = 1e-3


class Model:
    """The float32 reference; what was computed once is kept, since searches share most of their sequences."""

    def __init__(self, folder: Path, form: dict[str, Any]) -> None:
        self._reference = Reference(Checkpoint.open(str(write_checkpoint(folder, form))))
        self._logits: dict[tuple[int, ...], np.ndarray[Any, Any]] = {}

    def logits(self, sequences: Sequence[tuple[int, ...]]) -> np.ndarray[Any, Any]:
        new = [each for each in dict.fromkeys(sequences) if each not in self._logits]
        if new:
            found = self._reference.logits([np.array(each) for each in new])
            self._logits.update(zip(new, (each[-1] for each in found), strict=True))
        return np.stack([self._logits[each] for each in sequences])


class Recompute:
    """A scorer without any cache: the whole sequence of every beam in every step."""

    def __init__(self, model: Model, prompt: Sequence[int]) -> None:
        self._model = model
        self._beams = [tuple(prompt)]

    def first(self) -> np.ndarray[Any, Any]:
        return self._model.logits(self._beams)

    def next(self, parents: Sequence[int], tokens: Sequence[int]) -> np.ndarray[Any, Any]:
        self._beams = [(*self._beams[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        return self._model.logits(self._beams)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    return {name: Model(tmp_path_factory.mktemp(name), form) for name, form in FORMS.items()}


def _search(model: Model, case: dict[str, Any], **changed: Any) -> tuple[Hypothesis, ...]:
    options = {**case["options"], **changed}
    length = options.pop("max_new_tokens")
    search = BeamSearch(BeamParams(**options), eos=case["eos"], max_new_tokens=length, vocab=320)
    return run_search(Recompute(model, case["prompt"]), search)


@pytest.mark.slow
@pytest.mark.parametrize("checkpoint", FORMS)
def test_sequences_and_scores_are_those_of_transformers(models: dict[str, Model], checkpoint: str) -> None:
    for case in GOLDEN:
        if case["checkpoint"] == checkpoint:
            found = _search(models[checkpoint], case)
            assert [list(each.tokens) for each in found] == case["sequences"], case
            assert np.allclose([each.score for each in found], case["scores"], rtol=1e-5, atol=TOLERANCE), case


def test_the_golden_searches_end_in_every_way() -> None:
    lengths = [len(sequence) for case in GOLDEN for sequence in case["sequences"]]
    ends = {(case["eos"] != [], sequence[-1] in case["eos"]) for case in GOLDEN for sequence in case["sequences"]}
    assert ends == {(False, False), (True, False), (True, True)}
    assert min(lengths) < max(lengths) == 16


def test_one_beam_is_greedy_choice_up_to_its_first_end(models: dict[str, Model]) -> None:
    tokens, greedy = (5, 6, 7), []
    for _ in range(12):
        greedy.append(int(models["newer"].logits([(*tokens, *greedy)])[0].argmax()))
    for eos, end in (([], 12), ([greedy[4]], greedy.index(greedy[4]) + 1)):
        case = {"prompt": tokens, "eos": eos, "options": {"num_beams": 1, "max_new_tokens": 12}}
        (found,) = _search(models["newer"], case)
        assert list(found.tokens) == greedy[:end]


def test_more_return_sequences_only_show_more_of_the_same(models: dict[str, Model]) -> None:
    case = GOLDEN[3]
    assert _search(models["newer"], case, num_return_sequences=2) == _search(models["newer"], case)[:2]


def test_of_equal_continuations_the_first_beam_and_the_lowest_token_come_first() -> None:
    search = BeamSearch(BeamParams(2), eos=(), max_new_tokens=3, vocab=8)
    search.advance(np.zeros((1, 8)))
    assert (search.parents, search.tokens) == ([0, 0], [0, 1])
    search.advance(np.zeros((2, 8)))
    assert (search.parents, search.tokens) == ([0, 0], [0, 1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 0}, "num_beams: got 0; expected at least 1"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences: got 3; expected 1 to 2"),
        ({"num_beams": 2, "num_return_sequences": 0}, "num_return_sequences: got 0"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty: got nan"),
        ({"num_beams": 2, "length_penalty": 1e6}, r"length_penalty: got 1000000.0; expected one with which 16\*\*"),
        ({"num_beams": 2, "early_stopping": "soon"}, "early_stopping: got 'soon'; expected True, False or 'never'"),
        ({"num_beams": 107}, "num_beams: got 107; expected at most 106 with a vocabulary of 320"),
        ({"num_beams": 2, "max_new_tokens": 0}, "max_new_tokens: got 0"),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    length = options.pop("max_new_tokens", 16)
    with pytest.raises(UsageError, match=message):
        BeamSearch(BeamParams(**options), eos=(1, 2), max_new_tokens=length, vocab=320)


def test_a_search_refuses_logits_of_other_beams_and_steps_after_its_end() -> None:
    search = BeamSearch(BeamParams(2), eos=(), max_new_tokens=1, vocab=8)
    with pytest.raises(ValueError, match="logits: got 2 rows; expected 1"):
        search.advance(np.zeros((2, 8)))
    search.advance(np.zeros((1, 8)))
    with pytest.raises(ValueError, match="got a search that is done"):
        search.advance(np.zeros((2, 8)))


def test_a_search_goes_on_while_its_best_beam_could_still_be_better() -> None:
    """Whatever the other beams have."""
    search = BeamSearch(BeamParams(2, 2), eos=[0], max_new_tokens=5, vocab=8)
    for rows in ([[0.25, 0.5, 0.15]], [[0.3, 0, 0, 0, 0.65], [0.97]]):
        chances = np.full((len(rows), 8), 1e-9)
        for chance, row in zip(chances, rows, strict=True):
            chance[: len(row)] = np.maximum(row, 1e-9)
            chance[7] += 1 - chance.sum()
        search.advance(np.log(chances))
    assert [hypothesis.tokens for hypothesis in search.finished] == [(1, 0), (0,)] and not search.done
