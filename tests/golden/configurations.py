"""Changed configurations of every architecture: computed as transformers does, or refused by name.

    python tests/golden/configurations.py [NAME...]

Every field of the configuration that transformers saves is removed, set to null and set to another value; fields of
other architectures and forms of the rotary embedding are added. A change that transformers and the float reference
compute differently, without a refusal, fails. Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import copy
import json
import logging
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from kept import TOLERANCE
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from edgekv.errors import EdgeKVError
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, as_saved, write_checkpoint

Fields = dict[str, Any]
SAVED = json.loads((Path(__file__).parent / "saved.json").read_text())
TOKENS = np.random.Generator(np.random.PCG64(6)).integers(0, 256, 72)
FULL, SLIDING = "full_attention", "sliding_attention"
ABSENT = object()
GPT_J = {"hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head"}
SIZES = {
    *GPT_J.values(),
    "n_inner",
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "model_type",
}
"""Fields that weights depend on: changes are refused for their shapes."""

YARN: Fields = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
LLAMA3: Fields = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
ROPES: dict[str, Fields] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 4.0},
    "linear, older": {"type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "yarn": YARN,
    "yarn, older": {"type": "yarn"} | {name: value for name, value in YARN.items() if name != "rope_type"},
    "yarn, two names": YARN | {"type": "linear"},
    "yarn, mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 0.5},
    "yarn, mscale of 0": YARN | {"mscale": 1.0, "mscale_all_dim": 0.0},
    "yarn, mscale alone": YARN | {"mscale": 1.5},
    "yarn, attention factor": YARN | {"attention_factor": 1.3},
    "yarn, not truncated": YARN | {"truncate": False},
    "yarn, betas": YARN | {"beta_fast": 16, "beta_slow": 2},
    "yarn, no factor": {name: value for name, value in YARN.items() if name != "factor"},
    "yarn, no original": {name: value for name, value in YARN.items() if not name.startswith("original")},
    "yarn, queries": YARN | {"llama_4_scaling_beta": 0.1},
    "llama3": LLAMA3,
    "partial": {"rope_type": "default", "partial_rotary_factor": 0.5},
    "yarn, partial": YARN | {"partial_rotary_factor": 0.5},
    "sections": {"rope_type": "default", "mrope_section": [2, 3, 3]},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "nulls": dict.fromkeys(("factor", "attention_factor", "beta_fast", "original_max_position_embeddings")) | YARN,
    "null attention factor": YARN | {"attention_factor": None, "mscale": None},
}
OTHERS: Fields = {
    "query_pre_attn_scalar": 7.0,
    "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3,
    "residual_multiplier": 0.5,
    "logits_scaling": 3.0,
    "logit_scale": 0.3,
    "use_bidirectional_attention": True,
    "is_causal": False,
    "is_decoder": False,
    "no_rope_layer_interval": 2,
    "use_qk_norm": False,
    "sliding_window_pattern": 2,
    "_sliding_window_pattern": 2,
    "attention_chunk_size": 8,
    "clip_qkv": 0.3,
    "attn_output_gate": False,
    "use_attention_gate": False,
    "full_attention_interval": 2,
    "scale_attn_weights": False,
    "attention_k_eq_v": True,
    "residual_in_fp32": True,
    "use_double_wide_mlp": False,
    "mlp_only_layers": [0],
    "attn_temperature_tuning": True,
    "use_nope": True,
    "pretraining_tp": 2,
    "rope_interleave": True,
    "rope_interleaved": True,
    "use_parallel_residual": True,
    "qk_layernorm": True,
    "altup_num_inputs": 4,
    "mup_enabled": True,
    "rope_local_base_freq": 500.0,
    "rope_theta": 3333.0,
    "partial_rotary_factor": 0.5,
    "original_max_position_embeddings": 48,
    "attention_bias": True,
    "mlp_bias": True,
    "rms_norm_eps": 1e-2,
    "norm_eps": 1e-2,
    "layer_norm_eps": 1e-2,
    "sliding_window": 8,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "per_layer_config": {"0": {"head_dim": 8}},
    "num_local_experts": 4,
    "num_experts": 4,
    "kv_lora_rank": 8,
    "position_embedding_type": "nope",
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "num_kv_shared_layers": 1,
    "full_attn_idxs": [0],
    "tie_embedding": False,
    "block_ff_dim": 64,
    "block_ffn_dim_multiplier": 0.5,
    "block_multiple_of": 8,
    "conv_L_cache": 5,
    "conv_bias": True,
    "use_sandwich_norm": False,
    "layers_block_type": ["mamba"],
    "hidden_activation": "relu",
    "a_field_of_tomorrow": 1,
}
"""Fields of some architecture, for all others."""


def changes(config: Fields) -> Iterator[tuple[str, Fields]]:
    """Name and fields of every change of a text model's configuration."""

    def change(name: str, **fields: Any) -> tuple[str, Fields]:
        changed = copy.deepcopy(config)
        changed |= copy.deepcopy({field: value for field, value in fields.items() if value is not ABSENT})
        return name, {field: value for field, value in changed.items() if fields.get(field) is not ABSENT}

    for field, value in config.items():
        if field not in SIZES and not isinstance(value, dict):
            yield change(f"without {field}", **{field: ABSENT})
            yield change(f"{field} null", **{field: None})
            if (other := another(value)) is not None:
                yield change(f"{field} {str(other)[:40]}", **{field: other})
    for field, value in OTHERS.items():
        yield change(f"{field} {value}", **{field: value})
    yield change("no_rope_layers", no_rope_layers=[0] * _size(config, "num_hidden_layers"))
    for name in ("gelu", "relu", "gelu_pytorch_tanh", "swish"):
        yield change(f"hidden_act {name}", hidden_act=name)
        yield change(f"hidden_activation {name}", hidden_activation=name)
    yield from (change(name, **fields) for name, fields in windows(config))
    yield from (change(name, **fields) for name, fields in ropes(config))


def another(value: object) -> object:
    """Another value of the same type; None if there is none to try."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 2 or 1
    return f"{value}x" if isinstance(value, str) else None


def windows(config: Fields) -> Iterator[tuple[str, Fields]]:
    """Attention windows and kinds of layers."""
    layers = _size(config, "num_hidden_layers")
    yield "window, no kinds", {"sliding_window": 8, "layer_types": ABSENT}
    for first in (0, 1):
        fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": first, "layer_types": ABSENT}
        yield f"window from layer {first}", fields
    kinds = [SLIDING if layer % 2 == 0 else FULL for layer in range(layers)]
    for use in (True, False):
        fields = {"use_sliding_window": use, "sliding_window": 8}
        for name, listed in (
            ("by turns", kinds),
            ("all", [SLIDING] * layers),
            ("none", [FULL] * layers),
            ("chunks", ["chunked_attention"] * layers),
            ("older", ["attention"] * layers),
        ):
            yield f"windows {name}, used {use}", fields | {"layer_types": listed}
    for field in ("sliding_window_pattern", "_sliding_window_pattern", "full_attention_interval"):
        yield f"{field} without kinds", {field: 2, "layer_types": ABSENT, "sliding_window": 8}


def ropes(config: Fields) -> Iterator[tuple[str, Fields]]:
    """Forms of the rotary embedding."""
    own = config.get("rope_parameters") or {}
    nested = {kind: value for kind, value in own.items() if isinstance(value, dict)}
    theta = {"rope_theta": 1e4}
    yield "no rope", {"rope_parameters": ABSENT}
    yield "null rope", {"rope_parameters": None}
    yield "older form", {"rope_parameters": ABSENT, "rope_scaling": None, **theta}
    for name, table in ROPES.items():
        yield f"rope_parameters: {name}", {"rope_parameters": table | theta}
        yield f"rope_parameters: {name}, no theta", {"rope_parameters": table}
        yield f"rope_scaling: {name}", {"rope_parameters": ABSENT, "rope_scaling": table, **theta}
        yield f"rope_scaling: {name}, no theta", {"rope_parameters": ABSENT, "rope_scaling": table}
        yield f"rope_scaling beside: {name}", {"rope_scaling": table}
        for kind in nested:
            yield f"{kind}: {name}", {"rope_parameters": own | {kind: table | theta}}
            yield f"{kind}: {name}, no theta", {"rope_parameters": own | {kind: table}}
    yield "scaling beside, with theta", {"rope_scaling": YARN, "rope_theta": 777.0}
    yield "original beside", {"rope_parameters": YARN | theta, "original_max_position_embeddings": 48}
    yield "original beside llama3", {"rope_parameters": LLAMA3 | theta, "original_max_position_embeddings": 48}
    yield "local base", {"rope_parameters": ABSENT, "rope_scaling": None, "rope_local_base_freq": 5e3, **theta}
    for kind in nested:
        yield f"{kind} null", {"rope_parameters": own | {kind: None}}
        yield f"without {kind}", {"rope_parameters": {name: value for name, value in own.items() if name != kind}}
        yield f"{kind} without theta", {"rope_parameters": own | {kind: _without_theta(own[kind])}}
        yield f"{kind} without theta, one beside", {"rope_parameters": own | {kind: _without_theta(own[kind])}, **theta}
        yield f"theta beside {kind}", {"rope_parameters": own | {"rope_theta": 5.0}}
    if own and not nested:
        yield "no theta", {"rope_parameters": _without_theta(own)}
        yield "no theta, one beside", {"rope_parameters": _without_theta(own), **theta}
        yield "unknown in the table", {"rope_parameters": own | {"a_field_of_tomorrow": 1}}
    pairs = (config.get("head_dim") or _size(config, "hidden_size") // _size(config, "num_attention_heads")) // 2
    share = own.get("partial_rotary_factor", 1) if not nested else 1
    for original in (32, 96):
        for more in ({}, {"factor": 7.0}, {"attention_factor": 1.5}):
            factors = {"short_factor": [1 + n / 9 for n in range(int(pairs * share))]}
            factors["long_factor"] = [2.0 + n for n in range(int(pairs * share))]
            table = {"rope_type": "longrope", "original_max_position_embeddings": original, **factors, **more}
            fields = {"original_max_position_embeddings": ABSENT, "max_position_embeddings": 4 * original}
            table |= {"partial_rotary_factor": share} if share != 1 else {}
            yield f"longrope of {original} {more}", {**fields, "rope_parameters": table | theta}
            yield f"longrope beside {original} {more}", {**fields, "rope_scaling": table}


def _size(config: Fields, name: str) -> int:
    """A size, which GPT-J has under another name."""
    return int(config[name] if name in config else config[GPT_J[name]])


def _without_theta(table: Fields) -> Fields:
    return {name: value for name, value in table.items() if name != "rope_theta"}


def transformers_logits(folder: Path, architecture: Any, tokens: np.ndarray) -> np.ndarray | None:
    """`[T, V]`; None if transformers refuses, or does not load every tensor of the text model."""
    try:
        model, loading = architecture.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        text = [key for keys in loading.values() for key in keys]
        text = [key for key in text if not any(part in str(key) for part in ("vision", "visual", "audio", "projector"))]
        if text:
            return None
        with torch.no_grad():
            found: np.ndarray = model(torch.tensor(tokens)[None]).logits[0].numpy()
        return found if np.isfinite(found).all() else None
    except Exception:
        return None


def verdict(folder: Path, architecture: Any) -> str:
    """What the product does with a folder, beside what transformers does."""
    try:
        opened = Checkpoint.open(str(folder))
        tokens = TOKENS[: opened.spec.max_positions]  # a longer context is refused
        (found,) = Reference(opened).logits([tokens])
    except EdgeKVError:
        return "refused"
    except Exception as error:
        return f"FAILS: {error!r}"
    if (expected := transformers_logits(folder, architecture, tokens)) is None:
        return "opened, which transformers does not"
    worst = float(np.abs(found - expected).max() / np.ptp(expected))
    return "equal" if worst < TOLERANCE else f"DIFFERS by {worst:.2g} of the range"


def main() -> None:
    logging.disable(logging.WARNING)
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)
    counts, wrong = Counter[str](), []
    for name in sys.argv[1:] or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as scratch:
            folder = as_saved(write_checkpoint(Path(scratch) / name, ARCHITECTURES[name], gain=1.0), SAVED[name])
            whole = json.loads((folder / "config.json").read_text())
            multimodal = "text_config" in whole
            architecture = AutoModelForImageTextToText if multimodal else AutoModelForCausalLM
            for change, fields in [("none", {}), *changes(whole["text_config"] if multimodal else whole)]:
                changed = (whole | {"text_config": fields} if multimodal else fields) if fields else whole
                (folder / "config.json").write_text(json.dumps(changed))
                found = verdict(folder, architecture)
                counts[found.split()[0].rstrip(":,")] += 1
                if found.startswith(("FAILS", "DIFFERS")) or (change == "none" and found != "equal"):
                    wrong.append(f"{name}: {change}: {found}")
                    print(wrong[-1], flush=True)
        print(f"{name}: {dict(counts)}", flush=True)
    if wrong:
        sys.exit(f"{len(wrong)} changes are computed otherwise than by transformers, in silence")


if __name__ == "__main__":
    main()
