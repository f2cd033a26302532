import json
import sys
from dataclasses import replace
from fractions import Fraction

import msgspec
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from devices import find
from edgekv.bundle import (
    FORMAT,
    FileRecord,
    GraphRecord,
    Manifest,
    SourceRecord,
    TokenRecord,
    write_manifest,
)
from edgekv.cli.size import size
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.kv import DEFAULT_STRATEGY, STRATEGIES, KVCache
from edgekv.plan import (
    HTP_CONTEXT_BYTES,
    MemoryLimit,
    Overrides,
    SizeReport,
    Subject,
    find_subject,
    make_size_report,
)
from edgekv.plan.cache import CHOICES, count_addresses, estimate, strategy_cost
from edgekv.plan.fit import check_cache_type
from edgekv.plan.size import GeometryRecord
from edgekv.spec import ConvolutionStates, DecoderSpec, LayeredGeometry, Rope, RowSpec
from quant import Encoding
from tests.support.bundles import int8_recipe, places_in_one_file
from tests.support.picture_models import write_smolvlm
from tests.support.thorough import at_most

NOTE = RowSpec(layers=32, kv_heads=32, head_dim=128, window=2048, kv_dtype="s16")
LLAMA_1B = {
    "model_type": "llama",
    "num_hidden_layers": 16,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}

geometries = st.builds(
    RowSpec,
    layers=st.integers(1, 2),
    kv_heads=st.integers(1, 3),
    head_dim=st.integers(1, 40),
    window=st.integers(5, 40),
    kv_dtype=st.sampled_from(["u8", "s16"]),
)
layered = st.builds(
    LayeredGeometry,
    layers=st.integers(2, 3),
    context=st.integers(12, 40),
    kv_heads=st.just((2,)),
    head_dim=st.integers(1, 40).map(lambda columns: (columns,)),
    windows=st.lists(st.none() | st.integers(6, 50), min_size=1, max_size=3),
    kv_dtype=st.sampled_from(["u8", "s16"]),
)
hybrid = st.builds(
    lambda geometry, **sizes: replace(geometry, states=ConvolutionStates(**sizes)),
    layered,
    layers=st.sampled_from([frozenset({0}), frozenset({1})]),
    kernel=st.integers(2, 7),
    width=st.integers(1, 40),
    dtype=st.sampled_from(["u8", "u16"]),
)
larger_ar = st.integers(1, 4)
choices = st.sampled_from(CHOICES)


def cache_of(choice, geometry, ar):
    options = {} if choice.reserve is None else {"reserve": choice.reserve}
    return KVCache(geometry, ar=ar, strategy=choice.strategy, policy="sliding-window", **options)


def subject(geometry=NOTE, ar=(1, 32), weights_bytes=None):
    return Subject("a test", geometry, ar, weights_bytes, None, ())


def decode(cache, tokens):
    """Bytes copied by each of so many steps of one token."""
    copied = []
    for _ in range(tokens):
        before = cache.stats.bytes_copied
        cache.window(1)
        cache.commit(1)
        copied.append(cache.stats.bytes_copied - before)
    return copied


# The figures


def test_the_figures_of_the_note():
    slot, two, one_and_a_half, *_ = make_size_report(subject()).strategies
    assert (two.reserve, two.formula_bytes) == (2.0, 2_146_435_072)
    assert (one_and_a_half.reserve, one_and_a_half.formula_bytes) == (1.5, 1_609_826_304)
    assert slot.formula_bytes is None


@given(geometries)
def test_the_formula_of_the_note_for_any_geometry(geometry):
    bits = 8 * geometry.element_bytes
    rows = geometry.layers * geometry.kv_heads * (geometry.context - 1) * geometry.head_dim * bits
    formulas = {choice.reserve: choice.formula_bytes(geometry) for choice in CHOICES if choice.reserve}
    assert formulas == {Fraction(2): 2 * 2 * rows // 8, Fraction(3, 2): 3 * rows // 8}


def test_strategies_of_the_runtime_are_sized_and_the_default_stands_first():
    assert {choice.strategy for choice in CHOICES} == set(STRATEGIES)
    assert CHOICES[0].label == DEFAULT_STRATEGY == "slot"


def cost_of(choice, geometry, ar):
    strategies = make_size_report(subject(geometry, ar)).strategies
    return next(cost for cost, each in zip(strategies, CHOICES, strict=True) if each == choice)


@given(geometries | layered | hybrid, larger_ar, choices)
def test_what_is_held_is_what_a_cache_allocates(geometry, max_ar, choice):
    ar = tuple(sorted({1, max_ar}))
    each, cache = cost_of(choice, geometry, ar), cache_of(choice, geometry, ar)
    assert each.held_bytes == choice.held_bytes(geometry, ar) == cache.stats.bytes_held
    assert each.held_bytes <= sum(choice.layer_bytes(geometry, ar)) < each.held_bytes + geometry.layers
    assert each.formula_bytes is None or each.formula_bytes < each.held_bytes
    if len(cache.arenas) == 1:
        assert each.stride_bytes * (geometry.tensors - 1) == cache.arena.addresses[-1] - cache.arena.addresses[0]
        assert cache.arena.array.shape[1] in (each.rows_per_tensor, 2 * each.rows_per_tensor)  # twice if mapped twice


@pytest.mark.slow
@given(geometries | layered | hybrid, larger_ar, choices)
@at_most(50)
def test_what_is_copied_is_what_a_cache_copies(geometry, max_ar, choice):
    ar = tuple(sorted({1, max_ar}))
    each, cache = cost_of(choice, geometry, ar), cache_of(choice, geometry, ar)
    filling = decode(cache, geometry.context - 1)
    sliding = decode(cache, 10 * geometry.context)
    copied = filling + sliding
    assert each.filling_bytes_per_token == pytest.approx(sum(filling) / len(filling))
    # A generation that ends within a period is off by less than the copies of two periods.
    slack = 2 * max(each.sliding_bytes_per_token * 3 * geometry.context, each.worst_step_bytes) / len(sliding)
    assert each.sliding_bytes_per_token == pytest.approx(sum(sliding) / len(sliding), abs=slack)
    assert each.tokens_before_copy == next((i for i, bytes_copied in enumerate(copied) if bytes_copied), None)
    assert max(copied) <= each.worst_step_bytes


@given(
    geometries | layered | hybrid,
    larger_ar,
    choices,
    st.lists(st.tuples(st.booleans(), st.integers(1, 4)), max_size=80),
)
@at_most(50)
def test_no_step_copies_more_than_the_worst(geometry, max_ar, choice, steps):
    ar = tuple(sorted({1, max_ar}))
    each, cache = cost_of(choice, geometry, ar), cache_of(choice, geometry, ar)
    for large, tokens in steps:
        before, step = cache.stats.bytes_copied, max_ar if large else 1
        cache.window(step)
        cache.commit(min(tokens, step))
        assert cache.stats.bytes_copied - before <= each.worst_step_bytes


@given(geometries, larger_ar, choices)
def test_keys_as_columns_are_sized_too(geometry, max_ar, choice):
    columns, ar = replace(geometry, key_layout="columns"), tuple(sorted({1, max_ar}))
    report = make_size_report(subject(columns, ar))
    labels = [each.label for each in report.strategies]
    each, cache = report.strategies[labels.index(choice.label)], cache_of(choice, columns, ar)
    assert each.held_bytes == cache.stats.bytes_held
    filling = decode(cache, geometry.context - 1)
    assert each.filling_bytes_per_token == pytest.approx(sum(filling) / len(filling))


def test_reserve_two_copies_nothing_for_a_context_and_then_a_row_a_token():
    slot, two, one_and_a_half, *_ = make_size_report(subject(ar=(1,))).strategies
    row_bytes = NOTE.tensors * NOTE.row_bytes
    assert two.tokens_before_copy == 2048 and two.filling_bytes_per_token == 0
    assert two.sliding_bytes_per_token == pytest.approx(row_bytes * 2047 / 2048)
    assert two.worst_step_bytes == one_and_a_half.worst_step_bytes == 2047 * row_bytes
    assert one_and_a_half.filling_bytes_per_token > 0
    assert slot.sliding_bytes_per_token == slot.worst_step_bytes == row_bytes


def test_a_slide_costs_less_often_with_more_reserve():
    two, one_and_a_half = make_size_report(subject(ar=(1,))).strategies[1:3]
    assert one_and_a_half.sliding_bytes_per_token == pytest.approx(2 * two.sliding_bytes_per_token, rel=0.01)


def test_graph_ports_and_bindings():
    report = make_size_report(subject())
    decode_graph, prefill = report.graphs
    assert (decode_graph.inputs, decode_graph.outputs) == (4 + 2048, 1 + 2048)
    assert (prefill.inputs, prefill.outputs, prefill.kv_inputs) == (5 + 2048, 1 + 2048, 2048)
    assert [each.rebound_tensors_per_step for each in report.strategies][:3] == [0, 2 * 2048, 2 * 2048]


@given(geometries, larger_ar, choices, st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=200))
@at_most(60)
def test_no_generation_meets_an_address_that_was_not_counted(geometry, max_ar, choice, steps):
    ar = tuple(sorted({1, max_ar}))
    cache = cache_of(choice, geometry, ar)
    met = {each: (set(), set()) for each in ar}
    for large, tokens in steps:
        (window,) = cache.window(max_ar if large else 1)
        met[window.ar][0].add(window.past_row)
        met[window.ar][1].add(window.new_row)
        cache.commit(min(tokens, window.ar))
    for each, ends in met.items():
        counted = count_addresses(geometry, choice, max_ar, each)
        assert sum(map(len, ends)) <= counted


def test_states_are_not_counted_as_keys_or_columns():
    states = ConvolutionStates(frozenset({0, 2}), 3, 16)
    rows = LayeredGeometry(4, 64, (1,), (8,), states=states)
    columns = replace(rows, key_layout="columns")
    for choice in CHOICES:
        of_states = [count_addresses(each.groups()[0], choice, 4, 1) for each in (rows, columns)]
        assert of_states[0] == of_states[1]
        added = [strategy_cost(choice, each, (1, 4)).sliding_bytes_per_token for each in (rows, columns)]
        assert added[1] - added[0] == (16 if choice.strategy in ("pointer-shift", "mirror") else 0)  # 2 keys of 8 bytes
    record = GeometryRecord.of(rows)
    assert (record.kv_heads, record.head_dim, record.kv_bits) == (1, 8, 8)
    assert [(each.layers, each.window) for each in record.windows] == [(2, 64)]
    refused = replace(rows, kv_dtype="s16", states=replace(states, dtype="u8"))
    with pytest.raises(UsageError, match="cache of 16 bits"):
        check_cache_type(refused, find("SM8450"))


def test_pointer_shift_registers_an_address_for_each_position_and_slot_one():
    # ExecuTorch's issue 4517: 144 heads of keys and as many of values, 128 positions, 55,444 registered tensors; there
    # the new keys have one address, so three of our four moving ends count: 144 x 128 x 3, and 148 that do not move.
    heads = RowSpec(layers=12, kv_heads=12, head_dim=64, window=128)
    slot, two, *_ = make_size_report(subject(heads, ar=(1,))).strategies
    assert two.registered_addresses == heads.tensors * 128 * 2 == 73_728
    assert two.registered_addresses * 3 // 4 == 144 * 128 * 3 == 55_444 - 148
    assert slot.registered_addresses == heads.tensors * 2


@pytest.mark.parametrize("device", [None, find("SM8650")])
def test_the_recommendation_is_the_default_and_follows_from_the_table(device):
    report = make_size_report(subject(), device=device)
    best = report.recommendation
    assert best.strategy == DEFAULT_STRATEGY == report.strategies[0].strategy
    assert report.strategies[0].registered_addresses == min(each.registered_addresses for each in report.strategies)
    assert best.reason.startswith("slot: 8,192 addresses to register, 0 tensors to bind again at each step, 524,288")
    assert "mirror copies 0, but has" in best.reason


def test_the_recommendation_fits_if_any_does():
    report = make_size_report(subject(), limit=MemoryLimit(1_090_519_100, "a test"))
    best = report.recommendation
    fitting = [(each.strategy, each.reserve) for each in report.strategies if each.fits]
    assert not report.strategies[0].fits and (best.strategy, best.reserve) in fitting
    assert "none fits" in make_size_report(subject(), limit=MemoryLimit(1, "a test")).recommendation.reason


# The table of ZigLlama's page on its KV cache, in float32; its GB are 2^30 bytes.
@pytest.mark.parametrize(
    ("layers", "kv_heads", "tokens", "gib"),
    [(32, 32, 2048, "2.0"), (32, 32, 4096, "4.0"), (40, 40, 2048, "3.1"), (32, 8, 4096, "1.0")],
    ids=["LLaMA-7B", "LLaMA-7B, 4096", "LLaMA-13B", "Mistral-7B"],
)
def test_the_table_of_zigllama(layers, kv_heads, tokens, gib):
    size_bytes = estimate(layers=layers, kv_heads=kv_heads, head_dim=128, tokens=tokens)
    assert size_bytes == 2 * layers * kv_heads * 128 * tokens * 4
    assert f"{size_bytes / 2**30:.1f}" == gib
    assert estimate(layers=layers, kv_heads=kv_heads, head_dim=128, tokens=tokens, sequences=3) == 3 * size_bytes


@given(geometries)
def test_the_estimate_is_what_slot_holds_without_its_scratch(geometry):
    (slot,) = [each for each in make_size_report(subject(geometry, ar=(1,))).strategies if each.strategy == "slot"]
    g = geometry
    sizes = {"layers": g.layers, "kv_heads": g.kv_heads, "head_dim": g.head_dim, "tokens": g.context}
    assert estimate(**sizes, element_bytes=g.element_bytes) == slot.rows_per_tensor * g.row_bytes * g.tensors


def test_an_estimate_of_nothing_is_refused():
    with pytest.raises(ValueError, match="kv_heads: got 0"):
        estimate(layers=1, kv_heads=0, head_dim=64, tokens=16)


# Where sizes come from


def write_config(folder, **changes):
    config = {name: value for name, value in {**LLAMA_1B, **changes}.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(config))
    return folder / "config.json"


def test_a_config_gives_the_sizes_and_every_assumption_is_said(tmp_path):
    found = find_subject(write_config(tmp_path), Overrides(context=4096))
    assert found.geometry == RowSpec(
        layers=16, kv_heads=8, head_dim=64, window=4096, kv_dtype="u8", key_layout="columns"
    )
    assert found.ar == (1, 32)
    assert find_subject(tmp_path, Overrides(context=4096, kv_bits=8, ar=(32, 1))).geometry == found.geometry
    said = " ".join(found.assumptions)
    assert "8 bits" in said and "AR 1,32" in said and "w8a16" in said and "columns, the default" in said
    # 1,235,814,400 parameters if the head were tied; table and head have 8 bits each.
    assert found.weights_bytes == pytest.approx(1_235_814_400 + 128256 * 2048, rel=0.01)


def test_older_configs_fall_back(tmp_path):
    path = write_config(tmp_path, num_key_value_heads=..., head_dim=None)
    found = find_subject(path, Overrides())
    assert (found.geometry.kv_heads, found.geometry.head_dim, found.geometry.context) == (32, 64, 131072)
    assert sum("num_attention_heads" in sentence for sentence in found.assumptions) == 2


def test_newer_configs_nest_the_text_decoder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vlm", "text_config": LLAMA_1B}))
    assert find_subject(tmp_path, Overrides()).geometry.layers == 16


def test_an_unknown_architecture_has_unknown_weights(tmp_path):
    same = {"v_head_dim": 64, "num_kv_shared_layers": 0, "is_encoder_decoder": False}
    found = find_subject(write_config(tmp_path, model_type="mixtral", **same), Overrides())
    assert found.weights_bytes is None and "weights unknown" in " ".join(found.assumptions)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_hidden_layers": ...}, "num_hidden_layers: got nothing"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": [8, 4]}, "num_key_value_heads"),
        ({"kv_lora_rank": 512}, "kv_lora_rank.*latent attention"),
        ({"layer_types": ["full_attention"] * 15 + ["linear_attention"]}, "linear_attention"),
        ({"model_type": "jamba", "attn_layer_period": 8}, "model_type: got 'jamba'.*without Mamba layers.*--kv-heads"),
        ({"model_type": "mllama_text_model", "cross_attention_layers": [3]}, "cross_attention_layers: got .3."),
        ({"model_type": "falcon", "multi_query": True}, "multi_query"),
        ({"model_type": "mimo_v2_flash", "head_dim": 192, "v_head_dim": 128}, "v_head_dim: got 128; expected 192"),
        ({"model_type": "someones", "mamba_d_state": 16}, "mamba_d_state"),
    ],
)
def test_a_config_that_cannot_be_sized_is_refused(tmp_path, changes, field):
    with pytest.raises(CheckpointError, match=field):
        find_subject(write_config(tmp_path, **changes), Overrides())


def test_a_path_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="nothing there"):
        find_subject(tmp_path / "nowhere", Overrides())
    with pytest.raises(CheckpointError, match="a folder without"):
        find_subject(tmp_path, Overrides())
    for broken in ("", "{", "\x00", "[" * 100_000):
        (tmp_path / "config.json").write_text(broken)
        with pytest.raises(CheckpointError, match=r"config\.json"):
            find_subject(tmp_path, Overrides())


def test_missing_options_are_named_all_at_once():
    with pytest.raises(UsageError, match="no --kv-heads, --head-dim, --kv-bits;"):
        find_subject(None, Overrides(layers=2, context=64))


@pytest.mark.parametrize(
    ("option", "changes"),
    [
        ("--kv-bits", {"kv_bits": 4}),
        ("--kv-bits", {"kv_bits": 10**4000}),
        ("--layers", {"layers": 0}),
        ("--layers", {"layers": 10**9}),
        ("--kv-heads", {"kv_heads": 10**9}),
        ("--layers and --kv-heads", {"layers": 1 << 14, "kv_heads": 1 << 14}),
        ("--head-dim", {"head_dim": 10**9}),
        ("--context", {"context": 10**4000}),
        ("--ar", {"ar": tuple(range(1, 100))}),
        ("--context", {"context": 1}),
        ("--context", {"context": 1 << 40}),
        ("--ar", {"ar": (32,)}),
        ("--ar", {"ar": (1, 2048)}),
    ],
)
def test_an_impossible_option_is_refused(option, changes):
    good = Overrides(layers=2, kv_heads=2, head_dim=64, context=2048, kv_bits=8)
    assert find_subject(None, good).geometry.tensors == 8
    with pytest.raises(UsageError, match=option) as refused:
        find_subject(None, replace(good, **changes))
    assert len(str(refused.value)) < 300


@pytest.mark.thorough
@pytest.mark.slow
def test_the_largest_sizes_are_answered_at_once():
    largest = Overrides(layers=1 << 14, kv_heads=16, head_dim=1 << 14, context=1 << 20, kv_bits=16)
    report = make_size_report(find_subject(None, largest), device=find("SM8650"))
    assert not report.fit.fits and report.fit.largest_context is None
    smallest = Overrides(layers=1, kv_heads=1, head_dim=1, context=1 << 20, kv_bits=8)
    report = make_size_report(find_subject(None, smallest), limit=MemoryLimit.of_option(1e6))
    assert report.fit.fits and report.fit.largest_context == 1 << 20


@pytest.mark.parametrize("gigabytes", [0.0, -1.0, 1e-300, 1e300, float("inf"), float("nan")])
def test_a_limit_out_of_range_is_refused(gigabytes):
    with pytest.raises(UsageError, match="--budget-gb"):
        MemoryLimit.of_option(gigabytes)


def test_an_ar_at_or_above_an_attention_window_is_refused(tmp_path):
    path = write_config(tmp_path, model_type="mistral", sliding_window=32)
    with pytest.raises(UsageError, match=r"--ar: got 32 with an attention window of 32"):
        find_subject(path, Overrides(context=4096))
    assert find_subject(path, Overrides(context=4096, ar=(1, 16))).geometry.groups()[0].window == 32


def test_a_context_that_is_too_long_by_default_asks_for_one(tmp_path):
    with pytest.raises(UsageError, match=r"--context: got none, and max_position_embeddings = 10485760"):
        find_subject(write_config(tmp_path, max_position_embeddings=10485760), Overrides())


def test_an_option_that_contradicts_a_config_is_refused(tmp_path):
    path = write_config(tmp_path)
    assert find_subject(path, Overrides(layers=16, kv_bits=16)).geometry.kv_dtype == "s16"
    with pytest.raises(UsageError, match=r"--layers: got 32; expected 16"):
        find_subject(path, Overrides(layers=32))


def write_bundle(folder, context=64, limits=(), **changes):
    spec = DecoderSpec(
        model_type="llama",
        layers=2,
        hidden=8,
        heads=2,
        kv_heads=1,
        head_dim=4,
        intermediate=16,
        vocab=32,
        max_positions=128,
        eps=1e-5,
        tied_head=True,
        rope=Rope("default", 10000.0, 4, {}),
        query_gain=0.5,
        limits=limits,
    )
    geometry = RowSpec(layers=2, kv_heads=1, head_dim=4, window=context)
    activation, cache = Encoding("u16", 0.1, 32768), Encoding("u8", 0.1, 128)
    encodings = dict.fromkeys(
        ["embedding", "attention_mask", "position_ids_cos", "position_ids_sin", "logits"], activation
    )
    files = {"decode.onnx": 100, "prefill.onnx": 100, "weights.safetensors": 6000}
    manifest = Manifest(
        format=FORMAT,
        producer="a test",
        device="SM8650",
        recipe=int8_recipe(spec),
        kv_dtype="u8",
        key_layout="rows",
        context=context,
        htp_check="not-run",
        model=spec,
        tokens=TokenRecord(bos=None, eos=[0], pad=None),
        graphs=[
            GraphRecord.whole("decode", "decode.onnx", layers=2, ar=1, context=context, role="decode"),
            GraphRecord.whole("prefill", "prefill.onnx", layers=2, ar=16, context=context, role="prefill"),
        ],
        floating_nodes=[],
        encodings=encodings | {tensor.past: cache for tensor in geometry.names()},
        source=SourceRecord(checkpoint="none", weights_sha256="0" * 64, calibration="none", calibration_tokens=0),
        files={name: FileRecord(bytes=size_bytes, sha256="0" * 64) for name, size_bytes in files.items()},
        weights=places_in_one_file(spec, "weights.safetensors"),
    )
    write_manifest(folder, msgspec.structs.replace(manifest, **changes))
    return geometry


def test_a_bundle_gives_sizes_graphs_and_weights(tmp_path):
    geometry = write_bundle(tmp_path)
    found = find_subject(tmp_path, Overrides(kv_bits=8, context=64, ar=(1, 16)))
    assert (found.geometry, found.ar, found.weights_bytes, found.max_positions) == (geometry, (1, 16), 6000, 128)
    assert find_subject(tmp_path / "manifest.json", Overrides()) == found


def test_graphs_that_verify_drafts_are_named(tmp_path):
    """Also one with as many rows as a graph that prefills."""
    roles = ("decode", 1), ("prefill", 16), ("verify", 4), ("verify", 16)
    graphs = [
        GraphRecord.whole(f"{role}_{ar}", "decode.onnx", layers=2, ar=ar, context=64, role=role) for role, ar in roles
    ]
    write_bundle(tmp_path, graphs=graphs)
    report = make_size_report(find_subject(tmp_path, Overrides(ar=(1, 16))))
    assert [(each.role, each.ar) for each in report.graphs] == [*roles] and report.ar == [1, 16]
    decode, prefill, *verify = report.graphs
    assert [each.inputs for each in verify] == [decode.inputs] * 2 and prefill.inputs == decode.inputs + 1


def test_a_vision_encoder_is_sized(tmp_path):
    folder = write_smolvlm(tmp_path)
    report = make_size_report(find_subject(folder, Overrides(context=256)))
    assert report.encoder is not None and report.encoder.weights_bytes > report.encoder.parameters
    assert "Its vision encoder takes" in CliRunner().invoke(size, [str(folder), "--context", "256"]).output


def test_the_windows_and_the_key_layout_of_a_bundle_count(tmp_path):
    write_bundle(tmp_path, limits=(32, None))
    report = make_size_report(find_subject(tmp_path, Overrides()), device=find("SM8650"))
    assert [(each.layers, each.window) for each in report.geometry.windows] == [(1, 32), (1, 64)]
    assert report.strategies[0].held_bytes == 2 * 64 + 2 * ((32 + 16) + (64 + 16)) * 4
    write_bundle(tmp_path, key_layout="columns")
    columns = make_size_report(find_subject(tmp_path, Overrides()), device=find("SM8650"))
    assert any("keys as columns" in each for each in columns.assumptions)


def test_a_bundle_of_an_absurd_context_is_refused(tmp_path):
    write_bundle(tmp_path, context=1 << 21)
    with pytest.raises(BundleError, match=r"manifest.json: context: got 2097152; expected 2 to 1048576"):
        find_subject(tmp_path, Overrides())


@pytest.mark.parametrize("changes", [{"context": 128}, {"kv_bits": 16}, {"layers": 3}, {"ar": (1, 32)}])
def test_an_option_that_contradicts_a_bundle_is_refused(tmp_path, changes):
    write_bundle(tmp_path)
    (name,) = changes
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}: "):
        find_subject(tmp_path, Overrides(**changes))


def test_a_broken_bundle_is_refused(tmp_path):
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(BundleError):
        find_subject(tmp_path, Overrides())


# What fits


@given(choices, st.integers(1, 40), st.integers(2_000, 200_000), st.sampled_from([None, 0, 1_000, 150_000]))
def test_the_largest_context_fits_and_the_next_does_not(choice, max_ar, limit_bytes, weights_bytes):
    ar = tuple(sorted({1, max_ar}))
    given_subject = subject(RowSpec(1, 2, 8, 64), ar, weights_bytes)
    report = make_size_report(given_subject, limit=MemoryLimit(limit_bytes, "a test"))
    largest = report.strategies[CHOICES.index(choice)].largest_context
    room_bytes = limit_bytes - (weights_bytes or 0)

    def cache_bytes(context):
        return cache_of(choice, given_subject.geometry.in_context(context), ar).stats.bytes_held

    if largest is not None:
        assert largest % max_ar == 0 and cache_bytes(largest) <= room_bytes
    following = 2 * max_ar if largest is None else largest + max_ar
    assert cache_bytes(following) > room_bytes
    assert report.strategies[CHOICES.index(choice)].fits == (cache_bytes(64) <= room_bytes)


def test_the_limit_of_a_device_is_one_htp_context():
    report = make_size_report(subject(), device=find("SM8650"))
    assert report.demand.limit_bytes == HTP_CONTEXT_BYTES == 3_750_000_000
    assert report.demand.limit_basis == "one HTP context" and report.fit.fits
    assert report.summary.startswith("A context of 2,048 fits on SM8650 (V75), with slot: unknown weights and 1.09 GB")
    assert f"{report.fit.largest_context:,}" in report.summary


def test_what_does_not_fit_names_what_does():
    slot_bytes = 1_090_519_104
    report = make_size_report(subject(weights_bytes=HTP_CONTEXT_BYTES - slot_bytes + 1), device=find("SM8650"))
    assert not report.fit.fits and "does not fit" in report.summary
    assert f"It fits with --context {report.fit.largest_context} (the longest that fits)" in report.summary
    assert "or --kv-update mirror." in report.summary
    too_large = make_size_report(subject(weights_bytes=4_000_000_000), device=find("SM8650"))
    assert too_large.fit.largest_context is None and "No context fits" in too_large.summary


def test_a_sixteen_bit_cache_is_refused_before_v73():
    with pytest.raises(UsageError, match=r"SM8450 \(V69\).*--kv-bits 8"):
        make_size_report(subject(), device=find("SM8450"))


def test_without_a_device_or_limit_nothing_is_said_about_fit():
    report = make_size_report(subject())
    assert report.fit is None and report.summary is None and {each.fits for each in report.strategies} == {None}
    assert make_size_report(subject(), limit=MemoryLimit(1, "a test")).device is None


# The command

NOTE_OPTIONS = ["--layers", "32", "--kv-heads", "32", "--head-dim", "128", "--context", "2048", "--kv-bits", "16"]


def run(*arguments):
    return CliRunner().invoke(size, [*arguments])


def test_json_is_one_typed_object():
    result = run(*NOTE_OPTIONS, "--device", "8 Gen 3", "--json")
    report = msgspec.json.decode(result.stdout, type=SizeReport)
    assert report == make_size_report(find_subject(None, Overrides(32, 32, 128, 2048, 16)), device=find("SM8650"))
    found = json.loads(result.stdout)
    assert found["schema"] == 1 and found["strategies"][1]["formula_bytes"] == 2_146_435_072


def test_the_table_has_the_verdict_first_and_every_figure_whole():
    result = run(*NOTE_OPTIONS, "--device", "SM8650", "--budget-gb", "1.0")
    assert result.exit_code == 0
    assert "with slot. A context of 2,048 does not fit on SM8650" in " ".join(result.stdout.split())
    assert "2,146,435,072" in result.stdout and "1,609,826,304" in result.stdout
    assert "…" not in result.stdout
    assert "Assumed: graphs of AR 1,32, the default; weights unknown" in result.stdout


def test_a_config_and_a_bundle_from_the_command_line(tmp_path):
    report = msgspec.json.decode(run(str(write_config(tmp_path)), "--context", "512", "--json").stdout, type=SizeReport)
    assert (report.geometry.kv_heads, report.geometry.context) == (8, 512)
    write_bundle(tmp_path)
    report = msgspec.json.decode(run(str(tmp_path), "--json").stdout, type=SizeReport)
    assert report.ar == [1, 16]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--layers", "2"],
        [*NOTE_OPTIONS, "--device", "SM9999"],
        [*NOTE_OPTIONS, "--ar", "1,x"],
        [*NOTE_OPTIONS, "--ar", "1," + "9" * 5000],
        [*NOTE_OPTIONS, "--ar", ",".join(map(str, range(1, 1000)))],
        [*NOTE_OPTIONS, "--device", "Snapdragon X Plus"],
        [*NOTE_OPTIONS, "--budget-gb", "nan"],
        [*NOTE_OPTIONS, "--budget-gb", "1e400"],
        [*NOTE_OPTIONS, "--budget-gb", "0"],
        [*NOTE_OPTIONS, "--device", "SM8450"],
    ],
)
def test_wrong_usage_is_refused_and_prints_nothing(arguments):
    result = run(*arguments)
    assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2
    assert result.stdout == "" and len(str(result.exception)) < 1_000


@pytest.mark.parametrize("option", ["--layers", "--kv-heads", "--head-dim", "--context", "--kv-bits"])
@pytest.mark.parametrize("value", ["9" * 5000, "1e400", "nan"])
def test_what_is_no_number_is_refused(option, value):
    result = run(*NOTE_OPTIONS, option, value)
    assert result.exit_code == 2 and result.stdout == ""


@pytest.mark.slow
def test_a_plot_is_drawn_beside_the_report(tmp_path):
    result = run(*NOTE_OPTIONS, "--device", "SM8650", "--plot", str(tmp_path / "trade.png"))
    assert result.exit_code == 0 and "Choose slot" in result.stdout
    assert (tmp_path / "trade.png").read_bytes().startswith(b"\x89PNG")
    run(*NOTE_OPTIONS, "--plot", str(tmp_path / "trade.svg"))
    assert b"<svg" in (tmp_path / "trade.svg").read_bytes()


@pytest.mark.parametrize("name", ["trade.txt", "trade", "no/folder.png"])
def test_a_plot_that_cannot_be_written_is_refused(tmp_path, name):
    result = run(*NOTE_OPTIONS, "--plot", str(tmp_path / name))
    assert isinstance(result.exception, UsageError) and "--plot" in str(result.exception)
    assert list(tmp_path.iterdir()) == []


def test_without_matplotlib_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = run(*NOTE_OPTIONS, "--plot", str(tmp_path / "trade.png"))
    assert isinstance(result.exception, UsageError) and "pip install matplotlib" in str(result.exception)


def test_a_verdict_comes_first(tmp_path):
    result = run("--layers", 30, "--kv-heads", 3, "--head-dim", 64, "--context", 2048, "--kv-bits", 8)
    assert result.stdout.splitlines()[0] == "24.1 MB of cache for a context of 2,048 tokens, with slot."
    result = run(*NOTE_OPTIONS, "--device", "SM8650")
    assert " of cache for a context of 2,048 tokens, with slot. A context of 2,048 " in " ".join(result.stdout.split())


def test_a_broken_gguf_file_is_refused(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"model\.gguf"):
        find_subject(tmp_path / "model.gguf", Overrides())
