"""From text to encodings: its tokens in windows, and an encoding for every result that was observed on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from edgekv.errors import UsageError
from edgekv.kv import KvDtype
from edgekv.spec import ROPE_SUFFIXES, rope_inputs
from exporters.checkpoint.checkpoint import Checkpoint
from exporters.quantize.recipe import Recipe
from quant import Dtype, Encoding, Range

_LEAST_MASK_DEPTH = 64.0
_U16_SOFTMAX_REACH = 12.0  # exp(-12) is below half a step of a 16-bit probability


@dataclass(frozen=True, slots=True)
class CalibrationText:
    """A text and what the manifest calls it."""

    name: str
    text: str


def read_calibration(path: Path | None) -> CalibrationText:
    """The text of a file, or without one that which ships with edgekv.

    Raises:
        UsageError: the file is no text.
    """
    if path is None:
        default = resources.files("exporters.quantize").joinpath("calibration.txt")
        return CalibrationText("edgekv's own", default.read_text("utf-8"))
    try:
        return CalibrationText(path.name, path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            "--calibration", got=f"{path}: {error}", expected="a UTF-8 text file", fix="Check the path."
        ) from error


def token_windows(checkpoint: Checkpoint, text: str, length: int, most: int | None = None) -> list[NDArray[np.int64]]:
    """The text as windows of `length` token ids that do not overlap, each begun by the BOS token if there is one.

    The last window may be shorter; `most` limits the number of windows.

    Raises:
        UsageError: the text has fewer than two tokens.
    """
    ids = checkpoint.encode(text)
    if len(ids) < 2:
        raise UsageError("text", got=f"{len(ids)} tokens", expected="at least 2", fix="Give a longer text.")
    bos = [] if checkpoint.special.bos is None else [checkpoint.special.bos]
    step = length - len(bos)
    windows = [np.array(bos + ids[start : start + step]) for start in range(0, len(ids), step)]
    if len(windows[-1]) < 2:
        windows.pop()
    return windows[:most]


def calibration_windows(checkpoint: Checkpoint, text: str, length: int, tokens: int) -> list[NDArray[np.int64]]:
    """Windows of a calibration text, all of one length, with this many tokens at most: a shorter one is left out.

    Raises:
        UsageError: the text has fewer than two tokens.
    """
    windows = token_windows(checkpoint, text, length, max(1, tokens // length))
    return [window for window in windows if len(window) == len(windows[0])]


def choose_encodings(ranges: Mapping[str, Range], recipe: Recipe, kv_dtype: KvDtype) -> dict[str, Encoding]:
    """An encoding for every result and every graph input.

    Activations cover all that was seen. Cache tensors are symmetric, with the clipping of least squared error.
    The mask is deep enough that a masked position vanishes from the softmax whatever rows the cache holds there.
    """
    encodings = {
        name: seen.symmetric(kv_dtype) if name.startswith("past_") else seen.asymmetric(recipe.activations)
        for name, seen in ranges.items()
    }
    depth = _LEAST_MASK_DEPTH
    for name, seen in ranges.items():
        if ".scores." in name:
            depth = max(depth, math.ceil(seen.high - seen.low + _U16_SOFTMAX_REACH))
    for name, seen in ranges.items():
        if ".scores." in name:
            masked = name.replace(".scores.", ".masked.")
            encodings[masked] = Encoding.asymmetric(min(seen.low, -depth), seen.high, recipe.activations)
        elif name.endswith(".sigmoid"):
            encodings[name] = Encoding.asymmetric(0.0, 1.0, recipe.activations)
        elif ".tanh" in name:  # as for the sigmoid, the HTP has one range for it, whatever the graph says
            encodings[name] = Encoding.asymmetric(-1.0, 1.0, recipe.activations)
    encodings["probabilities"] = Encoding.asymmetric(0.0, 1.0, recipe.activations)
    encodings["attention_mask"] = Encoding("u16", scale=depth / 65535, zero_point=65535)
    encodings["logits"] = encodings["head"]
    return encodings


def rotation_encodings(attention_factors: Sequence[float], dtype: Dtype = "u16") -> dict[str, Encoding]:
    """Encodings of the cosines and sines of every rotary embedding: from -factor to factor, both ends exact."""
    return {
        name: Encoding(dtype, scale=factor / 32767, zero_point=32768 if dtype == "u16" else 0)
        for suffix, factor in zip(ROPE_SUFFIXES, attention_factors, strict=False)
        for name in rope_inputs(suffix)
    }
