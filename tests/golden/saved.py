"""What transformers' `save_pretrained` writes of each random checkpoint: its config.json and its names of tensors.

Of those that read pictures, it is what their processors write, too.

    python tests/golden/saved.py            write them
    python tests/golden/saved.py --check    write the checkpoints again and compare

Each is read through the product's own door too, and its logits are compared. Needs the extra `parity`. Run it from the
root of the repository.
"""

from __future__ import annotations

import argparse
import copy
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from kept import TOLERANCE
from pictures import (  # it makes torchvision importable
    Gemma3ImageProcessorPil,
    Gemma4ImageProcessorPil,
    GotOcr2ImageProcessorPil,
    Lfm2VlImageProcessor,
    Lfm2VlProcessor,
    Qwen2VLImageProcessorPil,
    Qwen3VLProcessor,
    Qwen3VLVideoProcessor,
    SmolVLMImageProcessorPil,
)
from safetensors.numpy import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    Gemma4AssistantForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.gemma4.feature_extraction_gemma4 import Gemma4AudioFeatureExtractor
from transformers.models.gemma4.processing_gemma4 import Gemma4Processor
from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor

from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.reference import Reference
from tests.support.checkpoints import ARCHITECTURES, as_float32, write_checkpoint, write_drafter
from tests.support.picture_models import (
    write_gemma3_vl,
    write_gemma4_vl,
    write_internvl,
    write_lfm2_vl,
    write_qwen3_vl,
    write_smolvlm,
)

FILE = Path(__file__).with_suffix(".json")
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
MORE: dict[str, Callable[[Path], Path]] = {
    "gemma3-pictures": write_gemma3_vl,
    "gemma4-layered": lambda folder: write_gemma4_vl(folder, clipped=True, layered=True),
    "gemma4-pictures": write_gemma4_vl,
    "internvl": write_internvl,
    "internvl-unbiased": lambda folder: write_internvl(folder, attention_bias=False),
    "lfm2_vl-pictures": write_lfm2_vl,
    "lfm2_vl-plain": lambda folder: write_lfm2_vl(folder, merged_norm=False),
    "qwen3_vl-pictures": write_qwen3_vl,
    "smolvlm": write_smolvlm,
}
MARKS: dict[str, dict[str, str]] = {
    "gemma3-pictures": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
    "gemma4-pictures": {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "video_token": "<|video|>",
        **dict.fromkeys(("audio_token", "boa_token", "eoa_token"), "<|audio|>"),
    },
    "internvl": {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<img>",
    },
    "lfm2_vl-pictures": {
        "image_token": "<image>",
        "image_start_token": "<|image_start|>",
        "image_end_token": "<|image_end|>",
        "image_thumbnail": "<|img_thumbnail|>",
    },
    "qwen3_vl-pictures": {},
    "smolvlm": {},
}
"""Tokens that tokenizers have names for, by the checkpoints whose processors are saved."""


def processor(name: str, folder: Path) -> Any:
    """The processor of a checkpoint; that of pictures alone where the whole one needs another package (SmolVLM)."""
    special = {"bos_token": "<|0|>", "eos_token": "<|1|>", "pad_token": "<|2|>", "extra_special_tokens": MARKS[name]}
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **special)
    if name == "gemma3-pictures":
        return Gemma3Processor(Gemma3ImageProcessorPil.from_pretrained(folder), tokenizer)
    if name == "gemma4-pictures":
        images, sound = Gemma4ImageProcessorPil.from_pretrained(folder), Gemma4AudioFeatureExtractor()
        return Gemma4Processor(sound, images, tokenizer, Gemma4VideoProcessor())
    if name == "internvl":
        images = GotOcr2ImageProcessorPil.from_pretrained(folder)
        return InternVLProcessor(images, tokenizer, InternVLVideoProcessor())
    if name == "lfm2_vl-pictures":
        return Lfm2VlProcessor(Lfm2VlImageProcessor.from_pretrained(folder), tokenizer)
    if name == "qwen3_vl-pictures":
        return Qwen3VLProcessor(Qwen2VLImageProcessorPil.from_pretrained(folder), tokenizer, Qwen3VLVideoProcessor())
    return SmolVLMImageProcessorPil.from_pretrained(folder)


def checkpoints(scratch: Path) -> Iterator[tuple[str, Path, Any]]:
    """Name, folder and class of every checkpoint."""
    for name, fields in ARCHITECTURES.items():
        multimodal = "text_config" in fields
        yield (
            name,
            write_checkpoint(scratch / name, fields, gain=1.0),
            (AutoModelForImageTextToText if multimodal else AutoModelForCausalLM),
        )
    for name, write in MORE.items():
        yield name, write(scratch / name), AutoModelForImageTextToText
    yield "gemma4_assistant", write_drafter(scratch / "drafter", scratch / "gemma4"), Gemma4AssistantForCausalLM


def saved(scratch: Path, name: str, folder: Path, model: Any) -> dict[str, Any]:
    """The configuration, and the names that differ from those of the test's own file, by what is stored."""
    into = scratch / f"{name}-saved"
    fresh = type(model)(copy.deepcopy(model.config))  # a loaded model is saved under the names that were loaded
    fresh.load_state_dict(model.state_dict())
    fresh.save_pretrained(into)
    own, found = as_float32(load_file(folder / "model.safetensors")), load_file(into / "model.safetensors")
    by_value: dict[bytes, list[str]] = {}
    for key, value in own.items():
        if key not in found and np.ptp(value):
            by_value.setdefault(value.tobytes(), []).append(key)
    names = {
        key: _of_same_layer(key, by_value[value.tobytes()])
        for key, value in found.items()
        if key not in own and value.tobytes() in by_value
    }
    for file in folder.iterdir():
        if not (into / file.name).exists():
            shutil.copy(file, into)
    if hasattr(model, "get_image_features") and not (prepared := into / "preprocessor_config.json").exists():
        prepared.write_text("{}")  # all of it has defaults
    record: dict[str, Any] = {"config": json.loads((into / "config.json").read_text()), "names": names}
    if name in MARKS:
        (into / "preprocessor_config.json").unlink()
        processor(name, folder).save_pretrained(into)
        written = [file for file in PROCESSORS if (into / file).exists()]
        record["processor"] = {file: json.loads((into / file).read_text()) for file in written}
    return record


def _of_same_layer(key: str, equal: list[str]) -> str:
    """Which of the tensors with equal values a name stands for: that of its layer, if layers have equal ones."""
    rest = key.partition(".")[2]
    return next((name for name in equal if name.partition(".")[2] == rest), equal[0])


def difference(scratch: Path, name: str, model: Any) -> float:
    """Of the logits of what was saved, read by the exporter, and those of transformers; relative to their range."""
    opened = Checkpoint.open(str(scratch / f"{name}-saved"))
    tokens = np.random.Generator(np.random.PCG64(4)).integers(0, 256, 64)
    with torch.no_grad():
        expected = model(torch.tensor(tokens)[None]).logits[0].numpy()
    (found,) = Reference(opened).logits([tokens])
    return float(np.abs(found - expected).max() / np.ptp(expected))


def make() -> dict[str, dict[str, Any]]:
    """What is saved of each; exits if the exporter reads one otherwise than transformers."""
    found = {}
    with tempfile.TemporaryDirectory() as temporary:
        scratch = Path(temporary)
        for name, folder, architecture in checkpoints(scratch):
            model = architecture.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
            found[name] = saved(scratch, name, folder, model)
            if name != "gemma4_assistant" and (worst := difference(scratch, name, model)) > TOLERANCE:
                sys.exit(f"{name}: logits differ by {worst:.1e} of their range")
        target = Checkpoint.open(str(scratch / "gemma4-saved"))
        Checkpoint.open_drafter(str(scratch / "gemma4_assistant-saved"), target)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    is_check, made = parser.parse_args().check, make()
    if not is_check:
        lines = (f"{json.dumps(name)}: {json.dumps(record, sort_keys=True)}" for name, record in made.items())
        FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n")
        return
    kept = json.loads(FILE.read_text())
    if wrong := [name for name in {*made, *kept} if made.get(name) != kept.get(name)]:
        sys.exit(f"{FILE}: differ: {', '.join(sorted(wrong))}")


if __name__ == "__main__":
    main()
