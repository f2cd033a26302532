"""A survey on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from edgekv.machine.decoding import DECODERS
from edgekv.spec import DecoderInterface, DecoderSpec
from exporters.checkpoint.head_range import HeadRange
from exporters.quantize.survey import Outlier, Survey

_TENSORS, _OUTLIER = "survey.safetensors", "outlier.json"


def write_survey(survey: Survey, folder: Path) -> None:
    """Write a survey into a folder."""
    tensors: dict[str, NDArray[Any]] = {tensor.past: rows for tensor, rows in survey.rows.items()}
    tensors["logits"] = survey.logits
    for (layer, head), reach in survey.reach.items():
        at = f"reach.{layer}.{head}"
        tensors |= {f"{at}.pairs": reach.pairs, f"{at}.rest": reach.rest, f"{at}.value": np.array([reach.value])}
    save_file({name: np.ascontiguousarray(values) for name, values in tensors.items()}, folder / _TENSORS)
    (folder / _OUTLIER).write_bytes(msgspec.json.encode(survey.outlier))


def read_survey(folder: Path, spec: DecoderSpec) -> Survey | None:
    """The survey of a folder; None if nothing was surveyed."""
    if not (folder / _TENSORS).exists():
        return None
    tensors = load_file(folder / _TENSORS)
    tensors_of = DecoderInterface.of(spec, spec.max_positions, "u8", "rows", "u16").tensors(range(spec.layers))
    cache = [tensor for tensor in tensors_of if tensor.result != "tail"]
    reach = {}
    for layer, head in dict.fromkeys((tensor.layer, tensor.head) for tensor in cache if tensor.result == "cache"):
        at = f"reach.{layer}.{head}"
        reach[layer, head] = HeadRange(tensors[f"{at}.pairs"], tensors[f"{at}.rest"], float(tensors[f"{at}.value"][0]))
    return Survey(
        DECODERS[Outlier].decode((folder / _OUTLIER).read_bytes()),
        {tensor: tensors[tensor.past] for tensor in cache},
        tensors["logits"],
        reach,
    )
