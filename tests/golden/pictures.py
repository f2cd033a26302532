"""Pixels, rows and logits of transformers' models that read pictures: the tests need no torch.

    python tests/golden/pictures.py            write them
    python tests/golden/pictures.py --check    compute them again and compare with the stored ones

Needs the extra `parity`. Run it from the root of the repository.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import loaded, write_or_check
from PIL import Image
from tokenizers import Tokenizer

from tests.support.picture_models import (
    FRAME,
    IMAGE_TOKEN,
    SHAPED_SIZES,
    SIZES,
    WHOLE,
    photo,
    write_gemma3_vl,
    write_gemma4_vl,
    write_internvl,
    write_lfm2_vl,
    write_qwen2_5_vl,
    write_qwen2_vl,
    write_qwen3_vl,
    write_smolvlm,
)

TORCHVISION = Path(sys.prefix) / "torchvision"
sys.path.append(str(TORCHVISION))
try:
    torch.ops.load_library(TORCHVISION / "torchvision" / "_C.so")
except OSError:  # that of the wheel wants CUDA, which resizing does not; the import wants its names
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from transformers import AutoModelForImageTextToText, PreTrainedTokenizerFast  # noqa: E402
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil  # noqa: E402
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil  # noqa: E402
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil  # noqa: E402
from transformers.models.lfm2_vl.image_processing_lfm2_vl import Lfm2VlImageProcessor  # noqa: E402
from transformers.models.lfm2_vl.processing_lfm2_vl import Lfm2VlProcessor  # noqa: E402
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor  # noqa: E402
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil  # noqa: E402
from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor  # noqa: E402
from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor  # noqa: E402
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor  # noqa: E402
from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor  # noqa: E402
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil  # noqa: E402
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string  # noqa: E402


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
    for biased in (True, False):
        golden |= make_internvl(attention_bias=biased)
    for normalized in (True, False):
        golden |= make_lfm2_vl(merged_norm=normalized)
    golden |= make_qwen_vl("qwen2_vl", write_qwen2_vl, Qwen2VLProcessor, Qwen2VLVideoProcessor)
    golden |= make_qwen_vl("qwen2_5_vl", write_qwen2_5_vl, Qwen2_5_VLProcessor, Qwen2VLVideoProcessor)
    golden |= make_qwen_vl("qwen3_vl", write_qwen3_vl, Qwen3VLProcessor, Qwen3VLVideoProcessor)
    golden |= make_gemma3_vl() | make_gemma4_vl() | make_gemma4_vl(clipped=True)
    return golden | make_gemma4_vl(clipped=True, layered=True)


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


def make_lfm2_vl(*, merged_norm: bool = True) -> dict[str, np.ndarray]:
    """Tiles of pictures of several shapes as rows of pixels, and of the first one the rows, ids and last logits."""
    prefix = "lfm2_vl_" if merged_norm else "lfm2_vl-plain_"
    golden: dict[str, np.ndarray] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_lfm2_vl(Path(scratch) / "lfm2_vl", merged_norm=merged_norm)
        model = loaded(AutoModelForImageTextToText, folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        processor = Lfm2VlProcessor(Lfm2VlImageProcessor.from_pretrained(folder), tokenizer)
        for number, (width, height) in enumerate(SHAPED_SIZES if merged_norm else SHAPED_SIZES[:1]):
            picture = Image.fromarray(photo(width, height, number))
            found = processor(images=[picture], text="See <image> and say:", return_tensors="pt")
            golden[f"{prefix}shapes{number}"] = found["spatial_shapes"].numpy()
            golden[f"{prefix}pixels{number}"] = found["pixel_values"].numpy()
            if number:
                continue
            with torch.no_grad():
                golden[f"{prefix}ids"] = found["input_ids"][0].numpy()
                given = {name: found[name] for name in ("pixel_values", "spatial_shapes", "pixel_attention_mask")}
                rows = model.model.get_image_features(**given).pooler_output
                golden[f"{prefix}rows"] = torch.cat(tuple(rows)).numpy()
                mask = torch.ones_like(found["input_ids"])
                logits = model(input_ids=found["input_ids"], attention_mask=mask, **given).logits
                golden[f"{prefix}logits"] = logits[0, -8:].numpy()
    return golden


def make_qwen_vl(
    kind: str, write: Callable[[Path], Path], own_processor: type[Any], videos: type[Any]
) -> dict[str, np.ndarray]:
    """Of each picture its patches and their grid; rows and positions of a prompt with two, and its logits."""
    golden: dict[str, np.ndarray] = {}
    prefix, place = f"{kind}_", "<|vision_start|><|image_pad|><|vision_end|>"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write(Path(scratch) / kind)
        model = loaded(AutoModelForImageTextToText, folder)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
        images = Qwen2VLImageProcessorPil.from_pretrained(folder)
        processor = own_processor(images, tokenizer, videos())
        pictures = [Image.fromarray(photo(*size, number)) for number, size in enumerate(SHAPED_SIZES)]
        for number, picture in enumerate(pictures):
            found = images([picture], return_tensors="pt")
            golden[f"{prefix}grid{number}"] = found["image_grid_thw"][0].numpy()
            golden[f"{prefix}pixels{number}"] = found["pixel_values"].numpy()
        found = processor(text=[f"See {place} and {place} say:"], images=pictures[:2], return_tensors="pt")
        golden[f"{prefix}ids"] = found["input_ids"][0].numpy()
        with torch.no_grad():
            features = model.model.get_image_features(found["pixel_values"], found["image_grid_thw"])
            kinds = (features.pooler_output, *(getattr(features, "deepstack_features", None) or ()))
            golden[f"{prefix}rows"] = torch.cat([torch.cat(tuple(kind)) for kind in kinds], dim=1).numpy()
            places = model.model.get_rope_index(found["input_ids"], found["mm_token_type_ids"], found["image_grid_thw"])
            golden[f"{prefix}positions"] = places[0][:, 0].T.numpy()
            golden[f"{prefix}logits"] = model(**found).logits[0].numpy()
    return golden


def make_gemma3_vl() -> dict[str, np.ndarray]:
    """Pixels of each picture; rows and logits of a prompt with two, whose rows attend to each other."""
    golden: dict[str, np.ndarray] = {}
    prefix, place = "gemma3_vl_", "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_gemma3_vl(Path(scratch) / "gemma3_vl")
        model = loaded(AutoModelForImageTextToText, folder)
        images = Gemma3ImageProcessorPil.from_pretrained(folder)
        pictures = [Image.fromarray(photo(*size, number)) for number, size in enumerate(SIZES)]
        pixels = torch.cat([images([picture], return_tensors="pt")["pixel_values"] for picture in pictures])
        golden[f"{prefix}pixels"] = pixels.numpy()
        text = f"See {place} and {place} say: what are they?"
        ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
        golden[f"{prefix}ids"] = ids[0].numpy()
        with torch.no_grad():
            rows = model.model.get_image_features(pixels[:2]).pooler_output
            golden[f"{prefix}rows"] = rows.reshape(-1, rows.shape[-1]).numpy()
            kinds = (ids == model.config.image_token_id).long()
            found = model(
                input_ids=ids, attention_mask=torch.ones_like(ids), pixel_values=pixels[:2], token_type_ids=kinds
            )
            golden[f"{prefix}logits"] = found.logits[0].numpy()
    return golden


def make_gemma4_vl(*, clipped: bool = False, layered: bool = False) -> dict[str, np.ndarray]:
    """Patches and places of each picture, and the rows of those of a shape; ids and logits of a prompt with two."""
    golden: dict[str, np.ndarray] = {}
    prefix = "gemma4_vl-layered_" if layered else "gemma4_vl-clipped_" if clipped else "gemma4_vl_"
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_gemma4_vl(Path(scratch) / "gemma4_vl", clipped=clipped, layered=layered)
        model = loaded(AutoModelForImageTextToText, folder)
        images = Gemma4ImageProcessorPil.from_pretrained(folder)
        pictures = [
            Image.fromarray(photo(*size, number))
            for number, size in enumerate(SHAPED_SIZES[:2] if clipped else SHAPED_SIZES)
        ]
        found = images(pictures, return_tensors="pt")
        counts = [int(count) for count in found["num_soft_tokens_per_image"]]
        golden[f"{prefix}counts"] = np.array(counts)
        for number, count in enumerate([] if clipped else counts):
            golden[f"{prefix}pixels{number}"] = found["pixel_values"][number, : 9 * count].numpy()
            golden[f"{prefix}places{number}"] = found["image_position_ids"][number, : 9 * count].numpy()
        shown = {"pixel_values": found["pixel_values"][:2], "image_position_ids": found["image_position_ids"][:2]}
        places = ["<|image>" + "<|image|>" * count + "<image|>" for count in counts[:2]]
        text = f"See {places[0]} and {places[1]} say: what are they?"
        ids = torch.tensor([Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids])
        golden[f"{prefix}ids"] = ids[0].numpy()
        with torch.no_grad():
            golden[f"{prefix}rows"] = torch.cat(model.model.get_image_features(**shown).pooler_output).numpy()
            kinds = (ids == model.config.image_token_id).long()
            given = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **shown)
            golden[f"{prefix}logits"] = given.logits[0, -8:].numpy()
    return golden


if __name__ == "__main__":
    write_or_check(make, Path(__file__).with_suffix(".npz"))
