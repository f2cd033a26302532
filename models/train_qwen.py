"""Train a small Qwen3.5 on the text of the Python installation that runs this script.

    python models/train_qwen.py --out models/qwen3_5-800k            (one core of a CPU: about ten minutes)

Three of four layers have a gated delta rule in place of attention. Needs torch and tokenizers, as `train.py` does; the
architecture is written out here, so that nothing but torch defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import arguments, rotate, train_checkpoint

CHUNK = 32


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; 0.8 M parameters."""

    vocab: int = 1024
    hidden: int = 128
    kinds: tuple[str, ...] = ("linear_attention",) * 3 + ("full_attention",)
    kernel: int = 4
    key_heads: int = 2
    value_heads: int = 4
    key_dim: int = 32
    value_dim: int = 32
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    rotated: float = 0.5
    intermediate: int = 256
    max_positions: int = 4096
    rope_theta: float = 1e7
    eps: float = 1e-6

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form that Hugging Face transformers writes."""
        return {
            "architectures": ["Qwen3_5ForCausalLM"],
            "model_type": "qwen3_5_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": len(self.kinds),
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.rotated,
            },
            "layer_types": list(self.kinds),
            "linear_conv_kernel_dim": self.kernel,
            "linear_num_key_heads": self.key_heads,
            "linear_num_value_heads": self.value_heads,
            "linear_key_head_dim": self.key_dim,
            "linear_value_head_dim": self.value_dim,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class Norm(nn.Module):
    """RMSNorm with the weight 1 + w."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, 1 + self.weight, self.eps)


class GatedNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps) * F.silu(gate.float())


def recall(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, decay: Tensor) -> Tensor:
    """The outputs of a gated delta rule, `[batch, heads, T, value_dim]` (arXiv 2412.06464, section 3.3).

    Every chunk solves for its corrections but for what the state before it adds; the chunks then follow one another.
    """
    q, k, v, strength, decay = (
        each.unflatten(2, (-1, CHUNK)).movedim(2, 0) for each in (q, k, v, strength[..., None], decay)
    )
    total = decay.cumsum(-1)
    left = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    start, rest = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
    system = (strength * (k @ k.mT) * left).tril(-1) + torch.eye(CHUNK)
    known = torch.linalg.solve_triangular(system, strength * torch.cat((v, start * k), -1), upper=False)
    values, keys = known.split([v.shape[-1], k.shape[-1]], -1)
    inner, queries, last, kept = q @ k.mT * left, start * q, (rest * k).mT, start[..., -1:, :]
    state, found = v.new_zeros(*v.shape[1:3], k.shape[-1], v.shape[-1]), []
    for chunk in range(len(q)):
        correction = values[chunk] - keys[chunk] @ state
        found.append(queries[chunk] @ state + inner[chunk] @ correction)
        state = kept[chunk] * state + last[chunk] @ correction
    return torch.cat(found, 2)


class DeltaRule(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        keys, values = shape.key_heads * shape.key_dim, shape.value_heads * shape.value_dim
        self.in_proj_qkv = nn.Linear(shape.hidden, 2 * keys + values, bias=False)
        self.in_proj_z = nn.Linear(shape.hidden, values, bias=False)
        self.in_proj_b = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        self.in_proj_a = nn.Linear(shape.hidden, shape.value_heads, bias=False)
        channels = 2 * keys + values
        self.conv1d = nn.Conv1d(channels, channels, shape.kernel, groups=channels, bias=False)
        self.A_log = nn.Parameter(torch.linspace(math.log(0.5), math.log(8), shape.value_heads))
        steps = torch.logspace(-3, -1, shape.value_heads)  # of time, as in Mamba (arXiv 2312.00752)
        self.dt_bias = nn.Parameter(steps + torch.log(-torch.expm1(-steps)))
        self.norm = GatedNorm(shape.value_dim, shape.eps)
        self.out_proj = nn.Linear(values, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shape, (batch, length, _) = self.shape, x.shape
        rows = F.pad(self.in_proj_qkv(x).float(), (0, 0, shape.kernel - 1, 0))
        taps = self.conv1d.weight[:, 0].T
        mixed = F.silu(sum(rows[:, tap : tap + length] * taps[tap] for tap in range(shape.kernel)))
        keys = shape.key_heads * shape.key_dim
        q, k, v = mixed.split([keys, keys, mixed.shape[-1] - 2 * keys], -1)
        q, k = (
            F.normalize(each.view(batch, length, -1, shape.key_dim), dim=-1, eps=1e-6)
            .repeat_interleave(shape.value_heads // shape.key_heads, 2)
            .transpose(1, 2)
            for each in (q, k)
        )
        v = v.view(batch, length, -1, shape.value_dim).transpose(1, 2)
        strength = self.in_proj_b(x).float().sigmoid().transpose(1, 2)
        decay = (-self.A_log.exp() * F.softplus(self.in_proj_a(x).float() + self.dt_bias)).transpose(1, 2)
        with torch.autocast("cpu", enabled=False):
            found = recall(q * shape.key_dim**-0.5, k, v, strength, decay)
        gate = self.in_proj_z(x).view(batch, length, -1, shape.value_dim)
        return self.out_proj(self.norm(found.transpose(1, 2), gate).reshape(batch, length, -1))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        query, key_value = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, 2 * query, bias=False)
        self.k_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.v_proj = nn.Linear(shape.hidden, key_value, bias=False)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        self.q_norm = Norm(shape.head_dim, shape.eps)
        self.k_norm = Norm(shape.head_dim, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, length, _ = x.shape
        width = self.shape.head_dim
        q, gate = self.q_proj(x).view(batch, length, -1, 2 * width).chunk(2, -1)
        k, v = (proj(x).view(batch, length, -1, width) for proj in (self.k_proj, self.v_proj))
        q, k = self.q_norm(q).transpose(1, 2), self.k_norm(k).transpose(1, 2)
        turned = int(width * self.shape.rotated)
        q, k = (
            torch.cat([rotate(each[..., :turned], cos, sin), each[..., turned:]], -1).to(v.dtype) for each in (q, k)
        )
        out = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1) * gate.reshape(batch, length, -1).sigmoid())


class FeedForward(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=False)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        self.mlp = FeedForward(shape)
        self.mixer = "linear_attn" if kind == "linear_attention" else "self_attn"
        self.add_module(self.mixer, DeltaRule(shape) if kind == "linear_attention" else Attention(shape))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + getattr(self, self.mixer)(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Hybrid(nn.Module):
    """Names of modules follow `Qwen3_5ForCausalLM`, so the state dict is the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab, shape.hidden),
                "layers": nn.ModuleList(Layer(shape, kind) for kind in shape.kinds),
                "norm": Norm(shape.hidden, shape.eps),
            }
        )
        width = int(shape.head_dim * shape.rotated)
        angles = torch.arange(shape.max_positions)[:, None] * shape.rope_theta ** (-torch.arange(0, width, 2) / width)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        out_std = 0.02 / math.sqrt(2 * len(shape.kinds))
        outs = ("out_proj.weight", "o_proj.weight", "down_proj.weight")
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=out_std if name.endswith(outs) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.model["embed_tokens"](tokens)
        length = tokens.shape[1]
        for layer in self.model["layers"]:
            x = layer(x, self.cos[:length], self.sin[:length])
        return F.linear(self.model["norm"](x), self.model["embed_tokens"].weight)


def main() -> None:
    train_checkpoint(arguments(__doc__, steps=1500, tokens_per_step=1024), Shape(), Hybrid, held_out_tokens=16385)


if __name__ == "__main__":
    main()
