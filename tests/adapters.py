"""LoRA adapters as peft saves them, with random matrices."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tests.quantized_files import Arrays, read_tensors

ATTENTION = ("q_proj", "v_proj")


def write_adapter(
    folder: Path,
    base: Path,
    targets: Any = ATTENTION,
    *,
    rank: int = 4,
    ranks: dict[str, int] | None = None,
    seed: int = 0,
    more: Arrays | None = None,
    **config: Any,
) -> Arrays:
    """An adapter of every module of `base` whose name ends with one of `targets`; returns its tensors.

    Args:
        folder: to be made.
        base: a folder of floats.
        targets: ends of names.
        rank: r.
        ranks: r of modules with these ends.
        seed: of the matrices.
        more: tensors to add to the file.
        config: fields of adapter_config.json.
    """
    random = np.random.default_rng(seed)
    tensors: Arrays = {}
    for key, value in read_tensors(base).items():
        module = key.removesuffix(".weight")
        if value.ndim != 2 or not module.endswith(tuple(targets)):
            continue
        r = next((r for end, r in (ranks or {}).items() if module.endswith(end)), rank)
        out, width = value.shape
        first = random.standard_normal((r, width)).astype(np.float32) / np.float32(np.sqrt(width))
        second = random.standard_normal((out, r)).astype(np.float32)
        at = f"base_model.model.{module}"
        if module.endswith("embed_tokens"):
            tensors |= {f"{at}.lora_embedding_A": np.ascontiguousarray(second.T)}
            tensors |= {f"{at}.lora_embedding_B": np.ascontiguousarray(first.T)}
        else:
            tensors |= {f"{at}.lora_A.weight": first, f"{at}.lora_B.weight": second}
    tensors |= more or {}
    fields: dict[str, Any] = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "org/base",
        "r": rank,
        "lora_alpha": 8,
        "target_modules": list(targets),
        "rank_pattern": ranks or {},
        "bias": "none",
        "use_dora": False,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(fields | config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return tensors
