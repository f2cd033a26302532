"""Each field that llama.cpp's writers have is read, changes nothing, or refuses the file by its name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import gguf
import pytest

from edgekv.errors import CheckpointError
from exporters.checkpoint.gguf import (
    GgufFile,
    chat_templates,
    check_metadata,
    gguf_tensors,
    hugging_face_config,
    rebuild_tokenizer,
    sampling_fields,
)
from exporters.checkpoint.gguf.tensors import Number
from tests.exporters.checkpoint.test_gguf import ALTERED
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint
from tests.support.foreign_files import write_gguf

FILES = {  # a checkpoint of each architecture that can be exported
    "llama": "llama-2",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "qwen35": "qwen3_5",
    "phi3": "phi3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma4": "gemma4",
    "smollm3": "smollm3",
    "granite": "granite",
    "granitemoe": "granitemoe",
    "lfm2": "lfm2",
    "lfm2moe": "lfm2_moe",
    "olmo2": "olmo3",
    "olmoe": "olmoe",
    "apertus": "apertus",
    "arcee": "arcee",
    "cohere2": "cohere2",
    "command-r": "cohere",
    "ernie4_5": "ernie4_5",
    "exaone": "exaone",
    "exaone4": "exaone4",
    "gemma": "gemma",
    "glm4": "glm4",
    "gptneox": "gpt_neox",
    "hunyuan-dense": "hunyuan",
    "jais2": "jais2",
    "nemotron": "nemotron",
    "olmo": "olmo",
    "phi2": "phi",
    "seed_oss": "seed_oss",
    "stablelm": "stablelm",
    "starcoder2": "starcoder2",
}
READ = {
    "general.architecture",
    "general.type",
    "general.sampling.min_p",
    "general.sampling.mirostat",
    "general.sampling.penalty_repeat",
    "general.sampling.temp",
    "general.sampling.top_k",
    "general.sampling.top_p",
    "general.sampling.xtc_probability",
    ".attention.head_count",
    ".attention.head_count_kv",
    ".attention.key_length",
    ".attention.key_length_swa",
    ".attention.layer_norm_rms_epsilon",
    ".attention.sliding_window",
    ".attention.value_length",
    ".attention.value_length_swa",
    ".block_count",
    ".context_length",
    ".embedding_length",
    ".feed_forward_length",
    ".rope.dimension_count",
    ".rope.dimension_count_swa",
    ".rope.freq_base",
    ".rope.scale_linear",
    ".rope.scaling.factor",
    ".rope.scaling.type",
    "tokenizer.chat_template",
    "tokenizer.chat_template.tool_use",
    "tokenizer.chat_templates",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_eos_token",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eom_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.eot_token_id",
    "tokenizer.ggml.fim_pad_token_id",
    "tokenizer.ggml.fim_rep_token_id",
    "tokenizer.ggml.fim_sep_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.suppress_tokens",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
}
EPSILON = {".attention.layer_norm_epsilon"}
YARN = {
    ".rope.scaling.attn_factor",
    ".rope.scaling.original_context_length",
    ".rope.scaling.yarn_attn_factor",
    ".rope.scaling.yarn_beta_fast",
    ".rope.scaling.yarn_beta_slow",
    ".rope.scaling.yarn_ext_factor",
    ".rope.scaling.yarn_log_multiplier",
}
WINDOWS = {".attention.sliding_window_pattern", ".rope.freq_base_swa"}
EXPERTS = {
    ".expert_count",
    ".expert_feed_forward_length",
    ".expert_gating_func",
    ".expert_shared_feed_forward_length",
    ".expert_used_count",
}
GRANITE = {".attention.scale", ".embedding_scale", ".logit_scale", ".residual_scale", ".rope.scaling.finetuned"}
READ_BY = {
    **dict.fromkeys(("jais2", "nemotron", "olmo", "phi2", "starcoder2"), EPSILON),
    **dict.fromkeys(("gptneox", "stablelm"), EPSILON | {".use_parallel_residual"}),
    "apertus": {f"xielu.{name}" for name in ("alpha_n", "alpha_p", "beta", "eps")},
    "arcee": YARN,
    "cohere2": EPSILON | {".attention.sliding_window_pattern", ".logit_scale"},
    "command-r": EPSILON | {".logit_scale"},
    "exaone4": {".attention.sliding_window_pattern"},
    "gemma2": {".attn_logit_softcapping", ".final_logit_softcapping", *WINDOWS},
    "gemma3": {".final_logit_softcapping", *WINDOWS},
    "gemma4": {
        ".attention.shared_kv_layers",
        ".embedding_length_per_layer_input",
        ".final_logit_softcapping",
        *WINDOWS,
    },
    "granite": GRANITE,
    "granitemoe": GRANITE | EXPERTS,
    "lfm2": {".shortconv.l_cache"},
    "lfm2moe": EXPERTS | {".shortconv.l_cache", ".leading_dense_block_count"},
    "olmoe": EXPERTS,
    "qwen3moe": EXPERTS,
    "olmo2": YARN | WINDOWS,
    "qwen35": {
        ".attention.recurrent_layers",
        ".full_attention_interval",
        ".nextn_predict_layers",
        ".rope.dimension_sections",
        ".ssm.conv_kernel",
        ".ssm.group_count",
        ".ssm.inner_size",
        ".ssm.state_size",
        ".ssm.time_step_rank",
    },
}
"""Fields that change what is computed, or the text."""
NOTHING = {
    "general.sampling.mirostat_eta",  # without mirostat
    "general.sampling.mirostat_tau",
    "general.sampling.penalty_last_n",
    "general.sampling.sequence",
    "general.sampling.xtc_threshold",  # without xtc_probability
    ".attention.layer_norm_epsilon",  # of norms that subtract the mean
    ".expert_shared_feed_forward_length",  # of experts
    ".rope.scaling.finetuned",  # how it was trained
    ".vocab_size",  # the tokens and the table of embeddings say it
    "tokenizer.ggml.add_sep_token",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.ggml.fim_mid_token_id",
    "tokenizer.ggml.fim_pre_token_id",
    "tokenizer.ggml.fim_suf_token_id",
    "tokenizer.ggml.mask_token_id",
    "tokenizer.ggml.middle_token_id",
    "tokenizer.ggml.prefix_token_id",
    "tokenizer.ggml.seperator_token_id",
    "tokenizer.ggml.suffix_token_id",
    "tokenizer.ggml.token_type_count",
    "tokenizer.huggingface.json",
    "tokenizer.rwkv.world",
    "tokenizer.ggml.add_space_prefix",  # of SentencePiece; the tokenizers of these files are byte-level
    "tokenizer.ggml.scores",
}
NOTHING_FOR = {
    "granite": {f".ssm.{name}" for name in ("conv_kernel", "group_count", "inner_size", "state_size", "time_step_rank")}
    | {".ssm.dt_b_c_rms"},  # which the converter writes into a dense Granite 4
}
"""Fields that change nothing, whatever they say."""
DESCRIBING = "general."  # but for those above and the version of quantized types
FLAG = ".rope.scaling.finetuned"  # true or false alike, and nothing else
VALUES = (3, 0.37, True, False, "klingon", [3, 4], ["a", "b"], [0.25, 0.5], [True, False])
"""None is what a field has in the test's files."""


NEWER = (  # than the package gguf that the tests install, older than it, or in no writer
    ".activation.situ_beta",
    ".activation.situ_linear_beta",
    ".adapters.count",
    ".adapters.lora_rank",
    ".adapters.router_gain",
    ".adapters.token_ids_activate",
    ".adapters.token_ids_substitute",
    ".attention.compress_ratios",
    ".attention.compress_rope_freq_base",
    ".attention.indexer.block_size",
    ".attention.indexer.kpool",
    ".attention.indexer.kpool_select_tail",
    ".attention.indexer.local_blocks",
    ".attention.indexer.types",
    ".attention.key_length_mla_swa",
    ".attention.kv_lora_rank_swa",
    ".attention.output_group_count",
    ".attention.output_lora_rank",
    ".attention.recurrent_layers",
    ".attention.rope_pattern",
    ".attention.value_length_mla_swa",
    ".attention.value_scale",
    ".attn_res.block_size",
    ".block_size",
    ".classifier.pooling_type",
    ".conv_group_size",
    ".conv_kernel_size",
    ".deepstack_mapping",
    ".expert_latent_length",
    ".has_confidence_head",
    ".hash_layer_count",
    ".hidden_activation",
    ".hrm.h_cycles",
    ".hrm.l_cycles",
    ".hrm.layers_per_stack",
    ".hrm.prefix_lm",
    ".hyper_connection.count",
    ".hyper_connection.epsilon",
    ".hyper_connection.low_rank",
    ".hyper_connection.magnitude",
    ".hyper_connection.sinkhorn_iterations",
    ".kda.gate_lower_bound",
    ".kda.safe_gate",
    ".norm_before_fc",
    ".norm_before_residual",
    ".num_loops",
    ".ple.conv_kernel",
    ".ple.eos_token_id",
    ".ple.head_offsets",
    ".ple.head_vocab_sizes",
    ".ple.heads_per_ngram",
    ".ple.image_token_id",
    ".ple.layer_multipliers",
    ".ple.layers",
    ".ple.ngram_size",
    ".sample_from_anchor",
    ".selector_rank",
    ".selector_top_k",
    ".skip_loop_final_norm",
    ".target_hidden_size",
    ".target_layers",
    "general.tensor_extra.name",
    "general.tensor_extra.prec_a4",
    "tokenizer.ggml.normalizer.lowercase",
    "tokenizer.ggml.normalizer.strip_accents",
    "tokenizer.ggml.suppress_tokens",
    ".rope.scale_linear",
    "tokenizer.ggml.eos_token_ids",
    ".an_unknown_one",
    "tokenizer.ggml.cls_token_id",
    "tokenizer.an_unknown_one",
)


def every_key(keys: type = gguf.Keys) -> Iterator[str]:
    """The fields of llama.cpp's writers; `.name` stands for one of an architecture."""
    for name, value in vars(keys).items():
        if isinstance(value, str) and not name.startswith("_"):
            value = value.replace("{arch}", "").replace("{id}", "0").replace("{dense}", "dense_2")
            yield value.replace("{name}", "tool_use")
        elif isinstance(value, type):
            yield from every_key(value)


KEYS = sorted({key for key in (*every_key(), *NEWER) if not key.startswith(("split.", "imatrix.", "clip."))})


ARCHITECTURE = "general.architecture"


class Observed(dict[str, Any]):
    """Fields of a file, and the names of those that were looked for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__(fields)
        self.asked = set[str]()

    def get(self, key: str, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


class Opened:
    """What an export takes from the metadata. What does not look for a field that was changed is not made again."""

    PARTS: ClassVar[dict[str, Callable[[GgufFile], Any]]] = {
        "config": hugging_face_config,
        "tokenizer": lambda file: rebuild_tokenizer(file).to_str(),
        "numbers": lambda file: {
            name: each.value for name, each in gguf_tensors(file).items() if isinstance(each, Number)
        },
    }

    def __init__(self, file: GgufFile) -> None:
        self._file = file
        self._fields = file._fields
        self._before: dict[str, tuple[object, set[str], set[str]]] = {}
        self.values = self.changed({})

    def changed(self, changes: Mapping[str, Any]) -> tuple[object, ...]:
        """What it takes of the file with these fields changed."""
        file, found, read = self._file, list[object](), {ARCHITECTURE}
        file._fields = fields = Observed({**self._fields, **changes})
        file.architecture = str(fields[ARCHITECTURE])
        for name, make in self.PARTS.items():
            if name not in self._before or self._before[name][1] & changes.keys():
                fields.asked, file._read = {ARCHITECTURE}, set()
                made = make(file), fields.asked, file._read
                self._before.setdefault(name, made)
            else:
                made = self._before[name]
            found.append(made[0])
            read |= made[2]
        file._read = read
        sampling, chat = sampling_fields(file), chat_templates(file)
        check_metadata(file)
        return *found, sampling, chat, file.architecture


def written(tmp_path: Path, architecture: str) -> GgufFile:
    name = FILES[architecture]
    folder = write_checkpoint(tmp_path / "checkpoint", ARCHITECTURES[name] | ALTERED.get(name, {}))
    return GgufFile(write_gguf(folder, tmp_path / "model.gguf"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "architecture", [pytest.param(a, marks=pytest.mark.thorough if a != "llama" else ()) for a in FILES]
)
def test_no_field_is_passed_over_in_silence(tmp_path: Path, architecture: str) -> None:
    file = written(tmp_path, architecture)
    opened = Opened(file)
    read = READ | READ_BY.get(architecture, set())
    nothing = (NOTHING | NOTHING_FOR.get(architecture, set())) - read
    wrong = {}
    for key in KEYS:
        name = f"{architecture}{key}" if key.startswith(".") else key
        found = set()
        for value in VALUES:
            try:
                same = opened.changed({name: value}) == opened.values
            except CheckpointError as error:
                found.add("refused" if name in error.field or key in read else str(error))
            else:
                found.add("same" if same else "read")
        is_describing = key.startswith(DESCRIBING) and key != "general.quantization_version"
        if key in read:
            right = found & {"read", "refused"} and (key.startswith(DESCRIBING) or "refused" in found)
        elif key in nothing or is_describing:
            right = found == {"same"} or key == FLAG
        else:
            right = "refused" in found and found <= {"refused", "same"}
        if not right:
            wrong[key] = found
    assert wrong == {}


def test_the_lists_name_no_field_that_is_none() -> None:
    assert {*KEYS} >= READ | NOTHING
    assert {key for each in (READ_BY, NOTHING_FOR) for keys in each.values() for key in keys} <= {*KEYS}


NEUTRAL = {
    ".attention.causal": True,
    ".attention.scale": 0.0,
    ".deepstack_mapping": [-1, -1],
    ".expert_count": 0,
    ".expert_used_count": 0,
    ".final_logit_softcapping": 0.0,
    ".logit_scale": 1.0,
    ".pooling_type": 0,
    ".rope.scaling.attn_factor": 1.0,
    ".rope.scaling.factor": 1.0,
    ".rope.scaling.type": "none",
    ".rope.scaling.yarn_ext_factor": -1.0,
    ".use_parallel_residual": False,
    "general.quantization_version": 2,
    "tokenizer.ggml.normalizer.lowercase": False,
    "tokenizer.ggml.remove_extra_whitespaces": False,
    "mradermacher.quantize_version": "2",
}


@pytest.mark.parametrize("key", NEUTRAL)
def test_a_field_with_a_value_that_changes_nothing_is_accepted(tmp_path: Path, key: str) -> None:
    file = written(tmp_path, "llama")
    opened = Opened(file)
    assert opened.changed({key if key[0] != "." else f"llama{key}": NEUTRAL[key]}) == opened.values
