"""Pixels, encoder rows and logits of transformers' SmolVLM and InternVL, kept so that the tests need no torch.

    python tests/golden/pictures.py            write them
    python tests/golden/pictures.py --check    compute them again and compare with the stored ones

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import torch
from kept import loaded, write_or_check
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from tests.picture_models import FRAME, IMAGE_TOKEN, SIZES, WHOLE, photo, write_internvl, write_smolvlm


def make() -> dict[str, np.ndarray]:
    """Of each picture its tiles; of the first one the encoder's rows, the prompt's ids, and the last logits."""
    golden: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_smolvlm(Path(scratch) / "smolvlm")
        processor = SmolVLMImageProcessorPil.from_pretrained(folder)
        model = loaded(AutoModelForImageTextToText, folder)
        for number, (width, height) in enumerate(SIZES):
            found = processor(
                [[Image.fromarray(photo(width, height, number))]], return_tensors="pt", return_row_col_info=True
            )
            pixels = found["pixel_values"]
            golden[f"pixels{number}"] = pixels[0].numpy()
            if number:
                continue
            with torch.no_grad():
                rows = model.model.get_image_features(pixels, found["pixel_attention_mask"]).pooler_output
                golden["rows"] = torch.cat(tuple(rows)).numpy()
                text = get_image_prompt_string(found["rows"][0][0], found["cols"][0][0], 4, FRAME, IMAGE_TOKEN, WHOLE)
                ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(f"See {text} and say:").ids
                golden["ids"] = np.array(ids)
                golden["logits"] = (
                    model(
                        input_ids=torch.tensor([ids]),
                        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
                        pixel_values=pixels,
                        pixel_attention_mask=found["pixel_attention_mask"],
                    )
                    .logits[0, -8:]
                    .numpy()
                )
    return golden | make_internvl() | make_internvl(attention_bias=False)


def make_internvl(*, attention_bias: bool = True) -> dict[str, np.ndarray]:
    """The same of the first picture."""
    prefix = "internvl_" if attention_bias else "internvl-unbiased_"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_internvl(Path(scratch) / "internvl", attention_bias=attention_bias)
        model = loaded(AutoModelForImageTextToText, folder)
        picture = Image.fromarray(photo(*SIZES[0]))
        pixels = GotOcr2ImageProcessorPil.from_pretrained(folder)([picture], return_tensors="pt")["pixel_values"]
        text = f"See <img>{'<IMG_CONTEXT>' * 4 * len(pixels)}</img> and say:"
        ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids
        with torch.no_grad():
            rows = model.model.get_image_features(
                pixels, vision_feature_layer=-1, vision_feature_select_strategy="default"
            ).pooler_output
            mask = torch.ones(1, len(ids), dtype=torch.long)
            found = model(input_ids=torch.tensor([ids]), attention_mask=mask, pixel_values=pixels)
        return {
            f"{prefix}pixels": pixels.numpy(),
            f"{prefix}rows": rows.reshape(-1, rows.shape[-1]).numpy(),
            f"{prefix}ids": np.array(ids),
            f"{prefix}logits": found.logits[0, -8:].numpy(),
        }


if __name__ == "__main__":
    write_or_check(make, Path(__file__).with_suffix(".npz"))
