"""Drafters that read the cache and the last hidden state of their target: Gemma 4's."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any
from weakref import ref

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv import SamplingParams
from edgekv.bundle import Manifest, open_bundle, read_manifest, write_manifest
from edgekv.cli import run
from edgekv.draft import Speculation
from edgekv.engine.speculation import ModelDrafter
from edgekv.engine.target_drafters import CacheDraftModel
from edgekv.errors import BundleError, CheckpointError, EdgeKVError, UsageError
from edgekv.graphs.cpu_mode import CPU_MODES
from edgekv.graphs.decoder import decoder_layer, drafter_input, last_norm, logits
from edgekv.kv import STRATEGIES, KvTensor
from edgekv.spec import TARGET_HIDDEN, DecoderInterface
from exporters.capabilities import AI_HUB, GENAI, GENIE, GENIEX
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed
from exporters.checkpoint.tensors import Tensors
from exporters.drafter import Drafter
from exporters.export import RunOptions, export_drafter
from exporters.htp.check import floating_nodes
from exporters.options import Cluster
from exporters.pipeline.inputs import TOKENS, DecoderKey, Inputs
from exporters.pipeline.place import Identity, Place
from exporters.pipeline.store import RECORD, PieceRecord, PieceStore
from exporters.quantize.effort import DEFAULT_EFFORT, Effort
from exporters.quantize.reference import Floats, NumpyOps, Reference, Weights
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint, write_drafter
from tests.support.exports import export_options, exported, kept
from tests.support.processes import contents
from tests.support.thorough import variants

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "drafters.npz")
CONTEXT = 96
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon. " * 8
PROMPT = [*range(40, 60)]
PARAMS = SamplingParams(max_new_tokens=24, ignore_eos=True)


class Ops(NumpyOps):
    """Keeps the hidden state that a drafter gives."""

    given: Floats

    def give_hidden(self, x: Floats) -> None:
        self.given = x


def float_draft(target: Checkpoint, drafter: Checkpoint, tokens: Sequence[int], steps: int) -> tuple[Floats, Floats]:
    """Logits `[steps, V]` and hidden states `[steps, H]` of a draft behind all tokens but the last, in float."""
    spec, rows, past = drafter.spec, dict[KvTensor, Floats](), np.array(tokens[:-1])
    owners = {spec.cache_layer(layer) for layer in spec.own_layers}
    names = {each.past: each for each in DecoderInterface.of(target.spec, 256, "u8", "rows", "u16").tensors(owners)}

    def observe(name: str, value: Floats) -> None:
        if name in names:
            rows[names[name]] = value

    (state,) = Reference(target, 256).states([past], observe=observe)
    hidden = last_norm(NumpyOps(target.spec, Weights(target), len(past), 256), target.spec, state)
    read, found, states = np.array(tokens[1:]), [], []
    for _ in range(steps):
        row, given = float_step(drafter, read, hidden, rows)
        found.append(row)
        states.append(given)
        read, hidden = np.append(read[:-1], row.argmax()), np.concatenate([hidden[:-1], given[None]])
    return np.array(found), np.array(states)


def float_step(
    drafter: Tensors, read: NDArray[np.int64], hidden: Floats, rows: Mapping[KvTensor, Floats]
) -> tuple[Floats, Floats]:
    """The last row's logits `[V]` and hidden state `[H]`."""
    spec = drafter.spec
    ops = Ops(spec, Weights(drafter), len(read), 256)
    ops.begin(0, read)
    ops.read_target(hidden, rows)
    x = drafter_input(ops, spec, ops.embed(read, "embedding"))
    for layer in spec.own_layers:
        x = decoder_layer(ops, spec, layer, x)
    return logits(ops, spec, x)[-1], ops.given[-1]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target whose windows lie beyond the context, as drafts on the CPU want it, and its drafter."""
    folder = tmp_path_factory.mktemp("gemma4")
    (folder / "text").write_text(TEXT)
    target = write_checkpoint(folder / "target", {**ARCHITECTURES["gemma4"], "sliding_window": 512}, gain=1.0)
    return target, write_drafter(folder / "drafter", target, sliding_window=512)


def target_bundle(checkpoint: Path, **options: Any) -> Path:
    chosen = {"context": CONTEXT, "ar": (1, 16), "draft_rows": (8,), "give_hidden": True, **options}
    return exported(checkpoint, export_options(calibration=checkpoint.parent / "text", **chosen))


def drafter_bundle(checkpoint: Path, target: Path, **options: Any) -> Path:
    chosen = export_options(calibration_tokens=512, calibration=checkpoint.parent / "text", **options)

    def make(folder: Path) -> None:
        export_drafter(Drafter.open(str(checkpoint), open_bundle(target)), folder / "bundle", chosen)

    files = [sha256((checkpoint / name).read_bytes()).hexdigest() for name in ("config.json", "model.safetensors")]
    return kept("drafter", ("exporters.export",), make, str(target), files, options) / "bundle"


@pytest.fixture(scope="module")
def target(checkpoints: tuple[Path, Path]) -> Path:
    return target_bundle(checkpoints[0])


@pytest.fixture(scope="module")
def drafter(checkpoints: tuple[Path, Path], target: Path) -> Path:
    return drafter_bundle(checkpoints[1], target)


def drafted(model: edgekv.Model, drafter: Any, prompt: Sequence[int], params: SamplingParams = PARAMS) -> Any:
    """A generation with its drafts, once it has ended, and its tokens."""
    generation = model.generate(prompt, params, speculate=Speculation("draft", draft=drafter))
    return generation, [token.id for token in generation]


def test_a_draft_is_that_of_transformers(tmp_path: Path) -> None:
    """Logits and hidden states of three steps, each of which reads what the one before it gave."""
    folder = write_checkpoint(tmp_path / "target", ARCHITECTURES["gemma4"], gain=1.0)
    target = Checkpoint.open(str(folder))
    drafter = Checkpoint.open_drafter(str(write_drafter(tmp_path / "drafter", folder)), target)
    found = float_draft(target, drafter, GOLDEN["tokens"], len(GOLDEN["logits"]))
    for values, name in zip(found, ("logits", "hidden"), strict=True):
        assert np.abs(values - GOLDEN[name]).max() < 1e-4 * np.ptp(GOLDEN[name])


@dataclass(frozen=True)
class Step:
    """What a step of a draft reads, and the logits that it gives."""

    token: int
    hidden: Floats
    logits: Floats


def steps_of(model: edgekv.Model, drafter: CacheDraftModel, text: Sequence[int], count: int) -> list[Step]:
    """The steps of a draft behind a text, all of which but the last token the model runs."""
    model.session.reset()
    model.session.feed(text[:-1])
    graph, encodings, found = drafter.graph(model.cache), drafter.bundle.manifest.encodings, list[Step]()
    run = graph.run

    def kept(tokens: Sequence[int], *arguments: Any, **rows: Any) -> None:
        hidden = encodings[TARGET_HIDDEN].dequantize(graph.target_hidden[0])
        run(tokens, *arguments, **rows)
        found.append(Step(tokens[0], hidden, encodings["logits"].dequantize(graph.logits[-1])))

    graph.run = kept  # type: ignore[method-assign]
    proposes = ModelDrafter(drafter.propose, model.bundle.manifest.model.vocab)
    proposes.session = model.session
    proposed = proposes.propose(text, count)
    graph.run = run  # type: ignore[method-assign]
    assert [step.token for step in found] == [text[-1], *proposed[:-1]]
    assert proposed == [step.logits.argmax() for step in found]
    return found


def sqnr_db(exact: Floats, found: Floats) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum()))


@pytest.mark.parametrize("mode", variants(CPU_MODES, ["fast"]))
def test_a_step_gives_the_logits_of_the_float_drafter(
    checkpoints: tuple[Path, Path], target: Path, drafter: Path, mode: str
) -> None:
    """Of the same token and hidden state: a whole draft of a random model is chaotic. Single steps may lose more."""
    exact = Drafter.open(str(checkpoints[1]), open_bundle(target))
    folded = transformed(exact.checkpoint, exact.transforms(exact.target.manifest.recipe), exact.heads)
    found_db = []
    with edgekv.load(target, cpu_mode=mode) as model, edgekv.load_drafter(drafter, cpu_mode=mode) as loaded:
        for length in (9, 33, 80):
            text = np.random.default_rng(length).integers(3, 250, length).tolist()
            read = exact.text(np.array([text]))
            for step in steps_of(model, loaded, text, 5):
                tokens, hidden = [*text[1:-1], step.token], np.concatenate([read.hidden[0, :-1], step.hidden[None]])
                rows = {tensor: rows[0] for tensor, rows in read.rows.items()}
                (wanted, _) = float_step(folded, np.array(tokens), hidden, rows)
                found_db.append(sqnr_db(wanted, step.logits))
    assert min(found_db) > 14 and np.median(found_db) > 21, found_db


@pytest.mark.parametrize("strategy", variants(STRATEGIES, ["slot"]))
def test_drafts_change_no_token(target: Path, drafter: Path, strategy: str) -> None:
    options: dict[str, Any] = {"kv_update": strategy}
    with edgekv.load(target, **options) as model, edgekv.load_drafter(drafter) as loaded:
        for params in (PARAMS, replace(PARAMS, temperature=1.0, seed=3)):
            plain = [token.id for token in model.generate(PROMPT, params)]
            generation, found = drafted(model, loaded, PROMPT, params)
            assert found == plain
            assert generation.stats.speculation.drafters["draft"].proposed > 20


def test_texts_take_turns(target: Path, drafter: Path) -> None:
    """Each draft begins with the state of its own text."""
    prompts = [[*range(first, first + 12)] for first in (40, 60, 80)]
    speculation = {"speculate": Speculation("draft", draft=edgekv.load_drafter(drafter))}
    with edgekv.load(target) as model:
        plain = [[token.id for token in model.generate(prompt, PARAMS)] for prompt in prompts]
        running = [model.generate(each, PARAMS, sequence=n, **speculation) for n, each in enumerate(prompts)]
        found: list[list[int]] = [[] for _ in prompts]
        for _ in range(PARAMS.max_new_tokens):
            for tokens, generation in zip(found, running, strict=True):
                tokens.append(next(generation).id)
        assert found == plain
        counts = {each.stats.speculation.drafters["draft"].proposed for each in running}
        assert min(counts) > 20


def test_each_draft_reads_the_cache_of_its_own_text(target: Path, drafter: Path) -> None:
    with edgekv.load(target) as model, edgekv.load_drafter(drafter) as both:
        vocab, sessions = model.bundle.manifest.model.vocab, []
        for number, first in enumerate((40, 60)):
            speculation = Speculation("draft", draft=both)
            next(model.generate([*range(first, first + 12)], PARAMS, sequence=number, speculate=speculation))
            sessions.append(model.sequences.get(number))
        for session in [*sessions, *sessions]:
            text = [*session.tokens, 7]
            with edgekv.load_drafter(drafter) as alone:
                found = alone.propose(text, 4, vocab, session)
            assert both.propose(text, 4, vocab, session) == found and found


def test_a_drafter_keeps_nothing_of_a_target_that_was_closed(target: Path, drafter: Path) -> None:
    with edgekv.load_drafter(drafter) as loaded:
        with edgekv.load(target) as model:
            generation, found = drafted(model, loaded, PROMPT, PARAMS)
            assert found and generation.stats.speculation.drafters["draft"].proposed > 20
            cache = ref(model.cache)
        gc.collect()
        assert cache() is None
        with edgekv.load(target) as model:
            assert drafted(model, loaded, PROMPT, PARAMS)[1] == found


FORMS = {"columns": {"key_layout": "columns"}, "s16": {"kv_dtype": "s16"}, "splits": {"splits": 3}}


@pytest.mark.parametrize("form", variants(FORMS, ["columns"]))
def test_every_form_of_targets_can_be_drafted_for(checkpoints: tuple[Path, Path], form: str) -> None:
    options: dict[str, Any] = {**FORMS[form], "context": (64, CONTEXT)}
    target = target_bundle(checkpoints[0], **options)
    drafter = drafter_bundle(checkpoints[1], target)
    assert open_bundle(drafter).manifest.kv_dtype == options.get("kv_dtype", "u8")
    with edgekv.load(target) as model, edgekv.load_drafter(drafter) as loaded:
        generation, found = drafted(model, loaded, PROMPT)
        assert generation.stats.speculation.drafters["draft"].proposed > 0
        assert found == [token.id for token in model.generate(PROMPT, PARAMS)]


def test_a_copying_drafter_is_believed(checkpoints: tuple[Path, Path], target: Path, tmp_path: Path) -> None:
    """A head that prefers one token drafts that token; a target that is biased to it accepts all of them."""
    folder = shutil.copytree(checkpoints[1], tmp_path / "drafter")
    (tmp_path / "text").write_text(TEXT)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][:] = 0
    tensors["model.norm.weight"][:] = 1
    tensors["pre_projection.weight"][:] = 0
    tensors["pre_projection.weight"][0, 0] = 1e-3
    for name in [name for name in tensors if "o_proj" in name or "down_proj" in name]:
        tensors[name][:] = 0
    save_file(tensors, folder / "model.safetensors")
    drafter = tmp_path / "bundle"
    export_drafter(Drafter.open(str(folder), open_bundle(target)), drafter, export_options(calibration_tokens=256))
    params = replace(PARAMS, logit_bias={0: 100.0})
    with edgekv.load(target) as model, edgekv.load_drafter(drafter) as loaded:
        generation, found = drafted(model, loaded, PROMPT, params)
        stats = generation.stats.speculation
        assert found == [0] * PARAMS.max_new_tokens and stats.accepted == stats.proposed > 15
        assert stats.tokens_per_pass > 5


def test_commands_draft_with_it(target: Path, drafter: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["generate", str(target), "--prompt", "Hello there", "--max-new-tokens", "12", "--temperature", "0"]
    assert run([*command, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert run([*command, "--json", "--speculate", "draft", "--draft", str(drafter)]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == plain["text"]


def test_an_export_says_what_a_drafter_reads(
    checkpoints: tuple[Path, Path], target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["export", str(checkpoints[1]), "-o", str(tmp_path / "out"), "--device", "SM8650", "--skip-htp-check"]
    command += ["--draft-for", str(target), "--calibration-tokens", "256"]
    assert run(command) == 0
    said = capsys.readouterr().out
    assert "a drafter of 3 layers" in said and "the keys and values of layers 1 and 2 of" in said
    for option in (
        "--context=64",
        "--kv=s16",
        "--draft-rows=4",
        "--format=tflite",
        "--calibration-pictures=pictures",
        "--compile",
        "--state-bits=8",
        "--max-attention-window=8",
        "--give-hidden",
        "--splits=2",
        "--head=own",
        "--max-kl=0.1",
        "--lora-slots=4",
        f"--lora={tmp_path}",
    ):
        assert run([*command, "--force", *option.split("=")]) == 2
        assert f"{option.split('=')[0]}: got it with --draft-for" in capsys.readouterr().err
    assert run([*command, "--force", "--max-ram", "100MB"]) == 2
    assert "--max-ram: got 100MB; expected" in capsys.readouterr().err
    assert run([*command, "--force", "--recipe", "front-5"]) == 2
    assert "--recipe: got bits on average with --draft-for" in capsys.readouterr().err
    assert run(["export", str(checkpoints[1]), "-o", str(tmp_path / "alone"), "--device", "SM8650"]) == 1
    assert "--draft-for" in capsys.readouterr().err and not (tmp_path / "alone").exists()


class StoppedError(Exception):
    """An export is interrupted."""


def test_an_interrupted_export_resumes_after_its_last_piece(
    checkpoints: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    """Of a layer in the middle too, which reads keys and values of the target that an earlier process has stored."""
    drafter, options = Drafter.open(str(checkpoints[1]), open_bundle(target)), export_options(calibration_tokens=256)
    export_drafter(drafter, tmp_path / "whole", options, RunOptions(cache_dir=tmp_path / "other"))
    resumed = RunOptions(cache_dir=tmp_path / "cache", resume=True)
    for stop in (1, 2):
        seen: list[tuple[str, int]] = []

        def tell(stage: str, done: int, total: int, stop: int = stop, seen: list[tuple[str, int]] = seen) -> None:
            seen.append((stage, done))
            if (stage, done) == ("quantize", stop):
                raise StoppedError

        with pytest.raises(StoppedError):
            export_drafter(drafter, tmp_path / "bundle", options, resumed, progress=tell)
        assert not (tmp_path / "bundle").exists()
        assert (("run target", 0) in seen) == (stop == 1), "the target runs once"
    seen = []
    export_drafter(
        drafter, tmp_path / "bundle", options, resumed, progress=lambda stage, done, _: seen.append((stage, done))
    )
    assert [done for stage, done in seen if stage == "quantize"] == [2, 3]
    assert contents(tmp_path / "bundle") == contents(tmp_path / "whole")
    assert PieceStore(str(tmp_path / "cache" / "pieces")).pieces == 0


def test_effort_lets_the_target_write_text_for_its_drafter(
    checkpoints: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    """Behind the calibration text. Another tokenizer on a worker is refused."""
    drafter, store = Drafter.open(str(checkpoints[1]), open_bundle(target)), PieceStore(str(tmp_path / "pieces"))
    effort = Effort(3, descent_bits=8, weighs_attention=True, written_tokens=400)
    options = export_options(calibration_tokens=256, effort=effort)
    manifest = export_drafter(
        drafter, tmp_path / "bundle", options, RunOptions(cache_dir=tmp_path, keep_pieces=True, resume=True)
    )
    kinds = {path: found.kind for path in store.folder.iterdir() if (found := store.find(path.name)) is not None}
    (written,) = (np.load(path / TOKENS) for path, kind in kinds.items() if kind == "text")
    (read,) = (np.load(path / "tokens.npy") for path, kind in kinds.items() if kind == "target")
    assert written.size >= 400 and len(np.unique(written)) > 50
    np.testing.assert_array_equal(read[-len(written) :], written[:, 1:])
    assert len(read) > len(written) and manifest.source.calibration_tokens == read.size
    plain = export_drafter(drafter, tmp_path / "plain", replace(options, effort=DEFAULT_EFFORT))
    assert plain.source.calibration_tokens == read.size - written[:, 1:].size
    shards = [name for name in plain.files if name.startswith("weights-layer")]
    assert shards and all(plain.files[name] != manifest.files[name] for name in shards)
    identity = Identity.of(drafter.checkpoint, target=drafter.target)
    key = DecoderKey(identity.weights, identity.config, drafter.spec, CONTEXT, identity.target)
    with pytest.raises(CheckpointError, match=r"another one, whose tokenizer has the hash .*expected other, as the"):
        Inputs(store, Place.of(drafter.checkpoint, drafter.target)).text_checkpoint(key, "other")


def test_a_damaged_text_of_the_target_is_run_again_and_a_forged_one_refused(
    checkpoints: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    drafter, options = Drafter.open(str(checkpoints[1]), open_bundle(target)), export_options(calibration_tokens=256)
    resumed = RunOptions(cache_dir=tmp_path / "cache", resume=True, keep_pieces=True)
    export_drafter(drafter, tmp_path / "bundle", options, resumed)
    whole, store = contents(tmp_path / "bundle"), PieceStore(str(tmp_path / "cache" / "pieces"))
    records = {path.name: store.find(path.name) for path in store.folder.iterdir()}
    (text,) = (store.folder / name for name, found in records.items() if found is not None and found.kind == "target")
    np.save(text / "hidden.npy", np.zeros((1, 2, 3), np.float32))
    for name, found in records.items():
        if found is not None and found.kind in ("layer", "write"):
            (store.folder / name / RECORD).unlink()
    export_drafter(drafter, tmp_path / "bundle", options, resumed, force=True)
    assert contents(tmp_path / "bundle") == whole
    np.save(text / "hidden.npy", np.zeros((1, 2, 3), np.float32))
    (text / RECORD).unlink()
    sealed = PieceRecord.of(text, text.name, "target", 0.0, None)
    (text / RECORD).write_bytes(msgspec.json.encode(sealed))
    for name, found in records.items():
        if found is not None and found.kind in ("layer", "write"):
            (store.folder / name / RECORD).unlink()
    with pytest.raises(UsageError, match=r"expected what a drafter reads of its target.*Remove the folder"):
        export_drafter(drafter, tmp_path / "again", options, resumed)


@pytest.mark.slow
def test_workers_of_a_scheduler_make_the_same_drafter(
    checkpoints: tuple[Path, Path], target: Path, tmp_path: Path
) -> None:
    drafter, options = Drafter.open(str(checkpoints[1]), open_bundle(target)), export_options(calibration_tokens=256)
    export_drafter(drafter, tmp_path / "near", options, RunOptions(cache_dir=tmp_path / "cache"))
    store = str(tmp_path / "store")
    run_options = RunOptions(store=store, cluster=Cluster("local", 1, say=[].append))
    export_drafter(drafter, tmp_path / "far", options, run_options)
    assert contents(tmp_path / "far") == contents(tmp_path / "near")


def forged(bundle: Path, folder: Path, change: Callable[[Manifest], Manifest]) -> Path:
    """A copy whose manifest is another one, sealed again."""
    shutil.copytree(bundle, folder)
    write_manifest(folder, change(read_manifest(folder)))
    return folder


def test_another_target_is_refused_by_name(
    checkpoints: tuple[Path, Path], target: Path, drafter: Path, tmp_path: Path
) -> None:
    (tmp_path / "text").write_text(TEXT)
    fields = {**ARCHITECTURES["gemma4"], "sliding_window": 512}
    others = {
        "give their last hidden state": target_bundle(checkpoints[0], give_hidden=False),
        "a cache of": target_bundle(checkpoints[0], context=64),
        "made for weights": target_bundle(write_checkpoint(tmp_path / "other", fields, gain=1.0, seed=1)),
    }
    name = "past_key_1_h0_in"

    def other_scale(manifest: Manifest) -> Manifest:
        encodings = manifest.encodings | {name: manifest.encodings[name].times(2.0)}
        return msgspec.structs.replace(manifest, encodings=encodings)

    others[f"{name} with the scale"] = forged(target, tmp_path / "scaled", other_scale)
    with edgekv.load_drafter(drafter) as loaded:
        for words, folder in others.items():
            with edgekv.load(folder, verify=False) as model, pytest.raises(UsageError) as refusal:
                model.generate(PROMPT, PARAMS, speculate=Speculation("draft", draft=loaded))
            assert words in str(refusal.value) and "drafter " in str(refusal.value)
        with (
            edgekv.load(target, policy="sliding-window") as model,
            pytest.raises(UsageError, match="the policy fail"),
        ):
            model.generate(PROMPT, PARAMS, speculate=Speculation("draft", draft=loaded))
    with pytest.raises(UsageError, match=r"edgekv\.load_drafter"):
        edgekv.load(drafter)
    with pytest.raises(UsageError, match="a model of its own"):
        edgekv.load_drafter(target)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_hidden_layers": 2}, ["num_kv_shared_layers", "all 2 layers"]),
        ({"layer_types": ["full_attention"] * 2}, ["layer_types", "3 strings"]),
        ({"num_kv_shared_layers": 1}, ["num_kv_shared_layers", "all 3 layers"]),
        ({"hidden_size_per_layer_input": 8}, ["hidden_size_per_layer_input", "8"]),
        ({"use_double_wide_mlp": True}, ["use_double_wide_mlp", "True"]),
        ({"vocab_size": 256}, ["vocab_size", "256", "the target's 320"]),
        ({"sliding_window": 24}, ["layer_types", "a window of 24 tokens"]),
        ({"global_head_dim": 16}, ["num_key_value_heads", "2 heads of 16", "2 heads of 32, as layer 1"]),
        ({"num_key_value_heads": 1}, ["num_key_value_heads", "1 heads", "2 heads"]),
    ],
)
def test_a_drafter_of_another_target_is_refused_by_field(
    checkpoints: tuple[Path, Path], tmp_path: Path, change: dict[str, Any], words: list[str]
) -> None:
    folder = shutil.copytree(checkpoints[1], tmp_path / "drafter")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"] |= change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open_drafter(str(folder), Checkpoint.open(str(checkpoints[0])))
    assert all(word in str(refusal.value) for word in words), refusal.value


def test_broken_drafters_are_refused_by_name(checkpoints: tuple[Path, Path], target: Path, tmp_path: Path) -> None:
    of_target, of_drafter = checkpoints
    source = Checkpoint.open(str(of_target))
    for number, (change, words) in enumerate(
        [
            (lambda found: found.pop("post_projection.weight"), "post_projection.weight: got no such tensor"),
            (lambda found: found.update({"pre_projection.weight": np.zeros((32, 64), np.float32)}), "[32, 128]"),
            (lambda found: found.pop("model.embed_tokens.weight"), "model.embed_tokens.weight: got no such tensor"),
            (lambda found: found.update({"extra.weight": np.zeros(4, np.float32)}), "extra.weight"),
        ]
    ):
        folder = shutil.copytree(of_drafter, tmp_path / str(number))
        tensors = dict(load_file(folder / "model.safetensors"))
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(CheckpointError) as refusal:
            Checkpoint.open_drafter(str(folder), source)
        assert words in str(refusal.value)
    folder = shutil.copytree(of_drafter, tmp_path / "infinite")
    tensors = dict(load_file(folder / "model.safetensors"))
    tensors["post_projection.weight"] = np.full_like(tensors["post_projection.weight"], np.nan)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"post_projection.weight: got 2048 elements that are NaN"):
        export_drafter(Drafter.open(str(folder), open_bundle(target)), tmp_path / "out", export_options())
    folder = shutil.copytree(of_drafter, tmp_path / "width")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"backbone_hidden_size": 128}))
    with pytest.raises(CheckpointError, match=r"backbone_hidden_size: got 128; expected the target's 64"):
        Checkpoint.open_drafter(str(folder), source)
    with pytest.raises(CheckpointError, match="model_type"):
        Checkpoint.open_drafter(str(of_target), source)
    with pytest.raises(UsageError, match="--give-hidden"):
        Drafter.open(str(of_drafter), open_bundle(target_bundle(of_target, give_hidden=False)))


def test_other_runtimes_refuse_drafters_and_hidden_states(target: Path, drafter: Path) -> None:
    for capabilities in (GENIE, GENIEX, GENAI, AI_HUB):
        with pytest.raises(BundleError, match="drafter: got graphs that read the state"):
            capabilities.check(open_bundle(drafter))
        with pytest.raises(EdgeKVError, match="--give-hidden"):
            capabilities.check(open_bundle(target))


@pytest.mark.htp
def test_the_htp_drafts_in_integers(checkpoints: tuple[Path, Path]) -> None:
    target = target_bundle(checkpoints[0], context=64)
    drafter = drafter_bundle(checkpoints[1], target)
    (graph,) = open_bundle(drafter).manifest.graphs
    (decode,) = [each for each in open_bundle(target).manifest.graphs if each.role == "decode"]
    assert floating_nodes([drafter / graph.file], find("SM8650")) == []
    assert floating_nodes([target / part.file for part in decode.parts], find("SM8650")) == []
    with edgekv.load(target, "htp") as model, edgekv.load_drafter(drafter, "htp") as loaded:
        generation, found = drafted(model, loaded, PROMPT)
        assert found == [token.id for token in model.generate(PROMPT, PARAMS)]
        assert generation.stats.speculation.drafters["draft"].proposed > 20
        text = [*PROMPT, *found]
        on_htp = steps_of(model, loaded, text, 1)
    with edgekv.load(target) as model, edgekv.load_drafter(drafter) as loaded:
        on_cpu = steps_of(model, loaded, text, 1)
    assert sqnr_db(on_cpu[0].logits, on_htp[0].logits) > 25
