"""Train a small Gemma 3 with outlier channels: two channels of its residual are a hundred times larger than the others.

    python models/train_outliers.py --out models/outliers-600k            (CPU, 1 core: about ten minutes)

Gemma 3 checkpoints have such channels at every position. Here the embedding and the norms behind the blocks begin with
them, and training goes on from there: all other weights are learned with an RMS that these channels dominate. Needs
torch and tokenizers, as `train.py` does.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from corpus import held_out_documents, training_documents
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor, nn
from training import BOS, EOS, PAD, arguments, rotate, save, stream

LENGTH = 256
"""Tokens of a window."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the model, and its outlier channels."""

    vocab: int = 320
    hidden: int = 160
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 256
    max_positions: int = 512
    rope_theta: float = 10000.0
    eps: float = 1e-6
    outliers: tuple[int, ...] = (23, 118)
    large: float = 200.0

    def config(self) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""
        rope = {"rope_type": "default", "rope_theta": self.rope_theta}
        return {
            "architectures": ["Gemma3ForCausalLM"],
            "model_type": "gemma3_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "query_pre_attn_scalar": self.head_dim,
            "vocab_size": self.vocab,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"full_attention": rope, "sliding_attention": rope},
            "layer_types": ["full_attention"] * self.layers,
            "sliding_window": self.max_positions,
            "tie_word_embeddings": True,
            "attention_bias": False,
            "bos_token_id": 256,
            "eos_token_id": 257,
            "pad_token_id": 258,
            "dtype": "bfloat16",
        }

    def channels(self, ordinary: float, outlier: float) -> Tensor:
        """`[hidden]`, one value for ordinary channels and another for outliers."""
        values = torch.full((self.hidden,), ordinary)
        values[list(self.outliers)] = outlier
        return values


class Scaled(nn.Module):
    """A parameter of ones times constants, so that steps of the optimizer are relative to each value's size."""

    def __init__(self, start: Tensor) -> None:
        super().__init__()
        self.share = nn.Parameter(torch.ones_like(start))
        self.register_buffer("start", start, persistent=False)

    @property
    def value(self) -> Tensor:
        return self.share * self.start


class Norm(Scaled):
    """RMSNorm."""

    def __init__(self, start: Tensor, eps: float) -> None:
        super().__init__(start)
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.value


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm, self.k_norm = (Norm(torch.ones(shape.head_dim), shape.eps) for _ in range(2))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rotate(self.q_norm(q), cos, sin), rotate(self.k_norm(k), cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        rms = shape.large * math.sqrt(len(shape.outliers) / shape.hidden)
        before, behind = shape.channels(rms, 0.3), shape.channels(0.5, 0.1 * shape.large)
        self.input_layernorm, self.pre_feedforward_layernorm = (Norm(before, shape.eps) for _ in range(2))
        self.post_attention_layernorm, self.post_feedforward_layernorm = (Norm(behind, shape.eps) for _ in range(2))
        self.self_attn, self.mlp = Attention(shape), Mlp(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), cos, sin))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))


class Gemma(nn.Module):
    """Gemma 3 without windows; its embedding and norms are stored as transformers stores them by `tensors`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        rms = shape.large * math.sqrt(len(shape.outliers) / shape.hidden)
        embedding = torch.randn(shape.vocab, shape.hidden)
        embedding[:, list(shape.outliers)] = shape.large
        self.embedding = Scaled(embedding)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.channels(rms, 0.01), shape.eps)
        angles = torch.arange(shape.max_positions)[:, None] * shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        embedding = self.embedding.value
        x, length = embedding[tokens], tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.norm(x), embedding / math.sqrt(self.shape.hidden))

    def tensors(self) -> dict[str, Tensor]:
        """The checkpoint: embeddings less their gain, norms less 1."""
        found = {"model.embed_tokens.weight": self.embedding.value / math.sqrt(self.shape.hidden)}
        for name, module in self.named_modules():
            if isinstance(module, Norm):
                found[f"model.{name}.weight"] = module.value - 1
            elif isinstance(module, nn.Linear):
                found[f"model.{name}.weight"] = module.weight
        return {name: value.detach().to(torch.bfloat16).contiguous() for name, value in found.items()}


def byte_tokenizer() -> Tokenizer:
    """The 256 bytes, and three special tokens behind them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in (BOS, EOS, PAD)])
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{BOS} $A", special_tokens=[(BOS, 256)])
    return tokenizer


def windows(ids: Tensor, starts: Tensor, length: int) -> Tensor:
    """`[windows, length]`, each behind a BOS token."""
    rows = torch.stack([ids[start : start + length - 1] for start in starts.tolist()])
    return F.pad(rows, (1, 0), value=256)


def loss(model: Gemma, batch: Tensor) -> Tensor:
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model: Gemma, ids: Tensor, steps: int, tokens_per_step: int, seed: int) -> None:
    """AdamW, with warm-up and a decay to zero."""
    matrices = [p for p in model.parameters() if p.ndim == 2 and len(p) != model.shape.vocab]
    others = [p for p in model.parameters() if p.ndim != 2 or len(p) == model.shape.vocab]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1, "lr": 3e-3}, {"params": others, "weight_decay": 0.0, "lr": 1e-2}],
        betas=(0.9, 0.95),
    )
    peaks = [group["lr"] for group in optimizer.param_groups]
    random = torch.Generator().manual_seed(seed)
    began = time.perf_counter()
    for step in range(steps):
        factor = min(1.0, (step + 1) / 50, (steps - step) / (0.7 * steps))
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * factor
        starts = torch.randint(len(ids) - LENGTH, (tokens_per_step // LENGTH,), generator=random)
        found = loss(model, windows(ids, starts, LENGTH + 1))
        found.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0 or step == steps - 1:
            print(f"step {step:5d}  loss {found.item():.3f}  {time.perf_counter() - began:.0f} s", flush=True)


@torch.no_grad()
def perplexity(model: Gemma, ids: Tensor) -> float:
    """Exp of the mean loss of held-out bytes, in windows that do not overlap."""
    starts = torch.arange(0, len(ids) - LENGTH, LENGTH)
    losses = [loss(model, windows(ids, some, LENGTH + 1)) for some in starts.split(16)[:-1]]
    return math.exp(float(torch.stack(losses).mean()))


def main() -> None:
    args = arguments(__doc__, steps=1000, tokens_per_step=4096)
    torch.manual_seed(args.seed)
    shape, tokenizer = Shape(), byte_tokenizer()
    ids, held_out = (stream(tokenizer, list(each)) for each in (training_documents(), held_out_documents()))
    model = Gemma(shape)
    tensors = model.tensors()
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{len(ids):,} tokens, held out {len(held_out):,}; {parameters:,} parameters")
    train(model, ids, args.steps, args.tokens_per_step, args.seed)
    facts = {
        "parameters": parameters,
        "trained_tokens": args.steps * args.tokens_per_step,
        "held_out_perplexity": round(perplexity(model, held_out), 4),
    }
    save(args, model.tensors(), tokenizer, shape.config(), facts)


if __name__ == "__main__":
    main()
