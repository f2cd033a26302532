"""GGUF files against the checkpoints that they were written from, and files that are broken."""

from __future__ import annotations

import json
import re
import shutil
import struct
import warnings
from contextlib import suppress
from pathlib import Path

import gguf
import numpy as np
import pytest
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer

import edgekv
from edgekv.cli import run
from edgekv.errors import CheckpointError, EdgeKVWarning
from edgekv.spec import views
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.gguf import GgufFile, gguf_tensors, rebuild_tokenizer
from exporters.checkpoint.gguf.part import Block, open_part
from exporters.checkpoint.gguf.tensors import K_TYPES, PLAIN_TYPES, TABLE_TYPES, GgufTensor
from exporters.checkpoint.gguf.tokenizer import _SPLITTERS, _scored_merges
from exporters.conformance.families import FAMILIES
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, OLDER, write_checkpoint
from tests.support.foreign_files import sentence_piece, write_gguf

PROMPT = [(7 * i) % 200 + 3 for i in range(40)]
SAME = [
    "llama-2",
    "llama-biased",
    "smollm2",
    "qwen2",
    "qwen3",
    "granite",
    "granitemoe",
    "olmo2",
    "olmo3",
    "gemma4",
    "qwen3_5",
    "arcee",
    "cohere",
    "ernie4_5",
    "exaone4",
    "gemma",
    "glm4",
    "gpt_neox",
    "jais2",
    "nemotron",
    "nemotron_h",
    "olmo",
    "olmoe",
    "phi",
    "seed_oss",
    "stablelm",
    "stablelm-parallel",
    "starcoder2",
]
ALTERED = {  # what a GGUF file says of these, where the test's checkpoint says something else
    "gemma2": {"query_pre_attn_scalar": 16},
    "gemma3": {"query_pre_attn_scalar": 16, "rope_scaling": None, "sliding_window_pattern": 6},
    "phi3": {"sliding_window": None, "max_position_embeddings": 64},
    "smollm3": {"num_hidden_layers": 5, "no_rope_layers": [1, 1, 1, 0, 1]},
    "mistral-0.3": {"model_type": "llama"},
    "lfm2": {"norm_eps": 3e-5},
    "lfm2_moe": {"norm_eps": 3e-5, "routed_scaling_factor": 1.0},
    "qwen3_moe": {"mlp_only_layers": []},
    "apertus": {"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    "cohere2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "exaone": {"rope_scaling": None},
    "falcon_h1-normed": {"mamba_norm_before_gate": False},
    "gpt_neox-serial": {"hidden_act": "gelu"},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "llama")


@pytest.fixture
def file(llama: Path, tmp_path: Path) -> Path:
    return write_gguf(llama, tmp_path / "model.gguf")


@pytest.mark.parametrize("name", [*SAME, *ALTERED])
def test_the_decoder_and_its_logits_are_those_of_the_checkpoint(name: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name] | ALTERED.get(name, {}))
    one = Checkpoint.open(str(folder))
    other = Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf")))
    assert other.spec.eps == pytest.approx(one.spec.eps)
    for view in views(one.spec):
        np.testing.assert_allclose(other.tensor(view.name), one.tensor(view.name), rtol=1e-6, atol=1e-6)
    exact, found = (next(iter(Reference(each, 64).logits([np.array(PROMPT)]))) for each in (one, other))
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-4 * np.abs(exact).max())
    assert (other.special.bos, other.special.eos) == (one.special.bos, one.special.eos)


def test_a_file_of_bamba_is_refused_by_its_rotary_embedding(tmp_path: Path) -> None:
    """Its architecture is that of Granite 4 H, whose attention rotates nothing."""
    folder = write_checkpoint(tmp_path / "checkpoint", {"model_type": "bamba", **FAMILIES["bamba"]})
    changes = {"granitehybrid.rope.scaling.finetuned": True, "granitehybrid.rope.dimension_count": None}
    with pytest.raises(CheckpointError, match="finetuned: got True; expected false: true stands for Bamba"):
        Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf", **changes)))


@pytest.mark.parametrize("kind", PLAIN_TYPES)
def test_every_simple_type_is_read_as_it_was_written(kind: str) -> None:
    values = np.random.default_rng(1).normal(0, 1, (6, 64)).astype(np.float32)
    stored = quantize(values, gguf.GGMLQuantizationType[kind])
    tensor = GgufTensor(Path("x"), values.shape, Block(stored, kind, values.shape, Path("x")))
    np.testing.assert_array_equal(tensor.read(slice(2, 5)), dequantize(stored, gguf.GGMLQuantizationType[kind])[2:5])
    np.testing.assert_array_equal(tensor.read(np.array([5, 0])), tensor.read(slice(None))[[5, 0]])
    assert np.abs(tensor.read(slice(None)) - values).max() < {"F32": 1e-9, "F16": 2e-3, "BF16": 2e-2}.get(kind, 0.3)


YARN_LLAMA = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
SCALINGS = {
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0},
    "yarn": YARN_LLAMA,
    "yarn with a factor of its own": YARN_LLAMA | {"attention_factor": 1.3},
    "yarn with other bounds": YARN_LLAMA | {"beta_fast": 16.0, "beta_slow": 2.0},
}


@pytest.mark.parametrize("name", SCALINGS)
def test_the_scaling_of_the_rotary_embedding_is_that_of_the_checkpoint(tmp_path: Path, name: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", {"rope_parameters": SCALINGS[name]})
    rope = Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf"))).spec.rope
    assert rope == Checkpoint.open(str(folder)).spec.rope
    assert rope.rope_type == name.split()[0]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"factor": 2.0}, ("linear", {"factor": 2.0})),  # llama.cpp's type of a factor without one
        ({"factor": 2.0, "type": "none"}, ("default", {})),
        ({"type": "yarn", "factor": 4.0}, ("yarn", {"original_max_position_embeddings": 256.0})),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.4}, ("yarn", {"attention_factor": 1.4})),
        ({"type": "yarn", "factor": 4.0, "yarn_log_multiplier": 1.0}, ("yarn", {"attention_factor": 1.0})),
    ],
)
def test_fields_of_rope_scaling_are_read_as_llama_cpp_means_them(llama: Path, tmp_path: Path, fields, expected) -> None:
    changes = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    rope = Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **changes))).spec.rope
    assert rope.rope_type == expected[0] and expected[1].items() <= rope.parameters.items()


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        ({"type": "yarn", "factor": 4.0, "yarn_ext_factor": 0.5}, "yarn_ext_factor: got 0.5"),
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.0}, "attn_factor: got 1.0"),  # or yarn's own: nobody knows
        ({"type": "yarn", "factor": 4.0, "attn_factor": 1.2, "yarn_attn_factor": 1.3}, "yarn_attn_factor: got 1.3"),
        ({"attn_factor": 1.2}, "attn_factor: got 1.2"),
        ({"type": "longrope"}, "rope.scaling.type: got 'longrope'"),
        ({"alpha": 1000.0}, "rope.scaling.alpha: got 1000.0"),
        ({"type": "yarn", "factor": "4"}, "rope.scaling.factor: got '4'"),
    ],
)
def test_rope_scaling_that_cannot_be_meant_is_refused(llama: Path, tmp_path: Path, fields, refusal) -> None:
    changes = {f"llama.rope.scaling.{name}": value for name, value in fields.items()}
    with pytest.raises(CheckpointError, match=re.escape(refusal)):
        Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **changes)))


@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_any_divisors_of_frequencies_are_read_where_llama_cpp_reads_them(tmp_path: Path, architecture: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", {"model_type": architecture, "rope_theta": 1e4})
    divisors = np.array([1.0, 1.5, 1.0, 4.0, 7.0, 7.5, 8.0, 20.0], np.float32)
    file = write_gguf(folder, tmp_path / "model.gguf", extra={"rope_freqs.weight": divisors})
    if architecture == "qwen2":
        with pytest.raises(CheckpointError, match=r"rope_freqs.weight: got 'one'; expected no such tensor"):
            Checkpoint.open(str(file))
        return
    rotation = Checkpoint.open(str(file)).spec.rope.rotation(256)
    plain = Checkpoint.open(str(folder)).spec.rope.rotation(256)
    np.testing.assert_allclose(rotation.inverse_frequencies, plain.inverse_frequencies / divisors)
    assert rotation.attention_factor == 1


def scales_and_minima(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The eight 6-bit scales and minima of a Q4_K or Q5_K block, from llama.cpp's layout of 12 bytes."""
    low, high, rest = packed[:4], packed[4:8], packed[8:12]
    scales = np.concatenate((low & 63, (rest & 15) | ((low >> 6) << 4)))
    minima = np.concatenate((high & 63, (rest >> 4) | ((high >> 6) << 4)))
    return scales.astype(np.float32), minima.astype(np.float32)


def k_block(kind: str, block: np.ndarray) -> np.ndarray:
    """The 256 numbers of one block, element by element as llama.cpp's format says."""
    values = np.empty(256, np.float32)
    if kind == "Q6_K":
        low, high, scales = block[:128], block[128:192], block[192:208].view(np.int8)
        step = block[208:210].view(np.float16).astype(np.float32)[0]
        for i in range(256):
            half, within = divmod(i, 128)
            quarter, at = divmod(within, 32)
            nibble = low[64 * half + 32 * (quarter % 2) + at] >> (4 * (quarter // 2)) & 15
            upper = high[32 * half + at] >> (2 * quarter) & 3
            values[i] = step * scales[i // 16] * (int(nibble | upper << 4) - 32)
        return values
    step, least = block[:4].view(np.float16).astype(np.float32)
    scales, minima = scales_and_minima(block[4:16])
    fifth, nibbles = (block[16:48], block[48:176]) if kind == "Q5_K" else (None, block[16:144])
    for i in range(256):
        group, at = divmod(i, 32)
        q = int(nibbles[32 * (group // 2) + at] >> (4 * (group % 2)) & 15)
        q += 16 * int(fifth[at] >> group & 1) if fifth is not None else 0
        values[i] = step * scales[group] * q - least * minima[group]
    return values


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_every_k_type_is_read_as_its_layout_says(kind: str, size: int) -> None:
    stored = np.random.default_rng(2).integers(0, 256, (3, 2 * size)).astype(np.uint8)
    for row in stored.reshape(-1, size):  # finite block scales
        place = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
        row[place] = np.array([0.01, 0.02][: (place.stop - place.start) // 2], np.float16).view(np.uint8)
    tensor = GgufTensor(Path("x"), (3, 512), Block(stored, kind, (3, 512), Path("x")))
    expected = np.stack([k_block(kind, each) for each in stored.reshape(-1, size)]).reshape(3, 512)
    np.testing.assert_allclose(tensor.read(slice(None)), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [*K_TYPES, *TABLE_TYPES])
def test_types_that_llama_cpp_alone_writes_are_read_as_it_reads_them(kind: str) -> None:
    """`tests/golden/gguf_types.py` makes the file with llama.cpp's own code."""
    with np.load(Path("tests/golden/gguf_types.npz")) as kept:
        stored, expected = kept[kind], kept[f"{kind}.floats"]
    assert len(np.unique(expected)) > 2
    tensor = GgufTensor(Path("x"), expected.shape, Block(stored, kind, expected.shape, Path("x")))
    np.testing.assert_array_equal(tensor.read(slice(None)), expected)
    np.testing.assert_array_equal(tensor.read(slice(1, 2)), expected[1:])


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_quantized_experts_of_a_layer_are_read_each_by_itself(tmp_path: Path, kind: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["olmoe"])
    exact = Checkpoint.open(str(folder))
    found = Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf", kind)))
    stored, experts = gguf.GGMLQuantizationType[kind], [each for each in views(exact.spec) if "expert_" in each.role]
    assert len(experts) == exact.spec.layers * 8 * 3
    for view in experts:
        expected = dequantize(quantize(exact.tensor(view.name), stored), stored)
        np.testing.assert_array_equal(found.tensor(view.name), expected)


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
def test_experts_of_k_types_are_read_each_by_itself(llama: Path, tmp_path: Path, kind: str, size: int) -> None:
    stored = np.random.default_rng(2).integers(0, 256, (4, 6, size)).astype(np.uint8)  # experts, gate and up, a block
    for row in stored.reshape(-1, size):  # finite block scales
        place = slice(208, 210) if kind == "Q6_K" else slice(0, 4)
        row[place] = np.array([0.01, 0.02][: (place.stop - place.start) // 2], np.float16).view(np.uint8)
    file = GgufFile(write_gguf(llama, tmp_path / "model.gguf", **{"llama.expert_count": 4}))
    file.blocks = {"blk.1.ffn_gate_up_exps.weight": Block(stored, kind, (4, 6, 256), Path("x"))}
    found = gguf_tensors(file)
    for expert, matrices in enumerate(stored):
        for name, rows in (("gate_proj", matrices[:3]), ("up_proj", matrices[3:])):
            tensor = found.pop(f"model.layers.1.mlp.experts.{expert}.{name}.weight")
            expected = np.stack([k_block(kind, row) for row in rows])
            np.testing.assert_allclose(tensor.read(slice(1, 3)), expected[1:], rtol=1e-5, atol=1e-6)
    assert not found


@pytest.mark.parametrize(
    ("name", "changes", "refusal"),
    [
        ("olmoe", {"olmoe.expert_count": 7}, r"ffn_\w+_exps.weight: got shape \[8, .*matrices of 7 experts"),
        ("olmoe", {"olmoe.expert_used_count": 9}, "num_experts_per_tok: got 9; expected at most num_experts = 8"),
        ("granitemoe", {"granitemoe.expert_shared_feed_forward_length": 96}, "shared_intermediate_size: got 96"),
        ("granitemoe", {"granitemoe.expert_used_count": [3, 2]}, r"expert_used_count: got \[3, 2\]; expected the same"),
        ("qwen3_moe", {"qwen3moe.expert_gating_func": 2}, "expert_gating_func: got 2; expected 1, a softmax"),
        ("qwen3_moe", {"qwen3moe.expert_feed_forward_length": 16}, r"gate_proj.weight: got shape \[32, 64\]"),
        ("qwen3_moe", {"qwen3moe.expert_feed_forward_length": [32, 16, 32]}, r"got \[32, 16, 32\]; expected the same"),
        ("qwen3_moe", {"qwen3moe.expert_weights_scale": 2.5}, "expert_weights_scale: got 2.5"),
        ("qwen3_moe", {"qwen3moe.expert_group_count": 2}, "expert_group_count: got 2"),
        ("lfm2_moe", {"lfm2moe.leading_dense_block_count": 4}, "num_dense_layers: got 4; expected fewer"),
        ("lfm2_moe", {"lfm2moe.expert_gating_func": 1}, "expert_gating_func: got 1; expected 2, a sigmoid"),
    ],
)
def test_mixtures_that_cannot_be_are_refused_by_field(tmp_path: Path, name: str, changes, refusal: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name] | ALTERED.get(name, {}))
    with pytest.raises(CheckpointError, match=refusal):
        Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf", **changes)))


def test_experts_that_tokens_share_and_lost_ones_are_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["olmoe"])
    shared = {"blk.0.ffn_gate_shexp.weight": np.zeros((32, 64), np.float32)}
    with pytest.raises(CheckpointError, match=r"blk.0.ffn_gate_shexp.weight: got a tensor .* experts that all tokens"):
        Checkpoint.open(str(write_gguf(folder, tmp_path / "shared.gguf", extra=shared)))
    whole = write_gguf(folder, tmp_path / "model.gguf", tensors=8)
    next(tmp_path.glob("model-00002-of-*.gguf")).unlink()
    with pytest.raises(CheckpointError, match="model-00002-of-"):
        Checkpoint.open(str(whole))


@pytest.mark.slow
def test_a_quantized_file_is_exported_and_generates(llama: Path, tmp_path: Path, capsys) -> None:
    file = write_gguf(llama, tmp_path / "model.gguf", "Q4_1")
    options = [
        "--device",
        "SM8650",
        "--context",
        "64",
        "--ar",
        "1,8",
        "--skip-htp-check",
        "--calibration-tokens",
        "256",
    ]
    assert run(["export", str(file), "-o", str(tmp_path / "bundle"), *options]) == 0
    text = tmp_path / "text"
    text.write_text("def main(): return 1\n" * 40)
    assert run(["eval", str(tmp_path / "bundle"), "--text", str(text), "--tokens", "100"]) == 0
    assert "top-1 agreement" in capsys.readouterr().out
    with edgekv.load(tmp_path / "bundle") as model:
        assert len(list(model.generate("def", max_new_tokens=4))) == 4


def test_the_byte_level_tokenizer_is_rebuilt(embedded: Path, tmp_path: Path) -> None:
    changes = {"tokenizer.ggml.pre": "dbrx"}  # the same split as Llama 3's, without whole words
    file = GgufFile(write_gguf(embedded, tmp_path / "model.gguf", "BF16", **changes))
    original, found = Tokenizer.from_file(str(embedded / "tokenizer.json")), rebuild_tokenizer(file)
    lines = (embedded / "heldout.txt").read_text().splitlines()[:900]
    odd = [
        "",
        " ",
        "\n\n\t x",
        "12345 6",
        "caf\u00e9 \U0001f642 na\u00efve",
        "<|endoftext|>",
        "it's we'll",
        "\u4f60\u597d",
    ]
    for text in [*lines, *odd]:
        assert found.encode(text).ids == original.encode(text).ids, text
        assert found.decode(found.encode(text).ids) == original.decode(found.encode(text).ids)


TOKENS = [*(f"<{number}>" for number in range(256)), *(f"<|{number}|>" for number in range(64))]


def named(**texts: int) -> list[str]:
    """320 tokens, of which some have these texts."""
    tokens = list(TOKENS)
    for text, number in texts.items():
        tokens[number] = text
    return tokens


ENDS = {
    "the text's and the turn's": ({"eos": 257, "eot": 258}, {}, [257, 258]),
    "a message's": ({"eos": 257, "eom": 260}, {}, [257, 260]),
    "a list": ({"eos": [257, 261], "eot": [262]}, {}, [257, 261, 262]),
    "of code": ({"eos": 257, "fim_pad": 263, "fim_rep": 264, "fim_sep": 265}, {}, [257, 263, 264, 265]),
    "ChatML, by text": ({"eos": 257}, {"<|im_end|>": 266}, [257, 266]),
    "Phi-3, by text": ({"eos": 257}, {"<|end|>": 267, "<|endoftext|>": 268}, [257, 267, 268]),
    "Gemma, by text": ({"eos": 257}, {"<end_of_turn>": 269, "<eos>": 257}, [257, 269]),
    "Llama 3, by text": ({"eos": 257}, {"<|eot_id|>": 270, "<|eom_id|>": 271}, [257, 270, 271]),
    "code, by text": (
        {"eos": 257},
        {"<|fim_pad|>": 272, "<|repo_name|>": 273, "<|file_sep|>": 274},
        [257, 272, 273, 274],
    ),
    "Granite, by text": ({"eos": 257}, {"<|end_of_text|>": 257, "<fim_pad>": 275, "<reponame>": 276}, [257, 275, 276]),
    "parts of an answer are none": (
        {"eos": 257},
        {"<|end|>": 267, "<|return|>": 277, "<|call|>": 278},
        [257, 277, 278],
    ),
    "a mark of HTML is none": ({"eos": 257}, {"</s>": 20}, [257]),
    "a control token of the same text is one": ({"eos": 257}, {"</s>": 280}, [257, 280]),
}


@pytest.mark.parametrize("name", ENDS)
def test_an_answer_ends_at_every_token_at_which_llama_cpp_ends_it(llama: Path, tmp_path: Path, name: str) -> None:
    roles, texts, expected = ENDS[name]
    changes = {f"tokenizer.ggml.{role}_token_id": None for role in ("eos", "eot")}
    changes |= {f"tokenizer.ggml.{role}_token_id": number for role, number in roles.items()}
    changes |= {"tokenizer.ggml.tokens": named(**texts), "tokenizer.ggml.token_type": [1] * 256 + [3] * 64}
    found = Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **changes)))
    assert list(found.special.eos) == expected
    added = found.tokenizer.get_added_tokens_decoder()
    assert all(added[number].special for number in expected)


CHATML = "{% for m in messages %}<|1|>{{ m.role }}\n{{ m.content }}<|2|>\n{% endfor %}"


@pytest.mark.parametrize(("template", "warns"), [(CHATML, True), (CHATML.replace("<|2|>", ""), False)])
@pytest.mark.parametrize("is_gguf", [True, False])
def test_a_turn_that_ends_with_no_end_is_warned_of(llama: Path, tmp_path: Path, template, warns, is_gguf) -> None:
    roles = {"tokenizer.ggml.eot_token_id": None}
    (llama / "generation_config.json").write_text('{"eos_token_id": 257}')
    (llama / "chat_template.jinja").write_text(template)
    path = write_gguf(llama, tmp_path / "model.gguf", **{"tokenizer.chat_template": template}, **roles)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        Checkpoint.open(str(path if is_gguf else llama))
    said = [str(each.message) for each in found if each.category is EdgeKVWarning]
    assert len(said) == warns and all("ends an answer with <|2|> (id 258)" in each for each in said)


def test_templates_are_found_by_their_keys(llama: Path, tmp_path: Path) -> None:
    key = "tokenizer.chat_template"
    fields = {key: "{{ messages }}", f"{key}.tool_use": "{{ tools }}"}
    chat = Checkpoint.open(str(write_gguf(llama, tmp_path / "a.gguf", **fields))).chat
    assert chat is not None and chat.templates == {"default": "{{ messages }}", "tool_use": "{{ tools }}"}
    assert chat.tokens["bos_token"] == "<|0|>" and chat.tokens["eos_token"] == "<|1|>"
    listed = fields | {f"{key}s": ["tool_use", "rag"]}
    with pytest.raises(
        CheckpointError, match=r"chat_templates: got 'rag'; expected a field .*chat_template\.rag for it"
    ):
        Checkpoint.open(str(write_gguf(llama, tmp_path / "b.gguf", **listed)))


BEGINS = {"llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken"}


@pytest.mark.parametrize("name", [*_SPLITTERS])
def test_a_text_begins_with_bos_where_llama_cpp_begins_it_so(llama: Path, tmp_path: Path, name: str) -> None:
    fields = {"tokenizer.ggml.pre": name, "tokenizer.ggml.add_bos_token": None}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = rebuild_tokenizer(GgufFile(write_gguf(llama, tmp_path / "model.gguf", **fields)))
    assert (found.encode("ab").ids[0] == 256) == (name in BEGINS)


def test_a_begin_that_is_no_token_is_refused(llama: Path, tmp_path: Path) -> None:
    fields = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": None}
    with pytest.raises(CheckpointError, match="bos_token_id: got nothing; expected the token that texts begin with"):
        Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **fields)))


def test_a_text_does_not_end_with_eos(llama: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="add_eos_token: got true; expected false"):
        Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **{"tokenizer.ggml.add_eos_token": True})))


WORDS = {
    "llama-bpe": ["it", "'S", " ", "123", "4", " ка", "\u0301т", ".\n"],
    "lfm2": ["it", "'S", " ", "123", "4", " ка", "\u0301т", ".\n"],
    "qwen2": ["it", "'S", " ", "1", "2", "3", "4", " ка", "\u0301т", ".\n"],
    "qwen35": ["it", "'S", " ", "1", "2", "3", "4", " ка\u0301т", ".\n"],
    "gpt-2": ["it", "'", "S", " 1234", " ка", "\u0301", "т", ".", "\n"],
    "smollm": ["it", "'", "S", " ", "1", "2", "3", "4", " ка", "\u0301", "т", ".", "\n"],
    "default": ["it", "'", "S", " ", "123", "4", " ка", "\u0301", "т", ".", "\n"],
    "gpt-4o": ["it'S", " ", "123", "4", " ка\u0301т", ".\n"],
    "glm4": ["it", "'S", " ", "123", "4", " ка", "\u0301т", ".\n"],
    "hunyuan-dense": ["it", "'S", " ", "123", "4", " ка\u0301т", ".\n"],
    "jais-2": ["it", "'S", " ", "123", "4", " ка", "\u0301т", ".\n"],
    "stablelm2": ["it", "'S", " ", "1", "2", "3", "4", " ка", "\u0301т", ".\n"],
}


@pytest.mark.parametrize("name", WORDS)
def test_text_is_split_into_the_words_of_the_pre_tokenizer(llama: Path, tmp_path: Path, name: str) -> None:
    """The words between which no pair is merged, from the expressions in llama.cpp's src/llama-vocab.cpp."""
    fields = {"tokenizer.ggml.pre": name}
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        tokenizer = rebuild_tokenizer(GgufFile(write_gguf(llama, tmp_path / "model.gguf", **fields)))
    assert len(found) == (name == "default")
    text = "it'S 1234 ка\u0301т.\n"
    spans = [text[first:last] for _, (first, last) in tokenizer.pre_tokenizer.pre_tokenize_str(text)]
    assert spans == WORDS[name]


def test_a_token_of_a_megabyte_is_read_at_once(llama: Path, tmp_path: Path) -> None:
    """Work grows with the number of different lengths, not with the square of one."""
    tokens = ["<unk>", *TOKENS[1:-1], "a" * (1 << 20)]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) for number in range(320)],
        "tokenizer.ggml.token_type": [2] + [1] * 319,
        "tokenizer.ggml.merges": None,
    }
    file = GgufFile(write_gguf(llama, tmp_path / "model.gguf", **fields))
    taken = []

    class Piece(str):
        def __getitem__(self, part):
            taken.append(part)
            return str.__getitem__(self, part)

    vocabulary = {Piece(token): number for number, token in enumerate(tokens)}
    assert _scored_merges(file, vocabulary) == []
    assert len(taken) < 4 * len(tokens) * len({len(token) for token in tokens})


def _vocabulary(**changes: object) -> dict[str, object]:
    """Fields of a SentencePiece vocabulary, some of them wrong."""
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": [0.0] * 320,
        "tokenizer.ggml.merges": None,
        **{f"tokenizer.ggml.{name}": value for name, value in changes.items()},
    }


@pytest.mark.parametrize(
    ("fields", "refusal"),
    [
        (_vocabulary(scores=["0.5"] * 320), "scores: got '0.5'; expected finite numbers"),
        (_vocabulary(scores=[float("nan")] * 320), "scores: got nan; expected finite numbers"),
        (_vocabulary(scores=[0.5] * 7), "scores: got 7; expected 320 numbers"),
        (_vocabulary(token_type=["3"] * 320), "token_type: got '3'; expected llama.cpp's types"),
        (_vocabulary(token_type=[3] * 7), "token_type: got 7; expected 320 types"),
        (_vocabulary(tokens=TOKENS[:-1]), "tokens: got 319; expected 320 tokens, as many as token_embd.weight"),
        (_vocabulary(tokens=[1, 2]), "tokens: got [1, 2]; expected a list of strings"),
        (_vocabulary(tokens=["a"] * 320), "tokens: got 319; expected no token twice"),
        (_vocabulary(add_space_prefix="yes"), "add_space_prefix: got 'yes'; expected true or false"),
        (_vocabulary(remove_extra_whitespaces=True), "remove_extra_whitespaces: got True; expected none, or False"),
        ({"llama.attention.key_length": 0}, "key_length: got 0; expected a whole number of at least 1"),
        ({"llama.attention.value_length": 0}, "value_length: got 0; expected a whole number of at least 1"),
        ({"llama.attention.head_count": 0}, "head_count: got 0; expected a whole number of at least 1"),
        ({"llama.attention.head_count": "4"}, "head_count: got '4'; expected a whole number"),
        ({"llama.attention.head_count_kv": [2, 0]}, "head_count_kv: got [0, 2]; expected the same number above 0"),
        ({"llama.attention.head_count_kv": [2, 2, 2]}, "head_count_kv: got [2, 2, 2]; expected a whole number"),
        ({"llama.attention.head_count_kv": ["2", "2"]}, "head_count_kv: got ['2', '2']; expected a whole number"),
        ({"llama.attention.layer_norm_rms_epsilon": True}, "layer_norm_rms_epsilon: got True; expected a number"),
        ({"llama.embedding_length": [64, 64]}, "embedding_length: got [64, 64]; expected a whole number"),
        ({"llama.attention.sliding_window": 24}, "sliding_window: got 24; expected none for the architecture llama"),
        ({"general.type": "adapter"}, "general.type: got 'adapter'; expected 'model'"),
    ],
)
def test_a_field_of_another_type_or_size_is_refused(llama: Path, tmp_path: Path, fields, refusal) -> None:
    with pytest.raises(CheckpointError, match=re.escape(refusal)):
        Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **fields)))


@pytest.mark.parametrize("key", ["ssm.time_step_rank", "ssm.inner_size", "ssm.group_count", "full_attention_interval"])
def test_sizes_of_gated_delta_rules_are_above_0(tmp_path: Path, key: str) -> None:
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES["qwen3_5"])
    with pytest.raises(CheckpointError, match=f"qwen35.{key}: got 0; expected a whole number of at least 1"):
        Checkpoint.open(str(write_gguf(folder, tmp_path / "model.gguf", **{f"qwen35.{key}": 0})))


def test_sampling_defaults_are_those_of_the_file(llama: Path, tmp_path: Path) -> None:
    fields = {"temp": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.05, "penalty_repeat": 1.1, "mirostat": 2}
    changes = {f"general.sampling.{name}": value for name, value in fields.items()}
    found = Checkpoint.open(str(write_gguf(llama, tmp_path / "model.gguf", **changes))).generation
    assert found is not None and (found.temperature, found.top_k, found.top_p) == (0.6, 20, 0.95)
    assert (found.min_p, found.repetition_penalty, found.ignored) == (0.05, 1.1, ["mirostat"])
    greedy = Checkpoint.open(
        str(write_gguf(llama, tmp_path / "greedy.gguf", **changes | {"general.sampling.temp": 0.0}))
    )
    assert greedy.generation is not None and greedy.generation.temperature == 0


@pytest.mark.parametrize(("kind", "has_scores"), [("llama", True), ("llama", False), ("gemma4", False)])
def test_the_sentencepiece_tokenizer_is_rebuilt(llama: Path, tmp_path: Path, kind: str, has_scores: bool) -> None:
    """From the scores of Llama's files, from the order of tokens if all have one score, or from Gemma 4's merges."""
    original = sentence_piece(kind)
    merges = [" ".join(pair) for pair in json.loads(original.to_str())["model"]["merges"]]
    vocabulary = original.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    changes = {
        "tokenizer.ggml.model": kind,
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(number) if has_scores else -1000.0 for number in range(len(tokens))],
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.merges": None if kind == "llama" else merges,
        "tokenizer.ggml.add_space_prefix": kind == "llama",
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True,
    }
    found = rebuild_tokenizer(GgufFile(write_gguf(llama, tmp_path / "model.gguf", **changes)))
    for text in [
        "Hello world",
        "def f(x):\n    return x",
        "caf\u00e9 \U0001f642",
        "  two  spaces",
        "import numpy as np",
    ]:
        ids = original.encode(text).ids
        assert found.encode(text).ids == [1, *ids]
        assert found.decode(ids) == original.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    ("changes", "refusal"),
    [
        ({"general.architecture": "mamba"}, "general.architecture: got 'mamba'; expected "),
        ({"llama.block_count": None}, "llama.block_count: got nothing"),
        ({"llama.rope.scaling.type": "dynamic"}, "rope.scaling.type: got 'dynamic'"),
        ({"tokenizer.ggml.model": "rwkv"}, "tokenizer.ggml.model: got 'rwkv'; expected gpt2, llama or gemma4"),
        ({"tokenizer.ggml.pre": "klingon"}, "tokenizer.ggml.pre: got 'klingon'"),
        ({"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens"),
        ({"llama.attention.value_length": 8}, "value_length: got 8"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(llama: Path, tmp_path: Path, changes, refusal, capsys) -> None:
    architecture = changes.pop("general.architecture", None)
    file = write_gguf(llama, tmp_path / "model.gguf", **changes)
    if architecture:
        content = file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
        file.write_bytes(content)
    assert run(["export", str(file), "-o", str(tmp_path / "bundle"), "--device", "SM8650", "--context", "64"]) == 1
    assert refusal in capsys.readouterr().err
    assert not (tmp_path / "bundle").exists()


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    """The parts of a model with a head of its own; gguf-split puts the head alone into the last one."""
    folder = write_checkpoint(tmp_path / "untied", OLDER | {"rope_scaling": None})
    write_gguf(folder, tmp_path / "whole.gguf")
    write_gguf(folder, tmp_path / "model.gguf", tensors=8)
    return sorted(tmp_path.glob("model-*.gguf"))


@pytest.mark.parametrize("given", [0, -1])
def test_all_parts_of_a_split_file_are_read_whichever_is_given(parts: list[Path], given: int) -> None:
    whole = Checkpoint.open(str(parts[0].with_name("whole.gguf")))
    found = Checkpoint.open(str(parts[given]))
    assert found.spec == whole.spec and not found.spec.tied_head and found.files == tuple(parts)
    for view in views(whole.spec):
        np.testing.assert_array_equal(found.tensor(view.name), whole.tensor(view.name))
    before = found.weights_sha256()
    with parts[-1].open("r+b") as last:
        last.seek(-4, 2)
        last.write(b"\0\0\0\0")
    assert found.weights_sha256() != before


def _changed(part: Path, key: str, value: int) -> None:
    reader = gguf.GGUFReader(part, "r+")
    reader.fields[key].parts[reader.fields[key].data[0]][0] = value


def _copied(parts: list[Path], key: str | None = None) -> None:
    """Two parts with the same tensors, of which the second may have other metadata too."""
    shutil.copy(parts[0], parts[1])
    _changed(parts[1], "split.no", 1)
    if key is not None:
        _changed(parts[1], key, 7)


SETS = {
    "a tensor is in two parts": (_copied, "output.weight: got a tensor of model-00001-of-00003.gguf too; expected"),
    "a part is of another model": (
        lambda parts: _copied(parts, "llama.rope.freq_base"),
        "llama.rope.freq_base: got 7.0; expected what model-00001-of-00003.gguf says",
    ),
    "a part is missing": (lambda parts: parts[1].unlink(), "2 of 3 parts, without model-00002-of-00003.gguf"),
    "a part has another name": (lambda parts: parts[0].rename(parts[0].with_name("m.gguf")), "one of 3; expected a na"),
    "a part is another one": (lambda parts: shutil.copy(parts[1], parts[2]), "split.no: got 1; expected 2, as its"),
    "a part is of more parts": (lambda parts: _changed(parts[1], "split.count", 4), "split.count: got 4; expected 3"),
    "a tensor is lost": (lambda parts: _changed(parts[0], "split.tensors.count", 22), "got 22, and 21 in all parts"),
    "a part is a whole model": (
        lambda parts: shutil.copy(parts[0].with_name("whole.gguf"), parts[1]),
        "split.count: got nothing; expected a whole number",
    ),
    "the parts do not know": (
        lambda parts: [shutil.copy(part.with_name("whole.gguf"), part) for part in parts],
        "split.count: got a whole model; expected a name",
    ),
}


@pytest.mark.parametrize("name", SETS)
def test_a_set_of_parts_that_do_not_belong_together_is_refused(parts: list[Path], name: str) -> None:
    change, message = SETS[name]
    change(parts)
    given = parts[0] if parts[0].exists() else parts[0].with_name("m.gguf")
    with pytest.raises(CheckpointError, match=re.escape(message)):
        Checkpoint.open(str(given))


@pytest.mark.parametrize("share", [0.0, 0.0001, 0.1, 0.5, 0.99])
def test_a_truncated_file_is_refused(file: Path, share: float) -> None:
    content = file.read_bytes()
    file.write_bytes(content[: max(4, int(len(content) * share))])
    with pytest.raises(CheckpointError, match="truncated or damaged"):
        Checkpoint.open(str(file))


def test_impossible_counts_are_refused_at_once(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[8:16] = struct.pack("<Q", 1 << 60)
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match="counts that the file can hold"):
        GgufFile(file)


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _field(key: str, kind: int, value: bytes) -> bytes:
    return _text(key) + struct.pack("<I", kind) + value


def _array(kind: int, count: int, content: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + content


def _tensor(name: str, dimensions: tuple[int, ...], offset: int, kind: int = 0) -> bytes:
    sizes = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return _text(name) + sizes + struct.pack("<IQ", kind, offset)


def _nested(depth: int) -> bytes:
    return b"".join(_array(9, 1) for _ in range(depth)) + _array(0, 1, b"\0")


LAYOUTS: dict[str, tuple[list[bytes], list[bytes], str]] = {
    "an array of 10^9 strings": ([_field("a", 9, _array(8, 10**9))], [], "a: arrays of 1,000,000,000 elements"),
    "an array of 2^63 numbers": ([_field("a", 9, _array(4, 1 << 63))], [], "a: arrays of 9,223,372,036,854,775,808"),
    "an array longer than the file": ([_field("a", 9, _array(4, 10**6))], [], "1,000,000 elements beyond the end"),
    "a string longer than the file": ([_field("a", 8, struct.pack("<Q", 1 << 40))], [], "beyond the end of the file"),
    "arrays 20,000 deep": ([_field("a", 9, _nested(20_000))], [], "a: arrays nested more than 4 deep"),
    "a value of an unknown type": ([_field("a", 77, b"")], [], "a: the unknown type 77"),
    "a field twice": ([_field("a", 0, b"1"), _field("a", 0, b"1")], [], "the field a twice"),
    "tensors of one name": ([], [_tensor("t", (32,), 0), _tensor("t", (32,), 128)], "two tensors of one name"),
    "an alignment as text": ([_field("general.alignment", 8, _text("32"))], [], "general.alignment of type 8"),
    "an alignment of 0": ([_field("general.alignment", 4, bytes(4))], [], "general.alignment 0, which is no power"),
    "a tensor without dimensions": ([], [_tensor("t", (), 0)], "the tensor t of 0 dimensions"),
    "a tensor without elements": ([], [_tensor("t", (4, 0), 0)], r"the tensor t of shape \[0, 4\]"),
    "a tensor beyond the data": ([], [_tensor("t", (32,), 1 << 20)], "the tensor t up to byte 1048704 of"),
    "an offset that wraps": ([], [_tensor("t", (32,), (1 << 64) - 64)], "the tensor t up to byte"),
    "tensors in the same bytes": ([], [_tensor("t", (32,), 0), _tensor("u", (32,), 64)], "the tensors t and u in the"),
    "a tensor between two places": ([], [_tensor("t", (32,), 12)], "the tensor t at 12, no multiple of 32"),
    "a tensor of an unknown type": ([], [_tensor("t", (32,), 0, 99)], "the tensor t of the unknown type 99"),
    "half a block": ([], [_tensor("t", (33,), 0, 8)], "the tensor t with rows of 33, no multiple of 32"),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_an_impossible_layout_is_refused_at_once(tmp_path: Path, name: str) -> None:
    fields, tensors, message = LAYOUTS[name]
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields)) + b"".join((*fields, *tensors))
    (tmp_path / "model.gguf").write_bytes(head + bytes(-len(head) % 32 + 512))
    with pytest.raises(CheckpointError, match=rf"got {message}|got .*{message}"):
        GgufFile(tmp_path / "model.gguf")


def test_metadata_and_tensors_are_those_that_the_package_reads(llama: Path, tmp_path: Path) -> None:
    part = open_part(write_gguf(llama, tmp_path / "model.gguf", **{"general.tags": ["é", ""], "general.share": 0.1}))
    reader = gguf.GGUFReader(part.path)
    known = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert part.fields == known
    assert {*map(type, part.fields.values())} == {str, int, float, list, bool}
    for tensor in reader.tensors:
        block = part.blocks[tensor.name]
        assert (block.type, block.data.dtype) == (tensor.tensor_type.name, tensor.data.dtype)
        assert np.array_equal(block.data, tensor.data)


@pytest.mark.parametrize("unknown", [-1, 10**6])
def test_an_unknown_token_that_is_none_is_refused(llama: Path, tmp_path: Path, unknown: int) -> None:
    tokens = ["<unk>", "a", "b"]
    changes = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, -1.0, -2.0],
        "tokenizer.ggml.token_type": [2, 1, 1],
        "tokenizer.ggml.merges": None,
        **dict.fromkeys((f"tokenizer.ggml.{role}_token_id" for role in ("bos", "eos", "eot")), 2),
    }
    file = GgufFile(write_gguf(llama, tmp_path / "model.gguf", **changes))
    file._fields = {**file._fields, "tokenizer.ggml.unknown_token_id": unknown}
    with pytest.raises(CheckpointError, match=rf"unknown_token_id: got {unknown}; expected 0 to 2"):
        rebuild_tokenizer(file)


@pytest.mark.slow
def test_a_flipped_byte_never_gives_a_traceback(file: Path, tmp_path: Path) -> None:
    whole, random = file.read_bytes(), np.random.default_rng(3)
    for number in range(60):
        content = bytearray(whole)
        content[int(random.integers(4, 12000))] ^= int(random.integers(1, 256))
        target = tmp_path / f"{number}.gguf"
        target.write_bytes(content)
        with suppress(CheckpointError):
            Checkpoint.open(str(target)).check_values()
        target.unlink()


def test_a_tensor_of_an_unknown_type_is_named(llama: Path, tmp_path: Path) -> None:
    file = GgufFile(write_gguf(llama, tmp_path / "model.gguf"))
    name, block = next(iter(file.blocks.items()))
    changed = dict(file.blocks) | {name: Block(block.data, "NVFP4", block.shape, block.file)}
    file.blocks = changed
    with pytest.raises(CheckpointError, match=f"{name}: got type NVFP4; expected one of F32, F16"):
        gguf_tensors(file)


def test_the_package_is_named_where_it_is_missing(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(CheckpointError, match=r'pip install "edgekv\[export\]"'):
        Checkpoint.open(str(file))
