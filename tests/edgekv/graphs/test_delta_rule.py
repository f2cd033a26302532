"""Gated delta rules and Mamba-2: checkpoint and tail give what the recurrence gives, however a text was computed."""

from __future__ import annotations

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv import SamplingParams
from edgekv.bundle import open_bundle
from edgekv.cli import run as run_command
from edgekv.draft import Speculation
from edgekv.errors import UsageError
from edgekv.graphs.delta_rule import DeltaInputs
from edgekv.kv import CacheState
from edgekv.prefix import PrefixStore, StoreConfig
from edgekv.runtime import make_engine
from edgekv.runtime.load_options import EngineOptions
from edgekv.spec import CHECKPOINT_TOKENS, DeltaRule
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.folded import transformed_as
from exporters.cli.exported import export_lines
from exporters.htp.check import floating_nodes
from exporters.inspect import trace_reference
from exporters.inspect.divergence import sqnr_db
from exporters.inspect.evaluate import open_source
from exporters.inspect.probe import Probe
from exporters.lora.options import LoraOptions
from exporters.plan import plan_export
from exporters.quantize.reference import NumpyOps, Reference, Weights
from quant import Encoding
from tests.support.bundles import Oracle, with_drafts
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import calls, variants

CONTEXT = 256
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon. " * 4
STATES = ("qwen3_5", "granite4-h", "falcon_h1", "falcon_h1-normed", "nemotron_h")


def recurrence(rule: DeltaRule, q: Any, k: Any, v: Any, b: Any, g: Any) -> tuple[NDArray[Any], NDArray[Any]]:
    """Outputs `[T, heads, value_dim]` and the last S `[heads, key_dim, value_dim]`, token by token."""
    state = np.zeros((rule.value_heads, rule.key_dim, rule.value_dim))
    outputs = []
    for at in range(len(v)):
        keys, queries = (np.repeat(each[at], rule.group, axis=0) for each in (k, q))
        state = state * np.exp(g[at])[:, None, None]
        found = b[at][:, None] * (v[at] - np.einsum("hkv,hk->hv", state, keys))
        state = state + keys[:, :, None] * found[:, None]
        outputs.append(np.einsum("hkv,hk->hv", state, queries))
    return np.array(outputs), state


@pytest.mark.parametrize("tokens", [1, 31, 64, 65, 200])
def test_the_reference_computes_the_recurrence_in_blocks(tmp_path: Path, tokens: int) -> None:
    """With keys that resemble each other, where powers of the system would overflow."""
    random = np.random.default_rng(tokens)
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["qwen3_5"])))
    rule = checkpoint.spec.delta_rule
    assert rule is not None
    common = random.normal(size=rule.key_dim)
    q, k = (common + 0.3 * random.normal(size=(tokens, rule.key_heads, rule.key_dim)) for _ in range(2))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = random.normal(size=(tokens, rule.value_heads, rule.value_dim))
    b = 1 / (1 + np.exp(-random.normal(size=(tokens, rule.value_heads))))
    g = -np.geomspace(1e-4, 1, rule.value_heads) * random.random((tokens, rule.value_heads))

    def heads(values: NDArray[Any]) -> list[NDArray[np.float32]]:
        return [np.ascontiguousarray(each).astype(np.float32) for each in np.moveaxis(values, 1, 0)]

    new = DeltaInputs(heads(q), heads(k), heads(v), heads(b[..., None]), heads(g[..., None]))
    ops = NumpyOps(checkpoint.spec, Weights(checkpoint), tokens, tokens)
    found = np.stack(ops.recall(rule, 0, new), axis=1)
    wanted, _ = recurrence(rule, q, k, v, b, g)
    assert np.abs(found - wanted).max() < 1e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("tokens", [1, 64, 200])
def test_the_reference_computes_mamba_2_in_blocks(tmp_path: Path, tokens: int) -> None:
    """Steps of some heads are thousands of times as long as those of others."""
    random = np.random.default_rng(tokens)
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["granite4-h"])))
    rule = checkpoint.spec.delta_rule
    assert rule is not None and rule.group == 4
    q, k = random.normal(size=(2, tokens, rule.key_heads, rule.key_dim))
    v = random.normal(size=(tokens, rule.value_heads, rule.value_dim))
    t = np.geomspace(1e-4, 1, rule.value_heads) * random.random((tokens, rule.value_heads))
    rates = -np.arange(1, rule.value_heads + 1)
    state, wanted = np.zeros((rule.value_heads, rule.key_dim, rule.value_dim)), []
    for at in range(tokens):
        keys, queries = (np.repeat(each[at], rule.group, axis=0) for each in (k, q))
        state = state * np.exp(t[at] * rates)[:, None, None] + np.einsum("h,hk,hv->hkv", t[at], keys, v[at])
        wanted.append(np.einsum("hkv,hk->hv", state, queries))

    def heads(values: NDArray[Any]) -> list[NDArray[np.float32]]:
        return [np.ascontiguousarray(each).astype(np.float32) for each in np.moveaxis(values, 1, 0)]

    new = DeltaInputs(heads(q), heads(k), heads(v), heads(t[..., None]), heads((t * rates)[..., None]))
    found = np.stack(NumpyOps(checkpoint.spec, Weights(checkpoint), tokens, tokens).recall(rule, 0, new), axis=1)
    error = found / rates[:, None] - np.array(wanted)
    assert (np.abs(error).max((0, 2)) < 1e-4 * np.abs(wanted).max((0, 2))).all(), "each head"


def test_steps_of_mamba_2_have_their_limits(tmp_path: Path) -> None:
    """With them, those of a bias that is far beyond are all equal."""
    limited = ARCHITECTURES["granite4-h"] | {"time_step_limit": [0.25, 0.5]}
    folder = write_checkpoint(tmp_path, limited, gain=1.0)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.mamba.dt_bias"] = np.repeat(np.float32([-20, 20]), 4)
    save_file(tensors, folder / "model.safetensors")
    checkpoint, seen = Checkpoint.open(str(folder)), dict[str, NDArray[np.float32]]()
    next(Reference(checkpoint).logits([np.arange(20)], observe=seen.__setitem__))
    rates = checkpoint.tensor("model.layers.0.linear_attn.A_log")
    for head, rate in enumerate(rates):
        np.testing.assert_allclose(seen[f"decay_state_0_h{head}_in"], rate * (0.25 if head < 4 else 0.5), rtol=1e-5)


def delta_bundle(folder: Path, name: str = "qwen3_5", **options: Any) -> Path:
    checkpoint = write_checkpoint(folder / "checkpoint", ARCHITECTURES[name], gain=1.0)
    (folder / "text").write_text(TEXT)
    chosen = {"context": (128, CONTEXT), "ar": (1, 16, 64), "draft_rows": (4, 8), "calibration": folder / "text"}
    return exported(checkpoint, export_options(**chosen | options))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four with delta rules of 2 key and 4 value heads."""
    return delta_bundle(tmp_path_factory.mktemp("delta"))


@pytest.fixture(scope="module")
def mamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four with Mamba-2 of 8 heads in 2 groups; no rotary embedding."""
    return delta_bundle(tmp_path_factory.mktemp("mamba"), "granite4-h")


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers with attention beside Mamba-2 of 6 heads."""
    return delta_bundle(tmp_path_factory.mktemp("falcon"), "falcon_h1")


@pytest.fixture(scope="module")
def nemotron(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six layers: three with Mamba-2 of 8 heads in 2 groups, one with attention, two with a feed-forward."""
    return delta_bundle(tmp_path_factory.mktemp("nemotron"), "nemotron_h")


@pytest.fixture(params=["bundle", "mamba", "falcon", "nemotron"])
def either(request: pytest.FixtureRequest) -> Path:
    """A bundle of either kind of states."""
    found: Path = request.getfixturevalue(request.param)
    return found


def ids(generation: Any) -> list[int]:
    return [token.id for token in generation]


def same(found: CacheState, expected: CacheState) -> bool:
    return found.positions == expected.positions and all(
        np.array_equal(found.rows[name], rows) for name, rows in expected.rows.items()
    )


def test_graphs_read_checkpoint_and_tail_and_write_rows(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    for graph in manifest.graphs:
        ports = manifest.interface.graph(graph)
        assert ports["recurrent_state_0_in"].shape == (1, 1, 16, 4 * 24)
        assert ports["delta_key_state_0_in"].shape == (1, 1, 64, 2 * 16)
        assert ports["delta_value_state_0_out"].shape == (1, 1, graph.ar, 4 * 24)
        assert ports["decay_state_0_h3_out"].shape == (1, 1, graph.ar, 1)
        assert ports["conv_state_0_in"].shape == (1, 1, 3, 2 * 32 + 96)
        assert "recurrent_state_0_out" not in ports
        # On V73 writing a row of signed integers takes a thousand times as long.
        assert {port.dtype for port in (*ports.inputs, *ports.outputs) if "_state_" in port.name} == {"uint16"}


@pytest.mark.parametrize(
    ("name", "mode"),
    variants(
        [*product(STATES, ("emulate", "exact16", "fast")), ("qwen3_5-multimodal", "emulate")],
        [*product(STATES, ("emulate", "fast"))],
    ),
)
def test_the_graphs_compute_what_the_reference_computes(tmp_path: Path, name: str, mode: str) -> None:
    """Beyond two checkpoints, in steps of 64 tokens and of one; int8 matrices of noise and four layers cost this."""
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path / "again", ARCHITECTURES[name], gain=1.0)))
    tokens = checkpoint.encode(TEXT)[:150]
    (wanted,) = Reference(checkpoint, CONTEXT).logits([np.array(tokens)])
    with edgekv.load(delta_bundle(tmp_path, name), cpu_mode=mode) as model:
        together = model.score(tokens)
        session = model.session
        session.reset()
        one_by_one = np.stack([session.feed([token]).copy() for token in tokens])
        one_by_one = model.bundle.manifest.encodings["head"].dequantize(one_by_one)
    for found in (together, one_by_one):
        assert np.square(wanted).sum() > 10**1.5 * np.square(found - wanted).sum()


@pytest.mark.parametrize("mode", variants(["emulate", "exact16", "fast"], ["fast"]))
def test_rejected_drafts_leave_no_trace(either: Path, mode: str) -> None:
    """Across two checkpoints, whose passes take fewer drafts."""
    prompt, params = [*range(40, 60)], SamplingParams(max_new_tokens=120, ignore_eos=True)
    with edgekv.load(either, cpu_mode=mode) as model:
        plain = ids(model.generate(prompt, params))
        wanted = model.cache.state
        drafter = Oracle(prompt + plain, model.bundle.manifest.model.vocab, 0, 0.7)
        with with_drafts(model, prompt, params, Speculation(drafter=drafter)) as generation:
            assert ids(generation) == plain
        assert generation.stats.speculation.accepted > 20  # type: ignore[union-attr]
        assert same(model.cache.state, wanted)


def random_calls(plain: edgekv.Model, model: edgekv.Model, count: int) -> int:
    """Texts that continue, repeat and cut each other, with drafts or without; returns the tokens not run again."""
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    random = np.random.default_rng(0)
    texts, saved = [random.integers(3, 250, 180).tolist()], 0
    for call in range(count):
        text = list(texts[random.integers(len(texts))])
        text = text[: int(random.integers(1, len(text) + 1))]
        text += random.integers(3, 250, random.integers(0, 60)).tolist()
        text = text[: CONTEXT - 10]
        wanted = ids(plain.generate(text, params))
        state = plain.cache.state
        drafter = Oracle(text + wanted, 250, call, float(random.random()))
        with with_drafts(model, text, params, Speculation(drafter=drafter) if call % 2 else None) as generation:
            assert ids(generation) == wanted, call
        model.session.settle()
        assert same(model.session.cache.state, state), call
        saved += generation.stats.cache.reused_tokens + generation.stats.cache.restored_tokens
        texts = [*texts[-4:], text + wanted]
    return saved


@pytest.mark.htp
def test_a_store_with_blocks_of_a_part_of_a_step_is_refused_on_the_htp(bundle: Path) -> None:
    options: dict[str, Any] = {"engine": "htp", "reproducible": True}
    with edgekv.load(bundle, prefix_cache=StoreConfig(tokens_per_block=16), **options) as model:
        store = model.prefix_store
        assert store is not None and store.config.tokens_per_block == CHECKPOINT_TOKENS
        small = PrefixStore(
            store.geometry, StoreConfig(tokens_per_block=16), fingerprint=store.fingerprint, snapshots=True
        )
    with pytest.raises(UsageError, match="prefix_cache: got blocks of 16 tokens; expected at least 64"):
        edgekv.load(bundle, prefix_cache=small, **options)


@pytest.mark.slow
@pytest.mark.htp
def test_drafts_change_no_bit_on_the_htp(either: Path) -> None:
    """Across a checkpoint."""
    prompt, params = [*range(40, 90)], SamplingParams(max_new_tokens=40, ignore_eos=True)
    with edgekv.load(either, "htp") as model:
        plain = ids(model.generate(prompt, params))
        wanted = model.cache.state
        model.session.reset()
        drafter = Oracle(prompt + plain, model.bundle.manifest.model.vocab, 0, 0.8)
        with with_drafts(model, prompt, params, Speculation(drafter=drafter)) as generation:
            assert ids(generation) == plain
        assert generation.stats.speculation.accepted > 10  # type: ignore[union-attr]
        assert same(model.cache.state, wanted)


def test_corrections_are_cached_as_they_are(bundle: Path) -> None:
    """Another rounding of each row would differ between decode and verify graphs on the HTP."""
    encodings = open_bundle(bundle).manifest.encodings
    for layer in (0, 1, 3):
        assert encodings[f"layers.{layer}.delta.correction"] == encodings[f"delta_value_state_{layer}_in"]


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with D of 1, A of 1 to 8 and steps of 0.001 to 0.1, whatever the inputs add; and its bundle."""
    folder = tmp_path_factory.mktemp("begun")
    checkpoint = write_checkpoint(folder / "checkpoint", ARCHITECTURES["granite4-h"], gain=1.0)
    tensors, steps = load_file(checkpoint / "model.safetensors"), np.geomspace(0.001, 0.1, 8)
    numbers = {"A_log": np.log(np.arange(1, 9)), "D": np.ones(8), "dt_bias": np.log(np.expm1(steps))}
    for key, stored in tensors.items():
        tensors[key] = numbers.get(key.rpartition(".mamba.")[2], stored).astype(stored.dtype)
    save_file(tensors, checkpoint / "model.safetensors")
    (folder / "text").write_text(TEXT)
    chosen = export_options(context=CONTEXT, ar=(1, 64), draft_rows=(), calibration=folder / "text")
    return checkpoint, exported(checkpoint, chosen)


def test_mamba_2_of_the_numbers_that_training_begins_with_keeps_30_db(begun: tuple[Path, Path]) -> None:
    """31.9 dB, with int8 matrices of noise; the roundings of activations alone leave 58."""
    opened = Checkpoint.open(str(begun[0]))
    tokens = opened.encode(TEXT)[:250]
    (wanted,) = Reference(opened, CONTEXT).logits([np.array(tokens)])
    with edgekv.load(begun[1], cpu_mode="emulate") as model:
        assert sqnr_db(wanted, model.score(tokens)) >= 30


@pytest.mark.htp
def test_the_htp_has_the_logits_of_the_cpu(begun: tuple[Path, Path]) -> None:
    """45.9 dB over 250 tokens, beyond three checkpoints; then 70 token by token, 47.0."""
    tokens = Checkpoint.open(str(begun[0])).encode(TEXT)[:250]
    with edgekv.load(begun[1], "htp") as htp, edgekv.load(begun[1], cpu_mode="emulate") as cpu:
        assert sqnr_db(cpu.score(tokens), htp.score(tokens)) > 42
        cpu.session.reset()
        htp.session.reset()
        stepwise = [np.stack([_fed(model, token) for token in tokens[:70]]) for model in (cpu, htp)]
        assert sqnr_db(*stepwise) > 42


def _fed(model: edgekv.Model, token: int) -> NDArray[np.float32]:
    """The logits behind one more token."""
    logits: NDArray[np.float32] = model.bundle.manifest.encodings["head"].dequantize(model.session.feed([token]))
    return logits


def test_mamba_2_caches_what_it_computes_as_it_is(mamba: Path) -> None:
    """So do the steps of each head: their decays have the same integers."""
    encodings = open_bundle(mamba).manifest.encodings
    for at, layer in ((f"layers.{layer}.delta.", layer) for layer in (0, 1, 3)):
        assert encodings[at + "value_silu"] == encodings[f"delta_value_state_{layer}_in"]
        assert encodings[at + "key_silu"] == encodings[f"delta_key_state_{layer}_in"]
        for head in range(8):
            decay = encodings[f"{at}decay.h{head}"]
            assert decay == encodings[f"decay_state_{layer}_h{head}_in"]
            assert encodings[f"{at}softplus.h{head}"].zero_point == decay.zero_point


def test_a_tree_of_drafts_is_refused(bundle: Path) -> None:
    with edgekv.load(bundle) as model, pytest.raises(UsageError, match="tree: got layers with gated delta rules"):
        model.generate("text", 4, speculate=Speculation(tree=True))


def test_prefixes_rewinds_and_drafts_change_no_bit(either: Path) -> None:
    config = StoreConfig(tokens_per_block=16, max_bytes=1 << 24)
    options: dict[str, Any] = {"cpu_mode": "emulate", "reproducible": True}
    with edgekv.load(either, **options) as plain, edgekv.load(either, prefix_cache=config, **options) as model:
        assert random_calls(plain, model, calls(8)) > 300


@pytest.mark.htp
@pytest.mark.slow
def test_every_graph_is_integers_alone_on_the_htp(either: Path) -> None:
    graphs = ["ar1_cl128", "ar64_cl128", "ar8_cl128_verify"]
    assert not floating_nodes([either / f"{name}.onnx.gz" for name in graphs], find("SM8750"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device": "SM8450"}, "V73 or later"),
        ({"ar": (1, 128), "context": (256,)}, "--ar: got 128; expected at most 64"),
        ({"lora": LoraOptions(rank=4)}, "--lora-slots: got slots, for a checkpoint with gated delta rules"),
        (
            {"name": "granite4-h", "state_bits": 8},
            "--state-bits: got 8; expected 16 for a checkpoint with Mamba-2 states",
        ),
        ({"graph_format": "tflite", "kv_dtype": "s8"}, "--format: got tflite, for a checkpoint with gated delta rules"),
    ],
)
def test_what_cannot_run_them_is_refused_by_name(tmp_path: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        delta_bundle(tmp_path, **options)


def test_states_are_calibrated_beyond_a_short_context(bundle: Path, tmp_path: Path) -> None:
    """Those of 64 tokens read no checkpoint: S would get a scale of 1e-38, and be wiped at every 64th token."""
    short = open_bundle(delta_bundle(tmp_path, context=64, ar=(1, 16), draft_rows=())).manifest
    long = open_bundle(bundle).manifest
    read = [name for name in long.encodings if re.search(r"recurrent|\.delta\.(known|held)", name)]
    assert len(read) > 3 * 4
    for name in read:
        assert 0.5 < short.encodings[name].scale / long.encodings[name].scale < 2, name


@pytest.mark.parametrize(
    ("name", "tokens", "words"),
    [("qwen3_5", 64, "64 tokens; expected at least 65: more than 64"), ("lfm3", 4, "4 tokens; expected at least 7")],
)
def test_a_calibration_text_that_reads_no_state_is_refused(tmp_path: Path, name: str, tokens: int, words: str) -> None:
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES[name])))
    with pytest.raises(UsageError, match=f"calibration: got windows of {words}"):
        plan_export(checkpoint, export_options(context=128, ar=(1, 16), calibration_tokens=tokens))


@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_5-multimodal"])
def test_layers_that_predict_further_tokens_are_left_out(bundle: Path, tmp_path: Path, name: str) -> None:
    """And the export says so."""
    folder = write_checkpoint(tmp_path, ARCHITECTURES[name])
    plain, tensors = Checkpoint.open(str(folder)), load_file(folder / "model.safetensors")
    save_file({**tensors, "mtp.fc.weight": np.zeros((64, 128), np.float32)}, folder / "model.safetensors")
    opened, manifest = Checkpoint.open(str(folder)), open_bundle(bundle).manifest
    assert opened.parameters == plain.parameters and opened.predicts_further and not plain.predicts_further
    assert ["mtp" in "".join(export_lines(folder, manifest, each)) for each in (opened, plain)] == [True, False]


def test_several_sequences_in_one_pass_are_refused(bundle: Path) -> None:
    with (
        edgekv.load(bundle) as model,
        pytest.raises(UsageError, match="batch: got layers with gated delta rules"),
    ):
        _ = model.batch


def test_results_of_layers_are_those_of_the_model_and_near_the_reference(bundle: Path) -> None:
    """Beyond two checkpoints: of the reference's steps and the graph's, of other lengths."""
    opened = open_bundle(bundle)
    checkpoint = open_source(opened.manifest, None)
    tokens = checkpoint.encode(TEXT)[:150]
    found = Probe(opened, make_engine(opened, EngineOptions())).run(tokens)
    with edgekv.load(bundle, cpu_mode="emulate") as model:
        assert np.array_equal(found["logits"], model.score(tokens))
    wanted = trace_reference(transformed_as(opened, checkpoint), tokens, CONTEXT)
    assert set(wanted) == set(found)
    states = [name for name in wanted if "state" in name]
    assert len(states) == 3 * (3 + 4) and all(wanted[name].shape[0] == 150 for name in wanted)
    assert min(sqnr_db(wanted[name], found[name]) for name in states) > 15


@pytest.mark.htp
def test_the_htp_decays_states_as_the_cpu_does(bundle: Path) -> None:
    """Its 16-bit Softplus has 38 to 45 dB here; the form that graphs have, 75 and more."""
    opened = open_bundle(bundle)
    tokens = np.array(open_source(opened.manifest, None).encode(TEXT)[:128])
    cpu, htp = (
        next(Probe(opened, make_engine(opened, EngineOptions(each))).stages([tokens])) for each in ("cpu", "htp")
    )
    assert min(sqnr_db(cpu[name], htp[name]) for name in (f"decay_state_0_h{head}_in" for head in range(4))) > 65


def test_a_report_by_layer_names_the_states_of_each(
    bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text"
    text.write_text(TEXT)
    capsys.readouterr()
    assert run_command(["eval", str(bundle), "--text", str(text), "--tokens", "70", "--layers", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert ["state" in each["levels"] for each in report["layers"]] == [False, True, True, False, True, False]


@pytest.fixture
def trained(embedded: Path) -> Path:
    """Gated delta rules in three of four layers; made by models/train_qwen.py."""
    return embedded.parent / "qwen3_5-800k"


@pytest.mark.slow
def test_a_trained_model_keeps_its_quality(trained: Path, embedded: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """KL 0.00015."""
    folder = exported(trained, export_options(context=512, ar=(1, 64)))
    capsys.readouterr()
    text = ["--text", str(embedded / "heldout.txt"), "--tokens", "2048"]
    assert run_command(["eval", str(folder), *text, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kl_nats"] <= 0.0015 and found["perplexity_ratio"] <= 1.003


@pytest.mark.slow
def test_each_head_of_a_trained_model_has_a_range_of_its_own_for_decays(trained: Path, embedded: Path) -> None:
    """66 dB or more each; in the range of the fastest head, the decays of slow ones would have 14 to 22 dB."""
    bundle = open_bundle(exported(trained, export_options(context=512, ar=(1, 64))))
    checkpoint, encodings = Checkpoint.open(str(trained)), bundle.manifest.encodings
    rule = checkpoint.spec.delta_rule
    assert rule is not None
    tokens = checkpoint.encode((embedded / "heldout.txt").read_text()[:3000])[:256]
    trace = trace_reference(checkpoint, tokens, 512)
    heads = [(layer, head) for layer in sorted(rule.layers) for head in range(rule.value_heads)]
    own = {at: encodings["decay_state_{}_h{}_in".format(*at)] for at in heads}
    widest = max(own.values(), key=lambda encoding: encoding.scale)

    def kept_db(at: tuple[int, int], encoding: Encoding) -> float:
        decays = trace["decay_state_{}_h{}_in".format(*at)]
        return sqnr_db(decays, encoding.dequantize(encoding.quantize(decays)))

    assert widest.scale > 100 * min(encoding.scale for encoding in own.values())
    assert min(kept_db(at, own[at]) for at in heads) > 60
    assert min(kept_db(at, widest) for at in heads) < 25


@pytest.mark.slow
def test_checkpoints_of_a_trained_model_keep_their_quality(trained: Path, embedded: Path) -> None:
    """36.0 dB or more at each of 32, with all errors, those of 8-bit weights too; most have 39 to 46."""
    folder, text = exported(trained, export_options(context=2176, ar=(1, 64))), (embedded / "heldout.txt").read_text()
    exact: dict[str, list[NDArray[np.float32]]] = {f"recurrent_state_{layer}_in": [] for layer in range(3)}
    found: dict[str, list[NDArray[np.float32]]] = {name: [] for name in exact}

    def observe(name: str, values: NDArray[np.float32]) -> None:
        if name in exact and not any(values is each for each in exact[name][-1:]):
            exact[name].append(values)

    with edgekv.load(folder, cpu_mode="emulate") as model:
        tokens, encodings = model.tokenizer.encode(text[:20000]).ids[:2049], model.bundle.manifest.encodings
        for first in range(0, 2048, CHECKPOINT_TOKENS):
            model.session.feed(tokens[first : first + CHECKPOINT_TOKENS])
            states = model.session.cache.states(first + CHECKPOINT_TOKENS)
            for name in found:
                found[name].append(encodings[name].dequantize(states[name]))
    next(Reference(Checkpoint.open(str(trained)), 2176).logits([np.array(tokens)], observe=observe))
    for name in exact:
        wanted, error = np.array(exact[name]), np.array(exact[name]) - np.array(found[name])
        power, lost = np.square(wanted).sum((1, 2)), np.square(error).sum((1, 2))
        assert (10 * np.log10(power / lost)).min() >= 35, name
