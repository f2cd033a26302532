"""Compare logits of models with LoRA adapters with peft's, in the parity environment.

python tests/golden/lora_parity.py

peft makes and saves the adapters and runs them unmerged. Exits with 1 if a logit differs by more than 1e-4 of the
largest.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.checkpoint.lora import AdapterChoice
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, write_checkpoint

TOLERANCE = 1e-4
TOKENS = 48
HEADS = ["q_proj", "v_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "attention": ("llama-2", {"target_modules": HEADS}),
    "all-linear, rank-stabilized": ("qwen3", {"target_modules": "all-linear", "use_rslora": True, "r": 6}),
    "an expression": ("llama-2", {"target_modules": r".*\.1\.(self_attn|mlp)\.(q|down)_proj"}),
    "patterns": (
        "llama-2",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 3, r"layers\.1\.mlp\.up_proj": 5},
            "alpha_pattern": {r"layers\.0\.self_attn\.q_proj": 32},
        },
    ),
    "one layer": ("llama-2", {"target_modules": HEADS, "layers_to_transform": [1], "layers_pattern": "layers"}),
    "excluded": ("llama-2", {"target_modules": "all-linear", "exclude_modules": ["o_proj", "gate_proj"]}),
    "biases": ("qwen2", {"target_modules": HEADS, "bias": "all"}),
    "biases of adapted modules": ("qwen2", {"target_modules": HEADS, "bias": "lora_only"}),
    "a saved head": ("llama-2", {"target_modules": HEADS, "modules_to_save": ["lm_head"]}),
    "a saved head of a tied model": ("qwen3", {"target_modules": HEADS, "modules_to_save": ["lm_head"]}),
    "the embedding of a tied model": ("qwen3", {"target_modules": ["embed_tokens", "q_proj"]}),
    "fused matrices": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "vision model": ("gemma3-multimodal", {"target_modules": r".*language_model.*\.(q|v|down)_proj"}),
}


def differences(base: Path, folder: Path, config: dict[str, Any]) -> list[float]:
    """The largest difference of two logits as a share of the largest: with the adapter, and without it."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = get_peft_model(plain, LoraConfig(task_type="CAUSAL_LM", **config))
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data + 0.1 * torch.randn_like(parameter)
        elif "lora_" in name:
            raise AssertionError(name)
    model.save_pretrained(folder)
    again = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    model = PeftModel.from_pretrained(again, folder).eval()
    checkpoint = Checkpoint.open(str(base), [AdapterChoice(folder)])
    tokens = np.random.default_rng(1).integers(3, 250, TOKENS)
    with torch.no_grad():
        theirs = model(torch.tensor(tokens)[None]).logits[0].numpy()
    found = []
    for each in (checkpoint, Checkpoint.open(str(base))):
        (ours,) = Reference(each).logits([tokens])
        found.append(float(np.abs(ours - theirs).max() / np.abs(theirs).max()))
    return found


def main() -> int:
    worst = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for name, (architecture, config) in CASES.items():
            base = write_checkpoint(Path(scratch) / name / "base", ARCHITECTURES[architecture], dtype=np.float32)
            merged, plain = differences(base, Path(scratch) / name / "lora", config)
            worst = max(worst, merged)
            print(f"{name}, {architecture}: {merged:.1e} of the largest logit ({plain:.1e} without it)")
    print("the same" if worst < TOLERANCE else "not the same")
    return int(worst >= TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())
