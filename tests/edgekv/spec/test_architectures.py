"""Every architecture against Hugging Face transformers: the golden logits of tests/golden/make_golden.py."""

import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgekv
from devices import find
from edgekv.bundle import open_bundle
from edgekv.errors import CheckpointError, UsageError
from edgekv.plan import Overrides, find_subject
from edgekv.spec import DecoderInterface, DeltaSpec, RowSpec, families
from edgekv.spec.lacking import LACKING, OTHER_CACHES
from edgekv.spec.tensors import views
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import Adapter, AdapterChoice
from exporters.export import export_bundle
from exporters.graphs.parts import stored_graph
from exporters.htp.check import floating_nodes
from exporters.lora.base import ExportedBase
from exporters.lora.options import LoraOptions
from exporters.lora.quantize import folded_factors
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, EVERY_OPERATION, LONGROPE, YARN, as_saved, write_checkpoint
from tests.support.embedders import WITHOUT_TEXT
from tests.support.exports import export_options, exported
from tests.support.foreign_files import write_adapter
from tests.support.thorough import variants

GOLDEN = np.load(Path(__file__).parents[2] / "golden" / "architectures.npz")
SAVED = json.loads((Path(__file__).parents[2] / "golden" / "saved.json").read_text())
CASES = sorted(name.removesuffix("_tokens") for name in GOLDEN if name.endswith("_tokens"))


def opened(folder: Path, name: str, **options) -> Checkpoint:
    return Checkpoint.open(str(write_checkpoint(folder, ARCHITECTURES[name], **options)))


@pytest.mark.parametrize("case", CASES)
def test_the_reference_equals_transformers(tmp_path, case):
    """Sequences of 96 tokens, with windows of 24 where there are any; 60 are below longrope's original context."""
    checkpoint = opened(tmp_path, case.rsplit("_", 1)[0])
    expected = GOLDEN[f"{case}_logits"]
    (actual,) = Reference(checkpoint).logits([GOLDEN[f"{case}_tokens"]])
    assert np.abs(actual[-len(expected) :] - expected).max() < 1e-4 * np.ptp(expected)


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_the_reference_reads_what_transformers_saves(tmp_path, name):
    """With the configuration and the names of tensors that `save_pretrained` writes; see tests/golden/saved.py."""
    checkpoint = Checkpoint.open(str(as_saved(write_checkpoint(tmp_path, ARCHITECTURES[name]), SAVED[name])))
    (actual,) = Reference(checkpoint).logits([GOLDEN[f"{name}_96_tokens"]])
    expected = GOLDEN[f"{name}_96_logits"]
    assert np.abs(actual[-len(expected) :] - expected).max() < 1e-4 * np.ptp(expected)


@pytest.mark.parametrize(
    ("name", "override", "words"),
    [
        ("mistral", {"sliding_window": 0}, ["sliding_window", "got 0", "above 0"]),
        ("mistral", {"layer_types": ["full_attention"] * 2}, ["layer_types", "sliding_attention"]),
        ("qwen2", {"layer_types": ["sliding_attention"] * 2}, ["sliding_window", "since layers slide"]),
        ("qwen2-sliding", {"max_window_layers": -1}, ["max_window_layers"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "2 strings"]),
        ("phi4-mini", {"partial_rotary_factor": 0.2}, ["partial_rotary_factor", "even"]),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"short_factor": [1.0]}}, ["short_factor", "1 numbers", "6 numbers"]),
        ("phi4-mini", {"rope_scaling": LONGROPE | {"type": "dynamic"}}, ["rope_type", "'dynamic'", "longrope"]),
        ("gemma2", {"hidden_activation": "relu"}, ["hidden_activation", "'relu'"]),
        ("gemma2", {"final_logit_softcapping": -1.0}, ["final_logit_softcapping", "-1.0"]),
        ("gemma2", {"layer_types": ["sliding_attention", "mamba"]}, ["layer_types", "mamba"]),
        ("gemma3", {"rope_scaling": {"rope_type": "linear"}}, ["rope_scaling: factor", "nothing"]),
        ("gemma3", {"rope_parameters": {"rope_type": "linear", "factor": 8.0}}, ["rope_parameters", "full_attention"]),
        ("gemma3", {"head_dim": 8}, ["q_norm", "16", "8"]),
        ("llama-2", {"model_type": "mixtral"}, ["'mixtral'", "an architecture without experts of another kind"]),
        ("llama-2", {"model_type": "deepseek_v3"}, ["'deepseek_v3'", "an architecture without latent attention"]),
        (
            "llama-2",
            {"model_type": "t5gemma2"},
            ["'t5gemma2'", "an architecture without an encoder beside the decoder"],
        ),
        (
            "granite4",
            {"num_local_experts": 8},
            ["num_local_experts", "8", "no experts beside a shared one"],
        ),
        ("granite4-h", {"num_local_experts": 8}, ["num_local_experts", "8", "no experts beside a shared one"]),
        ("granite4-h", {"layer_types": ["mamba"] * 4}, ["layer_types", "one attention at least"]),
        ("granite4-h", {"layer_types": ["mamba", "conv"] * 2}, ["layer_types", "conv", "attention or mamba"]),
        ("granite4-h", {"layer_types": ["mamba", "attention"] * 2}, ["self_attn.q_proj", "no such tensor"]),
        ("granite4-h", {"mamba_proj_bias": True}, ["mamba_proj_bias", "True", "False"]),
        ("granite4-h", {"mamba_d_conv": 1}, ["mamba_d_conv", "got 1", "at least 2 tokens"]),
        ("granite4-h", {"mamba_d_conv": 3}, ["mamba.conv1d.weight", "[224, 1, 4]", "[224, 1, 3]"]),
        ("granite4-h", {"mamba_d_head": 8}, ["mamba_d_head", "got 8", "16 or 'auto'"]),
        ("granite4-h", {"mamba_n_heads": 7}, ["mamba_n_heads", "a multiple of mamba_n_groups = 2"]),
        ("granite4-h", {"mamba_n_heads": 6}, ["mamba_n_heads", "a divisor of mamba_expand * hidden_size = 128"]),
        ("granite4-h", {"time_step_limit": [0.5, 0.1]}, ["time_step_limit", "ascending order"]),
        ("granite4-h", {"time_step_limit": 1}, ["time_step_limit", "two numbers"]),
        ("falcon_h1", {"ssm_multipliers": [1.0] * 4}, ["ssm_multipliers", "5 numbers"]),
        ("falcon_h1", {"mamba_d_ssm": 100}, ["mamba_n_heads", "got 6", "a divisor of 100"]),
        ("falcon_h1", {"projectors_bias": True}, ["projectors_bias", "True", "False"]),
        ("falcon_h1", {"mamba_rms_norm": True}, ["mamba.norm.weight", "no such tensor"]),
        ("nemotron_h", {"layers_block_type": ["mamba", "moe", "attention"] * 2}, ["layers_block_type", "moe", "mlp"]),
        ("nemotron_h", {"layers_block_type": ["mamba", "mlp"] * 3}, ["layers_block_type", "one attention at least"]),
        ("nemotron_h", {"layers_block_type": None}, ["hybrid_override_pattern", "attention, mamba or mlp"]),
        ("nemotron_h", {"layers_block_type": None, "hybrid_override_pattern": "M-ME*-"}, ["pattern", "moe"]),
        ("mellum", {"mlp_layer_types": ["sparse", "moe", "dense"]}, ["mlp_layer_types", "moe", "sparse or dense"]),
        ("mellum", {"mlp_layer_types": ["dense"] * 3}, ["mlp_layer_types", "one sparse at least"]),
        ("mellum", {"sliding_window": None}, ["sliding_window", "since layers slide"]),
        ("nemotron_h", {"mamba_proj_bias": True}, ["mamba_proj_bias", "True", "False"]),
        ("nemotron_h", {"mlp_hidden_act": "silu"}, ["mlp_hidden_act", "'silu'", "relu2"]),
        ("llama-2", {"model_type": "of_tomorrow"}, ["'of_tomorrow'", "that can be exported", "architectures.md"]),
        ("gemma3-multimodal", {"model_type": "of_tomorrow"}, ["'of_tomorrow'", "without an encoder of pictures"]),
        ("mistral3", {"text_config": {"model_type": "llama4_text"}}, ["text_config: model_type", "'llama4_text'"]),
        ("llama4", {"moe_layers": [1]}, ["moe_layers", "[1]", "graphs have no experts of this kind"]),
        ("llama4", {"layer_types": ["sliding_attention"] * 3}, ["layer_types", "chunked_attention"]),
        ("gpt_neox", {"hidden_act": "relu"}, ["hidden_act", "'relu'"]),
        ("gpt_neox", {"head_dim": 32}, ["head_dim", "32", "hidden_size / num_attention_heads = 16"]),
        ("gptj", {"rotary_dim": 18}, ["rotary_dim", "18", "at most 16"]),
        ("apertus", {"hidden_act": "silu"}, ["hidden_act", "'silu'", "xielu"]),
        ("nanochat", {"hidden_act": "silu"}, ["hidden_act", "'silu'"]),
        ("cwm", {"sliding_window": None}, ["sliding_window", "since layers slide"]),
        ("jais2", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        (
            "gemma3",
            {"model_type": "gemma3n"},
            ["'gemma3n'", "Laurel, AltUp and activation sparsity"],
        ),
        ("gemma3-multimodal", {"text_config": {"model_type": "llama"}}, ["text_config: model_type", "'llama'"]),
        ("mistral3", {"text_config": {"model_type": "mamba"}}, ["text_config: model_type", "'mamba'"]),
        ("smollm3", {"no_rope_layers": [1, 0]}, ["no_rope_layers", "3 times 0 or 1"]),
        ("smollm3", {"no_rope_layers": None, "no_rope_layer_interval": 0}, ["no_rope_layer_interval", "above 0"]),
        ("granite", {"logits_scaling": 0}, ["logits_scaling", "above 0"]),
        ("granite", {"residual_multiplier": "1"}, ["residual_multiplier", "'1'"]),
        ("olmo2", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ("olmo2", {"hidden_act": "relu"}, ["hidden_act", "'relu'"]),
        (
            "olmo3",
            {"rope_parameters": {"full_attention": {"rope_type": "dynamic"}}},
            ["rope_type", "'dynamic'", "yarn"],
        ),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, ["sliding_window_pattern", "'LLLG'"]),
        ("ministral3", {"rope_parameters": YARN | {"factor": -1}}, ["rope_parameters: factor", "-1"]),
        ("lfm2", {"layer_types": ["conv"] * 3}, ["layer_types", "4 strings"]),
        ("lfm2", {"layer_types": ["conv", "mamba"] * 2}, ["layer_types", "mamba", "full_attention"]),
        ("lfm2", {"layer_types": ["conv"] * 4}, ["layer_types", "at least one layer with full_attention"]),
        ("lfm2", {"conv_L_cache": 1}, ["conv_L_cache", "got 1", "at least 2 tokens"]),
        ("lfm2", {"conv_L_cache": 5}, ["conv.conv.weight", "[64, 1, 3]", "[64, 1, 5]"]),
        ("lfm2", {"conv_bias": True}, ["conv_bias", "True", "False"]),
        ("lfm2-adjusted", {"full_attn_idxs": [3]}, ["full_attn_idxs", "from 0 to 2"]),
        ("lfm2", {"layer_types": ["conv", "full_attention"] * 2}, ["self_attn", "no such tensor"]),
        ("llama-2", {"layer_types": ["conv", "full_attention"]}, ["layer_types", "conv", "full_attention alone"]),
        ("phi", {"qk_layernorm": True}, ["qk_layernorm", "True"]),
        ("starcoder2", {"hidden_act": "gelu"}, ["hidden_act", "'gelu'"]),
        ("cohere", {"use_qk_norm": True}, ["use_qk_norm", "True"]),
        ("cohere2", {"head_dim": 32}, ["head_dim", "32", "hidden_size / num_attention_heads = 16"]),
        ("glm", {"partial_rotary_factor": 0.2}, ["partial_rotary_factor", "even"]),
        ("hunyuan", {"rope_parameters": {"rope_type": "dynamic"}}, ["rope_type", "'dynamic'"]),
        ("olmo", {"clip_qkv": 8.0}, ["clip_qkv", "8.0"]),
        ("exaone", {"num_hidden_layers": 3}, ["num_layers", "got 2", "the same as num_hidden_layers"]),
        ("gemma", {"use_bidirectional_attention": True}, ["use_bidirectional_attention", "True"]),
        ("ministral", {"sliding_window": None}, ["sliding_window", "since layers slide"]),
        ("qwen2_vl", {"text_config": {"model_type": "llama"}}, ["text_config: model_type", "'llama'"]),
        ("lfm3", {"use_sandwich_norm": False}, ["use_sandwich_norm", "False"]),
        (
            "llama-2",
            {"model_type": "mamba"},
            ["'mamba'", "an architecture without Mamba layers", "docs/reference/architectures.md"],
        ),
        (
            "gemma4",
            {"model_type": "gemma4_assistant"},
            ["'gemma4_assistant'", "--draft-for"],
        ),
        ("gemma4", {"num_kv_shared_layers": 5}, ["num_kv_shared_layers", "fewer than num_hidden_layers = 5"]),
        ("gemma4", {"num_kv_shared_layers": 4}, ["num_kv_shared_layers", "full_attention", "point forward"]),
        ("gemma4", {"num_kv_shared_layers": -1}, ["num_kv_shared_layers", "-1"]),
        ("gemma4", {"layer_types": ["sliding_attention"] * 4 + ["mamba"]}, ["layer_types", "mamba"]),
        ("gemma4", {"vocab_size_per_layer_input": 256}, ["vocab_size_per_layer_input", "got 256", "expected 320"]),
        ("gemma4", {"hidden_size_per_layer_input": 16}, ["embed_tokens_per_layer", "[320, 40]", "[320, 80]"]),
        ("gemma4", {"enable_moe_block": True}, ["enable_moe_block", "True"]),
        ("gemma4", {"attention_k_eq_v": True}, ["attention_k_eq_v", "True"]),
        ("gemma4", {"use_bidirectional_attention": "all"}, ["use_bidirectional_attention", "'all'", "'vision'"]),
        ("gemma4", {"global_head_dim": 33}, ["global_head_dim", "33", "even"]),
        ("gemma4-newer", {"per_layer_config": {"1": {"head_dim": 48}}}, ["per_layer_config", "one head_dim"]),
        ("gemma4-newer", {"per_layer_config": {"1": {"experts": 4}}}, ["per_layer_config", "experts"]),
        ("gemma4-multimodal", {"text_config": {"model_type": "llama"}}, ["text_config: model_type", "'llama'"]),
        ("lfm3", {"sliding_window": None}, ["sliding_window", "since layers slide"]),
    ],
)
def test_a_configuration_that_contradicts_itself_is_refused_by_field(tmp_path, name, override, words):
    write_checkpoint(tmp_path, ARCHITECTURES[name])
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | override))
    with pytest.raises(CheckpointError) as refusal:
        Checkpoint.open(str(tmp_path))
    assert all(word in str(refusal.value) for word in words), refusal.value


@pytest.mark.parametrize("name", sorted(ARCHITECTURES))
def test_size_reads_what_export_reads(tmp_path, name):
    checkpoint = opened(tmp_path, name)
    subject = find_subject(tmp_path, Overrides(context=64, ar=(1, 16)))
    spec, groups = checkpoint.spec, subject.geometry.groups()
    assert groups == DecoderInterface.of(spec, 64, "u8", "columns", "u16").cache.groups()
    assert sum(group.layers for group in groups if not isinstance(group, DeltaSpec)) == sum(
        len(spec.mixers(layer)) for layer in range(spec.layers) if spec.owns_cache(layer)
    )
    of_layers = {
        layer: group for group in groups if isinstance(group, RowSpec) for layer in group.numbers or range(group.layers)
    }
    for layer in spec.attention_layers:
        found, sizes = of_layers[spec.cache_layer(layer)], spec.of_layer(layer)
        assert (found.kv_heads, found.head_dim) == (sizes.kv_heads, sizes.head_dim)
    matrices = [view for view in views(spec) if view.name.startswith("model.layers.") and len(view.shape) == 2]
    assert subject.decoder.all_layer_parameters == sum(np.prod(view.shape) for view in matrices)
    assert any(group.window < 64 for group in subject.geometry.rows()) is any(spec.windows_in(64))


OTHERS = [
    "gemma4-newer",
    "qwen2-sliding",
    "qwen3",
    "phi3",
    "olmo3",
    "ministral3",
    "mistral3",
    "exaone4",
    "gemma3-multimodal",
    "gemma",
    "vaultgemma",
    "ministral",
    "internlm3",
    "hyperclovax",
    "glm",
    "hunyuan",
    "olmo",
    "cohere2",
    "arcee",
    "starcoder2",
    "stablelm",
    "phi",
    "nemotron",
    "jais2",
    "gpt_neox",
    "gpt_neox-serial",
    "gptj",
    "apertus",
    "cwm",
    "llama4",
    "nanochat",
]
APART = ("hunyuan", "cohere2", "arcee", "phi", "gpt_neox", "apertus", "nanochat", "llama4")
"""With operations, or an order of them, that `EVERY_OPERATION` has not."""
DEVICE = find("SM8650")
TEXT = "The quick brown fox jumps over the lazy dog, then sleeps until noon."


def calibrated(checkpoint: Checkpoint, folder: Path, **changes) -> Path:
    (folder / "text").write_text(TEXT)  # bytes that calibration never saw would be clipped: these weights are noise
    options = {"context": 64, "ar": (1, 16), "calibration": folder / "text", **changes}
    return exported(checkpoint.folder, export_options(**options))


def sqnr_db(exact: np.ndarray, found: np.ndarray) -> float:
    return float(10 * np.log10(np.square(exact).sum() / np.square(exact - found).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("name", variants([*EVERY_OPERATION, *OTHERS], EVERY_OPERATION))
def test_the_graphs_lose_what_int8_weights_lose(tmp_path, name):
    """In layers with windows of 24 in a context of 64, on the CPU; int8 matrices of noise alone give about 32 dB."""
    checkpoint = opened(tmp_path / "checkpoint", name, gain=1.0)
    tokens = [256, *checkpoint.encode(TEXT)][:64]
    expected = next(Reference(checkpoint, 64).logits([np.array(tokens)]))
    assert sqnr_db(expected, edgekv.load(calibrated(checkpoint, tmp_path)).score(tokens)) > 28


@pytest.mark.parametrize("name", ["smollm3", "granite", "olmo2", "exaone4", *APART])
def test_tflite_graphs_lose_no_more(tmp_path, name):
    checkpoint = opened(tmp_path / "checkpoint", name, gain=1.0)
    tokens = [256, *checkpoint.encode(TEXT)][:40]
    expected = next(Reference(checkpoint, 64).logits([np.array(tokens)]))
    bundle = calibrated(checkpoint, tmp_path, graph_format="tflite", kv_dtype="s8")
    assert sqnr_db(expected, edgekv.load(bundle, "litert").score(tokens)) > 28


def test_a_context_that_needs_scaled_queries_is_refused_by_field(tmp_path):
    checkpoint = opened(tmp_path / "checkpoint", "ministral3")
    with pytest.raises(UsageError, match=r"original_max_position_embeddings .*llama_4_scaling_beta.* = 128"):
        export_bundle(checkpoint, tmp_path / "bundle", export_options(context=192, ar=(1, 16)))


def test_keys_that_are_not_rotated_are_not_moved(tmp_path):
    bundle = calibrated(opened(tmp_path / "checkpoint", "smollm3"), tmp_path)
    assert open_bundle(bundle).manifest.model.unrotated == {1}
    with pytest.raises(UsageError, match="sinks: got layers without a rotary embedding"):
        edgekv.load(bundle, policy="sinks(2, 20)")


def test_keys_with_a_norm_behind_their_rotation_are_not_moved(tmp_path):
    bundle = calibrated(opened(tmp_path / "checkpoint", "hunyuan"), tmp_path)
    with pytest.raises(UsageError, match="sinks: got norms of keys behind their rotary embedding"):
        edgekv.load(bundle, policy="sinks(2, 20)")


def test_the_residual_of_a_model_with_layer_norms_has_the_mean_0(tmp_path):
    checkpoint = opened(tmp_path, "cohere2")
    assert np.abs(checkpoint.tensor("model.embed_tokens.weight").mean(axis=1)).max() < 1e-7
    for name in ("self_attn.o_proj", "mlp.down_proj"):
        assert np.abs(checkpoint.tensor(f"model.layers.0.{name}.weight").mean(axis=0)).max() < 1e-7
    assert np.abs(checkpoint.tensor("lm_head.weight").mean(axis=1)).max() > 1e-3, "the head is as stored"


@pytest.mark.parametrize("name", ["glm", "cohere2"])
def test_an_adapter_in_slots_changes_what_a_merged_one_changes(tmp_path, name):
    """Rows of q in another order, and outputs of o_proj without their mean."""
    folder, adapter = write_checkpoint(tmp_path / "base", ARCHITECTURES[name]), tmp_path / "adapter"
    write_adapter(adapter, folder, ("q_proj", "o_proj"))
    choice, base = AdapterChoice(adapter), Checkpoint.open(str(folder))
    merged = Checkpoint.open(str(folder), [choice])
    found = folded_factors(Adapter.open(choice), ExportedBase(base, base))
    for target, gain in ("q", base.spec.query_gain), ("o", 1.0):
        key = f"model.layers.0.self_attn.{target}_proj.weight"
        change = (merged.tensor(key) - base.tensor(key)) * gain
        assert np.abs(change - found[0, target].left @ found[0, target].right).max() < 1e-5 * np.abs(change).max()


def test_an_adapter_of_a_model_whose_norms_have_biases_has_no_slots(tmp_path):
    options = export_options(context=64, ar=(1, 16), lora=LoraOptions(4), device="SM8750")
    with pytest.raises(UsageError, match="--lora-slots: got norms with biases"):
        export_bundle(opened(tmp_path / "checkpoint", "phi"), tmp_path / "bundle", options)


def test_a_part_without_rotated_layers_reads_no_rotary_tables(tmp_path):
    checkpoint = opened(tmp_path / "checkpoint", "smollm3", gain=1.0)
    tokens = checkpoint.encode(TEXT)[:40]
    whole = edgekv.load(calibrated(checkpoint, tmp_path)).score(tokens)
    divided = calibrated(checkpoint, tmp_path, splits=3)
    graph = open_bundle(divided).manifest.graphs[0]
    inputs = [stored_graph(divided / part.file).graph.input for part in graph.parts]
    assert [any("position_ids" in each.name for each in ports) for ports in inputs] == [True, False, True, False]
    assert (edgekv.load(divided).score(tokens) == whole).all()


def test_no_architecture_is_said_to_lack_what_it_has():
    assert not LACKING.keys() & families.ARCHITECTURES.keys()
    assert {*LACKING.values()} >= OTHER_CACHES


def test_the_page_lists_what_can_be_exported_and_what_is_refused():
    """The tables that tests/golden/zoo.py has written."""
    page = (Path(__file__).parents[3] / "docs/reference/architectures.md").read_text()
    tables = page.partition("<!-- written by tests/golden/zoo.py -->")[2].partition("<!-- end -->")[0].split("\n\n")
    equal, refused = (re.findall(r"^\| (.*) \|$", table, re.M)[1:] for table in tables if "|" in table)
    assert [row.split("`")[1] for row in equal] == sorted(families.ARCHITECTURES.keys() - WITHOUT_TEXT)
    sentences = {model_type: row.split(" | ")[0] for row in refused for model_type in re.findall("`(.*?)`", row)}
    assert sentences.items() <= LACKING.items()
    assert f"{len(equal)} are equal, {len(sentences)} are refused, none differs." in tables
    assert len(sentences) > 100


def test_a_constant_of_an_activation_that_graphs_do_not_have_is_refused(tmp_path):
    write_checkpoint(tmp_path, ARCHITECTURES["apertus"])
    tensors = load_file(tmp_path / "model.safetensors")
    key = "model.layers.1.mlp.act_fn.beta"
    assert tensors[key].shape == (), "a number without dimensions, as transformers writes it"
    save_file(tensors | {key: np.array(0.25, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"act_fn\.beta: got 0.25; expected 0.5"):
        Checkpoint.open(str(tmp_path))


@pytest.mark.parametrize(("name", "head"), [("gptj", "lm_head.weight"), ("gpt_neox", "embed_out.weight")])
def test_a_head_is_known_by_the_name_that_checkpoints_have(tmp_path, name, head):
    fields = ARCHITECTURES[name] | {"tie_word_embeddings": True}
    Checkpoint.open(str(write_checkpoint(tmp_path / "tied", fields)))
    folder = write_checkpoint(tmp_path / "apart", ARCHITECTURES[name])
    shutil.copy(tmp_path / "tied" / "config.json", folder)
    with pytest.raises(CheckpointError, match=f"{head}: got another matrix than the embedding"):
        Checkpoint.open(str(folder))
    folder = write_checkpoint(tmp_path / "without", fields)
    config = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=f"{head}: got no such tensor; expected a head"):
        Checkpoint.open(str(folder))


def test_masks_that_older_programs_stored_are_left_out(tmp_path):
    write_checkpoint(tmp_path, ARCHITECTURES["gpt_neox"])
    tensors, at = load_file(tmp_path / "model.safetensors"), "gpt_neox.layers.0.attention."
    before = Checkpoint.open(str(tmp_path)).tensor("model.layers.0.self_attn.q_proj.bias")
    masks = {"bias": np.ones((1, 1, 8, 8), bool), "masked_bias": np.array(-1e9, np.float32)}
    save_file(tensors | {at + name: value for name, value in masks.items()}, tmp_path / "model.safetensors")
    assert (Checkpoint.open(str(tmp_path)).tensor("model.layers.0.self_attn.q_proj.bias") == before).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention_chunk_size": 128}, "attention_chunk_size = 128"),
        ({"attn_temperature_tuning": True, "floor_scale": 129}, "floor_scale .* = 128"),
    ],
)
def test_a_context_beyond_a_chunk_or_unscaled_queries_is_refused_by_field(tmp_path, changes, words):
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["llama4"] | changes)
    with pytest.raises(UsageError, match=words):
        export_bundle(Checkpoint.open(str(folder)), tmp_path / "bundle", export_options(context=192, ar=(1, 16)))


def test_an_architecture_is_one_short_file():
    for path in Path(families.__file__).parent.glob("*.py"):
        assert len(path.read_text().splitlines()) <= 60, path.name
        if path.stem != "__init__":
            module = importlib.import_module(f"{families.__name__}.{path.stem}")
            assert module.DRAFTER_TYPES if hasattr(module, "DRAFTER_TYPES") else module.MODEL_TYPES


def test_a_new_file_in_the_folder_is_a_new_architecture(tmp_path):
    """In a process of its own, which finds a second folder of families."""
    (tmp_path / "zamba.py").write_text("MODEL_TYPES = ('zamba',)\n\ndef describe(config):\n    return None\n")
    program = f"from edgekv.spec import families; families.__path__.append({str(tmp_path)!r}); "
    program += "from edgekv.spec.families import find_families; print(sorted(find_families()[0]))"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "'zamba'" in found and "'llama'" in found


def test_keys_of_two_rotary_embeddings_are_not_moved(tmp_path):
    bundle = calibrated(opened(tmp_path / "checkpoint", "gemma3-newer"), tmp_path)
    with pytest.raises(UsageError, match="sinks: got layers with two rotary embeddings"):
        edgekv.load(bundle, policy="sinks(2, 20)")


@pytest.mark.htp
@pytest.mark.parametrize("name", variants([*EVERY_OPERATION, *APART], EVERY_OPERATION))
def test_the_htp_runs_every_operation_in_integers(tmp_path, name):
    """Between them they have every operation: biases, norms of heads and of all heads, norms behind blocks, partial and
    no rotation, two rotary embeddings, windows, GELU, both soft caps, multipliers, norms behind the rotation, blocks in
    parallel behind one norm and two, ReLU, LayerNorm with biases, exact GELU, xIELU, norms of heads in some layers."""
    checkpoint = opened(tmp_path / "checkpoint", name, gain=1.0)
    tokens = [256, *checkpoint.encode(TEXT)][:32]
    bundle = calibrated(checkpoint, tmp_path)
    (decode,) = [g for g in open_bundle(bundle).manifest.graphs if g.role == "decode"]
    assert floating_nodes([bundle / part.file for part in decode.parts], DEVICE) == []
    on_htp, on_cpu = (edgekv.load(bundle, engine).score(tokens) for engine in ("htp", "cpu"))
    assert sqnr_db(on_cpu, on_htp) > 38  # queries that share keys share an encoding


def test_gemma_3_without_windows_has_one_rotary_embedding(tmp_path):
    full = {**ARCHITECTURES["gemma3"], "layer_types": ["full_attention"] * 3}
    spec = Checkpoint.open(str(write_checkpoint(tmp_path, full))).spec
    assert spec.ropes == (spec.rope,)
    assert spec.windows == ()
