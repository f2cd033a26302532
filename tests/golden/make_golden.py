"""Logits and greedy continuations of Hugging Face transformers, kept so that the tests need no torch.

    python tests/golden/make_golden.py            write them
    python tests/golden/make_golden.py --check    make them anew and compare with those that were written

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
from checkpoints import CONFIG, NEWER, OLDER, write_checkpoint  # noqa: E402

EMBEDDED = HERE.parent.parent / "models" / "stdlib-4m"
TOLERANCE = 1e-4
PROMPT = "def __init__(self, "
NEW_TOKENS = 64


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 `[T, V]`."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def continuation(folder: Path, prompt: str) -> np.ndarray:
    """Token ids of the prompt, then of `NEW_TOKENS` greedy ones."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(prompt).ids])
    return model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False)[0].numpy()


def make() -> dict[str, np.ndarray]:
    """The golden arrays: tokens and logits of two random checkpoints and of the embedded one."""
    random = np.random.Generator(np.random.PCG64(1))
    golden: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, overrides in (("newer", NEWER), ("older", OLDER)):
            tokens = random.integers(0, CONFIG["vocab_size"], 200)
            golden[f"{name}_tokens"] = tokens
            golden[f"{name}_logits"] = logits(write_checkpoint(Path(scratch) / name, overrides), tokens)[-64:]
    tokens = np.concatenate([[0], random.integers(3, 4096, 15), np.arange(300, 396)])
    golden["embedded_tokens"] = tokens
    golden["embedded_logits"] = logits(EMBEDDED, tokens)[-24:]
    golden["text"] = continuation(EMBEDDED, PROMPT)
    return golden


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    path = HERE / "logits.npz"
    golden = make()
    if not parser.parse_args().check:
        np.savez_compressed(path, **golden)
        print(f"{path}: {path.stat().st_size / 1e3:.0f} kB")
        return
    kept = np.load(path)
    worst = max(float(np.abs(kept[name] - value).max()) for name, value in golden.items())
    print(f"greatest difference to the golden logits: {worst:.2e}")
    if worst > TOLERANCE:
        raise SystemExit(f"golden logits are out of date: {worst:.2e} is above {TOLERANCE}")


if __name__ == "__main__":
    main()
