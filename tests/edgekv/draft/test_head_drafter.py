"""Qwen3.5's own head for further tokens as a drafter: its layer, its cache, and texts that it may not change."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.cli import run
from edgekv.draft import Speculation
from edgekv.engine.speculation import ModelDrafter
from edgekv.engine.target_drafters import HeadDraftModel
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.graphs.cpu_mode import CPU_MODES
from edgekv.graphs.decoder import decoder_layer, drafter_input, last_norm, logits
from edgekv.kv import STRATEGIES
from edgekv.prefix import StoreConfig
from edgekv.spec import TARGET_HIDDEN
from exporters.capabilities import AI_HUB, GENAI, GENIE, GENIEX
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.tensors import Tensors
from exporters.drafter import Drafter
from exporters.export import export_drafter
from exporters.htp.check import floating_nodes
from exporters.quantize.effort import Effort
from exporters.quantize.recipe import Recipe, find_recipe
from exporters.quantize.reference import Floats, NumpyOps, Reference, Weights
from tests.support.checkpoints import ARCHITECTURES, add_head, write_checkpoint
from tests.support.exports import export_options, exported, kept
from tests.support.thorough import calls, variants

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "heads.npz")
CONTEXT = 160
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon. " * 8
PROMPT = [*range(40, 75)]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)
PLAIN = msgspec.structs.replace(find_recipe("w8a16"), rotation="none")


class Ops(NumpyOps):
    """Keeps the hidden states that a head gives."""

    given: Floats

    def give_hidden(self, x: Floats) -> None:
        self.given = x


def float_head(head: Tensors, read: NDArray[np.int64], hidden: Floats) -> tuple[Floats, Floats]:
    """Logits `[T, V]` and hidden states `[T, H]` of rows from position 0 on, in float."""
    spec = head.spec
    ops = Ops(spec, Weights(head), len(read), CONTEXT)
    ops.begin(0, read)
    ops.read_target(hidden, {})
    x = drafter_input(ops, spec, ops.embed(read, "embedding"))
    for layer in spec.own_layers:
        x = decoder_layer(ops, spec, layer, x)
    return logits(ops, spec, x), ops.given


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("head")
    (folder / "text").write_text(TEXT)
    return add_head(write_checkpoint(folder / "model", ARCHITECTURES["qwen3_5"], gain=1.0))


def target_bundle(checkpoint: Path, recipe: str | Recipe = "w8a16", **options: Any) -> Path:
    chosen = {"context": (64, CONTEXT), "ar": (1, 16), "draft_rows": (8,), "give_hidden": True, **options}
    return exported(checkpoint, export_options(recipe, calibration=checkpoint.parent / "text", **chosen))


def head_bundle(checkpoint: Path, target: Path, recipe: str = "w8a16", **options: Any) -> Path:
    chosen = export_options(recipe, **{"calibration_tokens": 512, "calibration": checkpoint.parent / "text"} | options)

    def make(folder: Path) -> None:
        export_drafter(Drafter.open(str(checkpoint), open_bundle(target)), folder / "bundle", chosen)

    files = [sha256(file.read_bytes()).hexdigest() for file in sorted(checkpoint.iterdir())]
    return kept("head", ("exporters.export",), make, str(target), files, recipe, options) / "bundle"


@pytest.fixture(scope="module")
def target(checkpoint: Path) -> Path:
    return target_bundle(checkpoint)


@pytest.fixture(scope="module")
def head(checkpoint: Path, target: Path) -> Path:
    return head_bundle(checkpoint, target)


def drafted(model: edgekv.Model, head: Any, prompt: Sequence[int], params: SamplingParams = PARAMS, **more: Any) -> Any:
    """A generation with its drafts, once it has ended, and its tokens."""
    generation = model.generate(prompt, params, speculate=Speculation("draft", draft=head), **more)
    return generation, [token.id for token in generation]


def test_effort_lets_the_target_write_text_for_its_head(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    effort = Effort(3, descent_bits=8, weighs_attention=True, written_tokens=400)
    options = export_options(calibration_tokens=512, calibration=checkpoint.parent / "text", effort=effort)
    found = export_drafter(Drafter.open(str(checkpoint), open_bundle(target)), tmp_path / "head", options)
    assert found.source.calibration_tokens > 512 + 350
    with edgekv.load(target) as model, edgekv.load_drafter(tmp_path / "head") as loaded:
        plain = [token.id for token in model.generate(PROMPT, PARAMS)]
        assert drafted(model, loaded, PROMPT)[1] == plain


def test_a_draft_is_that_of_transformers_layers(tmp_path: Path) -> None:
    """Logits and hidden states of three steps, each of which reads what the one before it gave."""
    folder = add_head(write_checkpoint(tmp_path, ARCHITECTURES["qwen3_5"], gain=1.0))
    model = Checkpoint.open(str(folder))
    assert model.predicts_further
    head, tokens = Checkpoint.open_drafter(str(folder), model), GOLDEN["tokens"]
    (state,) = Reference(model, CONTEXT).states([tokens[:-1]])
    hidden, read = last_norm(NumpyOps(model.spec, Weights(model), len(state), CONTEXT), model.spec, state), tokens[1:]
    for wanted, given in zip(GOLDEN["logits"], GOLDEN["hidden"], strict=True):
        rows, states = float_head(head, read, hidden)
        assert np.abs(rows[-1] - wanted).max() < 1e-4 * np.ptp(wanted)
        assert np.abs(states[-1] - given).max() < 1e-4 * np.ptp(given)
        read, hidden = np.append(read, rows[-1].argmax()), np.concatenate([hidden, states[-1:]])


def sqnr_db(exact: Floats, found: Floats) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum()))


def steps_of(model: edgekv.Model, loaded: HeadDraftModel, text: Sequence[int], k: int) -> tuple[Any, ...]:
    """The tokens and hidden states of all rows of a draft behind a text, and the logits of each of its steps."""
    model.session.reset()
    model.session.feed(text[:-1])
    read, states, found, encodings = [], [], [], loaded.bundle.manifest.encodings

    class Watched(HeadDraftModel):
        def run(self, rows: Any, tokens: Any, hidden: Any, encoding: Any) -> Any:
            graph = super().run(rows, tokens, hidden, encoding)
            wanted = encodings[TARGET_HIDDEN]
            read.extend(tokens)
            states.append(wanted.dequantize(wanted.quantize(encoding.dequantize(hidden))))
            found.append(encodings["logits"].dequantize(graph.logits[-1]))
            return graph

    watched = Watched(loaded.bundle, loaded._engine, loaded._make_cache)
    drafter = ModelDrafter(watched.propose, model.bundle.manifest.model.vocab)
    drafter.session = model.session
    proposed = drafter.propose(text, k)
    assert read == [*text[1:], *proposed[:-1]] and len(proposed) == k
    assert proposed == [row.argmax() for row in found]
    return np.array(read), np.concatenate(states), found


RECIPES = {
    "rotated": find_recipe("w8a16"),
    "sorted": find_recipe("w8a16").for_blocks(),
    "plain": PLAIN,
    "4 bits": find_recipe("w4a16"),
}


@pytest.mark.parametrize("form", variants(RECIPES, ["rotated", "sorted"]))
@pytest.mark.parametrize("mode", variants(CPU_MODES, ["fast"]))
def test_a_step_gives_the_logits_of_the_float_head(checkpoint: Path, form: str, mode: str) -> None:
    """Of the same tokens and hidden states, whatever form the target's graphs give those in."""
    target = target_bundle(checkpoint, RECIPES[form])
    exact = Drafter.open(str(checkpoint), open_bundle(target)).checkpoint
    head = head_bundle(checkpoint, target)
    with edgekv.load(target, cpu_mode=mode) as model, edgekv.load_drafter(head, cpu_mode=mode) as loaded:
        for length in (9, 33, 120):
            text = np.random.default_rng(length).integers(3, 250, length).tolist()
            read, states, found = steps_of(model, loaded, text, 4)
            wanted, _ = float_head(exact, read, states)
            for step, row in enumerate(found, length - 2):
                assert sqnr_db(wanted[step], row) > 28, (length, step)


def test_hidden_states_for_drafters_count_as_memory_of_a_sequence(target: Path, head: Path) -> None:
    with edgekv.load(target) as model, edgekv.load_drafter(head) as loaded:
        with pytest.raises(UsageError, match=r"draft: got the path '.*'; expected what it leads to\. Load it"):
            model.generate(PROMPT, PARAMS, speculate=Speculation("draft", draft=head))  # type: ignore[arg-type]
        session = model.sequences.get_or_create(1)
        cache_bytes = session.cache.bytes_held
        assert model.sequences.memory_bytes == cache_bytes
        drafted(model, loaded, PROMPT, sequence=1)
        states = session.hidden.stop - session.hidden.first
        assert states > 0
        width = model.bundle.manifest.model.hidden
        held = model.sequences.memory_bytes - session.cache.bytes_held
        assert held >= 2 * states * width  # 16 bits each


@pytest.mark.parametrize("strategy", variants(STRATEGIES, ["slot"]))
def test_drafts_change_no_token(target: Path, head: Path, strategy: str) -> None:
    with edgekv.load(target, kv_update=strategy) as model, edgekv.load_drafter(head) as loaded:
        for params in (PARAMS, replace(PARAMS, temperature=1.0, seed=3)):
            plain = [token.id for token in model.generate(PROMPT, params)]
            generation, found = drafted(model, loaded, PROMPT, params)
            assert found == plain
            assert generation.stats.speculation.drafters["draft"].proposed > 20


FORMS: dict[str, dict[str, Any]] = {
    "columns": {"key_layout": "columns"},
    "s16": {"kv_dtype": "s16"},
    "parts": {"splits": 2},
}


@pytest.mark.parametrize("form", variants(FORMS, ["columns"]))
def test_every_form_of_targets_can_be_drafted_for(checkpoint: Path, form: str) -> None:
    """A separate head reads one row of a prompt; the part before it gives the hidden states of all."""
    target = target_bundle(checkpoint, **FORMS[form])
    with edgekv.load(target) as model, edgekv.load_drafter(head_bundle(checkpoint, target)) as loaded:
        generation, found = drafted(model, loaded, PROMPT)
        assert generation.stats.speculation.drafters["draft"].proposed > 0
        assert found == [token.id for token in model.generate(PROMPT, PARAMS)]
        model.session.reset()
        model.session.feed(PROMPT)
        assert (model.session.hidden.first, model.session.hidden.stop) == (0, len(PROMPT))


def test_a_copying_head_is_believed(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    """A head without weights drafts token 0; a target that is biased to it accepts all of them."""

    def clear(tensors: dict[str, Any]) -> None:
        for name in ("fc", "layers.0.self_attn.o_proj", "layers.0.mlp.down_proj"):
            tensors[f"mtp.{name}.weight"][:] = 0

    head, params = tmp_path / "bundle", replace(PARAMS, logit_bias={0: 100.0})
    options = export_options(calibration_tokens=256, calibration=checkpoint.parent / "text")
    drafter = Drafter.open(str(changed(checkpoint, tmp_path / "head", clear)), open_bundle(target))
    export_drafter(drafter, head, options)
    with edgekv.load(target) as model, edgekv.load_drafter(head) as loaded:
        generation, found = drafted(model, loaded, PROMPT, params)
        stats = generation.stats.speculation
        assert found == [0] * PARAMS.max_new_tokens and stats.accepted == stats.proposed > 15
        assert stats.tokens_per_pass > 5


def test_texts_that_share_rewind_and_continue_change_no_token(target: Path, head: Path) -> None:
    """With prefixes, whose hidden states are not stored: the head's cache begins behind them."""
    random, texts = np.random.default_rng(0), [PROMPT]
    params, config = replace(PARAMS, max_new_tokens=8), StoreConfig(tokens_per_block=16, max_bytes=1 << 22)
    restored = proposed = 0
    with (
        edgekv.load(target, prefix_cache=config, reproducible=True) as model,
        edgekv.load_drafter(head) as loaded,
    ):
        for call in range(calls(20)):
            text = list(texts[random.integers(len(texts))])
            text = text[: int(random.integers(1, len(text) + 1))]
            text = (text + random.integers(3, 250, random.integers(0, 40)).tolist())[: CONTEXT - 20]
            each = replace(params, temperature=1.0, seed=call) if call % 3 == 2 else params
            wanted = [token.id for token in model.generate(text, each, sequence=9)]
            generation, found = drafted(model, loaded, text, each, sequence=int(random.integers(3)) or None)
            assert found == wanted, call
            restored += generation.stats.cache.restored_tokens
            proposed += generation.stats.speculation.proposed
            texts = [*texts[-4:], text + wanted]
    assert restored > 100 and proposed > 200


def test_the_cache_of_a_head_follows_its_text(target: Path, head: Path) -> None:
    """Rows after rewinds, or behind a prefix, are those that a new cache gets."""
    text, emulated = np.random.default_rng(1).integers(3, 250, 60).tolist(), dict[str, Any](cpu_mode="emulate")
    with edgekv.load(target, **emulated) as model, edgekv.load_drafter(head, **emulated) as loaded:
        drafter, session = ModelDrafter(loaded.propose, 320), model.session
        drafter.session = session
        assert not drafter.propose(text, 4)
        for stop, other in ((20, [5, 6, 7]), (41, [8]), (59, [])):
            session.feed(text[len(session.tokens) : stop])
            drafter.propose(text[: stop + 1], 3)
            if other:
                session.feed(other)
                drafter.propose([*session.tokens, 9], 2)
                session.reuse(text[: stop + 1])
        found, rows = drafter.propose(text, 4), loaded.rows(session)
        assert (len(found), rows.start, rows.text) == (4, 0, text)
        loaded.close()
        assert drafter.propose(text, 4) == found
        loaded.close()
        session.reset()
        session.feed(text[:30])
        session.adopt(text[:30])  # as of a prefix
        session.feed(text[30:-1])
        assert len(drafter.propose(text, 4)) == 4 and loaded.rows(session).start == 30
        session.adopt(text[:-1])
        assert not drafter.propose(text, 4)


def test_commands_draft_with_it(
    checkpoint: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "head"
    command = ["export", str(checkpoint), "-o", str(out), "--device", "SM8650", "--skip-htp-check"]
    assert run([*command, "--draft-for", str(target), "--calibration-tokens", "256"]) == 0
    said = capsys.readouterr().out
    assert "a drafter of 1 layer," in said and "the last hidden state of every token of" in said
    assert run(["info", str(out)]) == 0
    assert "hidden states of all tokens" in capsys.readouterr().out
    command = ["generate", str(target), "--prompt", "Hello there", "--max-new-tokens", "12", "--temperature", "0"]
    assert run([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*command, "--json", "--speculate", "draft", "--draft", str(out)]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain["text"]


def test_another_target_is_refused_by_name(checkpoint: Path, target: Path, head: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text(TEXT)
    other = write_checkpoint(tmp_path / "other", ARCHITECTURES["qwen3_5"], gain=1.0, seed=1)
    others = {
        "give their last hidden state": target_bundle(checkpoint, give_hidden=False),
        "got contexts 64, 160; expected contexts 64,": target_bundle(checkpoint, context=64),
        "made for weights": target_bundle(other),
        "made for a rotation hadamard": target_bundle(checkpoint, PLAIN),
    }
    with edgekv.load_drafter(head) as loaded:
        for words, folder in others.items():
            with edgekv.load(folder, verify=False) as model, pytest.raises(UsageError) as refusal:
                model.generate(PROMPT, PARAMS, speculate=Speculation("draft", draft=loaded))
            assert words in str(refusal.value) and "drafter " in str(refusal.value)
    for capabilities in (GENIE, GENIEX, GENAI, AI_HUB):
        with pytest.raises(BundleError, match="drafter: got graphs that read"):
            capabilities.check(open_bundle(head))


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    shutil.copytree(checkpoint, folder)
    tensors = dict(load_file(folder / "mtp.safetensors"))
    change(tensors)
    save_file(tensors, folder / "mtp.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    names = {name: file for name, file in index["weight_map"].items() if file != "mtp.safetensors"}
    names |= dict.fromkeys(tensors, "mtp.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps(index | {"weight_map": names}))
    return folder


def test_broken_heads_are_refused_by_name(checkpoint: Path, target: Path, tmp_path: Path) -> None:
    bundle, wide = open_bundle(target), np.zeros((64, 64), ml_dtypes.bfloat16)
    for number, (change, words) in enumerate(
        [
            (lambda found: found.clear(), "mtp.*: got no such tensor"),
            (lambda found: found.pop("mtp.fc.weight"), "fc.weight: got no such tensor"),
            (lambda found: found.update({"mtp.fc.weight": wide}), "[64, 128]"),
            (lambda found: found.pop("mtp.layers.0.self_attn.q_proj.weight"), "layers.0.self_attn.q_proj.weight"),
            (lambda found: found.update({"mtp.layers.1.mlp.up_proj.weight": wide}), "layers.1.mlp.up_proj.weight"),
        ]
    ):
        with pytest.raises(CheckpointError) as refusal:
            Drafter.open(str(changed(checkpoint, tmp_path / str(number), change)), bundle)
        assert words in str(refusal.value)
    other = add_head(write_checkpoint(tmp_path / "other", ARCHITECTURES["qwen3_5"], gain=1.0, seed=1))
    with pytest.raises(CheckpointError, match="got other embeddings; expected the target's"):
        Drafter.open(str(other), bundle)
    for field, value in (("mtp_num_hidden_layers", 2), ("mtp_use_dedicated_embeddings", True), ("hidden_size", 128)):
        folder = shutil.copytree(checkpoint, tmp_path / field)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {field: value}))
        with pytest.raises(CheckpointError, match=field):
            Drafter.open(str(folder), bundle)
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with pytest.raises(CheckpointError, match="GGUF"):
        Drafter.open(str(tmp_path / "model.gguf"), bundle)


@pytest.mark.htp
def test_a_head_is_integers_alone_on_the_htp(head: Path) -> None:
    graphs = open_bundle(head).manifest.graphs
    assert {graph.ar for graph in graphs} == {1, 16}
    assert floating_nodes([head / graph.file for graph in graphs], find("SM8650")) == []
