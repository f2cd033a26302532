import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from edgekv.errors import CheckpointError
from exporters.checkpoint import Checkpoint
from exporters.config import Config
from exporters.rope import Rope
from tests.checkpoints import LLAMA3, NEWER, OLDER, write_checkpoint, write_tokenizer


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
        ({"model_type": "mamba"}, ["model_type", "'mamba'", "llama"]),
        ({"hidden_size": None}, ["hidden_size", "nothing"]),
        ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
        ({"num_key_value_heads": 3}, ["num_key_value_heads", "divisor"]),
        ({"head_dim": 15}, ["head_dim", "even"]),
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"attention_bias": True}, ["q_proj.bias", "no such tensor"]),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, ["rope_type", "yarn"]),
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


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    write_checkpoint(tmp_path)
    write_tokenizer(tmp_path / "tokenizer.json", extra=100)
    assert "id 355" in refusal(tmp_path) and "vocab_size = 320" in refusal(tmp_path)


def test_special_tokens_that_the_tokenizer_lacks_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 300}))
    assert "eos_token_id" in refusal(tmp_path)


def test_integer_weights_are_refused(tmp_path):
    write_checkpoint(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.norm.weight"] = np.ones(64, np.int8)
    save_file(weights, tmp_path / "model.safetensors")
    assert "model.norm.weight" in refusal(tmp_path) and "I8" in refusal(tmp_path)


@pytest.mark.parametrize("name", ["no/such/folder", "./nothing", "/nowhere"])
def test_a_name_that_is_no_folder_and_no_hub_id_is_refused(name):
    assert "no folder" in refusal(name)
