from __future__ import annotations

import asyncio
import html
import pydoc
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib import metadata
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec
import numpy as np
import pytest

import edgekv
from edgekv import SamplingParams
from edgekv.bundle import Bundle, TokenRecord
from edgekv.engine import Request
from edgekv.engine.call_options import CallOptions, GenerateCall
from edgekv.errors import ContextFullError, UsageError
from edgekv.kv import KVCache
from edgekv.prefix import StoreConfig
from edgekv.text import Token
from edgekv.text.params import BeamKeywords, BeamParams, SamplingKeywords
from edgekv.text.texts import Texts
from tests.support.bundles import endless

PROMPT = "import os\n\ndef read_file(path):\n"
IN_ORDER: tuple[dict[str, Any], ...] = ({"kv_update": "pointer-shift", "reserve": 2.0}, {"reserve": 1.5})
STRATEGIES: tuple[dict[str, Any], ...] = (*IN_ORDER, {"kv_update": "slot"})


def _ids(tokens: Sequence[Token]) -> list[int]:
    return [token.id for token in tokens]


def _held(model: edgekv.Model) -> np.ndarray[Any, Any]:
    """Keys and values of the tokens held, oldest first, `[N, tokens, D]`."""
    rows: np.ndarray[Any, Any] = model.cache.arena.array[:, model.cache.held_rows()]
    return rows


@pytest.fixture(scope="module")
def model(bundle: Path) -> edgekv.Model:
    return edgekv.load(bundle, threads=1)


@pytest.fixture(scope="module")
def text_tokens(model: edgekv.Model, embedded: Path) -> list[int]:
    """As many tokens of held-out text as the context takes."""
    return model.encode((embedded / "heldout.txt").read_text("utf-8")[:4000])[: model.bundle.manifest.context]


def test_a_token_is_decoded_in_ten_files_and_eight_frames(model: edgekv.Model) -> None:
    """Of the package: a reader who follows a token opens no more."""
    package, files, frames = str(Path(edgekv.__file__).parent), set[str](), 0

    def called(frame: FrameType | None, event: str, _: object) -> None:
        nonlocal frames
        if event != "call" or frame is None or not frame.f_code.co_filename.startswith(package):
            return
        files.add(frame.f_code.co_filename)
        depth = 0
        while frame is not None:
            depth += frame.f_code.co_filename.startswith(package)
            frame = frame.f_back
        frames = max(frames, depth)

    with model.generate(PROMPT, 8, ignore_eos=True) as generation:
        for _ in range(4):
            next(generation)
        sys.setprofile(called)
        try:
            next(generation)
        finally:
            sys.setprofile(None)
    assert len(files) <= 10, sorted(files)
    assert frames <= 8


def test_a_generation_is_its_text(model: edgekv.Model) -> None:
    streamed = "".join(token.text for token in model.generate(PROMPT, 12))
    generation = model.generate(PROMPT, 12)
    next(generation)
    assert repr(generation).startswith("<Generation ") and repr(generation).endswith(" + 1 tokens, running>")
    assert str(generation) == generation.text == streamed
    assert repr(generation).endswith(f": {len(generation.prompt)} + 12 tokens, length>")
    shown = generation._repr_html_()
    assert html.unescape(shown).startswith(f"<pre style='white-space: pre-wrap'>{streamed}</pre>")
    assert shown.endswith("12 tokens, length</small>")


def test_a_notebook_shows_text_and_no_markup_of_it(model: edgekv.Model) -> None:
    forced = model.generate(PROMPT, 12, grammar=edgekv.Grammar.regex(r"<b>\n&"))
    assert str(forced) == "<b>\n&"
    assert "<b>" not in forced._repr_html_() and "&lt;b&gt;\n&amp;</pre>" in forced._repr_html_()


def test_several_prompts_are_several_texts(model: edgekv.Model) -> None:
    prompts = [PROMPT, "class Reader:\n"]
    assert [each.text for each in model.generate(prompts, 8)] == [model.generate(each, 8).text for each in prompts]
    with pytest.raises(UsageError, match="sequence: got it with a list of texts; expected a single prompt"):
        model.generate(prompts, 8, sequence=3)  # type: ignore[call-overload]


def test_an_event_loop_goes_on_while_tokens_come(model: edgekv.Model) -> None:
    async def main() -> tuple[str, int]:
        text, turns, has_ended = "", 0, False

        async def other() -> None:
            nonlocal turns
            while not has_ended:
                turns += 1
                await asyncio.sleep(0)

        beside = asyncio.create_task(other())
        async for token in model.generate(PROMPT, 12):
            text += token.text
        has_ended = True
        await beside
        return text, turns

    text, turns = asyncio.run(main())
    assert text == model.generate(PROMPT, 12).text and turns > 12


@pytest.mark.parametrize(
    ("keyword", "meant"),
    {"temprature": "temperature", "max_tokens": "max_new_tokens", "repeat_penalty": "repetition_penalty"}.items(),
)
def test_a_mistyped_keyword_is_told_the_right_one(model: edgekv.Model, keyword: str, meant: str) -> None:
    with pytest.raises(TypeError, match=rf"got the keyword '{keyword}'.*Did you mean {meant}\?"):
        model.generate(PROMPT, **{keyword: 1})  # type: ignore[call-overload]


def test_editors_know_every_keyword() -> None:
    assert SamplingKeywords.__annotations__.keys() == {each.name for each in fields(SamplingParams)}
    assert BeamKeywords.__annotations__.keys() == {each.name for each in fields(BeamParams)} - {"num_beams"}
    of_calls = GenerateCall.__annotations__.keys() - SamplingKeywords.__annotations__.keys()
    assert of_calls == {field.name for field in fields(CallOptions)}


@pytest.mark.slow
def test_every_strategy_gives_the_same_tokens(bundle: Path) -> None:
    strategies = (*STRATEGIES, {"kv_update": "mirror"})
    one, *others = (_ids(list(edgekv.load(bundle, **kw).generate(PROMPT, 1000))) for kw in strategies)
    assert all(each == one for each in others)


def test_the_reserve_changes_no_bit(bundle: Path, text_tokens: list[int]) -> None:
    whole, less = (edgekv.load(bundle, threads=1, **kw) for kw in IN_ORDER)
    assert np.array_equal(whole.score(text_tokens), less.score(text_tokens))
    assert np.array_equal(_held(whole), _held(less))
    assert whole.cache.stats.copies == 0
    assert less.cache.stats.copies == 1


def test_nothing_is_copied_while_the_context_fills(bundle: Path) -> None:
    model = edgekv.load(bundle, kv_update="pointer-shift")
    generation = model.generate(PROMPT, 1000)
    tokens = list(generation)
    assert generation.stats.stop_reason == "context"
    assert generation.stats.cache.bytes_copied == 0
    assert len(generation.prompt) + len(tokens) == model.bundle.manifest.context + 1
    assert model.cache.length == model.bundle.manifest.context


@pytest.mark.slow
def test_a_sliding_window_goes_on_beyond_the_context(bundle: Path) -> None:
    streams = []
    for options in IN_ORDER:
        model = edgekv.load(endless(bundle), policy="sliding-window", threads=1, **options)
        context = model.bundle.manifest.context
        generation = model.generate(PROMPT, 2 * context, temperature=1.0, seed=7)
        streams.append(_ids(list(generation)))
        assert generation.stats.stop_reason == "length"
        assert model.cache.tokens_seen > context
        assert model.cache.length == context - 1
        assert model.cache.stats.copies > 0
    assert streams[0] == streams[1]


def test_a_long_prompt_slides_too(bundle: Path, text_tokens: list[int]) -> None:
    model = edgekv.load(bundle, policy="sliding-window", threads=1)
    assert len(list(model.generate(text_tokens * 2, 4))) == 4


@pytest.mark.parametrize("options", STRATEGIES)
def test_a_partly_filled_step_equals_single_steps(
    bundle: Path, text_tokens: list[int], options: dict[str, Any]
) -> None:
    model = edgekv.load(bundle, threads=1, **options)
    tokens = text_tokens[:50]  # 32 and 18, of which the 18 fill an AR-32 step in part
    encodings = model.bundle.manifest.encodings
    chunked = model.score(tokens)
    rows = _held(model).astype(int)
    model.cache.reset()
    single = [model.session.feed((token,)).astype(int) for token in tokens]
    # The order of floating-point sums differs; an integer on the edge may fall to its neighbour, and that spreads.
    assert np.abs(rows - _held(model)).max() <= 2
    assert np.abs(chunked - encodings["logits"].dequantize(np.stack(single))).mean() < 0.02
    assert (chunked.argmax(-1) == np.stack(single).argmax(-1)).mean() > 0.95


def test_a_few_tokens_are_scored_one_by_one(bundle: Path, text_tokens: list[int]) -> None:
    """The graph that scores computes all of its rows, so few tokens do not even load it."""
    model = edgekv.load(bundle, threads=1, cpu_mode="emulate")
    few = model.score(text_tokens[:4])
    assert [graph.record.role for graph in model.engine.graphs.loaded] == ["decode"]
    many = model.score(text_tokens[:5])
    assert [graph.record.role for graph in model.engine.graphs.loaded] == ["decode", "score"]
    assert np.abs(few - many[:4]).max() < 1e-2 * np.abs(many).max()


def test_prefill_and_score_give_the_same_logits(model: edgekv.Model, text_tokens: list[int]) -> None:
    scored = model.score(text_tokens[:50])[-1]
    model.cache.reset()
    last = model.session.feed(text_tokens[:50])
    assert np.array_equal(scored, model.bundle.manifest.encodings["logits"].dequantize(last))


def test_teacher_forcing_the_generated_tokens_would_generate_them(model: edgekv.Model) -> None:
    generation = model.generate(PROMPT, 20)
    tokens = _ids(list(generation))
    chosen = model.score([*generation.prompt, *tokens]).argmax(-1)[len(generation.prompt) - 1 : -1]
    assert (chosen == tokens).mean() >= 0.9


def test_text_is_the_decoding_of_the_tokens(model: edgekv.Model) -> None:
    tokens = list(model.generate(PROMPT, 30))
    assert "".join(token.text for token in tokens) == model.tokenizer.decode(_ids(tokens))


def test_a_generation_ends_at_its_length(model: edgekv.Model) -> None:
    generation = model.generate(PROMPT, 5)
    assert generation.stats.stop_reason is None
    assert len(list(generation)) == 5
    stats = generation.stats
    assert (stats.stop_reason, stats.generated_tokens, stats.times.steps) == ("length", 5, 5)


def test_a_generation_ends_before_a_stop_sequence(model: edgekv.Model) -> None:
    free = "".join(token.text for token in model.generate(PROMPT, 40))
    middle = free[len(free) // 2 :][:5]
    generation = model.generate(PROMPT, 40, stop=[middle])
    assert "".join(token.text for token in generation) == free[: free.index(middle)]
    assert generation.stats.stop_reason == "stop"


def test_a_generation_ends_at_the_end_of_sequence(model: edgekv.Model) -> None:
    free = list(model.generate(PROMPT, 40))
    ends = TokenRecord(bos=None, eos=[free[20].id], pad=None)
    bundle = Bundle(model.bundle.path, msgspec.structs.replace(model.bundle.manifest, tokens=ends))
    generation = edgekv.load(bundle, threads=1).generate(model.encode(PROMPT), 40)
    tokens = list(generation)
    assert generation.stats.stop_reason == "eos"
    assert _ids(tokens) == _ids(free[: len(tokens)])
    assert "".join(token.text for token in tokens) == model.tokenizer.decode(_ids(tokens)[:-1])


def test_sampling_is_reproduced_by_its_seed(model: edgekv.Model) -> None:
    first = model.generate(PROMPT, 20, temperature=1.0, top_k=50, top_p=0.9)
    tokens = _ids(list(first))
    again = model.generate(PROMPT, 20, temperature=1.0, top_k=50, top_p=0.9, seed=first.stats.seed)
    assert _ids(list(again)) == tokens


def test_a_prompt_longer_than_the_context_is_refused_before_anything_runs(model: edgekv.Model) -> None:
    context, steps = model.bundle.manifest.context, model.cache.stats.steps
    with pytest.raises(ContextFullError, match=rf"prompt: got {context + 1} tokens; expected at most {context}"):
        model.generate([5] * (context + 1))
    assert model.cache.stats.steps == steps


def test_a_prompt_of_many_megabytes_is_refused_before_it_is_tokenized(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for policy, most in (("fail", "65,536"), ("sliding-window", "4,194,304")):
        model = edgekv.load(bundle, policy=policy, verify=False)
        monkeypatch.setattr(Texts, "encode", None)
        with pytest.raises(ContextFullError, match=f"prompt: got 104,857,600 characters; expected at most {most}"):
            model.generate("x" * (100 << 20))


def test_a_prompt_as_long_as_the_context_gives_one_token(model: edgekv.Model, text_tokens: list[int]) -> None:
    generation = model.generate(text_tokens, 5)
    assert len(list(generation)) == 1
    assert generation.stats.stop_reason == "context"


def test_a_later_generation_ends_an_earlier_one(model: edgekv.Model) -> None:
    earlier = model.generate(PROMPT, 5)
    next(earlier)
    later = model.generate(PROMPT, 5)
    with pytest.raises(ValueError, match="used by a later call"):
        next(earlier)
    assert len(list(later)) == 5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"engine": "gpu"}, "engine: got 'gpu'; expected cpu or htp"),
        ({"kv_update": "copy"}, "update strategy: got 'copy'"),
        ({"reserve": 3}, "reserve: got 3"),
        ({"reserve": 1.5, "kv_update": "slot"}, "reserve: got 1.5 with slot"),
        ({"policy": "forget"}, "context policy: got 'forget'"),
        ({"threads": 0}, "threads: got 0"),
        ({"threads": 2, "engine": "htp"}, "threads: got 2"),
    ],
)
def test_options_that_cannot_be_are_refused(bundle: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        edgekv.load(bundle, verify=False, **options)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"prompt": []}, "prompt: got no tokens"),
        ({"prompt": [4096]}, "prompt: got id 4096; expected 0 to 4095"),
        ({"prompt": [-1]}, "prompt: got id -1"),
        ({"prompt": [2**32]}, "prompt: got id 4294967296; expected 0 to 4095"),
        ({"prompt": [10**5000]}, "prompt: got an id of 16610 bits; expected 0 to 4095"),
        ({"prompt": [1.5]}, "prompt: got 'float' object cannot be interpreted as an integer"),
        ({"prompt": "\udcff"}, "prompt: got .*surrogates not allowed"),
    ],
)
def test_prompts_that_cannot_be_are_refused(model: edgekv.Model, call: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        model.generate(**call)


def test_each_step_gives_its_logits_if_they_are_wanted(model: edgekv.Model) -> None:
    generation = model.generate(PROMPT, 6, return_logits=True, logit_bias={5: 1.0})
    tokens = list(generation)
    scored = model.score([*generation.prompt, *_ids(tokens)])[len(generation.prompt) - 1 : -1]
    for token, row in zip(tokens, scored, strict=True):
        assert token.logits is not None and token.logits.dtype == np.float32
        assert np.abs(token.logits - row).mean() < 0.02
    assert next(model.generate(PROMPT, 1)).logits is None


def test_processors_change_what_is_chosen(model: edgekv.Model) -> None:
    free = _ids(list(model.generate(PROMPT, 12)))
    forbidden = {token: float("-inf") for token in free}
    assert not set(_ids(list(model.generate(PROMPT, 12, logit_bias=forbidden)))) & set(free)

    def forbid(prompt: Sequence[int], generated: Sequence[int], logits: Any) -> Any:
        logits[list(generated)] = -np.inf
        return logits

    tokens = _ids(list(model.generate(PROMPT, 12, processors=[forbid])))
    assert len(set(tokens)) == 12
    with pytest.raises(UsageError, match="logit_bias: got id 4096; expected 0 to 4095"):
        model.generate(PROMPT, 12, logit_bias={4096: 1.0})


def test_parameters_are_one_argument(model: edgekv.Model) -> None:
    params = edgekv.SamplingParams(0.8, top_k=30, seed=11, repetition_penalty=1.2, max_new_tokens=9)
    one = model.generate(PROMPT, params)
    other = model.generate(PROMPT, 9, temperature=0.8, top_k=30, seed=11, repetition_penalty=1.2)
    tokens = _ids(list(other))
    assert _ids(list(model.generate(PROMPT, params))) == tokens
    assert one.stats.sampling == other.stats.sampling == params


def test_a_text_that_is_resumed_continues_as_it_would_have(model: edgekv.Model) -> None:
    """Random numbers depend on seed and position; on this engine logits may differ in the order of a sum."""
    params = edgekv.SamplingParams(1.0, top_k=5, seed=5, max_new_tokens=12)
    whole = model.generate(PROMPT, params)
    tokens = _ids(list(whole))
    resumed = _ids(list(model.generate([*whole.prompt, *tokens[:6]], params)))
    assert resumed[:6] == tokens[6:]


def test_ignore_eos_continues_past_the_end(model: edgekv.Model) -> None:
    free = _ids(list(model.generate(PROMPT, 12)))
    ends = TokenRecord(bos=None, eos=[free[3]], pad=None)
    bundle = Bundle(model.bundle.path, msgspec.structs.replace(model.bundle.manifest, tokens=ends))
    ended = edgekv.load(bundle, threads=1)
    prompt = model.encode(PROMPT)
    assert len(list(ended.generate(prompt, 12))) <= 4
    assert _ids(list(ended.generate(prompt, 12, ignore_eos=True))) == free


def test_the_figures_tell_speed(model: edgekv.Model) -> None:
    generation = model.generate(PROMPT, 4)
    assert (generation.stats.times.first_token_ms, generation.stats.times.tokens_per_second) == (None, None)
    list(generation)
    stats = generation.stats
    assert stats.times.first_token_ms >= stats.times.prefill_ms > 0
    assert stats.times.tokens_per_second == pytest.approx(1000 / stats.times.decode_ms_per_token)


@pytest.mark.parametrize("end", ["break", "close", "with", "error"])
def test_a_generation_that_is_broken_off_leaves_its_prefix(bundle: Path, tmp_path: Path, end: str) -> None:
    model = edgekv.load(bundle, threads=1, verify=False, prefix_cache=tmp_path)
    if end == "break":
        for _ in model.generate(PROMPT, 30):
            break
    elif end == "close":
        generation = model.generate(PROMPT, 30)
        next(generation)
        generation.close()
    else:
        with pytest.raises(KeyboardInterrupt), model.generate(PROMPT, 30) as generation:
            next(generation)
            raise KeyboardInterrupt
    later = edgekv.load(bundle, threads=1, verify=False, prefix_cache=tmp_path).generate(PROMPT, 1)
    list(later)
    assert later.stats.cache.restored_tokens == len(later.prompt) - 1


def test_a_step_that_is_interrupted_leaves_a_cache_that_can_be_used(
    bundle: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while some groups of layers have taken a step's rows, and others have not."""
    model = edgekv.load(bundle, threads=1, verify=False, prefix_cache=StoreConfig(max_bytes=1 << 24))
    wanted = _ids(list(model.generate(PROMPT, 8, cache_salt="wanted")))
    generation = model.generate(PROMPT, 8, cache_salt="broken", sequence=1)
    tokens = [next(generation).id for _ in range(3)]
    (group,) = model.cache.groups

    def interrupted(*_: int) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(group), "commit", interrupted)
        next(generation)
    assert tokens == wanted[:3] and list(generation) == []
    for sequence in (1, None):
        assert _ids(list(model.generate(PROMPT, 8, cache_salt="broken", sequence=sequence))) == wanted


def test_an_interruption_right_after_a_step_keeps_it(
    bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache has committed the rows of a step whose tokens the session does not have yet."""
    model = edgekv.load(bundle, threads=1, verify=False, prefix_cache=tmp_path)
    commit, steps = KVCache.commit, []

    def interrupted(cache: KVCache, *arguments: Any) -> None:
        commit(cache, *arguments)
        steps.append(arguments)
        if len(steps) == 4:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(KVCache, "commit", interrupted)
        list(model.generate(PROMPT, 8))
    assert len(model.session.tokens) == model.cache.tokens_seen
    later = edgekv.load(bundle, threads=1, verify=False, prefix_cache=tmp_path).generate(PROMPT, 1)
    list(later)
    assert later.stats.cache.restored_tokens == len(later.prompt) - 1


def test_importing_names_from_the_package_is_enough() -> None:
    assert edgekv.__version__ == metadata.version("edgekv")
    assert set(edgekv.__all__) <= set(dir(edgekv))
    for name in edgekv.__all__:
        assert getattr(edgekv, name) is not None
    assert all(word in pydoc.render_doc(edgekv) for word in ("edgekv.load(", "SamplingParams", "EdgeKVError"))


def test_a_prefill_in_slices_is_a_prefill_at_once(model: edgekv.Model):
    """Another call has its steps in between, and the rows are those of one piece, bit by bit."""
    prompt = model.encode(PROMPT * 20)[:97]
    whole = model.generate(prompt, max_new_tokens=4, sequence=1)
    expected, rows = _ids(list(whole)), _held(model).copy()
    engine, params = model.engine, SamplingParams(max_new_tokens=4)
    sliced = engine.add(Request(tuple(prompt), params, cache=2))
    other = engine.add(Request(tuple(model.encode(PROMPT)), SamplingParams(max_new_tokens=3), cache=3))
    steps = [engine.step() for _ in range(2)]
    assert [[sequence for sequence, _ in events] for events in steps] == [[other], [other]]
    found = [event for _ in range(5) for sequence, event in engine.step() if sequence is sliced]
    session = model.sequences.get(2)
    assert session is not None and _ids(found) == expected
    assert (session.cache.arena.array[:, session.cache.held_rows()] == rows).all()
    assert sliced.use.computed_tokens == whole.stats.cache.computed_tokens
    model.sequences.clear()
