"""The rotary embedding of a GGUF file, as the `rope_parameters` of a `config.json`."""

from __future__ import annotations

from typing import Any

import numpy as np

from exporters.checkpoint.gguf.file import GgufFile

Parameters = dict[str, Any]

LONG, SHORT, FREQUENCIES = TENSORS = ("rope_factors_long.weight", "rope_factors_short.weight", "rope_freqs.weight")
_LLAMA3 = (1.0, 4.0, 8192.0)  # low_freq_factor, high_freq_factor and original context of Llama 3.1 and 3.2
_WITH_FREQUENCIES = ("apertus", "arcee", "exaone", "exaone4", "llama", "granite", "smollm3", "gemma4")
_WITH_LONG = ("llama", "granite", "phi3")
_PARTLY = (
    "glm4",
    "gptneox",
    "nemotron",
    "phi2",
    "phi3",
    "qwen35",
    "stablelm",
)  # architectures that rotate a part of a head
_SCALING = ".rope.scaling."
_ATTENTION = (f"{_SCALING}attn_factor", f"{_SCALING}yarn_attn_factor")


def rope_parameters(file: GgufFile, head_dim: int) -> Parameters:
    """The parameters of all layers, or of those with full attention where others have a window.

    Scaling is named in the metadata, or it is a tensor of divisors of the frequencies. As in llama.cpp, a factor
    without a type is linear.

    Raises:
        CheckpointError: a field is wrong, contradicts another, or describes what cannot be computed.
    """
    parameters: Parameters = {"rope_type": "default", "rope_theta": file.number(".rope.freq_base", 10000.0)}
    width = file.size(".rope.dimension_count", head_dim)
    if file.architecture in _PARTLY:
        parameters["partial_rotary_factor"] = width / head_dim
    elif width != head_dim:
        raise file.refusal(".rope.dimension_count", f"{head_dim}, the width of heads", width)
    _check_tensors(file)
    factor = file.number(f"{_SCALING}factor", file.number(".rope.scale_linear", 0.0)) or 1.0
    kind = file.text(f"{_SCALING}type", "linear")
    original = file.size(f"{_SCALING}original_context_length", file.size(".context_length"))
    file.flag(f"{_SCALING}finetuned")  # what was done in training
    if tensors := [name for name in TENSORS if name in file.blocks]:
        if kind == "yarn" or (kind != "none" and factor != 1):
            raise file.refusal(f"{_SCALING}type", "none, since the frequencies are in a tensor", kind)
        if tensors == [FREQUENCIES]:
            return parameters | _divided(file, width)
        if FREQUENCIES in tensors:
            raise file.refusal(FREQUENCIES, f"no such tensor beside {LONG}", "one")
        table = {"rope_type": "longrope", "original_max_position_embeddings": original}
        table |= {"long_factor": factors(file, LONG), "short_factor": factors(file, SHORT)}
        if _ATTENTION[0] in file:
            table["attention_factor"] = file.number(_ATTENTION[0])
        return parameters | table
    if kind == "yarn":
        return parameters | _yarn(file, factor, original)
    if kind not in ("none", "linear"):
        raise file.refusal(f"{_SCALING}type", "none, linear, yarn, or longrope with tensors of factors", kind)
    if kind == "linear" and factor != 1:
        return parameters | {"rope_type": "linear", "factor": factor}
    return parameters


def _check_tensors(file: GgufFile) -> None:
    """Refuse tensors of frequencies that the architecture does not have."""
    known = {FREQUENCIES: _WITH_FREQUENCIES, LONG: _WITH_LONG, SHORT: _WITH_LONG}
    for name in TENSORS:
        if name in file.blocks and file.architecture not in known[name]:
            raise file.refusal(name, f"no such tensor in the architecture {file.architecture}", "one")


def _yarn(file: GgufFile, factor: float, original: int) -> Parameters:
    """The parameters of yarn. `attn_factor` and `yarn_attn_factor` are what multiplies cosines and sines in all.

    That is what converters write there, though llama.cpp multiplies its own factor by the first and leaves the other
    one out: a factor of 1 means either.

    Raises:
        CheckpointError: naming the field that cannot be meant, or is given twice.
    """
    table: Parameters = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    attention = {key: file.number(key) for key in _ATTENTION if key in file}
    for key, value in attention.items():
        if value == 1 and factor > 1:
            raise file.refusal(key, "the factor of cosines and sines, or none for yarn's own", value)
        table["attention_factor"] = value
    if len({*attention.values()}) > 1:
        raise file.refusal(
            _ATTENTION[1], f"{attention[_ATTENTION[0]]:g}, as attn_factor says", attention[_ATTENTION[1]]
        )
    for name in ("beta_fast", "beta_slow"):
        if (key := f"{_SCALING}yarn_{name}") in file:
            table[name] = file.number(key)
    extrapolated = file.number(f"{_SCALING}yarn_ext_factor", 1.0)
    if extrapolated not in (1, -1):  # -1 is llama.cpp's for not given
        raise file.refusal(f"{_SCALING}yarn_ext_factor", "1", extrapolated)
    if logarithm := file.number(f"{_SCALING}yarn_log_multiplier", 0.0):
        table |= {"mscale": 1.0, "mscale_all_dim": logarithm}
    return table


def _divided(file: GgufFile, width: int) -> Parameters:
    """Frequencies that a tensor divides: Llama 3's scaling, of which the largest divisor is the factor, or any other.

    Raises:
        CheckpointError: the tensor is no list of a divisor above 0 for each pair.
    """
    stored = np.asarray(factors(file, FREQUENCIES))
    if stored.shape != (width // 2,) or not (np.isfinite(stored).all() and (stored > 0).all()):
        raise file.refusal(FREQUENCIES, f"{width // 2} divisors of frequencies", stored.tolist())
    low, high, original = _LLAMA3
    factor = float(stored.max())
    plain = file.number(".rope.freq_base", 10000.0) ** (-np.arange(0, width, 2) / width)
    kept = np.clip((original * plain / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    if np.allclose(1 / stored, kept + (1 - kept) / factor, rtol=1e-3):
        bands = {"low_freq_factor": low, "high_freq_factor": high, "original_max_position_embeddings": int(original)}
        return {"rope_type": "llama3", "factor": factor, **bands}
    divisors = stored.tolist()
    longest = file.size(".context_length")
    table = {"rope_type": "longrope", "original_max_position_embeddings": longest, "attention_factor": 1.0}
    return table | {"factor": 1.0, "long_factor": divisors, "short_factor": divisors}


def factors(file: GgufFile, name: str) -> list[float]:
    """A tensor that is a list of float32 numbers.

    Raises:
        CheckpointError: it is missing, or of another type or shape.
    """
    block = file.blocks.get(name)
    if block is None or block.type != "F32" or len(block.shape) != 1:
        raise file.refusal(name, "a list of F32 factors", None if block is None else block.type)
    return [float(factor) for factor in block.data]
