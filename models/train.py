"""Train the embedded checkpoint on the text of the Python installation that runs this script.

    python models/train.py --out models/stdlib-4m            (CPU, 2 cores: about an hour)

Needs torch and tokenizers, which edgekv itself does not. The architecture is Llama's (grouped-query
attention, SwiGLU, RMSNorm, RoPE, tied head), written out here so that nothing but torch defines it.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from corpus import held_out_documents
from torch import Tensor, nn
from training import arguments, rotate, train_checkpoint


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


def main() -> None:
    args = arguments(__doc__, steps=5000, tokens_per_step=4096)
    train_checkpoint(args, Shape(), Llama)
    config = json.loads((args.out / "config.json").read_text())
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    generation = json.dumps(ids | {"do_sample": False}, indent=2) + "\n"
    (args.out / "generation_config.json").write_text(generation)
    (args.out / "heldout.txt").write_text("".join(held_out_documents()))


if __name__ == "__main__":
    main()
