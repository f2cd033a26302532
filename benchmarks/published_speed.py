"""Collect the speed of language models that Qualcomm publishes, for `devices/published.csv`.

`python -m benchmarks.published_speed FOLDER`, with the unpacked wheel of qai-hub-models in FOLDER: each `perf.yaml` has
the tokens per second of a model on several devices and runtimes. Without a folder it prints the bandwidth that follows
from the file for each chip and runtime, for `devices/speed.py`.
"""

from __future__ import annotations

import csv
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from devices import CATALOGUE, published_speeds
from devices.published import COLUMNS, FILE
from edgekv.spec import Decoder, recipe_weights

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


_CONTEXT, _RECIPE = 4096, "w4a16"
_RUNTIMES = ("genie", "geniex_qairt")
_LLAMA_8B = Decoder(32, 4096, 32, 8, 128, 14336, 128256)
_QWEN_4B = Decoder(36, 2560, 32, 8, 128, 9728, 151936, tied_head=True)
_SHAPES = {
    "falcon_v3_7b_instruct": Decoder(28, 3072, 12, 4, 256, 23040, 131072),
    "llama_v3_1_8b_instruct": _LLAMA_8B,
    "llama_v3_1_sea_lion_3_5_8b_r": _LLAMA_8B,
    "llama_v3_2_1b_instruct": Decoder(16, 2048, 32, 8, 64, 8192, 128256, tied_head=True),
    "llama_v3_2_3b_instruct": Decoder(28, 3072, 24, 8, 128, 8192, 128256, tied_head=True),
    "llama_v3_8b_instruct": _LLAMA_8B,
    "llama_v3_elyza_jp_8b": _LLAMA_8B,
    "llama_v3_taide_8b_chat": _LLAMA_8B,
    "qwen3_0_6b": Decoder(28, 1024, 16, 8, 128, 3072, 151936, tied_head=True),
    "qwen3_1_7b": Decoder(28, 2048, 16, 8, 128, 6144, 151936, tied_head=True),
    "qwen3_4b": _QWEN_4B,
    "qwen3_4b_instruct_2507": _QWEN_4B,
    "qwen3_8b": Decoder(36, 4096, 32, 8, 128, 12288, 151936),
}
"""Of the models whose configuration is known."""

_MIN_PER_S = 1.0
"""Rows of fewer tokens a second are no measurement of a decoder on an NPU."""


def bandwidths(soc: str, runtime: str) -> dict[str, float]:
    """GB/s at which each model reads its weights and the whole cache, by published tokens per second.

    Models that would read more than the peak of the DRAM of some chip are left out for the runtime: they cannot have
    read all of that.
    """
    peaks = {device.soc: device.dram_gb_per_s for device in CATALOGUE}
    found = dict[tuple[str, str], float]()
    for row in published_speeds():
        decoder = _SHAPES.get(row.model)
        which = row.runtime, row.unit, row.context, row.precision
        if decoder is None or which != (runtime, "npu", _CONTEXT, _RECIPE) or row.decode_tokens_per_s < _MIN_PER_S:
            continue
        weights = recipe_weights(decoder, _RECIPE)
        cache_bytes = 2 * decoder.layers * decoder.kv_heads * decoder.head_dim * _CONTEXT
        read_bytes = sum(weights.layer_bytes) + weights.head_bytes + cache_bytes
        found[row.soc, row.model] = read_bytes * row.decode_tokens_per_s / 1e9
    impossible = {model for (chip, model), gb_per_s in found.items() if gb_per_s > peaks.get(chip, gb_per_s)}
    return {model: rate for (chip, model), rate in found.items() if chip == soc and model not in impossible}


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


def show() -> None:
    """Print the span of each chip and runtime."""
    for soc in dict.fromkeys(row.soc for row in published_speeds()):
        for runtime in _RUNTIMES:
            if found := bandwidths(soc, runtime):
                slowest, fastest = (choose(found, key=lambda model: found[model]) for choose in (min, max))
                ends = f"{found[slowest]:.1f} ({slowest}) to {found[fastest]:.1f} ({fastest})"
                print(f"{soc}, {runtime}: {ends}, {len(found)} models")


if __name__ == "__main__" and len(sys.argv) == 1:
    show()
elif __name__ == "__main__":
    with FILE.open("w", newline="") as target:
        writer = csv.writer(target, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows(rows(Path(sys.argv[1])))
