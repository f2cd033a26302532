"""Collect the speed of language models that Qualcomm publishes, for `devices/published.csv`.

`python -m benchmarks.published_speed FOLDER`, with the unpacked wheel of qai-hub-models in FOLDER: each `perf.yaml` has
the tokens per second of a model on several devices and runtimes.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from devices.published import COLUMNS, FILE

_DECIMAL = re.compile(r"_(\d[_p]\d)b(?:_|$)")
_WHOLE = re.compile(r"_e?(\d+)b(?:_|$)")
_DECIMALS = (
    "jais_6p7b_chat",
    "lfm2_5_1_2b_instruct",
    "qwen3_0_6b",
    "qwen3_1_7b",
    "qwen3_5_0_8b",
    "smollm2_1_7b_it",
    "smolvlm2_2_2b_instruct",
)
_NAMED_OTHERWISE = {"phi_3_5_mini_instruct": 3.8, "phi_4_mini_instruct": 3.8, "granite_4_0_micro": 3.0}


def billions(model: str) -> float:
    """The parameters of a model in 10^9, as its name or its card says."""
    if model in _NAMED_OTHERWISE:
        return _NAMED_OTHERWISE[model]
    match = (_DECIMAL if model in _DECIMALS else _WHOLE).search(model)
    if match is None:
        raise ValueError(f"{model}: got no number of parameters; expected one in its name")
    return float(match[1].replace("_", ".").replace("p", "."))


def rows(folder: Path) -> Iterator[tuple[object, ...]]:
    """A row of the file for each published figure, in the order of models, devices and runtimes."""
    for file in sorted(folder.glob("**/perf.yaml")):
        content = yaml.safe_load(text) if "llm_metrics" in (text := file.read_text("utf-8")) else {}
        for precision, found in content.get("precisions", {}).items():
            for component in found["components"].values():
                for device, runtimes in component.get("performance_metrics", {}).items():
                    for runtime, figures in runtimes.items():
                        for figure in figures.get("llm_metrics", ()):
                            yield _row(file.parent.name, precision, device, runtime, figure)


def _row(model: str, precision: str, device: str, runtime: str, figure: dict[str, Any]) -> tuple[object, ...]:
    prefill = figure.get("prefill_tokens_per_second")
    return (
        model,
        billions(model),
        precision,
        device,
        runtime,
        figure["desired_compute_unit"],
        figure["context_length"],
        "" if prefill is None else f"{prefill:.4g}",
        f"{figure['tokens_per_second']:.4g}",
    )


if __name__ == "__main__":
    with FILE.open("w", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(Path(sys.argv[1])))
