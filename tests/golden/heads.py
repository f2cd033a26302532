"""What Qwen3.5's own head for further tokens drafts, kept so that the tests need no torch.

    python tests/golden/heads.py            write it
    python tests/golden/heads.py --check    compute it again and compare with the stored values

transformers leaves the head out, so it is written here, over transformers' layers of the model itself. Needs the extra
`parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from kept import write_or_check
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import (
    Qwen3_5DecoderLayer,
    Qwen3_5RMSNorm,
    Qwen3_5TextRotaryEmbedding,
)

from tests.support.checkpoints import ARCHITECTURES, add_head, write_checkpoint

STEPS = 3


class Head(nn.Module):
    """Names of modules follow the checkpoint's `mtp`."""

    def __init__(self, config: Qwen3_5TextConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(width, eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(width, eps)
        self.fc = nn.Linear(2 * width, width, bias=False)
        self.layers = nn.ModuleList([Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.norm = Qwen3_5RMSNorm(width, eps)
        self.rotary = Qwen3_5TextRotaryEmbedding(config)

    def forward(self, embeddings: Tensor, hidden: Tensor) -> Tensor:
        """The result of the last norm, `[1, T, H]`, of rows from position 0 on."""
        rows, at = hidden.shape[1], torch.arange(hidden.shape[1])[None]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(hidden)], -1))
        mask = torch.full((rows, rows), -torch.inf).triu(1)[None, None]
        found = self.layers[0](x, position_embeddings=self.rotary(x, at), attention_mask=mask, position_ids=at)
        return self.norm(found)


def make() -> dict[str, np.ndarray]:
    """Tokens; logits `[steps, V]` and hidden states `[steps, H]` of a draft behind all of them but the last."""
    tokens = np.random.Generator(np.random.PCG64(6)).integers(0, 256, 21)
    logits, states = [], []
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = add_head(write_checkpoint(Path(scratch), ARCHITECTURES["qwen3_5"], gain=1.0))
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        head = Head(model.config)
        stored = load_file(folder / "mtp.safetensors")
        loaded = head.load_state_dict({name.removeprefix("mtp."): each.float() for name, each in stored.items()})
        if any(loaded):
            raise SystemExit(f"not every tensor was loaded: {loaded}")
        hidden = model.model(torch.tensor(tokens[:-1])[None]).last_hidden_state
        read = torch.tensor(tokens[1:])[None]
        for _ in range(STEPS):
            found = head(model.get_input_embeddings()(read), hidden)
            last = model.lm_head(found[:, -1:])
            logits.append(last[0, 0].numpy())
            states.append(found[0, -1].numpy())
            read, hidden = torch.cat([read, last.argmax(-1)], 1), torch.cat([hidden, found[:, -1:]], 1)
    return {"tokens": tokens, "logits": np.array(logits), "hidden": np.array(states)}


if __name__ == "__main__":
    write_or_check(make, Path(__file__).with_suffix(".npz"))
