"""GGUF files of llama.cpp's own converter against the models of transformers that they were made from.

    python tests/golden/gguf_converter.py [FOLDER [MODEL ...]]

The folder has llama.cpp's `convert_hf_to_gguf.py`, `conversion`, `gguf-py` and `models`, and `packages` with
sentencepiece; `make golden` makes it. The converter knows tokenizers by a hash of what they make of a text, so the name
of a pre-tokenizer is given to it; all else is its own. Exits with 1 if a file is refused, a logit differs by more than
1e-4 of the largest, or a text has other tokens than sentencepiece, transformers, or llama.cpp's `models/*.out` have.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import unicodedata
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

ROOT = Path(__file__).parent.parent.parent
sys.path.insert(0, str(ROOT))

from exporters.checkpoint.checkpoint import Checkpoint  # noqa: E402
from exporters.checkpoint.gguf import GgufFile, rebuild_tokenizer  # noqa: E402
from exporters.quantize.reference import Reference  # noqa: E402
from tests.support.checkpoints import write_tokenizer  # noqa: E402
from tests.support.foreign_files import sentence_piece  # noqa: E402

TOLERANCE = 1e-4
LLAMA_CPP = Path(sys.argv[1] if len(sys.argv) > 1 else Path(sys.prefix) / "llama.cpp").resolve()
CONVERT = """
import json, os, runpy, sys
import torch, transformers  # takes most of the time of a model: once for all of them
from conversion import base
from conversion.base import TextModel
for line in sys.stdin:
    name, kind, log, *arguments = json.loads(line)
    if not (child := os.fork()):
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
        os.dup2(2, 1)
        if kind in ("GPTNeoX", "NemotronH"):
            # It reads config.json itself then: transformers drops rotary_pct, and adds fields of experts.
            base.AutoConfig = None
        TextModel.get_vocab_base_pre = lambda self, tokenizer: name
        sys.argv = ["convert", *arguments]
        runpy.run_path(sys.argv[0], run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""
SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 12,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}
THETA = {"rope_type": "default", "rope_theta": 1e4}
LLAMA3 = {**THETA, "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {**THETA, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONG = {**THETA, "rope_type": "longrope", "original_max_position_embeddings": 64, "partial_rotary_factor": 0.75}
LONG |= {"short_factor": [1.0, 1.1, 1.2, 1.5, 2.0, 3.0], "long_factor": [1.0, 1.5, 3.0, 6.0, 12.0, 20.0]}
ORIGINAL, HALF = {"original_max_position_embeddings": 8192}, {"partial_rotary_factor": 0.5}
EVEN, WHOLE = {"num_key_value_heads": 4}, {"tie_word_embeddings": False}
FULL, WINDOW = "full_attention", "sliding_attention"
GEMMA4 = {
    FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    WINDOW: THETA,
}
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.4, "residual_multiplier": 0.6, "logits_scaling": 5.0}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "rope_parameters": {**THETA, "partial_rotary_factor": 0.5, "mrope_interleaved": True, "mrope_section": [2, 1, 1]},
    "layer_types": ["linear_attention", "linear_attention", FULL, "linear_attention"] * 3,
}
PLAIN, PIECES, MERGES = "bytes", "sentencepiece", "merges"
MODELS: dict[str, tuple[str, str, str, dict[str, Any]]] = {  # class, tokenizer, pre-tokenizer, fields
    "llama-3": ("Llama", PLAIN, "llama-bpe", {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 8192}}),
    "llama-short": (
        "Llama",
        PLAIN,
        "llama-bpe",
        {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 64}},
    ),
    "llama-2": ("Llama", PIECES, "", {"tie_word_embeddings": False}),
    "mistral": ("Mistral", PLAIN, "tekken", {"sliding_window": None, "rope_parameters": YARN}),
    "qwen2": ("Qwen2", PLAIN, "qwen2", {"rope_parameters": YARN}),
    "qwen3": ("Qwen3", PLAIN, "qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3, "beta_fast": 16.0}}),
    "qwen3.5": ("Qwen3_5", PLAIN, "qwen35", LINEAR),
    "phi3": ("Phi3", PLAIN, "dbrx", {"sliding_window": 24, "rope_parameters": THETA}),
    "phi4-mini": ("Phi3", PLAIN, "gpt-4o", {"rope_parameters": LONG, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2", PIECES, "", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma3": ("Gemma3", PIECES, "", {"sliding_window": 24, "query_pre_attn_scalar": 16}),
    "gemma4": (
        "Gemma4",
        MERGES,
        "",
        {
            "sliding_window": 24,
            "global_head_dim": 32,
            "num_kv_shared_layers": 4,
            "hidden_size_per_layer_input": 8,
            "use_double_wide_mlp": True,
            "layer_types": [WINDOW, WINDOW, FULL] * 4,
            "rope_parameters": GEMMA4,
        },
    ),
    "smollm3": ("SmolLM3", PLAIN, "smaug-bpe", {"rope_parameters": THETA}),
    "granite": ("Granite", PLAIN, "refact", SCALES),
    "granite-4": (
        "GraniteMoeHybrid",
        PLAIN,
        "dbrx",
        {**SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {
            "layer_types": ["attention"] * 12,
            "position_embedding_type": "rope",
            "mamba_n_heads": 4,
            "mamba_d_head": 32,
        },
    ),
    "granitemoe": ("GraniteMoe", PLAIN, "refact", {**SCALES, "num_local_experts": 8, "num_experts_per_tok": 3}),
    "olmoe": ("Olmoe", PLAIN, "olmo", {"num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5}),
    "qwen3moe": (
        "Qwen3Moe",
        PLAIN,
        "qwen2",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "lfm2moe": (
        "Lfm2Moe",
        PLAIN,
        "lfm2",
        {"layer_types": ["conv", "conv", FULL] * 4, "num_dense_layers": 2, "use_expert_bias": True}
        | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "granite-4-h": (
        "GraniteMoeHybrid",
        PLAIN,
        "dbrx",
        {**SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {"layer_types": [*["linear_attention"] * 3, FULL] * 3, "position_embedding_type": "nope"}
        | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 24},
    ),
    "falcon-h1": (
        "FalconH1",
        PLAIN,
        "falcon-h1",
        {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 24, "rope_parameters": THETA}
        | {"attention_in_multiplier": 1.5, "attention_out_multiplier": 0.75, "key_multiplier": 0.4, **WHOLE}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.5, "ssm_multipliers": [0.7, 0.5, 0.9, 1.1, 0.8]}
        | {"embedding_multiplier": 3.0, "lm_head_multiplier": 0.5, "mlp_multipliers": [0.9, 0.6]},
    ),
    "nemotron-h": (
        "NemotronH",
        PLAIN,
        "llama-bpe",
        {"mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 24, **WHOLE}
        | {"hybrid_override_pattern": "M-M*-M-M*-M-", "expand": 1, "rms_norm_eps": 1e-5},
    ),
    "lfm2": ("Lfm2", PLAIN, "lfm2", {"layer_types": ["conv", "conv", FULL] * 4, "block_auto_adjust_ff_dim": False}),
    "apertus": ("Apertus", PLAIN, "tekken", {"rope_parameters": LLAMA3 | ORIGINAL, **WHOLE}),
    "arcee": ("Arcee", PLAIN, "gpt-4o", {"rope_parameters": YARN | {"attention_factor": 1.3}, "mlp_bias": True}),
    "command-r": ("Cohere", PLAIN, "command-r", {"logit_scale": 0.3, "rope_parameters": THETA}),
    "cohere2": (
        "Cohere2",
        PLAIN,
        "command-r",
        {"logit_scale": 0.25, "sliding_window": 24, "rope_parameters": THETA, "rotary_pct": 1.0},
    ),
    "ernie4_5": ("Ernie4_5", PIECES, "", {"rope_parameters": THETA, "use_bias": False}),
    "exaone": ("Exaone", PLAIN, "exaone", {"rope_parameters": LLAMA3 | ORIGINAL}),
    "exaone4": ("Exaone4", PLAIN, "exaone4", {"sliding_window": None, "layer_types": [FULL] * 12}),
    "exaone4-windows": (
        "Exaone4",
        PLAIN,
        "exaone4",
        {
            "sliding_window": 24,
            "sliding_window_pattern": "LLLG",
            "layer_types": [WINDOW, WINDOW, WINDOW, FULL] * 3,
            "rope_parameters": LLAMA3 | ORIGINAL,
        },
    ),
    "gemma": ("Gemma", PIECES, "", {"hidden_act": "gelu_pytorch_tanh"}),
    "glm4": ("Glm4", PLAIN, "glm4", {"rope_parameters": THETA | HALF, "attention_bias": True}),
    "gptneox": ("GPTNeoX", PLAIN, "olmo", {"rope_parameters": THETA | HALF, "rotary_pct": 0.5}),
    "gptneox-serial": (
        "GPTNeoX",
        PLAIN,
        "olmo",
        {"rope_parameters": THETA | HALF, "rotary_pct": 0.5, "use_parallel_residual": False},
    ),
    "hunyuan-dense": ("HunYuanDenseV1", PLAIN, "hunyuan-dense", {"rope_parameters": THETA}),
    "hunyuan-alpha": (
        "HunYuanDenseV1",
        PLAIN,
        "hunyuan-dense",
        {
            "max_position_embeddings": 32768,
            "rope_parameters": THETA | {"rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0},
        },
    ),
    "internlm3": ("InternLM3", PIECES, "", {"rope_parameters": THETA}),
    "jais2": ("Jais2", PLAIN, "jais-2", {"rope_parameters": THETA}),
    "nemotron": ("Nemotron", PIECES, "", {"rope_parameters": THETA | HALF, "hidden_act": "relu2"}),
    "olmo": ("Olmo", PLAIN, "olmo", {"rope_parameters": THETA}),
    "phi2": ("Phi", PLAIN, "phi-2", {"rope_parameters": THETA | HALF, "intermediate_size": 256, **EVEN}),
    "seed_oss": ("SeedOss", PLAIN, "seed-coder", {"rope_parameters": THETA, "attention_bias": True}),
    "stablelm": ("StableLm", PLAIN, "stablelm2", {"rope_parameters": THETA | HALF, "use_qkv_bias": True}),
    "stablelm-parallel": (
        "StableLm",
        PLAIN,
        "stablelm2",
        {"rope_parameters": THETA | HALF, "use_parallel_residual": True},
    ),
    "starcoder2": ("Starcoder2", PLAIN, "starcoder", {"rope_parameters": THETA, "sliding_window": None}),
    "olmo2": ("Olmo2", PLAIN, "dbrx", {"rope_parameters": THETA}),
    "olmo3": (
        "Olmo3",
        PLAIN,
        "dbrx",
        {"sliding_window": 24, "rope_parameters": {FULL: YARN | {"attention_factor": 1.2}, WINDOW: THETA}},
    ),
}
SEPARATOR = "\n__ggml_vocab_test__\n"
TEXTS = ["Hello world", "  two  spaces", "caf\u00e9 \U0001f642", "x = [1234, 5]\n\n\ty", " leading", "a" * 40]


def written(name: str, folder: Path) -> tuple[Path, Callable[[str], list[int]]]:
    """The converter's file of a random model in a new folder, and the tokens that the model's own tokenizer gives."""
    kind, tokenizer, pre, fields = MODELS[name]
    folder.mkdir()
    encode = {PLAIN: plain, PIECES: pieces, MERGES: merges}[tokenizer](folder, kind)
    text = "TextConfig" if kind in ("Gemma3", "Gemma4", "Qwen3_5") else "Config"
    if kind == "Gemma4":
        fields = fields | {"vocab_size_per_layer_input": encode.size}
    config = getattr(transformers, f"{kind}{text}")(**SIZES | {"vocab_size": encode.size} | fields)
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, values in model.named_parameters():
            values.mul_(8 if values.ndim > 1 else 1).add_(0.1 * torch.randn_like(values) if "norm" in key else 0)
    model.save_pretrained(folder)
    saved = folder / "config.json"
    config = fields | json.loads(saved.read_text())  # with the older names that the converter knows
    if kind == "NemotronH":  # the converter takes the pattern, and no experts
        config |= {"num_hidden_layers": len(config["hybrid_override_pattern"])}
        config = {key: config[key] for key in config if not re.search("experts?_|_experts|^moe|group|block_type", key)}
        config |= {"n_groups": fields["n_groups"]}
    saved.write_text(json.dumps(config))
    if kind == "GraniteMoeHybrid":  # the same of its layers
        saved.write_text(saved.read_text().replace(f'"{FULL}"', '"attention"'))
    file = folder / f"{name}.gguf"
    options = ["--outfile", str(file), "--outtype", "f32", *(["--no-mtp"] if kind == "Qwen3_5" else [])]
    log = folder / "log"
    if code := converter().convert([pre, kind, str(log), str(folder), *options]):
        sys.exit(f"{name}: the converter failed with {code}: {log.read_text()[-2000:]}")
    return file, encode


class Converter:
    """A process that has llama.cpp's converter and its packages loaded, and runs it for one model at a time."""

    def __init__(self) -> None:
        program = str(LLAMA_CPP / "convert_hf_to_gguf.py")
        path = os.pathsep.join(str(LLAMA_CPP / each) for each in (".", "gguf-py", "packages"))
        code = CONVERT.replace("sys.argv[0]", repr(program))
        self._process = subprocess.Popen(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def convert(self, job: list[str]) -> int:
        """The exit code of: the pre-tokenizer's name, the model's class, a file for what is said, arguments."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(job), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())


converter = cache(Converter)


class Encoder:
    """What the model's own tokenizer makes of a text, and its number of tokens."""

    def __init__(self, size: int, encode: Callable[[str], list[int]]) -> None:
        self.size = size
        self._encode = encode

    def __call__(self, text: str) -> list[int]:
        return self._encode(text)


def plain(folder: Path, kind: str) -> Encoder:
    """The tests' bytes, and room for tokens that a family's class adds; Phi-3's converter asks for the class's name."""
    write_tokenizer(folder / "tokenizer.json", extra=64)
    file = folder / "tokenizer.json"
    for number, name in enumerate(("<|endoftext|>", "<|user|>") if kind == "Glm4" else (), 60):  # the converter asks
        file.write_text(file.read_text().replace(f"<|{number}|>", name))
    names = {"bos_token": "<|0|>", "eos_token": "<|1|>", "pad_token": "<|2|>"}
    saved = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), **names)
    saved.save_pretrained(folder)
    if kind == "Phi3":
        config = folder / "tokenizer_config.json"
        config.write_text(config.read_text().replace("TokenizersBackend", "GPT2Tokenizer"))
    return Encoder(336, lambda text: saved.encode(text, add_special_tokens=False))


def pieces(folder: Path, kind: str) -> Encoder:
    """A `tokenizer.model` that sentencepiece trains on this repository; Gemma's has no space in front of a text."""
    sys.path.append(str(LLAMA_CPP / "packages"))
    import sentencepiece

    options = {"model_type": "bpe", "byte_fallback": True, "vocab_size": 600, "normalization_rule_name": "identity"}
    options |= {"remove_extra_whitespaces": False, "add_dummy_prefix": not kind.startswith("Gemma")}
    source = ",".join(str(path) for path in sorted((ROOT / "docs/guides").glob("*.md")))
    sentencepiece.SentencePieceTrainer.train(input=source, model_prefix=str(folder / "tokenizer"), **options)
    model = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    return Encoder(model.vocab_size(), model.encode)


def merges(folder: Path, kind: str) -> Encoder:
    """A BPE with byte fallback, as Gemma 4 has it."""
    del kind
    tokenizer = sentence_piece("gemma4")
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<unk>"}
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    return Encoder(tokenizer.get_vocab_size(), lambda text: tokenizer.encode(text).ids)


def difference(file: Path, encode: Callable[[str], list[int]]) -> tuple[float, float]:
    """The largest difference of two logits, as a share of the largest logit, and its limit; exits if tokens differ."""
    checkpoint = Checkpoint.open(str(file))
    for text in TEXTS:
        found, wanted = checkpoint.tokenizer.encode(text, add_special_tokens=False).ids, encode(text)
        if found != wanted:
            sys.exit(f"{file.name}: {text!r}: {found}; expected {wanted}")
    tokens = np.random.default_rng(1).integers(3, checkpoint.spec.vocab - 8, 96)
    (ours,) = Reference(checkpoint, 128).logits([tokens])
    theirs = transformers_logits(file.parent, tokens, torch.float32)
    largest = np.abs(theirs).max()
    apart, limit = float(np.abs(ours - theirs).max() / largest), TOLERANCE
    if apart > limit:  # random delta rules enlarge rounding: transformers' own in float32 says how much
        exact = transformers_logits(file.parent, tokens, torch.float64)
        limit = max(limit, 3 * float(np.abs(theirs - exact).max() / largest))
    return apart, limit


def transformers_logits(folder: Path, tokens: NDArray[np.int64], dtype: torch.dtype) -> NDArray[np.float64]:
    """Those of a saved model, `[tokens, vocabulary]`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    with torch.no_grad():
        logits: NDArray[np.float64] = model.eval()(torch.tensor(tokens)[None]).logits[0].double().numpy()
    return logits


def vocabularies() -> int:
    """Texts of `models/*.inp` with other tokens than `*.out` has; of these vocabularies edgekv reads most."""
    wrong = 0
    for answers in sorted((LLAMA_CPP / "models").glob("*.gguf.out")):
        name = answers.name.removesuffix(".gguf.out").removeprefix("ggml-vocab-")
        if name in ("bert-bge", "deepseek-llm"):
            continue  # of models that cannot be exported
        tokenizer = rebuild_tokenizer(GgufFile(answers.with_suffix("")))
        texts = answers.with_suffix(".inp").read_text("utf-8").removesuffix(SEPARATOR).split(SEPARATOR)
        expected = [[int(token) for token in line.split()] for line in answers.read_text().splitlines()]
        for text, ids in zip(texts, expected, strict=True):
            if name == "qwen35" and not unicodedata.is_normalized("NFC", text):
                continue  # transformers normalizes, llama.cpp does not
            if (found := tokenizer.encode(text, add_special_tokens=False).ids) != ids:
                wrong += 1
                print(f"{name}: {text!r}: {found}; expected {ids}")
        print(f"{name}: {len(texts)} texts")
    return wrong


def main() -> int:
    warnings.simplefilter("ignore")
    wrong = 0 if sys.argv[2:] else vocabularies()
    with tempfile.TemporaryDirectory() as scratch:
        for name in sys.argv[2:] or MODELS:
            file, encode = written(name, Path(scratch) / name)
            apart, limit = difference(file, encode)
            wrong += apart > limit
            print(f"{name}: {apart:.1e} of the largest logit, at most {limit:.0e}", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
