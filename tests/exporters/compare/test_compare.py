"""`edgekv compare`: two models on one text."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

import edgekv
from edgekv.cli.app import run
from edgekv.errors import EngineError, UsageError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.compare import ComparePlan, Comparison, ContenderOptions, compare, open_contender
from exporters.compare.foreign import ForeignContender
from exporters.inspect.evaluate import evaluate
from tests.support.foreign_files import write_gguf

ROOT = Path(__file__).parents[3]
EMBEDDED = ROOT / "models" / "stdlib-4m"
TEXT = (EMBEDDED / "heldout.txt").read_text()
UNTIMED = ComparePlan(tokens=300, window=128, new_tokens=0)
VOCAB, WIDTH = 4096, 8


def measured(a: Path, b: Path, plan: ComparePlan = UNTIMED, options: ContenderOptions | None = None) -> Comparison:
    opened = [open_contender(each, options or ContenderOptions(threads=1)) for each in (a, b)]
    try:
        return compare(*opened, TEXT, "heldout.txt", plan)
    finally:
        for each in opened:
            each.close()


def write_bigrams(folder: Path, *, vocab: int = VOCAB, crashes: bool = False) -> Path:
    """A stateful OpenVINO model: each token's logits depend on it and on how many came before."""
    random = np.random.default_rng(0)
    ids = ops.parameter([-1, -1], np.int64, name="input_ids")
    ids.output(0).set_names({"input_ids"})
    table = random.normal(size=(vocab, WIDTH)).astype(np.float32)
    rows = ops.gather(ops.constant(table), ids, ops.constant(np.int64(0)))
    seen_before = ov.op.util.VariableInfo()
    seen_before.data_shape, seen_before.data_type = ov.PartialShape([1, 1, 1]), ov.Type.f32
    seen_before.variable_id = "seen"
    variable = ov.op.util.Variable(seen_before)
    seen = ops.read_value(ops.constant(np.zeros((1, 1, 1), np.float32)), variable)
    shape = ops.shape_of(ids)
    count = ops.convert(ops.gather(shape, ops.constant(np.int64(1)), ops.constant(np.int64(0))), "f32")
    after = ops.add(seen, ops.reshape(count, ops.constant(np.array([1, 1, 1])), False))
    head = ops.constant(random.normal(size=(WIDTH, vocab)).astype(np.float32))
    small = ops.constant(np.float32(0.01))
    logits = ops.matmul(ops.add(rows, ops.multiply(after, small)), head, False, False)
    result = ops.result(logits)
    result.output(0).set_names({"logits"})
    model = ov.Model([result], [ops.assign(after, variable)], [ids], "bigrams")
    folder.mkdir()
    ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    if crashes:
        (folder / "openvino_model.bin").write_bytes(b"")
    return folder


def test_a_model_agrees_with_itself(bundle: Path):
    found = measured(bundle, bundle)
    assert found.tokens == 300
    assert found.window == 128
    assert found.kl_nats == found.kl_max_nats == 0
    assert found.perplexity_ratio == found.top1_agreement == 1
    assert found.a.model.bytes == found.b.model.bytes
    assert found.a.decode_tokens_per_s is None


def test_a_checkpoint_is_what_eval_compares_with(bundle: Path):
    plan = replace(UNTIMED, window=10_000)  # the bundle's context
    found = measured(EMBEDDED, bundle, plan)
    evaluated = evaluate(edgekv.load(bundle), Checkpoint.open(str(EMBEDDED)), TEXT, "heldout.txt", tokens=300)
    assert found.kl_nats == pytest.approx(evaluated.kl_nats, rel=1e-6)
    assert found.perplexity_ratio == pytest.approx(evaluated.perplexity_ratio, rel=1e-6)
    assert found.top1_agreement == evaluated.top1_agreement
    assert found.kl_nats < found.kl_99_nats <= found.kl_max_nats
    assert found.a.model.engine == "numpy, float32"


def test_binaries_of_chips_are_not_counted(bundle: Path, tmp_path: Path):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / "compiled" / "SM8650").mkdir(parents=True)
    (copy / "compiled" / "SM8650" / "graphs.bin").write_bytes(bytes(1000))
    with_binaries, without = (open_contender(each, ContenderOptions()) for each in (copy, bundle))
    assert with_binaries.described.bytes == without.described.bytes


def test_speeds_of_both(bundle: Path):
    found = measured(bundle, bundle, ComparePlan(tokens=20, prompt_tokens=8, new_tokens=2, turns=1))
    for side in (found.a, found.b):
        assert side.prefill_tokens_per_s > 0
        assert side.decode_tokens_per_s > 0


def test_a_gguf_file_computes_what_its_checkpoint_does(tmp_path: Path):
    """Through llama.cpp where its package is installed, which has no wheel; else in float32."""
    exact, rounded = (write_gguf(EMBEDDED, tmp_path / f"{kind}.gguf", kind) for kind in ("F32", "Q8_0"))
    found = measured(exact, rounded)
    assert found.b.model.kind == "GGUF"
    assert 0 < found.kl_nats < 1e-3
    assert found.b.model.bytes < 0.4 * found.a.model.bytes
    window = np.random.default_rng(0).integers(VOCAB, size=40)
    ours, theirs = (next(open_contender(each, ContenderOptions()).logits([window])) for each in (EMBEDDED, exact))
    assert np.abs(ours - theirs).max() < 1e-3 * np.abs(ours).max()


@pytest.mark.thorough
def test_an_openvino_folder(bundle: Path, tmp_path: Path):
    folder = write_bigrams(tmp_path / "bigrams")
    found = measured(bundle, folder, ComparePlan(tokens=100, window=64, prompt_tokens=16, new_tokens=4, turns=1))
    assert found.b.model.engine.startswith("openvino 20")
    assert found.kl_nats > 1
    assert found.b.decode_tokens_per_s > 0
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    again = measured(folder, folder)
    assert again.kl_max_nats == 0, "every window begins from an empty state"


def test_openvino_computes_the_last_logits_alone_when_timed(tmp_path: Path):
    from exporters.compare.messages import Open
    from exporters.compare.runtimes import load

    folder = write_bigrams(tmp_path / "bigrams")
    model = load(Open(runtime="openvino", path=str(folder), context=64, threads=1))
    assert model.logits([1, 2, 3]).shape == (3, VOCAB)
    whole = model.logits([5, 6, 7, 8])
    model._ready(all_logits=False)
    last = model._run([5, 6, 7, 8], 0)
    assert last.shape == (1, 1, VOCAB)
    assert np.array_equal(last[0, -1], whole[-1])


@pytest.mark.thorough
def test_an_onnxruntime_genai_folder(bundle: Path, tmp_path: Path):
    from benchmarks.genai_graph import spec_of, write_genai_folder

    folder = tmp_path / "genai"
    folder.mkdir()
    write_genai_folder(spec_of(edgekv.load(bundle).bundle), 256, folder)
    found = measured(bundle, folder, ComparePlan(tokens=60, prompt_tokens=16, new_tokens=4, turns=1))
    assert found.b.model.context == 256
    assert found.b.model.engine.startswith("onnxruntime-genai")
    assert found.kl_nats > 1, "its weights are random"
    assert found.b.prefill_tokens_per_s > 0
    shutil.copy(EMBEDDED / "tokenizer.json", folder)
    assert measured(folder, folder, ComparePlan(tokens=60, window=32, new_tokens=0)).kl_max_nats == 0


def test_a_runtime_that_fails_is_an_error(bundle: Path, tmp_path: Path):
    folder = write_bigrams(tmp_path / "broken", crashes=True)
    with pytest.raises(EngineError, match=r"openvino on .*broken.*expected a model that it loads"):
        measured(bundle, folder)


def test_a_runtime_that_dies_is_an_error(bundle: Path, tmp_path: Path):
    contender = open_contender(write_bigrams(tmp_path / "bigrams"), ContenderOptions())
    assert isinstance(contender, ForeignContender)
    window = np.arange(10)
    logits = contender.logits([window, window])
    next(logits)
    contender._child.kill()
    with pytest.raises(EngineError, match="SIGKILL"):
        next(logits)
    contender.close()


def test_a_runtime_that_hangs_is_an_error(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_bigrams(tmp_path / "bigrams")
    monkeypatch.setenv("EDGEKV_TIMEOUT_S", "0.01")
    with pytest.raises(EngineError, match=r"no answer within 0.01 s.*EDGEKV_TIMEOUT_S"):
        measured(bundle, folder)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "no such file or folder"),
        ("genie", "a folder for Genie"),
        ("pipeline", "the logits of a prompt's last token alone"),
        ("other", "an unknown format"),
    ],
)
def test_other_paths_are_named(bundle: Path, tmp_path: Path, name: str, message: str):
    folder = tmp_path / name
    if name != "nothing":
        folder.mkdir()
    if name == "genie":
        (folder / "genie_config.json").write_text("{}")
    if name == "pipeline":
        model = {"type": "decoder-pipeline", "context_length": 64}
        (folder / "genai_config.json").write_text(json.dumps({"model": model}))
    with pytest.raises(UsageError, match=message):
        measured(bundle, folder)


def test_a_runtime_that_is_missing_is_named(bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = write_bigrams(tmp_path / "bigrams")
    monkeypatch.setattr("exporters.compare.opened._version", lambda package: None)
    with pytest.raises(EngineError, match="pip install openvino"):
        measured(bundle, folder)


def test_other_vocabularies_are_refused(bundle: Path, tmp_path: Path):
    folder = write_bigrams(tmp_path / "bigrams", vocab=VOCAB + 2000)
    with pytest.raises(UsageError, match="6096 tokens in the vocabulary; expected 4096"):
        measured(bundle, folder)
    swapped = json.loads((EMBEDDED / "tokenizer.json").read_text())
    vocab = swapped["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)[300:]
    for token, index in zip(tokens, reversed([vocab[each] for each in tokens]), strict=True):
        vocab[token] = index
    (folder / "tokenizer.json").write_text(json.dumps(swapped))
    with pytest.raises(UsageError, match="another token at place"):
        measured(bundle, folder)


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path):
    folder = write_bigrams(tmp_path / "bigrams")
    with pytest.raises(UsageError, match=r"tokenizer.json: got none in either"):
        measured(folder, folder)


def test_timed_tokens_must_fit(bundle: Path):
    with pytest.raises(UsageError, match="--prompt-tokens and --new-tokens: got 500 and 100 tokens"):
        measured(bundle, bundle, ComparePlan(prompt_tokens=500, new_tokens=100))


def test_the_command(bundle: Path, capsys: pytest.CaptureFixture[str]):
    arguments = ["compare", str(EMBEDDED), str(bundle), "--text", str(EMBEDDED / "heldout.txt"), "--tokens", "50"]
    assert run([*arguments, "--new-tokens", "0"]) == 0
    shown = capsys.readouterr().out
    assert "50 tokens of heldout.txt" in shown
    assert "top-1 agreement" in shown
    assert "tokens/s" not in shown
    assert run([*arguments, "--prompt-tokens", "4", "--new-tokens", "2", "--turns", "1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["a"]["decode_tokens_per_s"] is None
    assert report["b"]["decode_tokens_per_s"] > 0
    assert report["perplexity_ratio"] == pytest.approx(report["b"]["perplexity"] / report["a"]["perplexity"])
