"""Logits, greedy continuations and beam searches of Hugging Face transformers, kept so that the tests need no torch.

    python tests/golden/make_golden.py            write them
    python tests/golden/make_golden.py --check    make them anew and compare with those that were written

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent))
from tests.support.checkpoints import ARCHITECTURES, CONFIG, NEWER, OLDER, write_checkpoint  # noqa: E402

EMBEDDED = HERE.parent.parent / "models" / "stdlib-4m"
TOLERANCE = 1e-4
OTHERS = ("model.visual.", "model.vision_tower.", "model.multi_modal_projector.", "model.audio_tower.")
"""Of a text model's checkpoint, hardly any of these are there."""
PROMPT = "def __init__(self, "
NEW_TOKENS = 64


def logits(folder: Path, tokens: np.ndarray) -> np.ndarray:
    """float32 `[T, V]`."""
    multimodal = "text_config" in json.loads((folder / "config.json").read_text())
    model, loading = (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM).from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    text = [key for keys in loading.values() for key in keys if not key.startswith(OTHERS)]
    if text:
        raise SystemExit(f"{folder.name}: transformers did not load every tensor: {loading}")
    with torch.no_grad():
        return model(torch.tensor(tokens)[None]).logits[0].numpy()


def make_architectures() -> dict[str, np.ndarray]:
    """Tokens and last logits of a random checkpoint of each architecture, of sequences longer than its window.

    The checkpoints whose rotary embedding depends on the length get a second, shorter sequence.
    """
    random = np.random.Generator(np.random.PCG64(3))
    golden: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, fields in ARCHITECTURES.items():
            folder = write_checkpoint(Path(scratch) / name, fields)
            for length in (96, 60) if "rope_scaling" in fields else (96,):
                tokens = random.integers(0, CONFIG["vocab_size"], length)
                golden[f"{name}_{length}_tokens"] = tokens
                golden[f"{name}_{length}_logits"] = logits(folder, tokens)[-12:]
    return golden


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


def beam_search(model: Any, prompt: list[int], options: dict[str, Any], eos: list[int]) -> dict[str, Any]:
    """One search: what was asked, the sequences found without their prompt, and their scores."""
    model.generation_config.eos_token_id = eos or None
    tokens = torch.tensor(prompt)[None]
    found = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
        **options,
    )
    lengths = [(row >= 0).sum() for row in found.beam_indices]
    sequences = [row[len(prompt) :][:n].tolist() for row, n in zip(found.sequences, lengths, strict=True)]
    scores = found.sequences_scores.tolist()
    return {"prompt": prompt, "eos": eos, "options": options, "sequences": sequences, "scores": scores}


def make_beams() -> list[dict[str, Any]]:
    """Searches with two random checkpoints: without eos, and with tokens as eos that the free search does meet."""
    random = np.random.Generator(np.random.PCG64(2))
    golden = []
    with tempfile.TemporaryDirectory() as scratch:
        for name, overrides in (("newer", NEWER), ("older", OLDER)):
            folder = write_checkpoint(Path(scratch) / name, overrides)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            for length in (1, 9, 40):
                prompt = random.integers(0, 256, length).tolist()
                options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 16}
                free = beam_search(model, prompt, options, [])
                golden.append({"checkpoint": name, **free})
                met = [free["sequences"][0][5], free["sequences"][3][9]]
                for eos, penalty, early in product((met[:1], met), (-1.0, 0.0, 1.0, 2.5), (False, True, "never")):
                    asked = {**options, "length_penalty": penalty, "early_stopping": early}
                    golden.append({"checkpoint": name, **beam_search(model, prompt, asked, eos)})
                for beams, returned in ((2, 1), (3, 2), (7, 7)):
                    asked = {**options, "num_beams": beams, "num_return_sequences": returned}
                    golden.append({"checkpoint": name, **beam_search(model, prompt, asked, met)})
    return golden


def worst_score(kept: list[dict[str, Any]], made: list[dict[str, Any]]) -> float:
    """The greatest difference of two scores, relative to scores beyond 1; infinite if anything else differs."""
    if [{**each, "scores": None} for each in kept] != [{**each, "scores": None} for each in made]:
        return float("inf")
    old, new = (np.concatenate([each["scores"] for each in golden]) for golden in (kept, made))
    return float((np.abs(old - new) / np.maximum(1, np.abs(old))).max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    path, beams_path, architectures_path = (HERE / n for n in ("logits.npz", "beams.json", "architectures.npz"))
    golden, beams, architectures = make(), make_beams(), make_architectures()
    if not parser.parse_args().check:
        np.savez_compressed(path, **golden)
        beams_path.write_text("[\n" + ",\n".join(json.dumps(each) for each in beams) + "\n]\n")
        np.savez_compressed(architectures_path, **architectures)
        for written in (path, beams_path, architectures_path):
            print(f"{written}: {written.stat().st_size / 1e3:.0f} kB")
        return
    kept = np.load(path)
    worst = max(float(np.abs(kept[name] - value).max()) for name, value in golden.items())
    kept_architectures = np.load(architectures_path)
    for name, value in architectures.items():
        reach = float(np.ptp(value))
        worst = max(worst, float(np.abs(kept_architectures[name] - value).max()) / reach)
    worst = max(worst, worst_score(json.loads(beams_path.read_text()), beams))
    print(f"greatest difference to the golden logits and scores: {worst:.2e}")
    if worst > TOLERANCE:
        raise SystemExit(f"golden values are out of date: {worst:.2e} is above {TOLERANCE}")


if __name__ == "__main__":
    main()
