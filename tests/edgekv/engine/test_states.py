"""Models with short convolutions: the same tokens and the same bits, however a text was computed."""

from __future__ import annotations

import hashlib
import json
import shutil
from itertools import islice, product, takewhile
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
from edgekv.draft import DraftTree, Speculation
from edgekv.engine.saved import load_sequence, save_sequence
from edgekv.engine.session import Session
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.kv import CacheState, KVCache
from edgekv.loading import bake_prefix
from edgekv.machine.tensor_file import decode_tensors, encode_tensors
from edgekv.plan import PlanOptions, make_plan
from edgekv.prefix import PrefixStore, StoreConfig, baked_prefixes
from edgekv.prefix.block import SNAPSHOT
from edgekv.prefix.prefixes import prefix_fingerprint
from edgekv.spec import CHECKPOINT_TOKENS
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from exporters.htp.check import floating_nodes
from exporters.quantize.reference import Reference
from exporters.quantize.sink_request import SinkRequest
from exporters.targets.aihub.sample import take_sample
from tests.support.bundles import Oracle, with_drafts
from tests.support.checkpoints import ARCHITECTURES, WINDOW, write_checkpoint
from tests.support.exports import export_options, exported
from tests.support.thorough import calls, variants

CONTEXT = 160
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon."
KINDS = ("lfm2", "lfm2_moe", "lfm3", "qwen3_5", "granite4-h")
LONG = SamplingParams(max_new_tokens=24, ignore_eos=True)


def hybrid(folder: Path, name: str = "lfm2", **options: Any) -> Path:
    checkpoint = write_checkpoint(folder / "checkpoint", ARCHITECTURES[name], gain=1.0)
    chosen = {"context": (64, CONTEXT), "ar": (1, 16), "draft_rows": (4, 8), **options}
    return exported(checkpoint, export_options(**chosen))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three layers of four with convolutions of 3; verify graphs of 4 and 8 rows in contexts of 64 and 160."""
    return hybrid(tmp_path_factory.mktemp("hybrid"))


def same(found: CacheState, expected: CacheState) -> bool:
    """The same tokens, and the same bits of every row and state."""
    return found.positions == expected.positions and all(
        np.array_equal(found.rows[name], rows) for name, rows in expected.rows.items()
    )


def ids(generation: Any) -> list[int]:
    return [token.id for token in generation]


def test_a_graph_reads_the_state_and_gives_a_row_for_each_token(bundle: Path) -> None:
    manifest = open_bundle(bundle).manifest
    for graph in manifest.graphs:
        ports = manifest.interface.graph(graph)
        assert ports["conv_state_0_in"].shape == (1, 1, 2, 64)
        assert ports["conv_state_0_out"].shape == (1, 1, graph.ar, 64)
        assert ("conv_rows" in ports) is (graph.role == "verify")
    assert [
        each for each in ports.inputs if "_2_" in each.name and "state" not in each.name
    ]  # the layer with attention


@pytest.mark.parametrize(
    ("name", "bits", "tokens"),
    [("lfm2", 16, 60), ("lfm2", 8, 60), ("lfm2-adjusted", 16, 60), ("lfm2_moe", 16, 60), ("lfm3", 16, WINDOW)],
)
def test_every_split_of_a_text_into_steps_gives_the_bits_of_one(
    tmp_path: Path, name: str, bits: int, tokens: int
) -> None:
    """Windows shorter and longer than the kernel, and padded ones: AR-16 graphs run 1 to 16 tokens."""
    with edgekv.load(hybrid(tmp_path, name, state_bits=bits), cpu_mode="emulate") as model:
        (logits, state), *others = after_splits(model.session, tokens)
    for found, cache in others:
        assert np.array_equal(found, logits) and same(cache, state)


def test_splits_change_the_order_of_sums_alone_where_layers_have_dropped_rows(tmp_path: Path) -> None:
    with edgekv.load(hybrid(tmp_path, "lfm3", state_bits=16), cpu_mode="emulate") as model:
        (logits, state), *others = after_splits(model.session, 60)
    for found, cache in others:
        assert cache.positions == state.positions
        for name, wanted in {**state.rows, "logits": logits}.items():
            values = {**cache.rows, "logits": found}[name]
            assert abs(values.astype(np.int64) - wanted).max() <= (8 if values.itemsize > 1 else 1), name


def after_splits(session: Session, tokens: int) -> list[tuple[NDArray[Any], CacheState]]:
    """Logits and cache after one text that ran in steps of several sizes; first, token by token."""
    text, found = np.random.default_rng(0).integers(3, 250, tokens).tolist(), []
    for sizes in ([1] * 60, [16, 16, 16, 12], [2] * 30, [5, 1, 13, 3, 7, 16, 15]):
        session.reset()
        steps = iter(text)
        for step in takewhile(bool, ([*islice(steps, size)] for size in sizes)):
            logits = session.feed(step).copy()
        found.append((logits, session.cache.state))
    return found


def test_the_step_for_ai_hub_has_the_state_after_its_text(bundle: Path) -> None:
    opened = open_bundle(bundle)
    (graph,) = [each for each in opened.manifest.graphs if (each.role, each.context) == ("decode", CONTEXT)]
    sample = take_sample(opened, graph, TEXT)
    with edgekv.load(bundle, cpu_mode="emulate") as model:
        (tokens,) = sample.inputs["input_ids"]
        text = opened.tokenizer().encode(TEXT).ids[:33]
        assert tokens.tolist() == text[32:]
        assert np.array_equal(model.session.feed(text), sample.outputs["logits"][0, -1])


def test_the_rows_of_a_sink_are_states_too(tmp_path: Path) -> None:
    """A sink shorter than a state, and a longer one."""
    text = [256, *range(40, 60)]
    for count in (1, 3):
        sink = SinkRequest("tokens", tuple(text[:count]))
        with edgekv.load(hybrid(tmp_path / str(count), sink=sink), cpu_mode="emulate") as model:
            assert model.cache.tokens_seen == count
            found = model.bundle.manifest.encodings["logits"].dequantize(model.session.feed(text[count:]))
        checkpoint = Checkpoint.open(str(tmp_path / str(count) / "checkpoint"))
        (wanted,) = Reference(checkpoint, CONTEXT).logits([np.array(text)])
        assert np.square(wanted[-1]).sum() > 10**2 * np.square(found - wanted[-1]).sum()


def test_keys_as_columns_change_no_bit(bundle: Path, tmp_path: Path) -> None:
    prompt = [*range(40, 60)]
    with edgekv.load(bundle, cpu_mode="emulate") as rows:
        wanted = ids(rows.generate(prompt, LONG))
    with edgekv.load(hybrid(tmp_path, key_layout="columns"), cpu_mode="emulate") as columns:
        assert ids(columns.generate(prompt, LONG)) == wanted


@pytest.mark.numpy1
@pytest.mark.parametrize(
    ("name", "kv_dtype", "bits"),
    variants([("lfm2", "s8", 16), ("lfm3", "s16", 16), ("lfm2", "s16", 8)], [("lfm2", "s8", 16), ("lfm3", "s16", 16)]),
)
def test_tflite_graphs_of_both_runtimes_compute_states(tmp_path: Path, name: str, kv_dtype: str, bits: int) -> None:
    options = {"graph_format": "tflite", "kv_dtype": kv_dtype, "state_bits": bits, "context": 64, "draft_rows": ()}
    bundle = hybrid(tmp_path, name, **options)
    checkpoint = Checkpoint.open(str(tmp_path / "checkpoint"))
    tokens = [256, *checkpoint.encode("The quick brown fox jumps over the lazy dog")]
    (wanted,) = Reference(checkpoint, 64).logits([np.array(tokens)])
    for engine in ("litert", "tflite"):
        found = edgekv.load(bundle, engine).score(tokens)
        assert np.square(wanted).sum() > 10**2.4 * np.square(found - wanted).sum()


@pytest.mark.parametrize("strategy", ["pointer-shift"])
@pytest.mark.parametrize("growth", ["staggered", "together"])
def test_layers_with_attention_grow_beside_states(bundle: Path, strategy: str, growth: str) -> None:
    prompt = [*range(40, 60)]
    params = SamplingParams(max_new_tokens=80, ignore_eos=True)
    with (
        edgekv.load(bundle, cpu_mode="emulate") as fixed,
        edgekv.load(bundle, cpu_mode="emulate", kv_update=strategy, kv_growth=growth) as growing,
    ):
        assert ids(growing.generate(prompt, params)) == ids(fixed.generate(prompt, params))


@pytest.mark.parametrize(
    ("mode", "strategy"), [("emulate", "slot"), *product(["emulate", "exact16", "fast"], ["pointer-shift"])]
)
def test_rejected_drafts_leave_no_trace(bundle: Path, mode: str, strategy: str) -> None:
    prompt = [*range(40, 60)]
    with edgekv.load(bundle, cpu_mode=mode, kv_update=strategy) as model:
        plain = ids(model.generate(prompt, LONG))
        wanted = model.cache.state
        for seed in range(2):
            drafter = Oracle(prompt + plain, model.bundle.manifest.model.vocab, seed, 0.7)
            with with_drafts(model, prompt, LONG, Speculation(drafter=drafter)) as generation:
                assert ids(generation) == plain
            assert generation.stats.speculation.accepted > 5  # type: ignore[union-attr]
            assert same(model.cache.state, wanted)


@pytest.mark.parametrize("mode", variants(["emulate", "exact16", "fast"], ["fast"]))
def test_the_modes_of_the_cpu_compute_wide_kernels_and_gates(tmp_path: Path, mode: str) -> None:
    bundle, tokens = hybrid(tmp_path, "lfm3"), [256, *range(40, 120)]
    (wanted,) = Reference(Checkpoint.open(str(tmp_path / "checkpoint")), CONTEXT).logits([np.array(tokens)])
    with edgekv.load(bundle, cpu_mode=mode) as model:
        assert np.square(wanted).sum() > 10**2 * np.square(model.score(tokens) - wanted).sum()


@pytest.mark.htp
@pytest.mark.slow
@pytest.mark.parametrize("name", variants(["lfm2", "lfm3"], ["lfm3"]))
def test_every_graph_is_integers_alone_on_the_htp(tmp_path: Path, name: str) -> None:
    bundle = hybrid(tmp_path, name)
    files = [bundle / f"{graph}.onnx.gz" for graph in ("ar1_cl160", "ar16_cl160", "ar8_cl160_verify")]
    assert not floating_nodes(files, find("SM8650"))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants(KINDS, ["lfm3"]))
def test_two_parts_give_the_bits_of_one(tmp_path: Path, name: str) -> None:
    whole, divided = (hybrid(tmp_path / str(count), name, splits=count) for count in (1, 2))
    text = [*range(40, 130)]
    with edgekv.load(whole, cpu_mode="emulate") as one, edgekv.load(divided, cpu_mode="emulate") as two:
        assert len(two.bundle.manifest.graphs[0].parts) == 3  # with the head
        assert np.array_equal(one.session.feed(text), two.session.feed(text))
        assert same(two.session.cache.state, one.session.cache.state)
        assert ids(two.generate(text, LONG)) == ids(one.generate(text, LONG))


@pytest.mark.parametrize("name", KINDS)
def test_a_saved_sequence_goes_on_as_one_that_was_not(tmp_path: Path, name: str) -> None:
    """In another process, as far as the cache is concerned; beyond a checkpoint of a gated delta rule or Mamba-2."""
    bundle, file, text = hybrid(tmp_path, name), tmp_path / "saved", [*range(40, 115)]
    with edgekv.load(bundle, cpu_mode="emulate") as model:
        ids(model.generate(text, 8, sequence=1))
        held = save_sequence(model.engine, 1, file)
        session = model.sequences.get(1)
        assert session is not None and held > len(text)
        with edgekv.load(bundle, cpu_mode="emulate") as later:
            assert load_sequence(later.engine, 2, file) == held
            restored = later.sequences.get(2)
            assert restored is not None and same(restored.cache.state, session.cache.state)
            longer = [*session.tokens, 5, 6, 7]
            resumed = later.generate(longer, LONG, sequence=2)
            assert ids(resumed) == ids(model.generate(longer, LONG, sequence=1))
            assert resumed.stats.cache.reused_tokens > CHECKPOINT_TOKENS - 1


@pytest.mark.parametrize("name", KINDS)
def test_a_plan_of_a_checkpoint_counts_the_memory_that_its_cache_holds(tmp_path: Path, name: str) -> None:
    """By `slot`, which the HTP takes."""
    manifest = open_bundle(hybrid(tmp_path, name, key_layout="columns")).manifest
    encodings = [manifest.encodings[tensor.past] for tensor in manifest.cache_geometry.names()]
    cache = KVCache(manifest.cache_geometry, ar=(1, 16), strategy="slot", encodings=encodings)
    planned = make_plan(tmp_path / "checkpoint", find("SM8650"), PlanOptions(context=CONTEXT, ar=(1, 16)))
    assert planned.demand.cache_bytes == cache.bytes_held


def branching(text: list[int], tokens: list[int], seed: int, vocab: int) -> DraftTree:
    """The right next tokens, with wrong branches among them and before them."""
    random = np.random.default_rng([seed, len(tokens)])
    ahead = text[len(tokens) : len(tokens) + 3]
    drafts, parents, last = [int(random.integers(vocab))], [-1], -1
    for token in ahead:
        drafts.append(token)
        parents.append(last)
        last = len(drafts) - 1
        drafts.append((token + 1) % vocab)
        parents.append(last)
    return DraftTree(tuple(drafts), tuple(parents))


@pytest.mark.htp
@pytest.mark.parametrize(
    ("name", "bits"), variants([("lfm2", 16), ("lfm2", 8), ("lfm2_moe", 16), ("lfm3", 16)], [("lfm2", 16)])
)
def test_the_branches_of_a_tree_read_their_own_ancestors(tmp_path: Path, name: str, bits: int) -> None:
    """On the HTP emulator, where trees are verified: rows of a kernel skip the rows of other branches."""
    prompt = [*range(40, 52)]
    with edgekv.load(hybrid(tmp_path, name, state_bits=bits), engine="htp") as model:
        vocab, params = model.bundle.manifest.model.vocab, SamplingParams(max_new_tokens=12, ignore_eos=True)
        plain = ids(model.generate(prompt, params))
        wanted, text = model.cache.state, prompt + plain

        class Branches:
            name = "branches"

            def propose(self, tokens: Any, k: int) -> DraftTree:
                tree = branching(text, list(tokens), 0, vocab)
                return tree if len(tree) <= k else DraftTree.chain(text[len(tokens) :][:k])

            def accepted(self, n: int) -> None:
                pass

        with with_drafts(model, prompt, params, Speculation(drafter=Branches())) as generation:
            assert ids(generation) == plain
        assert generation.stats.speculation.accepted >= 6  # type: ignore[union-attr]
        assert same(model.cache.state, wanted)


def test_rows_of_several_texts_in_one_window_are_refused(bundle: Path) -> None:
    with edgekv.load(bundle) as model, pytest.raises(UsageError, match="num_beams: got layers with states"):
        model.generate("text", 4, num_beams=2)


def random_calls(plain: edgekv.Model, model: edgekv.Model, count: int, params: SamplingParams) -> int:
    """Texts that continue, repeat and cut each other, with drafts or without; returns the tokens not run again."""
    random = np.random.default_rng(0)
    vocab, texts, saved = 250, [random.integers(3, 250, 40).tolist()], 0
    for call in range(count):
        text = list(texts[random.integers(len(texts))])
        text = text[: int(random.integers(1, len(text) + 1))]
        text += random.integers(3, vocab, random.integers(0, 30)).tolist()
        text = text[: CONTEXT - params.max_new_tokens - 2]
        wanted = ids(plain.generate(text, params))
        state = plain.cache.state
        drafter = Oracle(text + wanted, vocab, call, float(random.random()))
        sequence = int(random.integers(3)) or None
        with with_drafts(
            model, text, params, Speculation(drafter=drafter) if call % 2 else None, sequence=sequence
        ) as generation:
            assert ids(generation) == wanted, call
        session = model.session if sequence is None else model.sequences.get(sequence)
        session.settle()
        assert same(session.cache.state, state), call
        saved += generation.stats.cache.reused_tokens + generation.stats.cache.restored_tokens
        texts = [*texts[-4:], text + wanted]
    return saved


@pytest.mark.parametrize(
    ("name", "strategy"),
    [("lfm2", "slot"), ("lfm2", "pointer-shift"), ("lfm2_moe", "slot"), ("lfm3", "pointer-shift")],
)
def test_prefixes_rewinds_and_drafts_change_no_bit(tmp_path: Path, name: str, strategy: str) -> None:
    config, bundle = StoreConfig(tokens_per_block=16, max_bytes=1 << 22), hybrid(tmp_path, name)
    options = {"cpu_mode": "emulate", "kv_update": strategy}
    params = SamplingParams(max_new_tokens=8, ignore_eos=True)
    with edgekv.load(bundle, **options) as plain, edgekv.load(bundle, prefix_cache=config, **options) as model:
        assert random_calls(plain, model, calls(20), params) > 100


@pytest.mark.slow
@pytest.mark.htp
@pytest.mark.parametrize("name", variants(["lfm2", "lfm3"], ["lfm3"]))
def test_prefixes_rewinds_and_drafts_change_no_bit_on_the_htp(tmp_path: Path, name: str) -> None:
    config, params = (
        StoreConfig(tokens_per_block=16, max_bytes=1 << 22),
        SamplingParams(max_new_tokens=8, ignore_eos=True),
    )
    bundle = hybrid(tmp_path, name)
    with edgekv.load(bundle, "htp") as plain, edgekv.load(bundle, "htp", prefix_cache=config) as model:
        assert random_calls(plain, model, 8, params) > 60


def test_a_stored_state_that_does_not_fit_is_rejected_and_computed_again(bundle: Path) -> None:
    """As of a file with a valid checksum that whoever has the folder's secret has written."""
    text = [*range(3, 60)]
    with edgekv.load(bundle, prefix_cache=StoreConfig(tokens_per_block=16)) as model:
        wanted = ids(model.generate(text, LONG))
        store = model.prefix_store
        assert store is not None
        for block in store._memory:
            if block.part == SNAPSHOT:
                block.arrays = {"other": np.zeros(3, np.uint8)}
        again = model.generate(text, LONG)
        assert (ids(again), again.stats.cache.restored_tokens) == (wanted, 0)
        assert store.stats.rejected_files > 0
        third = model.generate(text, LONG)
        assert (ids(third), third.stats.cache.restored_tokens > 0) == (wanted, True)


@pytest.mark.parametrize(("has_states", "snapshots"), [(True, False), (False, True)])
def test_a_store_of_prefixes_without_the_models_states_is_refused(
    bundle: Path, small: Path, has_states: bool, snapshots: bool
) -> None:
    path = bundle if has_states else small
    manifest = open_bundle(path).manifest
    fingerprint = prefix_fingerprint(manifest, "cpu")
    store = PrefixStore(manifest.cache_geometry, StoreConfig(), fingerprint=fingerprint, snapshots=snapshots)
    with pytest.raises(UsageError, match=f"prefix_cache: got a store of another bundle.* and snapshots={has_states}"):
        edgekv.load(path, cpu_mode="emulate", prefix_cache=store)
    assert store.stats.blocks_inserted == 0


def test_a_baked_prefix_ends_with_the_states_after_it(bundle: Path, tmp_path: Path) -> None:
    """It is used, and one without its states is refused."""
    baked, text = shutil.copytree(bundle, tmp_path / "bundle"), "The quick brown fox jumps over the lazy dog. "
    bake_prefix(baked, text, "head")
    with edgekv.load(bundle) as plain, edgekv.load(baked) as model:
        prompt = [*model.tokenizer.encode(text).ids, 40, 41]
        wanted = ids(plain.generate(prompt, LONG))
        generation = model.generate(prompt, LONG)
        assert ids(generation) == wanted
        assert generation.stats.cache.restored_tokens >= len(prompt) - 2
        model.session.settle()
    (entry,) = baked_prefixes(baked)
    file = baked / "prefixes" / entry.file
    held = decode_tensors(file.read_bytes())
    content = encode_tensors({name: each for name, each in held.arrays.items() if not name.startswith("state/")})
    file.write_bytes(content)
    record = baked / "prefixes" / "prefixes.json"
    changed = json.loads(record.read_text())
    changed["prefixes"][0] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    record.write_text(json.dumps(changed))
    with pytest.raises(BundleError, match=r"states: got \[\]; expected those of the model"):
        edgekv.load(baked)


def test_a_kernel_beyond_the_context_and_tensors_of_other_layers_are_refused(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["lfm2"])
    options = export_options(context=3, ar=(1,))
    with pytest.raises(UsageError, match="--context: got 3; expected more than 3, the kernel of"):
        export_bundle(Checkpoint.open(str(checkpoint)), tmp_path / "bundle", options)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.layers.0.self_attn.q_proj.weight"] = np.zeros((64, 64), np.float32)  # of a layer with a convolution
    save_file(tensors, checkpoint / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.self_attn\.q_proj"):
        Checkpoint.open(str(checkpoint))
    assert not (tmp_path / "bundle").exists()
