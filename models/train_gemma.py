"""Train a small Gemma 4 on the text of the Python installation that runs this script.

    python models/train_gemma.py --out models/gemma4-1m            (CPU, 2 cores: about fifteen minutes)

Two head sizes, windows, layers that share a cache, and an input of its own for each layer and token. Needs torch and
tokenizers, as `train.py` does; the architecture is written out here, so that nothing but torch defines it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import arguments, rotate, train_checkpoint

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class Shape:
    """The sizes of the model; 1.6 M parameters, 0.4 M of them in the table that the host reads."""

    vocab: int = 1024
    hidden: int = 128
    kinds: tuple[str, ...] = (SLIDING, SLIDING, FULL, SLIDING, SLIDING, FULL)
    sharing: int = 3
    window: int = 256
    heads: int = 4
    head_dim: int = 32
    full_head_dim: int = 64
    intermediate: int = 192
    layer_input: int = 64
    max_positions: int = 2048
    theta: float = 1e4
    full_theta: float = 1e6
    rotated: float = 0.25
    cap: float = 30.0
    eps: float = 1e-6

    @property
    def owners(self) -> int:
        """Number of layers with a cache of their own."""
        return len(self.kinds) - self.sharing

    def owner(self, layer: int) -> int:
        """The layer whose keys and values a layer reads."""
        if layer < self.owners:
            return layer
        return max(each for each in range(self.owners) if self.kinds[each] == self.kinds[layer])

    def width(self, layer: int) -> int:
        """Elements of a head."""
        return self.full_head_dim if self.kinds[layer] == FULL else self.head_dim

    def config(self, bos: int, eos: int, pad: int) -> dict[str, object]:
        """`config.json` in the form of the hub's files."""
        return {
            "architectures": ["Gemma4ForCausalLM"],
            "model_type": "gemma4_text",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "use_double_wide_mlp": True,
            "num_hidden_layers": len(self.kinds),
            "num_kv_shared_layers": self.sharing,
            "num_attention_heads": self.heads,
            "num_key_value_heads": 1,
            "head_dim": self.head_dim,
            "global_head_dim": self.full_head_dim,
            "hidden_size_per_layer_input": self.layer_input,
            "vocab_size": self.vocab,
            "vocab_size_per_layer_input": self.vocab,
            "hidden_activation": "gelu_pytorch_tanh",
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "rope_parameters": {
                FULL: {"rope_type": "proportional", "rope_theta": self.full_theta, "partial_rotary_factor": 0.25},
                SLIDING: {"rope_type": "default", "rope_theta": self.theta},
            },
            "layer_types": list(self.kinds),
            "sliding_window": self.window,
            "final_logit_softcapping": self.cap,
            "tie_word_embeddings": True,
            "bos_token_id": bos,
            "eos_token_id": eos,
            "pad_token_id": pad,
            "dtype": "bfloat16",
        }


class Attention(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.shape, self.layer, self.width = shape, layer, shape.width(layer)
        query = shape.heads * self.width
        self.q_proj = nn.Linear(shape.hidden, query, bias=False)
        self.q_norm = nn.RMSNorm(self.width, shape.eps)
        if layer < shape.owners:
            self.k_proj = nn.Linear(shape.hidden, self.width, bias=False)
            self.v_proj = nn.Linear(shape.hidden, self.width, bias=False)
            self.k_norm = nn.RMSNorm(self.width, shape.eps)
        self.o_proj = nn.Linear(query, shape.hidden, bias=False)
        with torch.no_grad():
            self.q_norm.weight.fill_(self.width**-0.25)  # scores are not scaled
            if layer < shape.owners:
                self.k_norm.weight.fill_(self.width**-0.25)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, shared: dict[int, Tensor]) -> Tensor:
        batch, length, _ = x.shape
        q = self.q_norm(self.q_proj(x).view(batch, length, -1, self.width)).transpose(1, 2)
        if self.layer < self.shape.owners:
            k = rotate(self.k_norm(self.k_proj(x))[:, None], *rotation)
            v = F.rms_norm(self.v_proj(x), [self.width], eps=self.shape.eps)[:, None]
            shared[self.layer] = torch.stack([k.to(v.dtype), v])
        k, v = shared[self.shape.owner(self.layer)]
        out = F.scaled_dot_product_attention(
            rotate(q, *rotation).to(v.dtype), k, v, attn_mask=mask, scale=1.0, enable_gqa=True
        )
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))


class Mlp(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        inner = shape.intermediate * (1 if layer < shape.owners else 2)
        self.gate_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.up_proj = nn.Linear(shape.hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    def __init__(self, shape: Shape, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(shape, layer)
        self.mlp = Mlp(shape, layer)
        for name in ("input", "post_attention", "pre_feedforward", "post_feedforward"):
            self.add_module(f"{name}_layernorm", nn.RMSNorm(shape.hidden, shape.eps))
        self.per_layer_input_gate = nn.Linear(shape.hidden, shape.layer_input, bias=False)
        self.per_layer_projection = nn.Linear(shape.layer_input, shape.hidden, bias=False)
        self.post_per_layer_input_norm = nn.RMSNorm(shape.hidden, shape.eps)
        self.layer_scalar = nn.Parameter(torch.ones(1))

    def forward(
        self, x: Tensor, own: Tensor, rotation: tuple[Tensor, Tensor], mask: Tensor, shared: dict[int, Tensor]
    ) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotation, mask, shared))
        x = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        gated = F.gelu(self.per_layer_input_gate(x), approximate="tanh") * own
        return (x + self.post_per_layer_input_norm(self.per_layer_projection(gated))) * self.layer_scalar


class Gemma(nn.Module):
    """Names of modules follow `Gemma4ForCausalLM`, so the state dict is the checkpoint."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, layers = shape, len(shape.kinds)
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(shape.vocab, shape.hidden),
                "embed_tokens_per_layer": nn.Embedding(shape.vocab, layers * shape.layer_input),
                "per_layer_model_projection": nn.Linear(shape.hidden, layers * shape.layer_input, bias=False),
                "per_layer_projection_norm": nn.RMSNorm(shape.layer_input, shape.eps),
                "layers": nn.ModuleList(Layer(shape, layer) for layer in range(layers)),
                "norm": nn.RMSNorm(shape.hidden, shape.eps),
            }
        )
        for kind, width, theta, share in (
            (FULL, shape.full_head_dim, shape.full_theta, shape.rotated),
            (SLIDING, shape.head_dim, shape.theta, 1.0),
        ):
            pairs = torch.arange(width // 2)
            frequencies = torch.where(pairs < int(share * width // 2), theta ** (-2 * pairs / width), 0.0)
            angles = torch.arange(shape.max_positions)[:, None] * frequencies
            self.register_buffer(f"cos_{kind}", angles.cos(), persistent=False)
            self.register_buffer(f"sin_{kind}", angles.sin(), persistent=False)
        distance = torch.arange(shape.max_positions)[:, None] - torch.arange(shape.max_positions)
        self.register_buffer(f"mask_{FULL}", distance >= 0, persistent=False)
        self.register_buffer(f"mask_{SLIDING}", (distance >= 0) & (distance < shape.window), persistent=False)
        out_std = 0.02 / math.sqrt(2 * layers)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                nn.init.normal_(weight, std=out_std if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        shape, parts, length = self.shape, self.model, tokens.shape[1]
        x = parts["embed_tokens"](tokens) * shape.hidden**0.5
        projected = parts["per_layer_model_projection"](x) * shape.hidden**-0.5
        projected = parts["per_layer_projection_norm"](projected.unflatten(-1, (-1, shape.layer_input)))
        table = parts["embed_tokens_per_layer"](tokens).unflatten(-1, (-1, shape.layer_input)) * shape.layer_input**0.5
        own = (projected + table) * 0.5**0.5
        shared: dict[int, Tensor] = {}
        for number, layer in enumerate(parts["layers"]):
            kind = shape.kinds[number]
            cos, sin, mask = (getattr(self, f"{name}_{kind}") for name in ("cos", "sin", "mask"))
            x = layer(x, own[:, :, number], (cos[:length], sin[:length]), mask[:length, :length], shared)
        logits = F.linear(parts["norm"](x), parts["embed_tokens"].weight)
        return shape.cap * torch.tanh(logits / shape.cap)


def main() -> None:
    train_checkpoint(arguments(__doc__, steps=500, tokens_per_step=1024), Shape(), Gemma)


if __name__ == "__main__":
    main()
