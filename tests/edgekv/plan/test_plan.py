import json
import re
import tracemalloc
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, strategies as st

from benchmarks.large_checkpoint import SHAPES
from devices import find, measured
from edgekv.bundle import PartRecord
from edgekv.cli import run as program
from edgekv.cli.plan import plan
from edgekv.errors import CheckpointError, UsageError
from edgekv.kv import DEFAULT_STRATEGY
from edgekv.machine.graph_file import graph_content
from edgekv.plan import (
    MASK_BYTES,
    PROTOBUF_BYTES,
    RECIPES,
    EncoderPlan,
    Load,
    Overrides,
    Plan,
    PlanOptions,
    activation_bytes,
    calibration_window,
    compile_bytes,
    default_calibration_tokens,
    export_cost,
    find_subject,
    lay_out,
    make_plan,
    make_size_report,
    mask_bytes,
    mask_warnings,
    min_splits,
    quantization_bytes,
)
from edgekv.plan.host_speed import HostSpeed, measure_host
from edgekv.spec import (
    ENCODERS,
    Config,
    Decoder,
    DecoderInterface,
    DecoderSpec,
    EncodingTypes,
    LayeredGeometry,
    RowSpec,
    Weights,
    describe,
    read_config,
    recipe_weights,
)
from edgekv.spec.tensors import matrices
from exporters.checkpoint import columns
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.locate import locate
from exporters.export import export_bundle
from exporters.graphs.onnx import plan_graphs
from exporters.graphs.parts import build_layers, save_part, with_boundaries
from exporters.graphs.qdq import QdqOps
from exporters.graphs.random_weights import RandomWeights
from exporters.graphs.split import Split, choose_split
from exporters.plan import plan_export
from exporters.quantize.effort import DEFAULT_EFFORT
from exporters.quantize.encodings import choose_encodings, decoder_results
from exporters.quantize.matrices import Quantizer
from exporters.quantize.recipe import find_recipe, recipe_names
from exporters.resources import check_ram
from quant import WEIGHT_TYPES, Encoding, Range, ranges, rounding
from tests.support.checkpoints import NEWER, write_checkpoint
from tests.support.exports import export_options, exported, small_options
from tests.support.foreign_files import write_gguf
from tests.support.kits import report
from tests.support.picture_models import REAL, write_internvl, write_smolvlm

SM8650 = find("SM8650")
ROOT = Path(__file__).parents[3]
CONFIG = {
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
E2B = SHAPES["gemma-4-e2b"]
"""Gemma 4 E2B: layers 15 to 34 own no cache and have a feed-forward twice as wide."""
LLAMA_1B = Decoder(layers=16, hidden=2048, heads=32, kv_heads=8, head_dim=64, intermediate=8192, vocab=128256)
TWO_LAYERS = replace(LLAMA_1B, layers=2)
SMOLLM2 = Decoder(layers=30, hidden=576, heads=9, kv_heads=3, head_dim=64, intermediate=1536, vocab=49152)
HALF_SMOLLM2 = replace(SMOLLM2, layers=15)
EMBEDDED = Decoder(layers=4, hidden=256, heads=4, kv_heads=2, head_dim=64, intermediate=704, vocab=4096)


XEON = HostSpeed(cores=2, products_per_s=88e9, scores_per_s=6.5e8, elements_per_s=12.8e6, rounding_products=3)
"""Where the times below were measured: a core of an x86 server with AVX-512, with matrices in int8."""


def plan_of(path, *, device, **options):
    return make_plan(path, device, PlanOptions(**options))


@pytest.fixture
def llama(tmp_path):
    return write_config(tmp_path)


def write_config(folder, **changes):
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    return folder / "config.json"


def cost_of(decoder, context=512, ar=(1, 32), recipe="w8a16", host=XEON):
    geometry = RowSpec(decoder.layers, decoder.kv_heads, decoder.head_dim, context)
    return export_cost.export_cost(decoder, recipe_weights(decoder, recipe), geometry, ar, host)


# Llama-3.2-1B, worked out by hand


def test_the_weights_of_llama_by_hand():
    q = o = 2048 * 2048
    k = v = 2048 * 512
    gate = up = down = 2048 * 8192
    scales = 4 * (2048 + 512 + 512 + 2048 + 8192 + 8192 + 2048)
    norms = 2 * 2 * 2048
    layer = q + k + v + o + gate + up + down + scales + norms
    assert layer == 60_817_408 + 94_208 + 8_192 == 60_919_808
    table, head = 128256 * 2048 + 6 * 128256, 128256 * 2048 + 4 * 128256
    weights = recipe_weights(LLAMA_1B, "w8a16")
    head += 2 * 2048
    assert weights == Weights(embedding_bytes=table, layer_bytes=(layer,) * 16, packed_bytes=(0,) * 16, head_bytes=head)
    assert weights.total_bytes == 16 * 60_919_808 + 263_437_824 + 263_181_312 + 4_096 == 1_501_340_160


def test_what_llama_needs_in_a_context_by_hand(llama):
    demand = plan_of(llama, device=SM8650, context=4096).demand
    assert demand.weights_bytes == 1_501_340_160
    # slot: 16 x 2 x 8 tensors of 4096 rows and 32 rows of scratch, 64 bytes each, 32 new columns of each of the
    # 128 keys, and 64 to align both
    assert demand.cache_bytes == 256 * (4096 + 32) * 64 + 128 * 32 * 64 + 2 * 64 == 67_895_424
    # residual twice, mask, logits of one row; scores and probabilities of 32 heads; keys, keys turned and values
    always = 2 * (2 * 32 * 2048 + 32 * 4096 + 128256)
    scores = 2 * (2 * 32 * 32 * 4096)
    joined = 3 * 8 * 4096 * 64
    assert demand.activations_bytes == always + scores + joined == 780_800 + 16_777_216 + 6_291_456
    assert demand.used_bytes == 1_501_340_160 + 67_895_424 + 23_849_472 < demand.limit_bytes == 3_750_000_000


def test_the_weights_assumed_are_those_of_the_recipe(llama):
    made = plan_of(llama, device=SM8650, context=4096, recipe="w4a16-lpbq64")
    expected = recipe_weights(LLAMA_1B, "w4a16-lpbq64").total_bytes
    assert made.demand.weights_bytes == expected
    assert any(each.startswith(f"weights of {expected:,} bytes: the recipe w4a16-lpbq64") for each in made.assumptions)


def test_the_roofline_of_llama_by_hand(llama):
    speed = plan_of(llama, device=SM8650, context=4096).speed
    assert speed.weights_bytes == 16 * 60_919_808 + 263_185_408 + 2048 + 6 == 1_237_904_390
    assert speed.full_cache_bytes == 256 * 4095 * 64 == 2 * speed.mean_cache_bytes == 67_092_480
    assert (
        speed.roofline_tokens_per_s
        == pytest.approx(76.8e9 / (1_237_904_390 + 33_546_240))
        == pytest.approx(60.40, abs=0.01)
    )
    assert speed.static_roofline_tokens_per_s == pytest.approx(58.85, abs=0.01)


def test_the_ram_of_exporting_llama_by_hand(llama):
    found = plan_of(llama, device=SM8650, context=4096).export
    process = 120_000_000 + 800 * 128256
    samples = 4 * 256 * 8 * 3641  # every ninth of 512 x 64
    down, squares, columns = 4 * 8192 * 2048, 4 * 8192 * (2 * 8192 + 3 * 1024), 7 * 4 * 8192 * 1024
    assert found.calibration_tokens == 4096
    integers = 60_817_408
    assert found.quantization_peak_bytes == process + samples + integers + down + squares + columns
    assert found.writing_peak_bytes == process + 4 * 4 * 8192 * 2048
    compiler = 148_000_000 + 2.1 * 1_501_340_160 + 186 * 2_872_000
    assert found.check_peak_bytes == process + round(compiler)
    assert found.peak_bytes == found.check_peak_bytes > found.quantization_peak_bytes
    assert found.graph_bytes == 16 * (32 * 4_080 + 8 * 5_250 + 6_940) == 2_872_000
    decode_bytes = 16 * (32 * 1_200 + 8 * 8_960 + 7_360)
    assert found.bundle_bytes == 1_501_340_160 + round(0.115 * (decode_bytes + 2 * 2_872_000))


def test_a_short_context_makes_short_windows():
    base = 120_000_000 + 800 * 49152
    gates = 4 * 4 * 576 * 1536
    for window in (128, 256):
        found = cost_of(SMOLLM2, context=window)
        sampled = window * 64
        samples = 4 * 180 * min((12800 // window) * -(-sampled // (sampled // 4096 | 1)), 131_072)
        rows = 5 * 2 * 4 * window * 1536
        assert found.quantization_peak_bytes >= base + samples + gates + rows


def test_more_calibration_tokens_take_hardly_more_ram():
    short, long = (quantization_bytes(LLAMA_1B, 256, tokens, 512) for tokens in (4096, 135_168))
    assert short < long < 1.3 * short  # samples of the cache alone grow


# What was measured


@pytest.mark.parametrize(
    ("decoder", "layers", "tokens", "peak_bytes"),
    [(EMBEDDED, 4, 8192, 135_000_000), (SMOLLM2, 2, 8192, 252_000_000), (LLAMA_1B, 1, 4096, 1_029_000_000)],
    ids=["embedded", "two layers of SmolLM2", "one layer of Llama"],
)
def test_the_exporters_peak_is_at_max_what_the_plan_says(decoder, layers, tokens, peak_bytes):
    tensors = 2 * layers * decoder.kv_heads
    assert peak_bytes <= quantization_bytes(decoder, tensors, tokens, 512) <= 1.2 * peak_bytes


@pytest.mark.parametrize(
    ("decoder", "check_s", "check_peak_bytes", "graph_bytes"),
    [
        (EMBEDDED, 1.4, 187_000_000, 133_735),
        (HALF_SMOLLM2, 9.7, 568_000_000, 869_936),
        (SMOLLM2, 47, 897_000_000, 1_744_748),
        (TWO_LAYERS, 12, 1_610_000_000, None),
    ],
    ids=["embedded", "half of SmolLM2", "SmolLM2", "two layers of Llama"],
)
def test_the_estimates_are_near_what_was_measured(decoder, check_s, check_peak_bytes, graph_bytes):
    found = cost_of(decoder)
    waiting_bytes = 120_000_000 + 800 * decoder.vocab
    assert graph_bytes is None or graph_bytes <= found.graph_bytes <= 1.03 * graph_bytes
    assert found.check_peak_bytes - waiting_bytes == pytest.approx(check_peak_bytes, rel=0.1)
    assert check_s / 2 <= found.check_seconds / found.graphs <= check_s * 2


def test_the_time_of_an_export_follows_from_what_the_machine_does(monkeypatch):
    """Processor time of SmolLM2-135M, and of two layers of Llama-3.2-1B's shape, on a core of an AMD EPYC."""
    eight = HostSpeed(cores=2, products_per_s=101e9, scores_per_s=9.5e8, elements_per_s=18.3e6, rounding_products=3)
    four = msgspec.structs.replace(eight, products_per_s=107e9, elements_per_s=8e6, rounding_products=7)
    for decoder, recipe, host, measured_s in (
        (SMOLLM2, "w8a16", eight, 78),
        (SMOLLM2, "w4a16-lpbq64", four, 124),
        (TWO_LAYERS, "w4a16-lpbq64", four, 229),
    ):
        found = cost_of(decoder, 2048, recipe=recipe, host=host)
        assert found.export_seconds * export_cost._BUSY * host.cores == pytest.approx(measured_s, rel=0.13)
        twice = msgspec.structs.replace(host, cores=2 * host.cores)
        halved = cost_of(decoder, 2048, recipe=recipe, host=twice)
        assert halved.export_seconds == pytest.approx(found.export_seconds / 2)
    monkeypatch.setattr("edgekv.plan.host_speed.find_spec", lambda name: None)
    assert not measure_host.__wrapped__("int8").is_measured


def test_a_machine_is_measured_with_the_operations_of_an_export():
    found = {dtype: measure_host(dtype) for dtype in ("int8", "lpbq64")}
    assert all(host.is_measured and host.cores >= 1 and host.products_per_s > 1e8 for host in found.values())
    assert found["lpbq64"].elements_per_s < found["int8"].elements_per_s
    assert measure_host("int8") is found["int8"], "it takes seconds"


@pytest.mark.slow
def test_the_exporter_allocates_what_the_formula_says(tmp_path):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path)))
    sizes, window = checkpoint.spec.sizes, calibration_window(4096, has_delta_rule=False)
    tokens = default_calibration_tokens(sizes)
    windows = np.arange(tokens).reshape(-1, window) % sizes.vocab
    recipe = find_recipe("w4a16").with_effort(DEFAULT_EFFORT, checkpoint.spec)
    dict(Quantizer(checkpoint, windows[:1], window, recipe).layer(0))  # its imports are no part of the peak
    tracemalloc.start()
    quantizer = Quantizer(checkpoint, windows, window, recipe)
    for layer in range(sizes.layers):
        dict(quantizer.layer(layer))
    dict(quantizer.head())
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    base_bytes = export_cost._PROCESS_BYTES + export_cost._TOKENIZER_BYTES * sizes.vocab
    assert cost_of(sizes).quantization_peak_bytes - base_bytes == pytest.approx(peak_bytes, rel=0.1)


@pytest.mark.slow
def test_the_exporter_writes_what_the_plan_says(tmp_path):
    folder = write_checkpoint(tmp_path / "checkpoint")
    options = small_options(context=64)
    manifest = export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", options)
    made = plan_of(folder, device=SM8650, context=64)
    shards = list((tmp_path / "bundle").glob("weights-*.safetensors"))
    headers = [8 + int.from_bytes(shard.read_bytes()[:8], "little") for shard in shards]
    assert made.demand.weights_bytes == sum(shard.stat().st_size for shard in shards) - sum(headers)
    assert made.export.graphs == len(manifest.graphs)
    for graph in manifest.graphs:
        share = len(graph_content(tmp_path / "bundle" / graph.file)) / made.export.graph_bytes
        least, most = (0.7, 1.1) if graph.role == "decode" else (0.85, 1.1)
        assert least < share < most, graph.name


@pytest.mark.parametrize(("heads", "kv_heads"), [(9, 3), (16, 8), (8, 8), (14, 2)])
def test_a_layer_of_a_graph_takes_at_max_what_the_plan_says(heads, kv_heads, tmp_path):
    """And hardly less: of graphs in which every tensor has an encoding of its own."""
    sizes = {"hidden_size": heads * 64, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    found = dict[str, list[int]]()
    for layers in (2, 4):
        config = CONFIG | sizes | {"num_hidden_layers": layers, "intermediate_size": 64, "vocab_size": 64}
        spec, recipe = describe(Config(config)), find_recipe("w4a16-lpbq64")
        interface, weights = DecoderInterface.of(spec, 1024, "u8", "columns", "u16"), RandomWeights(spec, recipe)
        encodings = distinct_encodings(spec)
        (folder := tmp_path / str(layers)).mkdir()
        weights.write(folder)
        for graph in plan_graphs((1, 32), (1024,), Split.whole(layers)):
            if graph.role != "score":
                part = PartRecord(
                    name="part", file="part.onnx", first_layer=0, stop_layer=layers, embeds=False, head=False
                )
                ops = build_layers(QdqOps(graph, part, interface, spec, encodings, weights), graph, part)
                save_part(ops, folder / f"{graph.role}.onnx", folder)
                found.setdefault(graph.role, []).append((folder / f"{graph.role}.onnx").stat().st_size)
    for role, (two, four) in found.items():
        planned = export_cost.layer_graph_bytes(spec.sizes, is_decode=role == "decode")
        assert 0.9 * planned < (four - two) / 2 <= planned, role


def distinct_encodings(spec: DecoderSpec) -> dict[str, Encoding]:
    """Encodings of ranges that all differ, as calibrated ones do."""
    results, draw = decoder_results(spec), np.random.default_rng(0)
    sources = sorted({source for result in results.values() for source in result.sources})
    ranges = {source: Range(*(float(end) for end in draw.uniform((-20, 2), (-2, 20)))) for source in sources}
    factors = [rope.rotation(1024).attention_factor for rope in spec.ropes]
    return with_boundaries(spec, choose_encodings(results, ranges, factors, EncodingTypes("u16", "u8", "u16")))


def test_the_plan_and_the_exporter_agree_on_their_constants():
    assert export_cost._SAMPLE == ranges._SAMPLE
    assert export_cost._MAX_SAMPLED == ranges._MAX_SAMPLED
    assert export_cost._COLUMNS_AT_ONCE == rounding._COLUMNS_AT_ONCE
    assert export_cost._TABLE_ROWS_AT_ONCE == columns._ROWS_AT_ONCE
    assert {*RECIPES} == {*recipe_names()} - {"as-stored"}


# What fits


@given(st.lists(st.integers(1, 4000), min_size=1, max_size=12), st.integers(0, 4000), st.integers(1, 8))
def test_the_fewest_parts_that_stay_inside_all_limits_are_made(layers, head, graphs):
    load = Load(
        layers=[each * 10**6 for each in layers],
        packed=[each * 10**6 // 2 for each in layers],
        embedding_bytes=10**8,
        head_bytes=head * 10**6,
        packed_head_bytes=head * 10**6,
        cache=[10**7] * len(layers),
        activations_bytes=10**6,
        layer_graph_bytes=10**5,
        graphs=graphs,
    )
    splits = min_splits(load)
    if splits is None:
        assert not all(part.is_runnable for part in lay_out(load, len(layers)))
        return
    parts = lay_out(load, splits)
    assert [layer for part in parts for layer in range(part.first_layer, part.first_layer + part.layers)] == [
        *range(len(layers))
    ]
    assert [part.head for part in parts] == [*[False] * (len(parts) - 1), True]
    assert parts[0].embedding == (splits == 1)
    assert all(part.fits for part in parts) or splits == len(layers)
    assert not any(all(part.fits for part in lay_out(load, fewer)) for fewer in range(1, splits))


@given(st.integers(2, 4096), st.integers(1, 64))
def test_activations_grow_with_context_and_ar(steps, ar):
    shorter, longer = (RowSpec(16, 8, 64, context) for context in (steps * ar + 1, (steps + 1) * ar + 1))
    assert activation_bytes(LLAMA_1B, shorter, ar) < activation_bytes(LLAMA_1B, longer, ar)
    assert activation_bytes(LLAMA_1B, shorter, ar) < activation_bytes(LLAMA_1B, shorter, ar + 1)


def test_the_largest_context_fits_and_the_next_does_not(tmp_path):
    path = write_config(tmp_path, num_key_value_heads=32)
    found = plan_of(path, device=SM8650, context=4096, kv="s16").fit
    assert found.largest_in_one % 32 == 0 and found.largest_in_one < found.largest_context <= 131072
    assert plan_of(path, device=SM8650, context=found.largest_in_one, kv="s16").fit.in_one
    assert not plan_of(path, device=SM8650, context=found.largest_in_one + 32, kv="s16").fit.in_one
    path = write_config(tmp_path, num_key_value_heads=32, head_dim=512, max_position_embeddings=1 << 20)
    largest = plan_of(path, device=SM8650, context=4096, kv="s16").fit.largest_context
    assert plan_of(path, device=SM8650, context=largest, kv="s16").fit.fits
    assert not plan_of(path, device=SM8650, context=largest + 32, kv="s16").fit.fits


def test_the_largest_context_is_at_max_the_models_own(tmp_path):
    made = plan_of(write_config(tmp_path, max_position_embeddings=8200), device=SM8650, context=512)
    assert made.fit.largest_context == 8192
    path = write_config(tmp_path, max_position_embeddings=8192)
    summary = plan_of(path, device=SM8650, context=512).summary
    assert "So does a context of 8,192, the longest that the model was made for." in summary


@pytest.mark.slow
def test_a_model_that_export_divides_fits(llama):
    made = plan_of(llama, device=SM8650, context=131072)
    assert made.demand.used_bytes > made.demand.limit_bytes
    assert made.fit.fits and not made.fit.in_one and made.fit.contexts == len(made.parts) > 1
    start = f"A context of 131,072 fits on SM8650 (V75), divided over {len(made.parts)} HTP contexts, with slot: "
    assert made.summary.startswith(start + "1.50 GB of weights, 2.15 GB of cache")
    assert f"Undivided, a context of up to {made.fit.largest_in_one:,} fits." in made.summary
    assert all(part.used_bytes <= made.demand.limit_bytes for part in made.parts)


@pytest.mark.slow
def test_a_smaller_cache_type_is_named_if_it_helps(tmp_path):
    path = write_config(tmp_path, num_key_value_heads=32, head_dim=512)
    made = plan_of(path, device=SM8650, context=24576, kv="s16")
    assert not made.fit.fits and made.parts is None
    assert "does not fit" in made.summary and "or --kv u8." in made.summary
    assert f"It fits with --context {made.fit.largest_context} (the longest that fits)" in made.summary
    assert "--kv u8" not in plan_of(path, device=SM8650, context=32768).summary


def test_a_model_above_one_context_is_parted_by_whole_layers(tmp_path):
    # Llama-2-7B: 202 M weights a layer, 32 layers
    changes = {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_key_value_heads": 32}
    path = write_config(tmp_path, **changes, head_dim=128, vocab_size=32000)
    made = plan_of(path, device=SM8650, context=2048)
    assert made.fit.largest_in_one is None and made.fit.fits
    assert f"Export divides it into {len(made.parts)} parts" in made.summary
    layers = [layer for part in made.parts for layer in range(part.first_layer, part.first_layer + part.layers)]
    assert layers == [*range(32)] and made.parts[-1].head and not any(part.embedding for part in made.parts)
    assert all(part.fits for part in made.parts)


@pytest.mark.parametrize("recipe", ["w8a16", "w4a16-lpbq64", "w4a16-lpbq32-updown8"])
@pytest.mark.parametrize(
    "changes", [{}, {"hidden_size": 4096, "num_hidden_layers": 32, "intermediate_size": 14336}, E2B]
)
def test_export_divides_as_planned(tmp_path, changes, recipe):
    path = write_config(tmp_path, **changes)
    made = plan_of(path, device=SM8650, context=4096, recipe=recipe)
    spec = describe(read_config(path))
    split = choose_split(
        spec,
        find_recipe(recipe),
        splits=None,
        embedding=None,
        head=None,
        geometry=DecoderInterface.of(spec, 4096, "u8", "rows", "u16").cache,
        ar=(1, 32),
        graphs=2,
    )
    planned = [range(part.first_layer, part.first_layer + part.layers) for part in made.parts if part.layers]
    assert planned == [*split.layers] and len(planned) > 1 and split.own_head and not split.embeds


def test_layers_with_a_window_hold_and_read_their_window_alone(tmp_path):
    gemma = {"model_type": "gemma2", "sliding_window": 1024, "hidden_activation": "gelu_pytorch_tanh"}
    caps = {"query_pre_attn_scalar": 64, "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
    path = write_config(tmp_path, **gemma, **caps, max_position_embeddings=8192)
    made = plan_of(path, device=SM8650, context=8192)
    # 8 layers of 1,024 tokens and 8 of 8,192, each 16 tensors of 64-byte rows, and 32 rows of scratch each; keys, half
    # of the tensors, have 32 new columns too
    assert made.demand.cache_bytes == 128 * 64 * (1024 + 8192 + 2 * 32) + 64 * 64 * 2 * 32 + 4 * 64
    assert made.speed.full_cache_bytes == 128 * 64 * (1023 + 8191)
    report = make_size_report(find_subject(path, Overrides(context=8192)), device=SM8650)
    assert report.demand == made.demand and report.strategies[0].held_bytes == made.demand.cache_bytes
    assert [(each.layers, each.window) for each in report.geometry.windows] == [(8, 1024), (8, 8192)]
    assert report.graphs[0].inputs == 1 + 2 + 2 + 256  # ids, two masks, cosines and sines, the past


@pytest.mark.parametrize("context", [512, 4096, 131072])
def test_plan_and_size_give_the_same_answer(llama, context):
    made = plan_of(llama, device=SM8650, context=context)
    report = make_size_report(find_subject(llama, Overrides(context=context)), device=SM8650)
    assert (report.demand, report.fit) == (made.demand, made.fit)
    assert report.strategies[0].label == made.strategy.strategy == DEFAULT_STRATEGY
    assert made.summary.startswith(report.summary)


def test_a_tied_table_counts_once(tmp_path):
    # Llama-3.2-1B has 1,235.8 M parameters, 0.1 M of them in norms.
    tied = plan_of(write_config(tmp_path, tie_word_embeddings=True), device=SM8650, context=512)
    assert tied.parameters == 16 * 60_817_408 + 128256 * 2048
    own_head = plan_of(write_config(tmp_path, tie_word_embeddings=False), device=SM8650, context=512)
    assert own_head.parameters == 16 * 60_817_408 + 2 * 128256 * 2048


# How fast it can be

LLAMA_3B = {"num_hidden_layers": 28, "hidden_size": 3072, "num_attention_heads": 24, "head_dim": 128}
LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 14336, "head_dim": 128}
QWEN3_4B = {
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "head_dim": 128,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
}


# Qualcomm AI Hub Models b61a009, w4a16 on Genie: tokens a second, and a pass of 128 rows in milliseconds.
@pytest.mark.parametrize(
    ("soc", "model", "tokens_per_s", "first_ms"),
    [
        ("SC8380XP", {}, 23.7, 69.3),
        ("SC8380XP", LLAMA_3B, 11.87, 116.9),
        ("SC8380XP", LLAMA_8B, 7.41, 226.9),
        ("SC8380XP", QWEN3_4B, 1000 / 54.5, 99.5),  # GenieX issue 1266: 51 to 58 ms, and 95 to 104 ms
        ("SM8750", {}, 64.14, 39.6),
        ("SM8750", LLAMA_3B, 28.03, 82.0),
        ("SM8750", LLAMA_8B, 14.14, 142.8),
        ("SM8850", {}, 74.39, 30.2),
        ("SM8850", LLAMA_3B, 32.65, 69.0),
        ("SM8850", LLAMA_8B, 16.17, 111.0),
        ("SC8480XP", {}, 90.36, 50.2),
        ("SC8480XP", LLAMA_8B, 21.0, 130.0),
        ("QCS9100", LLAMA_3B, 17.47, 109.6),  # SA8775P
    ],
)
def test_published_speeds_lie_in_the_expected_range(tmp_path, soc, model, tokens_per_s, first_ms):
    path = write_config(tmp_path, **model)
    speed = plan_of(path, device=find(soc), context=4096, recipe="w4a16", ar=(1, 128)).speed
    low, high = speed.tokens_per_s
    assert 0.99 * low <= tokens_per_s <= 1.01 * high < speed.roofline_tokens_per_s
    short, full = speed.first_token
    assert (short.passes, full.passes) == (1, 32)
    assert 0.98 * short.low_s <= first_ms / 1000 <= 1.02 * short.high_s
    assert (full.low_s, full.high_s) == pytest.approx((32 * short.low_s, 32 * short.high_s))


# ExecuTorch cff6f4d, test_qnn_delegate.py: the floors of its tests with 8-bit weights and a context of 1,024.
@pytest.mark.parametrize(("soc", "tokens_per_s"), [("SM8650", 214), ("SM8750", 260)])
def test_smollm2_lies_in_the_expected_range(tmp_path, soc, tokens_per_s):
    shape = {"num_hidden_layers": 30, "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9}
    path = write_config(tmp_path, **shape, num_key_value_heads=3, vocab_size=49152)
    low, high = plan_of(path, device=find(soc), context=1024).speed.tokens_per_s
    assert low <= tokens_per_s <= high


def test_the_time_to_first_token_by_hand(llama):
    speed = plan_of(llama, device=SM8650, context=4096, ar=(1, 32)).speed
    short, full = speed.first_token
    assert (short.prompt_tokens, short.passes, full.prompt_tokens, full.passes) == (128, 4, 4095, 128)
    read_bytes = 1_237_904_390 + 67_092_480
    macs = 16 * 60_817_408 + 2 * 16 * 32 * 64 * 4096
    assert short.low_s == pytest.approx(4 * (read_bytes / 53.7e9 + 31 * macs / 8.1e12))
    assert short.high_s == pytest.approx(4 * (read_bytes / 29.0e9 + 31 * macs / 8.1e12))


def test_a_model_smaller_than_any_published_is_no_faster_than_the_fastest():
    made = plan_of(ROOT / "models" / "stdlib-4m", device=SM8650, context=512)
    assert made.speed.tokens_per_s == (1600, 1600) and made.speed.static_roofline_tokens_per_s > 16_000
    assert any("too small a model for published figures" in each for each in made.assumptions)


def test_a_chip_without_published_figures_says_whose_it_takes(llama):
    made = plan_of(llama, device=find("SM8550"), context=4096)
    assert any("SC8380XP, QCS9100, SA8255 and SA8775P; none were found for SM8550" in each for each in made.assumptions)
    own = plan_of(llama, device=SM8650, context=4096)
    assert any("figures of this chip: Qualcomm AI Hub Models" in each for each in own.assumptions)


def test_reports_of_devices_replace_published_figures(llama, tmp_path, monkeypatch, capsys):
    content = msgspec.json.encode(report(soc="SM8650", arch=75))
    for folder, written in (("good", content), ("changed", content.replace(b"62.5", b"99.5"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "galaxy.json").write_bytes(written)
    monkeypatch.setattr(measured, "FOLDER", tmp_path / "good")
    speed = plan_of(llama, device=SM8650, context=4096).speed
    assert (speed.reached_gb_per_s, speed.evidence) == ((50.0, 50.0), "measured on SM8650 (report galaxy)")
    assert program(["plan", str(llama), "--device", "SM8650", "--context", "4096"]) == 0
    assert "measured on SM8650 (report galaxy)" in " ".join(capsys.readouterr().out.split())
    monkeypatch.setattr(measured, "FOLDER", tmp_path / "changed")
    assert program(["plan", str(llama), "--device", "SM8650", "--context", "4096"]) == 1
    assert "galaxy.json: seal" in (said := capsys.readouterr().err) and "devices/reports" in said


# Speculation


def test_what_speculation_would_bring_by_hand(llama):
    made = plan_of(llama, device=SM8650, context=4096, acceptance=0.5)
    assert [each.rows for each in made.speculation] == [4, 8, 16]
    four = made.speculation[0]
    assert four.tokens_per_pass == pytest.approx(1 + 0.5 + 0.25 + 0.125)
    macs = 16 * 60_817_408 + 2 * 16 * 32 * 64 * 4096 + 2048 * 128256
    slow, fast = (1 + 3 * macs / 8.1e12 * each for each in made.speed.tokens_per_s)
    assert four.cost == pytest.approx((slow, fast))
    assert four.gain == pytest.approx((1.875 / fast, 1.875 / slow))
    low, high = made.speed.tokens_per_s
    assert four.tokens_per_s == pytest.approx((1.875 * low / slow, 1.875 * high / fast))


@pytest.mark.parametrize(("acceptance", "tokens"), [(0, 1), (1, 8)])
def test_certain_drafts(llama, acceptance, tokens):
    eight = plan_of(llama, device=SM8650, context=4096, acceptance=acceptance).speculation[1]
    assert eight.tokens_per_pass == tokens


def test_the_command_tells_what_speculation_would_bring(llama):
    arguments = [str(llama), "--device", "SM8650", "--context", "1024"]
    told = CliRunner().invoke(plan, [*arguments, "--acceptance", "0.6"], env={"COLUMNS": "200"}).output
    assert "with --draft-rows 8: 2.46 tokens a pass, which costs" in told
    assert json.loads(CliRunner().invoke(plan, [*arguments, "--json"]).output)["speculation"] is None


@pytest.mark.parametrize("acceptance", [-0.1, 1.1, float("nan")])
def test_an_acceptance_that_is_no_probability_is_refused(llama, acceptance):
    with pytest.raises(UsageError, match=r"--acceptance: got .*; expected 0 to 1"):
        plan_of(llama, device=SM8650, acceptance=acceptance)


# Masks


def test_a_mask_above_one_mebibyte_warns_and_names_a_smaller_ar(llama):
    assert mask_bytes(RowSpec(16, 8, 64, 4096), 128) == 1_048_576 == MASK_BYTES
    assert plan_of(llama, device=find("SM8850"), context=4096, ar=(1, 128)).warnings == []
    (warning,) = plan_of(llama, device=find("SM8850"), context=8192, ar=(1, 128)).warnings
    assert "mask of 2,097,152 bytes" in warning and "HTP V81 is reported" in warning
    assert warning.endswith("Use --ar with 64 instead of 128.")
    assert plan_of(llama, device=find("SM8850"), context=8192, ar=(1, 64)).warnings == []
    (decode,) = mask_warnings(RowSpec(16, 8, 64, 1 << 20), (1,), SM8650)
    assert decode.endswith("No AR is small enough: use a smaller --context.")
    (elsewhere,) = plan_of(llama, device=SM8650, context=8192, ar=(1, 128)).warnings
    assert "HTP V81 (other versions: unknown)" in elsewhere


@pytest.mark.parametrize(("ar", "warned"), [("1,128", True), ("1,64", False)])
def test_export_warns_by_the_same_rule(tmp_path, capsys, ar, warned):
    folder = write_checkpoint(tmp_path / "checkpoint", NEWER | {"max_position_embeddings": 8192})
    options = ["--device", "SM8850", "--context", "8192", "--ar", ar, "--calibration-tokens", "192", "--skip-htp-check"]
    assert program(["export", str(folder), "-o", str(tmp_path / "bundle"), *options]) == 0
    warnings = plan_of(folder, device=find("SM8850"), context=8192, ar=(1, int(ar[2:]))).warnings
    assert len(warnings) == warned
    assert [line for line in capsys.readouterr().err.splitlines() if "warning" in line] == [
        f"edgekv: warning: {warning}" for warning in warnings
    ]


@given(st.integers(2, 600), st.integers(1, 256), st.none() | st.integers(2, 600))
def test_the_proposed_ar_is_the_largest_with_a_small_mask(blocks, ar, window):
    context = blocks * ar
    is_narrow = window is not None and ar < window < context
    plain = RowSpec(1, 1, 64, context)
    geometry = LayeredGeometry(1, context, (1,), (64,), (window,)) if is_narrow else plain
    columns = min(window - 1, context - ar) + ar if is_narrow else context
    assert mask_bytes(geometry, ar) == 2 * ar * columns
    warnings = mask_warnings(geometry, (ar,), SM8650)
    assert bool(warnings) == (2 * ar * columns > 1_048_576)
    if warnings:
        proposed = int(re.search(r"Use --ar with (\d+) instead", warnings[0])[1])
        assert context % proposed == 0 and mask_bytes(geometry, proposed) <= MASK_BYTES
        larger = (tokens for tokens in range(proposed + 1, ar) if context % tokens == 0)
        assert all(mask_bytes(geometry, tokens) > MASK_BYTES for tokens in larger)


@pytest.mark.parametrize(
    ("graphs", "weights_mb", "packed_mb", "graph_mb", "measured_gb"),
    [
        (1, 198, 0, 2.01, 1.26),
        (2, 198, 0, 2.01, 2.20),
        (4, 198, 0, 2.01, 3.72),
        (2, 487, 0, 1.67, 4.58),
        (1, 263, 0, 0, 1.26),
        (4, 260, 231, 1.67, 5.45),
        (2, 583, 524, 1.04, 5.81),
        (2, 700, 629, 1.26, 6.88),
    ],
)
def test_ram_to_compile_is_near_what_was_measured(graphs, weights_mb, packed_mb, graph_mb, measured_gb):
    graph_bytes = round(graph_mb * 10**6)
    found = compile_bytes(weights_mb * 10**6, graph_bytes, graphs, packed_bytes=packed_mb * 10**6)
    assert found == pytest.approx(measured_gb * 1e9, rel=0.2)


@pytest.mark.parametrize("name", [*RECIPES, "w4a16-head-int4", "w4a16-lpbq64-head-lpbq64", "w8a16-head-lpbq32"])
def test_the_weights_of_a_recipe_are_those_of_its_rules(name):
    sizes, recipe = matrices(describe(Config(CONFIG))), find_recipe(name)
    layer = [(shape, recipe.rule(key).dtype) for key, shape in sizes.items() if ".layers.3." in key]
    found = recipe_weights(LLAMA_1B, name)
    assert (
        found.layer_bytes[3]
        == sum(WEIGHT_TYPES[dtype].matrix_bytes(*reversed(shape)) for shape, dtype in layer) + 4 * 2048
    )
    packed = sum(rows * columns // 2 for (rows, columns), dtype in layer if dtype != "int8")
    assert found.packed_bytes[3] == packed
    head = WEIGHT_TYPES[recipe.rule("lm_head.weight").dtype]
    assert found.head_bytes == head.matrix_bytes(2048, 128256) + 2 * 2048
    assert found.packed_head_bytes == head.packed_bytes(2048, 128256)


def test_the_end_layers_of_a_small_model_are_counted_with_8_bits():
    four, eight = (recipe_weights(SMOLLM2, name) for name in ("w4a16-lpbq64", "w8a16"))
    assert [layer for layer in range(30) if four.layer_bytes[layer] == eight.layer_bytes[layer]] == [0, 28, 29]
    assert [layer for layer in range(30) if not four.packed_bytes[layer]] == [0, 28, 29]


def test_a_tied_head_of_4_bits_has_a_table_beside_it():
    """On disk that costs bytes; a graph holds fewer, as the compiler stores a shared table twice."""
    tied = replace(LLAMA_1B, tied_head=True)
    shared, apart = (recipe_weights(tied, f"w4a16{head}") for head in ("", "-head-int4"))
    assert (shared.shares_table, apart.shares_table) == (True, False)
    assert apart.total_bytes > shared.total_bytes and apart.compiled_bytes < shared.compiled_bytes
    assert apart.head_bytes == recipe_weights(LLAMA_1B, "w4a16-head-int4").head_bytes


def test_a_recipe_of_mean_bits_is_planned(tmp_path):
    four, middle, eight = (recipe_weights(LLAMA_1B, f"front-{bits}") for bits in (4, 5.5, 8))
    norms = 4 * 2048
    assert (four.layer_bytes[3] - norms) * 2 == eight.layer_bytes[3] - norms == LLAMA_1B.layer_parameters
    assert four.layer_bytes[3] < middle.layer_bytes[3] < eight.layer_bytes[3]
    assert (four.packed_bytes[3], eight.packed_bytes[3]) == (LLAMA_1B.layer_parameters // 2, 0)
    assert four.head_bytes == eight.head_bytes
    assert recipe_weights(LLAMA_1B, "front-4-head-int4").layer_bytes == four.layer_bytes
    with pytest.raises(UsageError, match=r"--recipe: got 'front-9'; expected .* or front-BITS, from 4 to 8 bits"):
        plan_of(tmp_path, device=find("SM8650"), recipe="front-9")


def test_a_layer_above_one_context_cannot_be_parted(tmp_path):
    made = plan_of(write_config(tmp_path, intermediate_size=1 << 20), device=SM8650, context=512)
    assert made.parts is None and not made.fit.fits and "a smaller model" in made.summary


def test_a_graph_above_the_protobuf_limit_is_divided(tmp_path):
    small = {"hidden_size": 8, "intermediate_size": 8, "vocab_size": 64, "num_key_value_heads": 32}
    path = write_config(tmp_path, num_hidden_layers=8192, **small)
    made = plan_of(path, device=SM8650, context=64)
    assert made.export.graph_bytes > PROTOBUF_BYTES and made.fit.fits
    assert len(made.parts) > 1 and all(part.graph_bytes <= PROTOBUF_BYTES for part in made.parts)


# What is refused


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recipe": "w2a2"}, r"--recipe: got 'w2a2'; expected w8a16"),
        ({"kv": "u16"}, r"--kv: got 'u16'; expected u8 or s16"),
        ({"context": 131104}, r"--context: got 131104; expected at most max_position_embeddings = 131072"),
        ({"context": 1000}, r"--context: got 1000; expected a multiple of the largest AR, 32.*--context 992"),
        ({"context": 1}, r"--context"),
        ({"ar": (32,)}, r"--ar"),
        ({"device": find("SM8450"), "kv": "s16", "context": 512}, r"SM8450 \(V69\)"),
    ],
)
def test_what_export_would_refuse_is_refused(llama, options, message):
    with pytest.raises(UsageError, match=message):
        plan_of(llama, **{"device": SM8650, **options})


def test_a_model_of_unknown_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"matrices are not known.*edgekv size"):
        plan_of(write_config(tmp_path, model_type="mixtral"), device=SM8650, context=512)
    with pytest.raises(CheckpointError, match="nothing there"):
        plan_of(tmp_path / "nowhere", device=SM8650)


def test_a_bundle_is_planned_as_it_is(bundle, embedded):
    made = plan_of(bundle, device=SM8650)
    again = plan_of(embedded, device=SM8650, context=made.context)
    assert (made.recipe, made.context, made.kv_dtype) == ("w8a16", 128, again.kv_dtype)
    assert made.demand.weights_bytes == pytest.approx(again.demand.weights_bytes, rel=0.02)
    assert plan_of(bundle / "manifest.json", device=SM8650).summary == made.summary
    with pytest.raises(UsageError, match=r"--context: got 1024; expected 128, as .* says"):
        plan_of(bundle, device=SM8650, context=1024)
    with pytest.raises(UsageError, match="--estimate: got it for"):
        plan_of(bundle, device=SM8650, estimate=True)


def test_a_check_that_is_skipped_is_not_planned(llama):
    made = run(llama, "--device", "SM8650", "--context", 4096, "--json")
    without = run(llama, "--device", "SM8650", "--context", 4096, "--skip-htp-check", "--json")
    costs = [json.loads(each.stdout)["export"] for each in (made, without)]
    assert costs[1]["check_seconds"] == costs[1]["check_peak_bytes"] == 0
    assert all(cost["seconds"] == cost["export_seconds"] + cost["check_seconds"] for cost in costs)
    assert "without HTP check" in json.loads(without.stdout)["summary"] and "for the HTP check" in made.stdout


def test_a_gguf_file_is_planned_as_its_checkpoint(tmp_path):
    checkpoint = write_checkpoint(tmp_path / "checkpoint")
    file = write_gguf(checkpoint, tmp_path / "model.gguf")
    made, wanted = (plan_of(path, device=SM8650, context=64) for path in (file, checkpoint))
    assert made.source == str(file) and made.demand == wanted.demand and made.summary == wanted.summary


def test_a_missing_file_is_no_id_of_the_hub(tmp_path):
    for name in (tmp_path / "missing.gguf", "missing/model.gguf"):
        with pytest.raises(CheckpointError, match=r"nothing there.*Check the path"):
            plan_of(Path(name), device=SM8650)
        with pytest.raises(CheckpointError, match=r"no such file or folder; .*Check the path"):
            locate(str(name))


# The command


def run(*arguments):
    return CliRunner().invoke(plan, [*map(str, arguments)])


def test_the_verdict_stands_first_and_every_assumption_is_listed(llama):
    result = run(llama.parent, "--device", "8 Gen 3", "--context", 4096)
    made = plan_of(llama, device=SM8650, context=4096)
    said = " ".join(result.stdout.split())
    assert said.startswith(made.summary)
    assert "1,498.4 M parameters" in said and "22 to 41" in said and "4 passes of" in said
    assert "2.9 MB" in said and "4.06 GB" in said and "60.4" in said
    assert made.assumptions and all(each in said for each in made.assumptions)
    assert "8 bits" not in said and "AR 1,32" in said


def test_json_is_one_typed_object(llama):
    result = run(llama, "--device", "SM8650", "--context", 4096, "--json")
    assert msgspec.json.decode(result.stdout, type=Plan) == plan_of(llama, device=SM8650, context=4096)
    assert json.loads(result.stdout)["schema"] == 1


@pytest.mark.parametrize(
    "options",
    [["--ar", "1,x"], ["--kv", "u4"], ["--context", "0"], ["--context", "9" * 4000], ["--device", "Snapdragon X Plus"]],
)
def test_wrong_usage_prints_nothing(llama, options):
    result = run(llama, "--device", "SM8650", *options)
    assert isinstance(result.exception, UsageError) and result.exception.exit_code == 2
    assert result.stdout == ""


@pytest.mark.parametrize("write", [write_smolvlm, write_internvl])
def test_a_vision_encoder_is_counted(tmp_path, write, capsys):
    """As export writes it."""
    checkpoint = write(tmp_path / "checkpoint")
    bundle = exported(checkpoint, export_options(context=96, ar=(1, 16)))
    made = plan_of(checkpoint, device=find("SM8650"), context=96, ar=(1, 16))
    assert made.encoder is not None and made.encoder.tokens == 4
    files = {name: (bundle / name).stat().st_size for name in ("vision.onnx.gz", "weights-vision.safetensors")}
    assert 0.9 < made.encoder.weights_bytes / files["weights-vision.safetensors"] < 1.1
    assert 0.6 < made.encoder.graph_bytes / len(graph_content(bundle / "vision.onnx.gz")) < 1.4
    assert made.export.bundle_bytes > made.encoder.bundle_bytes > made.encoder.parameters
    assert "Its vision encoder takes" in made.summary and "becomes 4 tokens" in made.summary
    assert program(["plan", str(checkpoint), "--device", "SM8650", "--context", "96", "--ar", "1,16"]) == 0
    assert "vision encoder" in capsys.readouterr().out


def test_the_encoder_of_smolvlm2_by_hand():
    """97.3 M weights in int8; 0.95 GB of RAM were measured to compile it, and 0.38 GB to quantize it."""
    spec = ENCODERS["smolvlm"].describe(
        Config(
            {"model_type": "smolvlm", "scale_factor": 4, "text_config": {"hidden_size": 960}, "vision_config": REAL}
        ),
        Config({}),
    )
    made = EncoderPlan.of(spec)
    assert (made.image, made.tokens, made.parameters) == (512, 64, 97_320_960)
    assert made.weights_bytes == pytest.approx(99_396_584, rel=0.01)
    assert made.graph_bytes == pytest.approx(789_918, rel=0.05)
    assert made.compile_peak_bytes == pytest.approx(0.95e9, rel=0.1)
    assert 0.26e9 < made.quantization_peak_bytes < 0.5e9


def test_an_export_counts_its_encoder(tmp_path):
    checkpoint = write_smolvlm(tmp_path / "checkpoint")
    export = plan_export(Checkpoint.open(str(checkpoint)), export_options(context=96, ar=(1, 16)))
    assert export.encoder_plan is not None
    large = msgspec.structs.replace(export.encoder_plan, quantization_peak_bytes=7_000_000_000)
    with pytest.raises(UsageError, match=r"--max-ram: got 2\.00GB; expected 7\.00GB for the vision encoder"):
        check_ram(export.checkpoint.spec, 512, 96, 0, 2_000_000_000, encoder=large)
