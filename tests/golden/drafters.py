"""What transformers' Gemma 4 drafter gives for a target's state, kept so that the tests need no torch.

    python tests/golden/drafters.py            write it
    python tests/golden/drafters.py --check    compute it again and compare with the stored values

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from kept import loaded, write_or_check
from transformers import AutoModelForCausalLM, Gemma4AssistantForCausalLM
from transformers.models.gemma4.configuration_gemma4 import Gemma4TextConfig

from tests.support.checkpoints import ARCHITECTURES, write_checkpoint, write_drafter

STEPS = 3
_modes = Gemma4TextConfig.kv_sharing_modes.fget


def _sharing(config: Gemma4TextConfig) -> list[str | None]:
    """transformers 5.23 refuses a drafter whose layers all share: no layer before them has keys and values."""
    if config.num_kv_shared_layers == config.num_hidden_layers:
        return ["reuse"] * config.num_hidden_layers
    found: list[str | None] = _modes(config)
    return found


def make() -> dict[str, np.ndarray]:
    """Tokens; logits `[steps, V]` and hidden states `[steps, H]` of a draft behind all of them but the last."""
    Gemma4TextConfig.kv_sharing_modes = property(_sharing)
    tokens = np.random.Generator(np.random.PCG64(5)).integers(0, 256, 21)
    logits, states = [], []
    with tempfile.TemporaryDirectory() as scratch, torch.no_grad():
        folder = write_checkpoint(Path(scratch) / "target", ARCHITECTURES["gemma4"], gain=1.0)
        target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        drafter = loaded(Gemma4AssistantForCausalLM, write_drafter(Path(scratch) / "drafter", folder))
        run = target(torch.tensor(tokens[:-1])[None], output_hidden_states=True, return_shared_kv_states=True)
        hidden, last = run.hidden_states[-1][:, -1:], torch.tensor(tokens[-1:])[None]
        for _ in range(STEPS):
            read = torch.cat([target.get_input_embeddings()(last), hidden], -1)
            at = torch.tensor([[len(tokens) - 1]])
            found = drafter(inputs_embeds=read, position_ids=at, shared_kv_states=run.shared_kv_states)
            logits.append(found.logits[0, 0].numpy())
            states.append(found.last_hidden_state[0, 0].numpy())
            last, hidden = found.logits.argmax(-1), found.last_hidden_state
    return {"tokens": tokens, "logits": np.array(logits), "hidden": np.array(states)}


if __name__ == "__main__":
    write_or_check(make, Path(__file__).with_suffix(".npz"))
