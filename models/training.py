"""What every training script here does around its model: text, tokenizer, optimizer, files of the checkpoint.

Needs torch and tokenizers, which edgekv itself does not.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.nn.functional as F
from corpus import held_out_documents, training_documents
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn

BOS, EOS, PAD = "<|begin_of_text|>", "<|end_of_text|>", "<|pad|>"
WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class Shape(Protocol):
    """The sizes of a model."""

    @property
    def vocab(self) -> int: ...

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""


def arguments(description: str | None, *, steps: int, tokens_per_step: int) -> argparse.Namespace:
    """`out`, `steps`, `tokens_per_step` and `seed` of the command line, with these defaults."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=steps, help="optimizer steps")
    parser.add_argument("--tokens-per-step", type=int, default=tokens_per_step)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def train_checkpoint(
    args: argparse.Namespace, shape: Shape, build: Callable[[Shape], nn.Module], *, held_out_tokens: int | None = None
) -> None:
    """Train `build(shape)` on the corpus and write the checkpoint to `args.out`.

    Names of the model's parameters are those of the checkpoint. The perplexity in `training.json` is that of the
    weights as they are saved, over `held_out_tokens` of the held-out text (all of it unless said).
    """
    torch.manual_seed(args.seed)
    documents = list(training_documents())
    tokenizer = train_tokenizer(documents, shape.vocab)
    ids = stream(tokenizer, documents)
    held_out = stream(tokenizer, list(held_out_documents()))
    model = build(shape)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(documents)} documents, {len(ids):,} tokens, held out {len(held_out):,}; {parameters:,} parameters")

    train(model, ids, held_out, args.steps, args.tokens_per_step, args.seed)
    for p in model.parameters():  # measure the weights as they are saved
        p.data = p.data.to(torch.bfloat16).float()
    facts = {
        "parameters": parameters,
        "corpus_sha256": hashlib.sha256("\0".join(documents).encode()).hexdigest(),
        "corpus_tokens": len(ids),
        "trained_tokens": args.steps * args.tokens_per_step,
        "held_out_perplexity": round(perplexity(model, held_out[:held_out_tokens]), 4),
    }
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    config = shape.config(*(tokenizer.token_to_id(name) for name in (BOS, EOS, PAD)))
    save(args, weights, tokenizer, config, facts)


def save(
    args: argparse.Namespace,
    weights: dict[str, Tensor],
    tokenizer: Tokenizer,
    config: dict[str, object],
    facts: dict[str, object],
) -> None:
    """Write weights, tokenizer, `config.json`, and `training.json` with `facts` and how they were made."""
    facts |= {"steps": args.steps, "seed": args.seed, "torch": torch.__version__}
    args.out.mkdir(parents=True, exist_ok=True)
    save_file(weights, args.out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(args.out / "tokenizer.json"))
    for name, content in (("config.json", config), ("training.json", facts)):
        (args.out / name).write_text(json.dumps(content, indent=2) + "\n")
    print(json.dumps(facts, indent=2))


def train(model: nn.Module, ids: Tensor, held_out: Tensor, steps: int, tokens_per_step: int, seed: int) -> None:
    """Muon on the matrices, AdamW on the rest; warm-up, plateau, linear decay; windows of 512, then 1024."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=0.006, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01),
    ]
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    random = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for step in range(steps):
        length = 512 if step < 0.8 * steps else 1024
        factor = min(1.0, (step + 1) / 100, (steps - step) / (0.5 * steps))
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * factor
        starts = torch.randint(len(ids) - length - 1, (tokens_per_step // length,), generator=random)
        batch = torch.stack([ids[s : s + length + 1] for s in starts])
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(batch[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0 or step == steps - 1:
            rate = (step + 1) * tokens_per_step / (time.perf_counter() - began)
            print(f"step {step:5d}  loss {loss.item():.3f}  {rate:,.0f} tokens/s", flush=True)
        if step % 500 == 499:
            print(f"step {step:5d}  held-out perplexity {perplexity(model, held_out[:16385]):.3f}", flush=True)


@torch.no_grad()
def perplexity(model: nn.Module, ids: Tensor, length: int = 512) -> float:
    """Exp of the mean next-token loss over windows of `length` that do not overlap."""
    windows = ids[: (len(ids) - 1) // length * length + 1]
    x, y = windows[:-1].view(-1, length), windows[1:].view(-1, length)
    losses = [F.cross_entropy(model(a).flatten(0, 1), b.flatten()) for a, b in zip(x.split(8), y.split(8), strict=True)]
    weights = torch.tensor([len(a) for a in x.split(8)], dtype=torch.float32)
    return math.exp(float((torch.stack(losses) * weights).sum() / weights.sum()))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)


def train_tokenizer(documents: list[str], vocab: int) -> Tokenizer:
    """Byte-level BPE over Llama 3's split into words; id 0 begins a text, 1 ends it, 2 pads."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, PAD)],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 0)])
    return tokenizer


def stream(tokenizer: Tokenizer, documents: list[str]) -> Tensor:
    """All documents as one row of ids, each between its begin and end tokens."""
    ids = [i for e in tokenizer.encode_batch(documents) for i in (*e.ids, tokenizer.token_to_id(EOS))]
    return torch.tensor(ids, dtype=torch.long)
