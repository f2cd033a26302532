import json
import os
import re

import ml_dtypes
import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import edgekv
from edgekv.errors import BundleError, CheckpointError, UsageError
from edgekv.plan import Overrides, find_subject
from edgekv.spec import SplitChannel
from edgekv.spec.config import Config
from edgekv.spec.rope import Rope
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.export import export_bundle
from tests.support.checkpoints import ARCHITECTURES, LLAMA3, NEWER, OLDER, write_checkpoint, write_tokenizer
from tests.support.exports import export_options, exported


@pytest.mark.parametrize("form", [NEWER, OLDER], ids=["newer", "older"])
def test_both_forms_of_config_are_read(tmp_path, form):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, form)))
    assert checkpoint.spec.tied_head is (form is NEWER)
    assert checkpoint.spec.rope.rope_type == ("default" if form is NEWER else "llama3")
    assert checkpoint.special.eos == (257, 258)


def rope(fields) -> Rope:
    return Rope.from_config(Config(fields), 64)


def test_older_and_newer_llama3_scaling_are_the_same():
    older = rope({"rope_theta": 5e5, "rope_scaling": LLAMA3})
    newer = rope({"rope_parameters": {"rope_theta": 5e5, **LLAMA3}})
    assert older == newer
    assert rope({"rope_theta": 5e5, "rope_scaling": None}).rope_type == "default"


def test_llama3_stretches_slow_pairs_by_the_factor_and_leaves_fast_ones():
    plain = rope({"rope_theta": 5e5}).rotation(64).inverse_frequencies
    scaled = rope({"rope_theta": 5e5, "rope_scaling": LLAMA3}).rotation(64).inverse_frequencies
    assert scaled[0] == plain[0]
    assert scaled[-1] == pytest.approx(plain[-1] / 8)


def refusal(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        Checkpoint.open(str(folder))
    return str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"model_type": "mamba"}, ["model_type", "'mamba'", "without Mamba layers"]),
        ({"hidden_size": None}, ["hidden_size", "nothing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["q_proj.bias", "no such tensor"]),
        ({"rope_parameters": {"rope_type": "ntk", "rope_theta": 1e4}}, ["rope_type", "ntk"]),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, ["factor"]),
        ({"intermediate_size": 128}, ["gate_proj", "128"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight", "no such tensor"]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_config_that_cannot_be_exported_is_refused_by_field(tmp_path, override, words):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | override
    (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    message = refusal(tmp_path)
    assert all(word in message for word in words), message


def test_an_activation_that_is_null_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"hidden_act": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert "hidden_act: got nothing; expected 'silu'" in message


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_missing_file_is_named(tmp_path, name):
    write_checkpoint(tmp_path)
    (tmp_path / name).unlink()
    assert name in refusal(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
@pytest.mark.parametrize("kept", [0, 5, 0.5, 0.999])
def test_a_truncated_file_is_named(tmp_path, name, kept):
    write_checkpoint(tmp_path)
    content = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(content[: kept if kept >= 1 else int(kept * len(content))])
    assert name in refusal(tmp_path)


def test_a_part_that_the_index_names_must_be_there(tmp_path):
    write_checkpoint(tmp_path)
    index = {"weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "model-00002-of-00002.safetensors" in refusal(tmp_path)


def test_an_older_shard_is_named(tmp_path):
    """A tensor in two of the files that an index names: it belongs to the one that the index says."""
    write_checkpoint(tmp_path, shards=2)
    first, second = sorted(tmp_path.glob("model-*.safetensors"))
    tensors = load_file(second)
    save_file(tensors | {"model.embed_tokens.weight": load_file(first)["model.embed_tokens.weight"]}, second)
    message = refusal(tmp_path)
    assert f"{second.name}: model.embed_tokens.weight: got a tensor that {first.name} has too" in message


def test_a_whole_file_beside_an_index_that_does_not_name_it_is_refused(tmp_path):
    """transformers reads the whole file, other programs the index."""
    write_checkpoint(tmp_path, shards=2)
    save_file({"lm_head.weight": np.zeros((320, 64), np.float32)}, tmp_path / "model.safetensors")
    assert "model.safetensors: got it beside model.safetensors.index.json" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("rename", "words"),
    [
        (lambda name: name.removeprefix("model."), ["embed_tokens.weight", "a base model without a head"]),
        (lambda name: name.replace("lm_head", "score"), ["score.weight", "a reranker", "lm_head.weight"]),
        (lambda name: name.replace("lm_head", "classifier"), ["classifier.weight", "classifies"]),
        (lambda name: name if "lm_head" not in name else "", ["lm_head.weight", "no such tensor", "tie_word_embedd"]),
    ],
    ids=["embeddings", "reranker", "classifier", "no head"],
)
def test_a_model_that_writes_no_text_is_refused_by_name(tmp_path, rename, words):
    """As Qwen3-Embedding, whose names have no `model.`, and Qwen3ForSequenceClassification."""
    write_checkpoint(tmp_path, OLDER)
    tensors = {rename(name): value for name, value in load_file(tmp_path / "model.safetensors").items()}
    tensors.pop("", None)
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(tmp_path)
    assert all(word in message for word in words), message


@pytest.mark.parametrize("quantized", [False, True])
def test_a_folder_of_mlx_is_refused_by_name(tmp_path, quantized):
    """Its norms and convolutions are changed, quantized or not."""
    write_checkpoint(tmp_path)
    if quantized:
        config, how = json.loads((tmp_path / "config.json").read_text()), {"group_size": 64, "bits": 4}
        (tmp_path / "config.json").write_text(json.dumps(config | {"quantization": how, "quantization_config": how}))
    else:
        tensors = load_file(tmp_path / "model.safetensors")
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    message = refusal(tmp_path)
    assert ("quantization: got those of MLX" if quantized else "format: got 'mlx'") in message
    assert "Take the checkpoint that it was converted from" in message


UNREAD = "expected a field that this architecture is known to have"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"a_field_of_tomorrow": 1}, ["config.json: a_field_of_tomorrow: got 1", UNREAD, "If it does not, remove it"]),
        ({"rope_parameters": {"rope_theta": 1e4, "alpha": 2}}, ["config.json: rope_parameters: alpha: got 2", UNREAD]),
        ({"sliding_window": 8}, ["sliding_window: got 8", UNREAD]),
        ({"layer_types": ["sliding_attention"] * 2}, ["layer_types", "full_attention alone"]),
        ({"is_causal": False}, ["is_causal: got False; expected True"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor: got 0.5; expected 1,"]),
        ({"use_bidirectional_attention": True}, ["use_bidirectional_attention", UNREAD]),
        ({"per_layer_config": {"0": {"head_dim": 8}}}, ["per_layer_config", UNREAD]),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_field_that_nothing_reads_is_refused_by_name(tmp_path, fields, words):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | fields
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path)
    assert all(word in message for word in words), message
    with pytest.raises(CheckpointError):  # nor planned
        find_subject(tmp_path, Overrides(context=64, ar=(1, 16)))


@pytest.mark.parametrize(
    "fields",
    [
        {"hidden_act": "swish"},
        {"a_field_of_tomorrow": None, "another": [], "pruned_heads": {}},
        {"torch_dtype": "bfloat16", "attention_dropout": 0.1, "use_cache": False, "pretraining_tp": 2},
        {"id2label": {"0": "A"}, "sep_token_id": 3, "temperature": 0.6, "transformers.js_config": {"dtype": "q4"}},
        {"use_sliding_window": False, "qk_layernorm": False},
        {"rope_parameters": {"type": "default", "rope_type": "default", "rope_theta": 1e4}},
    ],
)
def test_fields_that_change_nothing_are_accepted(tmp_path, fields):
    expected = Checkpoint.open(str(write_checkpoint(tmp_path / "a"))).spec
    config = json.loads((write_checkpoint(tmp_path / "b") / "config.json").read_text()) | fields
    (tmp_path / "b" / "config.json").write_text(json.dumps(config))
    assert Checkpoint.open(str(tmp_path / "b")).spec == expected


def test_absent_fields_have_the_defaults_of_transformers(tmp_path):
    write_checkpoint(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["max_position_embeddings"], config["rms_norm_eps"], config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = Checkpoint.open(str(tmp_path)).spec
    assert (spec.max_positions, spec.eps, spec.rope.theta) == (2048, 1e-6, 1e4)


def test_biases_of_zero_are_left_out(tmp_path):
    write_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = {"model.layers.0.self_attn.q_proj.bias": np.zeros(64, np.float32)}
    save_file(tensors | bias, tmp_path / "model.safetensors")
    assert not Checkpoint.open(str(tmp_path)).spec.biased
    save_file(tensors | {name: value + 1 for name, value in bias.items()}, tmp_path / "model.safetensors")
    assert "q_proj.bias: got a tensor that config.json does not account for" in refusal(tmp_path)


def test_a_tensor_in_two_spellings_is_refused(tmp_path):
    write_checkpoint(tmp_path, ARCHITECTURES["lfm3"])
    tensors, name = load_file(tmp_path / "model.safetensors"), "model.layers.2.self_attn.g_proj.weight"
    save_file(tensors | {name.replace("g_proj", "gate_proj"): tensors[name]}, tmp_path / "model.safetensors")
    assert "gate_proj.weight" in refusal(tmp_path) and "mean the same tensor" in refusal(tmp_path)


def test_rope_scaling_replaces_rope_parameters():
    """As in transformers, with the base beside it or the default one."""
    both = {"rope_parameters": {"rope_theta": 5e5, **LLAMA3}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert rope(both) == rope({"rope_scaling": both["rope_scaling"]})
    assert rope(both | {"rope_theta": 7.0}).theta == 7.0


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json", extra=100, special=False)
    assert "id 355" in refusal(tmp_path) and "vocab_size = 320" in refusal(tmp_path)


def test_a_special_token_beyond_the_vocabulary_is_refused_where_a_text_has_it(tmp_path):
    """As Gemma 3's <image_soft_token>, whose id is its vocab_size."""
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json", extra=65)
    checkpoint = Checkpoint.open(str(tmp_path))
    assert checkpoint.encode("<|63|>") == [319]
    with pytest.raises(UsageError, match=re.escape("text: got the token '<|64|>' with id 320; expected ids below 320")):
        checkpoint.encode("a picture: <|64|>")
    bundle = exported(tmp_path, export_options(context=64, ar=(1, 16)))
    with pytest.raises(UsageError, match=re.escape("got the token '<|64|>' with id 320")):
        edgekv.load(bundle).encode("<|64|>")


def test_a_special_token_of_the_model_must_be_in_the_vocabulary(tmp_path):
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json", extra=65)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 320}))
    assert "eos_token_id: got 320; expected the id of a token of tokenizer.json below vocab_size = 320" in refusal(
        tmp_path
    )


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (["manifest.json", "tokenizer.json"], ["a bundle", "edgekv generate"]),
        (["genie_config.json", "tokenizer.json"], ["a folder for Genie", "the checkpoint that it was made from"]),
        (["genai_config.json"], ["a folder for onnxruntime-genai"]),
        (["model-q4_0.gguf"], ["a folder of GGUF files", "model-q4_0.gguf"]),
        (["adapter_config.json", "adapter_model.safetensors"], ["LoRA", "edgekv export BASE --lora"]),
        (["config.json", "pytorch_model.bin"], ["pickled weights", "safe_serialization=True"]),
        (["config.json", "pytorch_model.bin.index.json"], ["pickled weights"]),
        (["config.json", "consolidated.00.pth"], ["pickled weights (consolidated.00.pth)", "save_pretrained(NEW"]),
    ],
)
def test_what_is_no_checkpoint_is_called_what_it_is(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_text("{}")
    assert all(word in refusal(tmp_path) for word in words), refusal(tmp_path)
    with pytest.raises((CheckpointError, BundleError)) as caught:
        find_subject(tmp_path, Overrides(context=64))
    assert all(word in str(caught.value) for word in words[:1]) or "manifest.json" in files


@pytest.mark.parametrize(("name", "word"), [("a.gguf", "GGUF"), ("model.safetensors", "Give its folder")])
def test_a_file_of_weights_is_no_checkpoint(tmp_path, name, word):
    (tmp_path / name).write_text("")
    assert word in refusal(tmp_path / name)


def test_a_pipe_is_not_read_as_weights(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    os.mkfifo(tmp_path / "model.safetensors")
    assert "no regular file" in refusal(tmp_path)


def test_a_huge_tokenizer_is_refused_before_it_is_read(tmp_path):
    write_checkpoint(tmp_path)
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(1 << 40)
    assert "tokenizer.json: got 1,099,511,627,776 bytes" in refusal(tmp_path)


def test_special_tokens_that_the_tokenizer_lacks_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 300}))
    assert "eos_token_id" in refusal(tmp_path)


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("shards", [1, 3])
def test_every_float_type_and_any_number_of_files_give_the_same_numbers(tmp_path, dtype, shards):
    whole = Checkpoint.open(str(write_checkpoint(tmp_path / "whole", OLDER)))
    other = Checkpoint.open(str(write_checkpoint(tmp_path / "other", OLDER, dtype=dtype, shards=shards)))
    other.check_values()
    for key in ("model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "lm_head.weight"):
        assert np.allclose(whole.tensor(key), other.tensor(key), rtol=2**-11, atol=2**-24)


def test_files_beside_those_of_the_index_are_not_read(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    save_file({"tok_embeddings.weight": np.ones((2, 2), np.float32)}, tmp_path / "consolidated.safetensors")
    Checkpoint.open(str(tmp_path))


def test_an_index_that_names_another_file_is_refused(tmp_path):
    write_checkpoint(tmp_path, shards=2)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00002.safetensors"
    path.write_text(json.dumps(index))
    assert "model.embed_tokens.weight: got no such tensor in model-00002-of-00002" in refusal(tmp_path)


def change_weights(folder, **changes) -> None:
    weights = load_file(folder / "model.safetensors")
    for name, value in changes.items():
        key = name.replace("__", ".")
        weights[key] = value(weights) if callable(value) else value
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_tensor_with_what_is_no_number_is_named(tmp_path, dtype, value):
    write_checkpoint(tmp_path, dtype=dtype)
    name = "model.layers.1.mlp.up_proj.weight"
    broken = load_file(tmp_path / "model.safetensors")[name].copy()
    broken[-1, 3] = value
    change_weights(tmp_path, **{name: broken})
    with pytest.raises(CheckpointError, match=f"{name}: got 1 elements that are NaN or infinite"):
        Checkpoint.open(str(tmp_path)).check_values()


@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float32])
@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
def test_absurd_weights_are_refused_by_name(tmp_path, dtype, name):
    """As finite as they are, such an export gave token 0 forever."""
    write_checkpoint(tmp_path, dtype=dtype)
    broken = load_file(tmp_path / "model.safetensors")[name].copy()
    broken[-1] = -3e38
    change_weights(tmp_path, **{name: broken})
    checkpoint = Checkpoint.open(str(tmp_path))
    with pytest.raises(
        CheckpointError, match=f"weights: {name}: got elements of up to 3e\\+38; expected at most 1e\\+06"
    ):
        export_bundle(checkpoint, tmp_path / "bundle", export_options(context=64, ar=(1, 16)))
    assert not (tmp_path / "bundle").exists()


def test_a_multiplier_that_makes_weights_absurd_is_refused_by_tensor(tmp_path):
    write_checkpoint(tmp_path, ARCHITECTURES["granite"], {"embedding_multiplier": 1e9})
    with pytest.raises(CheckpointError, match=r"weights: model.embed_tokens.weight: got elements of up to"):
        Checkpoint.open(str(tmp_path)).check_values()


@pytest.mark.slow
def test_activations_that_overflow_on_calibration_are_refused_by_result(tmp_path):
    write_checkpoint(tmp_path)
    large = {f"model.layers.0.mlp.{part}_proj.weight": 1e5 for part in ("gate", "up", "down")}
    weights = load_file(tmp_path / "model.safetensors")
    change_weights(tmp_path, **{name: (weights[name] * value).astype(np.float32) for name, value in large.items()})
    with pytest.raises(CheckpointError, match=r"weights: the result layers.0.mlp: got values from .* at most 1e\+09"):
        export_bundle(Checkpoint.open(str(tmp_path)), tmp_path / "bundle", export_options(context=64, ar=(1, 16)))
    assert not (tmp_path / "bundle").exists()


def test_a_tensor_that_the_architecture_does_not_have_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    change_weights(tmp_path, model__layers__0__self_attn__q_proj__bias=np.ones(64, np.float32))
    assert "model.layers.0.self_attn.q_proj.bias: got a tensor that config.json does not account" in refusal(tmp_path)


def test_frequencies_that_older_checkpoints_keep_are_no_weights(tmp_path):
    write_checkpoint(tmp_path)
    change_weights(tmp_path, model__layers__0__self_attn__rotary_emb__inv_freq=np.ones(8, np.float32))
    Checkpoint.open(str(tmp_path))


def test_a_tied_head_may_be_stored_again_but_not_be_another(tmp_path):
    write_checkpoint(tmp_path)
    change_weights(tmp_path, lm_head__weight=lambda weights: weights["model.embed_tokens.weight"].copy())
    assert Checkpoint.open(str(tmp_path)).spec.tied_head
    change_weights(tmp_path, lm_head__weight=lambda weights: -weights["model.embed_tokens.weight"])
    assert "lm_head.weight: got another matrix" in refusal(tmp_path) and "tie_word_embeddings" in refusal(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = np.ones(64, np.int8)
    save_file(weights, tmp_path / "model.safetensors")
    assert "model.norm.weight" in refusal(tmp_path) and "I8" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "/nowhere"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_refused(name):
    assert "no such file or folder" in refusal(name)


def write_config(folder, **changes) -> None:
    """A small checkpoint, whose configuration says something else than its weights."""
    path = write_checkpoint(folder) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_attention_heads", 10**9),
        ("vocab_size", 10**9),
        ("max_position_embeddings", 10**12),
        ("hidden_size", 10**3000),
        ("rms_norm_eps", 1e-310),
        ("intermediate_size", -1),
        ("num_hidden_layers", 1 << 14),
    ],
)
def test_absurd_sizes_are_refused_by_field_before_any_work(tmp_path, field, value):
    """The last one is in its own bound, but not together with the number of heads."""
    write_config(tmp_path, **{"num_key_value_heads": 64, "num_attention_heads": 64, field: value})
    assert refusal(tmp_path).startswith(f"config.json: {field}: got ")


def test_sizes_whose_product_is_absurd_are_refused(tmp_path):
    write_config(tmp_path, hidden_size=1 << 20, intermediate_size=1 << 22, num_hidden_layers=1 << 10)
    assert "parameters" in refusal(tmp_path)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, '{"hidden_size": ' + "1" * 5000 + "}"]
)
def test_json_that_no_parser_should_follow_is_refused(tmp_path, content):
    write_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(content)
    assert "config.json: got" in refusal(tmp_path)


def test_a_pipe_a_device_and_a_huge_file_are_not_read_as_json(tmp_path):
    write_checkpoint(tmp_path)
    path = tmp_path / "config.json"
    path.unlink()
    os.mkfifo(path)
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    path.symlink_to("/dev/zero")
    assert "not a regular file" in refusal(tmp_path)
    path.unlink()
    with path.open("wb") as file:
        file.truncate(1 << 40)
    assert "more than the limit" in refusal(tmp_path)


def test_a_checkpoint_is_derived_as_its_export_says_or_refused_by_the_field(tmp_path):
    checkpoint = Checkpoint.open(str(write_checkpoint(tmp_path, ARCHITECTURES["gemma2"])))
    split = (SplitChannel(channel=3, parts=4),)
    spec = msgspec.structs.replace(checkpoint.spec, limits=(8,), gives_hidden=True, split=split, vocabulary="shared")
    derived = checkpoint.as_spec(spec)
    assert derived.spec == spec and derived.as_spec(spec).spec == spec
    twice = checkpoint.as_spec(msgspec.structs.replace(spec, vocabulary="apart")).as_spec(spec)
    norm = "model.norm.weight"
    np.testing.assert_array_equal(derived.tensor(norm), twice.tensor(norm))
    np.testing.assert_array_equal(derived.tensor(norm), derived.as_spec(spec).tensor(norm))
    with pytest.raises(CheckpointError, match=r"another eps; expected the decoder of its export.*Give the checkpoint"):
        checkpoint.as_spec(msgspec.structs.replace(spec, eps=0.5))
    with pytest.raises(CheckpointError, match="another split"):
        derived.as_spec(checkpoint.spec)
