"""Train the head for further tokens of the small Qwen3.5, on the text of the Python installation that runs this script.

    python models/train_head.py --out FOLDER            (a copy of models/qwen3_5-800k; one core of a CPU: two minutes)

The model stays as it is; the folder gets a second file with the head. Needs torch and tokenizers, as `train.py` does.
"""

from __future__ import annotations

import json

import torch
import torch.nn.functional as F
from corpus import held_out_documents, training_documents
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from train_qwen import Hybrid, Layer, Norm, Shape
from training import arguments, stream

STEPS = 3
"""Of a draft, in training."""
LENGTH = 256
"""Tokens of a window: whole chunks of the model's gated delta rules."""


class Head(nn.Module):
    """Names of modules follow the checkpoint's `mtp`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.add_module(name, Norm(shape.hidden, shape.eps))
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.layers = nn.ModuleList([Layer(shape, "full_attention")])
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.05)

    def forward(self, embeddings: Tensor, hidden: Tensor, model: Hybrid) -> Tensor:
        """The result of the last norm, `[batch, T, hidden]`."""
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))
        return self.norm(self.layers[0](x, model.cos[: x.shape[1]], model.sin[: x.shape[1]]))


def states(model: Hybrid, tokens: Tensor) -> Tensor:
    """The model's last hidden states, `[batch, T, hidden]`."""
    x = model.model["embed_tokens"](tokens)
    for layer in model.model["layers"]:
        x = layer(x, model.cos[: x.shape[1]], model.sin[: x.shape[1]])
    return model.model["norm"](x)


def steps(head: Head, model: Hybrid, tokens: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Logits of each step of the drafts behind every token, and the model's for the same tokens.

    A step reads the hidden states that the one before it gave for all rows, where a draft has the model's own for all
    rows but the last.
    """
    table, rows, found = model.model["embed_tokens"].weight, tokens.shape[1] - STEPS, []
    with torch.no_grad():
        hidden = states(model, tokens)
        wanted = F.linear(hidden, table)
    hidden = hidden[:, :rows]
    for step in range(1, STEPS + 1):
        hidden = head(F.embedding(tokens[:, step : rows + step], table), hidden, model)
        found.append((F.linear(hidden, table), wanted[:, step : rows + step]))
    return found


def main() -> None:
    args = arguments(__doc__, steps=250, tokens_per_step=1024)
    torch.manual_seed(args.seed)
    tokenizer, shape = Tokenizer.from_file(str(args.out / "tokenizer.json")), Shape()
    model, head = Hybrid(shape), Head(shape)
    model.load_state_dict({key: each.float() for key, each in load_file(args.out / "model.safetensors").items()})
    model.requires_grad_(False)
    ids, held_out = (stream(tokenizer, list(each())) for each in (training_documents, held_out_documents))
    optimizer = torch.optim.AdamW(head.parameters(), lr=4e-3, betas=(0.9, 0.95), weight_decay=0.01)
    random = torch.Generator().manual_seed(args.seed)
    for number in range(args.steps):
        optimizer.param_groups[0]["lr"] = 4e-3 * min(1.0, (number + 1) / 50, (args.steps - number) / (0.6 * args.steps))
        starts = torch.randint(len(ids) - LENGTH, (args.tokens_per_step // LENGTH,), generator=random)
        batch = torch.stack([ids[start : start + LENGTH] for start in starts])
        loss = torch.zeros(())
        for logits, wanted in steps(head, model, batch):
            logs, targets = logits.log_softmax(-1), wanted.log_softmax(-1)
            loss = loss + F.kl_div(logs, targets, log_target=True, reduction="none").sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if number % 50 == 0 or number == args.steps - 1:
            print(f"step {number:5d}  loss {loss.item():.3f}", flush=True)
    for p in head.parameters():  # measure the weights as they are saved
        p.data = p.data.to(torch.bfloat16).float()
    with torch.no_grad():
        windows = held_out[: 16 * LENGTH].view(16, -1)
        agreement = [(a.argmax(-1) == b.argmax(-1)).float().mean().item() for a, b in steps(head, model, windows)]
    facts = {
        "parameters": sum(p.numel() for p in head.parameters()),
        "trained_tokens": args.steps * args.tokens_per_step,
        "held_out_agreement": [round(each, 4) for each in agreement],
    } | {"steps": args.steps, "seed": args.seed, "torch": torch.__version__}
    weights = {f"mtp.{name}": p.detach().to(torch.bfloat16).contiguous() for name, p in head.named_parameters()}
    save_file(weights, args.out / "mtp.safetensors", metadata={"format": "pt"})
    files = dict.fromkeys(load_file(args.out / "model.safetensors"), "model.safetensors")
    files |= dict.fromkeys(weights, "mtp.safetensors")
    index = {"metadata": {}, "weight_map": files}
    for name, content in (("model.safetensors.index.json", index), ("mtp.json", facts)):
        (args.out / name).write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
