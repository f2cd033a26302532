"""Train the embedded checkpoint on the text of the Python installation that runs this script.

    python models/train.py --out models/stdlib-4m            (CPU, 2 cores: about an hour)

Needs torch and tokenizers, which edgekv itself does not. The architecture is Llama's (grouped-query
attention, SwiGLU, RMSNorm, RoPE, tied head), written out here so that nothing but torch defines it.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; 3.9 M parameters."""

    vocab: int = 4096
    hidden: int = 256
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    intermediate: int = 704
    max_positions: int = 1024
    rope_theta: float = 10000.0
    eps: float = 1e-5

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_act": "silu",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": True,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Names of modules follow `LlamaForCausalLM`, so the state dict is the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab, shape.hidden),
                "layers": nn.ModuleList(Layer(shape) for _ in range(shape.layers)),
                "norm": nn.RMSNorm(shape.hidden, shape.eps),
            }
        )
        angles = torch.arange(shape.max_positions)[:, None] * shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        out_std = 0.02 / math.sqrt(2 * shape.layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=out_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        length = tokens.shape[1]
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


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


@torch.no_grad()
def perplexity(model: Llama, ids: Tensor, length: int = 512) -> float:
    """Exp of the mean next-token loss over windows of `length` that do not overlap."""
    windows = ids[: (len(ids) - 1) // length * length + 1]
    x, y = windows[:-1].view(-1, length), windows[1:].view(-1, length)
    losses = [F.cross_entropy(model(a).flatten(0, 1), b.flatten()) for a, b in zip(x.split(8), y.split(8), strict=True)]
    weights = torch.tensor([len(a) for a in x.split(8)], dtype=torch.float32)
    return math.exp(float((torch.stack(losses) * weights).sum() / weights.sum()))


def train(model: Llama, ids: Tensor, held_out: Tensor, steps: int, tokens_per_step: int, seed: int) -> None:
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


def save(model: Llama, tokenizer: Tokenizer, shape: Shape, out: Path, facts: dict[str, object]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    bos, eos, pad = (tokenizer.token_to_id(name) for name in (BOS, EOS, PAD))
    weights = {name: p.detach().to(torch.bfloat16).contiguous() for name, p in model.named_parameters()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(out / "tokenizer.json"))
    files = {
        "config.json": shape.config(bos, eos, pad),
        "generation_config.json": {
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "do_sample": False,
        },
        "training.json": facts,
    }
    for name, content in files.items():
        (out / name).write_text(json.dumps(content, indent=2) + "\n")
    (out / "heldout.txt").write_text("".join(held_out_documents()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the checkpoint to")
    parser.add_argument("--steps", type=int, default=5000, help="optimizer steps")
    parser.add_argument("--tokens-per-step", type=int, default=4096)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    shape = Shape()
    documents = list(training_documents())
    digest = hashlib.sha256("\0".join(documents).encode()).hexdigest()
    tokenizer = train_tokenizer(documents, shape.vocab)
    ids = stream(tokenizer, documents)
    held_out = stream(tokenizer, list(held_out_documents()))
    model = Llama(shape)
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{len(documents)} documents, {len(ids):,} tokens, held out {len(held_out):,}; {parameters:,} parameters")

    train(model, ids, held_out, args.steps, args.tokens_per_step, args.seed)
    for p in model.parameters():  # measure the weights as they are saved
        p.data = p.data.to(torch.bfloat16).float()
    facts = {
        "parameters": parameters,
        "corpus_sha256": digest,
        "corpus_tokens": len(ids),
        "trained_tokens": args.steps * args.tokens_per_step,
        "steps": args.steps,
        "seed": args.seed,
        "torch": torch.__version__,
        "held_out_perplexity": round(perplexity(model, held_out), 4),
    }
    save(model, tokenizer, shape, args.out, facts)
    print(json.dumps(facts, indent=2))


if __name__ == "__main__":
    main()
