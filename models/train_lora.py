"""Train a LoRA adapter of a Llama checkpoint on text that is at hand, as peft saves it.

    python models/train_lora.py --base CHECKPOINT --corpus prose --out build/prose       (CPU: minutes)

Needs torch, which edgekv itself does not. The base is whatever `edgekv export` reads: a folder or a GGUF file.
"""

from __future__ import annotations

import argparse
import ast
import json
import math
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from corpus import training_documents
from safetensors.torch import save_file
from torch import Tensor, nn
from train import Llama, Shape

from exporters.checkpoint.checkpoint import Checkpoint

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def prose() -> str:
    return (Path(__file__).parent / "prose.txt").read_text("utf-8")


def code() -> str:
    return "\n".join(text for text in training_documents() if text.count("def ") > 10)


def topics() -> str:
    tree = ast.parse((Path(sysconfig.get_paths()["stdlib"]) / "pydoc_data" / "topics.py").read_text("utf-8"))
    table = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    return "\n".join(text for _, text in sorted(ast.literal_eval(table).items()))


CORPORA: dict[str, Callable[[], str]] = {"prose": prose, "code": code, "topics": topics}


class Adapted(nn.Module):
    """A linear layer that stays as it is, plus `x A B * alpha / r`."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / math.sqrt(base.in_features))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scale


def load(checkpoint: Checkpoint) -> Llama:
    """The checkpoint in torch, in float32, without gradients."""
    spec = checkpoint.spec
    model = Llama(
        Shape(
            spec.vocab,
            spec.hidden,
            spec.layers,
            spec.heads,
            spec.kv_heads,
            spec.head_dim,
            spec.intermediate,
            1024,
            spec.rope.theta,
            spec.eps,
        )
    )
    model.load_state_dict({name: torch.from_numpy(checkpoint.tensor(name)) for name, _ in model.named_parameters()})
    return model.requires_grad_(requires_grad=False)


def adapt(model: Llama, rank: int, alpha: float, targets: tuple[str, ...]) -> dict[str, Adapted]:
    """Replace the projections by adapted ones; returns them by name."""
    found = {name: module for name, module in model.named_modules() if name.endswith(targets)}
    adapted = {name: Adapted(module, rank, alpha) for name, module in found.items()}
    for name, module in adapted.items():
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, module)
    return adapted


def train(model: Llama, ids: Tensor, steps: int, length: int, rate: float, seed: int) -> list[float]:
    """AdamW with linear decay on windows of the text; returns the losses."""
    parameters = [each for each in model.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.0)
    random, losses, began = torch.Generator().manual_seed(seed), list[float](), time.perf_counter()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 5) * (1 - step / steps)
        start = int(torch.randint(max(1, len(ids) - length - 1), (1,), generator=random))
        window = ids[start : start + length + 1]
        loss = F.cross_entropy(model(window[None, :-1])[0], window[1:])
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step % 10 == 9:
            seconds = (time.perf_counter() - began) / (step + 1)
            print(f"step {step + 1:4d}  loss {sum(losses[-10:]) / 10:.3f}  {seconds:.1f} s/step", flush=True)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", required=True, help="checkpoint: a folder or a GGUF file")
    parser.add_argument("--corpus", choices=CORPORA, required=True, help="text to train on")
    parser.add_argument("--out", type=Path, required=True, help="folder to write the adapter to")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--length", type=int, default=256, help="tokens of a step")
    parser.add_argument("--rate", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    checkpoint = Checkpoint.open(args.base)
    model = load(checkpoint)
    ids = torch.tensor(checkpoint.encode(CORPORA[args.corpus]()[:2_000_000]))
    adapted = adapt(model, args.rank, args.alpha, TARGETS)
    train(model, ids, args.steps, args.length, args.rate, args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.{half}.weight": getattr(module, half).detach().contiguous()
        for name, module in adapted.items()
        for half in ("lora_A", "lora_B")
    }
    save_file(tensors, args.out / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": Path(args.base).name,
        "base_weights_sha256": checkpoint.weights_sha256(),
        "r": args.rank,
        "lora_alpha": args.alpha,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    (args.out / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


if __name__ == "__main__":
    main()
