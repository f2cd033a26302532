"""Train a small LFM2 on the text of the Python installation that runs this script.

    python models/train_hybrid.py --out models/hybrid-1m            (CPU, 2 cores: about ten minutes)

Three of five layers have a gated short convolution in place of attention. Needs torch and tokenizers, as `train.py`
does; the architecture is written out here, so that nothing but torch defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import arguments, rotate, train_checkpoint


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; 1.0 M parameters."""

    vocab: int = 1024
    hidden: int = 128
    kinds: tuple[str, ...] = ("conv", "conv", "full_attention", "conv", "full_attention")
    kernel: int = 3
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    intermediate: int = 320
    max_positions: int = 2048
    rope_theta: float = 1000000.0
    eps: float = 1e-5

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""
        return {
            "architectures": ["Lfm2ForCausalLM"],
            "model_type": "lfm2",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.kinds),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "norm_eps": self.eps,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "layer_types": list(self.kinds),
            "conv_L_cache": self.kernel,
            "conv_bias": False,
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class ShortConvolution(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.in_proj = nn.Linear(shape.hidden, 3 * shape.hidden, bias=False)
        self.conv = nn.Conv1d(shape.hidden, shape.hidden, shape.kernel, groups=shape.hidden, bias=False)
        self.out_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        before, after, filtered = self.in_proj(x).transpose(1, 2).chunk(3, 1)
        rows = F.pad(before * filtered, (self.conv.kernel_size[0] - 1, 0))
        return self.out_proj((after * self.conv(rows)).transpose(1, 2))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.out_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_layernorm = nn.RMSNorm(shape.head_dim, shape.eps)
        self.k_layernorm = nn.RMSNorm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            proj(x).view(batch, length, -1, self.shape.head_dim) for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = self.q_layernorm(q).transpose(1, 2), self.k_layernorm(k).transpose(1, 2)
        out = F.scaled_dot_product_attention(
            rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype), v.transpose(1, 2),
            is_causal=True, enable_gqa=True,
        )  # fmt: skip
        return self.out_proj(out.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.w1 = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.w3 = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.w2 = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.operator_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.ffn_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.feed_forward = FeedForward(shape)
        self.operator = "conv" if kind == "conv" else "self_attn"
        self.add_module(self.operator, ShortConvolution(shape) if kind == "conv" else Attention(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + getattr(self, self.operator)(self.operator_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))


class Hybrid(nn.Module):
    """Names of modules follow `Lfm2ForCausalLM`, so the state dict is the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab, shape.hidden),
                "layers": nn.ModuleList(Layer(shape, kind) for kind in shape.kinds),
                "embedding_norm": nn.RMSNorm(shape.hidden, shape.eps),
            }
        )
        angles = torch.arange(shape.max_positions)[:, None] * shape.rope_theta ** (
            -torch.arange(0, shape.head_dim, 2) / shape.head_dim
        )
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        out_std = 0.02 / math.sqrt(2 * len(shape.kinds))
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=out_std if name.endswith(("out_proj.weight", "w2.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        length = tokens.shape[1]
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.model["embedding_norm"](x), self.model["embed_tokens"].weight)


def main() -> None:
    train_checkpoint(arguments(__doc__, steps=1000, tokens_per_step=4096), Shape(), Hybrid)


if __name__ == "__main__":
    main()
