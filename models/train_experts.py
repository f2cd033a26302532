"""Train a small Qwen3 with experts on the text of the Python installation that runs this script.

    python models/train_experts.py --out models/experts-900k            (CPU, one core: about half an hour)

Every feed-forward is a mixture of eight experts, of which each token has two. Needs torch and tokenizers, as `train.py`
does; the architecture is written out here, so that nothing but torch defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import arguments, rotate, train_checkpoint

BALANCE = 0.01
"""Weight of the loss that keeps experts in use (arXiv 2101.03961, equation 4)."""


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; 0.9 M parameters."""

    vocab: int = 1024
    hidden: int = 128
    layers: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    experts: int = 8
    used: int = 2
    intermediate: int = 64
    max_positions: int = 2048
    rope_theta: float = 1000000.0
    eps: float = 1e-6

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": 4 * self.hidden,
            "moe_intermediate_size": self.intermediate,
            "num_experts": self.experts,
            "num_experts_per_tok": self.used,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "attention_bias": False,
            "tie_word_embeddings": True,
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
        self.q_norm = nn.RMSNorm(shape.head_dim, shape.eps)
        self.k_norm = nn.RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class WithLoss(torch.autograd.Function):
    """The first argument, with a loss of the second beside that of the logits."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, loss: Tensor) -> Tensor:
        ctx.save_for_backward(loss)
        return x

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss)


class Expert(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)


class Mixture(nn.Module):
    """All experts at once, as two products: for so few, that is faster than gathering each one's tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.used, self.count = shape.used, shape.experts
        self.gate = nn.Linear(shape.hidden, shape.experts, bias=False)
        self.experts = nn.ModuleList(Expert(shape) for _ in range(shape.experts))

    def forward(self, x: Tensor) -> Tensor:
        shares = F.linear(x.float(), self.gate.weight).float().softmax(-1)
        largest, chosen = shares.topk(self.used)
        weights = torch.zeros_like(shares).scatter(-1, chosen, largest / largest.sum(-1, keepdim=True))
        frequency = (weights > 0).float().mean((0, 1))
        x = WithLoss.apply(x, BALANCE * self.count / self.used * (frequency * shares.mean((0, 1))).sum())
        gate, up, down = (
            torch.cat([getattr(expert, name).weight for expert in self.experts], axis)
            for name, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1))
        )
        inner = (F.silu(F.linear(x, gate)) * F.linear(x, up)).unflatten(-1, (self.count, -1))
        return F.linear((inner * weights[..., None].to(inner.dtype)).flatten(-2), down)


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = Mixture(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Experts(nn.Module):
    """Names of modules follow `Qwen3MoeForCausalLM`, so the state dict is the checkpoint."""

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
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                nn.init.normal_(weight, std=out_std if residual else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        length = tokens.shape[1]
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def main() -> None:
    train_checkpoint(arguments(__doc__, steps=1200, tokens_per_step=4096), Shape(), Experts)


if __name__ == "__main__":
    main()
