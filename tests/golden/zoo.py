"""Tiny checkpoints of every decoder of transformers, read through the product's own door.

    python tests/golden/zoo.py                 all decoders: equal, refused by name, or different
    python tests/golden/zoo.py --supported     those that can be exported
    python tests/golden/zoo.py --write         all, and the tables of docs/reference/architectures.md
    python tests/golden/zoo.py NAME...         some `model_type`s

The classes of transformers make the models, with the structure of published ones, and `save_pretrained` writes them. Of
an architecture that is refused there is the configuration alone. Exits with 1 if logits differ by more than 1e-4 of
their range, if a refusal does not say what is missing, or if a variant of a supported one is refused. Needs the extra
`parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kept import TOLERANCE, loaded
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from edgekv.errors import EdgeKVError
from edgekv.spec.families import ARCHITECTURES, DRAFTERS
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import LLAMA3, WINDOW, write_tokenizer
from tests.support.embedders import WITHOUT_TEXT
from tests.support.picture_models import (
    write_gemma3_vl,
    write_internvl,
    write_lfm2_vl,
    write_qwen2_5_vl,
    write_qwen2_vl,
    write_qwen3_vl,
    write_smolvlm,
)

Fields = dict[str, Any]
SPECIAL: Fields = {"bos_token_id": 256, "eos_token_id": 257, "pad_token_id": 258}
SIZES: Fields = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    **SPECIAL,
}
TOKENS = np.random.Generator(np.random.PCG64(5)).integers(0, 256, 96)
FULL, SLIDING, CONVOLUTION, LINEAR = "full_attention", "sliding_attention", "conv", "linear_attention"
BY_TURNS = [SLIDING, SLIDING, SLIDING, FULL]
LONG = {"short_factor": [1.0 + n / 9 for n in range(6)], "long_factor": [1.0 + n * n for n in range(6)]}
SCALES = {"embedding_multiplier": 12.0, "attention_multiplier": 0.0625, "residual_multiplier": 0.22}
SCALES |= {"logits_scaling": 8.0}
STATES: Fields = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
STATES |= {"linear_value_head_dim": 16, "head_dim": 32, "layer_types": [LINEAR, LINEAR, LINEAR, FULL]}
GEMMA = {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": WINDOW, "layer_types": BY_TURNS}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 28, "patch_size": 14}
QWEN_VISION = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 64}


def rope(theta: float = 1e4, kind: str = "default", **more: Any) -> Fields:
    """`rope_parameters`."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": theta, **more}}


def yarn(factor: float, original: int, **more: Any) -> Fields:
    """The same of yarn."""
    return rope(1e6, "yarn", factor=factor, original_max_position_embeddings=original, **more)


LLAMA_3 = {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}}
GEMMA4: Fields = {
    **GEMMA,
    "num_hidden_layers": 8,
    "layer_types": BY_TURNS * 2,
    "num_key_value_heads": 1,
    "per_layer_config": {"3": {"head_dim": 64}, "7": {"head_dim": 64}},
    "rope_parameters": {
        SLIDING: {"rope_type": "default", "rope_theta": 1e4},
        FULL: {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
    },
    "hidden_size_per_layer_input": 16,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 4,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
del GEMMA4["query_pre_attn_scalar"]
QWEN35 = STATES | rope(1e7, partial_rotary_factor=0.25, mrope_section=[2, 1, 1], mrope_interleaved=True)
TIED, APART = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
WHOLE = {"num_key_value_heads": 4}
MIXTURE: Fields = {"moe_intermediate_size": 32, "num_experts": 6, "num_experts_per_tok": 2}
PUBLISHED: dict[str, tuple[Fields, ...]] = {
    "apertus": (LLAMA_3,),
    "arcee": (rope(1e4, "yarn", factor=20.0, original_max_position_embeddings=64, mscale=1.0) | {"mlp_bias": True},),
    "bamba": (
        rope(1e4, partial_rotary_factor=0.5)
        | {"attn_layer_indices": [2], "mamba_n_heads": 8, "mamba_n_groups": 2, "mamba_d_state": 32},
    ),
    "cohere": (TIED | {"logit_scale": 0.0625}, {"attention_bias": True, "logit_scale": 0.3}),
    "cohere2": (rope(5e4) | TIED | {"logit_scale": 0.25, "sliding_window": WINDOW, "layer_types": BY_TURNS},),
    "cwm": (LLAMA_3 | {"head_dim": 16, "sliding_window": WINDOW, "layer_types": [FULL, *BY_TURNS[:3]]},),
    "ernie4_5": (rope(5e5) | TIED | {"head_dim": 32, "use_bias": False},),
    "exaone": (LLAMA_3 | TIED,),
    "exaone4": (
        LLAMA_3 | TIED | {"sliding_window": None, "sliding_window_pattern": None, "layer_types": [FULL] * 4},
        LLAMA_3 | {"sliding_window": WINDOW, "sliding_window_pattern": "LLLG", "layer_types": BY_TURNS},
    ),
    "falcon_h1": (
        rope(1e11)
        | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 24, "head_dim": 16}
        | {"mamba_rms_norm": False, "mamba_norm_before_gate": False, "embedding_multiplier": 5.6}
        | {"lm_head_multiplier": 0.02, "attention_out_multiplier": 0.9, "key_multiplier": 0.39}
        | {"ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.24, "ssm_multipliers": [0.35, 0.25, 0.18, 0.5, 0.32]}
        | {"mlp_multipliers": [0.88, 0.3]},
    ),
    "gemma": ({"num_key_value_heads": 1, "head_dim": 32, "hidden_act": "gelu_pytorch_tanh"},),
    "gemma2": (GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},),
    "gemma3": ({},),
    "gemma3_text": (GEMMA | {"num_key_value_heads": 1},),
    "gemma4": ({"text_config": SIZES | GEMMA4, "vision_config": None, "audio_config": None},),
    "gemma4_text": (GEMMA4,),
    "glm": (rope(1e4, partial_rotary_factor=0.5) | {"head_dim": 16, "attention_bias": True},),
    "glm4": (rope(1e4, partial_rotary_factor=0.5) | {"head_dim": 16, "attention_bias": True},),
    "gpt_neox": (
        WHOLE | rope(1e4, partial_rotary_factor=0.25),
        WHOLE | rope(1e4, partial_rotary_factor=1.0) | {"use_parallel_residual": False, "attention_bias": False},
    ),
    "gptj": ({"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, "rotary_dim": 8, "vocab_size": 320},),
    "granite": (rope(1e7) | TIED | SCALES,),
    "granitemoe": (rope(1e4) | TIED | SCALES | {"num_local_experts": 8, "num_experts_per_tok": 3},),
    "granitemoehybrid": (
        {**rope(1e7), **TIED, **SCALES, "num_local_experts": 0, "num_experts_per_tok": 0}
        | {"shared_intermediate_size": 96, "position_embedding_type": "rope", "layer_types": [FULL] * 4}
        | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16},
        {**TIED, **SCALES, "num_local_experts": 0, "num_experts_per_tok": 0, "shared_intermediate_size": 96}
        | {
            "position_embedding_type": "nope",
            "layer_types": [LINEAR, LINEAR, FULL, LINEAR],
        }
        | {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 32},
    ),
    "helium": (rope(2e4) | {"head_dim": 16},),
    "hunyuan_v1_dense": (
        rope(1e4, "dynamic", alpha=1000.0, beta_fast=32, beta_slow=1, factor=1.0, mscale=1.0, mscale_all_dim=0.0)
        | TIED
        | {"head_dim": 16},
    ),
    "hyperclovax": (SCALES | {"attention_multiplier": 0.25, "use_post_norm": True},),
    "internlm3": (rope(5e7, "linear", factor=6.0) | {"head_dim": 16, "qkv_bias": True, "bias": True},),
    "internvl": ({},),
    "iquestcoder": ({"head_dim": 16},),
    "jais2": ({"head_dim": 16, "hidden_act": "relu2"},),
    "lfm2": (
        {"layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION], "block_auto_adjust_ff_dim": False},
        {"layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION], "block_multiple_of": 32},
    ),
    "lfm2_moe": (
        MIXTURE | {"layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION], "num_dense_layers": 1},
        MIXTURE | {"layer_types": [FULL] * 4, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "lfm2_vl": ({},),
    "lfm3": (
        {"num_hidden_layers": 6, "head_dim": 32, "sliding_window": WINDOW}
        | {"layer_types": [CONVOLUTION, CONVOLUTION, FULL, CONVOLUTION, SLIDING, CONVOLUTION]},
    ),
    "llama": (LLAMA_3 | TIED | {"head_dim": 16}, rope(1000042.0) | APART | {"head_dim": 32, "attention_bias": True}),
    "llama4_text": (
        {"head_dim": 16, "intermediate_size_mlp": 96, "moe_layers": [], "interleave_moe_layer_step": 0, **TIED}
        | {"no_rope_layers": [1, 1, 1, 0], "attn_temperature_tuning": False},
    ),
    "mellum": (
        MIXTURE
        | {"sliding_window": WINDOW, "layer_types": BY_TURNS, "mlp_layer_types": ["dense", *["sparse"] * 3]}
        | {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 1e4},
                FULL: yarn(8.0, 64, attention_factor=1.2)["rope_parameters"],
            }
        },
    ),
    "ministral": (rope(1e8) | {"sliding_window": WINDOW, "head_dim": 32, "layer_types": [FULL, *BY_TURNS[:3]]},),
    "ministral3": (
        yarn(16.0, 256, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
        | {"head_dim": 32, "max_position_embeddings": 4096},
    ),
    "mistral": ({"sliding_window": WINDOW}, rope(1e6) | {"sliding_window": None, "head_dim": 32}),
    "mistral3": (
        {
            "text_config": SIZES
            | yarn(16.0, 256, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1)
            | {"model_type": "ministral3", "head_dim": 32, "max_position_embeddings": 4096},
            "vision_config": VISION | {"model_type": "pixtral", "head_dim": 8},
        },
    ),
    "nanochat": (WHOLE, {}),
    "nemotron": (rope(1e4, partial_rotary_factor=0.5) | {"head_dim": 16, "hidden_act": "relu2"},),
    "nemotron_h": (
        {"mamba_num_heads": 8, "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "head_dim": 32}
        | {"layers_block_type": [LINEAR, "mlp", LINEAR, FULL, "mlp", LINEAR, "mlp"]},
    ),
    "olmo": (WHOLE | TIED | {"clip_qkv": None},),
    "olmo2": (rope(5e5) | WHOLE,),
    "olmoe": (WHOLE | {"num_experts": 8, "num_experts_per_tok": 3}, {"num_experts": 8, "norm_topk_prob": True}),
    "olmo3": (
        WHOLE
        | {"sliding_window": WINDOW, "layer_types": BY_TURNS}
        | {
            "rope_parameters": {
                SLIDING: {"rope_type": "default", "rope_theta": 5e5},
                FULL: yarn(8.0, 64, attention_factor=1.2)["rope_parameters"],
            }
        },
    ),
    "phi": (rope(1e4, partial_rotary_factor=0.5) | WHOLE | {"hidden_act": "gelu_new"},),
    "phi3": (
        WHOLE | {"sliding_window": WINDOW, "original_max_position_embeddings": 256},
        rope(1e4, "longrope", partial_rotary_factor=0.75, original_max_position_embeddings=64, **LONG)
        | TIED
        | {"sliding_window": 262144, "original_max_position_embeddings": 64},
    ),
    "qwen2": (rope(1e6) | TIED | {"use_sliding_window": False, "sliding_window": 32768, "max_window_layers": 21},),
    "qwen2_5_vl": ({},),
    "qwen2_vl": ({},),
    "qwen3": (rope(1e6) | TIED | {"head_dim": 32, "max_window_layers": 28},),
    "qwen3_5": (
        {
            "text_config": SIZES | QWEN35,
            "vision_config": QWEN_VISION | {"num_position_embeddings": 16},
            **TIED,
        },
    ),
    "qwen3_5_text": (QWEN35 | TIED,),
    "qwen3_moe": (
        MIXTURE | {"head_dim": 32, "norm_topk_prob": True},
        MIXTURE | {"mlp_only_layers": [2], "use_sliding_window": False},
    ),
    "qwen3_vl": ({},),
    "seed_oss": (rope(1e7) | {"head_dim": 32, "attention_bias": True, "attention_out_bias": False},),
    "smollm3": (rope(5e6) | TIED | {"no_rope_layers": [1, 1, 1, 0]},),
    "smolvlm": ({},),
    "stablelm": (
        rope(1e4, partial_rotary_factor=0.25) | WHOLE | {"use_qkv_bias": True},
        rope(1e4, partial_rotary_factor=0.25) | {"use_parallel_residual": True},
    ),
    "starcoder2": (rope(999999.4420358813) | TIED | {"use_bias": True, "sliding_window": 4096},),
    "vaultgemma": (GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},),
}
"""Fields of configurations with the structure of published models, beside `SIZES`, of every supported `model_type`."""
PICTURED = {
    "gemma3": write_gemma3_vl,
    "internvl": write_internvl,
    "lfm2_vl": write_lfm2_vl,
    "qwen2_5_vl": write_qwen2_5_vl,
    "qwen2_vl": write_qwen2_vl,
    "qwen3_vl": write_qwen3_vl,
    "smolvlm": write_smolvlm,
}
"""Those whose configuration is that of the tests' checkpoint, with what prepares pictures beside it."""


WANTED: dict[str, Fields] = {"gemma4_unified_assistant": {"text_config": {"hidden_size_per_layer_input": 0}}}
"""Fields without which transformers makes no configuration."""
WITHOUT = "an architecture without "
PAGE = Path(__file__).parent.parent.parent / "docs/reference/architectures.md"
BEGIN, END = "<!-- written by tests/golden/zoo.py -->\n", "<!-- end -->\n"


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of a `model_type`.

    Attributes:
        refusal: what the product lacks, of the sentence that refuses it; empty if it reads the model.
        worst: the largest difference of a logit, as a share of their range, of all variants.
        fault: what is wrong; empty if nothing is.
    """

    model_type: str
    refusal: str = ""
    worst: float = 0.0
    fault: str = ""

    def __str__(self) -> str:
        if self.fault:
            return f"FAILS: {self.fault}"
        return f"refused: {self.refusal}" if self.refusal else f"equal, to {self.worst:.0e} of the range"


def written(folder: Path, model_type: str, fields: Fields) -> Any:
    """The class of transformers for a random model that its `save_pretrained` has written to a new folder."""
    like = folder.with_suffix(".like")
    if model_type in PICTURED:
        fields = json.loads((PICTURED[model_type](like) / "config.json").read_text())
    several = "text_config" in fields
    config = CONFIG_MAPPING[model_type](**(SPECIAL if several or "n_embd" in fields else SIZES) | fields)
    architecture = AutoModelForImageTextToText if several else AutoModelForCausalLM
    model = architecture.from_config(config)
    randomize(model)
    model.to(torch.bfloat16).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    for file in like.iterdir() if like.exists() else ():
        if not file.name.startswith(("config", "model")):
            shutil.copy(file, folder)
    return architecture


def randomize(model: torch.nn.Module) -> None:
    """Weights under which every operation counts: attention is sharp, norms and biases are not those of the start."""
    generator = torch.Generator().manual_seed(0)
    tables = {id(each.weight) for each in model.modules() if isinstance(each, torch.nn.Embedding)}
    scalars = [value for name, value in model.named_buffers() if name.endswith("layer_scalar")]
    with torch.no_grad():
        for name, values in model.named_parameters():
            noise = torch.randn(values.shape, generator=generator)
            if values.ndim > 1:
                gain = 0.5 if id(values) in tables else 1.2 / np.prod(values.shape[1:]) ** 0.5
                values.copy_(gain * noise)
            else:
                values.add_((0.3 if name.endswith("bias") else 0.15) * noise)
        for values in scalars:
            values.add_(0.15 * torch.randn(values.shape, generator=generator))


def difference(folder: Path, architecture: Any) -> float:
    """The largest difference of a logit, as a share of their range."""
    opened = Checkpoint.open(str(folder))
    (found,) = Reference(opened).logits([TOKENS])
    with torch.no_grad():
        expected = loaded(architecture, folder).eval()(torch.tensor(TOKENS)[None]).logits[0].numpy()
    return float(np.abs(found - expected).max() / np.ptp(expected))


def read(model_type: str, scratch: Path) -> Finding:
    """What the product makes of all variants of a supported `model_type`."""
    if model_type not in PUBLISHED:
        return Finding(model_type, fault="no configuration is listed for it")
    worst = 0.0
    for number, fields in enumerate(PUBLISHED[model_type]):
        folder = scratch / f"{model_type}-{number}"
        architecture = written(folder, model_type, fields)
        try:
            worst = max(worst, difference(folder, architecture))
        except EdgeKVError as error:
            return Finding(model_type, fault=str(error))
    fault = "" if worst < TOLERANCE else f"differs by {worst:.1e} of the range"
    return Finding(model_type, worst=worst, fault=fault)


def refused(model_type: str, scratch: Path) -> Finding:
    """What the product says of the configuration of an architecture that it does not have."""
    folder = scratch / model_type
    CONFIG_MAPPING[model_type](**WANTED.get(model_type, {})).save_pretrained(folder)
    write_tokenizer(folder / "tokenizer.json")
    try:
        Checkpoint.open(str(folder))
    except EdgeKVError as error:
        what = str(error.expected).removeprefix(WITHOUT)
        if str(error.got) == repr(model_type) and what != error.expected:
            return Finding(model_type, what)
        return Finding(model_type, fault=f"not refused by what is missing: {error}")
    return Finding(model_type, fault="opened, though no family has it")


def findings(names: list[str]) -> Iterator[Finding]:
    """What becomes of each, printed as it is found."""
    for model_type in names:
        with tempfile.TemporaryDirectory() as scratch:
            make = read if model_type in ARCHITECTURES else refused
            found = make(model_type, Path(scratch))
            print(f"{model_type}: {found}", flush=True)
            yield found


def replace_tables(found: list[Finding]) -> None:
    """Write the tables of the page."""
    lines = ["| `model_type` | transformers | greatest difference |", "|---|---|---|"]
    lacking: dict[str, list[str]] = defaultdict(list)
    for each in found:
        if each.refusal:
            lacking[each.refusal].append(f"`{each.model_type}`")
        else:
            config = CONFIG_MAPPING[each.model_type].__name__
            lines.append(f"| `{each.model_type}` | `{config}` | {ceiling(each.worst)} |")
    equal, refusals = len(lines) - 2, sum(map(len, lacking.values()))
    lines = [f"{equal} are equal, {refusals} are refused, none differs.", "", *lines]
    lines += ["", "| what graphs do not have | `model_type` |", "|---|---|"]
    lines += [f"| {what} | {', '.join(names)} |" for what, names in sorted(lacking.items())]
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n\n" + END + rest.partition(END)[2])


def ceiling(share: float) -> str:
    """A power of ten that a difference is below."""
    return f"below 1e{int(np.floor(np.log10(max(share, 1e-9)))) + 1}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="a model_type; all without")
    parser.add_argument("--supported", action="store_true", help="those that can be exported alone")
    parser.add_argument("--write", action="store_true", help="write the tables of the page")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    others = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if CONFIG_MAPPING[name].model_type == name}
    others -= DRAFTERS.keys()  # tests/golden/drafters.py has those
    supported = {*ARCHITECTURES} - WITHOUT_TEXT  # tests/golden/embedders.py has the others
    everything = sorted(supported if given.supported else supported | others)
    found = [*findings(given.names or everything)]
    wrong = [each.model_type for each in found if each.fault]
    refusals = sum(bool(each.refusal) for each in found)
    print(f"{len(found) - refusals - len(wrong)} equal, {refusals} refused by name, {len(wrong)} wrong")
    if given.write and not wrong:
        replace_tables(found)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
