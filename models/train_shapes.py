"""Train a small SmolVLM that says which shape a picture shows, in which colour, and the number below it.

    python models/train_shapes.py --out models/shapes-360k       (CPU, 1 core: minutes)

Needs the extra `parity`: the architecture is transformers' own.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch
from shapes import EDGE, QUESTION, drawn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import SmolVLMConfig, SmolVLMForConditionalGeneration

BEGIN, WHOLE, IMAGE, START, END = "<fake_token_around_image>", "<global-img>", "<image>", "<|im_start|>", "<|end|>"
ROWS = 16
TEMPLATE = (
    "<|im_start|>{% for message in messages %}{% for part in message['content'] %}{% if part['type'] == 'image' %}"
    "<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %} {% endif %}"
)


def tokenizer() -> Tokenizer:
    """The 256 bytes, and the tokens around pictures."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE(vocab={symbol: at for at, symbol in enumerate(alphabet)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(each, special=True) for each in (START, END, BEGIN, WHOLE, IMAGE)])
    return found


def config(ids: Tokenizer) -> SmolVLMConfig:
    """300 thousand parameters."""
    bos, eos, image = (ids.token_to_id(each) for each in (START, END, IMAGE))
    text = {
        "model_type": "llama",
        "vocab_size": 264,
        "hidden_size": 96,
        "intermediate_size": 192,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 24,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": eos,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": EDGE,
        "patch_size": 8,
    }
    return SmolVLMConfig(
        text_config=text,
        vision_config=vision,
        scale_factor=2,
        image_token_id=image,
        tie_word_embeddings=False,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=eos,
    )


def batch(ids: Tokenizer, numbers: range) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, labels (-100 where none) and pixels of some pictures."""
    prompt = ids.encode(f"{START}{BEGIN}{WHOLE}{IMAGE * ROWS}{BEGIN}{QUESTION} ").ids
    end, tokens, pixels = ids.token_to_id(END), [], []
    for number in numbers:
        picture, words = drawn(number)
        tokens.append([*prompt, *ids.encode(words).ids, end])
        pixels.append(((picture.astype(np.float32) / 255 - 0.5) / 0.5).transpose(2, 0, 1)[None])
    longest = max(map(len, tokens))
    padded = torch.tensor([[*each, *[end] * (longest - len(each))] for each in tokens])
    labels = torch.full_like(padded, -100)
    for row, each in enumerate(tokens):
        labels[row, len(prompt) : len(each)] = padded[row, len(prompt) : len(each)]
    return padded, labels, torch.tensor(np.stack(pixels))


def main() -> None:
    """Train, and write the checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=1)
    given, size = parser.parse_args(), 32
    torch.manual_seed(given.seed)
    ids = tokenizer()
    model = SmolVLMForConditionalGeneration(config(ids))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=given.steps, pct_start=0.1)
    began, loss = time.time(), torch.tensor(0.0)
    for step in range(given.steps):
        tokens, labels, pixels = batch(ids, range(1000 + step * size, 1000 + (step + 1) * size))
        mask = torch.ones_like(tokens)
        loss = model(input_ids=tokens, attention_mask=mask, pixel_values=pixels, labels=labels).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if step % 50 == 0:
            print(f"{step} loss {loss.item():.4f} {time.time() - began:.0f} s", flush=True)
    given.out.mkdir(parents=True, exist_ok=True)
    model.to(torch.bfloat16).save_pretrained(given.out)
    for unused in ("generation_config.json",):
        (given.out / unused).unlink(missing_ok=True)
    ids.save(str(given.out / "tokenizer.json"))
    (given.out / "chat_template.jinja").write_text(TEMPLATE)
    prepared = {"size": {"longest_edge": EDGE}, "max_image_size": {"longest_edge": EDGE}, "resample": 1}
    (given.out / "preprocessor_config.json").write_text(json.dumps(prepared, indent=1) + "\n")
    made = {"steps": given.steps, "seed": given.seed, "last_loss": round(loss.item(), 5)}
    (given.out / "training.json").write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
